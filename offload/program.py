"""Compile a plan into phases of ops. Pure.

[Note: Phases]
A phase is the ops of one stretch of training: `forward` (with or without gradients), `backward` of
the first micro-batch and of a next one, `norm`, and `update`. Ops are listed in the order in which
they are issued. An op may start when the ops it waits for are done; a lane runs those of its ops
that may start, earliest deadline first. So nothing rests on the order of a lane, every order
between two ops that touch the same place is a wait, and `verify` needs to look at waits alone.

Waits inside a phase are compiled. Between phases the same rule applies to the places: the first
op of a phase that touches a place waits for what the phases before did there. `Scoreboard` is that
rule, used by `compile_program`, by `simulate` and by the engine.

[Note: Chunks]
On their way through a tier, values lie in *staging rings*, a few slots each that many values share.
The ops of one chunk of `norm` or `update` stand together and use one slot of each ring that they
pass through; the way of the chunk through them is its *passage*. Which slot is known when the
passage starts: until then its index is `IN_RING`, and the slots of two chunks are two places. See
[Note: Passages] of `schedule`.

[Note: Slots between phases]
Forward ends with the last units still in their slots; backward starts with those and does not
fetch them again. `Phase.entry` and `Phase.exit` declare what the weight slots hold; a phase may
follow another when what it wants at entry is there. Only backward wants anything; `norm` and
`update` are the halves of a step, and stand together.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import NamedTuple

from offload.config import Tier
from offload.layout import STAGES, Place, Plan, route, site
from offload.records import Kind
from offload.scoreboard import Scoreboard


class Lane(str, Enum):
    """A resource that works beside the others."""

    COMPUTE = "compute"
    """The user's forward and backward, and updates of states that live on the device."""
    H2D = "h2d"
    """Copies to the device, under the compute of earlier units."""
    D2H = "d2h"
    """Copies from the device, under the backward of later units."""
    CPU = "cpu"
    """Adding gradients and updating on the CPU, under backward and the next forward."""
    DISK = "disk"
    """File reads and writes, under everything else."""
    COMM = "comm"
    """Collectives between ranks; no op uses it on a single rank."""

    __hash__ = str.__hash__  # Enum's own is a function of Python, called for every op.


class Verb(str, Enum):
    """What an op does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    MOVE = "move"
    """Copy a value from one tier to the next."""
    ADD = "add"
    """Add the gradient of a micro-batch to the gradient kept."""
    SQUARE = "square"
    """The sum of squares of one chunk of the gradient."""
    NORM = "norm"
    """The clip factor from all sums of squares."""
    UPDATE = "update"
    """The optimizer's step on one chunk."""


WHOLE = -1
"""The chunk of a value that stands for all of it."""

EVERY = -1
"""The unit of a value that is made of all units."""

IN_RING = -1
"""Index of a staging slot that a chunk has yet to get, see [Note: Chunks]."""


class Value(NamedTuple):
    """A value, or one chunk of it."""

    kind: Kind
    unit: int
    chunk: int = WHOLE


class Use(NamedTuple):
    """A place and the value that an op reads from it or writes to it."""

    place: Place
    value: Value


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work on a lane."""

    lane: Lane
    verb: Verb
    value: Value
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    bytes: int
    """What the lane counts: bytes moved, or operands read and written on cpu and compute."""
    deadline: int
    """Position, in its pass, of the compute op that needs it; smaller is more urgent."""
    waits: tuple[int, ...] = ()
    """Indices in the phase of the ops that must be done before it starts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The ops of one stretch of training, in order of issue."""

    name: str
    ops: tuple[Op, ...]
    entry: Mapping[Place, int]
    """Unit that each weight slot must hold when the phase begins; slots not named may hold
    anything."""
    exit: Mapping[Place, int]
    """Unit that each weight slot holds when the phase has ended."""


@dataclass(frozen=True, slots=True)
class Program:
    """The phases of a model under a plan."""

    plan: Plan
    phases: Mapping[str, Phase]
    """`forward`, `backward_first`, `backward_next`, `norm` (empty without clipping), `update`."""

    @property
    def step(self) -> tuple[Phase, ...]:
        """One step with one micro-batch."""
        return tuple(self.phases[name] for name in ("forward", "backward_first", "norm", "update"))


def cells(plan: Plan, uses: Iterable[Use]) -> Iterator[object]:
    """The smallest things that two uses can share: a slot, or one chunk of a value at home."""
    for use in uses:
        place, value = use
        if place.number == IN_RING:
            yield use
        elif place.use != "home":
            yield place
        elif value.chunk != WHOLE:
            yield value
        else:
            yield value
            for chunk in range(len(plan.profile.units[value.unit].chunks)):
                yield Value(value.kind, value.unit, chunk)


_LANE_OF_MOVE: dict[tuple[Tier, Tier], Lane] = {
    ("nvme", "cpu"): Lane.DISK,
    ("cpu", "nvme"): Lane.DISK,
    ("cpu", "device"): Lane.H2D,
    ("device", "cpu"): Lane.D2H,
}


def move(value: Value, size: int, stops: Sequence[Place], deadline: int) -> list[Op]:
    """The ops that carry `value` from the first of `stops` to the last, a lane each."""
    return [
        Op(
            lane=_LANE_OF_MOVE[start.tier, stop.tier],
            verb=Verb.MOVE,
            value=value,
            reads=(Use(start, value),),
            writes=(Use(stop, value),),
            bytes=size,
            deadline=deadline,
        )
        for start, stop in pairwise(stops)
    ]


def weight_in_use(plan: Plan, unit: int) -> Place:
    """Where the weights of a unit are while it computes: its slot, or its home on the device."""
    return plan.weight_slot[unit] or plan.home("weight", unit)


def fetch(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Bring a unit's weights from home into its device slot; nothing for a device home."""
    slot, home = plan.weight_slot[unit], plan.home("weight", unit)
    if slot is None:
        return []
    stops = [Place(tier, "weight", unit % STAGES) for tier in route(home.tier, "device")[1:-1]]
    value, size = Value("weight", unit), plan.bytes_of("weight", unit)
    return move(value, size, [home, *stops, slot], deadline)


