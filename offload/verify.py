"""Prove on the plain data that a program cannot go wrong, or name the op that breaks a rule. Pure.

[Note: What is proved]
First every buffer of the plan and every op by itself: homes and slots are disjoint and inside
their budgets, an op is on the lane of what it does, its bytes are those of its value, its value
fits its slot, and it waits for earlier ops only. As the user runs compute in order and every op is
issued after those it waits for, waits that point back cannot form a cycle: nothing deadlocks.

Then a chain of phases in which every legal pair stands side by side is walked op by op. Between
phases the waits are those that `Scoreboard` gives; inside a phase they are the compiled ones. At
each op all earlier accesses to the same place, one of the two a write, must be reachable through
waits. So any order in which the lanes run the ops gives what the order of issue gives, and it is
enough to follow the contents of every place in that order: what is read must be what is there, the
newest, and put there in this phase or declared at its entry; no gradient and no update may be
overwritten before it is home.

A version of a value is the set of the ops that made it: one update, or the backward ops of all
micro-batches whose gradients were added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from offload.config import TIERS, Tier
from offload.layout import PLACED, Buffer, Place, Plan, site
from offload.profile import BLOCK_BYTES
from offload.program import FACTOR, WHOLE, Lane, Op, Program, Use, Value, Verb, cells
from offload.scoreboard import Scoreboard

_ACCUMULATED = ("forward", "backward_first", "forward", "backward_next", "forward", "backward_next")
_STEP = ("forward", "backward_first", "norm", "update")
CHAIN = ("forward", *_ACCUMULATED, "norm", "update", *_STEP, "forward", "forward")
"""Phases in an order that has every legal pair of neighbours: micro-batches, evaluation, steps."""

Version = frozenset[int]
"""The ops that made a value, numbered along the chain; none for what was there at the start."""

START: Version = frozenset()

_NUMBERS = ("factor", "partial")
"""Uses of places that hold one number, in no buffer: the clip factor, a sum of squares."""


class ProgramError(ValueError):
    """A program breaks a rule: where, and which. `phase` is `plan` for what is in no phase."""

    def __init__(self, rule: str, phase: str = "plan", index: int | None = None, op: str = ""):
        self.rule, self.phase, self.index = rule, phase, index
        super().__init__(
            f"{phase}: {rule}" if index is None else f"{phase}: op {index} ({op}) {rule}"
        )


def verify(program: Program) -> None:
    """Check every rule of [Note: What is proved].

    Raises:
        ProgramError: the first rule that is broken, with the phase and the op.
    """
    plan = program.plan
    _check_buffers(plan)
    _check_slots(plan)
    for phase in program.phases.values():
        for index, op in enumerate(phase.ops):
            if rule := _broken_by(plan, index, op):
                raise ProgramError(rule, phase.name, index, _text(plan, op))
    walk = _Walk(program)
    for name in CHAIN:
        walk.run(name)


def _text(plan: Plan, op: Op) -> str:
    return f"{op.verb.value} of {_name(plan, op.value)} on {op.lane.value}"


def _name(plan: Plan, value: Value) -> str:
    if value == FACTOR.value:
        return "clip factor"
    chunk = "" if value.chunk == WHOLE else f" chunk {value.chunk}"
    return f"{value.kind} of {plan.profile.units[value.unit].name}{chunk}"


def _at(place: Place) -> str:
    return f"{place.tier} {place.use}" + ("" if place.use == "home" else f" {place.index}")


def _check_buffers(plan: Plan) -> None:
    """Homes are there and large enough; buffers are aligned, disjoint and inside the budgets."""
    held: list[tuple[Buffer, str]] = [(b, _at(place)) for place, b in plan.slots.items()]
    in_file: dict[tuple[str, str], int] = {(e.kind, e.unit): e.bytes for e in plan.file.extents}
    for kind in PLACED:
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
        taken, given = plan.arena_bytes(tier), plan.budgets[tier]
        if taken > given:
            raise ProgramError(f"{tier} takes {taken} bytes, over its budget of {given} bytes")


def _check_slots(plan: Plan) -> None:
    """A unit has slots exactly for what lives elsewhere; a lasting unit shares them with nobody."""
    for kind, slots in zip(PLACED, (plan.weight_slot, plan.gradient_slot)):
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
                raise ProgramError(f"{unit.name} is lasting but shares {_at(place)}")


# -- one op ---------------------------------------------------------------------------------------


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
        return "" if place == at else f"{_name(plan, value)} lives on {at.tier}, not {place.tier}"
    if place not in plan.slots:
        return f"there is no slot {_at(place)}"
    size, room = _size(plan, value), plan.slots[place].bytes
    if size > room:
        return f"{_name(plan, value)} of {size} bytes is in {_at(place)} of {room} bytes"
    return ""


def _broken_by(plan: Plan, index: int, op: Op) -> str:
    """The rule that an op breaks by itself; empty when none."""
    if late := [wait for wait in op.waits if not 0 <= wait < index]:
        return f"waits for op {late[0]}, which is not an earlier op of its phase"
    due, uses = _due(plan, op), (*op.reads, *op.writes)
    if [use.value for use in uses] != due.values or len(op.reads) != due.reads:
        names = ", ".join(_name(plan, value) for value in due.values) or "nothing"
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
    value, unit = op.value, plan.profile.units[op.value.unit]
    if op.verb is Verb.MOVE:
        tiers = tuple(use.place.tier for use in (*op.reads, *op.writes))[:2]
        return _Due(_MOVES.get((tiers[0], tiers[-1])), tiers, 1, [value] * 2, _size(plan, value))
    if op.verb is Verb.NORM:
        return _Due(Lane.CPU, (), len(op.reads), [*(u.value for u in op.reads), FACTOR.value])
    weight, gradient, state = (Value(kind, value.unit, value.chunk) for kind in PLACED)
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


# -- the chain ------------------------------------------------------------------------------------


class _Walk:
    """The accesses and the contents of every place along a chain of phases, in order of issue."""

    def __init__(self, program: Program):
        self._plan, self._phases = program.plan, program.phases
        self._board: Scoreboard[int] = Scoreboard()
        # Per op, numbered along the chain; then per smallest thing that two ops can share.
        self._waits: list[set[int]] = []
        self._written: dict[object, int] = {}
        self._read: dict[object, list[int]] = {}
        # What is where; homes and updates by chunk, and by whole value for what is in no chunk.
        self._slots: dict[Place, tuple[Value, Version]] = {}
        self._homes: dict[Value, Version] = {}
        self._newest: dict[Value, Version] = {}
        self._pieces: dict[Value, tuple[Value, ...]] = {}
        # By unit, the backward ops whose sum its gradient is.
        self._produced: dict[int, Version] = {}

    def run(self, name: str) -> None:
        """Walk the next phase of the chain."""
        self._phase = phase = self._phases[name]
        self._base = len(self._waits)
        self._index: int | None = None
        self._filled, self._uncarried = set(phase.entry), set[Place]()
        self._seen: dict[Verb, list[Value]] = {verb: [] for verb in Verb}
        self._check_slots(phase.entry.items(), "does not find at entry what it wants there")
        for index, op in enumerate(phase.ops):
            self._index, self._op = index, op
            self._order(self._base + index)
            self._follow(frozenset({self._base + index}))
            self._seen[op.verb].append(op.value)
        self._index = None
        self._check_slots(phase.exit.items(), "does not hold what it declares at exit")
        self._check_done()

    def _fail(self, rule: str) -> None:
        text = "" if self._index is None else _text(self._plan, self._op)
        raise ProgramError(rule, self._phase.name, self._index, text)

    def _check_slots(self, claims: Iterable[tuple[Place, int]], rule: str) -> None:
        for slot, unit in claims:
            value = Value("weight", unit)
            if self._slots.get(slot) != (value, self._version(self._newest, value)):
                self._fail(f"{rule}: {_name(self._plan, value)} in {_at(slot)}")

    def _pieces_of(self, value: Value) -> tuple[Value, ...]:
        if value.chunk != WHOLE:
            return (value,)
        if value not in self._pieces:
            chunks = range(len(self._plan.profile.units[value.unit].chunks))
            self._pieces[value] = (value, *(Value(value.kind, value.unit, c) for c in chunks))
        return self._pieces[value]

    def _shared(self, uses: Iterable[Use]) -> list[object]:
        found: list[object] = []
        for place, value in uses:
            found += self._pieces_of(value) if place.use == "home" else (place,)
        return found

    def _order(self, own: int) -> None:
        """Note the op's accesses; it must wait for all that it shares with an earlier op."""
        op, base = self._op, self._base
        reads, writes = list(cells(self._plan, op.reads)), list(cells(self._plan, op.writes))
        earlier = [task for task in self._board.waits(reads, writes) if task < base]
        self._board.note(own, reads, writes)
        self._waits.append({*earlier, *(base + wait for wait in op.waits)})
        reads, writes = self._shared(op.reads), self._shared(op.writes)
        sharers = [(cell, self._written.get(cell, own)) for cell in (*reads, *writes)]
        sharers += [(cell, reader) for cell in writes for reader in self._read.get(cell, ())]
        for cell, other in sharers:
            if other != own and not self._waits_for(own, other):
                which = f"op {other - base}" if other >= base else "an op of an earlier phase"
                where = _at(cell) if isinstance(cell, Place) else "a home"
                self._fail(f"does not wait for {which}, with which it shares {where}")
        for cell in reads:
            self._read.setdefault(cell, []).append(own)
        for cell in writes:
            self._written[cell], self._read[cell] = own, []

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

    def _version(self, of: dict[Value, Version], value: Value) -> Version:
        if value.chunk != WHOLE:
            return of.get(value, START)
        return START.union(*(of.get(piece, START) for piece in self._pieces_of(value)))

    def _put(self, use: Use, version: Version) -> None:
        if use.place.use == "home":
            self._homes.update(dict.fromkeys(self._pieces_of(use.value), version))
        else:
            self._slots[use.place] = (use.value, version)
            self._filled.add(use.place)

    def _take(self, use: Use) -> Version:
        """The version that is read."""
        place, value = use
        version = self._version(self._homes, value) if place.use == "home" else START
        if place.use != "home":
            if place not in self._filled and use != FACTOR:
                self._fail(f"reads {_at(place)}, which nothing in its phase has filled")
            held, version = self._slots.get(place, (None, START))
            if held != value:
                text = "nothing" if held is None else _name(self._plan, held)
                self._fail(f"reads {_name(self._plan, value)} in {_at(place)}, which has {text}")
        if value.kind != "gradient" and version != self._version(self._newest, value):
            self._fail(f"reads {_name(self._plan, value)} from before an update")
        return version

    def _follow(self, made: Version) -> None:
        """What the op does to the contents."""
        op, verb = self._op, self._op.verb
        versions = [self._take(use) for use in op.reads]
        if verb is Verb.MOVE:
            self._uncarried.discard(op.reads[0].place)
            made = versions[0]
        elif verb is Verb.ADD:
            if versions[0] & versions[1]:
                self._fail("adds a gradient that is in the sum already")
            made = versions[0] | versions[1]
        elif verb is Verb.UPDATE:
            self._newest.update((use.value, made) for use in op.writes)
        elif verb is Verb.BACKWARD and op.writes:
            made = self._produce(op.writes[0], made, again=op.value in self._seen[verb])
        for use in op.writes:
            self._put(use, made)

    def _produce(self, use: Use, made: Version, *, again: bool) -> Version:
        """What a gradient's place holds after a backward op: at home the sum so far."""
        unit = use.value.unit
        kept = again or self._phase.name != "backward_first"
        self._produced[unit] = made | (self._produced.get(unit, START) if kept else START)
        if use.place.use == "home":
            return self._produced[unit]
        if use.place in self._uncarried:
            held, version = self._slots[use.place]
            if held != use.value:
                self._fail(f"overwrites {_name(self._plan, held)} before it has left its slot")
            made |= version
        self._uncarried.add(use.place)
        return made

    def _check_done(self) -> None:
        """What must have happened by the end of the phase."""
        plan, name, seen = self._plan, self._phase.name, self._seen
        trainable = [u for u, unit in enumerate(plan.profile.units) if unit.trainable]
        chunks = [v for u in trainable for v in self._pieces_of(Value("gradient", u))[1:]]
        ahead, back = ([v.unit for v in seen[verb]] for verb in (Verb.FORWARD, Verb.BACKWARD))
        if name == "forward" and ahead != list(plan.profile.forward):
            self._fail("does not compute in the order of the profile")
        if name.startswith("backward"):
            order = list(plan.profile.backward)
            if back[: len(order)] != order or not set(trainable) <= set(back):
                self._fail("does not compute in the order of the profile")
            for value in (Value("gradient", u) for u in trainable):
                at_home = {self._homes.get(piece, START) for piece in self._pieces_of(value)}
                if at_home != {self._produced[value.unit]}:
                    self._fail(f"does not bring home all that was made of {_name(plan, value)}")
        combined = sorted(seen[Verb.SQUARE]) == chunks and len(seen[Verb.NORM]) == 1
        if name == "norm" and plan.clips and not combined:
            self._fail("does not square every chunk of the gradient once, then combine")
        if name == "update":
            if sorted(v._replace(kind="gradient") for v in seen[Verb.UPDATE]) != chunks:
                self._fail("does not update every chunk once")
            for value, newest in self._newest.items():
                if self._homes.get(value) != newest:
                    self._fail(f"does not bring home the update of {_name(plan, value)}")
