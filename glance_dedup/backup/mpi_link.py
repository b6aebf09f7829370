# SPDX-License-Identifier: Apache-2.0

"""Messages between the ranks of several hosts, over MPI.

A rank that waits sleeps, since MPI's own barriers would keep a processor busy.
"""

from collections.abc import Callable
import time
from typing import Any

# Tag of the signs of life; the tags of exchanges are 1 and more.
_ALIVE = 0


class MpiLink:
    """The connection of a rank with those that ``mpiexec`` started."""

    def __init__(self) -> None:
        from mpi4py import MPI  # only in a process that mpiexec started
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self._status = MPI.Status()
        self._signs: dict[int, Any] = {}
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def send(self, rank: int, tag: int, message: bytes) -> Callable[[], bool]:
        """Begin to send a message; no other is under way to that rank.

        :returns: a function that returns whether the rank has taken it
        """
        request = self._comm.Issend(
            [message, len(message), self._mpi.BYTE], dest=rank, tag=tag)

        def is_taken(message: bytes = message) -> bool:
            return request.Test()   # the bytes stay until then
        return is_taken

    def receive(self, tag: int) -> tuple[int, bytes] | None:
        """Take out a message; None: none has come."""
        message = self._comm.Improbe(tag=tag, status=self._status)
        if message is None:
            return None
        data = bytearray(self._status.Get_count(self._mpi.BYTE))
        message.Recv([data, len(data), self._mpi.BYTE])
        return self._status.Get_source(), bytes(data)

    def show_life(self) -> None:
        """Send the others a sign of life, unless the last is under way."""
        for rank in set(range(self.size)) - {self.rank}:
            under_way = self._signs.get(rank)
            if under_way is None or under_way.Test():
                self._signs[rank] = self._comm.Isend(
                    [b'', 0, self._mpi.BYTE], dest=rank, tag=_ALIVE)

    def take_signs(self) -> bool:
        """Return whether there was a sign of life since the last call."""
        alive = False
        while message := self._comm.Improbe(tag=_ALIVE):
            message.Recv([bytearray(), 0, self._mpi.BYTE])
            alive = True
        return alive

    def wait(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def close(self) -> None:
        """Do nothing: MPI ends with the process."""

    def abort(self, status: int) -> None:
        """End all ranks."""
        self._comm.Abort(status)
