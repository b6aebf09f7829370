# SPDX-License-Identifier: Apache-2.0

"""What the engine offers to Python.

Every call raises the classes of :mod:`glance_dedup.base.exceptions`. All but the
functions at the end release the GIL. Repository, Transaction, Image and Volume
are documented in ``image_repository.py``, ``openimages.py`` and
``openvolumes.py``, which alone use them; the maintainer's types are used by
``maintainer_role.py`` and by the tasks in ``dedupd/``.

Arguments are positional; only those of the types, and of ``Group.rewrite``,
have the names given here. OverflowError for a number that has not the 32 bits
of a group's, a slot's or a count.

Packed arrays are little-endian unsigned integers, as ``array.array('I')`` and
``array.array('Q')`` hold them:

runs
    ``group, slot, blocks`` (3 x 32 bits): the extents of blocks of a recipe, in
    its order.
addresses
    ``group << 15 | slot`` (64 bits).
mapping
    pairs of addresses, old and new, sorted by the old one.
"""

from typing import Any

class Repository:
    def __init__(self, path: bytes, *, repository_id: bytes,
                 block_size: int, group_slots: int, segment_size: int,
                 fingerprint: str, by_value: bool, codec: str, codec_level: int, threads: int,
                 lock_timeout_ms: int, allow_weak: bool = False,
                 reserve: int = 0, adaptive_compression: bool = False,
                 direct_io: int = 0, cut_minimum: int = 0,
                 cut_average: int = 0, slice_dir: bytes = ...,
                 slice_memory: bytes = b'',
                 slice_source: Any = ...) -> None:
        """slice_source brings the slices of cold groups into slice_dir, or,
        while its disk is full, into slice_memory, if there is one. Any
        thread calls ``fetch(group, object id, object length, first slice,
        count)``, which waits, and ``expect`` with the same, which does not.
        If `fetch` raises NoSpaceError or AccessDenied, so does the read that
        needs the slices; after anything else it raises UnavailableError."""
    def attach_filter(self, path: bytes, budget: int) -> None: ...
    def attach_store(self, backend: str, path: bytes, capacity: int,
                     cache: int) -> None: ...
    def clear_index(self) -> bool:
        """Empty the filter, or the store in its place. False: somebody is
        reading groups into it."""
    def follow(self, groups: int,
               after_ms: int = 0) -> tuple[bool, int, int]:
        """Read what others stored since the last look, of up to so many
        groups. With after_ms: only if nobody of the host has looked for so
        long. Returns whether there is more, and how many groups are known, of
        how many; 0 if they were not listed."""
    def begin(self, image_id: str, project: str,
              scope: bytes = bytes(16)) -> 'Transaction': ...
    def begin_conversion(self, image_id: str) -> 'Transaction':
        """Begin a recipe of kind M for a stored image; what is appended is its
        plain bytes, and :meth:`Transaction.finish` replaces the commit."""
    def delete(self, image_id: str,
               upload_id: bytes | None = None) -> None: ...
    def open_image(self, image_id: str,
                   upload_id: bytes | None = None) -> 'Image': ...
    def block_reader(self) -> 'BlockReader': ...
    def scan(self, data: Any, scope: bytes = bytes(16)) -> bytes:
        """Cut data that begins and ends with a block, and fingerprint the
        blocks: 36 bytes each, fingerprint and length; a block of zeros has
        only zeros as its fingerprint. InvalidParameter where the policy is
        'value'. Thread-safe."""
    def create_volume(self, name: str, size: int, project: str, scope: bytes,
                      image: 'Image | None', part_size: int = 0) -> int:
        """Make a volume, a clone of an image that the same Repository has
        open, or of zeros. Returns how many bytes of the image were stored
        again. A size of 0 is the image's, rounded up; a part_size of 0 the
        usual. Messages of ImageNotFound and ImageExists, here and below, name
        the volume."""
    def open_volume(self, name: str) -> 'Volume':
        """Become the owner (V1), and read the journals (V4). BusyError if
        there is one; DamagedError if acknowledged bytes are lost (V5)."""
    def look_at_volume(self, name: str) -> dict[str, Any]:
        """The head of a volume, whoever owns it: ``volume_id`` and ``scope``
        (16 bytes), ``state`` (making, ready or deleting), ``size``,
        ``base_size``, ``part_size``, ``project``, ``source`` (an image's id,
        or ''), ``created``, and ``counters``: a dict of the volume's whole
        life."""
    def delete_volume(self, name: str) -> None: ...
    def discard_volume(self, name: str) -> None:
        """Delete a volume, but not the recipes of one that is damaged."""
    def rename_volume(self, name: str, new_name: str) -> None: ...
    def roll_back_volume(self, name: str, image: 'Image') -> int:
        """As create_volume, for a volume that nobody owns."""
    def finish_volume(self, name: str) -> None:
        """Remove a volume whose making or deleting was interrupted (V9).
        BusyError while somebody owns it; ImageExists if it is whole."""
    def statistics(self) -> dict[str, Any]: ...
    def room(self) -> tuple[int, int]: ...
    def check_room(self, size: int) -> None: ...
    def use_feature(self, name: str) -> None:
        """Set a feature of the format durably, before its first use. Raises
        BusyError if a program that does not know it has the repository
        open."""
    def is_shared(self) -> bool:
        """Return whether other hosts may change files behind the page cache of
        this one. So the engine reads what it decides by past it (N13.1)."""
    def close(self) -> None: ...

    # Added for the daemon (segment cache):
    def set_segment_cache(self, budget: int, lists_only: bool = False
                          ) -> None:
        """Keep up to `budget` bytes of decompressed segments for all readers
        of this handle; 0 lets go of all. `lists_only` restricts it to
        segments with lists of slots. May be called at any time.
        ``statistics()`` gains ``cache_bytes``, ``cache_hits``,
        ``cache_misses`` (segments), and ``spare_reads`` (blocks that were
        damaged and read from a spare copy)."""

