"""The updates of a step, which run after `step()` has returned.

`step()` freezes what they need: by parameter the hyper-parameters and the number of the step, see
`ParameterStep`. A scheduler, or the user, may change the groups while the updates still run.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cpu_adam.hyper import Hyper
from offload.model.early_updates import Step
from offload.model.pending import PendingUnit
from offload.model.resident import Residents
from offload.planning.layout import Plan
from offload.program.compile import norm, square, update_order
from offload.program.compile import update as update_op
from offload.program.ops import Lane, Use
from offload.program.schedule import Task
from offload.program.verify import check_op
from offload.runtime.books import Known
from offload.runtime.device import Fence
from offload.runtime.executor import Executor
from offload.runtime.works import Clip, PythonWorks, Settings


@dataclass(slots=True)
class _Due:
    """The units of a step by what updates them, in the order in which they are needed."""

    at_once: list[int] = field(default_factory=list)
    """Residents with states on the device: the user's stream updates them."""
    pending: list[int] = field(default_factory=list)
    """Residents with states elsewhere: lanes update them."""
    streamed: list[int] = field(default_factory=list)


class Updates:
    """Issues the ops of each step."""

    def __init__(self, executor: Executor, max_grad_norm: float | None, residents: Residents):
        """Clip to `max_grad_norm` where given; the weights of `residents` are in torch's memory."""
        self._executor = executor
        self._residents = residents
        self._plan = executor.plan
        self._max_grad_norm = max_grad_norm
        order = update_order(self._plan)
        self._ops = {unit: update_op(self._plan, unit, deadline) for unit, deadline in order}
        """In the order of the updates."""
        for op in self._ops.values():
            check_op(self._plan, op)
        self._here = PythonWorks(self._plan, executor.memory, executor.store, executor.device)
        """What the user's thread does itself, and what moves torch's memory."""
        self._lane_shares = _lane_shares(self._plan)
        self._pending: list[Task] = []
        self._queued: Fence | None = None
        """Updates that the user's stream may still have to do."""
        self._clip: Clip | None = None
        self._normed: Task | None = None
        self._next: Clip | None = None
        """Of the step to come, where sums of squares are queued before it."""
        self._begun: dict[int, frozenset[int]] = {}
        """By unit, the parameters of which they are."""

    def settle(self) -> None:
        """Block until every update issued is done."""
        self._executor.lanes.wait(self._pending)
        self._pending = []
        if self._queued is not None:
            with self._executor.lanes.waited(Lane.COMPUTE):
                self._queued.synchronize()
            self._queued = None
        self._residents.pending.wait()

    def grad_norm(self) -> float | None:
        """The norm of the gradient of the last step, before clipping; None without clipping."""
        if self._clip is None or self._normed is None:
            return None
        self._executor.lanes.wait([self._normed])
        return self._clip.norm

    def sum_squares(
        self, unit: int, parameters: frozenset[int], pass_number: int, at: Use | None
    ) -> None:
        """Queue the sum of the squares of a gradient that has come, which lies `at` its home or on
        the way there."""
        works = self._executor.works
        if self._next is None:
            assert self._max_grad_norm is not None
            self._next = works.clip(self._max_grad_norm)
        self._begun[unit] = self._begun.get(unit, frozenset()) | parameters
        known = self._square(unit, parameters, at)
        self._executor.issue([known], pass_number, works.settings([], self._next))

    def issue(self, step: Step, pass_number: int, summed: Mapping[int, Collection[int]]) -> None:
        """Queue a step, or some units of it, to be done by the deadlines of pass `pass_number`.

        Of the parameters in `summed`, by unit, `sum_squares` was told.

        An error before the first op is queued leaves the step to be taken again. A later one ends
        the engine.
        """
        due, pending, works = self._due(step), self._residents.pending, self._executor.works
        if self._lane_shares and (due.at_once or due.pending):
            self.settle()  # The user's stream is about to use the workspace.
        clip = None
        if self._max_grad_norm is not None:
            clip, begun, self._next, self._begun = self._next, self._begun, None, {}
            summed = {unit: of for unit, of in summed.items() if unit in begun}
            if clip is None or any(not of <= step.get(u, {}).keys() for u, of in begun.items()):
                clip, summed = works.clip(self._max_grad_norm), {}
            self._squares_at_once([*due.at_once, *due.pending], step, clip)
        frozen, members = _numbered(step)
        settings = works.settings(frozen, clip)
        prepared = pending.prepare(due.pending, step)
        try:
            pending.hand_over(prepared, pass_number)
            if clip is not None:
                self._clip = clip
                self._find_norm(due.streamed, step, summed, settings, pass_number)
            self._update_at_once(due.at_once, step, members, Settings(frozen, clip))
            ours = {*due.pending, *due.streamed}
            in_lanes = [unit for unit in self._ops if unit in ours]
            known = [self._update(unit, members[unit], prepared.get(unit)) for unit in in_lanes]
            tasks = self._executor.issue(known, pass_number, settings)
            self._pending += tasks
            for unit, task in zip(in_lanes, tasks):
                if unit in prepared:
                    prepared[unit].task = task
            pending.start(prepared)
        except BaseException as error:
            self._executor.lanes.fail(error)  # Half of the weights would be of another step.
            raise

    def _due(self, step: Step) -> _Due:
        """The units that take part, split by who updates them."""
        due, in_lanes = _Due(), self._residents.pending.units
        for unit in (unit for unit in self._ops if unit in step):
            if unit not in self._residents:
                due.streamed.append(unit)
            else:
                (due.pending if unit in in_lanes else due.at_once).append(unit)
        return due

    # -- what the user's thread does itself --------------------------------------------------------

    def _squares_at_once(self, here: Sequence[int], step: Step, clip: Clip) -> None:
        """Put the sums of the squares of residents."""
        since, ops = time.perf_counter(), [square(self._plan, unit) for unit in here]
        for leaf, nodes in self._residents.squares(ops, step) if ops else ():
            clip.put(leaf, nodes)
        for op in ops:
            since = self._executor.lanes.count(op, since)

    @torch.no_grad()
    def _update_at_once(
        self, here: Sequence[int], step: Step, members: Mapping[int, _Members], settings: Settings
    ) -> None:
        if here and settings.clip is not None and self._normed is not None:
            self._executor.lanes.wait([self._normed])
        for unit in here:
            op, since = self._ops[unit], time.perf_counter()
            flat = self._residents.flat(unit, step)
            self._here.update(op, dict(members[unit]), flat)(settings)
            self._executor.lanes.count(op, since)
        device = self._executor.device
        if here and self._lane_shares:
            self._executor.lanes.drain()  # Before a lane uses the workspace.
        elif here:
            self._queued = device.fence(device.stream())

    # -- what lanes do -----------------------------------------------------------------------------

    def _find_norm(
        self,
        streamed: Sequence[int],
        step: Step,
        summed: Mapping[int, Collection[int]],
        settings: Any,
        pass_number: int,
    ) -> None:
        """Queue the norm, and what of it lanes sum."""
        taking = {unit: frozenset(step[unit]) for unit in streamed}
        ops = [self._square(u, of) for u, of in taking.items() if summed.get(u) != of]
        executor, plan = self._executor, self._plan

        def known() -> Known:
            sums = [square(plan, unit).writes[0] for unit in streamed]
            return executor.known(norm(sums), executor.works.norm())

        ops.append(executor.kept(("norm", *streamed), known))
        self._normed = executor.issue(ops, pass_number, settings)[-1]

    def _square(self, unit: int, taking: frozenset[int], at: Use | None = None) -> Known:
        """The op that sums the squares of some parameters of a unit."""
        executor = self._executor

        def known() -> Known:
            op = square(self._plan, unit, at)
            return executor.known(op, executor.works.squares(op, taking))

        return executor.kept(("square", unit, taking, at), known)

    def _update(self, unit: int, members: _Members, one: PendingUnit | None) -> Known:
        """The op that updates a unit."""
        op, executor = self._ops[unit], self._executor
        works, taking = executor.works, dict(members)
        if one is not None:  # Torch's memory is another one in each step.
            return executor.again(op, works.update(op, taking, one.flat))
        return executor.kept(
            ("update", unit, members), lambda: executor.known(op, works.update(op, taking))
        )


_Members = tuple[tuple[int, int], ...]
"""Parameters of a unit that take part in a step, each with its place in `Settings.steps`."""


def _numbered(step: Step) -> tuple[list[tuple[Hyper, int]], dict[int, _Members]]:
    """What the parameters of a step are updated by, each once, and by unit who by which."""
    rows, found, members = dict[tuple[int, int], int](), list[tuple[Hyper, int]](), {}
    for unit in sorted(step):
        mine = []
        for parameter, one in sorted(step[unit].items()):
            row = rows.setdefault((id(one.hyper), one.number), len(found))
            if row == len(found):
                found.append((one.hyper, one.number))
            mine.append((parameter, row))
        members[unit] = tuple(mine)
    return found, members


def _lane_shares(plan: Plan) -> bool:
    """Whether a lane, too, works in the workspace, on units that are no residents."""
    others = (p for unit, p in enumerate(plan.placements) if unit not in plan.residents)
    return any(p.state == "device" or (plan.clips and p.gradient == "device") for p in others)
