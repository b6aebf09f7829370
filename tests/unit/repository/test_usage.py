# SPDX-License-Identifier: Apache-2.0

"""Usage covers all images of a project, counted or not."""

import os
import random

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup.base import pacing
from glance_dedup.repository import projects
from glance_dedup.repository import usage
from tests.support.maintenance import account
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']


def stored(found, repo, project='one'):
    return found.stored(repo, project)


def expected(repo, project='one'):
    return sum(stat.stored_bytes for stat in map(repo.stat, repo.images())
               if stat.project == project)


@pytest.mark.parametrize('seed', range(4))
def test_against_the_recipes(repo, other, seed):
    """Each of two processes sees both processes' committed images."""
    rng = random.Random(seed)
    uses = {repo: usage.Usage(), other: usage.Usage()}
    for number in range(30):
        put(rng.choice([repo, other]), f'image-{number}', content(
            rng.randrange(20), rng.randrange(20)),
            project=rng.choice(['one', 'two']), dedup=rng.random() < 0.5)
        if number % 7 == 0:
            with maintaining(rng.choice([repo, other])) as maintainer:
                account(maintainer)
                # Merged recipes are in the spool once more.
                merger.run_once(maintainer, pacing.Pace())
        if rng.random() < 0.5:
            for handle, found in uses.items():
                for project in ('one', 'two', 'three'):
                    assert stored(found, handle, project) == expected(
                        repo, project)


def test_deleted_images_count_until_they_are_counted(repo):
    found = usage.Usage()
    for image_id in 'abc':
        put(repo, image_id, content(ord(image_id)), project='one')
    everything = expected(repo)
    assert stored(found, repo) == everything
    repo.delete('a')
    assert stored(found, repo) == everything
    # An object that never saw the image has no record of it.
    assert stored(usage.Usage(), repo) == expected(repo)
    with maintaining(repo) as maintainer:
        account(maintainer)
        assert stored(found, repo) == expected(repo)
        repo.delete('b')
        assert stored(found, repo) == stored(usage.Usage(), repo) > (
            expected(repo))
        collector.run_once(maintainer, pacing.Pace())
    assert stored(found, repo) == expected(repo)


def test_uploads_that_are_not_committed_do_not_count(repo):
    found = usage.Usage()
    with repo.begin('a', 'one') as transaction:
        transaction.write(content(1, 2))
        transaction.keep()
        assert stored(found, repo) == 0
        transaction.commit()
    assert stored(found, repo) == expected(repo) > 0


def test_the_maintainer_counts_at_the_same_moment(repo, monkeypatch):
    """Usage stays right while the maintainer counts at the same time."""
    found = usage.Usage()
    put(repo, 'a', content(1), project='one')
    put(repo, 'b', content(2), project='one')
    looks = []
    real = usage.Usage._waiting

    def waiting(self, *arguments):
        looks.append(1)
        if len(looks) == 1:
            with maintaining(repo) as maintainer:
                account(maintainer)
        return real(self, *arguments)
    monkeypatch.setattr(usage.Usage, '_waiting', waiting)
    assert stored(found, repo) == expected(repo)
    assert len(looks) == 2


def test_a_file_that_is_lost(path, repo, caplog):
    found = usage.Usage()
    put(repo, 'a', content(1), project='one')
    with maintaining(repo) as maintainer:
        account(maintainer)
    os.unlink(path / projects.NAME)
    for _ in range(2):
        assert stored(found, repo) is None
    assert caplog.text.count('is not known') == 1
    with maintaining(repo) as maintainer:
        account(maintainer)
    assert stored(found, repo) == expected(repo)