class Transaction:
    upload_id: bytes
    def write(self, data: Any) -> int: ...
    def set_dedup(self, how: str) -> None:
        """Called before the first block is written: 'probe' or 'off'."""
    def set_hash(self, name: str, value: bytes) -> None:
        """The hash of all bytes that were written, for the recipe."""
    def commit(self) -> dict[str, Any]: ...
    def commit_open(self) -> 'Image':
        """As commit; the image is opened before the locks are released."""
    def abort(self) -> None: ...

    # Added for images with a disk:
    def begin_table(self, disk_size: int, format: int, is_proven: bool,
                    encoders: bytes) -> None:
        """End the plain bytes of a conversion. Each encoder has 6 bytes, as
        in the header."""
    def add_derived(self, extents: bytes) -> None:
        """Add extents of the table, in the order of the file; '<QQIIQ' for
        each: length, offset of the plain bytes, their length, encoder,
        checksum."""
    def copy_table(self, image: 'Image') -> None:
        """Add the table of an image all of whose plain bytes were added."""
    def finish(self) -> dict[str, Any]:
        """Make the converted recipe durable, and return its header. Without a
        table it is the recipe of the file."""
    def open_finished(self) -> 'Image':
        """Open the converted recipe for reading. Close the image before the
        transaction ends."""
    def exchange(self) -> bool:
        """Give the image the new recipe; False if it has changed."""

    # Added for pulling:
    def find(self, fingerprints: bytes, lengths: bytes) -> bytes:
        """Look blocks up by fingerprint (32 bytes each; `lengths`: 32 bits
        each): one address each, 0 where it is not stored. The shared lock of
        each group is held until the transaction ends, so an address stays
        good (I6). All are 0 where the policy is 'value'."""
    def find_at(self, fingerprints: bytes, lengths: bytes,
                addresses: bytes) -> bytes:
        """The same for blocks of which others say where they are (0: nobody
        does): the address stays if the block is there, else it becomes 0. An
        address may be anything."""
    def add(self, fingerprints: bytes, lengths: bytes,
            addresses: bytes) -> None:
        """Append blocks that `find` of this transaction found; each address
        is asked for again, under the lock that `find` took: InvalidParameter,
        and nothing is appended, for one that `find` would not return. Only at
        a block's boundary: InvalidParameter after a `write` that ended within
        a block."""
    def write_blocks(self, data: Any, lengths: bytes) -> bytes:
        """Append blocks (32 bits for each one's length) that were cut
        elsewhere; at a block's boundary, likewise. Returns their addresses, 0
        for one that is all zeros. ValueError if they are not all of the data,
        InvalidParameter for a length that no block here may have."""
    def add_runs(self, image: 'Image', start: int, end: int) -> int:
        """Append the bytes [start, end) of an image that the same Repository
        has open, by the addresses of its blocks; at a block's boundary,
        likewise. Returns how many bytes had to be read and stored."""
    def write_zeros(self, length: int) -> None:
        """Append zeros as `write` would, but any number at once."""
    def add_zeros(self, length: int) -> None:
        """Append zeros; at a block's boundary, likewise."""
    def keep(self) -> tuple[int, int]:
        """Make a sync point: what was stored so far stays, and is found by
        the next transaction, though this one be aborted. Returns the plain
        bytes that were stored so far, and what they take on the disk."""
    def measure(self) -> tuple[int, int]:
        """Write out what was appended, without a sync point. Returns what it
        takes on the disk, and how many plain bytes were found there."""
    def kept_bytes(self) -> int:
        """Return what stays on the disk if the transaction is aborted now."""
    def credit(self, new_bytes: int, stored_bytes: int) -> None:
        """Count these bytes as stored for this image, too."""

