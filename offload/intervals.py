"""Stretches of time: their union, what is in two of them, how long they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""From, to, in seconds."""


def union(found: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that neither overlap nor touch, in order."""
    joined: list[Interval] = []
    for start, stop in sorted(found):
        if stop <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that are in both of two unions."""
    total, k = 0.0, 0
    for start, stop in one:
        while k < len(other) and other[k][1] <= start:
            k += 1
        at = k
        while at < len(other) and other[at][0] < stop:
            total += min(stop, other[at][1]) - max(start, other[at][0])
            at += 1
    return total


def clip(found: Iterable[Interval], since: float, until: float) -> list[Interval]:
    """What of `found` lies between two moments."""
    cut = ((max(start, since), min(stop, until)) for start, stop in found)
    return [(start, stop) for start, stop in cut if start < stop]


def length(found: Iterable[Interval]) -> float:
    """Seconds of intervals that do not overlap."""
    return sum(stop - start for start, stop in found)