def compute(plan: Plan, unit: int, verb: Verb, deadline: int) -> Op:
    """The user's own forward or backward of a unit."""
    one, backward = plan.profile.units[unit], verb is Verb.BACKWARD
    value, gradient = Value("weight", unit), Value("gradient", unit)
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    if one.weight_bytes and (one.backward or not backward):
        reads = (Use(weight_in_use(plan, unit), value),)
    if backward and one.trainable:
        place = plan.gradient_slot[unit] or plan.home("gradient", unit)
        writes = (Use(place, gradient),)
    return Op(Lane.COMPUTE, verb, value, reads, writes, 0, deadline)


def carry_out(plan: Plan, unit: int, deadline: int, *, first: bool) -> list[Op]:
    """Take a unit's gradient from its device slot home: put it there, or add it to what is."""
    slot, home = plan.gradient_slot[unit], plan.home("gradient", unit)
    if slot is None:
        return []
    value, size = Value("gradient", unit), plan.bytes_of("gradient", unit)
    stage = Place("cpu", "gradient", unit % STAGES)
    if first:
        stops = [slot, home] if home.tier == "cpu" else [slot, stage, home]
        return move(value, size, stops, deadline)
    deposit = home if home.tier == "cpu" else Place("cpu", "deposit", unit % STAGES)
    ops = move(value, size, [slot, stage], deadline)
    if home.tier == "nvme":
        ops += move(value, size, [home, deposit], deadline)
    kept = Use(deposit, value)
    ops.append(
        Op(Lane.CPU, Verb.ADD, value, (Use(stage, value), kept), (kept,), 3 * size, deadline)
    )
    if home.tier == "nvme":
        ops += move(value, size, [deposit, home], deadline)
    return ops


FACTOR = Use(Place("cpu", "factor"), Value("gradient", EVERY))
"""The clip factor, made of all gradients: written by `norm`, read by every update."""


def staged(ops: Iterable[Op]) -> bool:
    """Whether the ops of a chunk pass through staging slots."""
    return any(use.place.number == IN_RING for op in ops for use in (*op.reads, *op.writes))