class Image:
    def header(self) -> dict[str, Any]: ...
    def readinto(self, buffer: Any, offset: int) -> int: ...
    def readinto_disk(self, buffer: Any, offset: int) -> int:
        """InvalidParameter unless the image has a proven disk."""
    def disk(self) -> dict[str, Any] | None:
        """The header's fields of the image's disk; None if it has none."""
    def read(self, length: int, offset: int) -> bytes: ...
    def is_zeros(self, length: int, offset: int) -> bool:
        """Of a range that lies in the image."""
    def extents(self, page: int) -> list[tuple]: ...
    def close(self) -> None: ...

    # Reading a block verifies it. One whose entry is damaged is tried where it
    # is, too, besides its spare copy; DamagedError if neither is good.

    # Added for the daemon:
    def describe(self, page: int) -> bytes:
        """One page of extents with their blocks' fingerprints, in the wire
        format of the HTTP reference; b'' behind the last. Each extent's
        digest is verified over them (I7)."""
    def frames(self,
               ranges: list[tuple[int, int]]) -> tuple[list[bytes], int]:
        """The blocks of ranges `(offset, length)`, as frames in the wire
        format of the HTTP reference, in no order, without the final one; and
        the offset at which the next call has to go on, since a call takes at
        most 2 MiB of blocks, or the end of the last range.
        InvalidParameter unless the ranges are sorted, do not overlap, and
        neither begin nor end within a block (within zeros they may). A segment goes out as it is stored only if each
        of its bytes is of a block asked for: others may be, or have been, of an
        image that the caller may not read. Every block is verified first
        (I7)."""

class Volume:
    """A volume that this process owns. Offset and length may be any within the
    volume; InvalidParameter for others."""

    def readinto(self, buffer: Any, offset: int) -> None:
        """Fill the whole buffer."""
    def read(self, length: int, offset: int) -> bytes: ...
    def write(self, data: Any, offset: int) -> None: ...
    def zero(self, length: int, offset: int) -> None: ...
    def flush(self) -> None: ...
    def extents(self, length: int,
                offset: int) -> list[tuple[int, int, bool]]:
        """Offset, length and whether it is known to be zeros, of up to 1,024
        pieces of the range, in order, without gap, from its start."""
    def checkpoint(self) -> None: ...
    def needs_checkpoint(self) -> bool: ...
    def set_dedup(self, dedup: bool) -> None: ...
    def prefetch(self, length: int, offset: int) -> None:
        """REQUIRES: the range lies within the volume."""
    def renew(self) -> None: ...
    def snapshot(self, image_id: str, project: str) -> dict[str, Any]:
        """As Transaction.commit."""
    def resize(self, size: int) -> None: ...
    def info(self) -> dict[str, Any]:
        """As Repository.look_at_volume, as of now, with ``journal_bytes``,
        ``journal_records``, and ``broken``: why it takes no writes, or ''."""
    def close(self) -> None:
        """Takes effect when the last call is done. Makes no checkpoint."""

class BlockReader:
    """Reads blocks back by address, whose groups' shared locks somebody holds
    (I6), and which lie before a sync point (I1)."""

    def read(self, fingerprints: bytes, lengths: bytes,
             addresses: bytes) -> bytes:
        """The blocks' bytes, packed as for Transaction.add. Each is verified by
        checksum and fingerprint, and that it is the one meant (I7)."""
    def close(self) -> None: ...

# -- the maintainer's (N2-N6) -------------------------------------------------

