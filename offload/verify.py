"""Prove on the plain data that a program cannot go wrong, or name the op that breaks a rule. Pure.

[Note: What is proved]
First every buffer of the plan and every op by itself: homes and slots are disjoint and inside
their budgets, an op is on the lane of what it does, its bytes are those of its value, its value
fits its slot, and it waits for earlier ops only. As the user runs compute in order and every op is
issued after those it waits for, waits that point back cannot form a cycle: nothing deadlocks. Nor
do chunks that wait for staging slots: the ops of a chunk stand together and start only when nothing
outside is waited for, so that who has a slot gives it back ([Note: Passages] of `schedule`).

Then a chain of phases in which every pair of neighbours that there can be stands side by side is
walked op by op: by `verify` it is `CHAIN`, the phases as they are compiled; by `verify_runs` it is
`RUNS`, the same as the engine runs them ([Note: As it runs] of `variants`). Between phases the
waits are those that `Scoreboard` gives; inside a phase they are the compiled ones. At each op all
earlier accesses to the same place, one of the two a write, must be reachable through waits. So any
order in which the lanes run the ops gives what the order of issue gives, and it is enough to follow
the contents of every place in that order: what is read must be what is there, the newest, and put
there in this phase or declared at its entry; an update must use the whole gradient; no gradient and
no update may be overwritten before it is home.

Not proved is what the engine does when units are used in another order than the compiled one: what
is queued is taken back, and more is fetched. There only the rule of `Scoreboard` holds.

A version of a value is the set of the ops that made it: one update, or the backward ops of all
micro-batches whose gradients were added.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload.layout import Place
from offload.program import FACTOR, IN_RING, WHOLE, Phase, Program, Use, Value, Verb, cells
from offload.rules import (
    ProgramError,
    broken_by,
    check_buffers,
    check_slots,
    op_text,
    place_text,
    value_text,
)
from offload.scoreboard import Scoreboard
from offload.variants import EARLY, as_run

_ACCUMULATED = ("forward", "backward_first", "forward", "backward_next", "forward", "backward_next")
_STEP = ("forward", "backward_first", "norm", "update")
_EVALUATION = ("forward", "forward", "norm", "update", "norm", "update")
CHAIN = ("forward", *_ACCUMULATED, "norm", "update", *_STEP, *_EVALUATION)
"""Phases in an order that has every legal pair of neighbours: micro-batches, evaluation, steps.

