"""Check phases before they run, or name the op that breaks a rule. Pure.

[Note: What is checked]
Before its first run each op is checked by itself (`check_op`): it is on the lane of its work,
counts the bytes of its value, and fits it into its slot. A pass, in whatever order of units, is
checked as a whole (`verify_pass`): in the order of issue every compute finds the weights of its
unit. All orders in which lanes can run the ops give the result of that one, by the rule of
`Scoreboard`.

That all phases of a step together cannot go wrong, whatever the plan, is proved by the tests: homes
and slots are disjoint and within their budgets, every legal pair of phases may follow each other,
an update uses the sum of all gradients, none is overwritten before it is home, and an op reaches,
through waits, every earlier one that it would race with.

Waits cannot form a cycle: the user computes in order, and every op is issued after those that it
waits for. A chunk of a stream takes one staging slot, waits for nothing else, and gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from offload.planning.layout import Place, Plan, site
from offload.planning.profile import KINDS, Kind
from offload.planning.tiers import Tier
from offload.program.compile import sent_bytes
from offload.program.ops import (
    ALL_UNITS,
    FACTOR,
    LANE_OF_MOVE,
    Lane,
    Op,
    Phase,
    Use,
    Value,
    Verb,
)

_NUMBERS = ("factor", "partial")
"""Uses of places that hold one number outside of all buffers: clip factor, sum of squares."""


class ProgramError(ValueError):
    """A program breaks `rule`, in op `index` of `phase`, which is "plan" for rules of the plan."""

    def __init__(self, rule: str, phase: str = "plan", index: int | None = None, op: str = ""):
        self.rule, self.phase, self.index = rule, phase, index
        super().__init__(
            f"{phase}: {rule}" if index is None else f"{phase}: op {index} ({op}) {rule}"
        )


def verify_pass(plan: Plan, phase: Phase) -> None:
    """Check a pass in any order before its first run, see [Note: What is checked].

    Raises:
        ProgramError: the first broken rule.
    """
    for op in phase.ops:
        check_op(plan, op)
    Walk(plan, phase.entry).run(phase)


def check_op(plan: Plan, op: Op) -> None:
    """Check an op by itself, before its first run.

    Raises:
        ProgramError: the rule that it breaks.
    """
    if rule := broken_by(plan, op):
        raise ProgramError(f"{op_text(plan, op)} {rule}", "an op")


def broken_by(plan: Plan, op: Op) -> str:
    """The rule that an op breaks by itself; empty if none."""
    if (op.value.unit == ALL_UNITS) != (op.verb is Verb.NORM):
        return "is of all units, or its verb is: norm, and nothing else, is of all"
    expected, uses = _expected(plan, op), (*op.reads, *op.writes)
    if [use.value for use in uses] != expected.values or len(op.reads) != expected.reads:
        names = ", ".join(value_text(plan, value) for value in expected.values) or "nothing"
        return f"has to read {expected.reads} and write the others of: {names}"
    if op.verb in (Verb.SQUARE, Verb.UPDATE):
        at = ("home", *_NUMBERS, *(("gradient", "deposit") if op.verb is Verb.SQUARE else ()))
        if away := next((use for use in uses if use.place.use not in at), None):
            return f"works at homes, and not in {place_text(away.place)}"
    elif any(use.place.tier not in expected.tiers for use in uses if use.place.use not in _NUMBERS):
        return f"works on the {' and '.join(expected.tiers)}, and has to have all it needs there"
    if op.verb in (Verb.ADD, Verb.UPDATE) and not set(op.writes) <= set(op.reads):
        return "has to work in place"
    if rule := next(filter(None, (misfit(plan, use) for use in uses)), ""):
        return rule
    if op.lane is not expected.lane:
        return f"is on the {op.lane.value} lane, not on that of its places: {expected.lane}"
    wrong = op.bytes != expected.bytes
    return f"counts {op.bytes} bytes, which are {expected.bytes}" if wrong else ""


class _Expected(NamedTuple):
    """What an op with its verb and value has to be."""

    lane: Lane | None
    tiers: tuple[Tier, ...]
    reads: int
    """How many of `values` it reads, the first ones; it writes the others."""
    values: list[Value]
    bytes: int = 0


def _expected(plan: Plan, op: Op) -> _Expected:
    value = op.value
    if op.verb is Verb.NORM:
        return _Expected(Lane.CPU, (), len(op.reads), [*(u.value for u in op.reads), FACTOR.value])
    unit = plan.profile.units[value.unit]
    if op.verb is Verb.MOVE:
        tiers = tuple(use.place.tier for use in (*op.reads, *op.writes))[:2]
        lane = LANE_OF_MOVE.get((tiers[0], tiers[-1]))
        return _Expected(lane, tiers, 1, [value] * 2, _size(plan, value))
    weight, gradient, state = (Value(kind, value.unit) for kind in KINDS)
    if op.verb in (Verb.FORWARD, Verb.BACKWARD):
        read = [weight] if unit.weight_bytes and (unit.backward or op.verb is Verb.FORWARD) else []
        return _Expected(Lane.COMPUTE, ("device",), len(read), read)
    if op.verb is Verb.COLLECT:
        return _Expected(Lane.COMPUTE, reach(plan, "gradient"), 0, [gradient])
    if op.verb is Verb.GATHER:
        return _Expected(Lane.COMM, ("device",), 1, [weight] * 2, sent_bytes(plan, *value[:2]))
    if op.verb is Verb.EXCHANGE:
        return _Expected(Lane.COMM, ("device",), 1, [gradient] * 2, sent_bytes(plan, *value[:2]))
    if op.verb is Verb.FOLD:
        size = plan.size_at(op.reads[0].place, "gradient", value.unit)
        return _Expected(Lane.COMPUTE, reach(plan, "gradient"), 1, [gradient] * 2, size)
    if op.verb is Verb.ADD:
        return _Expected(Lane.CPU, ("cpu",), 2, [gradient] * 3, 3 * _size(plan, gradient))
    if op.verb is Verb.SQUARE:
        tier = plan.home("gradient", value.unit).tier
        values, reads, size = [gradient] * 2, 1, _size(plan, gradient)
    else:
        tier = site(plan.placements[value.unit])
        needs = [gradient, weight, state] + [FACTOR.value] * plan.clips
        values, reads = [*needs, weight, state], len(needs)
        size = _size(plan, gradient) + 2 * (_size(plan, weight) + _size(plan, state))
    return _Expected(Lane.COMPUTE if tier == "device" else Lane.CPU, (), reads, values, size)


def reach(plan: Plan, kind: Kind) -> tuple[Tier, ...]:
    """The tiers in which the user's compute has values of a kind."""
    return ("device", "cpu") if plan.in_place and kind == "gradient" else ("device",)


