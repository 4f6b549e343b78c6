"""Check phases before they run, or name the op that breaks a rule. Pure.

[Note: What is checked]
Before its first run every op is checked to find its values at home, or in slots that hold them
(`check_op`). A pass, in whatever order of units, is checked as a whole, too (`verify_pass`): in the
order of issue every compute finds the weights of its unit. All orders in which lanes can run the
ops give the result of that one, by the rule of `Scoreboard`.

That all phases of a step together cannot go wrong, whatever the plan, is proved by the tests: homes
and slots are disjoint and within their budgets, every legal pair of phases may follow each other,
an update uses the sum of all gradients, none is overwritten before it is home, and an op reaches,
through waits, every earlier one that it would race with.

Waits cannot form a cycle: the user computes in order, and every op is issued after those that it
waits for. A chunk of a stream takes one staging slot, waits for nothing else, and gives it back.
"""

from __future__ import annotations

from offload.planning.layout import Place, Plan
from offload.program.ops import FACTOR, Op, Phase, Use, Value

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
    """Raise ProgramError for the first rule that a pass breaks, see [Note: What is checked]."""
    slots = {slot: Value("weight", unit) for slot, unit in phase.entry.items()}
    for index, op in enumerate(phase.ops):
        check_op(plan, op)
        for place, value in op.reads:
            if place.use != "home" and (there := slots.get(place)) != value:
                rule = misread(plan, place, value, there)
                raise ProgramError(rule, phase.name, index, op_text(plan, op))
        slots |= {place: value for place, value in op.writes if place.use != "home"}


def check_op(plan: Plan, op: Op) -> None:
    """Raise ProgramError for a value that is not where an op has it."""
    for use in (*op.reads, *op.writes):
        if rule := misfit(plan, use):
            raise ProgramError(f"{op_text(plan, op)}: {rule}", "an op")


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


def misread(plan: Plan, place: Place, value: Value, there: Value | None) -> str:
    """That an op reads a value in a slot, where there is another."""
    has = "nothing" if there is None else value_text(plan, there)
    return f"reads {value_text(plan, value)} in {place_text(place)}, which has {has}"


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
