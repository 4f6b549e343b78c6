"""What a backend has done so far, in numbers."""

from __future__ import annotations

import operator
from dataclasses import dataclass

LATENCIES = 32
"""Length of the latency histogram: its last count takes what is longer than 35 minutes."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of a backend since it was opened, at one moment. Pieces still under way are not in."""

    bytes_read: int = 0
    bytes_written: int = 0
    operations: int = 0
    """Calls of the system that moved bytes, or were to."""
    retries: int = 0
    """Operations that had to be followed by another for the same bytes."""
    depth_max: int = 0
    """Most pieces that were under way at once."""
    latencies: tuple[int, ...] = (0,) * LATENCIES
    """Operations that took from 2**k to 2**(k+1) microseconds; the first, all below 2."""
    cpu_seconds: float = 0.0
    """Processor time of the backend's threads; workers of the kernel's own are not in it."""

    def __add__(self, other: Counters) -> Counters:
        """Of both together; `depth_max` is that of the deeper one, as they had theirs apart."""
        return Counters(
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            operations=self.operations + other.operations,
            retries=self.retries + other.retries,
            depth_max=max(self.depth_max, other.depth_max),
            latencies=tuple(map(operator.add, self.latencies, other.latencies)),
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
        )

    def seconds_at(self, share: float) -> float:
        """Seconds within which this share of the operations was over, a power of two from above;
        0 without any.

        >>> Counters(latencies=(0, 3, 1, *[0] * 29)).seconds_at(0.5)
        4e-06
        """
        wanted, seen = share * sum(self.latencies), 0
        for bucket, count in enumerate(self.latencies):
            seen += count
            if count and seen >= wanted:
                return float(2 ** (bucket + 1)) * 1e-6
        return 0.0


def latency_bucket(seconds: float) -> int:
    """The number of the count in `Counters.latencies` for an operation of so many seconds."""
    return min(max(int(seconds * 1e6), 1).bit_length() - 1, LATENCIES - 1)