Backward follows forward, and update norm; whatever else is, follows all but norm."""

_LETTERS = {
    "F": ("forward",),
    "B": ("backward_first",),
    "b": ("backward_next",),
    "U": ("norm", "update"),
    "E": ("backward_first" + EARLY,),
    "e": ("backward_next" + EARLY,),
}
RUNS = tuple(name for letter in "FEUFbUBeUUBBbBFeFBUFUFFbbFEFbe" for name in _LETTERS[letter])
"""Phases as run, in an order that has every pair of neighbours. Backward may follow backward (a
first one where gradients were dropped before) and even an update (all weights are recomputed from);
one in which updates begin ends its step, of which step() then has nothing left to do."""

Version = frozenset[int]
"""The ops that made a value, numbered along the chain; none for what was there at the start."""

START: Version = frozenset()


def verify(program: Program) -> None:
    """Check every rule of [Note: What is proved].

    Raises:
        ProgramError: the first rule that is broken, with the phase and the op.
    """
    plan = program.plan
    check_buffers(plan)
    check_slots(plan)
    for phase in program.phases.values():
        for index, op in enumerate(phase.ops):
            if rule := broken_by(plan, index, op):
                raise ProgramError(rule, phase.name, index, op_text(plan, op))
    walk = _Walk(program)
    for name in CHAIN:
        walk.run(program.phases[name])


def verify_runs(program: Program) -> None:
    """Check the chains of [Note: What is proved] as the engine runs the phases of a valid program.

    Raises:
        ProgramError: the first rule that is broken, with the phase and the op.
    """
    walk, held = _Walk(program), frozenset[tuple[Place, int]]()
    known: dict[object, Phase] = {}
    for name in RUNS:
        if (name, held) not in known:
            known[name, held] = as_run(program, name, dict(held))
        walk.run(known[name, held])
        held = frozenset(known[name, held].exit.items())


# -- the chain ------------------------------------------------------------------------------------


def _slot(use: Use) -> object:
    """What a use shares with others outside of homes; in a ring nothing, see [Note: Chunks]."""
    return use if use.place.number == IN_RING else use.place


class _Walk:
    """The accesses and the contents of every place along a chain of phases, in order of issue."""

    def __init__(self, program: Program):
        self._plan = program.plan
        self._board: Scoreboard[int] = Scoreboard()
        # Per op, numbered along the chain; then per smallest thing that two ops can share.
        self._waits: list[set[int]] = []
        self._written: dict[object, int] = {}
        self._read: dict[object, list[int]] = {}
        # What is where; homes and updates by chunk, and by whole value for what is in no chunk.
        self._slots: dict[object, tuple[Value, Version]] = {}
        self._homes: dict[Value, Version] = {}
        self._newest: dict[Value, Version] = {}
        self._pieces: dict[Value, tuple[Value, ...]] = {}
        # By unit, the backward ops whose sum its gradient is; by chunk, those that an update used.
        self._produced: dict[int, Version] = {}
        self._used: dict[Value, Version] = {}

    def run(self, phase: Phase) -> None:
        """Walk the next phase of the chain."""
        self._phase = phase
        self._base = len(self._waits)
        self._index: int | None = None
        self._filled, self._uncarried = set[object](phase.entry), set[Place]()
        self._seen: dict[Verb, list[Value]] = {verb: [] for verb in Verb}
        self._check_slots(phase.entry.items(), "does not find at entry what it wants there")
        passed: set[tuple[int, int]] = set()
        for index, op in enumerate(phase.ops):
            self._index, self._op = index, op
            chunk = op.value[1:]
            if chunk[1] != WHOLE and not (index and chunk == phase.ops[index - 1].value[1:]):
                if chunk in passed:
                    self._fail("does not stand with the other ops of its chunk")
                passed.add(chunk)
            self._order(self._base + index)
            self._follow(frozenset({self._base + index}))
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
            if self._slots.get(slot) != (value, self._version(self._newest, value)):
                self._fail(f"{rule}: {value_text(self._plan, value)} in {place_text(slot)}")

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
            found += self._pieces_of(value) if place.use == "home" else (_slot(Use(place, value)),)
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
                where = "a home" if isinstance(cell, Value) else place_text(cell)
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
            self._slots[_slot(use)] = (use.value, version)
            self._filled.add(_slot(use))

    def _take(self, use: Use) -> Version:
        """The version that is read."""
        place, value = use
        version = self._version(self._homes, value) if place.use == "home" else START
        if place.use != "home":
            if _slot(use) not in self._filled and use != FACTOR:
                self._fail(f"reads {place_text(place)}, which nothing in its phase has filled")
            held, version = self._slots.get(_slot(use), (None, START))
            if held != value:
                has = "nothing" if held is None else value_text(self._plan, held)
                asked = value_text(self._plan, value)
                self._fail(f"reads {asked} in {place_text(place)}, which has {has}")
        if value.kind != "gradient" and version != self._version(self._newest, value):
            self._fail(f"reads {value_text(self._plan, value)} from before an update")
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
            self._used[op.value] = versions[0]
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
                self._fail(f"overwrites {value_text(self._plan, held)} before it has left its slot")
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
                    self._fail(
                        f"does not bring home all that was made of {value_text(plan, value)}"
                    )
        combined = sorted(seen[Verb.SQUARE]) == chunks and len(seen[Verb.NORM]) == 1
        if name == "norm" and plan.clips and not combined:
            self._fail("does not square every chunk of the gradient once, then combine")
        if name == "update" or seen[Verb.UPDATE]:
            if sorted(v._replace(kind="gradient") for v in seen[Verb.UPDATE]) != chunks:
                self._fail("does not update every chunk once")
            for value in seen[Verb.UPDATE]:
                if self._used[value] != self._produced.get(value.unit, START):
                    self._fail(f"updates {value_text(plan, value)} before its gradient is whole")
            for value, newest in self._newest.items():
                if self._homes.get(value) != newest:
                    self._fail(f"does not bring home the update of {value_text(plan, value)}")
