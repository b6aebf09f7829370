# SPDX-License-Identifier: Apache-2.0

"""Checks that work goes on, on a disk that another program has filled.

    python -m tests.functional.full_disk ROOT FILTER bytes|inodes|quota [cache]

ROOT is that of a file system that may be filled, FILTER a directory
elsewhere; with ``cache`` images are not deleted, but evicted. It ends with an
assertion if something does not work; see ``test_full_disk.py``.
"""

import contextlib
import os
import pathlib
import sys

from dedupd.compute.cache import cache_catalog
from dedupd.tasks import collector
from dedupd.tasks import evictor
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.check import checker
from glance_dedup.maintenance import maintainer_role
from glance_dedup.maintenance import reserve
from glance_dedup.repository import space
from tests.support import disks
from tests.support import maintenance
from tests.support import repositories

MIB = 1 << 20

#: So many names that a directory needs more blocks for them.
MANY = 200


def refused(repo, image_id):
    try:
        repositories.put(repo, image_id, b'refused')
    except exceptions.NoSpaceError:
        return True
    return False


def maintain(repo):
    """Run the maintenance as the daemon, or the command line, does."""
    with maintainer_role.Maintainer(repo) as maintainer:
        maintenance.account(maintainer)
        result = collector.run_once(maintainer, pacing.Pace())
        assert not maintainer.warnings, maintainer.warnings
        maintenance.require_counted(maintainer)
        return result


def free(root, kind):
    found = os.statvfs(root)
    return (found.f_favail if kind == 'inodes'
            else found.f_bavail * found.f_frsize)


def main(root, filter_directory, kind):
    root = pathlib.Path(root)
    path = repositories.create(root / 'repository', block_size=4096,
                               group_slots=512)
    place = root if kind != 'quota' else path
    fill = disks.fill_inodes if kind == 'inodes' else disks.fill_bytes
    many = MANY if kind != 'inodes' else 20
    kept = {'kept': repositories.noise(2 * MIB, 1)}
    with repositories.open_repository(
            path, filter_dir=filter_directory) as repo:
        for image_id, data in kept.items():
            repositories.put(repo, image_id, data)
        repositories.put(repo, 'large', repositories.noise(12 * MIB, 2))
        maintain(repo)
        assert (path / 'catalog-reserve').stat().st_size >= MIB
        for n in range(many):
            repositories.put(repo, f'small-{n}', b'%d' % n)
        filling = fill(place)
        assert free(place, kind) < (1 << 16 if kind == 'bytes' else 1)
        assert refused(repo, 'refused')
        maintenance.require_contents(repo, {
            **kept, 'large': repositories.noise(12 * MIB, 2),
            **{f'small-{n}': b'%d' % n for n in range(many)}})
        # Each needs a name in the spool: more of them than a directory's
        # block has room for.
        for image_id in repo.images():
            if image_id not in kept:
                repo.delete(image_id)
        assert not found_by_check(path)
        maintain(repo)
        if kind != 'inodes':
            # The image's bytes are free again, and the reserve has been made
            # again.
            assert free(place, kind) > 8 * MIB
            assert (path / 'catalog-reserve').exists()
            repositories.put(repo, 'next', repositories.noise(MIB, 3))
            repo.delete('next')
        for file in filling:
            file.unlink()
        maintain(repo)
        assert (path / 'catalog-reserve').exists()
        assert (path / 'catalog-reserve-1').exists()
        repositories.put(repo, 'last', repositories.noise(MIB, 4))
        maintenance.require_contents(repo, {
            **kept, 'last': repositories.noise(MIB, 4)})
        maintain(repo)
    assert not found_by_check(path)


def cache(root, filter_directory, kind):
    """Evicting makes room; then the cache catalog can be written again."""
    # The reserve is smaller than otherwise.
    reserve.RESERVE_BYTES = MIB
    root = pathlib.Path(root)
    path = repositories.create(root / 'repository', block_size=4096,
                               group_slots=256)
    fill = disks.fill_inodes if kind == 'inodes' else disks.fill_bytes
    model = {f'image-{n}': repositories.noise(2 * MIB, n) for n in range(6)}
    with repositories.open_repository(
            path, filter_dir=filter_directory) as repo:
        held = cache_catalog.Held(repo)
        for image_id, data in model.items():
            repositories.put(repo, image_id, data)
            held.note(image_id, len(data), None)
        held.save()
        maintain(repo)
        filling = fill(root)
        assert refused(repo, 'refused')
        held.used('image-0')
        held.save()
        # The full disk took no new catalog, and the previous one is not lost.
        before = cache_catalog.decode((path / 'cache.json').read_bytes())
        assert list(before)[0] == 'image-0'
        with maintainer_role.Maintainer(repo) as maintainer:
            result = evictor.run_once(
                maintainer, pacing.Pace(), held,
                space.taken(path) - 3 * MIB // 2)
            # The room that is kept for the catalog counts, too.
            assert result.evicted in (['image-1'], ['image-1', 'image-2'])
            assert not result.short and not result.failed, result
            # Without a limit the disk's size is the limit, if blocks are
            # short.
            result = evictor.run_once(maintainer, pacing.Pace(), held, 0,
                                      coming=lambda: 9 * MIB // 2)
            assert kind == 'inodes' or result.evicted, result
            assert not result.short and not result.failed, result
        left = {name: model[name] for name in held.candidates()}
        assert len(left) >= 2 and 'image-0' in left
        maintenance.require_contents(repo, left)
        for file in filling:
            file.unlink()
        held.close()
        held = cache_catalog.Held(repo)
        assert held.candidates() == [*sorted(left)[1:], 'image-0']
        held.close()
        maintain(repo)
    assert not found_by_check(path)


def found_by_check(path):
    """Return the findings of ``repository check``, in words."""
    return [str(f) for f in checker.check(path).findings]


if __name__ == '__main__':
    with contextlib.suppress(BrokenPipeError):
        if sys.argv[4:]:
            cache(*sys.argv[1:4])
        else:
            main(*sys.argv[1:])
