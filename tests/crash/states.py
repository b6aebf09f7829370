# SPDX-License-Identifier: Apache-2.0

"""Chooses the states to try among those that a crash may leave.

Each strategy makes one :class:`filesystem.Choice` from the volatile data at a
point; the random ones use the seed, the point, their name and a number, so
that each can be made again.
"""

import random

from tests.crash import filesystem

SECTOR = filesystem.SECTOR
Choice = filesystem.Choice

STRATEGIES = {}
#: Strategies that have one state for each point.
SINGLE = set()


def _strategy(single=False):
    def register(function):
        name = function.__name__.replace('_', '-')
        STRATEGIES[name] = function
        if single:
            SINGLE.add(name)
        return function
    return register


#: Not of a crash of the machine: see survivor.py.
SURVIVOR = 'survivor'
#: Strategies in which a process was killed, and the machine went on.
KILLED = ('kill', 'kill-short', SURVIVOR)


def choose(fs, strategy, seed, number):
    """Return a choice; None if the strategy has none at this point."""
    rng = random.Random(f'{seed} {fs.number} {strategy} {number}')
    return STRATEGIES[strategy](fs, rng)


# -- of a whole file ----------------------------------------------------------

def _kept(file, which):
    """Return a file's kept changes, with its length after them."""
    last = max((i for i, kept in enumerate(which) if kept is not None),
               default=-1)
    return which, last


