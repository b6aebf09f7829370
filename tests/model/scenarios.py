# SPDX-License-Identifier: Apache-2.0

"""Scenarios of the protocol's model.

A scenario is a few processes and the events that may happen to them; Spin
tries every order of their steps. No scenario has everything, since the states
of one process multiply with those of the others. So each mutant names a
scenario in which its rule matters.
"""

import dataclasses

# The bits of disk.pml.
_PARTS = {'writer': 1, 'second writer': 2, 'third writer': 4, 'delete': 8,
          'second delete': 16, 'reader': 32, 'helper': 128}
_EVENTS = {'caches': 1, 'failures': 2, 'losses': 4, 'merges': 8, 'misses': 16,
           'stays': 32, 'suspends': 64, 'aborts': 128, 'drops': 256,
           'gaps': 512, 'pages': 1024}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Processes beside the maintainer, and the possible events."""

    about: str
    parts: tuple[str, ...]
    events: tuple[str, ...] = ()
    crashes: int = 0
    """How often the machine may crash."""
    kills: int = 0
    """How many processes may be killed."""
    same_id: bool = False
    """Both writers store an image of one id."""
    other: bool = False
    """The second writer's block is another one than the first's."""
    two: bool = False
    """The first writer's image has two blocks, counted in two steps."""
    stored: bool = False
    """Image 1, of the first writer, is there from the start."""
    copy: bool = False
    """Its block is in the group twice."""
    tail: bool = False
    """The group has a block of a writer that died after its sync failed."""
    alone: bool = False
    """There is no maintainer."""
    is_large: bool = False
    """It takes minutes."""
    is_open: bool = False
    """No search of it has come to its end."""

    def settings(self) -> dict[str, int]:
        """Return the variables that configure the checker."""
        return {'PARTS': sum(_PARTS[part] for part in self.parts),
                'MAY_HAPPEN': sum(_EVENTS[event] for event in self.events),
                'CRASHES': self.crashes, 'KILLS': self.kills,
                'SAME_ID': self.same_id, 'OTHER': self.other,
                'TWO': self.two, 'STORED': self.stored,
                'COPY': self.copy, 'TAIL': self.tail,
                'ALONE': self.alone, 'MUTANT': 0}


_BOTH = ('writer', 'second writer')

