"""Prove on the plain data that a program cannot go wrong, or name the op that breaks a rule. Pure.

[Note: What is proved]
First, rules of the plan and of single ops. Homes and slots are disjoint and inside their budgets.
An op is on the lane of its work, counts the bytes of its value, fits it into its slot, and waits
for earlier ops only. The user computes in order, and every op is issued after those that it waits
for, so waits cannot form a cycle: no deadlock. A chunk of a stream takes one staging slot, waits
for nothing else, and gives it back, so that slots cannot take part in one.

Second, races. A chain of phases in which every legal pair of neighbours occurs is walked op by op.
Waits inside a phase are the compiled ones, between phases those of `Scoreboard`. An op must reach,
through waits, every earlier access to the same place if one of the two writes. So all orders in
which lanes can run the ops give the result of the order of issue, and it suffices to follow the
contents of every place in that order. An op must read the newest version of its value, put there in
this phase or declared at its entry. An update must use the sum of all gradients. No gradient may be
overwritten before it is home.

The engine verifies each pass by its order before its first run (`verify_pass`), and each other op
by itself (`check_op`). Where units are used in another order than the one compiled it cancels what
is queued, and goes on by passes of single units: between them the rule of `Scoreboard` holds.

A version of a value is the set of the ops that made it: one update, or the backward ops of all
micro-batches whose gradients were added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from offload.planning.layout import Buffer, Place, Plan, site
from offload.planning.profile import BLOCK_BYTES, KINDS, Kind
from offload.planning.tiers import TIERS, Tier
from offload.program.ops import (
    ALL_UNITS,
    FACTOR,
    LANE_OF_MOVE,
    Lane,
    Op,
    Phase,
    Program,
    Use,
    Value,
    Verb,
    cells,
)
from offload.program.schedule import Scoreboard

_NUMBERS = ("factor", "partial")
"""Uses of places that hold one number outside of all buffers: clip factor, sum of squares."""


class ProgramError(ValueError):
    """A program breaks `rule`, in op `index` of `phase`, which is "plan" for rules of the plan."""

    def __init__(self, rule: str, phase: str = "plan", index: int | None = None, op: str = ""):
        self.rule, self.phase, self.index = rule, phase, index
        super().__init__(
            f"{phase}: {rule}" if index is None else f"{phase}: op {index} ({op}) {rule}"
        )


_ACCUMULATED = ("forward", "backward_first", "forward", "backward_next", "forward", "backward_next")
_STEP = ("forward", "backward_first", "norm", "update")
_EVALUATION = ("forward", "forward", "norm", "update", "norm", "update")
CHAIN = ("forward", *_ACCUMULATED, "norm", "update", *_STEP, *_EVALUATION)
"""Phases in an order with every legal pair of neighbours: micro-batches, evaluation, steps.

Backward follows only forward, and update only norm; the others may follow all but norm."""

Version = frozenset[int]
"""Numbers, along the chain, of the ops that made a value; empty for values from before it."""

START: Version = frozenset()


def verify(program: Program) -> None:
    """Check a program as compiled, see [Note: What is proved].

    Raises:
        ProgramError: the first broken rule, with its phase and op.
    """
    plan = program.plan
    check_buffers(plan)
    check_slots(plan)
    for phase in program.phases.values():
        for index, op in enumerate(phase.ops):
            late = next((wait for wait in op.waits if not 0 <= wait < index), None)
            rule = f"waits for op {late}, which is not an earlier op of its phase"
            if rule := broken_by(plan, op) if late is None else rule:
                raise ProgramError(rule, phase.name, index, op_text(plan, op))
    walk = _Walk(plan, {})
    for name in CHAIN:
        walk.run(program.phases[name])


def verify_pass(plan: Plan, phase: Phase) -> None:
    """Check a pass in any order before its first run, as `verify` does those of a program: each
    compute finds the weights of its unit, and ops that share a place wait for one another.

    Raises:
        ProgramError: the first broken rule.
    """
    for op in phase.ops:
        check_op(plan, op)
    _Walk(plan, phase.entry).run(phase)


def check_op(plan: Plan, op: Op) -> None:
    """Check an op by itself, before its first run.

    Raises:
        ProgramError: the rule that it breaks.
    """
    if rule := broken_by(plan, op):
        raise ProgramError(f"{op_text(plan, op)} {rule}", "an op")


def check_buffers(plan: Plan) -> None:
    """Homes exist and fit their values; buffers are aligned, disjoint and inside the budgets."""
    buffers: list[tuple[Buffer, str]] = [(b, place_text(place)) for place, b in plan.slots.items()]
    in_file: dict[tuple[str, str], int] = {(e.kind, e.unit): e.bytes for e in plan.file.extents}
    for kind in KINDS:
        for u, unit in enumerate(plan.profile.units):
            size, tier = plan.bytes_of(kind, u), plan.home(kind, u).tier
            name, home = f"{kind} of {unit.name}", plan.homes.get((kind, u))
            if home is not None:
                buffers.append((home, f"home of {name}"))
            found = home.bytes if home is not None and home.tier == tier else 0
            found = in_file.get((kind, unit.name), 0) if tier == "nvme" else found
            if found < size:
                raise ProgramError(f"{name} of {size} bytes has {found} bytes at home on {tier}")
    buffers.sort(key=lambda entry: (entry[0].tier, entry[0].offset))
    for buffer, name in buffers:
        if buffer.offset % BLOCK_BYTES or buffer.bytes % BLOCK_BYTES or buffer.offset < 0:
            raise ProgramError(f"{name} is not aligned to blocks of {BLOCK_BYTES} bytes")
    for (one, name), (two, other) in pairwise(buffers):
        if one.tier == two.tier and one.offset + one.bytes > two.offset:
            raise ProgramError(f"{name} and {other} overlap on {one.tier}")
    for tier in TIERS:
        taken, given = plan.taken_bytes(tier), plan.budgets[tier]
        if taken > given:
            raise ProgramError(f"{tier} takes {taken} bytes, over its budget of {given} bytes")


def check_slots(plan: Plan) -> None:
    """A unit has slots for exactly the values off the device; a lasting one shares none."""
    for kind, slots in zip(KINDS, (plan.weight_slot, plan.gradient_slot)):
        sharing = Counter(slots)
        for u, (unit, place) in enumerate(zip(plan.profile.units, slots)):
            away = plan.bytes_of(kind, u) > 0 and plan.home(kind, u).tier not in _reach(plan, kind)
            if (place.tier if place else "") != ("device" if away else ""):
                raise ProgramError(
                    f"{kind} of {unit.name} needs a device slot: {away}; has {place}"
                )
            if place and (rule := _misfit(plan, Use(place, Value(kind, u)))):
                raise ProgramError(rule)
            if place and unit.lasting and sharing[place] > 1:
                raise ProgramError(f"{unit.name} is lasting but shares {place_text(place)}")


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
    if rule := next(filter(None, (_misfit(plan, use) for use in uses)), ""):
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
        return _Expected(Lane.COMPUTE, _reach(plan, "gradient"), 0, [gradient])
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


def _reach(plan: Plan, kind: Kind) -> tuple[Tier, ...]:
    """The tiers in which the user's compute has values of a kind."""
    return ("device", "cpu") if plan.in_place and kind == "gradient" else ("device",)


