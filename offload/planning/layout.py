"""The plan: where every value of a model lies, down to the byte. Pure.

A `Plan` holds the placements and what follows from them: the offset of each home and slot in the
arena of its tier, the slots of each unit, and the layout of the store's file. `lay_out` makes one.

[Note: Allocator rounding]
Torch allocates the weights and gradients of resident units, so the plan must bound what its caching
allocator takes for them. On CUDA, ROCm and XPU it rounds sizes up to 512 bytes (`round_size` in
c10/cuda/CUDACachingAllocator.cpp, `kMinBlockSize` in c10/core/AllocatorConfig.h). It splits a
larger free block if at least 512 bytes remain, for sizes up to 1 MiB; for larger sizes only if more
than 1 MiB remains (`should_split`, `kSmallSize`). What is not split off is taken, too. This bounds
`torch.accelerator.memory_allocated`, unless PYTORCH_ALLOC_CONF sets `max_split_size_mb` or
`roundup_power2_divisions`. The rest of a segment (2, 20 or more MiB, as the driver gives them)
serves other tensors, so it is not counted here. The arena is a single block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cpu_adam.formats import squares_bytes
from offload.planning.profile import (
    BLOCK_BYTES,
    ITEM_BYTES,
    KINDS,
    Kind,
    Profile,
    StateChoice,
    Unit,
    round_up,
)
from offload.planning.tiers import TIERS, Tier, format_bytes

WEIGHT_SLOTS_MAX = 3
"""Weight slots of one size class: one in use, one being filled, one being released."""

STAGES = 2
"""Slots of each staging ring (slots of a tier that passing values share) for values of units; of
one size class also those of full weights, one in use and one being gathered."""

FULL = "full_weight", "full_gradient", "exchange", "reserve", "column"
"""Uses of slots that hold values of full units, see [Note: Shards] of `profile`: what is gathered,
what is to be exchanged, what came in exchange, and what only other ranks asked for; and of a part
of each unit, what a column of ranks has, where that is kept."""

ALLOCATOR_ROUND_BYTES = 512
ALLOCATOR_SPLIT_BYTES = 1 << 20
"""Up to this size nothing beside the rounded size is taken."""


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


class Place(NamedTuple):
    """Where a value can lie: its home in a tier (`use` is `home`), or a slot."""

    tier: Tier
    use: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """A range of a memory tier; offset and size in bytes."""

    tier: Tier
    offset: int
    bytes: int


FileLayout = Mapping[tuple[Kind, str], Sequence[int]]
"""By kind and unit, in the order of the file, the bytes of each chunk: multiples of 4 KiB."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the plan table: the bytes of a kind in a tier."""

    kind: Kind
    tier: Tier
    units: int
    bytes: int

    def __str__(self) -> str:
        units = "1 unit" if self.units == 1 else f"{self.units} units"
        return f"{self.kind:8} on {self.tier:6} {format_bytes(self.bytes):>10} of {units}"


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a plan takes of one tier, against the budget."""

    tier: Tier
    resident_bytes: int
    staging_bytes: int
    budget_bytes: int

    def __str__(self) -> str:
        taken = format_bytes(self.resident_bytes + self.staging_bytes)
        return f"{self.tier:8} {taken:>10} of {format_bytes(self.budget_bytes)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything lives, down to the byte. Made by `planner.plan`."""

    profile: Profile
    placements: tuple[Placement, ...]
    homes: Mapping[tuple[Kind, int], Buffer]
    """Homes in memory tiers, by kind and unit."""
    slots: Mapping[Place, Buffer]
    weight_slot: tuple[Place | None, ...]
    """Per unit, the device slot of its weights; None where their home is the device."""
    gradient_slot: tuple[Place | None, ...]
    """Per unit, the device slot in which backward collects its gradients; None where it does so at
    their home."""
    file: FileLayout
    budgets: Mapping[Tier, int]
    clips: bool
    states: StateChoice
    residents: frozenset[int] = frozenset()
    """Units of which the arenas hold only the states, see [Note: Residents] of `resident`."""
    in_place: bool = False
    """Whether gradients in CPU memory are collected there, as the device is the CPU."""
    full_weight: tuple[Place | None, ...] = ()
    """Per unit, where its weights are gathered from the ranks; None with one rank."""
    full_gradient: tuple[Place | None, ...] = ()
    """Per unit, where its gradient is collected for the ranks; None with one rank."""
    sizes: Sizes = field(kw_only=True, repr=False, compare=False)

    def home(self, kind: Kind, unit: int) -> Place:
        """The home of a value as a place."""
        return Place(self.placements[unit].of(kind), "home")

    def bytes_of(self, kind: Kind, unit: int) -> int:
        """Size of a value."""
        return self.sizes.value[kind][unit]

    def size_at(self, place: Place, kind: Kind, unit: int) -> int:
        """Size of a value at a place."""
        if place.use == "column":
            return self.profile.sharding.column * self.bytes_of(kind, unit)
        if place.use in FULL:
            one = self.profile.full[unit]
            return one.weight_bytes if kind == "weight" else one.gradient_bytes
        return self.bytes_of(kind, unit)

    def slot_in_use(self, unit: int) -> Place | None:
        """The device slot in which the weights of a unit are used; None where that is at home."""
        return self.full_weight[unit] or self.weight_slot[unit]

    def rows(self) -> tuple[Row, ...]:
        """The plan table: a row per kind and tier that holds any of it."""
        rows = []
        for kind, tier in itertools.product(KINDS, TIERS):
            placed = enumerate(self.placements)
            units = [u for u, p in placed if p.of(kind) == tier and self.bytes_of(kind, u)]
            if units:
                total = sum(self.bytes_of(kind, u) for u in units)
                rows.append(Row(kind, tier, len(units), total))
        return tuple(rows)

    def taken_bytes(self, tier: Tier) -> int:
        """Bytes of a tier that the plan takes: arena and torch's own tensors, or the file."""
        if tier == "nvme":
            return self.sizes.in_file(self.placements)
        return self._end(tier, self.homes.values())

    def told_idle(self, idle: int) -> str | None:
        """What to tell of the bytes of the device that activations leave idle, if `auto` would fill
        a larger budget with more of what lives elsewhere."""
        budget, units = self.budgets["device"], range(len(self.placements))
        left = budget - self.taken_bytes("device")
        largest = max((self.bytes_of(kind, unit) for kind in KINDS for unit in units), default=0)
        away = any(one.of(kind) != "device" for one in self.placements for kind in KINDS)
        if not away or idle < max(largest, budget // 4) or left > 2 * largest:
            return None
        more = format_bytes(budget + idle * 3 // 4).replace(" ", "")
        return (
            f"{format_bytes(idle)} of the device's memory were idle at the highest use so far: "
            f"with Config.device_memory={more!r} more of what is left to 'auto' would live there"
        )

    def arena_bytes(self, tier: Tier) -> int:
        """The size of the arena of a memory tier."""
        return self._end(tier, (home for key, home in self.homes.items() if self.in_arena(*key)))

    def _end(self, tier: Tier, homes: Iterable[Buffer]) -> int:
        buffers = itertools.chain(homes, self.slots.values())
        return max((b.offset + b.bytes for b in buffers if b.tier == tier), default=0)

    def in_arena(self, kind: Kind, unit: int) -> bool:
        """Whether a value at home in memory lies in the arena; otherwise torch allocates it."""
        return kind == "state" or unit not in self.residents

    def tiers(self) -> tuple[TierUse, ...]:
        """What is taken of each tier, against its budget."""
        homes = {tier: sum(row.bytes for row in self.rows() if row.tier == tier) for tier in TIERS}
        return tuple(
            TierUse(t, homes[t], self.taken_bytes(t) - homes[t], self.budgets[t]) for t in TIERS
        )


def site(placement: Placement) -> Tier:
    """Where a unit is updated: where its states live, or on the cpu for states on nvme."""
    return "device" if placement.state == "device" else "cpu"


@functools.cache
def route(start: Tier, stop: Tier) -> tuple[Tier, ...]:
    """The tiers from `start` to `stop`, both included: nvme and device connect only via cpu."""
    line: tuple[Tier, ...] = ("nvme", "cpu", "device")
    a, b = line.index(start), line.index(stop)
    return line[a : b + 1] if a <= b else line[b : a + 1][::-1]


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
    in_place: bool = False,
) -> Plan:
    """The plan for given placements: every home and slot at its offset, whatever the budget.

    Chunks of the kinds in `reserve` get a staging ring on the cpu even if none passes through, see
    [Note: More memory is never slower] of `planner`. With `early`, updates begin inside backward;
    with `in_place` the device is the CPU, and gradients in CPU memory are collected at home.
    """
    sizes = Sizes(profile, states)
    memory = lay_out_memory(profile, placements, sizes, clips, weight_slots, reserve, early)
    return Plan(
        profile=profile,
        placements=tuple(placements),
        homes=memory.homes,
        slots=memory.slots,
        weight_slot=memory.weight_slot,
        gradient_slot=tuple(
            None if in_place and placement.gradient == "cpu" else slot
            for placement, slot in zip(placements, memory.gradient_slot)
        ),
        full_weight=memory.full_weight,
        full_gradient=memory.full_gradient,
        file=file_layout(profile, placements, sizes),
        budgets=dict(budgets),
        clips=clips,
        states=states,
        residents=memory.residents,
        in_place=in_place,
        sizes=sizes,
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
    """Homes and slots of the memory tiers; arguments as for `lay_out`."""
    units, memory = profile.units, _Memory()
    pairs = enumerate(zip(units, placements))
    alone = not profile.sharding.gathers
    residents = [u for u, (one, p) in pairs if alone and is_resident(one, p, early=early)]
    memory.residents = frozenset(residents)

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
    memory.full_weight = memory.full_gradient = (None,) * len(units)
    if not alone:
        memory.full_slots(profile, weight_slots)
    reserved = tuple(reserve)

    def ring(use: str, kind: Kind, *tiers: Tier) -> None:
        """On the cpu, for values of units whose `kind` has one of these homes."""
        pairs = zip(sizes.value[kind], placements)
        memory.ring(
            "cpu", use, max((n for n, p in pairs if p.of(kind) in tiers), default=0), STAGES
        )

    updated = (n for n, p in zip(sizes.scratch, placements) if p.state == "device")
    squared = (n for n, p in zip(sizes.squares, placements) if clips and p.gradient == "device")
    memory.ring("device", "workspace", max((*updated, *squared), default=0), 1)
    ring("weight", "weight", "nvme")
    ring("gradient", "gradient", "cpu", "nvme")
    ring("deposit", "gradient", "nvme")
    for kind, tier in itertools.product(KINDS, TIERS[:2]):
        size = _staged_bytes(kind, tier, placements, sizes, reserved=kind in reserved)
        memory.ring(tier, f"{kind}_chunk", size, profile.chunk_stages)
    for kind, u in itertools.product(KINDS, residents):  # Counted behind the end of the arena.
        if kind != "state":
            place_home(kind, u, max(sizes.allocated[kind][u], sizes.value[kind][u]))
    return memory


def full_slots_bytes(profile: Profile, weight_slots: int) -> int:
    """Bytes of the slots for full units; 0 with one rank."""
    memory = _Memory()
    if profile.sharding.gathers:
        memory.full_slots(profile, weight_slots)
    return memory.used["device"]


def is_resident(unit: Unit, placement: Placement, *, early: bool) -> bool:
    """Whether torch may own a unit's weights and gradients: see [Note: Residents] of `resident`.

    Autograd would accumulate in the weights' dtype, so gradients must have the same. If updates
    begin `early` off the device, or a gradient may come as parts of a sum, the engine must see each
    of them arrive.
    """
    if any(one.part is not None for one in unit.parameters):
        return False
    if not unit.trainable:
        return placement.weight == "device"
    trained = [one for one in unit.segments if one.trainable]
    alike = all(one.gradient_dtype == one.dtype for one in trained)
    taken = early and placement.state != "device"
    return alike and placement.weight == placement.gradient == "device" and not taken


@dataclass(slots=True)
class _Memory:
    """Lays buffers one after the other in each memory tier."""

    used: dict[Tier, int] = field(default_factory=lambda: {"device": 0, "cpu": 0})
    homes: dict[tuple[Kind, int], Buffer] = field(default_factory=dict)
    slots: dict[Place, Buffer] = field(default_factory=dict)
    weight_slot: tuple[Place | None, ...] = ()
    gradient_slot: tuple[Place | None, ...] = ()
    full_weight: tuple[Place | None, ...] = ()
    full_gradient: tuple[Place | None, ...] = ()
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

    def full_slots(self, profile: Profile, weight_slots: int) -> None:
        """Slots for full units, see `FULL`."""
        units, every = profile.full, [True] * len(profile.full)
        weights = [unit.weight_bytes for unit in units]
        gradients = [unit.gradient_bytes for unit in units]
        most = len(units) if profile.sharding.keeps else min(weight_slots, STAGES)
        self.full_weight = self.shared_slots("full_weight", units, every, weights, most)
        self.full_gradient = self.shared_slots("full_gradient", units, every, gradients, STAGES)
        self.ring("device", "exchange", max(gradients, default=0), 1)
        self.ring("device", "reserve", max((*weights, *gradients), default=0), 1)
        for number, unit in enumerate(profile.units if profile.sharding.column else ()):
            size = profile.sharding.column * unit.weight_bytes
            self.slots[Place("device", "column", number)] = self.take("device", size)

    def shared_slots(
        self, use: str, units: Sequence[Unit], away: Sequence[bool], sizes: Sequence[int], most: int
    ) -> tuple[Place | None, ...]:
        """The device slot of each unit whose value is `away`. A lasting unit has its own. The
        others share up to `most` per size class (powers of two), each always using the same."""
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


def _staged_bytes(
    kind: Kind, tier: Tier, placements: Sequence[Placement], sizes: Sizes, *, reserved: bool
) -> int:
    """The largest chunk of `kind` that passes through `tier` on its way to the update and back;
    with `reserved` also of those that would if their home were slower."""
    largest = 0
    for size, placement in zip(sizes.chunk[kind], placements):
        at = site(placement)
        if tier in route(placement.of(kind), at)[1:] or (reserved and tier == at == "cpu"):
            largest = max(largest, size)
    return largest


def file_layout(profile: Profile, placements: Sequence[Placement], sizes: Sizes) -> FileLayout:
    """The layout of the store's file: the values whose home is nvme, in order of kind and unit."""
    return {
        (kind, unit.name): sizes.chunks[kind][u]
        for kind in KINDS
        for u, (unit, placement) in enumerate(zip(profile.units, placements))
        if placement.of(kind) == "nvme" and sizes.value[kind][u]
    }


class Sizes:
    """Bytes by unit.

    By kind: those of a `value`, of its `chunks` as they are stored, of the largest `chunk` that is
    updated, and what torch takes if the unit is resident (`allocated`). `scratch` and `squares` are
    the workspace of an update and of a norm for one chunk on the device.
    """

    def __init__(self, profile: Profile, states: StateChoice):
        units, on_device = profile.units, states.on_accelerator
        pairs = [(u, u.chunks if on_device else ()) for u in units]
        self.scratch = [max((states.scratch_bytes(u, c) for c in cs), default=0) for u, cs in pairs]
        self.squares = [max((squares_bytes(c.elements) for c in cs), default=0) for _, cs in pairs]
        record = functools.cache(
            lambda dtype, count: round_up(states.format(dtype).record_bytes(count), BLOCK_BYTES)
        )
        updated: dict[Kind, list[list[int]]] = {
            "weight": [[c.weight_bytes for c in u.chunks] for u in units],
            "gradient": [[c.gradient_bytes for c in u.chunks] for u in units],
            "state": [
                [record(u.segments[c.segment].dtype, c.elements) for c in u.chunks] for u in units
            ],
        }
        self.chunk = {k: [max(n, default=0) for n in chunks] for k, chunks in updated.items()}
        self.chunks = {**updated, "weight": [[n for _, n in u.weight_chunks] for u in units]}
        self.value = {kind: [*map(sum, chunks)] for kind, chunks in self.chunks.items()}
        self.allocated = self.value
        if on_device:
            self.allocated = {k: [allocated_bytes(u, k) for u in units] for k in KINDS}
        self.record_offsets = [[*itertools.accumulate(n, initial=0)] for n in self.chunks["state"]]

    def in_file(self, placements: Sequence[Placement]) -> int:
        """Bytes of the file for given placements, 0 when nothing lives there."""
        homes = [(kind, u, one.of(kind)) for u, one in enumerate(placements) for kind in KINDS]
        return sum(self.value[kind][unit] for kind, unit, tier in homes if tier == "nvme")


def allocator_bytes(size: int) -> int:
    """Most bytes that torch's allocator takes for `size`, see [Note: Allocator rounding]."""
    rounded = round_up(size, ALLOCATOR_ROUND_BYTES)
    return rounded if rounded <= ALLOCATOR_SPLIT_BYTES else rounded + ALLOCATOR_SPLIT_BYTES


def allocated_bytes(unit: Unit, kind: Kind) -> int:
    """Most bytes that torch takes for the weights, or the gradients, of a unit."""
    return sum(
        allocator_bytes(one.elements * ITEM_BYTES[one.dtype])
        for one in unit.parameters
        if kind == "weight" or one.trainable
    )