class Maintenance:
    """What only the maintainer does. Belongs to one thread at a time."""

    def __init__(self, repository: Repository) -> None: ...
    def lock(self) -> bool:
        """Become the maintainer: locks/maintainer, byte 0, exclusive, until
        close. False if another process, or handle, is. The file is created
        at need. The maintainer may call it again, to see whether another
        process has become it meanwhile. Every call that changes something, or takes a lock, REQUIRES
        it: InvalidParameter without it."""
    def close(self) -> None:
        """Close all that is open of it, withdraw all intents, and let go of
        the maintainer lock. Idempotent."""
    def lock_image(self, image_id: str) -> bool:
        """Try the lock that deletes and merges of an image take (N9.1), and
        keep it until `unlock_image`, or close. False if it is had already.
        InvalidParameter while another image is locked."""
    def unlock_image(self) -> None:
        """Let go of the image that is locked, if any is."""
    def is_read(self, image_id: str) -> bool:
        """Whether somebody, in any process, has the image open; also if that
        cannot be told. It is only asked: no lock is taken (N3). Needs no
        lock."""
    def are_same(self, files: tuple[tuple[bytes, bytes], ...]) -> list[bool]:
        """For image ids with files, of 32 bytes each (the inode and the time
        of writing in nanoseconds, 64 bits each; a transaction id): whether
        ``images/<id>`` is still the file with this inode that was written last
        at this time. False also if that cannot be told. Needs no lock."""
    def read_fence(self) -> bytes | None:
        """The 24 bytes of the newest valid record of ``fence``; None if there
        is none."""
    def write_fence(self, payload: bytes) -> None:
        """Make a record (the catalog's id, 16 bytes; its sequence, 64 bits)
        durable (I9): on return it is, and read_fence returns it. The sequence
        of a catalog cannot go back: InvalidParameter. Another catalog's may;
        so whoever compares has to compare the ids first."""
    def sync(self, directory: str) -> None:
        """Fsync ``images``, ``spool``, ``groups`` or ``quarantine``."""
    def spool(self) -> list[str]:
        """The names in the spool that are entries' (``T-...``), sorted;
        strange ones are left out."""
    def open_entry(self, name: str) -> 'Recipe':
        """A spool entry of any kind. ImageNotFound if it is gone. A damaged
        one opens, and says so; StorageError if it cannot be read just now."""
    def open_recipe(self, image_id: str) -> 'Recipe':
        """images/<id>, without its locks."""
    def groups(self) -> list[int]:
        """The numbers of all groups, sorted."""
    def group_facts(self, number: int) -> dict[str, Any]:
        """``slots``, ``has_lists`` (whether segments may have lists of slots),
        ``scope`` (16 bytes), ``published``, ``generation``, ``flags``,
        ``sequence``, ``end``, ``codec``, ``level`` and ``similar`` (two
        numbers and a truth value: how the slots below ``covered`` were
        compressed anew), ``size`` and ``allocated`` (bytes of the file, and on
        the disk), ``modified`` (when it last changed, in seconds). Needs no
        lock."""
    def group_space(self, number: int) -> dict[str, Any]:
        """Bytes of a group, as its entries tell: ``plain`` and ``stored``, for
        each codec by its number: of blocks that live, and of the segments
        which these are in; ``store``: what lies in front of the segments;
        ``allocated`` on the disk; and how many ``segments``. Needs no lock."""
    def entries(self, number: int, first: int, count: int) -> bytes:
        """For each slot 48 bytes: fingerprint (32), segment's offset (32
        bits), plain length (32 bits), stored length of its segment (32 bits),
        state (8 bits; 0 empty, 7 invalid), 3 zero bytes. Needs no lock.
        InvalidParameter for slots that the group does not have."""
    def announce(self, number: int) -> bool:
        """Hold the group's intent byte: no new transaction shares it, nor
        anything else of this handle (Merge, Relocation). False if it is had
        already, or refused, perhaps only for a moment: an upload may be looking
        at it."""
    def withdraw(self, number: int) -> None: ...
    def enter_group(self, number: int) -> 'Group':
        """Lease and exclusive lock of a group (N6.1), tried: BusyError.
        ImageNotFound if there is no such group. Entries that a sync which
        failed left unpublished are published first (N7.3)."""
    def begin_rewriting(self, number: int, codec: str, level: int,
                        similar: bool = False) -> 'Rewriting':
        """Take the lease of a group, and begin a file in which it is
        compressed anew, with similar blocks next to each other if this is
        asked for (VersionError: not in this repository). The maintainer first
        settles what writers left in it (N7.3); a helper may only take a sealed
        group (I4). BusyError if the lease is refused, or a transaction names
        blocks of the group, or it is not sealed and this is a helper.
        DamagedError if an entry is invalid or damaged; NoSpaceError;
        ImageNotFound."""
    def begin_cooling(self, number: int) -> 'Rewriting':
        """As begin_rewriting, but the group becomes cold, and its segments
        stay as they are packed. VersionError: not in this repository."""
    def note_codec(self, number: int, codec: str, level: int,
                   similar: bool = False) -> None:
        """Note in a sealed group that this would hardly make it smaller.
        BusyError as above."""

