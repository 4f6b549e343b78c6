"""Where every value of a model lies, down to the byte: homes, slots and the file. Pure.

A `Plan` holds the placements and what follows from them: each home and slot at its offset in the
arena of its tier, the slots that each unit uses, and the layout of the store's file.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cpu_adam.formats import squares_bytes
from offload.blocks import apart_bytes, sums_bytes
from offload.config import TIERS, Tier
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
from offload.rows import Row, TierUse

WEIGHT_SLOTS_MAX = 3
"""Weight slots of one size class: one in use, one arriving, one being left."""

STAGES = 2
"""Slots of each staging ring (slots of a tier that values pass through) for whole units."""

CHUNK_STAGES = 4
"""Slots of each staging ring for chunks: so many are between their first read and last write."""


class Place(NamedTuple):
    """Where a value can lie: its home in a tier (`use` is `home`), or a slot."""

    tier: Tier
    use: str
    index: int = 0  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of the arena of a memory tier, offsets and sizes in bytes."""

    tier: Tier
    offset: int
    bytes: int


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lives, down to the byte. Made by `plan`."""

    profile: Profile
    placements: tuple[Placement, ...]
    homes: Mapping[tuple[Kind, int], Buffer]
    """Homes in memory tiers, by kind and unit."""
    slots: Mapping[Place, Buffer]
    weight_slot: tuple[Place | None, ...]
    """Per unit, the device slot of its weights in use; None where the home is the device."""
    gradient_slot: tuple[Place | None, ...]
    """Per unit, the device slot that collects gradients on their way out."""
    file: FileLayout
    budgets: Mapping[Tier, int]
    clips: bool
    states: StateChoice
    residents: frozenset[int] = frozenset()
    """Units of which the tiers hold the states alone, see [Note: Residents] of `resident`."""

    def home(self, kind: Kind, unit: int) -> Place:
        """The home of a value as a place."""
        return Place(self.placements[unit].of(kind), "home")

    def record_bytes(self, unit: int, chunk: int) -> int:
        """Size of the record of a chunk, padded to blocks."""
        one = self.profile.units[unit]
        return _record_bytes(one, one.chunks[chunk], self.states)

    def record_offset(self, unit: int, chunk: int) -> int:
        """Offset of a chunk's record in the home of the unit's state."""
        return sum(self.record_bytes(unit, before) for before in range(chunk))

    def bytes_of(self, kind: Kind, unit: int) -> int:
        """Size of a value."""
        return _value_bytes(self.profile.units[unit], kind, self.states)

    def reordered(self, profile: Profile) -> Plan:
        """The same places for the same units used in another order."""
        return replace(self, profile=profile)

    def rows(self) -> tuple[Row, ...]:
        """What lives where, in bytes: a row per kind and tier that holds any of it."""
        rows = []
        for kind, tier in itertools.product(KINDS, TIERS):
            placed = enumerate(self.placements)
            units = [u for u, p in placed if p.of(kind) == tier and self.bytes_of(kind, u)]
            if units:
                total = sum(self.bytes_of(kind, u) for u in units)
                rows.append(Row(kind, tier, len(units), total))
        return tuple(rows)

    def arena_bytes(self, tier: Tier, *, cut: bool = False) -> int:
        """What is taken of a memory tier, or `cut` from its arena alone; or the file's size."""
        if tier == "nvme":
            return self.file.bytes if self.file.extents else 0
        homes = (home for key, home in self.homes.items() if not cut or self.in_arena(*key))
        buffers = [*homes, *self.slots.values()]
        return max((b.offset + b.bytes for b in buffers if b.tier == tier), default=0)

    def in_arena(self, kind: Kind, unit: int) -> bool:
        """Whether a value that lives in a memory tier lies in its arena, and not with torch."""
        return kind == "state" or unit not in self.residents

    def tiers(self) -> tuple[TierUse, ...]:
        """What is taken of each tier, against its budget."""
        held = {tier: sum(row.bytes for row in self.rows() if row.tier == tier) for tier in TIERS}
        return tuple(
            TierUse(t, held[t], self.arena_bytes(t) - held[t], self.budgets[t]) for t in TIERS
        )


def _record_bytes(unit: Unit, chunk: Chunk, states: StateChoice) -> int:
    return _padded_record_bytes(unit.segments[chunk.segment].dtype, states, chunk.elements)


