"""What each op of a step is, under a plan: what it reads, writes and moves, and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from offload.config import Tier
from offload.layout import STAGES, Place, Plan, route, site
from offload.program import FACTOR, IN_RING, Lane, Op, Use, Value, Verb
from offload.records import Kind

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
