"""The ops of a pass that come again in the next: made once, and issued each time.

What an op reads and writes, how its cells are called and what it does depends on the plan, on its
unit and on its position in the pass, and on nothing that changes from pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

from offload.books import Known
from offload.executor import Executor
from offload.ops import carry_out, compute, fetch, weight_in_use
from offload.program import Op, Use, Value, Verb

KNOWN_PER_UNIT_MAX = 16
"""What is kept for each unit: orders that change with the data have no end."""

Made = TypeVar("Made")


class KnownOps:
    """The ops that move and use the weights and gradients of an engine's units."""

    def __init__(self, executor: Executor):
        """Of the units of its plan; `executor` writes each op down when it is first asked for."""
        self._executor = executor
        self._plan = executor.plan
        self._turns: dict[Hashable, tuple[list[Known], Known]] = {}
        self._collects: dict[Hashable, Known] = {}
        self._carries: dict[Any, list[Known]] = {}

    def turn(self, verb: Verb, unit: int, position: int) -> tuple[list[Known], Known]:
        """What brings a unit's weights at a place in a pass, and the user's compute with them."""
        return self._turns.get((verb, unit, position)) or self._keep(
            self._turns, (verb, unit, position), lambda: self._turn(verb, unit, position)
        )

    def collect(self, unit: int, position: int) -> Known:
        """The user's compute that makes the gradient of a unit."""
        return self._collects.get((unit, position)) or self._keep(
            self._collects, (unit, position), lambda: self._collect(unit, position)
        )

    def carry_out(self, unit: int, deadline: int, *, first: bool) -> list[Known]:
        """What takes the gradient of a unit home: the `first` since it had none, or another."""
        return self._carries.get((unit, deadline, first)) or self._keep(
            self._carries,
            (unit, deadline, first),
            lambda: self._all(carry_out(self._plan, unit, deadline, first=first)),
        )

    def home_moved(self, unit: int) -> None:
        """The home of a unit's gradients is not where it was."""
        for key in [key for key in self._carries if key[0] == unit]:
            del self._carries[key]

    def collecting_place(self, unit: int) -> Use:
        """Where the gradient of a unit is collected."""
        place = self._plan.gradient_slot[unit] or self._plan.home("gradient", unit)
        return Use(place, Value("gradient", unit))

    def _turn(self, verb: Verb, unit: int, position: int) -> tuple[list[Known], Known]:
        weights = Use(weight_in_use(self._plan, unit), Value("weight", unit))
        op = replace(compute(self._plan, unit, verb, position), reads=(weights,), writes=())
        return self._all(fetch(self._plan, unit, position)), self._executor.known(op)

    def _collect(self, unit: int, position: int) -> Known:
        op = compute(self._plan, unit, Verb.BACKWARD, position)
        return self._executor.known(replace(op, reads=(), writes=(self.collecting_place(unit),)))

    def _all(self, ops: list[Op]) -> list[Known]:
        return [self._executor.known(op) for op in ops]

    def _keep(self, kept: dict[Hashable, Made], key: Hashable, make: Callable[[], Made]) -> Made:
        if len(kept) >= KNOWN_PER_UNIT_MAX * len(self._plan.profile.units):
            kept.clear()
        made = kept[key] = make()
        return made
