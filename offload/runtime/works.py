"""What ops do, as plain data: the works of a plan's ops, over the memory that it has.

[Note: Works]
A *work* is what an op does each time that it comes. It is made once, from the op and the memory of
the plan, and holds tensors and numbers only. `native` makes of it what lanes do without Python;
`reference` does the same in Python, one after the other, and the results are the same bits. With
each start of an op come the *settings* of the step: what its parameters are updated by, and the
clipping.

[Note: Who works where]
A unit is updated on the CPU, or on the device where its states live there. What of it lies where
that cannot reach comes through a staging slot, chunk by chunk, a `Link` each: read or brought,
worked on, put back ([Note: Streams] of `ops`). A device that is the host reaches all memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from offload.planning.layout import Place, Plan, route
from offload.planning.profile import KINDS, LEAF_ELEMENTS, Kind, Piece
from offload.planning.tiers import Tier
from offload.program.ops import LANE_OF_MOVE, OF_USER, Lane, Op, Use, Value, Verb

Taking = Mapping[int, int]
"""The parameters of a unit that take part in a step, each with its place in the steps."""

Flat = Mapping[Kind, Mapping[int, torch.Tensor]]
"""Weights and gradients in torch's own memory, by kind and parameter."""


class At(NamedTuple):
    """Bytes in a memory tier; in a staging ring those of the first slot."""

    bytes: torch.Tensor
    """Flat: uint8, or of torch's own."""
    stride: int = 0
    """From a slot of the ring to the next."""

    def part(self, start: int, size: int) -> At:
        """So many of its elements."""
        return At(self.bytes[start : start + size], self.stride)


class Copy(NamedTuple):
    """Copy bytes, between any two memories."""

    into: At
    source: At


class Transfer(NamedTuple):
    """Read or write a value on nvme, or a chunk of it."""

    writes: bool
    value: Value
    at: At


class Add(NamedTuple):
    """Add gradients of parameters to those that are kept."""

    source: At
    into: At
    dtype: str


class Squares(NamedTuple):
    """Sum the squares of part of a parameter, from this leaf of its tree on."""

    at: At
    dtype: str
    leaf: int
    """The number of its first leaf among those of all parameters."""
    first: int
    """The same within its parameter."""


class Combine(NamedTuple):
    """Find the norm and the factor of the clipping, from all sums."""


class Update(NamedTuple):
    """Update part of a parameter, which begins and ends groups of its state's format."""

    unit: int
    chunk: int
    piece: Piece
    dtype: str
    """Of the gradient."""
    first: int
    """Its first element in the full parameter."""
    step: int
    """Its place in the steps of the settings."""
    weight: At
    gradient: At
    record: At
    """Of the whole chunk."""


Job: TypeAlias = Copy | Transfer | Add | Squares | Combine | Update


class Stage(NamedTuple):
    """What a lane does for a chunk, in one go."""

    lane: Lane
    jobs: Sequence[Job]
    way: tuple[Tier, Tier] | None
    """From where to where it moves the chunk; None where it works on it."""
    bytes: int


Link = Sequence[Stage]
"""What is done for a chunk, one after the other."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does: jobs in any order, or links that go through staging slots."""

    jobs: Sequence[Job] = ()
    links: Sequence[Link] | None = None