class Recipe:
    """A recipe's file, in the spool or in images/. `complete` and `error`
    are of the last look: the opening, or `live`."""

    name: str
    """Relative to the repository: ``spool/T-...`` or ``images/...``."""
    kind: str
    """T, D, M, O, X or G; '' in images/."""
    complete: bool
    """It has a valid header page. False for kind G."""
    error: str | None
    """Why the header page is not valid; None also where it was never written
    (all zeros, or a shorter file), unless in images/, and of kinds D and O,
    where one must be. An entry T or M of another transaction than its name
    says is not valid."""
    links: int
    """Names of the inode when it was opened."""
    inode: int
    modified: int
    """When it was last written, nanoseconds since 1970, as os.stat says."""
    pages: int
    """Of extents, behind the header page."""
    def header(self) -> dict[str, Any]:
        """As Image.header(), and ``transaction_id`` (16 bytes)."""
    def live(self) -> bool:
        """images/<the header's id> is this very inode, now. A header that was
        not valid is read again first, since its writer may have completed and
        committed it meanwhile (N4.3); False if it still is not: then `links`
        tells whether it has another name. StorageError if it cannot be found
        out."""
    def try_lock(self, byte: int) -> bool:
        """Take byte 0 (writer) or 1 (users) exclusively, until close (N3)."""
    def measure(self) -> int:
        """Verify that all extents together make up the image; returns how many
        blocks they name. Errors as of `runs`."""
    def runs(self, first: int = 0, pages: int = ..., /) -> bytes:
        """Every extent of blocks of so many pages, from the first on; without
        arguments of all. DamagedError names page and file. InvalidParameter
        without a valid header page."""
    def unlink(self) -> None:
        """Remove this name. ImageNotFound if it does not lead to this inode
        any more. Not synced."""
    def set_aside(self) -> str:
        """Link the file into quarantine/ under a new name, and fsync that;
        returns the name. What it was called stays."""
    def delete(self) -> None:
        """For a recipe of images/ whose header may not verify: N9 without
        looking inside, if the name still leads to this inode (ImageNotFound).
        BusyError if the image lock cannot be had. REQUIRES: set aside."""
    def close(self) -> None: ...

class Group:
    """A group with lease and exclusive lock held until close (N6.1, I4).

    ClosedError of every method but `states` and `close`, after an `unlink` that
    removed it, or once something failed while it was changed: what is on the
    disk is for whoever enters it anew."""

    number: int
    slots: int
    published: int
    def states(self) -> bytes:
        """One byte for each slot of the group."""
    def free(self, slots: bytes) -> int:
        """Free those of the slots named (32 bits each, all below the
        published count, else InvalidParameter) that are live, damaged or
        invalid; returns how many. On return the next generation and then the
        entries are written and synced, each by itself (N6.4; why in this
        order, says ownedgroup.h)."""
    def punch(self) -> int:
        """Give the space of all bytes back that no live or damaged entry
        needs, published or not, up to the last published end; returns bytes
        of disk given back. Nothing while any entry is invalid."""
    def live_bytes(self) -> tuple[int, int]:
        """(bytes of segments that have a live block, of them those that
        rewriting would keep, as far as is known without reading data)."""
    def rewrite(self, codec: str | None = None, level: int = 0) -> int:
        """Write a new file with the same addresses and only what lives, and
        put it in this one's place (I4); returns the bytes of disk given back.
        Segments all of whose blocks live are copied as they are, unless a
        codec is given. DamagedError names the first entry that is invalid or
        damaged, or the first block that does not verify; the old file stays,
        since only it has what may be read after all, or be healed. It also
        stays after NoSpaceError, and after any other error before the new one
        has its name. BusyError while there are entries beyond the published
        count."""
    def mark_damaged(self, slots: bytes) -> list[str]:
        """Put the stored bytes of these slots' segments into quarantine/ and
        change the entries' state to damaged, generation and sync as in
        `free`. The bytes stay in the group too, and are tried by whoever reads
        (see Image). Slots that are not live are passed over. Returns the
        quarantine's names, one for each segment:
        ``quarantine/<group>-<offset>-<random>``."""
    def unlink(self) -> bool:
        """Remove the group, if nothing in it is live, damaged, invalid or
        unpublished and it is not the highest-numbered one; ``groups/`` is
        fsynced, and the space is given back though others have the file open.
        After True only `close` is of use."""
    def leave_placeholder(self) -> int:
        """Replace the file of a group that `unlink` keeps for its number by one
        without a fingerprint store (placeholder.h); returns the disk bytes given
        back. Nothing happens if a slot is in the way, or if it was done."""
    def close(self) -> None: ...

