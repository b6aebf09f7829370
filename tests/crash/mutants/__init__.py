# SPDX-License-Identifier: Apache-2.0

"""Bugs put in on purpose, to show that the tests find them.

A mutant is a small change to the engine or to the maintainer by which a rule
of the guide is broken. :data:`MUTANTS` has them all, from one module for each
part of the store; a new rule of ordering or a new layout gets a mutant there.
Each names the test that must notice it: a workload of the crash explorer, or,
if a crash alone shows nothing, ordinary tests. ``test_mutants.py`` verifies
it.

``mutant_trees.py`` makes a tree with one mutant in it. By hand::

    python -m tests.crash.mutants                   # lists them
    python -m tests.crash.mutants NAME DIRECTORY    # makes a tree of one
    cd DIRECTORY; PYTHONPATH=. python -m pytest tests/...
"""

from tests.crash.mutants import accounting
from tests.crash.mutants import backups
from tests.crash.mutants import disks
from tests.crash.mutants import features
from tests.crash.mutants import layout
from tests.crash.mutants import maintenance
from tests.crash.mutants import transactions
from tests.crash.mutants import volumes

MUTANTS = (
    *transactions.MUTANTS,
    *accounting.MUTANTS,
    *maintenance.MUTANTS,
    *volumes.MUTANTS,
    *features.MUTANTS,
    *disks.MUTANTS,
    *backups.MUTANTS,
    *layout.MUTANTS,
)
