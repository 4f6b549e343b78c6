"""What a backend has done so far, in numbers."""

from __future__ import annotations

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


def latency_bucket(seconds: float) -> int:
    """The number of the count in `Counters.latencies` for an operation of so many seconds."""
    return min(max(int(seconds * 1e6), 1).bit_length() - 1, LATENCIES - 1)