def by_chunk(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """The ops of a phase in their order: those of a chunk together, any other alone."""
    for (_, chunk), group in groupby(ops, lambda op: (op.value.unit, op.value.chunk)):
        if chunk == WHOLE:
            yield from ([op] for op in group)
        else:
            yield list(group)


def square(plan: Plan, unit: int, chunk: int, ordinal: int) -> list[Op]:
    """Sum the squares of a chunk of the gradient where its home is; from nvme through a slot."""
    piece = plan.profile.units[unit].chunks[chunk]
    value, home = Value("gradient", unit, chunk), plan.home("gradient", unit)
    ops, place = [], home
    if home.tier == "nvme":
        place = Place("cpu", "gradient_chunk", IN_RING)
        ops = move(value, piece.gradient_bytes, [home, place], -1)
    partial = Use(Place("cpu", "partial", ordinal), value)
    lane = Lane.COMPUTE if home.tier == "device" else Lane.CPU
    reads = (Use(place, value),)
    ops.append(Op(lane, Verb.SQUARE, value, reads, (partial,), piece.gradient_bytes, -1))
    return ops


def norm(partials: Sequence[Use]) -> Op:
    """Combine all sums of squares, in order, into the clip factor."""
    return Op(Lane.CPU, Verb.NORM, FACTOR.value, tuple(partials), (FACTOR,), 0, -1)


def update(plan: Plan, unit: int, chunk: int, deadline: int) -> list[Op]:
    """Bring gradient, weight and record of a chunk to its site, update, take two of them home."""
    piece = plan.profile.units[unit].chunks[chunk]
    sizes = {
        "weight": piece.weight_bytes,
        "gradient": piece.gradient_bytes,
        "state": plan.record_bytes(unit, chunk),
    }
    at = site(plan.placements[unit])
    before: list[Op] = []
    after: list[Op] = []
    uses: dict[str, Use] = {}
    kinds: tuple[Kind, ...] = ("gradient", "weight", "state")
    for kind in kinds:
        value, home = Value(kind, unit, chunk), plan.home(kind, unit)
        stops = [home] + [
            Place(tier, f"{kind}_chunk", IN_RING) for tier in route(home.tier, at)[1:]
        ]
        before += move(value, sizes[kind], stops, deadline)
        if kind != "gradient":
            # The next forward needs the weight; nobody needs the state before the next update.
            needed = deadline if kind == "weight" else len(plan.profile.forward)
            after += move(value, sizes[kind], stops[::-1], needed)
        uses[kind] = Use(stops[-1], value)
    op = Op(
        lane=Lane.COMPUTE if at == "device" else Lane.CPU,
        verb=Verb.UPDATE,
        value=Value("state", unit, chunk),
        reads=(*uses.values(), FACTOR) if plan.clips else tuple(uses.values()),
        writes=(uses["weight"], uses["state"]),
        bytes=sizes["gradient"] + 2 * (sizes["weight"] + sizes["state"]),
        deadline=deadline,
    )
    return [*before, op, *after]


def compile_program(plan: Plan) -> Program:
    """The phases of a model under `plan`, every wait in place."""
    collecting = gc.isenabled()
    gc.disable()  # Ops by the hundred thousand and no garbage: looking for it takes half the time.
    try:
        return _compile(plan)
    finally:
        if collecting:
            gc.enable()


def _compile(plan: Plan) -> Program:
    profile = plan.profile
    forward = compute_phase(plan, "forward", profile.forward, {})
    backward = [
        compute_phase(plan, name, profile.backward, dict(forward.exit))
        for name in ("backward_first", "backward_next")
    ]
    phases = [forward, *backward, _norm_phase(plan), _update_phase(plan)]
    return Program(plan, {phase.name: phase for phase in phases})


def compute_phase(plan: Plan, name: str, order: Sequence[int], held: dict[Place, int]) -> Phase:
    """Forward or backward in `order`, starting with `held` in the slots, which it changes."""
    verb = Verb.FORWARD if name == "forward" else Verb.BACKWARD
    entry: dict[Place, int] = {}
    ops: list[Op] = []
    touched: set[Place] = set()
    units = plan.profile.units
    steps = list(order)
    if verb is Verb.BACKWARD:
        steps += [u for u in range(len(units)) if units[u].trainable and u not in set(order)]
    for position, unit in enumerate(steps):
        slot = plan.weight_slot[unit]
        needed = verb is Verb.FORWARD or units[unit].backward
        if slot is not None and needed:
            if held.get(slot) != unit:
                ops += fetch(plan, unit, position)
            elif slot not in touched:
                entry[slot] = unit
            held[slot] = unit
            touched.add(slot)
        ops.append(compute(plan, unit, verb, position))
        if verb is Verb.BACKWARD and units[unit].trainable:
            first = name == "backward_first" and unit not in steps[:position]
            ops += carry_out(plan, unit, position + 1, first=first)
    return Phase(name, ordered(plan, ops), entry, dict(held))


def _norm_phase(plan: Plan) -> Phase:
    ops: list[Op] = []
    if plan.clips:
        for ordinal, (unit, chunk, _) in enumerate(update_order(plan)):
            ops += square(plan, unit, chunk, ordinal)
        ops.append(norm([op.writes[0] for op in ops if op.verb is Verb.SQUARE]))
    return Phase("norm", ordered(plan, ops), {}, {})


def _update_phase(plan: Plan) -> Phase:
    ops: list[Op] = []
    for unit, chunk, deadline in update_order(plan):
        ops += update(plan, unit, chunk, deadline)
    return Phase("update", ordered(plan, ops), {}, {})


def update_order(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(unit, chunk, deadline) of every chunk, in the order in which the next forward needs them."""
    profile = plan.profile
    first: dict[int, int] = {}
    for position, unit in enumerate(profile.forward):
        first.setdefault(unit, position)
    late = len(profile.forward)
    for unit in sorted(range(len(profile.units)), key=lambda u: (first.get(u, late), u)):
        for chunk in range(len(profile.units[unit].chunks)):
            yield unit, chunk, first.get(unit, late)


def ordered(plan: Plan, ops: Sequence[Op]) -> tuple[Op, ...]:
    """`ops`, which are new, with the waits of a phase of them in that order."""
    board: Scoreboard[int] = Scoreboard()
    for index, op in enumerate(ops):
        reads, writes = tuple(cells(plan, op.reads)), tuple(cells(plan, op.writes))
        waits = tuple(sorted(board.waits(reads, writes)))
        board.note(index, reads, writes)
        # Nobody has seen the op yet, and a copy of each takes a third of the compilation.
        object.__setattr__(op, "waits", waits)
    return tuple(ops)