SCENARIOS = {
    'sharing': Scenario(
        'an image is deleted while another one is stored with its block',
        (*_BOTH, 'delete')),
    'same-id': Scenario(
        'two uploads of one image id, which may be given up',
        _BOTH, ('aborts',), same_id=True),
    'storing': Scenario(
        'the machine crashes while two images are stored',
        _BOTH, crashes=1, other=True),
    'failing': Scenario(
        'two images are stored without a maintainer, and syncs fail',
        _BOTH, ('failures', 'misses'), crashes=1, kills=1, alone=True),
    'tail': Scenario(
        'two writers find a block that a dead one did not publish, and the '
        'machine crashes',
        ('second writer', 'third writer'), crashes=1, other=True, tail=True,
        alone=True),
    'deleting': Scenario(
        'an image is stored and deleted; a process is killed, and the machine '
        'crashes and takes back what the catalog had synced',
        ('writer', 'delete'), ('losses',), crashes=1, kills=1),
    'failing-delete': Scenario(
        'the fsyncs of a commit and of a delete fail',
        ('writer', 'delete'), ('failures',)),
    'cut-off-delete': Scenario(
        'a delete may lose its locks, and the machine crashes',
        ('writer', 'delete'), ('drops',), crashes=1),
    'two-deletes': Scenario(
        'two deletes of one image, of which one may be killed',
        ('writer', 'delete', 'second delete'), kills=1),
    'reading': Scenario(
        'an image is read while it is deleted, and a process is killed',
        ('writer', 'delete', 'reader'), kills=1),
    'reading-for-ever': Scenario(
        'a reader of an image never goes away',
        ('writer', 'reader'), ('stays',)),
    'steps': Scenario(
        'an image that is counted in two steps is read and deleted, and a '
        'process is killed',
        ('writer', 'delete', 'reader'), kills=1, two=True),
    'caches': Scenario(
        'a writer believes a store that it loaded before; an image is '
        'deleted, and a process is killed',
        ('second writer', 'delete'), ('caches',), kills=1, stored=True),
    'caches-crash': Scenario(
        'the same, and the machine crashes',
        ('second writer', 'delete'), ('caches',), crashes=1, stored=True),
    'merging': Scenario(
        'an image is merged and deleted; a process is killed, and the machine '
        'crashes',
        ('delete',), ('merges',), crashes=1, kills=1, stored=True, copy=True),
    'merging-again': Scenario(
        'an image is merged and deleted, and another upload has its id',
        ('third writer', 'delete'), ('merges',), kills=1, stored=True,
        copy=True, is_large=True),
    'merging-twins': Scenario(
        'the twin of an image is stored, and the two are merged',
        ('second writer',), ('merges', 'misses'), stored=True),
    'pages': Scenario(
        'two images are stored, and a host has old pages',
        _BOTH, ('pages',), kills=1, other=True),
    'pages-deleting': Scenario(
        'an image is deleted while another one is stored with its block, and '
        'a host has old pages',
        ('second writer', 'delete'), ('pages',), kills=1, stored=True),
    'replacing': Scenario(
        'an image is merged where a rename has a gap, read and deleted, and a '
        'process is killed',
        ('delete', 'reader'), ('merges', 'gaps'), kills=1, stored=True,
        copy=True),
    'replacing-again': Scenario(
        'the same, while another upload has its id',
        ('third writer',), ('merges', 'gaps'), kills=1, stored=True,
        copy=True),
    'helping': Scenario(
        'a helper rewrites the group of an image that is deleted; it may lose '
        'its lease, and a process is killed',
        ('delete', 'helper'), ('suspends',), kills=1, two=True, stored=True),
    'helping-crash': Scenario(
        'the same, and the machine crashes',
        ('delete', 'helper'), ('suspends',), crashes=1, two=True,
        stored=True),
    'helping-killed': Scenario(
        'a process is killed while a helper rewrites the group, and then the '
        'machine crashes',
        ('delete', 'helper'), crashes=1, kills=1, two=True, stored=True),
    'helping-writers': Scenario(
        'the same, while an image is stored and makes the group full',
        ('second writer', 'helper'), ('suspends', 'misses'), crashes=1,
        kills=1, stored=True),
    'helping-all': Scenario(
        'a helper, a writer, a delete and a reader; a process is killed, and '
        'the machine crashes',
        ('second writer', 'delete', 'reader', 'helper'),
        ('suspends', 'caches'), crashes=1, kills=1, two=True, stored=True,
        is_large=True, is_open=True),
    'caches-all': Scenario(
        'two writers believe stores that they loaded before',
        (*_BOTH, 'delete'), ('caches',), crashes=1, kills=1,
        is_large=True, is_open=True),
    'merging-all': Scenario(
        'two writers, a delete and merging; a process is killed, and the '
        'machine crashes',
        (*_BOTH, 'delete'), ('merges', 'misses', 'losses'), crashes=1,
        kills=1, is_large=True, is_open=True),
    'storm': Scenario(
        'two writers, a delete and a reader, and a process is killed',
        (*_BOTH, 'delete', 'reader'), kills=1, is_large=True, is_open=True),
    'two-crashes': Scenario(
        'the machine crashes twice while an image is stored and deleted',
        ('writer', 'delete'), ('losses',), crashes=2, kills=1,
        is_large=True),
}

