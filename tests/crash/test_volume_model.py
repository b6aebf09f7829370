# SPDX-License-Identifier: Apache-2.0

"""The model has the possible contents of a volume after a crash."""

from tests.crash import expected_state
from tests.crash import volume_model
from tests.crash.volume_model import content
from tests.crash.volume_model import PART


def written(*firsts):
    model = volume_model.Model([0] * 4)
    for first in firsts:
        model.did(['write', 0, first, 2])
    return model


def test_a_machine_keeps_some_deeds_of_each_owner():
    model = written(1000, 2000)
    model.opened()
    model.did(['write', 1, 3000, 1])
    for sectors, counts in (([0, 0, 0, 0], (0, 0)), ([0, 3000, 0, 0], (0, 1)),
                            ([1000, 1001, 0, 0], (1, 0)),
                            ([2000, 3000, 0, 0], (2, 1))):
        assert model.find(content(sectors)) == counts
    # A later deed of one owner comes after the earlier ones.
    for sectors in ([2000, 1001, 0, 0], [0, 2001, 0, 0], [0] * 5):
        assert model.find(content(sectors)) is None


def test_what_is_durable_stays():
    model = written(1000, 2000)
    model.kept(1)
    assert model.find(content([0] * 4)) is None
    assert model.find(content([1000, 1001, 0, 0])) == (0,)
    assert model.find(content([2000, 2001, 0, 0])) == (1,)
    assert model.sectors() == [2000, 2001, 0, 0]


def test_what_is_durable_twice():
    model = written(1000, 2000)
    number = model.number()
    model.did(['write', 2, 3000, 1])
    model.kept(model.number())
    model.did(['write', 3, 4000, 1])
    model.kept(number)      # a checkpoint that began before
    assert model.find(content([2000, 2001, 3000, 0])) == (0,)
    assert model.find(content([2000, 2001, 3000, 4000])) == (1,)
    model.opened()
    model.did(['write', 0, 0, 4])
    assert model.number() == 1


def test_a_killed_process_loses_nothing_that_was_acknowledged():
    model = written(1000)
    model.returned()
    model.did(['write', 2, 2000, 1])
    model.killed()
    assert model.find(content([0] * 4)) is None
    assert model.find(content([1000, 1001, 0, 0])) == (0,)
    assert model.find(content([1000, 1001, 2000, 0])) == (1,)


def test_what_was_found_is_all_that_there_may_be():
    model = written(1000, 2000)
    model.opened((1,))
    assert model.find(content([2000, 2001, 0, 0])) is None
    assert model.find(content([0] * 4)) == (0, 0)


def test_sizes():
    sectors = [7] * (PART + 4)
    for deed in volume_model.shrinking(PART + 4, PART + 1):
        sectors = volume_model.apply(sectors, deed)
    assert sectors == [7] * (PART + 1)
    sectors = volume_model.apply(sectors, ['resize', PART + 3])
    assert sectors == [7] * (PART + 1) + [0, 0]
    assert list(volume_model.shrinking(2 * PART, PART)) == [['resize', PART]]


def test_an_image_has_the_same_bytes():
    sectors = [1000, 0, 0, 1000, 1001]
    spec = volume_model.runs(sectors)
    assert spec == [[1000, 1], [0, 2], [1000, 1], [1001, 1]]
    assert expected_state.make(spec) == content(sectors)
