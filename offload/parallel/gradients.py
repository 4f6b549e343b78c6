"""Gradients over ranks: collected for the full unit, sent to the owners, and summed there.

[Note: Sums over ranks]
An owner gets the gradients of all ranks and adds them to what it keeps one after the other, in the
order of ranks, by the rounding of a micro-batch. So N ranks with A micro-batches each sum as one
process does that takes the N * A in turn. Over two levels what comes are sums already, see [Note:
Two levels]. Where a parameter got no gradient on a rank, that rank sends -0.0, which added to any
number is that number.

With `Config(shard=1)` a rank first adds its own micro-batches, each in the slot that its unit has
for itself, and sends their sum in the last backward of a step, or in `step()`. So N ranks sum as
one process does that adds the A micro-batches of each rank by themselves, and then these sums.

A gradient goes this way: `collect` puts it into the slot of its full unit, `_move_home` waits for
its place in the order of all ranks, `_exchange` sends it, and `_fold` adds what came from them to
what is kept. `serve` sends it where another rank comes to its end first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

import torch

from cpu_adam import accumulate
from offload.model.engine import Engine
from offload.model.gradients import Gradients
from offload.parallel.collectives import Collectives
from offload.parallel.group import Group, Handles
from offload.planning.layout import Place
from offload.program.compile import arrival, bring_sum, collected, exchange, fold
from offload.program.ops import Op, Use, Value, Verb
from offload.runtime.memory import typed
from offload.runtime.runner import Task


class SummedGradients(Gradients):
    """The gradients of an engine whose parameters are cut over ranks.

    `UnitGradient.kept` is what has a gradient: after a backward on any rank, inside one on this.
    """

    def __init__(self, group: Group, engine: Engine, reduce: Literal["mean", "sum"]):
        """None is there; over the ranks of `group` they are summed, or averaged."""
        super().__init__(engine.runner, engine.passes, engine.snapshots)
        self.collectives, self._group = Collectives(group, engine, self), group
        self._own: list[set[int]] = [set() for _ in self.units]
        """By unit, the parameters of which the slot has a sum of this rank's, to be sent later."""
        self._owed: set[int] = set()
        """Units of which some rank may have such a sum, after a backward."""
        self._factor = 1 / group.ranks if reduce == "mean" else 1.0
        self._stored: list[set[int]] = [set() for _ in self.units]
        """By unit, the parameters whose home has a sum."""
        self._trainable = [
            (u, p) for u, one in enumerate(self.units) for p in sorted(one.trainable)
        ]
        """Units and parameters, in the order of their bits."""

    # -- in backward -----------------------------------------------------------------------------

    def collect(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Collect a gradient of this rank. Returns None: squares are of sums, which come later."""
        super().collect(unit, parameter, gradient)

    def is_sum(self, unit: int) -> bool:
        """Whether it is that of all ranks, for all of the unit, and nothing is still to come."""
        whole = self.units[unit].kept >= self.units[unit].trainable and not self._own[unit]
        return whole and self.collectives.is_through(unit)

    def _free_slot(self, unit: int) -> None:
        super()._free_slot(unit)
        other = self.collectives.exchanging
        if other is not None and self._slots[other] == self._slots[unit]:
            self.collectives.end_exchange()

    def _present(self, unit: int) -> Collection[int]:
        return self._own[unit]

    def _move_home(self, unit: int, new: frozenset[int], kept: frozenset[int]) -> None:
        self._own[unit] |= new
        if self.collectives.sends:
            self.collectives.exchange(unit, partial(self._exchange, unit))

    def send_all(self) -> None:
        """Send on everything that has come anywhere; in the last backward, own sums, too."""
        super().send_all()
        if self.collectives.sends and self._passes.verb is Verb.BACKWARD:
            self._send_own()

    def _send_own(self) -> None:
        for unit, own in enumerate(self._own):
            if own:
                self.collectives.exchange(unit, partial(self._exchange, unit))

    def let_go(self) -> None:
        """The homes will be read: let own sums be there, too, and show none any more."""
        self._send_own()
        self.collectives.end_exchange()
        super().let_go()

    def serve(self, unit: int) -> None:
        """Send what has come of a unit, as another rank asks: -0.0 where nothing has."""
        one = self.units[unit]
        if one.task is not None:
            arrived = self._end_collecting(unit, one.task)
            one.kept |= arrived
            self._own[unit] |= arrived
        if self._own[unit]:
            self._exchange(unit)
            return
        self._owed.discard(unit)
        reserve = Use(Place("device", "reserve"), Value("gradient", unit))
        for segment in self._segments(reserve):
            segment.fill_(-0.0)
        self.collectives.exchange_began(unit, self._send(unit, reserve), partial(self._fold, unit))

    def _exchange(self, unit: int) -> None:
        """Send what the slot has of a gradient to its owners."""
        new, self._own[unit] = self._own[unit], set()
        self._owed.discard(unit)
        (task,), source = self._start(exchange, unit), collected(self._plan, unit)
        with self._group.comm_stream():
            self._runner.begin(task)
            self._prepare(unit, source, new)
            works = self._send(unit, source)

        def over() -> None:
            self._runner.finish(task)
            self._fold(unit)

        self.collectives.exchange_began(unit, works, over)

    def _start(self, make: Callable[..., list[Op]], unit: int) -> list[Task]:
        moves = self._runner.moves(make, unit, self._passes.position + 1)
        return self._runner.start(moves, self._passes.number)

    @torch.no_grad()
    def _prepare(self, unit: int, source: Use, new: set[int]) -> None:
        """Fill in what did not come, and scale: on the stream that sends it."""
        for parameter in self.units[unit].trainable - new:
            self._view(source, unit, parameter).fill_(-0.0)
        if self._factor != 1:
            for segment in self._segments(source):
                segment.mul_(self._factor)

    def _send(self, unit: int, source: Use) -> Handles:
        if self._stored[unit]:
            self._start(bring_sum, unit)
        pairs = zip(self._segments(self._came(unit)), self._segments(source))
        return [work for pair in pairs for work in self._group.exchange(*pair)]

    @torch.no_grad()
    def _fold(self, unit: int) -> None:
        """Add the parts of all ranks to what is kept here."""
        stored, every = self._stored[unit], self.units[unit].trainable
        sums = Use(arrival(self._plan, unit), Value("gradient", unit))
        (task,) = self._start(fold, unit)
        self._runner.begin(task)
        for parameter in every - stored if stored else ():
            self._view(sums, unit, parameter).fill_(-0.0)
        for into, came in zip(self._segments(sums), self._segments(self._came(unit))):
            parts = list(came.view(self._group.ranks, -1)[: self._group.folds])
            if not stored:
                into.copy_(parts.pop(0))
            for part in parts:
                accumulate(into, part)
        self._runner.finish(task)
        if self._plan.gradient_slot[unit] is not None:
            super()._move_home(unit, every, frozenset())
        stored |= every
        self.units[unit].summed = frozenset()

    @staticmethod
    def _came(unit: int) -> Use:
        """Where the parts of a gradient come from all ranks."""
        return Use(Place("device", "exchange"), Value("gradient", unit))

    def _segments(self, use: Use) -> list[torch.Tensor]:
        """The segments of a gradient, flat, in a place of a memory tier."""
        flat = self._runner.memory.at(use)
        return [
            typed(flat, one.gradient_dtype, one.gradient_offset, (one.elements,))
            for one in self._layout_at(use).segments
            if one.trainable
        ]

    # -- what came where -------------------------------------------------------------------------

    def came(self) -> int:
        """The parameters that have a gradient, or a sum to be sent later, a bit each."""
        there = [unit.kept for unit in self.units] if self.collectives.sends else self._own
        bits = enumerate(self._trainable)
        return sum(1 << bit for bit, (unit, index) in bits if index in there[unit])

    def also_came(self, members: int) -> None:
        """These have a gradient on some rank, as a backward ends."""
        for bit, (unit, index) in enumerate(self._trainable):
            if members >> bit & 1:
                self.units[unit].kept.add(index)
                if not self.collectives.sends:
                    self._owed.add(unit)

    def _require_sum(self, unit: int) -> None:
        if unit in self._owed or self._own[unit]:
            raise RuntimeError(
                f"asked for a gradient of {self._plan.profile.full[unit].name} between backward "
                "and step(): with Config(shard=1) each rank has its own sum until then. Scale the "
                "loss, clip by Config(max_grad_norm=...), or take shard=2"
            )

    def assign(self, unit: int, parameter: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient in, in place of the one that there is, if any."""
        super().assign(unit, parameter, gradient)
        if gradient is not None:
            self._stored[unit].add(parameter)

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        super().give_up(unit, parameter)
        self._stored[unit].discard(parameter)
        self._own[unit].discard(parameter)
        if not self.units[unit].kept:
            self._owed.discard(unit)
