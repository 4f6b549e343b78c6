"""The best setting among many with few measurements: successive halving. Pure but for the clock.

[Note: Successive halving]
Every round gives all that are left the same time and drops the slower half; every round takes as
long as the others, so those that stay are measured ever longer (Karnin, Koren and Somekh, "Almost
optimal exploration in multi-armed bandits", 2013). It asks nothing of the shape: no slope that a
climber could follow, no single peak. Within a round all are measured in random order, in turns of
at most half a second, so that a drive whose speed drifts does so for all alike.

What has more bytes under way than the drive moves in a quarter of a second is left out: an
operation would take that long, and no drive needs as much to be busy (Little's law). So the first
to be measured is the setting with the fewest.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

TURN_SECONDS_MAX = 0.5
PLATEAU_SHARE = 0.98
"""Of the fastest rate seen: what reaches it counts as equal to it."""
UNDER_WAY_SECONDS_MAX = 0.25


class Spent(Exception):
    """What may be written has been written: no more can be measured."""


@dataclass(frozen=True, order=True, slots=True)
class Setting:
    """How to ask a drive for bytes."""

    backend: str
    block_bytes: int
    depth: int
    """Transfers under way."""

    @property
    def under_way_bytes(self) -> int:
        """Bytes under way."""
        return self.block_bytes * self.depth


Measure = Callable[[Setting, float], float]
"""Bytes per second of a setting, found within about so many seconds."""


@dataclass(slots=True)
class Sweep:
    """What was measured so far.

    Attributes:
        rates: by setting, bytes per second of each turn.
        left: settings that are still in the race, the best first once a round is over: the fastest,
            and of those that are about as fast the one with the fewest bytes under way.
    """

    rates: dict[Setting, list[float]] = field(default_factory=dict)
    left: list[Setting] = field(default_factory=list)

    @property
    def best(self) -> Setting:
        """The best of those still in the race."""
        return self.left[0]

    def rate(self, setting: Setting) -> float:
        """Bytes per second of a setting; the median of its turns."""
        return statistics.median(self.rates[setting])


def sweep(
    settings: Collection[Setting],
    measure: Measure,
    seconds: float,
    *,
    choice: random.Random,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float, Setting], None] = lambda share, setting: None,
) -> Sweep:
    """Finds the fastest of `settings` in about `seconds`.

    When the time is over, the best of what has been measured stands. At least one is.

    Raises:
        ValueError: there are no settings.
        Spent: by `measure`, before anything was measured.
    """
    if not settings:
        raise ValueError("sweep: asked to find the best of no settings; give at least one")
    found, started = Sweep(left=list(dict.fromkeys(settings))), clock()
    rounds = max(1, math.ceil(math.log2(len(found.left))))
    for number in range(rounds):
        now = clock() - started
        over = now + (seconds - now) / (rounds - number)
        each = max(0.0, over - now) / len(found.left)
        turns = max(1, math.ceil(each / TURN_SECONDS_MAX))
        try:
            for setting in _order(found, turns, choice):
                spent = clock() - started
                if found.rates and spent >= seconds:
                    break
                progress(min(1.0, spent / seconds) if seconds > 0 else 0.0, setting)
                found.rates.setdefault(setting, []).append(measure(setting, each / turns))
        except Spent:
            found.rates = {known: rates for known, rates in found.rates.items() if rates}
            if not found.rates:
                raise
            seconds = 0.0
        found.left = ranked(found, [s for s in found.left if s in found.rates])
        if clock() - started >= seconds:
            break
        found.left = found.left[: max(1, -(-len(found.left) // 2))]
    return found


def ranked(found: Sweep, settings: Collection[Setting]) -> list[Setting]:
    """Measured settings, the best first: see Sweep.left."""
    enough = PLATEAU_SHARE * max(map(found.rate, found.rates))

    def rank(setting: Setting) -> tuple[bool, float]:
        rate = found.rate(setting)
        return (rate < enough, -rate if rate < enough else setting.under_way_bytes)

    return sorted(settings, key=rank)


def _order(found: Sweep, turns: int, choice: random.Random) -> Iterator[Setting]:
    """Every setting that is left, as often as it has turns, but for what is too much."""
    too_much = []
    if not found.rates:
        yield min(found.left, key=lambda setting: setting.under_way_bytes)
    for _ in range(turns):
        for setting in choice.sample(found.left, len(found.left)):
            if _too_much(found, setting):
                too_much.append(setting)
            else:
                yield setting
    for setting in sorted(too_much, key=lambda setting: setting.under_way_bytes):
        if not _too_much(found, setting):  # A faster one has been seen since.
            yield setting


def _too_much(found: Sweep, setting: Setting) -> bool:
    """See [Note: Successive halving], at its end."""
    if setting in found.rates:
        return False
    fastest = max(rate for rates in found.rates.values() for rate in rates)
    return setting.under_way_bytes > UNDER_WAY_SECONDS_MAX * fastest
