"""The updates of a step, which run after `step()` has returned.

`step()` freezes what they need: by parameter the hyper-parameters and the number of the step, see
`ParameterStep`. A scheduler, or the user, may change the groups while the updates still run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, Protocol

import torch

from cpu_adam import Part, sum_of_squares, update_parts, views
from cpu_adam.hyper import Hyper
from offload.model.early_updates import ParameterStep, Step
from offload.model.pending import PendingUnit
from offload.model.resident import Residents, in_order
from offload.planning.layout import Plan
from offload.planning.profile import ParameterSlice
from offload.program.compile import chunk_range, chunks_of, norm, square, update_order
from offload.program.compile import update as update_ops
from offload.program.ops import Lane, Op, Use, Value, Verb
from offload.program.schedule import Fence, Task
from offload.runtime.books import Known
from offload.runtime.executor import BytesOf, Executor
from offload.runtime.native_work import Flat, NativeWorks

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as in torch.nn.utils.clip_grad_norm_."""


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


class Clip(Protocol):
    """The norm of one step's gradient, while it is computed."""

    norm: float
    factor: float

    def put(self, ordinal: int, total: float) -> None:
        """A sum of squares, by its place in the order in which all are added up."""

    def combine(self) -> None:
        """The norm from the sums of squares in their order, and the factor that clips it."""


