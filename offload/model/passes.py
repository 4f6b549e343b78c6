"""Passes: one forward or one backward over the units, fetched ahead in the compiled order.

[Note: Misses]
A pass queues the fetches of all units at once, in the expected order; slots bound how far ahead
they run. When the user's modules are used in another order, fetches that have not begun are
cancelled, and the pass goes on from where the unit used now stands in the order (or with that unit
alone), unit by unit. The result stays right, and the miss is counted. The order seen is that
expected of the next pass of the same kind. A backward after a forward in a new order is expected in
its reverse.

An order is compiled to one phase when it is expected for the second time, and kept; before, and
where it depends on the data, each unit has a phase of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from offload.model.running import in_backward
from offload.planning.layout import Place
from offload.planning.profile import profile_of
from offload.program.compile import pass_phase
from offload.program.ops import Verb
from offload.program.verify import verify_pass
from offload.runtime.runner import Runner, Task


class Entry(NamedTuple):
    """A unit queued in a pass: the fetch of its weights, and the compute that uses them."""

    unit: int
    position: int
    fetches: list[Task]
    task: Task

    @property
    def gather(self) -> Task | None:
        """The gathering from the ranks, where there are several and it is needed: the last one."""
        return next((one for one in self.fetches[-1:] if one.of_user), None)


class _Compiled(NamedTuple):
    """Turns of units, written down."""

    phase: Any
    ends: list[int]
    """How many ops there are up to the compute of each unit."""
    in_slots: Mapping[Place, int]
    """What the slots hold at the end."""


def refuse_inside(what: str) -> None:
    """Refuse `what`, which needs all gradients, while some are on their way home."""
    if in_backward():
        raise RuntimeError(
            f"{what} was called in a hook, inside a backward, but gradients of an offloaded model "
            "are on their way then: call it after backward(); p.register_hook() changes a gradient "
            "as it comes"
        )


class Passes:
    """The pass that is open, what the weight slots hold, and the orders seen."""

    def __init__(self, runner: Runner, forward: Sequence[int], backward: Sequence[int]):
        """Start with the orders of a profile, but for units whose use nobody announces."""
        self._runner = runner
        self._plan = runner.plan
        orders = {Verb.FORWARD: forward, Verb.BACKWARD: backward}
        self.orders = {
            verb: tuple(unit for unit in order if unit not in self._plan.residents)
            for verb, order in orders.items()
        }
        self._seen = self.orders[Verb.FORWARD], self.orders[Verb.BACKWARD]
        """Forward and backward orders of the last finished pair; the declared ones before there
        was any."""
        self.number = 0
        """Passes opened so far; the pass under way, or the last one."""
        self.misses = 0
        self._in_slots: dict[Place, int] = {}
        """Unit that each slot will hold when all that is queued has run."""
        self.verb: Verb | None = None
        """Direction of the open pass; None where none is."""
        self._queue: deque[Entry] = deque()
        self.used: list[int] = []
        """Units that the open pass has used so far."""
        self.position = 0
        """Position in the order of the open pass after the last unit used."""
        self.collectives: Any = None
        """Of `parallel`, which stands above; None with one rank."""
        self._steady = dict.fromkeys(orders, True)
        """Whether the last pass of a direction was in the order expected of it."""

    def open(self, verb: Verb) -> None:
        """Begin a pass: queue the fetches of all its units."""
        assert self.verb is None
        self.number += 1
        if self.collectives is not None:
            self.collectives.opened(verb, self._in_slots)
        self.verb = verb
        self._fetch(0, whole=self._steady[verb])

    def close(self, *, finished: bool) -> None:
        """End the pass; the order of a `finished` one is that of the next."""
        self.pause()
        if self.verb is not None and self.collectives is not None:
            self.collectives.closed()
        verb, used = self.verb, tuple(self.used)
        self.verb, self.used, self.position = None, [], 0
        if verb is None or not used or not finished:
            return
        self._steady[verb] = self.orders[verb] == used
        self.orders[verb] = used
        if verb is Verb.BACKWARD:
            self._seen = (self.orders[Verb.FORWARD], used)
        else:
            ahead, behind = self._seen
            if ahead != used:
                behind = profile_of(self._plan.profile.units, used).backward
            self.orders[Verb.BACKWARD] = behind

    def take(self, unit: int) -> Entry:
        """The turn of `unit`, used now by the user's modules."""
        self.used.append(unit)
        next_in_order = self._queue and self._queue[0].unit == unit
        if not next_in_order and self._at_hand(unit):
            return self._entry(unit, self.position)
        if not next_in_order:
            self._resume(unit)
        entry = self._queue.popleft()
        self.position = entry.position + 1
        return entry

    def following(self) -> Entry | None:
        """The next turn, as far as it is known."""
        return self._queue[0] if self._queue else None

    def _at_hand(self, unit: int) -> bool:
        """Whether the weights are where they are used, and nothing queued takes their place."""
        slot = self._plan.slot_in_use(unit)
        coming = {self._plan.slot_in_use(entry.unit) for entry in self._queue}
        if slot is None:
            return coming <= {None}
        return slot not in coming and self._in_slots.get(slot) == unit

    def pause(self) -> None:
        """Take back all that is queued and has not begun; the next use goes on from there."""
        queue = self._queue
        self._runner.cancel([task for entry in queue for task in (*entry.fetches, entry.task)])
        for entry in queue:
            if any(task.cancelled for task in entry.fetches):
                self.invalidate(entry.unit)
        queue.clear()

    def give_up(self, entry: Entry) -> None:
        """A turn that was taken does not begin; what is queued behind it is taken back too."""
        self.misses += 1
        self.pause()
        self._runner.cancel([*entry.fetches, entry.task])
        self.invalidate(entry.unit)

    def forget(self) -> None:
        """The memory of the tiers is given back, and what the slots hold with it."""
        assert self.verb is None
        self._in_slots.clear()
        if self.collectives is not None:
            self.collectives.forget()

    def invalidate(self, unit: int) -> None:
        """What a slot holds of `unit`, or will hold, is no longer its weights."""
        for slot in (self._plan.full_weight[unit], self._plan.weight_slot[unit]):
            if slot is not None and self._in_slots.get(slot) == unit:
                del self._in_slots[slot]

    def weights_changed(self, unit: int) -> None:
        """The home of a unit's weights changes: what is fetched or to be fetched of them is old."""
        if self.collectives is not None:
            self.collectives.changes(unit)
        self.pause()
        self.invalidate(unit)

    def _order(self) -> tuple[int, ...]:
        assert self.verb is not None
        return self.orders[self.verb]

    def _resume(self, unit: int) -> None:
        """Go on from the next turn of `unit` in the order; without one, with it alone first."""
        self.misses += 1
        self.pause()
        order = self._order()
        ahead = [*range(self.position, len(order)), *range(self.position)]
        found = next((at for at in ahead if order[at] == unit), None)
        if found is not None:
            self._fetch(found, whole=False)
        else:
            self._queue.append(self._entry(unit, self.position - 1))
            self._fetch(self.position, whole=False)

    def _fetch(self, start: int, *, whole: bool) -> None:
        """Queue the turns of all units from a position on."""
        order = self._order()[start:]
        if whole:
            self._queue += self._entries(order, start)
        else:
            self._queue += (self._entry(unit, at) for at, unit in enumerate(order, start))

    def _entry(self, unit: int, position: int) -> Entry:
        return self._entries((unit,), position)[0]

    def _entries(self, units: tuple[int, ...], position: int) -> list[Entry]:
        """Queue the fetches of units, unless their slots will hold them, and their computes."""
        compiled = self._compile(units, position)
        tasks = self._runner.start(compiled.phase, self.number)
        self._in_slots |= compiled.in_slots  # Last: what could not be queued will be in no slot.
        begins = [0, *compiled.ends]
        return [
            Entry(unit, position + at, tasks[begins[at] : end - 1], tasks[end - 1])
            for at, (unit, end) in enumerate(zip(units, compiled.ends))
        ]

    def _compile(self, units: tuple[int, ...], position: int) -> _Compiled:
        every = (
            by[unit] for by in (self._plan.full_weight, self._plan.weight_slot) for unit in units
        )
        slots = dict.fromkeys(filter(None, every))
        in_slots = {slot: self._in_slots[slot] for slot in slots if slot in self._in_slots}
        key = "pass", self.verb, units, position, tuple(in_slots.items())

        def made() -> _Compiled:
            assert self.verb is not None
            phase, ends = pass_phase(self._plan, self.verb, units, position, in_slots)
            verify_pass(self._plan, phase)
            works = self._runner.works
            written = self._runner.written([(op, works.of(op)) for op in phase.ops])
            return _Compiled(written, ends, phase.exit)

        found: _Compiled = self._runner.keep(key, made)
        return found