class Rewriting:
    """A group that is compressed anew, with its lease held until close.
    Uploads and readers use the old file until the exchange. After an error of
    `step` only `close` is of use, which discards the new file."""

    number: int
    slots: int
    done: int
    """Slots that were gone through."""
    def check(self) -> None:
        """Do nothing if the work may go on. BusyError: a collector wants the
        group. NoSpaceError: nothing can be stored any more, so close it."""
    def step(self) -> tuple[bool, int]:
        """Read, verify, compress and write some MiB, with all threads: whether
        the new file is complete and durable, and the bytes read and
        written. DamagedError names the first block that does not verify.
        Raises as `check`, too, which it calls before each segment."""
    def sizes(self) -> tuple[int, int]:
        """Bytes of the disk: of the old file, and the new one, complete."""
    def object(self) -> tuple[bytes, int, str]:
        """Of a group that becomes cold: the id and the length of its object,
        and the path, relative to the repository, of the complete file that is
        to become the object."""
    def cut(self) -> None:
        """Remove the segments from this file, because the object has them.
        `exchange` needs that."""
    def exchange(self) -> None:
        """Put the complete file in the old one's place, under the exclusive
        lock. BusyError: a transaction has the group's shared lock, or another
        process its lease; it may be tried again. StorageError, if the new file
        is gone from the spool: this process had lost its locks. After any
        other error only `close` is of use."""
    def keep_old(self) -> None:
        """Leave the old file, and note in it that it is not worth while. Only
        for the maintainer."""
    def close(self) -> None: ...

# -- merging (N10) ------------------------------------------------------------

class Merge:
    """A recipe rewritten to other addresses. Steps 1 and 2 are done on
    return: BusyError if a group's lock was refused, DamagedError if the image
    is damaged, or old and new block have not the same fingerprint, or the new
    one is not live and published. Where the policy compares bytes, a block
    whose bytes are not those of the new one stays where it is."""

    replaced: int
    """Blocks whose address changed; 0: nothing was written."""
    replaced_bytes: int
    """Their plain bytes."""
    collisions: bytes
    """Old addresses (64 bits) of blocks that stay though the mapping has them,
    since only their fingerprints are equal; each as often as it is named."""
    name: str
    """Of M, relative to the repository; '' if nothing was written."""
    def __init__(self, maintenance: Maintenance, image_id: str,
                 mapping: bytes) -> None: ...
    def header(self) -> dict[str, Any]:
        """Of M, as Recipe.header(). InvalidParameter if there is none, also
        from the two below."""
    def runs(self) -> bytes: ...
    def exchange(self) -> bool:
        """Steps 4 to 7. False if the image was deleted, replaced or is being
        deleted: M is then left for accounting. REQUIRES: step 3 (counts and
        ledger key of M, fence) is done."""
    def close(self) -> None:
        """Let go of byte 0 and the groups. The spool's names stay."""

class Relocation:
    """Copies of blocks at new addresses, for evacuation and healing. The
    shared locks of their groups are held until close."""

    def __init__(self, maintenance: Maintenance, repository: Repository) -> None: ...
    def add(self, addresses: bytes) -> None:
        """Read, verify and store blocks anew, never in their own group.
        Those that do not verify are left out, or taken from a spare copy."""
    def add_equal(self, old: int, copy: int, nodedup: bool) -> None:
        """The same for the block at `copy`, to replace that at `old`.

        :param nodedup: the mark of the new block"""
    def finish(self) -> bytes:
        """Sync point; the mapping from old to new addresses."""
    def close(self) -> None: ...

# -- scrubbing and spare copies -----------------------------------------------

def verify_slots(repository: Repository, number: int, first: int,
                 count: int, hashed: bool = True, begin: int = 0,
                 end: int = ...) -> tuple[int, bytes, bytes, bytes]:
    """Read and verify the blocks of these slots, by checksum and, if `hashed`,
    fingerprint, twice before any is called damaged: (bytes read, damaged slots, slots whose
    entry is invalid, slots whose block is good but some other byte of its
    segment is not), 32 bits each. Only live entries, and published ones that
    are not valid, are looked at. Blocks are read if their segments begin in
    [begin, end); of the others only the entries are judged. ImageNotFound if
    there is no such group; DamagedError if its header is not valid;
    UnavailableError if the object store does not give a cold group's
    blocks."""

def write_spares(maintenance: Maintenance, number: int,
                 addresses: bytes) -> int:
    """Write the file ``spares/<number>`` anew with a second copy of these
    blocks, whole and durable before it takes its name; returns its bytes.
    With no addresses the file is removed. Raises InvalidParameter where
    fingerprints are not cryptographic."""

# -- estimating ----------------------------------------------------------------

class Estimate:
    """What images would take: nothing is stored. A block is counted if its hash
    ends in *level* zero bits, so counted bytes stand for 2 to the power of
    *level* times as many. For one thread at a time: ValueError."""

    def __init__(self, *, block_size: int, cut_minimum: int, cut_average: int,
                 segment_size: int, codec: str, codec_level: int,
                 again_codec: str, again_level: int,
                 table_bytes: int) -> None:
        """`again_codec` is recompression's; `table_bytes` bounds the memory for
        counted blocks, 0: there is no bound, and the level stays 0.
        InvalidParameter for values that a repository could not have."""
    def take(self, data: Any, last: bool) -> int:
        """Take the image's blocks that end in these bytes; returns how many
        bytes these are. What follows is to be given again, with more. With
        `last` there is no more, and all is taken."""
    def take_zeros(self, length: int) -> None:
        """Take zeros, a multiple of the largest block's length."""
    def end(self) -> tuple[int, int]:
        """End the image: bytes in blocks of zeros, and extents."""
    def sum(self) -> tuple[list[tuple[int, int, int, float]], int, int, int]:
        """For each image that ended its counted new bytes, new blocks, stored
        bytes, and the sum of the squares of the latter block by block; the
        level; and the bytes of a sample of segments before recompression, and
        behind it."""

