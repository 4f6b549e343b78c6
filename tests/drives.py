"""A drive of given speed, nothing of which is real."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tests.simulated import SimulatedIO


class DriveIO(SimulatedIO):
    """An IO that takes as long as a drive would, which all operations under way share.

    A drive that moves `rate` bytes per second while `depth` operations of `block` bytes are under
    way takes depth * block / rate seconds for each (J. Little, 1961). DriveIO sleeps for so long,
    and whoever measures finds the rate again.

    Args:
        read, write: bytes per second.
        latency_s: of an operation that is alone.
        sleep: how time passes, in seconds.
    """

    def __init__(
        self,
        read: float,
        write: float,
        latency_s: float = 100e-6,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(0)
        self._bytes_per_s = read, write
        self._latency_s = latency_s
        self._sleep = sleep
        self._under_way = 0
        self._turn = threading.Lock()

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.preadv."""
        with self._taking_its_time(False, sum(view.nbytes for view in views)):
            return super().preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """See IO.pwritev."""
        with self._taking_its_time(True, sum(view.nbytes for view in views)):
            return super().pwritev(fd, views, offset)

    @contextlib.contextmanager
    def _taking_its_time(self, writing: bool, block_bytes: int) -> Iterator[None]:
        started = time.perf_counter()
        with self._turn:
            self._under_way += 1
            moved = self._under_way * block_bytes
        try:
            yield
            wanted = max(self._latency_s, moved / self._bytes_per_s[writing])
            # What moving the bytes took in memory is part of it.
            self._sleep(max(0.0, wanted - (time.perf_counter() - started)))
        finally:
            with self._turn:
                self._under_way -= 1
