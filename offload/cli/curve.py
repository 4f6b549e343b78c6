"""A curve drawn with characters: Braille patterns, two points across and four down in each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of a point within its character, by row and column (Unicode 6.0, block U+2800)."""

_BLANK = 0x2800


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


def curve(values: Sequence[float], columns: int, rows: int) -> list[str]:
    """`values` from left to right as `rows` lines of `columns` characters, the highest on top.

    Every column of points has one at least, and neighbours are joined; values that are not finite
    are left out. All blank without values.
    """
    values = [value for value in values if math.isfinite(value)]
    down = 4 * rows
    cells = [[0] * columns for _ in range(rows)]
    shown = _points(values, 2 * columns) if values else []
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    before: int | None = None
    for at, value in enumerate(shown):
        share = (high - value) / (high - low) if high > low else 0.5
        y = min(down - 1, max(0, round(share * (down - 1))))
        first, last = sorted((y, y if before is None else before))
        for point in range(first, last + 1):
            cells[point // 4][at // 2] |= _DOTS[point % 4][at % 2]
        before = y
    return ["".join(chr(_BLANK + cell) if cell else " " for cell in row) for row in cells]
