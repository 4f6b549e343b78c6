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
from functools import cached_property
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
        """The tier of a kind."""
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


FileLayout = Mapping[tuple[Kind, int], Sequence[int]]
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


@dataclass(frozen=True)
class Plan:
    """Where everything lives, down to the byte. Made by `planner.plan`."""

    profile: Profile
    placements: tuple[Placement, ...]
    sizes: Sizes = field(repr=False, compare=False)
    homes: Mapping[tuple[Kind, int], Buffer]
    """Homes in memory tiers, by kind and unit."""
    slots: Mapping[Place, Buffer]
    weight_slot: tuple[Place | None, ...]
    """Per unit, the device slot of its weights; None where they are used at their home."""
    gradient_slot: tuple[Place | None, ...]
    """Per unit, the device slot in which backward collects its gradients; None where it does so at
    their home."""
    full_weight: tuple[Place | None, ...]
    """Per unit, where its weights are gathered from the ranks; None with one rank."""
    full_gradient: tuple[Place | None, ...]
    """Per unit, where its gradient is collected for the ranks; None with one rank."""
    residents: frozenset[int]
    """Units of which the arenas hold only the states, see [Note: Residents] of `resident`."""
    arena_bytes: Mapping[Tier, int]
    """By memory tier, the size of its arena."""
    memory_bytes: Mapping[Tier, int]
    """By memory tier, what is taken: by its arena and by torch's own tensors."""
    budgets: Mapping[Tier, int]
    clips: bool
    states: StateChoice

    @cached_property
    def file(self) -> FileLayout:
        """The layout of the store's file: the values whose home is nvme, by kind and unit."""
        return {
            (kind, unit): self.sizes.chunks[kind][unit]
            for kind in KINDS
            for unit, placement in enumerate(self.placements)
            if placement.of(kind) == "nvme" and self.bytes_of(kind, unit)
        }

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
        """Bytes of a tier that the plan takes: of memory, or of the file."""
        if tier == "nvme":
            return self.sizes.at_home(self.placements, tier)
        return self.memory_bytes[tier]

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
    sizes: Sizes | None = None,
    weight_slots: int = WEIGHT_SLOTS_MAX,
    reserve: Iterable[Kind] = (),
    early: bool = False,
) -> Plan:
    """The plan for given placements: every home and slot at its offset, whatever the budget.

    Chunks of the kinds in `reserve` get a staging ring on the cpu even if none passes through, see
    [Note: More memory is never slower] of `planner`. With `early`, updates begin inside backward.
    Without an accelerator the CPU uses weights and gradients in its memory at home.
    """
    sizes, units, memory = sizes or Sizes(profile, states), profile.units, _Memory()
    alone, pairs = profile.sharding.ranks == 1, enumerate(zip(units, placements))
    residents = frozenset(u for u, pair in pairs if alone and is_resident(*pair, early=early))

    def place_home(kind: Kind, u: int, size: int) -> None:
        tier = placements[u].of(kind)
        if size and tier != "nvme":
            memory.homes[kind, u] = memory.take(tier, size)

    for kind, u in itertools.product(KINDS, range(len(units))):
        if kind == "state" or u not in residents:
            place_home(kind, u, sizes.value[kind][u])
    here: tuple[Tier, ...] = ("device",) if states.on_accelerator else ("device", "cpu")
    away = [p.weight not in here and n for n, p in zip(sizes.value["weight"], placements)]
    weight_slot = memory.shared_slots("weight", units, away, weight_slots)
    away = [p.gradient not in here and n for n, p in zip(sizes.value["gradient"], placements)]
    gradient_slot = memory.shared_slots("gradient", units, away, STAGES)
    full_weight, full_gradient = memory.full_slots(profile, weight_slots)
    memory.rings(profile, placements, sizes, clips, frozenset(reserve), here)
    arena_bytes = dict(memory.used)
    for kind, u in itertools.product(KINDS, sorted(residents)):  # Counted behind its end.
        if kind != "state":
            place_home(kind, u, max(sizes.allocated[kind][u], sizes.value[kind][u]))
    return Plan(
        profile=profile,
        placements=tuple(placements),
        sizes=sizes,
        homes=memory.homes,
        slots=memory.slots,
        weight_slot=weight_slot,
        gradient_slot=gradient_slot,
        full_weight=full_weight,
        full_gradient=full_gradient,
        residents=residents,
        arena_bytes=arena_bytes,
        memory_bytes=memory.used,
        budgets=dict(budgets),
        clips=clips,
        states=states,
    )


