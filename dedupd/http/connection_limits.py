# SPDX-License-Identifier: Apache-2.0

"""Who has the connections of a listener: so many of each peer, and in all.

A connection that only waits for its client to ask something is *spare*. It
ends when another one needs its place: one of the same peer if that has all
that a peer may have, else one of the peer that has most to spare. So a peer
that opens connections without end takes the places from itself.
"""

from collections.abc import Callable
from collections.abc import Hashable


class _Peer:
    """What one peer has."""

    def __init__(self) -> None:
        self.places = 0
        #: As a set, in the order in which they became spare.
        self.spare: dict[Place, None] = {}


class Place:
    """That of one connection.

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
        return self in self._peer.spare

    @spare.setter
    def spare(self, value: bool) -> None:
        if not value:
            self._peer.spare.pop(self, None)
        elif not self._left:
            self._peer.spare.setdefault(self)

    def leave(self) -> None:
        """The connection ends. Idempotent."""
        if not self._left:
            self.spare = False
            self._left = True
            self._places._leave(self._name, self._peer)


class Places:
    """Those of a listener.

    :ivar taken: so many are
    """

    def __init__(self) -> None:
        self.taken = 0
        self._peers: dict[Hashable, _Peer] = {}

    def take(self, name: Hashable, most: int, most_of_peer: int
             ) -> Place | None:
        """A place for a new connection, which is spare; None: there is none.

        :param name: of its peer
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
    """End the connection that is spare for the longest; False: none is."""
    place = next(iter(peer.spare), None)
    if place is None:
        return False
    place.leave()
    place.end()
    return True
