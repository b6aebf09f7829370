# SPDX-License-Identifier: Apache-2.0

"""The properties under trial, and the findings on each."""

import dataclasses

from glance_dedup.base import trialrecord

# Verdicts, from good to bad.
FINE = trialrecord.FINE
LIMITED = trialrecord.LIMITED
UNFIT = trialrecord.UNFIT
_ORDER = (FINE, LIMITED, UNFIT)

#: By property: the title, and the consequence if it is not fine.
PROPERTIES = {
    'owner': (
        'a file belongs to the same user',
        'Hosts would refuse one another\'s files. Give the user the same '
        'number on all of them, and squash none.'),
    'locks': (
        'locks exclude other hosts',
        'Hosts overwrite one another\'s blocks: images are lost. Mount with '
        'locks that the server keeps, or use another file system.'),
    'locks-fall': (
        'locks fall with their holder',
        'What a process had locked when it was killed stays locked: its '
        'groups are never appended to or collected again.'),
    'link': (
        'link fails where the name exists',
        'Two uploads of one image would both be acknowledged. Use another '
        'file system.'),
    'rename': (
        'rename replaces without a gap',
        'A name is missing for a moment while its file is replaced, and for '
        'ever if the host dies just then. The store gives images and groups a '
        'second name meanwhile. If names lead to mixtures, images are lost: '
        'use another file system.'),
    'new-names': (
        'names that others made are seen',
        'Only a directory that is opened shows them at once. The store opens '
        'it before it says that an image is missing.'),
    'names-asked': (
        'opening a directory shows its names',
        'An image that another host stored may not be found, and may be '
        'taken for deleted, which loses it. Mount without a cache of names '
        '(NFS: lookupcache=none), or use another file system.'),
    'close-to-open': (
        'opening shows what was closed',
        'An open file, or one that a process of the host has open, may show '
        'old bytes. What is decided is read beside the page cache.'),
    'pages': (
        'opening shows what was synced, while others read',
        'The page cache of a host keeps old bytes. What is decided is read '
        'beside it, and a block of an image that does not verify is read '
        'again.'),
    'fsync': (
        'O_DIRECT shows what was synced, while others read',
        'Hosts read one another\'s files as they were: they overwrite one '
        'another\'s blocks, and images are lost. Use another file system.'),
    'maps': (
        'files can be mapped as memory',
        'The catalog cannot be read, so no task of the maintainer works. '
        'Mount with other options (GlusterFS: without '
        'direct-io-mode=enable).'),
    'database': (
        'another host opens a database',
        'The catalog would be made again at each change of the maintainer. '
        'Use another file system.'),
    'unlinked': (
        'an open file stays when it is unlinked',
        'The download of an image that another host deletes meanwhile breaks '
        'off. Files of groups are opened anew.'),
    'punch': (
        'holes can be punched',
        'Freed blocks keep their space until their group is rewritten.'),
    'clocks': (
        'clocks agree within two seconds',
        'Nothing of the store depends on them. Times that are shown, and '
        'tokens, do.'),
}

_LIMITED_ONLY = {'rename', 'new-names', 'close-to-open', 'pages', 'unlinked',
                 'punch', 'clocks'}


@dataclasses.dataclass
class Finding:
    """Findings on one property, over all hosts.

    :ivar key: of :data:`PROPERTIES`
    :ivar seconds: time until a change was seen; None: no host waited
    :ivar detail: the observation that is not fine
    """

    key: str
    verdict: str
    seconds: float | None = None
    detail: str = ''

    @property
    def title(self) -> str:
        """The property, as people call it."""
        return PROPERTIES[self.key][0]

    @property
    def meaning(self) -> str:
        """Return the consequence and the remedy; '' if the verdict is fine."""
        return '' if self.verdict == FINE else PROPERTIES[self.key][1]


class Findings:
    """Return the findings of this host, then those of all.

    :ivar by_key: a finding for each property, in the order of the table
    """

    def __init__(self) -> None:
        self.by_key = {key: Finding(key, FINE) for key in PROPERTIES}

    def find(self, key: str, good: bool, seconds: float | None = None,
             detail: str = '') -> None:
        """Take in the findings of this host."""
        self.add(key, FINE if good else LIMITED if key in _LIMITED_ONLY
                 else UNFIT, seconds, detail)

    def add(self, key: str, verdict: str, seconds: float | None,
            detail: str) -> None:
        """Take in a verdict; the worse one counts, and the longer time."""
        finding = self.by_key[key]
        if _ORDER.index(verdict) > _ORDER.index(finding.verdict):
            finding.verdict, finding.detail = verdict, detail
        if seconds is not None:
            finding.seconds = max(finding.seconds or 0.0, seconds)