@dataclass(slots=True)
class _Clip:
    """The norm of one step's gradient, while it is computed."""

    max_norm: float
    chunks: int
    """How many sums of squares there may be."""
    norm: float = 0.0
    factor: float = 1.0
    _partials: dict[int, float] = field(default_factory=dict)

    def put(self, ordinal: int, total: float) -> None:
        """A sum of squares, by its place in the order in which all are added up."""
        self._partials[ordinal] = total

    def combine(self) -> None:
        """The norm from the sums of squares in their order, and the factor that clips it."""
        total = in_order(self._partials[ordinal] for ordinal in sorted(self._partials))
        self.norm = math.sqrt(total) if total == total else math.nan
        ratio = self.max_norm / (self.norm + CLIP_EPS)
        self.factor = ratio if not ratio >= 1.0 else 1.0


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
        works = executor.works
        self._make_clip: Callable[[float, int], Clip] = _Clip if works is None else works.clip
        self._native = None if works is None else _NativeOps(executor, works)
        self._lane_shares = _lane_shares(self._plan)
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
        due, pending = self._due(step), self._residents.pending
        if self._lane_shares and (due.at_once or due.pending):
            self.settle()  # The user's stream is about to use the workspace.
        clip = None
        if self._max_grad_norm is not None:
            clip = self._make_clip(self._max_grad_norm, self._chunk_count)
            found = self._squares_at_once([*due.at_once, *due.pending], step)
            for ordinal, total in found.items():
                clip.put(ordinal, total)
        prepared = pending.prepare(list(dict.fromkeys(one.unit for one in due.pending)), step)
        try:
            if clip is not None:
                self._find_norm(due.streamed, step, clip, pass_number)
            self._update_at_once(due.at_once, step, clip)
            in_lanes = sorted([*due.pending, *due.streamed])  # As the next forward needs them.
            self._update_in_lanes(in_lanes, step, clip, pass_number, prepared)
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
            for one in self._chunks[unit]:
                spans = _spans(self._plan, Value("state", unit, one.chunk))
                if any(span.parameter in step[unit] for _, span in spans):
                    kind.append(one)
        return due

    def _rank(self, unit: int) -> int:
        return self._chunks[unit][0].ordinal

    def _find_norm(
        self, streamed: Sequence[_Chunk], step: Step, clip: Clip, pass_number: int
    ) -> None:
        """Queue the norm, and what of it lanes sum."""
        self._clip = clip
        if self._native is not None:
            self._normed = self._native.find_norm(streamed, step, clip, pass_number)
            return
        partials = []
        for ordinal, unit, chunk, _ in streamed:
            ops = square(self._plan, unit, chunk, ordinal)
            run = self._squarer(ops[-1], ordinal, step[unit], clip)
            self._executor.issue_chunk(ops, pass_number, run)
            partials.append(ops[-1].writes[0])
        known_norm = self._executor.known(norm(partials))
        self._normed = self._executor.issue_known(known_norm, pass_number, clip.combine)

    def _squares_at_once(self, here: Sequence[_Chunk], step: Step) -> dict[int, float]:
        """The sums of the squares of residents, by ordinal."""
        if not here:
            return {}
        since, found = time.perf_counter(), {}
        ops = [square(self._plan, unit, chunk, at)[-1] for at, unit, chunk, _ in here]
        for op, (ordinal, *_), total in zip(ops, here, self._residents.squares(ops, step)):
            found[ordinal], since = total, self._executor.lanes.count(op, since)
        return found

    def _update_at_once(self, here: Sequence[_Chunk], step: Step, clip: Clip | None) -> None:
        if here and clip is not None and self._normed is not None:
            self._executor.lanes.wait([self._normed])
        for _, unit, chunk, deadline in here:
            op, since = update_ops(self._plan, unit, chunk, deadline)[0], time.perf_counter()
            self._residents.update(op, step, 1.0 if clip is None else clip.factor)
            self._executor.lanes.count(op, since)
        device = self._executor.device
        if here and self._lane_shares:
            self._executor.lanes.drain()  # Before a lane uses the workspace.
        elif here:
            self._queued = device.fence(device.stream())

    def _update_in_lanes(
        self,
        due: Sequence[_Chunk],
        step: Step,
        clip: Clip | None,
        pass_number: int,
        prepared: Mapping[int, PendingUnit],
    ) -> None:
        if self._native is not None:
            self._pending += self._native.update(due, step, clip, pass_number, prepared)
            self._residents.pending.start(prepared)
            return
        for _, unit, chunk, deadline in due:
            ops = update_ops(self._plan, unit, chunk, deadline)
            op = next(op for op in ops if op.verb is Verb.UPDATE)
            run, one = self._updater(op, step[unit], clip), prepared.get(unit)
            carrying = None if one is None else one.carrier
            tasks = self._executor.issue_chunk(ops, pass_number, run, carrying)
            self._pending += tasks
            if one is not None:
                one.queued(ops, tasks)
        self._residents.pending.start(prepared)

    def _squarer(
        self, op: Op, ordinal: int, steps: Mapping[int, ParameterStep], clip: Clip
    ) -> Callable[[BytesOf], None]:
        plan, executor = self._plan, self._executor  # A lane that held more would hold the engine.

        def run(bytes_of: BytesOf) -> None:
            for at, (chunk, spans) in enumerate(groupby(_spans(plan, op.value), itemgetter(0))):
                gradient = _typed(plan, op.reads[0], bytes_of, chunk)
                total = 0.0
                for _, span in spans:
                    if span.parameter in steps:
                        part = gradient[span.chunk_start : span.chunk_start + span.elements]
                        workspace = executor.memory.workspace(op)
                        total += sum_of_squares(part, workspace, executor.device.drain)
                clip.put(ordinal + at, total)

        return run

    def _updater(
        self, op: Op, steps: Mapping[int, ParameterStep], clip: Clip | None
    ) -> Callable[[BytesOf], None]:
        plan, executor = self._plan, self._executor
        spec = plan.profile.units[op.value.unit]
        uses: dict[str, Use] = {use.value.kind: use for use in op.reads[:3]}

        def run(bytes_of: BytesOf) -> None:
            for chunk, group in groupby(_spans(plan, op.value), itemgetter(0)):
                parts, frozen = list[Part](), []
                for span in (span for _, span in group if span.parameter in steps):
                    end = span.parameter_start + span.elements
                    ends = end == spec.parameters[span.parameter].elements
                    place = span.chunk_start, span.elements, span.parameter_start, len(parts)
                    parts.append(Part(*place, is_last=ends))
                    frozen.append((steps[span.parameter].hyper, steps[span.parameter].number))
                fmt = plan.states.format(spec.segments[spec.chunks[chunk].segment].dtype)
                record = bytes_of(uses["state"])[chunk_range(plan, uses["state"].value, chunk)]
                update_parts(
                    _typed(plan, uses["weight"], bytes_of, chunk),
                    _typed(plan, uses["gradient"], bytes_of, chunk),
                    views(record, fmt, spec.chunks[chunk].elements),
                    *(parts, frozen),
                    gradient_scale=1.0 if clip is None else clip.factor,
                    format=fmt,
                    workspace=executor.memory.workspace(op),
                )

        return run


