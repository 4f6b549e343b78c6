"""What lanes do, in Python: copies, transfers, sums and updates; the reference of `native_work`.

[Note: Works]
A *work* is what an op does each time that it comes. It is made once, from the op and the memory of
the plan. Called, it is given the staging slot of its chunk (0 without one) and the *settings* of
the step that the op was issued with: what its parameters are updated by, and the clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from cpu_adam import Part, accumulate, sum_of_squares, update_parts, views
from cpu_adam.reference import cut
from cpu_adam.spans import Steps
from offload.planning.layout import Plan
from offload.planning.profile import ParameterSlice, Unit
from offload.program.compile import chunk_range, chunks_of
from offload.program.ops import ALL_CHUNKS, IN_RING, Op, Use
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

    def put(self, ordinal: int, total: float) -> None:
        """A sum of squares, by its place in the order in which all are added up."""

    def combine(self) -> None:
        """The norm from the sums of squares in their order, and the factor that clips it."""


@dataclass(slots=True)
class PythonClip:
    """See `Clip`."""

    max_norm: float
    chunks: int
    """How many sums of squares there may be."""
    norm: float = 0.0
    factor: float = 1.0
    _partials: dict[int, float] = field(default_factory=dict)

    def put(self, ordinal: int, total: float) -> None:
        """See `Clip`."""
        self._partials[ordinal] = total

    def combine(self) -> None:
        """See `Clip`."""
        total = in_order(self._partials[ordinal] for ordinal in sorted(self._partials))
        self.norm = math.sqrt(total) if total == total else math.nan
        ratio = self.max_norm / (self.norm + CLIP_EPS)
        self.factor = ratio if not ratio >= 1.0 else 1.0


def in_order(numbers: Iterable[float]) -> float:
    """Their sum, one rounded addition after the other (`sum` makes up for what is rounded off)."""
    total = 0.0
    for number in numbers:
        total += number
    return total


class Settings(NamedTuple):
    """What of a step its works are given."""

    steps: Steps
    clip: Clip | None


class Places(Protocol):
    """What works need of `Memory`."""

    def at(self, use: Use) -> torch.Tensor:
        """The bytes of a value at a place of a memory tier: flat uint8."""

    def workspace(self, op: Op) -> torch.Tensor | None:
        """Scratch memory for an update on the device; None if it needs none."""


class PythonWorks:
    """Makes the works of an engine's ops, for any device and any store."""

    clip: Callable[[float, int], Clip] = PythonClip
    settings: Callable[[Steps, Clip | None], Any] = Settings

    def __init__(self, plan: Plan, memory: Places, store: Store | None, device: Device):
        """Of the ops of a plan, in this memory."""
        self._plan, self._memory, self._store, self._device = plan, memory, store, device

    def explain(self, error: BaseException) -> BaseException:
        """What a failed work is to the user."""
        return error

    def move(self, op: Op) -> Work:
        """A copy, or the transfer of a file."""
        (source,), (into,) = op.reads, op.writes
        (kind, unit, chunk), store = op.value, self._store
        key = kind, self._plan.profile.units[unit].name
        part = None if chunk == ALL_CHUNKS else chunk
        if store is not None and source.place.tier == "nvme":
            return lambda slot, _: store.read(*key, self._at(into, slot), part)
        if store is not None and into.place.tier == "nvme":
            step = store.chunks.step
            return lambda slot, _: store.write(*key, self._at(source, slot), int(step[0]), part)
        return lambda slot, _: self._device.copy(self._at(into, slot), self._at(source, slot))

    def carry(self, op: Op, flat: Flat) -> Work:
        """A move of a chunk that begins or ends in torch's own memory, or any other.

        Of the parameters that do not take part, and between parameters, nothing is moved.
        """
        kind, unit, chunk = op.value
        home, leaves = self._plan.home(kind, unit), op.writes[0].place.number == IN_RING
        stage = op.writes[0] if leaves else op.reads[0]
        if self._plan.in_arena(kind, unit) or home not in (op.reads[0].place, op.writes[0].place):
            return self.move(op)
        mine, slices = flat[kind], self._plan.profile.units[unit].chunks[chunk].slices

        def run(slot: int, _: object) -> None:
            inside = self._at(stage, slot)
            for span in (span for span in slices if span.parameter in mine):
                lies = _part(mine, span)
                start = span.chunk_start * lies.itemsize
                staged = inside[start : start + lies.nbytes].view(lies.dtype)
                self._device.copy(*((staged, lies) if leaves else (lies, staged)))

        return run

    def add(self, op: Op, arrived: Collection[int], kept: Collection[int]) -> Work:
        """Add the staged gradients to those kept; what is new is copied."""
        unit, (stage, deposit) = self._plan.profile.units[op.value.unit], op.reads

        def run(slot: int, _: object) -> None:
            for parameter in sorted(arrived):
                start, dtype = unit.gradient_offset(parameter), unit.gradient_dtype(parameter)
                kind: torch.dtype = getattr(torch, dtype)
                stop = start + unit.parameters[parameter].elements * kind.itemsize
                into, gradient = (
                    self._at(use, slot)[start:stop].view(kind) for use in (deposit, stage)
                )
                if parameter in kept:
                    accumulate(into, gradient)
                else:
                    into.copy_(gradient)

        return run

    def squares(self, op: Op, ordinal: int, taking: Collection[int]) -> Work:
        """The sums of the squares of the parameters in `taking`, to the ordinals of the chunks."""
        use = op.reads[0]

        def run(slot: int, settings: Settings) -> None:
            for at, (number, spans) in enumerate(self._spans(op, taking)):
                gradient, total = self._typed(use, slot, number), 0.0
                for span in spans:
                    part = gradient[span.chunk_start : span.chunk_start + span.elements]
                    total += sum_of_squares(part, self._memory.workspace(op), self._device.drain)
                assert settings.clip is not None
                settings.clip.put(ordinal + at, total)

        return run

    def norm(self) -> Work:
        """The norm and the factor of the clipping, from all sums."""
        return lambda slot, settings: settings.clip.combine()

    def update(self, op: Op, taking: Taking, flat: Flat | None = None) -> Work:
        """The update of the parameters in `taking`; weights and gradients may be in `flat`."""
        unit = self._plan.profile.units[op.value.unit]
        uses: dict[str, Use] = {use.value.kind: use for use in op.reads[:3]}

        def run(slot: int, settings: Settings) -> None:
            scale = 1.0 if settings.clip is None else settings.clip.factor
            for number, spans in self._spans(op, taking):
                chunk = unit.chunks[number]
                fmt = self._plan.states.format(unit.segments[chunk.segment].dtype)
                record = views(self._chunk(uses["state"], slot, number), fmt, chunk.elements)
                parts = [_part_of(unit, span, taking[span.parameter]) for span in spans]
                if flat is None:
                    weight, gradient = (
                        self._typed(uses[kind], slot, number) for kind in ("weight", "gradient")
                    )
                    pieces = [(weight, gradient, record, parts)]
                else:
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
                        gradient_scale=scale,
                        format=fmt,
                        workspace=self._memory.workspace(op),
                    )

        return run

    # -- places ----------------------------------------------------------------------------------

    def _spans(
        self, op: Op, taking: Collection[int]
    ) -> Iterator[tuple[int, Sequence[ParameterSlice]]]:
        """The chunks of an op, each with the parts of parameters that take part."""
        for number in chunks_of(self._plan, op.value):
            slices = self._plan.profile.units[op.value.unit].chunks[number].slices
            yield number, [span for span in slices if span.parameter in taking]

    def _at(self, use: Use, slot: int) -> torch.Tensor:
        """The flat bytes of a use, wherever its chunk has its staging slot."""
        if use.place.number == IN_RING:
            use = Use(use.place._replace(number=slot), use.value)
        return self._memory.at(use)

    def _chunk(self, use: Use, slot: int, number: int) -> torch.Tensor:
        return self._at(use, slot)[chunk_range(self._plan, use.value, number)]

    def _typed(self, use: Use, slot: int, number: int) -> torch.Tensor:
        """A chunk of weights or gradients as a flat tensor of its dtype."""
        spec = self._plan.profile.units[use.value.unit]
        segment = spec.segments[spec.chunks[number].segment]
        name = segment.dtype if use.value.kind == "weight" else segment.gradient_dtype
        return self._chunk(use, slot, number).view(getattr(torch, name))


def _part(flat: Mapping[int, torch.Tensor], span: ParameterSlice) -> torch.Tensor:
    return flat[span.parameter][span.parameter_start : span.parameter_start + span.elements]


def _part_of(unit: Unit, span: ParameterSlice, step: int) -> Part:
    ends = span.parameter_start + span.elements == unit.parameters[span.parameter].elements
    return Part(span.chunk_start, span.elements, span.parameter_start, step, is_last=ends)
