"""The best setting among many with few measurements: halving, then a final. Pure but for the clock.

[Note: Successive halving]
Every round gives all that are left the same time and drops half; every round takes as long as the
others, so those that stay are measured ever longer (Karnin, Koren and Somekh, "Almost optimal
exploration in multi-armed bandits", 2013). It asks nothing of the shape: no slope that a climber
could follow, no single peak. Half of the seats go to the fastest, the others to those with the
fewest bytes under way of what is nearly as fast. Within a round all are measured in random order,
in turns of at most half a second, so that a drive whose speed drifts does so for all alike.

[Note: The final]
The few that are left take short turns, round after round, until the time is over. What is compared
is the ratio of two in the same round, as a drive that is slow for a second is so for both; and its
median, as drives stall now and then for longer than a turn (means of such times say little, however
many there are). Fewer bytes under way are better (memory, latency) where they cost nothing, and
that is to be shown: chosen is the one with the fewest whose ratio to the fastest is above AS_FAST
with all of its interval. Where a drive is too noisy to show it, the fastest is chosen, which errs
by bytes and not by speed. What is surely slower leaves, and its time goes to the others.

What has more bytes under way than the drive moves in a quarter of a second is left out: an
operation would take that long, and no drive needs as much to be busy (Little's law). So the first
to be measured is the setting with the fewest.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from aio.ratio import Ratio

TURN_SECONDS_MAX = 0.5
FINAL_TURN_SECONDS = 0.05
SEARCH_SHARE = 0.4
"""Of the time, for the halving; the rest is the final's."""
FINALISTS_MAX = 6
NEARLY = 0.95
"""Of the fastest rate of a round: what reaches it may keep a seat for its few bytes under way."""
AS_FAST = 0.97
"""Of the fastest's rate: what is surely above it counts as equal."""
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
        left: settings that are still in the race, the best first once a round is over.
        rounds: rates in the final, by round.
    """

    rates: dict[Setting, list[float]] = field(default_factory=dict)
    left: list[Setting] = field(default_factory=list)
    rounds: dict[Setting, dict[int, float]] = field(default_factory=dict)

    @property
    def best(self) -> Setting:
        """The best of those still in the race."""
        return self.left[0]

    def rate(self, setting: Setting) -> float:
        """Bytes per second of a setting; the median of its turns."""
        return statistics.median(self.rates[setting])

    def compared(self, one: Setting, other: Setting) -> Ratio:
        """How fast one is in multiples of the other, by the rounds of the final with both."""
        ours, others = self.rounds.get(one, {}), self.rounds.get(other, {})
        return Ratio.middle([rate / others[n] for n, rate in ours.items() if n in others])


def sweep(
    settings: Collection[Setting],
    measure: Measure,
    seconds: float,
    *,
    choice: random.Random,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float, Setting], None] = lambda share, setting: None,
) -> Sweep:
    """Finds the best of `settings` in about `seconds`: the fastest, or what needs fewer bytes under
    way to be as fast. See [Note: The final].

    When the time is over, the best of what has been measured stands. At least one is.

    Raises:
        ValueError: there are no settings.
        Spent: by `measure`, before anything was measured.
    """
    if not settings:
        raise ValueError("sweep: asked to find the best of no settings; give at least one")
    race = _Race(measure, seconds, choice, clock, progress)
    found = race.found
    found.left = list(dict.fromkeys(settings))
    rounds = math.ceil(math.log2(max(1.0, len(found.left) / FINALISTS_MAX)))
    try:
        for number in range(rounds):
            race.halve(SEARCH_SHARE * seconds * (number + 1) / rounds)
        race.final()
    except Spent:
        if not any(found.rates.values()):
            raise
    found.rates = {setting: rates for setting, rates in found.rates.items() if rates}
    found.left = _by_rate(found, [s for s in found.left if s in found.rates] or found.rates)
    if (chosen := race.chosen()) is not None:
        found.left.remove(chosen)
        found.left.insert(0, chosen)
    return found


class _Race:
    """The settings of a sweep against each other and the clock."""

    def __init__(
        self,
        measure: Measure,
        seconds: float,
        choice: random.Random,
        clock: Callable[[], float],
        progress: Callable[[float, Setting], None],
    ) -> None:
        self.found = Sweep()
        self._finalists: list[Setting] = []
        self._measure = measure
        self._seconds = seconds
        self._choice = choice
        self._clock = clock
        self._started = clock()
        self._progress = progress

    def _left(self, over: float) -> float:
        """Seconds until so many have passed since the start."""
        return over - (self._clock() - self._started)

    def _turn(self, setting: Setting, seconds: float) -> float:
        left = self._left(self._seconds)
        self._progress(1 - max(0.0, left) / self._seconds if self._seconds else 0.0, setting)
        rates = self.found.rates.setdefault(setting, [])
        rates.append(self._measure(setting, max(0.0, seconds)))
        return rates[-1]

    def halve(self, over: float) -> None:
        """A round that ends when so many seconds have passed since the start."""
        found = self.found
        each = max(0.0, self._left(over)) / len(found.left)
        turns = max(1, math.ceil(each / TURN_SECONDS_MAX))
        for setting in _order(found, turns, self._choice):
            if found.rates and self._left(self._seconds) <= 0:
                break
            self._turn(setting, each / turns)
        measured = [setting for setting in found.left if found.rates.get(setting)]
        found.left = _seated(found, measured, max(1, -(-len(found.left) // 2)))

    def final(self) -> None:
        """See [Note: The final]."""
        found = self.found
        self._finalists = list(found.left)
        if not found.rates:
            self._turn(min(found.left, key=_lightness), FINAL_TURN_SECONDS)
        for number in itertools.count():
            if len(self._finalists) == 1:
                return
            for setting in self._choice.sample(self._finalists, len(self._finalists)):
                if self._left(self._seconds) <= 0:
                    return
                if not _too_much(found, setting):
                    rate = self._turn(setting, FINAL_TURN_SECONDS)
                    found.rounds.setdefault(setting, {})[number] = rate
            fastest = self._fastest()
            self._finalists = [
                s for s in self._finalists if found.compared(s, fastest).high >= AS_FAST
            ]

    def _fastest(self) -> Setting:
        known = [setting for setting in self._finalists if setting in self.found.rounds]
        return max(known, key=lambda s: statistics.median(self.found.rounds[s].values()))

    def chosen(self) -> Setting | None:
        """The winner of the final; None where it had no turn."""
        if not self.found.rounds:
            return None
        fastest = self._fastest()
        equal = [s for s in self._finalists if self.found.compared(s, fastest).low >= AS_FAST]
        return min([fastest, *equal], key=_lightness)


def _lightness(setting: Setting) -> int:
    return setting.under_way_bytes


def _by_rate(found: Sweep, settings: Collection[Setting]) -> list[Setting]:
    return sorted(settings, key=found.rate, reverse=True)


def _seated(found: Sweep, settings: Collection[Setting], seats: int) -> list[Setting]:
    """Those that stay after a round: see [Note: Successive halving]."""
    ordered = _by_rate(found, settings)
    stay = ordered[: -(-seats // 2)]
    enough = NEARLY * found.rate(ordered[0])
    light = [setting for setting in ordered if setting not in stay]
    light.sort(key=lambda s: (found.rate(s) < enough, _lightness(s)))
    return stay + light[: seats - len(stay)]


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