class _NativeOps:
    """The same for compiled lanes: each op is made once, and issued in every step."""

    def __init__(self, executor: Executor, works: NativeWorks):
        """None is made yet."""
        self._executor, self._works, self._plan = executor, works, executor.plan
        self._arenas = executor.memory.taken
        self._updates: dict[int, tuple[_Members, list[list[Known]]]] = {}
        self._squares: dict[int, tuple[_Members, list[list[Known]]]] = {}
        self._norm: tuple[list[Use], Known] | None = None

    def find_norm(
        self, streamed: Sequence[_Chunk], step: Step, clip: Clip, pass_number: int
    ) -> Task:
        """Queue the sums of squares and the norm."""
        settings, partials = self._works.settings([], clip), []
        for unit, chunks in _by_unit(streamed):
            members = tuple((parameter, 0) for parameter in sorted(step[unit]))
            for known in self._made(self._squares, unit, members, chunks, self._square):
                self._executor.issue_known_chunk(known, pass_number, settings)
                partials.append(known[-1].op.writes[0])
        if self._norm is None or self._norm[0] != partials:
            known_norm = self._executor.known_as(norm(partials), self._works.norm())
            self._norm = partials, known_norm
        return self._executor.issue_known_chunk([self._norm[1]], pass_number, settings)[0]

    def update(
        self,
        due: Sequence[_Chunk],
        step: Step,
        clip: Clip | None,
        pass_number: int,
        prepared: Mapping[int, PendingUnit],
    ) -> list[Task]:
        """Queue the updates of all chunks that are due, in their order."""
        tasks, by_unit = list[Task](), list(_by_unit(due))
        frozen, members = _numbered(step, [unit for unit, _ in by_unit])
        settings = self._works.settings(frozen, clip)
        for unit, chunks in by_unit:
            one = prepared.get(unit)
            if one is None:
                made = self._made(self._updates, unit, members[unit], chunks, self._update)
            else:  # Torch's memory is another one in each step.
                made = [self._update(chunk, members[unit], one.flat) for chunk in chunks]
            for known in made:
                queued = self._executor.issue_known_chunk(known, pass_number, settings)
                tasks += queued
                if one is not None:
                    one.queued([each.op for each in known], queued)
        return tasks

    def _made(
        self,
        kept: dict[int, tuple[_Members, list[list[Known]]]],
        unit: int,
        members: _Members,
        chunks: Sequence[_Chunk],
        make: Callable[[_Chunk, _Members], list[Known]],
    ) -> list[list[Known]]:
        """The ops of each chunk of a unit, in memory that is still that of the arenas."""
        if self._arenas != self._executor.memory.taken:
            self._arenas = self._executor.memory.taken
            self._updates.clear()
            self._squares.clear()
        if unit not in kept or kept[unit][0] != members:
            kept[unit] = members, [make(chunk, members) for chunk in chunks]
        return kept[unit][1]

    def _square(self, one: _Chunk, members: _Members) -> list[Known]:
        ops = square(self._plan, one.unit, one.chunk, one.ordinal)
        work = self._works.squares(ops[-1], one.ordinal, dict(members))
        return [*map(self._executor.known, ops[:-1]), self._executor.known_as(ops[-1], work)]

    def _update(self, one: _Chunk, members: _Members, flat: Flat | None = None) -> list[Known]:
        """The ops of a chunk; with `flat` its weights and gradients are there, and do not move."""
        ops = update_ops(self._plan, one.unit, one.chunk, one.deadline)
        if flat is not None:
            ops = [_in_place(self._plan, op) for op in ops if op.value.kind == "state"]
        found = []
        for op in ops:
            if op.verb is Verb.MOVE:
                found.append(self._executor.known(op))
            else:
                work = self._works.update(op, dict(members), flat)
                found.append(self._executor.known_as(op, work))
        return found


_Members = tuple[tuple[int, int], ...]
"""Parameters of a unit that take part in a step, each with its row of factors."""


def _numbered(
    step: Step, units: Sequence[int]
) -> tuple[list[tuple[Hyper, int]], dict[int, _Members]]:
    """What the parameters of some units are updated by, each once, and by unit who by which."""
    rows, found, members = dict[tuple[int, int], int](), list[tuple[Hyper, int]](), {}
    for unit in units:
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


def _spans(plan: Plan, value: Value) -> Iterator[tuple[int, ParameterSlice]]:
    """The parts of parameters in a chunk, or in all of a unit, each with its chunk."""
    for chunk in chunks_of(plan, value):
        for span in plan.profile.units[value.unit].chunks[chunk].slices:
            yield chunk, span


def _typed(plan: Plan, use: Use, bytes_of: BytesOf, chunk: int) -> torch.Tensor:
    """A chunk of weights or gradients, or of all that are used, as a flat tensor of its dtype."""
    kind, unit, _ = use.value
    spec = plan.profile.units[unit]
    segment = spec.segments[spec.chunks[chunk].segment]
    dtype: torch.dtype = getattr(
        torch, segment.dtype if kind == "weight" else segment.gradient_dtype
    )
    return bytes_of(use)[chunk_range(plan, use.value, chunk)].view(dtype)


def _lane_shares(plan: Plan) -> bool:
    """Whether a lane, too, works in the workspace, on units that are no residents."""
    others = (p for unit, p in enumerate(plan.placements) if unit not in plan.residents)
    return any(p.state == "device" or (plan.clips and p.gradient == "device") for p in others)
