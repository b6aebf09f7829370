# SPDX-License-Identifier: Apache-2.0

"""Damaged blocks: marks them, reports the images that need them, heals them.

Marking copies a block's stored bytes to ``quarantine/``, and notes in the
block's entry that no look-up may return it. A *known* block is marked, and
recorded in the catalog with the images that need it.

A known block is *healed* if the same block is also stored elsewhere: then the
images that need it are merged to that block, or to a new copy of it if one of
the two must stay a copy (I14). Where fingerprints are not cryptographic, only
the block itself can heal, if it becomes readable again. The record goes when
no recipe names the block any more.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import itertools
import logging
import time
from typing import Any

from dedupd.tasks import accounting
from dedupd.tasks import exactindex
from dedupd.tasks import merger
from glance_dedup import _engine
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import block_addresses
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import features
from glance_dedup.repository import volumes

LOG = logging.getLogger(__name__)

#: Blocks marked in one go.
MARK_SLOTS = 1024
#: Slots and images that a line of the log names.
LISTED = 10


def listed(items: Sequence[Any]) -> str:
    """The first LISTED items, in words."""
    words = ', '.join(map(str, items[:LISTED]))
    if len(items) > LISTED:
        words += f' and {len(items) - LISTED} more'
    return words or 'none'


def listed_images(maintainer: maintainer_role.Maintainer,
                  image_ids: Sequence[str]) -> str:
    """The first LISTED ids; a volume's recipes with the volume's name."""
    return listed([volumes.described(maintainer.repository, image_id)
                   for image_id in image_ids[:LISTED]]
                  + [*image_ids[LISTED:]])


def images_with(maintainer: maintainer_role.Maintainer,
                addresses: Iterable[int]) -> dict[str, set[int]]:
    """Return the images that name some addresses, and the named addresses.

    This reads each recipe of the repository.
    """
    return {image.image_id: image.found
            for image in block_addresses.which_named(
                maintainer.engine, maintainer.repository.recipes(), addresses)
            if image.found}


def images_of_group(maintainer: maintainer_role.Maintainer, number: int
                    ) -> list[str]:
    """The images that name some block of a group, sorted."""
    return sorted(images_with(maintainer, block_addresses.of_slots(
        number, range(block_addresses.GROUP_SLOTS))))


class Damage:
    """The damaged blocks, as one run of the scrub knows them.

    :ivar known: the catalog's facts about each marked block, by its address
    :ivar met: the addresses of all blocks that were known in this run
    :ivar healed: the number of blocks that this run healed
    :ivar quarantined: the files in ``quarantine/`` that this run wrote
    """

    def __init__(self, maintainer: maintainer_role.Maintainer,
                 pace: pacing.Pace) -> None:
        self._maintainer = maintainer
        self._pace = pace
        self._copies: dict[bytes, int] = {}     # by fingerprint, as met
        self.met: set[int] = set()
        self.healed = 0
        self.quarantined: list[str] = []
        self.load()

    def load(self) -> None:
        """Read the known blocks from the catalog."""
        self.known = self._maintainer.catalog.damaged()
        self.met.update(self.known)
        self._wanted = {bytes.fromhex(facts['fingerprint'])
                        for facts in self.known.values()}

    @property
    def can_have_copies(self) -> bool:
        """Return whether equal fingerprints mean the same block (I5)."""
        return self._maintainer.repository.parameters.is_cryptographic

    # -- finding ----------------------------------------------------------

    def notice(self, number: int, first: int, listing: bytes,
               bad: Collection[int]) -> None:
        """Find marked blocks that are not known, and copies of others.

        :param first: the slot of the first entry, in the group `number`
        :param listing: the entries, as the engine lists them
        :param bad: addresses of blocks that did not verify just now
        """
        if not self._wanted and not block_addresses.columns(
                listing).states.count(block_addresses.DAMAGED):
            return      # as nearly always
        for slot, entry in enumerate(block_addresses.entries(listing),
                                     first):
            address = block_addresses.address(number, slot)
            if entry.state == block_addresses.DAMAGED:
                if address not in self.known and self._count(address):
                    self._record({address: ''})
            elif (entry.state == block_addresses.LIVE
                    and entry.fingerprint in self._wanted
                    and address not in bad):
                copy = self._copies.setdefault(entry.fingerprint, address)
                if (copy != address and not entry.nodedup
                        and self._is_nodedup(copy)):
                    self._copies[entry.fingerprint] = address

    def mark(self, addresses: Iterable[int]) -> set[int]:
        """Mark damaged blocks, and report the images that need them.

        :returns: the addresses that need no marking any more; those of a group
            in use, or of a group that cannot be changed or read now, are left
            for later
        """
        found: dict[int, str] = {}
        done: set[int] = set()
        for number, slots in block_addresses.by_group(addresses):
            for at in range(0, len(slots), MARK_SLOTS):
                some = slots[at:at + MARK_SLOTS]
                try:
                    found.update(self._mark_in(number, some))
                except exceptions.BusyError:
                    break
                except exceptions.UnavailableError as e:
                    # It may be good: no read can show that now.
                    LOG.warning('Group %08x: blocks wait to be verified '
                                'again: %s', number, e)
                    break
                except (exceptions.NoSpaceError, exceptions.ImageNotFound,
                        *exceptions.UNREADABLE) as e:
                    LOG.error('Group %08x: damaged blocks cannot be set '
                              'aside: %s', number, e)
                    break
                done.update(block_addresses.of_slots(number, some))
        if found:
            self._record(found)
        return done

    def _mark_in(self, number: int, slots: list[int]) -> dict[int, str]:
        """Mark blocks in their group; return addresses and files set aside."""
        try:
            entered = self._maintainer.enter_group(number)
        except exceptions.ImageNotFound:
            return {}       # nothing in it was needed any more
        bad: list[int] = []
        invalid: list[int] = []
        with contextlib.closing(entered) as group:
            for slot in slots:
                # The block may have been freed since it was found.
                _, damaged, lost, _ = _engine.verify_slots(
                    self._maintainer.handle, number, slot, 1)
                bad += block_addresses.unpack(damaged)
                invalid += block_addresses.unpack(lost)
            names = (group.mark_damaged(block_addresses.pack(bad)) if bad
                     else [])
        self.quarantined += names
        # A file has the bytes of one segment: group-offset-digits.
        files = {int(name.rsplit('-', 2)[1]): name for name in names}
        found = dict.fromkeys(block_addresses.of_slots(number, invalid), '')
        for address in block_addresses.of_slots(number, bad):
            found[address] = files.get(self._entry(address).segment, '')
        return found

    def _record(self, found: dict[int, str]) -> None:
        """Record damaged blocks, and log the images that need them.

        :param found: the file in ``quarantine/``, or '', by address
        """
        images = images_with(self._maintainer, found)
        catalog = self._maintainer.catalog
        batch = catalog.batch()
        for address, name in sorted(found.items()):
            hit = sorted(i for i, named in images.items() if address in named)
            facts = {
                'found': int(time.time()),
                'fingerprint': self._entry(address).fingerprint.hex(),
                'quarantine': name, 'images': hit}
            catalog.set_damaged(batch, address, facts)
        self._maintainer.write(batch)
        for number, slots in block_addresses.by_group(found):
            hit = sorted(
                i for i, named in images.items() if not named.isdisjoint(
                    block_addresses.of_slots(number, slots)))
            LOG.error('%d blocks of group %08x are damaged, in the slots %s. '
                      'Images hit: %s', len(slots), number, listed(slots),
                      listed_images(self._maintainer, hit))
        self.load()

    def _count(self, address: int) -> int:
        counts = self._maintainer.catalog.counts(
            block_addresses.group_of(address),
            block_addresses.slot_of(address) + 1)
        return block_addresses.unpack(counts[-4:])[0]

    def _entry(self, address: int) -> block_addresses.Entry:
        return block_addresses.entry_at(self._maintainer.engine.entries(
            block_addresses.group_of(address),
            block_addresses.slot_of(address), 1), 0)

    # -- healing ----------------------------------------------------------

    def heal(self) -> None:
        """Merge the images to other copies of their damaged blocks."""
        self.load()
        if not self.known:
            return
        before = images_with(self._maintainer, self.known)
        if before:
            with contextlib.closing(
                    self._maintainer.relocation()) as relocation:
                mapping = self._find_copies(before, relocation)
                self._merge(before, mapping)
            accounting.run_once(self._maintainer, self._pace)
        self._forget(images_with(self._maintainer, self.known))

    def _find_copies(self, images: dict[str, set[int]],
                     relocation: _engine.Relocation) -> dict[int, int]:
        """Find copies of the blocks: a map of old to new addresses."""
        mapping = {}
        left = []
        for address in sorted(set().union(*images.values())):
            fingerprint = bytes.fromhex(self.known[address]['fingerprint'])
            for copy in (self._copies.get(fingerprint),
                         exactindex.find(self._maintainer.handle,
                                         self._maintainer.catalog.id,
                                         fingerprint)):
                if (self.can_have_copies and copy is not None
                        and self._is_good(copy, fingerprint)
                        and self._same_scope(copy, address)):
                    mapping[address] = copy
                    break
            else:
                left.append(address)
        apart = {address: mapping.pop(address) for address in [*mapping]
                 if self._is_nodedup(address)
                 or self._is_nodedup(mapping[address])}
        if left or apart:
            with contextlib.suppress(exceptions.NoSpaceError):
                self._add_again(apart, relocation)
                # Read spare copies; or the cause of the read errors has
                # passed.
                self._add_readable(left, relocation)
                pairs = block_addresses.unpack(relocation.finish(), 'Q')
                mapping.update(zip(pairs[::2], pairs[1::2]))
        lost = len(set(left) - mapping.keys())
        if lost and not self.can_have_copies:
            LOG.warning(
                '%d damaged blocks cannot be healed: only their fingerprints '
                'identify them, and another block can have the same: '
                '%s is not cryptographic', lost,
                self._maintainer.repository.parameters.fingerprint)
        return mapping

    def _add_again(self, apart: dict[int, int],
                   relocation: _engine.Relocation) -> None:
        """Store copies again, each with its damaged block's mark (I14)."""
        for address, copy in apart.items():
            try:
                relocation.add_equal(address, copy, self._is_nodedup(address))
            except exceptions.UnavailableError as e:
                LOG.warning('Group %08x: a damaged block is not healed now: '
                            '%s', block_addresses.group_of(address), e)

    @staticmethod
    def _add_readable(addresses: list[int], relocation: _engine.Relocation
                      ) -> None:
        """Store blocks again, except those that cannot be reached now."""
        for number, slots in block_addresses.by_group(addresses):
            try:
                relocation.add(block_addresses.pack(
                    block_addresses.of_slots(number, slots), 'Q'))
            except exceptions.UnavailableError as e:
                LOG.warning('Group %08x: damaged blocks are not healed now: '
                            '%s', number, e)

    def _is_good(self, address: int, fingerprint: bytes) -> bool:
        try:
            entry = self._entry(address)
            if (entry.state != block_addresses.LIVE
                    or entry.fingerprint != fingerprint):
                return False
            _, damaged, invalid, _ = _engine.verify_slots(
                self._maintainer.handle, block_addresses.group_of(address),
                block_addresses.slot_of(address), 1)
        except (exceptions.ImageNotFound, exceptions.InvalidParameter,
                exceptions.UnavailableError, *exceptions.UNREADABLE):
            return False
        return not damaged and not invalid

    def _is_nodedup(self, address: int) -> bool:
        """Return whether a block must stay a copy, or may have to."""
        with contextlib.suppress(exceptions.UnavailableError,
                                 *exceptions.UNREADABLE):
            entry = self._entry(address)
            if entry.state != block_addresses.INVALID:
                return entry.nodedup
        return features.NODEDUP in self._maintainer.repository.features

    def _same_scope(self, *addresses: int) -> bool:
        """Return whether images may merge: the addresses are of one scope."""
        try:
            return len({self._maintainer.engine.group_facts(number)['scope']
                        for number in map(block_addresses.group_of,
                                          addresses)}) == 1
        except (exceptions.ImageNotFound, *exceptions.UNREADABLE):
            return False

    def _merge(self, images: dict[str, set[int]],
               mapping: dict[int, int]) -> None:
        for done, (image_id, named) in enumerate(sorted(images.items())):
            pairs = sorted((old, mapping[old]) for old in named
                           if old in mapping)
            if not pairs:
                continue
            try:
                merger.merge_image(
                    self._maintainer, image_id,
                    block_addresses.pack(
                        itertools.chain.from_iterable(pairs), 'Q'),
                    self._pace)
            except exceptions.ImageNotFound:
                continue
            except (exceptions.BusyError, exceptions.NoSpaceError,
                    exceptions.UnavailableError,
                    *exceptions.UNREADABLE) as e:
                LOG.warning('Image %s cannot be healed now: %s',
                            listed_images(self._maintainer, [image_id]), e)
            self._pace.step(done + 1, len(images), 'healing images')

    def _forget(self, images: dict[str, set[int]]) -> None:
        """Note the images that still need damaged blocks."""
        catalog = self._maintainer.catalog
        hit = collections.defaultdict(list)
        for image_id, named in images.items():
            for address in named:
                hit[address].append(image_id)
        batch = catalog.batch()
        for address, facts in self.known.items():
            needed = sorted(hit[address])
            if facts['images'] and not needed:
                self.healed += 1
            if not needed and not self._count(address):
                catalog.set_damaged(batch, address, None)
            elif facts['images'] != needed:
                catalog.set_damaged(batch, address,
                                    {**facts, 'images': needed})
        if len(batch):
            self._maintainer.write(batch)
        self.load()
