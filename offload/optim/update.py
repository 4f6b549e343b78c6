"""The updates of a step, which run after `step()` has returned.

`step()` freezes what they need: by parameter the hyper-parameters and the number of the step, see
`ParameterStep`. A scheduler, or the user, may change the groups while the updates still run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offload.model.early_updates import ParameterStep, Step
from offload.model.resident import Residents, addresses
from offload.program.compile import norm, square, update_order
from offload.program.compile import update as update_op
from offload.program.ops import Lane, Op, Use
from offload.runtime.device import Fence
from offload.runtime.runner import Runner, Task
from offload.runtime.works import Flat, Job, Work


class Updates:
    """Issues the ops of each step."""

    def __init__(self, runner: Runner, max_grad_norm: float | None, residents: Residents):
        """Clip to `max_grad_norm` where given; the weights of `residents` are in torch's memory."""
        self._runner = runner
        self._residents = residents
        self._plan = runner.plan
        self._max_grad_norm = max_grad_norm
        order = update_order(self._plan)
        self._ops = {unit: update_op(self._plan, unit, deadline) for unit, deadline in order}
        """In the order of the updates."""
        self._pending: dict[int, Task] = {}
        """By unit."""
        self._queued: Fence | None = None
        """Updates that the user's stream may still have to do."""
        self._clip: Any = None
        self._normed: Task | None = None
        self._next: Any = None
        """Of the step to come, where sums of squares are queued before it."""
        self._begun: dict[int, frozenset[int]] = {}
        """By unit, the parameters of which they are."""
        self.shares: list[Callable[[Any], None]] = []
        """Over several ranks: what gives the norm's sums of each to all, on the user's thread."""
        self._sums: list[Task] = []
        """Of the step to come, in the device's workspace, in which those of residents are too."""

    def settle(self) -> None:
        """Block until every update issued is done."""
        self._runner.wait(self._pending.values())
        self._pending = {}
        if self._queued is not None:
            with self._runner.waited(Lane.COMPUTE):
                self._queued.synchronize()
            self._queued = None
        self._residents.wait()

    def begun(self) -> dict[int, Task]:
        """The updates of the last step that lanes do, by unit and in their order; those that are
        the device's were waited for."""
        if (queued := self._queued) is not None:  # The user's thread forgets it.
            queued.synchronize()
        return dict(self._pending)

    def grad_norm(self) -> float | None:
        """The norm of the gradient of the last step, before clipping; None without clipping."""
        if self._clip is None or self._normed is None:
            return None
        self._runner.wait([self._normed])
        return float(self._clip.norm)

    def sum_squares(
        self, unit: int, parameters: frozenset[int], pass_number: int, at: Use | None
    ) -> None:
        """Queue the sum of the squares of a gradient that lies `at` its home, or on the way."""
        runner = self._runner
        if self._next is None:
            assert self._max_grad_norm is not None
            self._next = runner.clip(self._max_grad_norm)
        self._begun[unit] = self._begun.get(unit, frozenset()) | parameters
        phase = runner.phase(
            ("square", unit, parameters, at), lambda: [self._square(unit, parameters, at)]
        )
        tasks = runner.start(phase, pass_number, runner.settings([], self._next))
        if self._plan.placements[unit].gradient == "device":
            self._sums += tasks

    def issue(self, step: Step, pass_number: int, summed: Mapping[int, Collection[int]]) -> None:
        """Queue a step, or some units of it, to be done by the deadlines of pass `pass_number`; of
        the parameters in `summed`, by unit, `sum_squares` was told. An error before the first op is
        queued leaves the step to be taken again, a later one ends the engine."""
        runner, residents = self._runner, self._residents
        due = [unit for unit in self._ops if unit in step]
        streamed = [unit for unit in due if unit not in residents]
        pending = [unit for unit in due if unit in residents.in_lanes]
        at_once = [unit for unit in due if unit in residents and unit not in residents.in_lanes]
        clip = None
        if self._max_grad_norm is not None:
            clip, begun, self._next, self._begun = self._next, self._begun, None, {}
            summed = {unit: of for unit, of in summed.items() if unit in begun}
            if clip is None or any(not of <= step.get(u, {}).keys() for u, of in begun.items()):
                clip, summed = runner.clip(self._max_grad_norm), {}
            self._squares_at_once([*at_once, *pending], step, clip)
        steps, members = _numbered(step)
        settings = runner.settings(steps, clip)
        prepared = residents.prepare(pending, step, pass_number)
        with runner.once():  # Half of the weights would be of another step.
            taking = {unit: frozenset(step[unit]) for unit in streamed}
            squared = [(unit, of) for unit, of in taking.items() if summed.get(unit) != of]
            squared = [] if clip is None else squared
            updated = {unit: members[unit] for unit in due if unit in taking or unit in prepared}
            phase = self._phase(clip is not None, tuple(taking), tuple(squared), updated, prepared)
            tasks = runner.start(phase, pass_number, settings)
            if clip is not None:
                self._clip, self._normed = clip, tasks[len(squared)]
                tasks = tasks[len(squared) + 1 :]
                if self.shares:
                    runner.begin(self._normed)
                    for share in self.shares:
                        share(clip)
                    clip.combine()
                    runner.finish(self._normed)
            self._update_at_once(at_once, step, members, settings)
            self._pending |= zip(updated, tasks)
            residents.start(prepared, step, self._pending)

    # -- what the user's thread does itself --------------------------------------------------------

    def _squares_at_once(self, here: Sequence[int], step: Step, clip: Any) -> None:
        """Put the sums of the squares of residents."""
        begun, self._sums = self._sums, []
        if not here:
            return
        self._runner.wait(begun)
        flats = {unit: self._residents.flat(unit, step) for unit in here}
        ops = [square(self._plan, unit) for unit in here]
        taking = tuple((unit, *step[unit], addresses(flat)) for unit, flat in flats.items())

        def made() -> Work:
            every, jobs = zip(ops, flats.items(), strict=True), list[Job]()
            for op, (unit, flat) in every:
                jobs += self._runner.works.squares(op, step[unit].keys(), flat).jobs
            return Work(jobs)

        op = replace(ops[0], bytes=sum(op.bytes for op in ops))
        self._runner.perform(op, ("squares", taking), made, self._runner.settings([], clip))

    @torch.no_grad()
    def _update_at_once(
        self, here: Sequence[int], step: Step, members: Mapping[int, _Members], settings: Any
    ) -> None:
        if here and self._max_grad_norm is not None and self._normed is not None:
            self._runner.wait([self._normed])
        for unit in here:
            flat = self._residents.flat(unit, step)
            op, taking = self._ops[unit], dict(members[unit])
            made = partial(self._runner.works.update, op, taking, flat)
            key = "update", unit, members[unit], addresses(flat)
            self._runner.perform(op, key, made, settings)
        if here:
            device = self._runner.device
            self._queued = device.fence(device.stream())

    # -- what lanes do -----------------------------------------------------------------------------

    def _phase(
        self,
        clips: bool,
        streamed: tuple[int, ...],
        squared: tuple[tuple[int, frozenset[int]], ...],
        updated: Mapping[int, _Members],
        prepared: Mapping[int, Flat],
    ) -> Any:
        """The squares that are not summed yet, the norm, and the updates of a step."""
        works = self._runner.works
        lies = tuple(map(addresses, prepared.values()))

        def made() -> Iterator[tuple[Op, Work | None]]:
            for unit, taking in squared:
                yield self._square(unit, taking)
            if clips:
                one = norm([square(self._plan, unit).writes[0] for unit in streamed])
                yield one, None if self.shares else works.of(one)
            for unit, members in updated.items():
                op = self._ops[unit]
                yield op, works.update(op, dict(members), prepared.get(unit))

        if prepared and not self._runner.lasting:  # It would hold what is torch's.
            return self._runner.written(made())
        key = "step", clips, streamed, squared, tuple(updated.items()), lies
        return self._runner.phase(key, made)

    def _square(
        self, unit: int, taking: frozenset[int], at: Use | None = None
    ) -> tuple[Op, Work | None]:
        """The op that sums the squares of some parameters of a unit."""
        op = square(self._plan, unit, at)
        return op, self._runner.works.squares(op, taking)


_Members = tuple[tuple[int, int], ...]
"""Parameters of a unit that take part in a step, each with its place in the steps."""


def _numbered(step: Step) -> tuple[list[ParameterStep], dict[int, _Members]]:
    """What the parameters of a step are updated by, each once, and by unit which by which."""
    rows, members = dict[ParameterStep, int](), dict[int, _Members]()
    for unit in sorted(step):
        mine = sorted(step[unit].items())
        members[unit] = tuple((at, rows.setdefault(one, len(rows))) for at, one in mine)
    return list(rows), members
