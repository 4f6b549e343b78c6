"""Compile a plan into phases of ops: what each reads, writes and moves. Pure.

[Note: As it runs]
`Program` has every phase once, as a plain step runs it. The engine makes its phases with the same
functions and starts them as they come: a pass by its order of use and by what its slots hold, a
gradient when autograd has made it, an update when its gradient is whole. By the rule of
`Scoreboard` they wait for one another as those of the program do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from offload.planning.layout import STAGES, Place, Plan, route, site
from offload.planning.profile import Kind
from offload.planning.tiers import Tier
from offload.program.ops import (
    FACTOR,
    LANE_OF_MOVE,
    Lane,
    Op,
    Phase,
    Program,
    Use,
    Value,
    Verb,
    part_of,
)


def compile_program(plan: Plan) -> Program:
    """The phases of a model under `plan`."""
    profile = plan.profile
    forward = compute_phase(plan, "forward", profile.forward, {})
    backward = [
        compute_phase(plan, name, profile.backward, forward.exit)
        for name in ("backward_first", "backward_next")
    ]
    squares = [square(plan, unit) for unit, _ in update_order(plan)] if plan.clips else []
    normed = [*squares, norm([op.writes[0] for op in squares])] if plan.clips else []
    updates = [update(plan, unit, deadline) for unit, deadline in update_order(plan)]
    late = [Phase(n, tuple(ops), {}, {}) for n, ops in (("norm", normed), ("update", updates))]
    return Program(plan, {phase.name: phase for phase in (forward, *backward, *late)})


def compute_phase(plan: Plan, name: str, order: Sequence[int], entry: Mapping[Place, int]) -> Phase:
    """Forward or backward of the units in `order`; `entry` is the unit in each slot before it."""
    verb = Verb.FORWARD if name == "forward" else Verb.BACKWARD
    ops: list[Op] = []
    came: set[int] = set()
    units, in_slots = plan.profile.units, dict(entry)
    steps = list(order)
    if verb is Verb.BACKWARD:
        used = set(order)
        steps += [u for u in range(len(units)) if units[u].trainable and u not in used]
    for position, unit in enumerate(steps):
        if verb is Verb.FORWARD or units[unit].backward:
            ops += fetch_missing(plan, unit, position, in_slots)
        ops.append(use(plan, unit, verb, position))
        if verb is Verb.BACKWARD and units[unit].trainable:
            alone = name == "backward_first" or plan.profile.sharding.late
            first = alone and unit not in came
            came.add(unit)
            ops += collect(plan, unit, position + 1)
            if plan.full_gradient[unit] is not None:
                ops += [] if first else bring_sum(plan, unit, position + 1)
                ops += [*exchange(plan, unit, position + 1), *fold(plan, unit, position + 1)]
                first = True
            ops += (offload_gradient if first else add_gradient)(plan, unit, position + 2)
    return Phase(name, tuple(ops), entry, in_slots)


def pass_phase(
    plan: Plan, verb: Verb, order: Sequence[int], start: int, entry: Mapping[Place, int]
) -> tuple[Phase, list[int]]:
    """The fetches and computes of the units in `order`, the first at position `start` of its pass;
    and how many ops there are up to the compute of each. `entry` as of `compute_phase`.

    A unit whose backward needs no weights comes in one only to be recomputed.
    """
    in_slots, ops, ends = dict(entry), list[Op](), list[int]()
    for position, unit in enumerate(order, start):
        ops += fetch_missing(plan, unit, position, in_slots)
        needs = plan.profile.units[unit].backward
        ops.append(use(plan, unit, verb if needs else Verb.FORWARD, position))
        ends.append(len(ops))
    return Phase("pass", tuple(ops), entry, in_slots), ends


def fetch_missing(plan: Plan, unit: int, position: int, in_slots: dict[Place, int]) -> list[Op]:
    """Fetch a unit that its slot does not hold, and note in `in_slots` that it does then."""
    found = list[Op]()
    for slot, bring in ((plan.full_weight[unit], gather), (plan.weight_slot[unit], fetch)):
        if slot is None:
            continue
        if in_slots.get(slot) == unit:
            break
        in_slots[slot] = unit
        found[:0] = bring(plan, unit, position)
    return found


def update_order(plan: Plan) -> Iterator[tuple[int, int]]:
    """(unit, deadline) of all that is updated, in the order in which the next forward needs it."""
    profile, first = plan.profile, dict[int, int]()
    for position, unit in enumerate(profile.forward):
        first.setdefault(unit, position)
    late = len(profile.forward)
    for unit in sorted(range(len(profile.units)), key=lambda u: (first.get(u, late), u)):
        if profile.units[unit].trainable:
            yield unit, first.get(unit, late)


def move(value: Value, size: int, stops: Sequence[Place], deadline: int) -> list[Op]:
    """Move the `size` bytes of `value` from the first of `stops` to the last, an op per step."""
    hops = (
        (LANE_OF_MOVE[a.tier, b.tier], Use(a, value), Use(b, value)) for a, b in pairwise(stops)
    )
    return [Op(lane, Verb.MOVE, value, (a,), (b,), size, deadline) for lane, a, b in hops]


def weight_in_use(plan: Plan, unit: int) -> Place:
    """Where the weights of a unit are while it computes: its slot, or their home."""
    return plan.slot_in_use(unit) or plan.home("weight", unit)


def sent_bytes(plan: Plan, kind: Kind, unit: int) -> int:
    """What a rank sends of a unit to all others in one collective."""
    return plan.bytes_of(kind, unit) * (plan.profile.sharding.ranks - 1)


def gather(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Gather a unit's weights from what each rank has of them on its device."""
    here, full = plan.weight_slot[unit] or plan.home("weight", unit), plan.full_weight[unit]
    assert full is not None, "one rank has all of them"
    value, size = Value("weight", unit), sent_bytes(plan, "weight", unit)
    uses = (Use(here, value),), (Use(full, value),)
    return [Op(Lane.COMM, Verb.GATHER, value, *uses, size, deadline)]


