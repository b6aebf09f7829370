# SPDX-License-Identifier: Apache-2.0

"""Limits the connections of a listener, and those of each of its peers.

A connection that only waits for its client's next request is *spare*. It ends
when another connection needs its place. If the same peer has all connections
that a peer may have, one of its own ends; else one of the peer with the most
spare connections. So a peer that opens connections without end takes the
places from itself.
"""

from collections.abc import Callable
from collections.abc import Hashable


class _Peer:
    """The connections of one peer."""

    def __init__(self) -> None:
        self.places = 0
        #: An ordered set: the spare places, the longest spare first.
        self.spare: dict[Place, None] = {}


class Place:
    """The place of one connection.

    :ivar end: called when the place is given to another connection
    """

    def __init__(self, places: 'Places', name: Hashable,
                 peer: _Peer) -> None:
        self.end: Callable[[], object] = lambda: None
        self._places = places
        self._name = name
        self._peer = peer
        self._left = False

    @property
    def spare(self) -> bool:
        """Return whether the connection may end for the sake of another."""
        return self in self._peer.spare

    @spare.setter
    def spare(self, value: bool) -> None:
        if not value:
            self._peer.spare.pop(self, None)
        elif not self._left:
            self._peer.spare.setdefault(self)

    def leave(self) -> None:
        """Give the place back when the connection ends. Idempotent."""
        if not self._left:
            self.spare = False
            self._left = True
            self._places._leave(self._name, self._peer)


class Places:
    """The places of a listener.

    :ivar taken: the number of taken places
    """

    def __init__(self) -> None:
        self.taken = 0
        self._peers: dict[Hashable, _Peer] = {}

    def take(self, name: Hashable, most: int, most_of_peer: int
             ) -> Place | None:
        """A place for a new connection, spare at first; None: there is none.

        :param name: the name of its peer
        """
        peer = self._peers.get(name)
        if peer is not None and peer.places >= most_of_peer:
            if not _end_one(peer):
                return None
        elif self.taken >= most and not _end_one(max(
                self._peers.values(), key=lambda peer: len(peer.spare))):
            return None
        self.taken += 1
        peer = self._peers.setdefault(name, _Peer())
        peer.places += 1
        place = Place(self, name, peer)
        place.spare = True
        return place

    def _leave(self, name: Hashable, peer: _Peer) -> None:
        self.taken -= 1
        peer.places -= 1
        if not peer.places:
            del self._peers[name]


def _end_one(peer: _Peer) -> bool:
    """End the longest spare connection; False if none is spare."""
    place = next(iter(peer.spare), None)
    if place is None:
        return False
    place.leave()
    place.end()
    return True
