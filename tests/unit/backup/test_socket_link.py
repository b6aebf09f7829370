# SPDX-License-Identifier: Apache-2.0

"""Messages between the ranks of one host."""

import pytest

from glance_dedup.backup import rank_exchange
from glance_dedup.backup import socket_link
from tests.support import repositories


@pytest.fixture
def links():
    """Three ranks in one process."""
    pairs = [socket_link.make_pair() for _ in range(3)]
    made = [socket_link.SocketLink(
        rank, receiver, [sender.dup() for _, sender in pairs])
        for rank, (receiver, _) in enumerate(pairs)]
    for _, sender in pairs:
        sender.close()
    yield made
    for link in made:
        link._unsent.clear()        # nobody receives it any more
        link.close()


def received(link, tag):
    found = []
    repositories.eventually(
        lambda: found.append(link.receive(tag)) or found[-1])
    return found[-1]


def test_the_sender_waits_until_a_message_is_taken_out(links):
    is_taken = links[0].send(2, 7, b'first')
    assert not is_taken()
    assert links[2].receive(8) is None      # it is of another exchange
    assert not is_taken()
    assert received(links[2], 7) == (0, b'first')
    repositories.eventually(is_taken)
    assert links[1].receive(7) is None


def test_messages_of_a_later_exchange_wait(links):
    later, now = links[0].send(2, 2, b'later'), links[1].send(2, 1, b'now')
    assert received(links[2], 1) == (1, b'now')
    repositories.eventually(now)
    assert not later()
    assert received(links[2], 2) == (0, b'later')
    repositories.eventually(later)


def test_a_full_socket(links):
    """A message waits until there is room; signs of life do not pile up."""
    data = bytes(range(256)) * 200
    count = 0
    while not links[0]._unsent:
        links[0]._post(2, socket_link._MESSAGE, count, data)
        count += 1
    for _ in range(1000):
        links[0].show_life()
    assert {len(unsent) for unsent in links[0]._unsent.values()} == {1}
    for tag in range(count):
        found = []
        repositories.eventually(lambda: (
            links[0].take_signs(), found.append(links[2].receive(tag)),
            found[-1])[-1])
        assert found[-1] == (0, data)


def test_the_largest_message(links):
    message = rank_exchange.pack(b'scan', bytes(rank_exchange.BUFFER))
    assert len(message) == rank_exchange.max_message()
    links[1].send(0, 1, message)
    assert received(links[0], 1) == (1, message)


def test_signs_of_life(links):
    assert not links[1].take_signs()
    links[0].show_life()
    repositories.eventually(links[1].take_signs)
    assert not links[1].take_signs()
    assert not links[0].take_signs()


def test_signs_of_life_of_ranks_that_work_alone(links):
    """While no rank receives, signs are sent again once there is room."""
    while not links[0]._unsent:
        links[0].show_life()
    for link in links[1:]:
        link.take_signs()
    links[0].show_life()
    assert not links[0]._unsent
    assert all(link.take_signs() for link in links[1:])


def test_a_working_rank_takes_in_signs(links):
    """So the others' signs do not fill its socket for good."""
    for _ in range(3000):
        links[0].show_life()
        links[1].show_life()
    assert 1 not in links[0]._unsent and 0 not in links[1]._unsent


def test_a_rank_that_died(links):
    """Sending to it fails nowhere: the job ends the others."""
    links[2].close()
    is_taken = links[0].send(2, 1, b'x')
    links[0].show_life()
    assert not is_taken()


def test_waiting_ends_when_a_message_comes(links):
    links[0].send(1, 1, b'x')
    links[1].wait(600)
    assert links[1].receive(1) == (0, b'x')


def test_closing_sends_what_waits(links):
    data = bytes(50000)
    while not links[0]._unsent:
        links[0]._post(1, socket_link._MESSAGE, 1, data)
    taken = []
    wait = links[0].wait

    def take_and_wait(seconds):
        taken.append(links[1].receive(1))
        wait(seconds)
    links[0].wait = take_and_wait
    links[0].close()
    assert not links[0]._unsent and (0, data) in taken
