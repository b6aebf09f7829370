# SPDX-License-Identifier: Apache-2.0

"""SQLite in a Glance of tests: a transaction waits for the lock at its start.

SQLite takes one writer at a time. Otherwise a transaction that has read, and
now writes, fails at once with "database is locked" if another one writes,
however long it may wait, because both could wait for each other. Glance
repeats such a transaction with other databases, but not with SQLite.
"""

from sqlalchemy import engine
from sqlalchemy import event


@event.listens_for(engine.Engine, 'before_cursor_execute', retval=True)
def begin(connection, cursor, statement, parameters, context, executemany):
    if statement == 'BEGIN' and connection.dialect.name == 'sqlite':
        statement = 'BEGIN IMMEDIATE'
    return statement, parameters
