"""Bytes of every value of a model, in memory and in the file, wherever it lies there. Pure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpu_adam.formats import squares_bytes
from offload.blocks import apart_bytes, sums_bytes
from offload.config import Tier
from offload.profile import Chunk, Profile, StateChoice, Unit
from offload.records import (
    BLOCK_BYTES,
    KINDS,
    ChunkSpec,
    FileLayout,
    Kind,
    Segment,
    ValueSpec,
    lay_out_file,
    round_up,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The home tier of each value of one unit."""

    weight: Tier
    gradient: Tier
    state: Tier

    def of(self, kind: Kind) -> Tier:
        """The tier of `kind`."""
        tier: Tier = getattr(self, kind)
        return tier


def record_bytes(unit: Unit, chunk: Chunk, states: StateChoice) -> int:
    """Size of the record of a chunk, padded to blocks."""
    return _padded_record_bytes(unit.segments[chunk.segment].dtype, states, chunk.elements)


@functools.lru_cache(maxsize=1024)
def _padded_record_bytes(dtype: str, states: StateChoice, elements: int) -> int:
    return round_up(states.format(dtype).record_bytes(elements), BLOCK_BYTES)


def _chunk_bytes(unit: Unit, chunk: Chunk, kind: Kind, states: StateChoice) -> int:
    if kind == "weight":
        return chunk.weight_bytes
    return chunk.gradient_bytes if kind == "gradient" else record_bytes(unit, chunk, states)


def value_bytes(unit: Unit, kind: Kind, states: StateChoice) -> int:
    """Size of a value in memory."""
    if kind == "weight":
        return unit.weight_bytes
    if kind == "gradient":
        return unit.gradient_bytes
    return sum(record_bytes(unit, chunk, states) for chunk in unit.chunks)


class Sizes:
    """Bytes of every value of a profile: in memory, of its largest chunk, and in the file."""

    def __init__(self, profile: Profile, states: StateChoice):
        self._in_file, self._states = dict[object, int](), states
        pairs = [(u, u.chunks if states.on_accelerator else ()) for u in profile.units]
        self.updated = [max((states.scratch_bytes(u, c) for c in cs), default=0) for u, cs in pairs]
        self.squared = [max((squares_bytes(c.elements) for c in cs), default=0) for _, cs in pairs]
        self.summed = [sums_bytes(unit) for unit in profile.units]
        self.value = {k: [value_bytes(unit, k, states) for unit in profile.units] for k in KINDS}
        self.apart = self.value  # Of those that torch gives memory of their own.
        if states.on_accelerator:
            self.apart = {k: [apart_bytes(unit, k) for unit in profile.units] for k in KINDS}
        self.chunk = {
            kind: [
                max((_chunk_bytes(unit, chunk, kind, states) for chunk in unit.chunks), default=0)
                for unit in profile.units
            ]
            for kind in KINDS
        }

    def in_file(self, profile: Profile, placements: Sequence[Placement]) -> int:
        """Bytes of the file for given placements, 0 when nothing lives there."""
        total, pairs = 0, list(enumerate(zip(profile.units, placements)))
        for kind, (u, (unit, placement)) in itertools.product(KINDS, pairs):
            if placement.of(kind) == "nvme" and self.value[kind][u]:
                total += self._one_in_file(unit, kind)
        return total and total + BLOCK_BYTES

    def _one_in_file(self, unit: Unit, kind: Kind) -> int:
        """Bytes of one value, the same for all units that are laid out alike."""
        alike = (kind, unit.segments, tuple((p.segment, p.start, p.shape) for p in unit.parameters))
        if alike not in self._in_file:
            chunks = tuple(_stored_chunks(unit, kind, self._states, 0))
            layout = lay_out_file([ValueSpec(kind, unit.name, chunks)])
            self._in_file[alike] = layout.bytes - BLOCK_BYTES
        return self._in_file[alike]


def file_layout(
    profile: Profile, placements: Sequence[Placement], states: StateChoice
) -> FileLayout:
    """The layout of the store's file: the values whose home is nvme, in order of kind and unit.

    The name of a parameter is its index in the list of all, unit after unit.
    """
    first = [0, *itertools.accumulate(len(unit.parameters) for unit in profile.units)]
    values = []
    for kind in KINDS:
        for unit, placement, base in zip(profile.units, placements, first):
            if placement.of(kind) == "nvme" and value_bytes(unit, kind, states):
                chunks = tuple(_stored_chunks(unit, kind, states, base))
                values.append(ValueSpec(kind, unit.name, chunks))
    return lay_out_file(values)


def _stored_chunks(unit: Unit, kind: Kind, states: StateChoice, base: int) -> Iterator[ChunkSpec]:
    for chunk in unit.chunks:
        ranges = tuple(
            Segment(base + s.parameter, s.parameter_start, s.parameter_start + s.elements)
            for s in chunk.spans
        )
        yield ChunkSpec(_chunk_bytes(unit, chunk, kind, states), ranges)
    if kind != "weight":
        return
    frozen = [index for index, segment in enumerate(unit.segments) if not segment.trainable]
    for index, (_, size) in zip(frozen, unit.pieces[len(unit.chunks) :]):
        whole = tuple(
            Segment(base + at, 0, parameter.elements)
            for at, parameter in enumerate(unit.parameters)
            if parameter.segment == index
        )
        yield ChunkSpec(size, whole)