def _torn(rng, change, unit):
    """Return some of the sectors of a change, in units of so many bytes."""
    units = sorted({s * SECTOR // unit for s in change.sectors})
    if rng.random() < 0.5:
        # Up to a place, or from it.
        place = rng.randrange(len(units) + 1)
        kept = set(units[:place] if rng.random() < 0.7 else units[place:])
    else:
        kept = {u for u in units if rng.random() < 0.5}
    return frozenset(s for s in change.sectors if s * SECTOR // unit in kept)


def _items(fs):
    """Return all volatile items: (File, number) and (Directory, name)."""
    return ([(f, i) for f in fs.changed_files()
             for i in range(len(f.changes))]
            + fs.changed_names())


def _set(choice, item, kept):
    """Keep one item, or lose it; the rest is as it was chosen."""
    owner, which = item
    if isinstance(owner, filesystem.Directory):
        choice.versions[owner, which] = (
            len(owner.events[which]) if kept else 0)
        return
    before = choice.files.get(owner)
    kinds = list(before[0]) if before else (
        [True if choice.data else None] * len(owner.changes))
    kinds[which] = True if kept else None
    choice.files[owner] = _kept(owner, kinds)


# -- the strategies -----------------------------------------------------------

@_strategy(single=True)
def kill(fs, rng):
    """Nothing is lost: the process was killed."""
    return Choice()


@_strategy(single=True)
def kill_short(fs, rng):
    """The process was killed in the middle of a write."""
    for file in fs.changed_files():
        change = file.changes[-1]
        if change.number == fs.number - 1 and len(change.sectors) > 1:
            sectors = sorted(change.sectors)
            kept = frozenset(sectors[:rng.randrange(1, len(sectors))])
            choice = Choice()
            data = file.content([True] * (len(file.changes) - 1) + [kept],
                                len(file.changes) - 1)
            end = min(len(data), max(
                (max(kept) + 1) * SECTOR,
                file.changes[-2].length if len(file.changes) > 1
                else len(file.durable)))
            choice.contents[file] = data[:end]
            return choice
    return None


@_strategy(single=True)
def lost(fs, rng):
    """All data and names that were not synced are lost."""
    return Choice(data=False, names=False) if _items(fs) else None


@_strategy(single=True)
def names_only(fs, rng):
    """All names exist, and no data."""
    return Choice(data=False) if fs.changed_files() else None


@_strategy(single=True)
def data_only(fs, rng):
    """All data exists, and no names."""
    return Choice(names=False) if fs.changed_names() else None


@_strategy()
def one_lost(fs, rng):
    """One write, or one name, is lost; all others exist."""
    items = _items(fs)
    if not items:
        return None
    choice = Choice()
    _set(choice, rng.choice(items), False)
    return choice


@_strategy()
def one_kept(fs, rng):
    """One write, or one name, exists; all others are lost."""
    items = _items(fs)
    if not items:
        return None
    choice = Choice(data=False, names=False)
    _set(choice, rng.choice(items), True)
    return choice


def _tear(fs, rng, unit):
    files = fs.changed_files()
    if not files:
        return None
    choice = Choice(data=rng.random() < 0.7, names=rng.random() < 0.8)
    file = rng.choice(files)
    # Mostly the last change, for which much of the older data is gone.
    which = (len(file.changes) - 1 if rng.random() < 0.5
             else rng.randrange(len(file.changes)))
    kinds = [True if choice.data else None] * len(file.changes)
    if rng.random() < 0.5:
        kinds = [True] * which + kinds[which:]
    kinds[which] = _torn(rng, file.changes[which], unit)
    choice.files[file] = _kept(file, kinds)
    return choice


@_strategy()
def torn_512(fs, rng):
    """Some sectors of a write exist."""
    return _tear(fs, rng, 512)


@_strategy()
def torn_4096(fs, rng):
    """Some pages of a write exist."""
    return _tear(fs, rng, 4096)


@_strategy()
def reordered(fs, rng):
    """In a file an earlier write is lost, and a later one exists."""
    files = [f for f in fs.changed_files() if len(f.changes) > 1]
    if not files:
        return None
    choice = Choice(data=rng.random() < 0.5, names=rng.random() < 0.8)
    for file in files:
        place = rng.randrange(1, len(file.changes))
        choice.files[file] = _kept(file, [
            None if i < place else True for i in range(len(file.changes))])
    return choice


@_strategy()
def directory(fs, rng):
    """One directory loses its new names, or it alone keeps them."""
    directories = [d for d in fs.directories if d.events]
    if not directories:
        return None
    alone = rng.random() < 0.3
    choice = Choice(names=not alone, data=rng.random() < 0.8)
    chosen = rng.choice(directories)
    for name in chosen.events:
        _set(choice, (chosen, name), alone)
    return choice


@_strategy()
def mixture(fs, rng):
    """Each sector, each length and each name is chosen by chance."""
    if not _items(fs):
        return None
    choice = Choice()
    share = rng.choice([0.1, 0.5, 0.5, 0.9])
    tearing = rng.choice([0, 0.2, 0.8])
    for file in fs.changed_files():
        kinds = [
            _torn(rng, change, 512) if rng.random() < tearing
            else True if rng.random() < share else None
            for change in file.changes]
        kinds, length = _kept(file, kinds)
        if rng.random() < 0.3:
            length = rng.randrange(-1, len(file.changes))
        choice.files[file] = kinds, length
    for directory, name in fs.changed_names():
        events = directory.events[name]
        choice.versions[directory, name] = (
            rng.randrange(len(events) + 1) if rng.random() < 0.3
            else len(events) if rng.random() < share else 0)
    return choice


@_strategy()
def journalled(fs, rng):
    """Names and lengths are those of one moment; data is chosen by chance."""
    numbers = sorted({event.number for d in fs.directories
                      for events in d.events.values()
                      for event, _ in events}
                     | {c.number for f in fs.changed_files()
                        for c in f.changes})
    if not numbers:
        return None
    # A sync of anything includes all earlier changes.
    moment = rng.choice([n for n in numbers if n >= fs.synced]
                        or [fs.number])
    data = rng.choice(['all', 'none', 'some'])
    choice = Choice()
    for file in fs.changed_files():
        before = [c.number < moment for c in file.changes]
        if data == 'some':
            kinds = [True if rng.random() < 0.5 else None
                     for _ in file.changes]
        else:
            kinds = [True if data == 'all' else None] * len(before)
        choice.files[file] = kinds, before.count(True) - 1
    for directory, name in fs.changed_names():
        choice.versions[directory, name] = sum(
            event.number < moment for event, _ in directory.events[name])
    return choice