def fetch(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Move a unit's weights from home to its device slot."""
    slot, home = plan.weight_slot[unit], plan.home("weight", unit)
    assert slot is not None, "they are used at home"
    stops = [Place(tier, "weight", unit % STAGES) for tier in route(home.tier, "device")[1:-1]]
    value, size = Value("weight", unit), plan.bytes_of("weight", unit)
    return move(value, size, [home, *stops, slot], deadline)


def use(plan: Plan, unit: int, verb: Verb, deadline: int) -> Op:
    """The user's own forward or backward with the weights of a unit, if it needs them."""
    one, value = plan.profile.units[unit], Value("weight", unit)
    needed = one.weight_bytes and (one.backward or verb is Verb.FORWARD)
    reads = (Use(weight_in_use(plan, unit), value),) if needed else ()
    return Op(Lane.COMPUTE, verb, value, reads, (), 0, deadline)


def collected(plan: Plan, unit: int) -> Use:
    """Where the gradient of a unit is collected."""
    return Use(plan.full_gradient[unit] or arrival(plan, unit), Value("gradient", unit))


def arrival(plan: Plan, unit: int) -> Place:
    """Where the gradient of a unit, as far as this rank owns it, is first on its way home."""
    return plan.gradient_slot[unit] or plan.home("gradient", unit)


def exchange(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Exchange the gradient of a unit with the other ranks; where it was collected it is lost."""
    there, value = collected(plan, unit), Value("gradient", unit)
    came = Use(Place("device", "exchange"), value)
    size = sent_bytes(plan, "gradient", unit)
    return [Op(Lane.COMM, Verb.EXCHANGE, value, (there,), (came,), size, deadline)]


def bring_sum(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Move the sum of a unit from home to where what comes in exchange is added to it."""
    slot, home = plan.gradient_slot[unit], plan.home("gradient", unit)
    if slot is None:
        return []
    stops = [Place(tier, "deposit", unit % STAGES) for tier in route(home.tier, "device")[1:-1]]
    size = plan.bytes_of("gradient", unit)
    return move(Value("gradient", unit), size, [home, *stops, slot], deadline)


def fold(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Add up what came in exchange, to the sum that is there, if any."""
    value, came = Value("gradient", unit), Place("device", "exchange")
    uses = (Use(came, value),), (Use(arrival(plan, unit), value),)
    size = plan.size_at(came, "gradient", unit)
    return [Op(Lane.COMPUTE, Verb.FOLD, value, *uses, size, deadline)]


def collect(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """The user's backward puts the gradient of a unit where it is collected."""
    there = collected(plan, unit)
    return [Op(Lane.COMPUTE, Verb.COLLECT, there.value, (), (there,), 0, deadline)]


def offload_gradient(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Move the first gradient of a unit from its device slot home."""
    slot, home = plan.gradient_slot[unit], plan.home("gradient", unit)
    if slot is None:
        return []
    stops = [slot, passing(plan, unit, again=False).place]
    if home.tier == "nvme":
        stops.append(home)
    return move(Value("gradient", unit), plan.bytes_of("gradient", unit), stops, deadline)


def add_gradient(plan: Plan, unit: int, deadline: int) -> list[Op]:
    """Add another gradient of a unit, in its device slot, to the one at home."""
    slot, home = plan.gradient_slot[unit], plan.home("gradient", unit)
    if slot is None:
        return []
    value, size = Value("gradient", unit), plan.bytes_of("gradient", unit)
    stage, deposit = Place("cpu", "gradient", unit % STAGES), passing(plan, unit, again=True).place
    before, after = move(value, size, [slot, stage], deadline), list[Op]()
    if home.tier == "nvme":
        before += move(value, size, [home, deposit], deadline)
        after = move(value, size, [deposit, home], deadline)
    reads = Use(stage, value), Use(deposit, value)
    return [*before, Op(Lane.CPU, Verb.ADD, value, reads, reads[1:], 3 * size, deadline), *after]


def passing(plan: Plan, unit: int, *, again: bool) -> Use:
    """Where a gradient lies in memory as it goes home: there, or where it is written to nvme from.
    It is `again` where it is added to what is there."""
    place = plan.home("gradient", unit)
    if place.tier == "nvme":
        added = again and plan.full_gradient[unit] is None
        place = Place("cpu", "deposit" if added else "gradient", unit % STAGES)
    return Use(place, Value("gradient", unit))


def square(plan: Plan, unit: int, at: Use | None = None) -> Op:
    """Sum the squares of a gradient, at home or where it is `passing`."""
    value = Value("gradient", unit)
    at = at or Use(plan.home("gradient", unit), value)
    partial = Use(Place("cpu", "partial", unit), value)
    lane = Lane.COMPUTE if at.place.tier == "device" else Lane.CPU
    size = plan.bytes_of("gradient", unit)
    return Op(lane, Verb.SQUARE, value, (at,), (partial,), size, -1)


def before_last(plan: Plan, phase: Phase) -> Sequence[Op]:
    """A pass before the last backward of a step, up to which gradients may stay where they are
    collected."""
    if not plan.profile.sharding.late:
        return phase.ops
    return [op for op in phase.ops if op.value.kind == "weight" or op.verb is Verb.COLLECT]


def with_squares(plan: Plan, ops: Sequence[Op], *, again: bool) -> list[Op]:
    """The last backward of a step: where it clips, the squares of each gradient are summed as it
    goes home."""
    comes, squares = {use: index for index, op in enumerate(ops) for use in op.writes}, {}
    for unit, _ in update_order(plan) if plan.clips else ():
        at = passing(plan, unit, again=again)
        squares[comes[at]] = square(plan, unit, at)
    return [one for index, op in enumerate(ops) for one in (op, squares.get(index)) if one]


def norm(partials: Sequence[Use]) -> Op:
    """Combine all sums of squares, in order, into the clip factor."""
    return Op(Lane.CPU, Verb.NORM, FACTOR.value, tuple(partials), (FACTOR,), 0, -1)


def update(plan: Plan, unit: int, deadline: int) -> Op:
    """Take the optimizer's step on a unit."""
    gradient, weight, state = (
        Use(plan.home(kind, unit), Value(kind, unit)) for kind in ("gradient", "weight", "state")
    )
    lane = Lane.COMPUTE if site(plan.placements[unit]) == "device" else Lane.CPU
    reads = (gradient, weight, state, *[FACTOR] * plan.clips)
    size = sum(plan.bytes_of(use.value.kind, unit) for use in (*reads[:3], weight, state))
    return Op(lane, Verb.UPDATE, state.value, reads, (weight, state), size, deadline)


STREAMED = Verb.SQUARE, Verb.UPDATE
"""What is done chunk by chunk where values are away, or the CPU does it beside a device."""


def parts_of(plan: Plan, op: Op) -> tuple[list[Op], list[Op]]:
    """What an op moves inside, before its work and after it: see [Note: Streams] of `ops`."""
    at: Tier = "device" if op.lane is Lane.COMPUTE else "cpu"
    found = list[list[Op]]()
    for uses, way in ((op.reads, 1), (op.writes, -1)):
        sizes = Counter[tuple[Tier, Tier]]()
        for place, (kind, unit, _) in uses if op.verb in STREAMED else ():
            if place.use == "home":
                for start, stop in pairwise(route(place.tier, at)[::way]):
                    sizes[start, stop] += plan.bytes_of(kind, unit)
        found.append([part_of(op, size, hop) for hop, size in sizes.items()])
    return found[0], found[1]
