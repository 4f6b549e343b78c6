"""What a benchmark of the update finds, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["stream", "update", "peer"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was taken several times."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Spread:
        """The median and the extremes."""
        return cls(statistics.median(found), min(found), max(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """How fast one job was."""

    role: Role
    name: str
    """Of the kernel, the peer or the stream."""
    rounds: int
    seconds: Spread
    """Of the whole job."""
    parameters_per_s: Spread
    bytes_per_s: Spread
    """Counted are the bytes that our update must move, also for peers, which move more."""
    of_stream: Spread
    """Speed as a share of the faster stream's."""
    of_peer: Spread | None
    """Speed in multiples of the faster peer's; None without peers."""

    @property
    def label(self) -> str:
        """What to call it in a table."""
        return f"stream, {self.name}" if self.role == "stream" else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    """Many small tensors in one call of the first kernel that was asked for."""

    kernel: str
    tensors: int
    elements: int
    """Of each tensor."""
    seconds: Spread
    """Of one call."""
    extra_us_per_tensor: Spread
    """Microseconds more than the same call on one tensor of as many elements, by tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What was found for one format with one number of threads."""

    format: str
    threads: int
    elements: int
    bytes_per_element: float
    """That the update must move."""
    figures: tuple[Figure, ...]
    small: Small | None
    """None where the memory of the job is too small for it."""

    @property
    def best(self) -> Figure:
        """The fastest of our kernels."""
        ours = (figure for figure in self.figures if figure.role == "update")
        return min(ours, key=lambda figure: figure.seconds.median)
