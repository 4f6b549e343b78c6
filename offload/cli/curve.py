"""A curve drawn with characters, of several points each: Braille patterns, or plain ASCII."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class _Cell:
    """A character and its points."""

    bits: tuple[tuple[int, ...], ...]
    """Of each point, by row and column."""
    characters: str
    """By the sum of the bits that are set."""


_BRAILLE = _Cell(
    ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)),
    " " + "".join(map(chr, range(0x2801, 0x2900))),
)
"""As Unicode 6.0 orders them (block U+2800)."""

_ASCII = _Cell(((1,), (2,)), " '.:")


def buckets(values: Sequence[float], count: int) -> list[float]:
    """Means of at most `count` stretches of `values`, as equal in length as they can be."""
    count = min(count, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)] if count else []
    return [math.fsum(values[first:last]) / (last - first) for first, last in pairwise(edges)]


def _points(values: Sequence[float], count: int) -> list[float]:
    """`count` values: means of stretches, or straight lines between values that are fewer."""
    if len(values) >= count:
        return buckets(values, count)
    found = []
    for number in range(count):
        at = number * (len(values) - 1) / max(1, count - 1)
        low = min(int(at), max(0, len(values) - 2))
        high = min(low + 1, len(values) - 1)
        found.append(values[low] + (values[high] - values[low]) * (at - low))
    return found


def curve(
    values: Sequence[float], columns: int, rows: int, *, ascii_only: bool = False
) -> list[str]:
    """`values` from left to right as `rows` lines of `columns` characters, the highest on top.

    Every column of points has one at least, and neighbours are joined; values that are not finite
    are left out. All blank without values.
    """
    cell = _ASCII if ascii_only else _BRAILLE
    high_cell, wide_cell = len(cell.bits), len(cell.bits[0])
    values = [value for value in values if math.isfinite(value)]
    down = high_cell * rows
    cells = [[0] * columns for _ in range(rows)]
    shown = _points(values, wide_cell * columns) if values else []
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    before: int | None = None
    for at, value in enumerate(shown):
        share = (high - value) / (high - low) if high > low else 0.5
        y = min(down - 1, max(0, round(share * (down - 1))))
        first, last = sorted((y, y if before is None else before))
        for point in range(first, last + 1):
            bit = cell.bits[point % high_cell][at % wide_cell]
            cells[point // high_cell][at // wide_cell] |= bit
        before = y
    return ["".join(cell.characters[found] for found in row) for row in cells]
