"""What lanes do, in Python: copies, transfers, sums and updates; the reference of `native_work`.

[Note: Works]
A *work* is what an op does each time that it comes. It is made once, from the op and the memory of
the plan. Called, it is given the *settings* of the step that the op was issued with: what its
parameters are updated by, and the clipping. What streams chunks ([Note: Streams] of `ops`) has
a part for each, and a thread of its lane does one with all its transfers, beside the others.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from cpu_adam import Part, accumulate, update_parts, views
from cpu_adam.native import square_sums
from cpu_adam.reference import Node, cut, push, total
from cpu_adam.spans import Steps
from offload.planning.layout import CHUNK_STAGES, Place, Plan, route, site
from offload.planning.profile import KINDS, LEAF_ELEMENTS, Kind, Piece, Unit
from offload.planning.tiers import Tier
from offload.program.ops import Op, Use, Value, part_of
from offload.program.schedule import Work
from offload.runtime.device import Device
from offload.runtime.store import Store

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as in torch.nn.utils.clip_grad_norm_."""

Taking = Mapping[int, int]
"""The parameters of a unit that take part in a step, each with its place in `Settings.steps`."""

Flat = Mapping[str, Mapping[int, torch.Tensor]]
"""Weights and gradients in torch's own memory, by kind and parameter."""


class Clip(Protocol):
    """The norm of one step's gradient, while it is computed."""

    norm: float
    factor: float

    def put(self, leaf: int, nodes: list[Node]) -> None:
        """The sum of the squares of part of a parameter, from this leaf of all on."""

    def combine(self) -> None:
        """The norm from the sums of squares in their order, and the factor that clips it."""


@dataclass(slots=True)
class PythonClip:
    """See `Clip`."""

    max_norm: float
    norm: float = 0.0
    factor: float = 1.0
    _parts: dict[int, list[Node]] = field(default_factory=dict)

    def put(self, leaf: int, nodes: list[Node]) -> None:
        """See `Clip`."""
        self._parts[leaf] = nodes

    def combine(self) -> None:
        """See `Clip`."""
        squares, nodes = 0.0, list[Node]()
        for _, part in sorted(self._parts.items()):
            if part[0][0] == 0:  # A parameter begins.
                squares, nodes = squares + total(nodes), []
            for node in part:
                push(nodes, node)
        squares += total(nodes)
        self.norm = math.sqrt(squares) if squares == squares else math.nan
        ratio = self.max_norm / (self.norm + CLIP_EPS)
        self.factor = ratio if not ratio >= 1.0 else 1.0


class Settings(NamedTuple):
    """What of a step its works are given."""

    steps: Steps
    clip: Clip | None


class Parts:
    """Work in parts, chunk by chunk, which the threads of a lane share."""

    def __init__(self, parts: Sequence[Work]):
        self.parts = parts or [lambda settings: None]

    def __call__(self, settings: Settings) -> None:
        """All of them."""
        for part in self.parts:
            part(settings)


class Places(Protocol):
    """What works need of `Memory`."""

    def at(self, use: Use) -> torch.Tensor:
        """The bytes of a value at a place of a memory tier: flat uint8."""

    def workspace(self, op: Op) -> torch.Tensor | None:
        """Scratch memory for an update on the device; None if it needs none."""