@functools.lru_cache(maxsize=1024)
def _padded_record_bytes(dtype: str, states: StateChoice, elements: int) -> int:
    return round_up(states.format(dtype).record_bytes(elements), BLOCK_BYTES)


def _chunk_bytes(unit: Unit, chunk: Chunk, kind: Kind, states: StateChoice) -> int:
    if kind == "weight":
        return chunk.weight_bytes
    return chunk.gradient_bytes if kind == "gradient" else _record_bytes(unit, chunk, states)


def _value_bytes(unit: Unit, kind: Kind, states: StateChoice) -> int:
    if kind == "weight":
        return unit.weight_bytes
    if kind == "gradient":
        return unit.gradient_bytes
    return sum(_record_bytes(unit, chunk, states) for chunk in unit.chunks)


class Sizes:
    """Bytes of every value of a profile: in memory, of its largest chunk, and in the file."""

    def __init__(self, profile: Profile, states: StateChoice):
        self._in_file, self._states = dict[object, int](), states
        pairs = [(u, u.chunks if states.on_accelerator else ()) for u in profile.units]
        self.updated = [max((states.scratch_bytes(u, c) for c in cs), default=0) for u, cs in pairs]
        self.squared = [max((squares_bytes(c.elements) for c in cs), default=0) for _, cs in pairs]
        self.summed = [sums_bytes(unit) for unit in profile.units]
        self.value = {k: [_value_bytes(unit, k, states) for unit in profile.units] for k in KINDS}
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
            if placement.of(kind) == "nvme" and _value_bytes(unit, kind, states):
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


@dataclass(slots=True)
class _Memory:
    """Lays buffers one after the other in each memory tier."""

    used: dict[Tier, int] = field(default_factory=lambda: {"device": 0, "cpu": 0})
    homes: dict[tuple[Kind, int], Buffer] = field(default_factory=dict)
    slots: dict[Place, Buffer] = field(default_factory=dict)
    weight_slot: tuple[Place | None, ...] = ()
    gradient_slot: tuple[Place | None, ...] = ()
    residents: frozenset[int] = frozenset()

    def take(self, tier: Tier, size: int) -> Buffer:
        """The next `size` bytes of `tier`, rounded up to blocks."""
        buffer = Buffer(tier, self.used[tier], round_up(size, BLOCK_BYTES))
        self.used[tier] += buffer.bytes
        return buffer

    def ring(self, tier: Tier, use: str, size: int, depth: int) -> None:
        """`depth` slots of `size` bytes, none for size 0."""
        for index in range(depth if size else 0):
            self.slots[Place(tier, use, index)] = self.take(tier, size)

    def shared_slots(
        self, use: str, units: Sequence[Unit], away: Sequence[bool], sizes: Sequence[int], most: int
    ) -> tuple[Place | None, ...]:
        """Device slots for units whose value lives elsewhere: a lasting unit has its own, the
        others share `most` per size class (powers of two), always the same for the same unit."""
        classes: dict[tuple[int, int], list[int]] = {}
        for u, unit in enumerate(units):
            if away[u] and sizes[u]:
                own = u + 1 if unit.lasting else 0
                classes.setdefault((own, (sizes[u] - 1).bit_length()), []).append(u)
        places: list[Place | None] = [None] * len(units)
        numbers = itertools.count()
        for members in classes.values():
            for slot in range(min(most, len(members))):
                place = Place("device", use, next(numbers))
                mine = members[slot::most]
                self.slots[place] = self.take("device", max(sizes[u] for u in mine))
                for u in mine:
                    places[u] = place
        return tuple(places)


def lay_out(
    profile: Profile,
    placements: Sequence[Placement],
    *,
    budgets: Mapping[Tier, int],
    clips: bool,
    states: StateChoice,
    weight_slots: int = WEIGHT_SLOTS_MAX,
    reserve: Iterable[Kind] = (),
    early: bool = False,
) -> Plan:
    """The plan for given placements: every home and slot at its offset, whatever the budget.

    `reserve` names kinds with room for their chunks on the cpu even if all are there at home, see
    [Note: More memory is never slower]. Updates begin `early`: in a step's last backward.
    """
    sizes = Sizes(profile, states)
    memory = lay_out_memory(profile, placements, sizes, clips, weight_slots, reserve, early)
    return Plan(
        profile=profile,
        placements=tuple(placements),
        homes=memory.homes,
        slots=memory.slots,
        weight_slot=memory.weight_slot,
        gradient_slot=memory.gradient_slot,
        file=file_layout(profile, placements, states),
        budgets=dict(budgets),
        clips=clips,
        states=states,
        residents=memory.residents,
    )


