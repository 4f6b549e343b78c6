"""What a benchmark of a drive finds, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aio.sweep import Setting

Mode = Literal["read", "write", "both"]

MODES: tuple[Mode, ...] = ("read", "write", "both")
"""`both`: transfers in turns of one read and one write, twice `depth` of them under way."""

DOING: dict[Mode, str] = {
    "read": "reading",
    "write": "writing",
    "both": "reading and writing at once",
}
"""What is measured, in words."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One stretch of load."""

    seconds: float
    bytes_read: int
    bytes_written: int
    cpu_seconds: float
    """Of the thread that asked and of the backend's, in user space and in the kernel."""
    latencies: tuple[int, ...]
    """Operations that took from 2**k to 2**(k+1) microseconds, by k."""

    @property
    def bytes(self) -> int:
        """Moved in either direction."""
        return self.bytes_read + self.bytes_written

    @property
    def bytes_per_s(self) -> float:
        """In both directions together."""
        return self.bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """What the sweep saw of one setting."""

    mode: Mode
    setting: Setting
    bytes_per_s: float
    """In both directions together; the median of its turns."""
    turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """How fast a drive is in the setting that the sweep chose, measured anew after it."""

    mode: Mode
    setting: Setting
    turns: int
    seconds: float
    """Of all turns together."""
    bytes_per_s: float
    """In both directions together; the median of the turns."""
    bytes_per_s_min: float
    bytes_per_s_max: float
    p50_s: float
    """Latency of an operation: half are over sooner; see `quantile`."""
    p99_s: float
    cpu_s_per_gb: float
    """The same for 10**9 bytes, of all turns."""

    @classmethod
    def of(cls, mode: Mode, setting: Setting, samples: Sequence[Sample]) -> Figure:
        """The figure of several stretches of load."""
        rates = [sample.bytes_per_s for sample in samples]
        latencies = [sum(counts) for counts in zip(*(sample.latencies for sample in samples))]
        moved = sum(sample.bytes for sample in samples)
        return cls(
            mode=mode,
            setting=setting,
            turns=len(samples),
            seconds=sum(sample.seconds for sample in samples),
            bytes_per_s=statistics.median(rates),
            bytes_per_s_min=min(rates),
            bytes_per_s_max=max(rates),
            p50_s=quantile(latencies, 0.50),
            p99_s=quantile(latencies, 0.99),
            cpu_s_per_gb=sum(sample.cpu_seconds for sample in samples) / moved * 1e9,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found for one path."""

    path: str
    file_bytes: int
    file_system: str
    direct: bool
    """Whether O_DIRECT held; without it the page cache was measured too."""
    notice: str | None
    fill_bytes_per_s: float
    """First write of the file, by which it was made."""
    bytes_written: int
    """All that was written for all of this."""
    cells: tuple[Cell, ...]
    figures: tuple[Figure, ...]
    left_out: tuple[tuple[Mode, str], ...] = ()
    """Modes without a figure, and why."""

    def figure(self, mode: Mode) -> Figure | None:
        """The figure of a mode, None where it was not measured."""
        return next((figure for figure in self.figures if figure.mode == mode), None)


def quantile(counts: Sequence[int], share: float) -> float:
    """Seconds that `share` of the operations in `Counters.latencies` do not exceed.

    Within a count they are taken to be spread evenly in the logarithm.

    >>> [round(quantile([0] * 9 + [100], share) * 1e3, 2) for share in (0.01, 0.5, 1.0)]
    [0.52, 0.72, 1.02]
    """
    wanted, below = share * sum(counts), 0
    for power, count in enumerate(counts):
        if count and below + count >= wanted:
            return float(2.0 ** (power + (wanted - below) / count) * 1e-6)
        below += count
    return 0.0