def full_slots_bytes(profile: Profile, weight_slots: int) -> int:
    """Bytes of the slots for full units; 0 with one rank."""
    memory = _Memory()
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
    """Buffers one after the other in each memory tier."""

    used: dict[Tier, int] = field(default_factory=lambda: {"device": 0, "cpu": 0})
    homes: dict[tuple[Kind, int], Buffer] = field(default_factory=dict)
    slots: dict[Place, Buffer] = field(default_factory=dict)

    def take(self, tier: Tier, size: int) -> Buffer:
        """The next `size` bytes of `tier`, rounded up to blocks."""
        buffer = Buffer(tier, self.used[tier], round_up(size, BLOCK_BYTES))
        self.used[tier] += buffer.bytes
        return buffer

    def ring(self, tier: Tier, use: str, size: int, depth: int) -> None:
        """`depth` slots of `size` bytes, none for size 0."""
        for index in range(depth if size else 0):
            self.slots[Place(tier, use, index)] = self.take(tier, size)

    def rings(
        self,
        profile: Profile,
        placements: Sequence[Placement],
        sizes: Sizes,
        clips: bool,
        reserved: frozenset[Kind],
        collected: tuple[Tier, ...],
    ) -> None:
        """Staging rings for what passes through a tier, and the workspace of the device. Those of
        chunks are for what goes to the update and back; of `reserved` kinds also for what would if
        its home were slower. Gradients with a home in a tier of `collected` lie there at once."""
        sites = [site(one) for one in placements]

        def largest(found: Iterable[int], homes: Iterable[Tier], *tiers: Tier) -> int:
            return max((n for n, home in zip(found, homes) if home in tiers), default=0)

        weights, gradients = sizes.value["weight"], sizes.value["gradient"]
        at = {kind: [one.of(kind) for one in placements] for kind in KINDS}
        updated = largest(sizes.scratch, at["state"], "device")
        squared = largest(sizes.squares, at["gradient"], "device") if clips else 0
        self.ring("device", "workspace", max(updated, squared), 1)
        self.ring("cpu", "weight", largest(weights, at["weight"], "nvme"), STAGES)
        passing = set(TIERS) - {*collected}
        if profile.sharding.ranks > 1:  # Sums are added up on the device, and go home as they are.
            passing -= {"cpu"}
        self.ring("cpu", "gradient", largest(gradients, at["gradient"], *passing), STAGES)
        self.ring("cpu", "deposit", largest(gradients, at["gradient"], "nvme"), STAGES)
        for kind, tier in itertools.product(KINDS, TIERS[:2]):
            size = 0
            for n, home, update in zip(sizes.chunk[kind], at[kind], sites):
                waits = kind in reserved and tier == update == "cpu"
                if waits or tier in route(home, update)[1:]:
                    size = max(size, n)
            self.ring(tier, f"{kind}_chunk", size, profile.chunk_stages)

    def full_slots(self, profile: Profile, weight_slots: int) -> list[tuple[Place | None, ...]]:
        """Slots for full units, see `FULL`: per unit, that of its weights and of its gradient."""
        units = profile.full
        if profile.sharding.ranks == 1:
            return [(None,) * len(units)] * 2
        weights = [unit.weight_bytes for unit in units]
        gradients = [unit.gradient_bytes for unit in units]
        few, at = min(weight_slots, STAGES), profile.sharding
        found = [
            self.shared_slots("full_weight", units, weights, len(units) if at.keeps else few),
            self.shared_slots("full_gradient", units, gradients, len(units) if at.late else STAGES),
        ]
        self.ring("device", "exchange", max(gradients, default=0), 1)
        self.ring("device", "reserve", max((*weights, *gradients), default=0), 1)
        for number, unit in enumerate(profile.units if profile.sharding.column else ()):
            size = profile.sharding.column * unit.weight_bytes
            self.slots[Place("device", "column", number)] = self.take("device", size)
        return found

    def shared_slots(
        self, use: str, units: Sequence[Unit], sizes: Sequence[int], most: int
    ) -> tuple[Place | None, ...]:
        """The device slot of each unit, none for size 0. A lasting unit has its own. The others
        share up to `most` per size class (powers of two), each always using the same."""
        classes: dict[tuple[int, int], list[int]] = {}
        for u, unit in enumerate(units):
            if sizes[u]:
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
            "weight": [[n for _, n in u.weight_chunks[: len(u.chunks)]] for u in units],
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

    def at_home(self, placements: Sequence[Placement], tier: Tier) -> int:
        """Bytes of the values whose home is `tier`, for given placements."""
        homes = [(kind, u, one.of(kind)) for u, one in enumerate(placements) for kind in KINDS]
        return sum(self.value[kind][unit] for kind, unit, home in homes if home == tier)


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