# The scenario that finds each mutant, and the property that fails.
FOUND_IN = {
    'counted-twice': ('deleting', 'I9_no_count_is_too_low'),
    'fence-not-compared': ('deleting', 'I9_no_count_is_too_low'),
    'fence-not-written-at-start': ('deleting', 'I9_no_count_is_too_low'),
    'rebuild-valid-too-early': ('deleting', 'I9_no_count_is_too_low'),
    'writer-not-asked': ('deleting', 'I9_no_count_is_too_low'),
    'writers-lock-not-held': ('deleting', 'I9_no_count_is_too_low'),
    'no-second-look': ('deleting', 'I9_no_count_is_too_low'),
    'unfinished-delete-done': ('deleting', 'I9_no_count_is_too_low'),
    'not-counted': ('deleting', 'I9_no_count_is_too_low'),
    'no-fence': ('deleting', 'I9_no_count_is_too_low'),
    'fence-not-synced': ('deleting', 'I9_no_count_is_too_low'),
    'unlinked-before-the-batch': ('deleting', 'I9_no_count_is_too_low'),
    'spool-not-synced': ('deleting', 'I9_no_count_is_too_low'),
    'one-byte': ('deleting', 'N11_live_recipe_does_not_refuse'),
    'delete-under-way-settled': ('deleting', 'I8_nothing_leaks'),
    'no-sync-after-the-look': ('deleting', 'I8_nothing_leaks'),
    'holes-before-the-entries': ('deleting', 'I8_nothing_leaks'),
    'delete-spool-not-synced': ('deleting', 'I8_nothing_leaks'),
    'recipe-not-synced': ('deleting', 'I1_committed_image_can_be_read'),
    'images-not-synced': ('deleting', 'I8_acknowledged_image_is_there'),
    'deleted-by-rename': ('deleting', 'I11_deleted_image_stays_away'),
    'delete-images-not-synced': ('deleting', 'I11_deleted_image_stays_away'),
    'locks-before-the-look': ('reading-for-ever', 'I8_nothing_leaks'),
    'reader-not-asked': ('reading', 'I12_reader_finds_its_blocks'),
    'no-pins': ('reading', 'I12_reader_finds_its_blocks'),
    'read-without-a-lock': ('reading', 'I12_reader_finds_its_blocks'),
    'readers-name-not-checked': ('reading', 'I12_reader_finds_its_blocks'),
    'counted-in-part-not-taken-back': ('steps', 'I8_nothing_leaks'),
    'begun-not-pinned': ('steps', 'I12_reader_finds_its_blocks'),
    'no-exclusive-lock': ('sharing', 'I1_committed_image_can_be_read'),
    'verified-before-the-lock': ('sharing', 'I1_committed_image_can_be_read'),
    'shared-lock-released-early': (
        'sharing', 'I1_committed_image_can_be_read'),
    'locks-not-counted': ('sharing', 'I1_committed_image_can_be_read'),
    'judged-before-the-lock': ('sharing', 'I9_no_count_is_too_low'),
    'spool-file-not-taken': ('sharing', 'I9_no_count_is_too_low'),
    'name-not-checked': ('sharing', 'I9_no_count_is_too_low'),
    'opened-before-the-locks': ('helping', 'I8_nothing_leaks'),
    'entries-before-the-generation': (
        'caches', 'I1_committed_image_can_be_read'),
    'store-believed': ('caches', 'I1_committed_image_can_be_read'),
    'loaded-without-the-lock': ('caches', 'I1_committed_image_can_be_read'),
    'generation-not-synced': (
        'caches-crash', 'I1_committed_image_can_be_read'),
    'tail-overwritten': ('storing', 'I1_committed_image_can_be_read'),
    'tail-not-written-again': ('tail', 'I1_committed_image_can_be_read'),
    'tail-not-verified': ('tail', 'I1_committed_image_can_be_read'),
    'published-before-the-sync': ('tail', 'I1_committed_image_can_be_read'),
    'group-not-synced': ('tail', 'I1_committed_image_can_be_read'),
    'link-replaces': ('same-id', 'I8_acknowledged_image_is_there'),
    'aborted-after-the-link': ('failing-delete', 'I9_no_count_is_too_low'),
    'unlinked-after-the-link': ('failing-delete', 'I8_nothing_leaks'),
    'failed-delete-taken-back': ('failing-delete', 'I8_nothing_leaks'),
    'entry-not-looked-for': ('cut-off-delete', 'I8_nothing_leaks'),
    'no-image-lock': ('merging', 'I8_nothing_leaks'),
    'merge-spool-not-synced': ('merging', 'I8_nothing_leaks'),
    'merge-without-image-lock': ('merging', 'I8_nothing_leaks'),
    'merge-entry-not-synced': ('merging', 'I8_nothing_leaks'),
    'replacement-not-verified': ('merging', 'I1_committed_image_can_be_read'),
    'merged-recipe-not-synced': ('merging', 'I1_committed_image_can_be_read'),
    'old-recipe-not-compared': (
        'merging-again', 'I11_deleted_image_stays_away'),
    'no-entry-for-the-old': ('merging-twins', 'I8_nothing_leaks'),
    'old-record-appended-to': ('pages', 'I1_committed_image_can_be_read'),
    'old-entries-found': ('pages-deleting', 'I1_committed_image_can_be_read'),
    'old-entries-collected': ('pages', 'I8_nothing_leaks'),
    'old-recipe-judged': ('pages', 'I9_no_count_is_too_low'),
    'no-second-name': ('replacing', 'I8_acknowledged_image_is_there'),
    'second-name-not-looked-for': (
        'replacing', 'I8_acknowledged_image_is_there'),
    'names-not-settled': ('replacing', 'I1_committed_image_can_be_read'),
    'delete-does-not-settle': ('replacing', 'I11_deleted_image_stays_away'),
    'commit-without-image-lock': (
        'replacing-again', 'I8_acknowledged_image_is_there'),
    'new-group-not-synced': (
        'helping-crash', 'I1_committed_image_can_be_read'),
    'helper-without-exclusive-lock': ('helping', 'I8_nothing_leaks'),
    'group-not-compared': ('helping', 'I8_nothing_leaks'),
    'generation-not-compared': ('helping', 'I8_nothing_leaks'),
    'next-holder-does-not-settle': ('helping-killed', 'I8_nothing_leaks'),
}