class Works:
    """Makes the works of an engine's ops."""

    def __init__(self, plan: Plan, at: Callable[[Use], torch.Tensor], *, device_is_host: bool):
        """Of a plan, in the memory that `Memory.at` finds."""
        self._plan, self._at, self._device_is_host = plan, at, device_is_host

    def of(self, op: Op) -> Work | None:
        """The work of an op of all parameters of a unit; None for the user's compute."""
        if op.verb in OF_USER:
            return None
        if op.verb is Verb.NORM:
            return Work([Combine()])
        assert op.verb is Verb.MOVE, "which parameters take part?"
        if not op.bytes:
            return Work()
        (source,), (into,) = op.reads, op.writes
        writes = into.place.tier == "nvme"
        if writes or source.place.tier == "nvme":
            at = At(self._at(source if writes else into))
            return Work([Transfer(writes, op.value, at)])
        return Work([Copy(At(self._at(into)), At(self._at(source)))])

    def add(self, op: Op, arrived: Collection[int], kept: Collection[int]) -> Work:
        """Add the staged gradients of parameters to those kept; what is new is copied."""
        unit, jobs = self._plan.profile.units[op.value.unit], list[Job]()
        stage, deposit = (At(self._at(use)) for use in op.reads)
        for parameter in sorted(arrived):
            dtype, start = unit.gradient_dtype(parameter), unit.gradient_offset(parameter)
            size = unit.parameters[parameter].elements * item(dtype)
            both = stage.part(start, size), deposit.part(start, size)
            jobs.append(Add(*both, dtype) if parameter in kept else Copy(both[1], both[0]))
        return Work(jobs)

    def squares(self, op: Op, taking: Collection[int], flat: Flat | None = None) -> Work:
        """The sums of the squares of the parameters in `taking`, whose gradients lie in `flat`, at
        home, or where the op reads them on their way there."""
        unit, profile, chunks = op.value.unit, self._plan.profile, dict[int, list[Job]]()
        home = flat is None and op.reads[0].place.use == "home"
        for number, pieces in profile.by_chunk(unit, taking).items():
            chunks[number] = [
                Squares(
                    *self._gradient(op, number, piece, flat),
                    profile.leaf(unit, piece.parameter, profile.element(piece)),
                    profile.element(piece) // LEAF_ELEMENTS,
                )
                for piece in pieces
            ]
        return self._stream(op, chunks, ["gradient"] if home else [], {})

    def _gradient(self, op: Op, number: int, piece: Piece, flat: Flat | None) -> tuple[At, str]:
        """Where an op finds part of a gradient, and its dtype."""
        unit = self._plan.profile.units[op.value.unit]
        chunk = unit.chunks[number]
        dtype = unit.segments[chunk.segment].gradient_dtype
        if flat is not None:
            lies = flat["gradient"][piece.parameter]
            part = At(lies).part(piece.parameter_start, piece.elements)
            return part, str(lies.dtype).removeprefix("torch.")
        if op.reads[0].place.use == "home":
            at = self._worked_on("gradient", op.value.unit, number, op)
        else:
            at = At(self._at(op.reads[0])[chunk.gradient_offset :])
        return at.part(piece.chunk_start * item(dtype), piece.elements * item(dtype)), dtype

    def update(self, op: Op, taking: Taking, flat: Flat | None = None) -> Work:
        """The update of the parameters in `taking`, whose weights and gradients may be in `flat`,
        on the device: where the update reaches that, they are updated there."""
        unit, chunks = op.value.unit, dict[int, list[Job]]()
        here = flat if self._device_is_host or op.lane is Lane.COMPUTE else None
        for number, pieces in self._plan.profile.by_chunk(unit, taking).items():
            record = self._worked_on("state", unit, number, op)
            chunks[number] = [
                self._updated(op, number, piece, taking[piece.parameter], record, here)
                for piece in pieces
            ]
        return self._stream(op, chunks, KINDS if here is None else ["state"], flat or {})

    def _updated(
        self, op: Op, number: int, piece: Piece, step: int, record: At, flat: Flat | None
    ) -> Update:
        unit = self._plan.profile.units[op.value.unit]
        gradient, dtype = self._gradient(op, number, piece, flat)
        if flat is not None:
            lies = At(flat["weight"][piece.parameter])
            weight = lies.part(piece.parameter_start, piece.elements)
        else:
            size = item(unit.segments[unit.chunks[number].segment].dtype)
            lies = self._worked_on("weight", op.value.unit, number, op)
            weight = lies.part(piece.chunk_start * size, piece.elements * size)
        first = self._plan.profile.element(piece)
        return Update(op.value.unit, number, piece, dtype, first, step, weight, gradient, record)

    def _hops(self, kind: Kind, unit: int, op: Op) -> Sequence[tuple[Tier, Tier]]:
        """The ways of a value from its home to where an op works on it."""
        home = self._plan.home(kind, unit).tier
        if self._device_is_host:
            return [("nvme", "cpu")] if home == "nvme" else []
        return list(pairwise(route(home, "device" if op.lane is Lane.COMPUTE else "cpu")))

    def _worked_on(self, kind: Kind, unit: int, number: int, op: Op) -> At:
        """Where the bytes of a chunk are worked on: at home, or in a staging slot."""
        if hops := self._hops(kind, unit, op):
            return self._staged(kind, unit, number, hops[-1][1])
        return self._home(kind, unit, number)

    def _home(self, kind: Kind, unit: int, number: int) -> At:
        value = Value(kind, unit, number)
        return At(self._at(Use(self._plan.home(kind, unit), value)))

    def _staged(self, kind: Kind, unit: int, number: int, tier: Tier) -> At:
        value = Value(kind, unit, number)
        first, second = (self._at(Use(Place(tier, f"{kind}_chunk", at), value)) for at in (0, 1))
        return At(first, second.data_ptr() - first.data_ptr())

    def _stream(
        self, op: Op, chunks: Mapping[int, Sequence[Job]], kinds: Collection[Kind], flat: Flat
    ) -> Work:
        """The jobs of an op by chunk: values that are away come and go.

        Beside a device the CPU does even those at hand one by one, and in between what is urgent.
        """
        unit = op.value.unit
        away = [kind for kind in kinds if self._hops(kind, unit, op)]
        if not away and (op.lane is not Lane.CPU or self._device_is_host):
            return Work([job for jobs in chunks.values() for job in jobs])
        written = [use.value.kind for use in op.writes if use.place.use == "home"]
        back = [kind for kind in away if kind in written]
        elements = [chunk.elements for chunk in self._plan.profile.units[unit].chunks]
        links = []
        for number, jobs in chunks.items():
            size = op.bytes * elements[number] // sum(elements)
            work = Stage(op.lane, jobs, None, size)
            comes = self._moves(op, away, number, flat, 1)
            links.append([*comes, work, *self._moves(op, back, number, flat, -1)])
        return Work(links=links)

    def _moves(
        self, op: Op, kinds: Sequence[Kind], number: int, flat: Flat, way: int
    ) -> Iterator[Stage]:
        """The stages in which values of a chunk come (1) or go back (-1)."""
        found = dict[tuple[Tier, Tier], list[Job]]()
        for kind in kinds:
            for start, stop in self._hops(kind, op.value.unit, op)[::way]:
                jobs = found.setdefault((start, stop), [])
                jobs += self._hop(kind, op.value.unit, number, start, stop, flat, way)
        drive_first = sorted(found, key=lambda hop: (hop[0] != "nvme") == (way == 1))
        for start, stop in drive_first:
            jobs = found[start, stop]
            hop = (start, stop) if way == 1 else (stop, start)
            yield Stage(LANE_OF_MOVE[hop], jobs, hop, sum(map(_bytes_of, jobs)))

    def _hop(
        self, kind: Kind, unit: int, number: int, start: Tier, stop: Tier, flat: Flat, way: int
    ) -> Iterator[Job]:
        """Bring a value from one tier to the next, or put it back."""
        stage = self._staged(kind, unit, number, stop)
        if start == "nvme":
            yield Transfer(way == -1, Value(kind, unit, number), stage)
            return
        if start != self._plan.home(kind, unit).tier:
            pairs = [(stage, self._staged(kind, unit, number, start))]
        elif kind in flat:
            pairs = []
            for piece in self._plan.profile.by_chunk(unit, flat[kind])[number]:
                lies = At(flat[kind][piece.parameter])
                item_bytes = lies.bytes.itemsize
                part = stage.part(piece.chunk_start * item_bytes, piece.elements * item_bytes)
                pairs.append((part, lies.part(piece.parameter_start, piece.elements)))
        else:
            pairs = [(stage, self._home(kind, unit, number))]
        for staged, home in pairs:
            yield Copy(staged, home) if way == 1 else Copy(home, staged)


def _bytes_of(job: Any) -> int:
    return int((job.into if isinstance(job, Copy) else job.at).bytes.nbytes)


@functools.cache
def item(dtype: str) -> int:
    """Bytes of an element."""
    return int(getattr(torch, dtype).itemsize)