# -- the exact index --------------------------------------------------------

class Index:
    """The files of the exact index, of one catalog. A file is (kind, bits,
    shard, number), as in ``format-derived.rst``. DamagedError names a file
    that cannot be trusted. One thread at a time; others wait. Without an id,
    the index is of the catalog that the highest cursors name; ImageNotFound if
    there are none."""
    def __init__(self, repository: Repository, catalog_id: bytes | None
                 ) -> None: ...
    def close(self) -> None: ...
    def lock(self) -> bool:
        """Take the lock of the runs, unless another has it."""
    def unlock(self) -> None: ...
    def files(self) -> list[tuple[str, int, int, int]]: ...
    def shards(self) -> tuple[list[tuple[str, int, int, int]], bool]:
        """The shards that count, in order, and whether they cover all
        fingerprints."""
    def count(self, file: tuple[str, int, int, int]) -> int:
        """How many items a file has, by its head."""
    def read(self, file: tuple[str, int, int, int], frame: int) -> bytes:
        """The items of a frame; none behind the last."""
    def write(self, file: tuple[str, int, int, int], items: bytes) -> None:
        """Write a file, durably. ImageExists if there is one already."""
    def add(self, records: bytes, gone: bool) -> None:
        """Write sorted records, each once, as runs of the shards that count,
        durably; with `gone`, of records that are to go. The lock is held."""
    def fill(self) -> None:
        """Make empty shards where none counts. The lock is held."""
    def tidy(self) -> None:
        """Remove files that mean nothing. The lock is held."""
    def sync(self) -> None: ...
    def remove(self, file: tuple[str, int, int, int]) -> None: ...
    def set_aside(self, file: tuple[str, int, int, int]) -> None:
        """Move a file to ``quarantine/index``, in place of the last one."""
    def verify(self, file: tuple[str, int, int, int]) -> None: ...
    def find(self, fingerprint: bytes) -> int:
        """The address that the index has; 0: none."""
    def answer(self, requests: bytes) -> tuple[bytes, bytes, int]:
        """Answers to requests (see `requests_of`), the requests that wait for
        another one's block, and how many files could not be read."""
    def begin_merge(self, bits: int, shard: int, split_ns: int,
                    split_records: int) -> bool:
        """Begin to merge a shard with its runs. False: it has none, another
        process merges it, or it does not count."""
    def step(self, records: int) -> tuple[int, int]:
        """Merge so many records: whether there are more (0 or 1), and how many
        bytes were read so far."""
    def finish_merge(self) -> tuple[int, int, int, bool, bool]:
        """Make the new generation durable: its records, new pairs, bytes read
        and written, whether the shard was split, whether runs are left.
        ImageNotFound if the shard does not count any more."""
    def cancel_merge(self) -> None:
        """Give up a merge that was not finished, if there is one."""

# -- filters ----------------------------------------------------------------

def take_unused_filter(fd: int, unfinished: bool) -> bool:
    """Whether nobody uses the filter that is open, or, with `unfinished`, is
    making it; nobody begins to until `fd` is closed. False also if it cannot
    be locked."""

# -- functions of memory alone ------------------------------------------------

def codec_mark(codec: str, level: int,
               similar: bool = False) -> tuple[int, int, bool]:
    """``codec``, ``level`` and ``similar`` of `Maintenance.group_facts` for a
    group that was compressed anew like this. InvalidParameter for a codec that there is not,
    or a level that it lacks."""
def fingerprint(name: str, data: Any, scope: bytes = bytes(16)) -> bytes:
    """What the engine computes for a block of this scope."""
def keyed_digest(key: bytes, data: Any) -> bytes:
    """16 bytes that nobody can predict without the key, of 32 bytes. Who knows
    it can make data with one digest: this is no fingerprint."""
def find_deflate(samples: list[tuple[Any, Any]], has_header: bool
                 ) -> tuple[int, int, int, int, int] | None:
    """The parameters with which zlib makes the streams of one to eight samples
    of plain bytes: pairs of both. None: none do, which takes up to 1,500 times
    as long as deflating a sample."""
def deflates_to(params: tuple[int, int, int, int, int],
                sample: tuple[Any, Any]) -> int | None:
    """The XXH3-64 of a sample's stream if these parameters make it."""
