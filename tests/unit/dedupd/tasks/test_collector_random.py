# SPDX-License-Identifier: Apache-2.0

"""Collection at random, compared with a model, and kills at any step."""

import random

import pytest

from dedupd.tasks import collector
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from tests.support import maintenance
from tests.support.maintenance import BLOCK
from tests.support.maintenance import content
from tests.support.maintenance import maintaining
from tests.support import repositories
from tests.support.repositories import put
from tests.unit.dedupd.tasks.collecting import collect

pytest_plugins = ['tests.support.maintainer_fixtures']


@pytest.mark.parametrize('seed', range(6))
def test_against_a_model(path, repo, other, seed):
    """Random writes, deletions and reads between any steps lose no data."""
    rng = random.Random(seed)
    model, reading, writing = {}, [], []

    def act():
        what = rng.randrange(9)
        handle = rng.choice([repo, other])
        if what < 3:
            image_id = f'image-{rng.randrange(9)}'
            if image_id not in model:
                model[image_id] = content(
                    *(rng.randrange(25) for _ in range(rng.randrange(5))),
                    blocks=rng.randrange(1, 12))
                put(handle, image_id, model[image_id])
        elif what < 5 and model:
            image_id = rng.choice(sorted(model))
            handle.delete(image_id)
            del model[image_id]
        elif what == 5 and model and len(reading) < 4:
            image_id = rng.choice(sorted(model))
            reading.append((handle.open_image(image_id), model[image_id]))
        elif what == 6 and reading:
            image, data = reading.pop(rng.randrange(len(reading)))
            assert image.read() == data
            image.close()
        elif what == 7 and len(writing) < 2:
            image_id = f'slow-{rng.getrandbits(64)}'
            data = content(rng.randrange(25), rng.randrange(25))
            transaction = handle.begin(image_id)
            transaction.write(data[:7 * BLOCK])
            writing.append((transaction, data))
        elif what == 8 and writing:
            transaction, data = writing.pop()
            transaction.write(data[7 * BLOCK:])
            if rng.random() < 0.7:
                transaction.commit()
                model[transaction.image_id] = data
            else:
                transaction.abort()

    busy = [False]

    def hook(name, arguments, before):
        if rng.random() < 0.03 and not busy[0]:
            busy[0] = True
            act()
            busy[0] = False
    for _ in range(25):
        with maintaining(repo, hook) as maintainer:
            for _ in range(2):
                act()
                collector.run_once(maintainer, pacing.Pace(), live_share=50,
                                   evacuate_share=0)
            maintenance.unwatch(maintainer)
            assert maintainer.warnings == []
            for image, data in reading:
                assert image.read() == data
            maintenance.require_contents(other, model)
    for transaction, _ in writing:
        transaction.abort()
    for image, _ in reading:
        image.close()
    with maintaining(repo) as maintainer:
        for _ in range(3):
            collector.run_once(maintainer, pacing.Pace(), evacuate_share=20)
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)
    repositories.require_clean(path)


@pytest.mark.parametrize('seed', range(4))
def test_killed_at_random(path, repo, other, seed):
    """A collection that is killed at a random step loses no data."""
    model = maintenance.kill_at_random(
        path, other, lambda maintainer: collector.run_once(
            maintainer, pacing.Pace(), live_share=70, evacuate_share=30), seed)
    with maintaining(repo) as maintainer:
        for _ in range(3):
            collect(maintainer, live_share=70, evacuate_share=30)
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, model)
    repositories.require_clean(path)


@pytest.mark.parametrize('step', range(1, 70, 3))
def test_killed_at_each_step(path, repo, other, step):
    put(other, 'stays', content(1, 2, 30))
    put(other, 'goes', content(*range(14)))
    with maintaining(repo) as maintainer:
        collect(maintainer)
    other.delete('goes')
    put(other, 'new', content(5, 40))
    maintainer = maintainer_role.Maintainer(repo)
    try:
        collect(maintenance.watch(maintainer, maintenance.Kill(step)),
                live_share=90)
    except maintenance.Killed:
        pass
    maintenance.kill(maintainer)
    with maintaining(other) as maintainer:
        assert maintainer.warnings == []
        collect(maintainer)
        maintenance.require_collected(maintainer)
    maintenance.require_contents(other, {'stays': content(1, 2, 30),
                                         'new': content(5, 40)})
    repositories.require_clean(path)
