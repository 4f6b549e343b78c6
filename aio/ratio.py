"""How much faster one is than the other, with what is known of that for sure."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Ratio:
    """The middle of ratios, with the interval that holds the true one in 95 of 100 cases."""

    mean: float
    """Geometric mean, or the median: see `of` and `middle`."""
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """The geometric mean of at least one; the interval is Student's, over the logarithms."""
        logs = [math.log(ratio) for ratio in ratios]
        mean, count = statistics.fmean(logs), len(logs)
        if count < 2:
            return cls(math.exp(mean), 0.0, math.inf, count)
        half = student95(count - 1) * statistics.stdev(logs) / math.sqrt(count)
        return cls(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)

    @classmethod
    def middle(cls, ratios: Sequence[float]) -> Ratio:
        """The median, which a few that are far off do not move; of none, nothing is known."""
        if not ratios:
            return cls(1.0, 0.0, math.inf, 0)
        ordered, outside = sorted(ratios), outside95(len(ratios))
        low, high = (0.0, math.inf) if outside < 0 else (ordered[outside], ordered[-1 - outside])
        return cls(statistics.median(ordered), low, high, len(ordered))


@functools.cache
def outside95(count: int) -> int:
    """How many of so many values lie below the interval of their median, and as many above it.

    The most with which both ends together miss the true median in at most 5 of 100 cases, by the
    binomial distribution (the sign test); -1 where there are too few values for any.

    >>> [outside95(n) for n in (0, 5, 6, 10, 25, 100)]
    [-1, -1, 0, 1, 7, 39]
    """
    below, missed = -1, 0.0
    while missed + math.comb(count, below + 1) / 2**count <= 0.025 and below < count:
        below += 1
        missed += math.comb(count, below) / 2**count
    return below


def student95(freedom: int) -> float:
    """The 97.5% quantile of Student's t, within 0.1% from 3 degrees of freedom on.

    The first two are exact; then the expansion of Abramowitz and Stegun, 26.7.5.

    >>> [round(student95(n), 2) for n in (1, 2, 3, 10, 100)]
    [12.71, 4.3, 3.18, 2.23, 1.98]
    """
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z, n = NormalDist().inv_cdf(0.975), float(freedom)
    found = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    found += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    found += (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    return found