def require_golden() -> None:
    """VersionError if the encoder does not make the bytes that it must."""
def is_cryptographic(name: str) -> bool: ...
def after_fork() -> None: ...
def add_runs(counts: bytearray | memoryview, group: int, chunk: int,
             runs: bytes | bytearray, delta: int) -> None:
    """Add `delta` (1 or -1) to the counters (1,024 of 32 bits) of the slots
    of runs that lie in this group and chunk of 1,024 slots. A counter at its
    maximum stays there for ever; ValueError for one below zero: nothing is
    changed then."""
def shared_blocks(runs_a: bytes, runs_b: bytes) -> int:
    """How many addresses both name (each counted once)."""
def names_any(runs: bytes, addresses: bytes) -> bool:
    """Whether the runs name any of the sorted addresses."""
def slots_judge(entries: bytes, counts: bytes, published: int
                ) -> tuple[int | None, int, int, bytes, int]:
    """How a group's slots from 0 on are used, by their entries
    (Maintenance.entries) and counts (32 bits each): (the first slot that is
    counted and not in use, slots in use, freed slots, published slots in use
    that are not counted, 32 bits each, and their blocks' bytes)."""
def index_records(entries: bytes, number: int, first: int) -> bytes:
    """Records of the exact index, of the live entries among those of
    `Maintenance.entries(number, first, ...)`, in the order of slots."""
def index_sort(records: bytes) -> bytes:
    """Records in order."""

# Pairs of addresses (2 x 64 bits each), for merging. The index finds them as
# (other, kept); what is kept of them is (kept, other), sorted: the block that
# the index has, and one with its fingerprint. `addresses` are sorted, each
# once; `entries` are theirs as Maintenance.entries lists them, `counts` have 32
# bits each. ValueError for what is no whole number of items, or if a pair names
# an address that is not among `addresses`.
def pair_addresses(pairs: bytes) -> bytes:
    """The addresses of pairs, sorted, each once."""
def pick(items: bytes, size: int, first: int, addresses: bytes) -> bytes:
    """Of a group's items of `size` bytes, from slot `first` on, those of some
    of its addresses."""
def pairs_are_of_group(pairs: bytes, group: int) -> bool:
    """Whether the pairs are in order, each once, and begin with addresses of
    this group."""
def pairs_sort(pairs: bytes) -> bytes:
    """Pairs in order, each once."""
def pairs_without(a: bytes, b: bytes) -> bytes:
    """Those of a that b has not; both are sorted."""
def pairs_judge(pairs: bytes, addresses: bytes,
                entries: bytes) -> tuple[bytes, bytes]:
    """Of pairs (other, kept): those of equal blocks, as (kept, other), and
    those whose kept one does not live, as they are."""
def pairs_revise(pairs: bytes, addresses: bytes,
                 entries: bytes) -> tuple[bytes, bytes]:
    """Of pairs (kept, other): those of which a block is gone, and index
    records, not sorted, of the other blocks, if it was the kept one."""
def pairs_choose(pairs: bytes, addresses: bytes, entries: bytes,
                 counts: bytes) -> bytes:
    """Of sorted pairs (kept, other): replacements (old, new, length, kept; 64
    bits each) of all blocks in use but one of each class."""
def replacements_sort(replacements: bytes) -> bytes:
    """Replacements in order, each old address once, and none whose new address
    is the old one of another."""

# What the ranks of a batch backup send each other (``batch.rst``, "Stages"). All
# are laid out as index records of 13 bytes: a key (64 bits, big-endian) and a
# value (40 bits, little-endian). A request's key is the first 8 bytes of a
# fingerprint, and its value the requester: rank << 28 | number of a block. A
# reference has the same key, and an address. An answer's key is the requester
# << 24, and its value an address; 0: not known; all ones: wait.
def requests_of(scanned: bytes, requester: int) -> bytes:
    """Requests for the blocks of `Repository.scan` that are not zeros. The
    first block has this requester, the next one the next."""
def split_records(records: bytes, parts: int, first: int,
                  ways: int) -> list[bytes]:
    """Records by the part of their key, of so many equal parts, from part
    `first` on. ValueError for one of another part."""
def answer_requests(requests: bytes) -> tuple[bytes, bytes]:
    """As `Index.answer` where there is no index."""
def resolve_requests(requests: bytes, references: bytes
                     ) -> tuple[bytes, bytes]:
    """Answers to the requests whose key is among the references, and the other
    requests."""
def fill_answers(answers: bytes, first: int,
                 places: bytearray | memoryview) -> None:
    """Put what each answer says in the place (64 bits) of its requester's
    number; the first place is that of number `first`. ValueError for an answer
    without a place."""