def _size(plan: Plan, value: Value) -> int:
    return plan.bytes_of(value.kind, value.unit)


def misfit(plan: Plan, use: Use) -> str:
    """Why a value cannot be at a place; empty if it can."""
    place, value = use
    if place.use in _NUMBERS:
        return ""
    if place.use == "home":
        at = plan.home(value.kind, value.unit)
        if place == at:
            return ""
        return f"{value_text(plan, value)} lives on {at.tier}, not {place.tier}"
    if place not in plan.slots:
        return f"there is no slot {place_text(place)}"
    size, room = plan.size_at(place, value.kind, value.unit), plan.slots[place].bytes
    if size > room:
        text = value_text(plan, value)
        return f"{text} of {size} bytes is in {place_text(place)} of {room} bytes"
    return ""


class Walk:
    """Follows what slots hold, op by op along phases."""

    def __init__(self, plan: Plan, in_slots: Mapping[Place, int]):
        """`in_slots` tells whose weights slots hold at first."""
        self.plan = plan
        self._slots = {slot: Value("weight", unit) for slot, unit in in_slots.items()}

    def run(self, phase: Phase) -> None:
        """Walk the next phase."""
        self.phase = phase
        for self.index, self.op in enumerate(phase.ops):
            self.apply()

    def fail(self, rule: str) -> None:
        """Refuse the op of now."""
        raise ProgramError(rule, self.phase.name, self.index, op_text(self.plan, self.op))

    def apply(self) -> None:
        """The effect of the op on the contents of slots."""
        for place, value in self.op.reads:
            if place.use != "home" and (there := self._slots.get(place)) != value:
                self.misread(place, value, there)
        self._slots |= {place: value for place, value in self.op.writes if place.use != "home"}

    def misread(self, place: Place, value: Value, there: Value | None) -> None:
        """Refuse the op, which reads a value in a slot, where there is another."""
        has = "nothing" if there is None else value_text(self.plan, there)
        self.fail(f"reads {value_text(self.plan, value)} in {place_text(place)}, which has {has}")


def op_text(plan: Plan, op: Op) -> str:
    """An op, for a message."""
    return f"{op.verb.value} of {value_text(plan, op.value)} on {op.lane.value}"


def value_text(plan: Plan, value: Value) -> str:
    """A value, for a message."""
    if value == FACTOR.value:
        return "clip factor"
    return f"{value.kind} of {plan.profile.units[value.unit].name}"


def place_text(place: Place) -> str:
    """A place, for a message."""
    number = "" if place.use == "home" else f" {place.number}"
    return f"{place.tier} {place.use}{number}"
