"""Drives of given speed, nothing of which is real.

A drive that moves `rate` bytes per second while `depth` operations of `block` bytes are under way
takes depth * block / rate seconds for each (J. Little, 1961). DriveIO sleeps for so long, and
whoever measures finds the rate again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aio.system import IO
from tests.simulated import SimulatedIO


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """How fast a drive reads, or writes."""

    bytes_per_s: float
    """Never more than this."""
    latency_s: float = 100e-6
    """Of an operation that is alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """The shape of a drive, which its directions share."""

    read: Direction
    write: Direction

    def seconds(self, writing: bool, block_bytes: int, under_way: int) -> float:
        """What an operation takes with so many under way, itself counted."""
        one = self.write if writing else self.read
        return max(one.latency_s, under_way * block_bytes / one.bytes_per_s)


class DriveIO(SimulatedIO):
    """An IO that takes as long as a drive of a given shape would, and fails as `inner` does.

    Args:
        drive: the shape.
        inner: where the bytes go; by default a MemoryIO without limit.
        sleep: how time passes, in seconds.
    """

    def __init__(
        self,
        drive: Drive,
        inner: IO | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(0, inner)
        self.drive = drive
        self._sleep = sleep
        self._under_way = [0, 0]
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
            self._under_way[writing] += 1
            under_way = sum(self._under_way)
        try:
            yield
            wanted = self.drive.seconds(writing, block_bytes, under_way)
            # What moving the bytes took in memory is part of it.
            self._sleep(max(0.0, wanted - (time.perf_counter() - started)))
        finally:
            with self._turn:
                self._under_way[writing] -= 1
