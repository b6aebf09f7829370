# SPDX-License-Identifier: Apache-2.0
"""MariaDB: a server of the cloud's own, its data in the cloud's directory.

It runs as the user that starts the cloud, root too: it serves only this cloud,
and no other user could enter a directory that may be private.
"""

import os
import pathlib
import shutil
import tempfile

import pymysql

from tests.cloud import cloud_service

_PROGRAM = '/usr/sbin/mariadbd'
# One user for all services, whose databases have different names.
_USER = 'openstack'
_KEPT = cloud_service.TOP / '.services' / 'databases'


class MariaDB(cloud_service.Service):
    name = 'mariadb'
    title = 'MariaDB'

    @property
    def socket(self):
        return self.cloud.directory / 'mariadb.sock'

    @property
    def address(self):
        return f'127.0.0.1:{self.port}'

    def environment(self):
        return {**super().environment(), 'PATH': '/usr/sbin:/usr/bin:/bin'}

    def _options(self):
        return {
            'no-defaults': None,
            'user': pathlib.Path(self.cloud.directory).owner(),
            'datadir': self.directory / 'data',
            'tmpdir': self.cloud.directory / 'tmp',
            'socket': self.socket,
            'pid-file': self.directory / 'pid',
            'bind-address': '127.0.0.1',
            'port': self.port,
            'max-connections': 1000,
            'skip-name-resolve': None,
            # Data in the operating system's cache survives the server's death:
            # enough here, where only processes die. Making tables is quicker
            # so.
            'innodb-flush-log-at-trx-commit': 2,
            'innodb-flush-method': 'nosync',
            'innodb-doublewrite': 0,
            'innodb-file-per-table': 0,
            'sync-frm': 0,
            'innodb-buffer-pool-size': '64M',
            'innodb-log-file-size': '48M',
            'performance-schema': 0,
        }

    def prepare(self):
        shutil.rmtree(self.directory / 'data', ignore_errors=True)
        self.run([
            'mariadb-install-db', '--no-defaults', '--skip-test-db',
            '--auth-root-authentication-method=normal',
            f'--user={self._options()["user"]}',
            f'--datadir={self.directory}/data'])

    def launch(self):
        if not pathlib.Path(_PROGRAM).exists():
            raise cloud_service.CloudError(
                f'{_PROGRAM} is missing; install the package mariadb-server')
        # A killed server leaves it behind.
        self.socket.unlink(missing_ok=True)
        self.spawn([_PROGRAM, *(
            f'--{name}' if value is None else f'--{name}={value}'
            for name, value in self._options().items())])

    def answers(self):
        self.connect().close()
        return True

    def connect(self):
        """Return a connection as MariaDB's root, through its Unix socket."""
        return pymysql.connect(
            unix_socket=str(self.socket), user='root', autocommit=True,
            connect_timeout=30, read_timeout=120)

    def provide(self, user, distribution, names, migrate):
        """Make databases with the tables that a service needs.

        Migrations, step by step from a release of years ago, take most of the
        time in which a cloud starts; so their result is kept for the next
        cloud with the same version of the service.

        :param user: the service that owns them
        :param distribution: the Python distribution whose version counts
        :param names: of the databases; the kept file has the first name
        :param migrate: called to have the service make its tables
        """
        self._make(names)
        kept = self.kept(user, distribution, names[0])
        if not self.restore(user, kept):
            migrate()
            self.keep(user, names, kept)

    def _make(self, names):
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(
                f"CREATE USER IF NOT EXISTS {_USER}@'%%' IDENTIFIED BY %s",
                [self.cloud.password])
            for name in names:
                cursor.execute(f'DROP DATABASE IF EXISTS {name}')
                cursor.execute(f'CREATE DATABASE {name} CHARACTER SET utf8mb3')
                cursor.execute(f"GRANT ALL ON {name}.* TO {_USER}@'%'")

    def kept(self, user, distribution, name):
        """Return the path of the file kept for a version of a service."""
        version = cloud_service.version(user.prefix, distribution)
        return _KEPT / f'{name}-{version}.sql'

    def keep(self, user, names, kept):
        """Write databases to a file, for later clouds."""
        kept.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(
                dir=kept.parent, prefix=kept.name, delete=False) as new:
            user.run(['mariadb-dump', *self._client,
                      f'--result-file={new.name}', '--databases', *names])
        os.replace(new.name, kept)

    def restore(self, user, kept):
        """Fill databases from a file; return False if there is none."""
        if not kept.exists():
            return False
        user.run(['mariadb', *self._client, f'--execute=source {kept}'])
        return True

    @property
    def _client(self):
        return ['--no-defaults', f'--socket={self.socket}', '--user=root']

    def database(self, name):
        """Return the URL of a database."""
        return (f'mysql+pymysql://{_USER}:{self.cloud.password}'
                f'@127.0.0.1:{self.port}/{name}?charset=utf8')