class PythonWorks:
    """Makes the works of an engine's ops, for any device and any store."""

    clip: Callable[[float], Clip] = PythonClip
    settings: Callable[[Steps, Clip | None], Any] = Settings

    def __init__(self, plan: Plan, memory: Places, store: Store | None, device: Device):
        """Of the ops of a plan, in this memory."""
        self._plan, self._memory, self._store, self._device = plan, memory, store, device
        self._thread, self._threads = threading.local(), itertools.count()
        """Each thread has a staging slot of its own."""
        self.did: Callable[[Op, float], object] = lambda op, since: None
        """Told of what was read or written inside another op, and since when."""

    def explain(self, error: BaseException) -> BaseException:
        """What a failed work is to the user."""
        return error

    def move(self, op: Op) -> Work:
        """A copy, or the transfer of a file."""
        (source,), (into,) = op.reads, op.writes
        store, key = self._store, (op.value.kind, self._plan.profile.units[op.value.unit].name)
        if store is not None and source.place.tier == "nvme":
            return lambda _: store.read(*key, self._memory.at(into))
        if store is not None and into.place.tier == "nvme":
            step = store.chunks.step
            return lambda _: store.write(*key, self._memory.at(source), int(step[0]))
        return lambda _: self._device.copy(self._memory.at(into), self._memory.at(source))

    def add(self, op: Op, arrived: Collection[int], kept: Collection[int]) -> Work:
        """Add the staged gradients to those kept; what is new is copied."""
        unit, (stage, deposit) = self._plan.profile.units[op.value.unit], op.reads

        def run(_: object) -> None:
            for parameter in sorted(arrived):
                start, dtype = unit.gradient_offset(parameter), unit.gradient_dtype(parameter)
                kind: torch.dtype = getattr(torch, dtype)
                stop = start + unit.parameters[parameter].elements * kind.itemsize
                into, gradient = (
                    self._memory.at(use)[start:stop].view(kind) for use in (deposit, stage)
                )
                if parameter in kept:
                    accumulate(into, gradient)
                else:
                    into.copy_(gradient)

        return run

    def squares(self, op: Op, taking: Collection[int]) -> Work:
        """The sums of the squares of the parameters in `taking`."""
        unit, place = op.value.unit, op.reads[0].place
        at: Tier = "device" if place.tier == "device" else "cpu"

        def run(number: int, spans: Sequence[Piece], settings: Settings) -> None:
            assert settings.clip is not None
            if place.use == "home":
                chunk = self._bring(op, Value("gradient", unit, number), at)
            else:
                lies = self._plan.profile.units[unit].chunks[number]
                chunk = self._memory.at(op.reads[0])[lies.gradient_offset :][: lies.gradient_bytes]
            gradient = self._typed("gradient", unit, number, chunk)
            for span in spans:
                part = gradient[span.chunk_start : span.chunk_start + span.elements]
                first, scratch = span.parameter_start // LEAF_ELEMENTS, self._memory.workspace(op)
                leaf = self._plan.profile.leaf(unit, span.parameter, span.parameter_start)
                settings.clip.put(leaf, square_sums(part, first, scratch, self._device.drain))

        pieces = self._plan.profile.by_chunk(unit, taking)
        return Parts([partial(run, *chunk) for chunk in pieces.items()])

    def norm(self) -> Work:
        """The norm and the factor of the clipping, from all sums."""
        return lambda settings: settings.clip.combine()

    def update(self, op: Op, taking: Taking, flat: Flat | None = None) -> Work:
        """The update of the parameters in `taking`, whose weights and gradients may be in `flat`.

        That is torch's memory on the device: on the host it is updated there.
        """
        unit, at = op.value.unit, site(self._plan.placements[op.value.unit])
        there = flat is not None and (at == "device" or self._device.is_host)

        def run(number: int, spans: Sequence[Piece], settings: Settings) -> None:
            values = [Value(kind, unit, number) for kind in KINDS]
            brought = [v for v in values if v.kind == "state" or not there]
            found = {v.kind: self._bring(op, v, at, flat) for v in brought}
            self._update(op, number, spans, taking, settings, found, flat)
            for value in brought:
                if value.kind != "gradient":
                    self._take_back(op, value, at, flat)

        pieces = self._plan.profile.by_chunk(unit, taking)
        return Parts([partial(run, *chunk) for chunk in pieces.items()])

    def _update(
        self,
        op: Op,
        number: int,
        spans: Sequence[Piece],
        taking: Taking,
        settings: Settings,
        found: Mapping[Kind, torch.Tensor],
        flat: Flat | None,
    ) -> None:
        """Update a chunk, of which `found` has the bytes; what is not there is in `flat`."""
        unit = self._plan.profile.units[op.value.unit]
        chunk = unit.chunks[number]
        fmt = self._plan.states.format(unit.segments[chunk.segment].dtype)
        record = views(found["state"], fmt, chunk.elements)
        parts = [_part_of(unit, span, taking[span.parameter]) for span in spans]
        if "weight" in found:
            weight, gradient = (
                self._typed(kind, op.value.unit, number, found[kind]) for kind in KINDS[:2]
            )
            pieces = [(weight, gradient, record, parts)]
        else:
            assert flat is not None
            pieces = [
                (
                    _part(flat["weight"], span),
                    _part(flat["gradient"], span),
                    cut(record, fmt, span.chunk_start, span.elements),
                    [part._replace(start=0)],
                )
                for span, part in zip(spans, parts)
            ]
        for piece in pieces:
            update_parts(
                *(*piece, settings.steps),
                gradient_scale=1.0 if settings.clip is None else settings.clip.factor,
                format=fmt,
                workspace=self._memory.workspace(op),
            )

    # -- chunks on their way -----------------------------------------------------------------------

    def _slot(self) -> int:
        """The staging slot of this thread, whose ops end when the device is through with it."""
        slot: int | None = getattr(self._thread, "slot", None)
        if slot is None:
            slot = self._thread.slot = next(self._threads)
            assert slot < CHUNK_STAGES, "more threads than staging slots"
        return slot

    def _stops(self, value: Value, at: Tier) -> list[torch.Tensor | None]:
        """A chunk's memory from its home, None on nvme, to where the op works."""
        home = self._plan.home(value.kind, value.unit)
        way = route(home.tier, at)
        if self._device.is_host:  # Which reaches all memory.
            way = ("nvme", "cpu") if home.tier == "nvme" else way[:1]
        torchs = not self._plan.in_arena(value.kind, value.unit)
        first = None if way[0] == "nvme" or torchs else self._memory.at(Use(home, value))
        slots = [Place(tier, f"{value.kind}_chunk", self._slot()) for tier in way[1:]]
        return [first, *(self._memory.at(Use(slot, value)) for slot in slots)]

    def _bring(self, op: Op, value: Value, at: Tier, flat: Flat | None = None) -> torch.Tensor:
        """The bytes of a chunk where the op works."""
        stops = self._stops(value, at)
        for start, stop in pairwise(stops):
            assert stop is not None
            if start is not None:
                self._device.copy(stop, start)
            elif flat is not None and value.kind in flat:
                for staged, lies in self._carried(value, stop, flat[value.kind]):
                    self._device.copy(staged, lies)
            else:
                self._transfer(op, value, stop, writes=False)
        if len(stops) > 1:
            self._device.drain()
        assert stops[-1] is not None
        return stops[-1]

    def _take_back(self, op: Op, value: Value, at: Tier, flat: Flat | None) -> None:
        """Put a chunk home from where the op works."""
        for start, stop in pairwise(self._stops(value, at)[::-1]):
            assert start is not None
            if stop is not None:
                self._device.copy(stop, start)
            elif flat is not None and value.kind in flat:
                for staged, lies in self._carried(value, start, flat[value.kind]):
                    self._device.copy(lies, staged)
            else:
                self._device.drain()
                self._transfer(op, value, start, writes=True)

    def _carried(
        self, value: Value, stage: torch.Tensor, flat: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of a chunk in its slot, and in torch's memory; of no others, nor between."""
        for span in self._plan.profile.by_chunk(value.unit, flat)[value.chunk]:
            lies = _part(flat, span)
            start = span.chunk_start * lies.itemsize
            yield stage[start : start + lies.nbytes].view(lies.dtype), lies

    def _transfer(self, op: Op, value: Value, memory: torch.Tensor, *, writes: bool) -> None:
        store, since = self._store, time.perf_counter()
        assert store is not None
        key = value.kind, self._plan.profile.units[value.unit].name, memory
        if writes:
            store.write(*key, int(store.chunks.step[0]), value.chunk)
        else:
            store.read(*key, value.chunk)
        way: tuple[Tier, Tier] = ("cpu", "nvme") if writes else ("nvme", "cpu")
        self.did(part_of(op, memory.nbytes, *way), since)

    def _typed(self, kind: Kind, unit: int, number: int, chunk: torch.Tensor) -> torch.Tensor:
        """A chunk of weights or gradients as a flat tensor of its dtype."""
        spec = self._plan.profile.units[unit]
        segment = spec.segments[spec.chunks[number].segment]
        name = segment.dtype if kind == "weight" else segment.gradient_dtype
        return chunk.view(getattr(torch, name))


def _part(flat: Mapping[int, torch.Tensor], span: Piece) -> torch.Tensor:
    return flat[span.parameter][span.parameter_start : span.parameter_stop]


def _part_of(unit: Unit, span: Piece, step: int) -> Part:
    ends = span.parameter_stop == unit.parameters[span.parameter].elements
    return Part(span.chunk_start, span.elements, span.parameter_start, step, is_last=ends)
