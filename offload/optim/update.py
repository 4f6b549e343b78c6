"""The updates of a step, which run after `step()` has returned.

`step()` freezes what they need: by parameter the hyper-parameters and the number of the step, see
`ParameterStep`. A scheduler, or the user, may change the groups while the updates still run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from cpu_adam.hyper import Hyper
from offload.model.early_updates import Step
from offload.model.pending import PendingUnit
from offload.model.resident import Residents
from offload.planning.layout import Plan
from offload.program.compile import norm, square, update_order
from offload.program.compile import update as update_ops
from offload.program.ops import ALL_CHUNKS, Lane, Op, Use, Verb
from offload.program.schedule import Fence, Task
from offload.runtime.books import Known
from offload.runtime.executor import Executor
from offload.runtime.works import Clip, Flat, PythonWorks, Settings


class _Chunk(NamedTuple):
    """A chunk, and the position in the next forward at which it is needed."""

    ordinal: int
    unit: int
    chunk: int
    deadline: int


@dataclass(slots=True)
class _Due:
    """The chunks of a step by what updates them, in the order in which they are needed."""

    at_once: list[_Chunk] = field(default_factory=list)
    """Of residents with states on the device: the user's stream updates them."""
    pending: list[_Chunk] = field(default_factory=list)
    """Of residents with states elsewhere: lanes update them."""
    streamed: list[_Chunk] = field(default_factory=list)
    """Of streamed units."""