def _size(plan: Plan, value: Value) -> int:
    return plan.bytes_of(value.kind, value.unit)


def _misfit(plan: Plan, use: Use) -> str:
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
    size, room = _size(plan, value), plan.slots[place].bytes
    if size > room:
        text = value_text(plan, value)
        return f"{text} of {size} bytes is in {place_text(place)} of {room} bytes"
    return ""


def _shared(uses: Iterable[Use]) -> list[object]:
    """What uses can have in common, without `cells`, which waits were found by."""
    return [use.value if use.place.use == "home" else use.place for use in uses]


class _Walk:
    """Follows the accesses and contents of every place along a chain of phases."""

    def __init__(self, plan: Plan, in_slots: Mapping[Place, int]):
        self._plan = plan
        self._board: Scoreboard[int] = Scoreboard()
        # By op, numbered along the chain; then by cell.
        self._waits: list[set[int]] = []
        self._writer: dict[object, int] = {}
        self._readers: dict[object, list[int]] = {}
        # Contents.
        self._slots: dict[object, tuple[Value, Version]] = {
            slot: (Value("weight", unit), START) for slot, unit in in_slots.items()
        }
        self._homes: dict[Value, Version] = {}
        self._newest: dict[Value, Version] = {}
        # The backward ops whose sum is a unit's gradient, and those that a chunk's update used.
        self._produced: dict[int, Version] = {}
        self._used: dict[Value, Version] = {}

    def run(self, phase: Phase) -> None:
        """Walk the next phase of the chain."""
        self._phase = phase
        self._base = len(self._waits)
        self._index: int | None = None
        self._filled, self._unsaved = set[object](phase.entry), set[Place]()
        self._seen: dict[Verb, list[Value]] = {verb: [] for verb in Verb}
        self._check_slots(phase.entry.items(), "does not find at entry what it wants there")
        for index, op in enumerate(phase.ops):
            self._index, self._op = index, op
            self._check_waits(self._base + index)
            self._apply(frozenset({self._base + index}))
            self._seen[op.verb].append(op.value)
        self._index = None
        self._check_slots(phase.exit.items(), "does not hold what it declares at exit")
        self._check_done()

    def _fail(self, rule: str) -> None:
        text = "" if self._index is None else op_text(self._plan, self._op)
        raise ProgramError(rule, self._phase.name, self._index, text)

    def _check_slots(self, claims: Iterable[tuple[Place, int]], rule: str) -> None:
        for slot, unit in claims:
            value = Value("weight", unit)
            if self._slots.get(slot) != (value, self._newest.get(value, START)):
                self._fail(f"{rule}: {value_text(self._plan, value)} in {place_text(slot)}")

    def _check_waits(self, own: int) -> None:
        """The op must wait for every earlier one that it would race with. Notes its accesses."""
        op, base = self._op, self._base
        reads, writes = list(cells(op.reads)), list(cells(op.writes))
        earlier = [task for task in self._board.waits(reads, writes) if task < base]
        self._board.note(own, reads, writes)
        self._waits.append({*earlier, *(base + wait for wait in op.waits)})
        reads, writes = _shared(op.reads), _shared(op.writes)
        sharers = [(cell, self._writer.get(cell, own)) for cell in (*reads, *writes)]
        sharers += [(cell, reader) for cell in writes for reader in self._readers.get(cell, ())]
        for cell, other in sharers:
            if other != own and not self._waits_for(own, other):
                which = f"op {other - base}" if other >= base else "an op of an earlier phase"
                where = place_text(cell) if isinstance(cell, Place) else "a home"
                self._fail(f"does not wait for {which}, with which it shares {where}")
        for cell in reads:
            self._readers.setdefault(cell, []).append(own)
        for cell in writes:
            self._writer[cell], self._readers[cell] = own, []

    def _waits_for(self, own: int, earlier: int) -> bool:
        """Whether `earlier` is reachable from `own` through waits."""
        stack, seen = [own], {own}
        while stack:
            waits = self._waits[stack.pop()]
            if earlier in waits:
                return True
            stack += [wait for wait in waits if wait > earlier and wait not in seen]
            seen.update(waits)
        return False

    def _write(self, use: Use, version: Version) -> None:
        if use.place.use == "home":
            self._homes[use.value] = version
        else:
            self._slots[use.place] = (use.value, version)
            self._filled.add(use.place)

    def _read(self, use: Use) -> Version:
        """The version that an op reads."""
        place, value = use
        version = self._homes.get(value, START) if place.use == "home" else START
        if place.use != "home":
            if place not in self._filled and use != FACTOR:
                self._fail(f"reads {place_text(place)}, which nothing in its phase has filled")
            there, version = self._slots.get(place, (None, START))
            if there != value:
                has = "nothing" if there is None else value_text(self._plan, there)
                asked = value_text(self._plan, value)
                self._fail(f"reads {asked} in {place_text(place)}, which has {has}")
        if value.kind != "gradient" and version != self._newest.get(value, START):
            self._fail(f"reads {value_text(self._plan, value)} from before an update")
        return version

    def _apply(self, made: Version) -> None:
        """The effect of the op on the contents."""
        op, verb = self._op, self._op.verb
        versions = [self._read(use) for use in op.reads]
        if verb is Verb.MOVE:
            self._unsaved.discard(op.reads[0].place)
            made = versions[0]
        elif verb is Verb.ADD:
            if versions[0] & versions[1]:
                self._fail("adds a gradient that is in the sum already")
            made = versions[0] | versions[1]
        elif verb is Verb.UPDATE:
            self._newest.update((use.value, made) for use in op.writes)
            self._used[op.value] = versions[0]
        elif verb is Verb.COLLECT:
            made = self._accumulate(op.writes[0], made, again=op.value in self._seen[verb])
        for use in op.writes:
            self._write(use, made)

    def _accumulate(self, use: Use, made: Version, *, again: bool) -> Version:
        """The version at a gradient's place after a backward op: at home, the sum so far."""
        unit = use.value.unit
        kept = again or self._phase.name != "backward_first"
        self._produced[unit] = made | (self._produced.get(unit, START) if kept else START)
        if use.place.use == "home":
            return self._produced[unit]
        if use.place in self._unsaved:
            there, version = self._slots[use.place]
            if there != use.value:
                self._fail(
                    f"overwrites {value_text(self._plan, there)} before it has left its slot"
                )
            made |= version
        self._unsaved.add(use.place)
        return made

    def _check_done(self) -> None:
        """What must be complete at the end of the phase."""
        plan, name, seen = self._plan, self._phase.name, self._seen
        trainable = [u for u, unit in enumerate(plan.profile.units) if unit.trainable]
        gradients = [Value("gradient", unit) for unit in trainable]
        ahead, back = ([v.unit for v in seen[verb]] for verb in (Verb.FORWARD, Verb.BACKWARD))
        if name == "forward" and ahead != list(plan.profile.forward):
            self._fail("does not compute in the order of the profile")
        if name.startswith("backward"):
            order = list(plan.profile.backward)
            if back[: len(order)] != order or not set(trainable) <= set(back):
                self._fail("does not compute in the order of the profile")
            for value in gradients:
                if self._homes.get(value, START) != self._produced[value.unit]:
                    self._fail(
                        f"does not bring home all that was made of {value_text(plan, value)}"
                    )
        combined = sorted(seen[Verb.SQUARE]) == gradients and len(seen[Verb.NORM]) == 1
        if name == "norm" and plan.clips and not combined:
            self._fail("does not square every gradient once, then combine")
        if name == "update" or seen[Verb.UPDATE]:
            if sorted(v._replace(kind="gradient") for v in seen[Verb.UPDATE]) != gradients:
                self._fail("does not update every unit once")
            for value in seen[Verb.UPDATE]:
                if self._used[value] != self._produced.get(value.unit, START):
                    self._fail(f"updates {value_text(plan, value)} before its gradient is whole")


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
