"""Drives of given shape, nothing of which is real: how fast by block size, depth and direction.

[Note: Little's law]
A drive that moves `rate` bytes per second while `depth` operations of `block` bytes are under way
takes depth * block / rate seconds for each (J. Little, 1961). So a shape needs only the rate;
DriveIO sleeps for what follows from it, and whoever measures finds the rate again.
"""

from __future__ import annotations

import contextlib
import math
import random
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
    """Of an operation that is alone, before its first byte."""
    lane_bytes_per_s: float = math.inf
    """Of one operation, however few there are."""
    depth_knee: float = math.inf
    """Operations under way beyond which each doubling costs the share `depth_loss`."""
    depth_loss: float = 0.0
    block_knee: float = math.inf
    """Bytes of an operation beyond which each doubling costs the share `block_loss`."""
    block_loss: float = 0.0

    def rate(self, block_bytes: int, depth: float) -> float:
        """Bytes per second with `depth` operations of `block_bytes` under way."""
        alone = block_bytes / (self.latency_s + block_bytes / self.lane_bytes_per_s)
        rate = min(self.bytes_per_s, depth * alone)
        rate *= math.pow(1 - self.depth_loss, math.log2(max(1.0, depth / self.depth_knee)))
        over = math.log2(max(1.0, block_bytes / self.block_knee))
        return rate * math.pow(1 - self.block_loss, over)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drive:
    """The shape of a drive, and how much of its speed is chance."""

    read: Direction
    write: Direction
    duplex: float = 0.0
    """1: reading and writing do not disturb each other; 0: they share the drive."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a measured rate."""
    slow_share: float = 0.0
    """Of the time the drive spends in a slow mode."""
    slow_factor: float = 1.0
    """How fast it is then, as a share."""

    def seconds(self, writing: bool, block_bytes: int, own: int, other: int) -> float:
        """What an operation takes with `own` of its direction under way, itself counted.

        other: of the other direction. See [Note: Little's law].
        """
        depth = own + (1 - self.duplex) * other
        direction = self.write if writing else self.read
        return depth * block_bytes / direction.rate(block_bytes, depth)

    def chance(self, choice: random.Random) -> float:
        """A factor for a measured rate."""
        slow = self.slow_factor if choice.random() < self.slow_share else 1.0
        return slow * math.exp(choice.gauss(0.0, self.noise))


class DriveIO(SimulatedIO):
    """An IO that takes as long as a drive of a given shape would, and fails as `inner` does.

    Args:
        drive: the shape.
        seed: of its noise, by number of the operation.
        inner: where the bytes go; by default a MemoryIO without limit.
        sleep: how time passes, in seconds.
    """

    def __init__(
        self,
        drive: Drive,
        seed: int = 0,
        inner: IO | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(seed, inner)
        self.drive = drive
        self._sleep = sleep
        self._under_way = [0, 0]
        self._noise = random.Random(f"{seed} noise")
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
            own, other = self._under_way[writing], self._under_way[not writing]
            factor = self.drive.chance(self._noise)
        try:
            yield
            wanted = self.drive.seconds(writing, block_bytes, own, other) / factor
            # What moving the bytes took in memory is part of it.
            self._sleep(max(0.0, wanted - (time.perf_counter() - started)))
        finally:
            with self._turn:
                self._under_way[writing] -= 1