class Updates:
    """Issues the ops of each step."""

    def __init__(self, executor: Executor, max_grad_norm: float | None, residents: Residents):
        """Clip to `max_grad_norm` where given; the weights of `residents` are in torch's memory."""
        self._executor = executor
        self._residents = residents
        self._plan = executor.plan
        self._max_grad_norm = max_grad_norm
        self._chunks: dict[int, list[_Chunk]] = {}
        for one in map(_Chunk._make, update_order(self._plan)):
            self._chunks.setdefault(one.unit, []).append(one)
        self._chunk_count = sum(len(unit.chunks) for unit in self._plan.profile.units)
        self._here = PythonWorks(self._plan, executor.memory, executor.store, executor.device)
        """What the user's thread does itself, and what moves torch's memory."""
        self._lane_shares = _lane_shares(self._plan)
        self._arenas = executor.memory.taken
        self._known: dict[tuple[Verb, int], tuple[_Members, list[Known]]] = {}
        """Ops of streamed units, and of which parameters they are."""
        self._norm: tuple[list[Use], Known] | None = None
        self._pending: list[Task] = []
        self._queued: Fence | None = None
        """Updates that the user's stream may still have to do."""
        self._clip: Clip | None = None
        self._normed: Task | None = None

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

    def issue(self, step: Step, pass_number: int) -> None:
        """Queue a step, or some units of it, to be done by the deadlines of pass `pass_number`.

        An error before the first op is queued leaves the step to be taken again. A later one ends
        the engine.
        """
        due, pending, works = self._due(step), self._residents.pending, self._executor.works
        if self._lane_shares and (due.at_once or due.pending):
            self.settle()  # The user's stream is about to use the workspace.
        if self._arenas != self._executor.memory.taken:
            self._arenas = self._executor.memory.taken
            self._known.clear()
        clip = None
        if self._max_grad_norm is not None:
            clip = works.clip(self._max_grad_norm, self._chunk_count)
            found = self._squares_at_once([*due.at_once, *due.pending], step)
            for ordinal, total in found.items():
                clip.put(ordinal, total)
        frozen, members = _numbered(step)
        settings = works.settings(frozen, clip)
        prepared = pending.prepare(list(dict.fromkeys(one.unit for one in due.pending)), step)
        try:
            pending.hand_over(prepared, pass_number)
            if clip is not None:
                self._clip = clip
                self._find_norm(due.streamed, members, settings, pass_number)
            self._update_at_once(due.at_once, step, members, Settings(frozen, clip))
            for unit, some in _by_unit(sorted([*due.pending, *due.streamed])):
                one = prepared.get(unit)  # In the order in which the next forward needs them.
                known = self._updates(unit, some, members[unit], one)
                tasks = self._executor.issue(known, pass_number, settings)
                self._pending += tasks
                if one is not None:
                    one.queued(known, tasks)
            pending.start(prepared)
        except BaseException as error:
            self._executor.lanes.fail(error)  # Half of the weights would be of another step.
            raise

    def _due(self, step: Step) -> _Due:
        """The chunks that take part, split by who updates their units."""
        due, in_lanes = _Due(), self._residents.pending.units
        for unit in sorted(step.keys() & self._chunks.keys(), key=self._rank):
            kind = due.streamed
            if unit in self._residents:
                kind = due.pending if unit in in_lanes else due.at_once
            spec = self._plan.profile.units[unit]
            for one in self._chunks[unit]:
                chunks = spec.chunks if one.chunk == ALL_CHUNKS else [spec.chunks[one.chunk]]
                if any(span.parameter in step[unit] for c in chunks for span in c.slices):
                    kind.append(one)
        return due

    def _rank(self, unit: int) -> int:
        return self._chunks[unit][0].ordinal

    # -- what the user's thread does itself --------------------------------------------------------

    def _squares_at_once(self, here: Sequence[_Chunk], step: Step) -> dict[int, float]:
        """The sums of the squares of residents, by ordinal."""
        if not here:
            return {}
        since, found = time.perf_counter(), {}
        ops = [square(self._plan, unit, chunk, at)[-1] for at, unit, chunk, _ in here]
        for op, (ordinal, *_), total in zip(ops, here, self._residents.squares(ops, step)):
            found[ordinal], since = total, self._executor.lanes.count(op, since)
        return found

    @torch.no_grad()
    def _update_at_once(
        self,
        here: Sequence[_Chunk],
        step: Step,
        members: Mapping[int, _Members],
        settings: Settings,
    ) -> None:
        if here and settings.clip is not None and self._normed is not None:
            self._executor.lanes.wait([self._normed])
        for unit, some in _by_unit(here):
            flat = self._residents.flat(unit, step)
            for _, _, chunk, deadline in some:
                op, since = update_ops(self._plan, unit, chunk, deadline)[0], time.perf_counter()
                self._here.update(op, dict(members[unit]), flat)(0, settings)
                self._executor.lanes.count(op, since)
        device = self._executor.device
        if here and self._lane_shares:
            self._executor.lanes.drain()  # Before a lane uses the workspace.
        elif here:
            self._queued = device.fence(device.stream())

    # -- what lanes do -----------------------------------------------------------------------------

    def _find_norm(
        self,
        streamed: Sequence[_Chunk],
        members: Mapping[int, _Members],
        settings: Any,
        pass_number: int,
    ) -> None:
        """Queue the norm, and what of it lanes sum."""
        partials = list[Use]()
        for unit, some in _by_unit(streamed):
            known = self._squares(unit, some, members[unit])
            self._executor.issue(known, pass_number, settings)
            partials += [one.op.writes[0] for one in known if one.op.verb is Verb.SQUARE]
        if self._norm is None or self._norm[0] != partials:
            work = self._executor.works.norm()
            self._norm = partials, self._executor.known(norm(partials), work)
        (self._normed,) = self._executor.issue([self._norm[1]], pass_number, settings)

    def _squares(self, unit: int, chunks: Sequence[_Chunk], members: _Members) -> list[Known]:
        """The ops that sum the squares of chunks of a unit."""
        kept = self._known.get((Verb.SQUARE, unit))
        if kept is None or kept[0] != members:
            known = list[Known]()
            for ordinal, _, chunk, _ in chunks:
                *moves, op = square(self._plan, unit, chunk, ordinal)
                work = self._executor.works.squares(op, ordinal, dict(members))
                known += [*map(self._executor.known, moves), self._executor.known(op, work)]
            kept = self._known[Verb.SQUARE, unit] = members, known
        return kept[1]

    def _updates(
        self, unit: int, chunks: Sequence[_Chunk], members: _Members, one: PendingUnit | None
    ) -> list[Known]:
        """The ops that update chunks of a unit."""
        if one is not None:  # Torch's memory is another one in each step.
            return [known for chunk in chunks for known in self._update(chunk, members, one.flat)]
        kept = self._known.get((Verb.UPDATE, unit))
        if kept is None or kept[0] != members:
            known = [known for chunk in chunks for known in self._update(chunk, members, None)]
            kept = self._known[Verb.UPDATE, unit] = members, known
        return kept[1]

    def _update(self, chunk: _Chunk, members: _Members, flat: Flat | None) -> Iterator[Known]:
        """The ops of a chunk, whose weights and gradients may be in `flat`: lanes of the host reach
        them there, those of another device move them."""
        ops = update_ops(self._plan, chunk.unit, chunk.chunk, chunk.deadline)
        in_place = flat if self._executor.device.is_host else None
        if in_place is not None:
            ops = [_in_place(self._plan, op) for op in ops if op.value.kind == "state"]
        for op in ops:
            work = None
            if op.verb is Verb.UPDATE:
                work = self._executor.works.update(op, dict(members), in_place)
            elif flat is not None and in_place is None:
                work = self._here.carry(op, flat)
            yield self._executor.known(op, work)


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


def _by_unit(chunks: Iterable[_Chunk]) -> Iterator[tuple[int, list[_Chunk]]]:
    for unit, some in groupby(chunks, attrgetter("unit")):
        yield unit, list(some)


def _in_place(plan: Plan, op: Op) -> Op:
    """An update whose weight and gradient are at home."""

    def at_home(use: Use) -> Use:
        kind, unit, _ = use.value
        return use if kind == "state" else Use(plan.home(kind, unit), use.value)

    if op.verb is Verb.MOVE:
        return op
    reads = (*map(at_home, op.reads[:3]), *op.reads[3:])
    return replace(op, reads=reads, writes=tuple(map(at_home, op.writes)))


def _lane_shares(plan: Plan) -> bool:
    """Whether a lane, too, works in the workspace, on units that are no residents."""
    others = (p for unit, p in enumerate(plan.placements) if unit not in plan.residents)
    return any(p.state == "device" or (plan.clips and p.gradient == "device") for p in others)
