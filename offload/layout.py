"""Where every value of a model lies, down to the byte: homes, slots and the file. Pure.

A `Plan` holds the placements and what follows from them: each home and slot at its offset in the
arena of its tier, the slots that each unit uses, and the layout of the store's file.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offload.config import TIERS, Tier
from offload.profile import Profile, StateChoice, Unit
from offload.records import BLOCK_BYTES, KINDS, FileLayout, Kind, round_up
from offload.rows import Row, TierUse
from offload.sizes import Placement, Sizes, file_layout, record_bytes, value_bytes

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
    number: int = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of the arena of a memory tier, offsets and sizes in bytes."""

    tier: Tier
    offset: int
    bytes: int


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
    _record_offsets: dict[int, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By unit, those that were asked for."""

    def home(self, kind: Kind, unit: int) -> Place:
        """The home of a value as a place."""
        return Place(self.placements[unit].of(kind), "home")

    def record_bytes(self, unit: int, chunk: int) -> int:
        """Size of the record of a chunk, padded to blocks."""
        one = self.profile.units[unit]
        return record_bytes(one, one.chunks[chunk], self.states)

    def record_offset(self, unit: int, chunk: int) -> int:
        """Offset of a chunk's record in the home of the unit's state."""
        if unit not in self._record_offsets:
            sizes = (
                self.record_bytes(unit, one) for one in range(len(self.profile.units[unit].chunks))
            )
            self._record_offsets[unit] = (0, *itertools.accumulate(sizes))
        return self._record_offsets[unit][chunk]

    def bytes_of(self, kind: Kind, unit: int) -> int:
        """Size of a value."""
        return value_bytes(self.profile.units[unit], kind, self.states)

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

    def taken_bytes(self, tier: Tier) -> int:
        """What is taken of a tier: by its arena and what torch has of it, or by the file."""
        if tier == "nvme":
            return self.file.bytes if self.file.extents else 0
        return self._end(tier, self.homes.values())

    def arena_bytes(self, tier: Tier) -> int:
        """The size of the arena of a memory tier."""
        return self._end(tier, (home for key, home in self.homes.items() if self.in_arena(*key)))

    def _end(self, tier: Tier, homes: Iterable[Buffer]) -> int:
        buffers = itertools.chain(homes, self.slots.values())
        return max((b.offset + b.bytes for b in buffers if b.tier == tier), default=0)

    def in_arena(self, kind: Kind, unit: int) -> bool:
        """Whether a value that lives in a memory tier lies in its arena, and not with torch."""
        return kind == "state" or unit not in self.residents

    def tiers(self) -> tuple[TierUse, ...]:
        """What is taken of each tier, against its budget."""
        held = {tier: sum(row.bytes for row in self.rows() if row.tier == tier) for tier in TIERS}
        return tuple(
            TierUse(t, held[t], self.taken_bytes(t) - held[t], self.budgets[t]) for t in TIERS
        )


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
    own = [u for u, (one, p) in pairs if is_resident(one, p, early=early)]
    memory.residents = frozenset(own)

    def place_home(kind: Kind, u: int, size: int) -> None:
        tier = placements[u].of(kind)
        if size and tier != "nvme":
            memory.homes[kind, u] = memory.take(tier, size)

    for kind, u in itertools.product(KINDS, range(len(units))):
        if kind == "state" or u not in memory.residents:
            place_home(kind, u, sizes.value[kind][u])
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
            place_home(kind, u, max(sizes.apart[kind][u], sizes.value[kind][u]))
    return memory


def is_resident(unit: Unit, placement: Placement, *, early: bool) -> bool:
    """Whether torch may keep a unit's weights and gradients: see [Note: Residents] of `resident`.

    Gradients in another dtype than their weights' are summed by the engine. Where updates begin
    `early`, inside backward, it has to know when those come that it takes elsewhere.
    """
    if not unit.trainable:
        return placement.weight == "device"
    trained = [one for one in unit.segments if one.trainable]
    alike = all(one.gradient_dtype == one.dtype for one in trained)
    taken = early and placement.state != "device"
    return alike and placement.weight == placement.gradient == "device" and not taken


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