# Mutants that Spin does not find: another rule makes up for each. The scenario
# is the one in which a search would find it.
BACKED_UP = {
    'rebuild-without-sync': (
        'deleting',
        'A link that a crash takes back leaves the entry T, which was '
        'durable before it (N8.2); an unlink leaves D (N9.4).'),
    'rebuild-goes-on': (
        'deleting',
        'The ledger keys say what was counted (N1), and an image that was '
        'deleted meanwhile has an entry.'),
    'readers-lock-not-held': (
        'reading',
        'A reader that locks later sees that the name has changed (N11).'),
    'poisoned-group-used': (
        'failing',
        'The next lessee writes the tail again (N7.3), as it must for a '
        'writer that was killed before it could poison the group.'),
    'deleter-without-byte-1': (
        'deleting',
        'An entry that is settled in the middle of a delete is so after an '
        'fsync (N5.1), and once (N1).'),
    'exchanged-before-the-counts': (
        'merging',
        'M keeps its name in the spool (N10.6), so the accounting counts it '
        '(N5) before anything is freed (N6.2).'),
    'exchange-not-synced': (
        'merging',
        'Accounting fsyncs images/ before it un-counts the old recipe '
        '(N5.1).'),
    'helper-without-lease': (
        'helping-crash',
        'The exclusive lock and the look under it are enough (N12.3, N12.4).'
        ' The lease saves work that would be in vain.'),
    'old-group-not-synced': (
        'helping-crash',
        'What a sealed group has was synced before it was published (N7.4).'),
    'generation-kept': (
        'helping-killed',
        'A cached store is believed only of the very file that it was loaded'
        ' from (N7.2).'),
    'helper-takes-any-group': (
        'helping-writers',
        'What is appended changes the record and the entries, which the '
        'helper compares (N12.4).'),
}

# Rules without a mutant that is found, and the reasons.
WITHOUT_MUTANT = {
    'N2.4':
        'See rebuild-goes-on. What a rebuild that failed may have left is '
        'not known, so it starts again.',
    'N4.5':
        'It is no step: it says what the steps before it have found.',
    'N6.5':
        'A lock that is never released costs duplicates, which the model '
        'does not have.',
    'N9.2':
        'See deleter-without-byte-1.',
    'N9.7':
        'As N6.5.',
    'N10.3':
        'See exchanged-before-the-counts. It is needed where M cannot be '
        'read later.',
    'N10.6':
        'The model has no temporary name. M in place of X would only lose '
        'what N10.3 counted already.',
    'N10.7':
        'See exchange-not-synced.',
    'N12.1':
        'See helper-without-lease and helper-takes-any-group: N12.3 and '
        'N12.4 make up for both.',
    'N13.2':
        'A file that stays open shows old pages later, as in N13.1.',
    'N13.3':
        'Reading verifies each block. What does not verify is read again as '
        'N13.1 says, so only the price differs.',
    'N13.4':
        'A file that is open in the model can be read for ever. Where a '
        'server forgets it, the rule saves a refused request, and no block.',
    'N12.5':
        'It is the rename itself. That it replaces the name in one step is '
        'what the file system must do.',
    'N15.1':
        'The model has programs of one release, which know all features.',
    'N15.2':
        'As N15.1.',
    'N15.3':
        'As N15.1.',
}
