"""Prove on the plain data that a whole program cannot go wrong, or name the op that breaks a rule.

First, rules of single ops: each finds its values where they are, in slots that hold them.

Second, races. A chain of phases in which every legal pair of neighbours occurs is walked op by op.
The waits are those of `Scoreboard`, as when the engine runs. An op must reach, through waits, every
earlier access to the same place if one of the two writes. So all orders in which lanes can run the
ops give the result of the order of issue, and it suffices to follow the contents of every place in
that order. An op must read the newest version of its value, put there in this phase or declared at
its entry. An update must use the sum of all gradients. No gradient may be overwritten before it is
home.

A version of a value is the set of the ops that made it: one update, or the backward ops of all
micro-batches whose gradients were added.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload.planning.layout import Place, Plan
from offload.program.ops import FACTOR, Phase, Program, Use, Value, Verb, cells
from offload.program.schedule import Scoreboard, Task
from offload.program.verify import ProgramError, misfit, misread, op_text, place_text, value_text

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
    """Check a program as compiled.

    Raises:
        ProgramError: the first broken rule, with its phase and op.
    """
    plan = program.plan
    for phase in program.phases.values():
        for index, op in enumerate(phase.ops):
            for rule in filter(None, (misfit(plan, use) for use in (*op.reads, *op.writes))):
                raise ProgramError(rule, phase.name, index, op_text(plan, op))
    walk = _Proof(plan)
    for name in CHAIN:
        walk.run(program.phases[name])


def waits_of(phase: Phase) -> list[list[int]]:
    """By op of a phase, the indices of the earlier ones that it waits for."""
    board, found = Scoreboard[Task](), list[list[int]]()
    for index, op in enumerate(phase.ops):
        task, touched = Task(op, (0, 0), index), (list(cells(op.reads)), list(cells(op.writes)))
        found.append(sorted(other.serial for other in board.waits(*touched)))
        board.note(task, *touched)
    return found


def _shared(uses: Iterable[Use]) -> list[object]:
    """What uses can have in common, without `cells`, which waits were found by."""
    return [use.value if use.place.use == "home" else use.place for use in uses]


class _Proof:
    """Follows the versions in every place along a chain of phases."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Races: by op, numbered along the phases; then by what uses share.
        self._board: Scoreboard[Task] = Scoreboard()
        self._waits: list[set[int]] = []
        self._writer: dict[object, int] = {}
        self._readers: dict[object, list[int]] = {}
        # Contents.
        self._there: dict[object, tuple[Value, Version]] = {}
        self._homes: dict[Value, Version] = {}
        self._newest: dict[Value, Version] = {}
        # The backward ops whose sum is a unit's gradient, and those that a chunk's update used.
        self._produced: dict[int, Version] = {}
        self._used: dict[Value, Version] = {}

    def run(self, phase: Phase) -> None:
        """Walk the next phase of the chain."""
        self.phase = phase
        self._filled, self._unsaved = set[object](phase.entry), set[Place]()
        self._seen: dict[Verb, list[Value]] = {verb: [] for verb in Verb}
        self._check_slots(phase.entry.items(), "does not find at entry what it was compiled for")
        for self.index, self.op in enumerate(phase.ops):
            self._apply()
        self._check_slots(phase.exit.items(), "does not hold what it declares at exit")
        self._check_done()

    def _fail(self, rule: str) -> None:
        """Refuse the phase as a whole."""
        raise ProgramError(rule, self.phase.name)

    def _fail_op(self, rule: str) -> None:
        """Refuse the op of now."""
        raise ProgramError(rule, self.phase.name, self.index, op_text(self.plan, self.op))

    def _check_slots(self, claims: Iterable[tuple[Place, int]], rule: str) -> None:
        for slot, unit in claims:
            value = Value("weight", unit)
            if self._there.get(slot) != (value, self._newest.get(value, START)):
                self._fail(f"{rule}: {value_text(self.plan, value)} in {place_text(slot)}")

    def _write(self, use: Use, version: Version) -> None:
        if use.place.use == "home":
            self._homes[use.value] = version
        else:
            self._there[use.place] = (use.value, version)
            self._filled.add(use.place)

    def _read(self, use: Use) -> Version:
        """The version that an op reads."""
        place, value = use
        version = self._homes.get(value, START) if place.use == "home" else START
        if place.use != "home":
            if place not in self._filled and use != FACTOR:
                self._fail_op(f"reads {place_text(place)}, which nothing in its phase has filled")
            there, version = self._there.get(place, (None, START))
            if there != value:
                self._fail_op(misread(self.plan, place, value, there))
        if value.kind != "gradient" and version != self._newest.get(value, START):
            self._fail_op(f"reads {value_text(self.plan, value)} from before an update")
        return version

    def _apply(self) -> None:
        """The effect of the op on the contents."""
        op, verb, made = self.op, self.op.verb, frozenset({self._check_waits()})
        versions = [self._read(use) for use in op.reads]
        if verb is Verb.MOVE:
            self._unsaved.discard(op.reads[0].place)
            made = versions[0]
        elif verb is Verb.ADD:
            if versions[0] & versions[1]:
                self._fail_op("adds a gradient that is in the sum already")
            made = versions[0] | versions[1]
        elif verb is Verb.UPDATE:
            self._newest.update((use.value, made) for use in op.writes)
            self._used[op.value] = versions[0]
        elif verb is Verb.COLLECT:
            made = self._accumulate(op.writes[0], made, again=op.value in self._seen[verb])
        for use in op.writes:
            self._write(use, made)
        self._seen[verb].append(op.value)

    def _check_waits(self) -> int:
        """The op must wait for every earlier one that it would race with; its number."""
        op, own = self.op, len(self._waits)
        touched = list(cells(op.reads)), list(cells(op.writes))
        self._waits.append({other.serial for other in self._board.waits(*touched)})
        self._board.note(Task(op, (0, 0), own), *touched)
        reads, writes = _shared(op.reads), _shared(op.writes)
        sharers = [(cell, self._writer.get(cell, own)) for cell in (*reads, *writes)]
        sharers += [(cell, reader) for cell in writes for reader in self._readers.get(cell, ())]
        for cell, other in sharers:
            if other != own and not self._waits_for(own, other):
                where = place_text(cell) if isinstance(cell, Place) else "a home"
                self._fail_op(f"does not wait for an earlier op, with which it shares {where}")
        for cell in reads:
            self._readers.setdefault(cell, []).append(own)
        for cell in writes:
            self._writer[cell], self._readers[cell] = own, []
        return own

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

    def _accumulate(self, use: Use, made: Version, *, again: bool) -> Version:
        """The version at a gradient's place after a backward op: at home, the sum so far."""
        unit = use.value.unit
        kept = again or self.phase.name != "backward_first"
        self._produced[unit] = made | (self._produced.get(unit, START) if kept else START)
        if use.place.use == "home":
            return self._produced[unit]
        if use.place in self._unsaved:
            there, version = self._there[use.place]
            if there != use.value:
                self._fail_op(
                    f"overwrites {value_text(self.plan, there)} before it has left its slot"
                )
            made |= version
        self._unsaved.add(use.place)
        return made

    def _check_done(self) -> None:
        """What must be complete at the end of the phase."""
        plan, name, seen = self.plan, self.phase.name, self._seen
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