def lay_out_memory(
    profile: Profile,
    placements: Sequence[Placement],
    sizes: Sizes,
    clips: bool,
    weight_slots: int,
    reserve: Iterable[Kind],
    early: bool,
) -> _Memory:
    """Homes and slots of the memory tiers."""
    units, memory = profile.units, _Memory()
    pairs = enumerate(zip(units, placements))
    own = [u for u, (one, p) in pairs if one.stays(p.weight, p.gradient, p.state, early=early)]
    memory.residents = frozenset(own)

    def settle(kind: Kind, u: int, size: int) -> None:
        tier = placements[u].of(kind)
        if size and tier != "nvme":
            memory.homes[kind, u] = memory.take(tier, size)

    for kind, u in itertools.product(KINDS, range(len(units))):
        if kind == "state" or u not in memory.residents:
            settle(kind, u, sizes.value[kind][u])
    slots = list[tuple[Place | None, ...]]()
    for kind, most in zip(KINDS, (weight_slots, STAGES)):
        away = [placement.of(kind) != "device" for placement in placements]
        slots.append(memory.shared_slots(kind, units, away, sizes.value[kind], most))
    memory.weight_slot, memory.gradient_slot = slots
    rings = _Rings(placements, sizes, tuple(reserve))
    memory.ring("device", "sums", sum(sizes.summed[u] for u in own if clips), 1)
    updated = (n for n, p in zip(sizes.updated, placements) if p.state == "device")
    squared = (n for n, p in zip(sizes.squared, placements) if clips and p.gradient == "device")
    memory.ring("device", "workspace", max((*updated, *squared), default=0), 1)
    memory.ring("cpu", "weight", rings.whole("weight", ("nvme",)), STAGES)
    memory.ring("cpu", "gradient", rings.whole("gradient", ("cpu", "nvme")), STAGES)
    memory.ring("cpu", "deposit", rings.whole("gradient", ("nvme",)), STAGES)
    for kind, tier in itertools.product(KINDS, TIERS[:2]):
        memory.ring(tier, f"{kind}_chunk", rings.chunk(kind, tier, clips), CHUNK_STAGES)
    for kind, u in itertools.product(KINDS, own):  # Behind all that is cut from the arena.
        if kind != "state":
            settle(kind, u, max(sizes.apart[kind][u], sizes.value[kind][u]))
    return memory


def site(placement: Placement) -> Tier:
    """Where a unit is updated: where its states live, or on the cpu for states on nvme."""
    return "device" if placement.state == "device" else "cpu"


@functools.cache
def route(start: Tier, stop: Tier) -> tuple[Tier, ...]:
    """The tiers passed on the way, both ends included: nvme and device meet through cpu only."""
    line: tuple[Tier, ...] = ("nvme", "cpu", "device")
    a, b = line.index(start), line.index(stop)
    return line[a : b + 1] if a <= b else line[b : a + 1][::-1]


@dataclass(frozen=True, slots=True)
class _Rings:
    """Sizes of the staging slots: the largest value that passes through."""

    placements: Sequence[Placement]
    sizes: Sizes
    reserve: tuple[Kind, ...]

    def whole(self, kind: Kind, homes: tuple[Tier, ...]) -> int:
        """For whole units whose `kind` has one of `homes`."""
        pairs = zip(self.sizes.value[kind], self.placements)
        return max((size for size, placement in pairs if placement.of(kind) in homes), default=0)

    def chunk(self, kind: Kind, tier: Tier, clips: bool) -> int:
        """For chunks of `kind` that pass through `tier` on their way to the update and back."""
        largest = 0
        for size, placement in zip(self.sizes.chunk[kind], self.placements):
            home, at = placement.of(kind), site(placement)
            passes = tier in route(home, at)[1:]
            squared = clips and kind == "gradient" and home == "nvme" and tier == "cpu"
            reserved = kind in self.reserve and tier == at == "cpu"
            if passes or squared or reserved:
                largest = max(largest, size)
        return largest
