"""Gradients over ranks: collected for the full unit, summed where they are owned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Literal

import torch

from cpu_adam import accumulate
from offload.model.gradients import Gradients
from offload.model.passes import Passes
from offload.model.snapshots import Snapshots
from offload.parallel.ranks import Ranks
from offload.program.compile import arrival, collected, fold
from offload.program.ops import Use, Value
from offload.runtime.memory import typed
from offload.runtime.runner import Runner


class SummedGradients(Gradients):
    """The gradients of an engine whose parameters are cut over ranks.

    `UnitGradient.kept` is what has a gradient: after a backward on any rank, inside one on this.
    """

    def __init__(
        self,
        runner: Runner,
        passes: Passes,
        snapshots: Snapshots,
        ranks: Ranks,
        reduce: Literal["mean", "sum"],
    ):
        """None is there; over `ranks` they are summed, or averaged."""
        super().__init__(runner, passes, snapshots)
        self._ranks = ranks
        ranks.gradients = self
        self._factor = 1 / ranks.group.ranks if reduce == "mean" else 1.0
        self._stored: list[set[int]] = [set() for _ in self.units]
        """By unit, the parameters whose home has a sum."""
        every = ((u, p) for u, one in enumerate(self.units) for p in sorted(one.trainable))
        self._numbers = dict(zip(every, count()))

    # -- in backward -----------------------------------------------------------------------------

    def collect(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Take over a gradient that autograd has just produced; the sum comes later."""
        super().collect(unit, parameter, gradient)

    def is_sum(self, unit: int) -> bool:
        """Whether it is that of all ranks, for all of the unit, and nothing is still to come."""
        whole = self.units[unit].kept >= self.units[unit].trainable
        return whole and self._ranks.is_through(unit)

    def _acquire(self, unit: int) -> None:
        self._ranks.land(unit)
        super()._acquire(unit)

    def _move_home(self, unit: int, new: frozenset[int], kept: frozenset[int]) -> None:
        self._ranks.exchange(unit, new)

    def offer(self, unit: int) -> bool:
        """Exchange what has come of a unit, as another rank asks; False where nothing has."""
        one = self.units[unit]
        if one.task is None:
            return False
        self._runner.finish(one.task)
        one.task = None
        self._collecting.discard(unit)
        arrived, one.arrived = frozenset(one.arrived), set()
        one.kept |= arrived
        self._ranks.begin_exchange(unit, arrived)
        return True

    @torch.no_grad()
    def prepare(self, unit: int, new: frozenset[int]) -> None:
        """Fill in what did not come, and scale: on the stream that exchanges it."""
        there = collected(self._plan, unit)
        for parameter in self.units[unit].trainable - new:
            self._view(there, unit, parameter).fill_(-0.0)
        if self._factor != 1:
            flat = self._runner.memory.at(there)
            for segment in self._plan.profile.full[unit].segments:
                if segment.trainable:
                    typed(
                        flat, segment.gradient_dtype, segment.gradient_offset, (segment.elements,)
                    ).mul_(self._factor)

    @torch.no_grad()
    def fold(self, unit: int, part_of: Callable[[int], torch.Tensor]) -> None:
        """Add the parts of all ranks to what is kept here."""
        runner, stored, every = self._runner, self._stored[unit], self.units[unit].trainable
        ranks, at_home = range(self._ranks.group.folds), self._plan.gradient_slot[unit] is None
        adds = bool(stored) and not at_home
        for turn in [[rank] for rank in ranks] if adds else [ranks]:
            (task,) = runner.start(
                runner.moves(fold, unit, self._passes.position + 1), self._passes.number
            )
            runner.begin(task)
            place = Use(arrival(self._plan, unit), Value("gradient", unit))
            into = runner.memory.at(place)
            if at_home and stored:
                for parameter in every - stored:
                    self._view(place, unit, parameter).fill_(-0.0)
            else:
                into.copy_(part_of(turn[0]))
                turn = turn[1:]
            for rank in turn:
                self._add(unit, into, part_of(rank))
            runner.finish(task)
            if not at_home:
                super()._move_home(unit, every, frozenset(stored))
            stored |= every
        self.units[unit].summed = frozenset()

    def _add(self, unit: int, into: torch.Tensor, part: torch.Tensor) -> None:
        for segment in self._plan.profile.units[unit].segments:
            if segment.trainable:
                which = segment.gradient_dtype, segment.gradient_offset, (segment.elements,)
                accumulate(typed(into, *which), typed(part, *which))

    # -- what came where -------------------------------------------------------------------------

    def came(self) -> int:
        """The parameters that have a gradient, a bit each."""
        return sum(
            1 << self._numbers[unit, parameter]
            for unit, one in enumerate(self.units)
            for parameter in one.kept
        )

    def also_came(self, members: int) -> None:
        """These have a gradient on some rank."""
        for (unit, parameter), number in self._numbers.items() if members else ():
            if members >> number & 1:
                self.units[unit].kept.add(parameter)

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient."""
        self._ranks.land(unit)
        return super().has(unit, parameter)

    def assign(self, unit: int, parameter: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient in, in place of the one that there is, if any."""
        self._ranks.land(unit)
        super().assign(unit, parameter, gradient)
        if gradient is not None:
            self._stored[unit].add(parameter)

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self._ranks.land(unit)
        super().give_up(unit, parameter)
        self._stored[unit].discard(parameter)
