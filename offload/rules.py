"""What a plan's buffers and an op by itself have to be. Pure; the first half of `verify`."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from offload.config import TIERS, Tier
from offload.layout import CHUNK_STAGES, Buffer, Place, Plan, site
from offload.program import EVERY, FACTOR, IN_RING, WHOLE, Lane, Op, Use, Value, Verb, staged
from offload.records import BLOCK_BYTES, KINDS

_NUMBERS = ("factor", "partial")
"""Uses of places that hold one number, in no buffer: the clip factor, a sum of squares."""


class ProgramError(ValueError):
    """A program breaks a rule: where, and which. `phase` is `plan` for what is in no phase."""

    def __init__(self, rule: str, phase: str = "plan", index: int | None = None, op: str = ""):
        self.rule, self.phase, self.index = rule, phase, index
        super().__init__(
            f"{phase}: {rule}" if index is None else f"{phase}: op {index} ({op}) {rule}"
        )


def op_text(plan: Plan, op: Op) -> str:
    """An op in a message."""
    return f"{op.verb.value} of {value_text(plan, op.value)} on {op.lane.value}"


def value_text(plan: Plan, value: Value) -> str:
    """A value in a message."""
    if value == FACTOR.value:
        return "clip factor"
    chunk = "" if value.chunk == WHOLE else f" chunk {value.chunk}"
    return f"{value.kind} of {plan.profile.units[value.unit].name}{chunk}"


def place_text(cell: object) -> str:
    """A place in a message, by itself or as the use of a staging slot."""
    place = cell.place if isinstance(cell, Use) else cell
    assert isinstance(place, Place)
    unnumbered = place.use == "home" or place.number == IN_RING
    return f"{place.tier} {place.use}" + ("" if unnumbered else f" {place.number}")


def check_buffers(plan: Plan) -> None:
    """Homes are there and large enough; buffers are aligned, disjoint and inside the budgets."""
    held: list[tuple[Buffer, str]] = [(b, place_text(place)) for place, b in plan.slots.items()]
    in_file: dict[tuple[str, str], int] = {(e.kind, e.unit): e.bytes for e in plan.file.extents}
    for kind in KINDS:
        for u, unit in enumerate(plan.profile.units):
            size, tier = plan.bytes_of(kind, u), plan.home(kind, u).tier
            name, home = f"{kind} of {unit.name}", plan.homes.get((kind, u))
            if home is not None:
                held.append((home, f"home of {name}"))
            found = home.bytes if home is not None and home.tier == tier else 0
            found = in_file.get((kind, unit.name), 0) if tier == "nvme" else found
            if found < size:
                raise ProgramError(f"{name} of {size} bytes has {found} bytes at home on {tier}")
    held.sort(key=lambda entry: (entry[0].tier, entry[0].offset))
    for buffer, name in held:
        if buffer.offset % BLOCK_BYTES or buffer.bytes % BLOCK_BYTES or buffer.offset < 0:
            raise ProgramError(f"{name} is not aligned to blocks of {BLOCK_BYTES} bytes")
    for (one, name), (two, other) in pairwise(held):
        if one.tier == two.tier and one.offset + one.bytes > two.offset:
            raise ProgramError(f"{name} and {other} overlap on {one.tier}")
    for tier in TIERS:
        taken, given = plan.taken_bytes(tier), plan.budgets[tier]
        if taken > given:
            raise ProgramError(f"{tier} takes {taken} bytes, over its budget of {given} bytes")


def check_slots(plan: Plan) -> None:
    """A unit has slots exactly for what lives elsewhere; a lasting unit shares them with nobody."""
    for kind, slots in zip(KINDS, (plan.weight_slot, plan.gradient_slot)):
        sharing = Counter(slots)
        for u, (unit, place) in enumerate(zip(plan.profile.units, slots)):
            away = plan.home(kind, u).tier != "device" and plan.bytes_of(kind, u) > 0
            if (place.tier if place else "") != ("device" if away else ""):
                raise ProgramError(
                    f"{kind} of {unit.name} needs a device slot: {away}; has {place}"
                )
            if place and (rule := _misfit(plan, Use(place, Value(kind, u)))):
                raise ProgramError(rule)
            if place and unit.lasting and sharing[place] > 1:
                raise ProgramError(f"{unit.name} is lasting but shares {place_text(place)}")


def _size(plan: Plan, value: Value) -> int:
    if value.chunk == WHOLE:
        return plan.bytes_of(value.kind, value.unit)
    chunk = plan.profile.units[value.unit].chunks[value.chunk]
    if value.kind == "state":
        return plan.record_bytes(value.unit, value.chunk)
    return chunk.weight_bytes if value.kind == "weight" else chunk.gradient_bytes


def _misfit(plan: Plan, use: Use) -> str:
    """Why a value cannot be at a place; empty when it can."""
    place, value = use
    if place.use in _NUMBERS:
        return ""
    if place.use == "home":
        at = plan.home(value.kind, value.unit)
        return (
            "" if place == at else f"{value_text(plan, value)} lives on {at.tier}, not {place.tier}"
        )
    ring = range(CHUNK_STAGES) if place.number == IN_RING else (place.number,)
    for slot in (place._replace(number=index) for index in ring):
        if slot not in plan.slots:
            return f"there is no slot {place_text(slot)}"
        size, room = _size(plan, value), plan.slots[slot].bytes
        if size > room:
            text = value_text(plan, value)
            return f"{text} of {size} bytes is in {place_text(slot)} of {room} bytes"
    return ""


def broken_by(plan: Plan, index: int, op: Op) -> str:
    """The rule that an op breaks by itself; empty when none."""
    if late := [wait for wait in op.waits if not 0 <= wait < index]:
        return f"waits for op {late[0]}, which is not an earlier op of its phase"
    if (op.value.unit == EVERY) != (op.verb is Verb.NORM):
        return "is of all units, or its verb is: norm, and nothing else, is of all"
    due, uses = _due(plan, op), (*op.reads, *op.writes)
    if staged([op]) and op.value.chunk == WHOLE:
        return "passes through slots that only chunks use"
    if [use.value for use in uses] != due.values or len(op.reads) != due.reads:
        names = ", ".join(value_text(plan, value) for value in due.values) or "nothing"
        return f"has to read {due.reads} and write the others of: {names}"
    if any(use.place.tier not in due.tiers for use in uses if use.place.use not in _NUMBERS):
        return f"works on the {' and '.join(due.tiers)}, and has to have all it needs there"
    if op.verb in (Verb.ADD, Verb.UPDATE) and not set(op.writes) <= set(op.reads):
        return "has to work in place"
    if rule := next(filter(None, (_misfit(plan, use) for use in uses)), ""):
        return rule
    if op.lane is not due.lane:
        return f"is on the {op.lane.value} lane, not on that of its places: {due.lane}"
    return "" if op.bytes == due.bytes else f"counts {op.bytes} bytes, which are {due.bytes}"


class _Due(NamedTuple):
    """What an op of its verb on its value has to be."""

    lane: Lane | None
    tiers: tuple[Tier, ...]
    reads: int
    """How many of `values` it reads; it writes the others."""
    values: list[Value]
    bytes: int = 0


_MOVES = {("cpu", "device"): Lane.H2D, ("device", "cpu"): Lane.D2H}
_MOVES |= {("nvme", "cpu"): Lane.DISK, ("cpu", "nvme"): Lane.DISK}


def _due(plan: Plan, op: Op) -> _Due:
    value = op.value
    if op.verb is Verb.NORM:
        return _Due(Lane.CPU, (), len(op.reads), [*(u.value for u in op.reads), FACTOR.value])
    unit = plan.profile.units[value.unit]
    if op.verb is Verb.MOVE:
        tiers = tuple(use.place.tier for use in (*op.reads, *op.writes))[:2]
        return _Due(_MOVES.get((tiers[0], tiers[-1])), tiers, 1, [value] * 2, _size(plan, value))
    weight, gradient, state = (Value(kind, value.unit, value.chunk) for kind in KINDS)
    if op.verb in (Verb.FORWARD, Verb.BACKWARD):
        backward = op.verb is Verb.BACKWARD
        read = [weight] if unit.weight_bytes and (unit.backward or not backward) else []
        made = [gradient] if backward and unit.trainable else []
        return _Due(Lane.COMPUTE, ("device",), len(read), read + made)
    if op.verb is Verb.ADD:
        return _Due(Lane.CPU, ("cpu",), 2, [gradient] * 3, 3 * _size(plan, gradient))
    if op.verb is Verb.SQUARE:
        tier: Tier = "device" if plan.home("gradient", value.unit).tier == "device" else "cpu"
        values, reads, size = [gradient] * 2, 1, _size(plan, gradient)
    else:
        tier = site(plan.placements[value.unit])
        needs = [gradient, weight, state] + [FACTOR.value] * plan.clips
        values, reads = [*needs, weight, state], len(needs)
        size = _size(plan, gradient) + 2 * (_size(plan, weight) + _size(plan, state))
    return _Due(Lane.COMPUTE if tier == "device" else Lane.CPU, (tier,), reads, values, size)
