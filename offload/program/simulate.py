"""Predict: run a program on any machine, real or imagined, and return what every lane did. Pure.

[Note: The model of time]
Ops, waits and the choice of the next op are the engine's own: `Scoreboard` and `Schedule`. Each
lane runs one op at a time to its end. That of the drives has chosen some before it comes to them,
up to FLYING_BYTES_MAX: nothing overtakes what is under way. Forward and backward are a pass each;
`norm` and `update` belong to the pass of the next forward, which needs their results.

The user's thread issues all ops of a pass, then computes unit after unit, blocked until a unit's
waits are done. In the last backward of a step it issues the squares of each unit as its gradient
goes home; after that what is left of `norm`, and `update`. Then it spends `host_seconds`, and
begins the next forward. Before the first update of a step it is blocked until the updates of the
step before are done, as by `Updates.settle`. The engine's ops on the compute lane share the device
with the user, one op at a time; if the CPU computes, they run beside the user's at full speed.

Over several ranks this is one of them, which all do the same at the same time. A collective is one
op of the lane `comm`, and its sums are made on the compute lane. See [Note: What ranks share] of
`machine`.

Each op of the engine takes `Machine.op_seconds`, and its bytes at the speed of its lane. A stream
([Note: Streams] of `ops`) is done in as many pieces as there are chunks, up to the number of
staging slots, of which each takes one ([Note: Slots] of `schedule`). A piece brings what it needs,
does its work and takes back what it has changed, lane after lane, beside the other pieces. The
user's compute takes the given time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.planning.machine import Machine
from offload.program.compile import STREAMED, before_last, compute_phase, parts_of, with_squares
from offload.program.ops import Lane, Op, Program, Verb, cells
from offload.program.schedule import FLYING_BYTES_MAX, Schedule, Scoreboard, State, Task

ComputeSeconds = Callable[[int, Verb], float]
"""Seconds of the user's forward or backward of a unit, by (unit, verb)."""


@dataclass(frozen=True, slots=True)
class Span:
    """One op, and when it ran."""

    lane: Lane
    op: Op
    phase: str
    step: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every lane did, in seconds from the start of the first step."""

    spans: tuple[Span, ...]
    """In order of start."""
    steps: tuple[float, ...]
    """When the user called each `step()`: at the end of its last backward."""
    waited: tuple[float, ...]
    """How long the user's thread was blocked between the `step()` before and each `step()`."""

    @property
    def step_seconds(self) -> float:
        """The steady state: from the last but one `step()` to the last."""
        return self.steps[-1] - (self.steps[-2] if len(self.steps) > 1 else 0.0)

    @property
    def exposed(self) -> float:
        """Seconds of `step_seconds` in which the user's thread was blocked."""
        return self.waited[-1]


def simulate(
    program: Program,
    machine: Machine,
    compute_seconds: ComputeSeconds,
    *,
    steps: int = 4,
    micro_batches: int = 1,
    host_seconds: float = 0.0,
    updates_in_backward: bool = False,
) -> Timeline:
    """Run `steps` steps of `micro_batches` each, see [Note: The model of time].

    Args:
        machine: speeds of the lanes; its capacities are ignored.
        steps: of which the first one or two differ from the steady state.
        host_seconds: spent by the user's thread after each `step()`.
        updates_in_backward: issue a unit's update after its last backward, as with
            Config.micro_batches. If the program clips it waits for the norm at `step()`, as always.
    """
    assert min(steps, micro_batches) > 0 <= host_seconds
    simulation = _Simulation(program, machine, compute_seconds, host_seconds)
    return simulation.run(steps, micro_batches, updates_in_backward and not program.plan.clips)


def speeds_of(lane: Lane) -> list[str]:
    """The fields of Machine with the speeds of a lane, for writes last."""
    several = {Lane.DISK: ["disk_read", "disk_write"], Lane.COMM: ["link", "nic"]}
    return [f"{name}_bytes_per_s" for name in several.get(lane, [lane.value])]


def speed_of(op: Op) -> str:
    """The field of Machine with the speed of an op."""
    writes = op.lane is Lane.DISK and op.writes[0].place.tier == "nvme"
    return speeds_of(op.lane)[-1 if writes else 0]


def seconds_of(op: Op, machine: Machine, ranks: int = 1) -> float:
    """How long an op of the engine takes on its lane."""
    if op.lane is Lane.COMM:
        inside, between = machine.axes(op.bytes, ranks, sums=op.verb is Verb.EXCHANGE)
        axes = inside / machine.link_bytes_per_s, between / machine.nic_bytes_per_s
        hops = ranks // machine.nodes + machine.nodes - 2
        seconds = sum(axes) if machine.axes_in_turn else max(axes)
        return seconds + hops * machine.hop_seconds + machine.op_seconds
    speed: float = getattr(machine, speed_of(op))
    assert speed > 0, op.lane
    return op.bytes / speed + machine.op_seconds


_COMPUTES = (Verb.FORWARD, Verb.BACKWARD, Verb.COLLECT)
"""What the user's thread does itself: of `OF_USER` the rest is launched only."""

_PCIE = Lane.COMM, Lane.H2D, Lane.D2H


class _Task(Task):
    """One op in one step, and when it runs."""

    phase: str
    step: int
    seconds: float
    """That it takes alone."""
    start: float
    left: float
    """Of `seconds`, at the time `since`, from when on it goes at a `pace`, up to `stop`."""
    since: float
    pace: float
    stop: float


_Piece = list[tuple[Op, float]]
"""What is done one after the other for a piece of an op, each with its seconds."""


class _Simulation:
    def __init__(
        self, program: Program, machine: Machine, seconds: ComputeSeconds, host_seconds: float
    ):
        self._program, self._machine, self._host_seconds = program, machine, host_seconds
        order, in_slots = program.plan.profile.forward, program.phases["backward_first"].exit
        self._forward_next = compute_phase(program.plan, "forward", order, in_slots)
        """The forward of a later micro-batch: it finds some weights in their slots."""
        self._compute, self._ranks = seconds, program.plan.profile.sharding.ranks
        self._templates: dict[int, tuple[list[object], list[object], list[_Piece]]] = {}
        self._board: Scoreboard[Task] = Scoreboard()
        self._schedule = Schedule(program.plan.profile.chunk_stages)
        self._serial = 0
        self._now = 0.0
        self._running: dict[object, _Task] = {}
        self._taken = {lane: deque[_Task]() for lane in Lane}
        """What each lane has begun, and does in this order."""
        self._events: list[tuple[float, int, _Task | None]] = []
        """When which task ends; None: the user's thread goes on."""
        self._spans: list[Span] = []
        self._blocked_on: _Task | None = None
        """What the user's thread waits for, since `_since`."""
        self._since = 0.0
        self._waited = 0.0

    def run(self, steps: int, micro_batches: int, early: bool) -> Timeline:
        marks: list[tuple[float, float]] = []
        user = self._user(steps, micro_batches, early, marks)
        self._advance(user)
        self._dispatch()
        while self._events:
            self._now = self._events[0][0]
            resumes = False
            while self._events and self._events[0][0] == self._now:
                task = heapq.heappop(self._events)[2]
                if task is None or task.stop == self._now:  # Else its pace has changed.
                    resumes |= task is None or self._finish(task)
            if resumes:
                self._advance(user)
            self._dispatch()
        assert self._blocked_on is None, "the program deadlocks"
        spans = tuple(sorted(self._spans, key=lambda span: (span.start, span.stop)))
        ends = tuple(end for end, _ in marks)
        return Timeline(spans, ends, tuple(waited for _, waited in marks))

    # -- the user's thread

    def _user(
        self, steps: int, micro_batches: int, early: bool, marks: list[tuple[float, float]]
    ) -> Iterator[_Task | float]:
        """The training loop: yields tasks to compute or to wait for, and seconds to spend."""
        phases, number = self._program.phases, 0
        last = "backward_next" if micro_batches > 1 else "backward_first"
        last_ops = with_squares(self._program.plan, phases[last].ops, again=micro_batches > 1)
        begun: list[_Task] = []
        for step in range(steps):
            updates = {op.value.unit: op for op in phases["update"].ops}
            before, begun = begun, []
            for batch in range(micro_batches):
                backward = "backward_first" if batch == 0 else "backward_next"
                ahead = phases["forward"] if batch == 0 else self._forward_next
                for phase in (ahead, phases[backward]):
                    name = phase.name
                    left = Counter(op.value.unit for op in phase.ops if op.verb in _COMPUTES)
                    is_last = name == backward and batch == micro_batches - 1
                    ops = last_ops if is_last else before_last(self._program.plan, phase)
                    queued = self._issue(ops, name, step, number)
                    for task in (task for task in queued if task.of_user):
                        yield task
                        unit = task.op.value.unit
                        left[unit] -= 1
                        if early and is_last and not left[unit] and unit in updates:
                            yield from _unfinished(before)
                            begun += self._issue([updates.pop(unit)], "update", step, number + 1)
                    number += 1
            marks.append((self._now, self._waited))
            self._waited = 0.0
            yield from _unfinished(before)
            self._issue(phases["norm"].ops[-1:], "norm", step, number)
            begun += self._issue(list(updates.values()), "update", step, number)
            if self._host_seconds:
                yield self._host_seconds

    def _advance(self, user: Iterator[_Task | float]) -> None:
        """Resume the user's thread until it blocks."""
        action = next(user, None)
        if isinstance(action, _Task):
            self._blocked_on, self._since = action, self._now
        elif action is not None:
            self._serial += 1
            heapq.heappush(self._events, (self._now + action, self._serial, None))

    def _issue(self, ops: Sequence[Op], phase: str, step: int, number: int) -> list[_Task]:
        """Queue the ops of a phase."""
        tasks = list[_Task]()
        for op in ops:
            reads, writes, pieces = self._template(op)
            # They include the compiled ones of the phase: one rule, see [Note: Phases] of `ops`.
            waits, ends = self._board.waits(reads, writes), list[Task]()
            for piece in pieces:
                last = waits
                for one, seconds in piece:
                    if piece is pieces[-1] and one is piece[-1][0]:
                        last = [*last, *ends]
                    self._serial += 1
                    task = _Task(one, (number, op.deadline), self._serial)
                    task.phase, task.step, task.seconds = phase, step, seconds
                    task.of_user = one.verb in _COMPUTES
                    if len(piece) > 1 or len(pieces) > 1:
                        task.takes_slot, task.frees_slot = one is piece[0][0], one is piece[-1][0]
                        task.at_once = not task.takes_slot and piece[0][0].lane is Lane.DISK
                    self._schedule.add(task, last)
                    tasks.append(task)
                    last = [task]
                ends += last
            self._board.note(task, reads, writes)
        return tasks

    def _template(self, op: Op) -> tuple[list[object], list[object], list[_Piece]]:
        """The cells that an op reads and writes, and the pieces in which it is done."""
        if id(op) not in self._templates:
            plan, (before, after) = self._program.plan, parts_of(self._program.plan, op)
            ops = [one for one in (*before, op, *after) if one is op or self._moves(one)]
            count, beside = 1, op.lane is Lane.CPU and not self._machine.device_is_cpu
            if len(ops) > 1 or (op.verb in STREAMED and beside):
                chunks = len(plan.profile.units[op.value.unit].chunks)
                count = max(1, min(chunks, plan.profile.chunk_stages))
            pieces = [[self._cut(one, at, count) for one in ops] for at in range(count)]
            self._templates[id(op)] = list(cells(op.reads)), list(cells(op.writes)), pieces
        return self._templates[id(op)]

    def _cut(self, op: Op, at: int, count: int) -> tuple[Op, float]:
        """One of so many pieces of an op, and its seconds."""
        if count > 1:
            op = replace(op, bytes=op.bytes * (at + 1) // count - op.bytes * at // count)
        if op.verb is Verb.COLLECT:
            return op, 0.0  # A part of the backward that makes the gradient, and no span.
        if op.verb in _COMPUTES:
            return op, self._compute(op.value.unit, op.verb)
        return op, seconds_of(op, self._machine, self._ranks)

    def _moves(self, part: Op) -> bool:
        """Whether a part of an op is a move on this machine: a host reaches all memory."""
        return part.lane is Lane.DISK or not self._machine.device_is_cpu

    # -- the lanes

    def _dispatch(self) -> None:
        """Start the most urgent ready op of the user's thread and of every free lane."""
        task = self._blocked_on
        if task is not None and self._may_compute(task):
            self._unblock()
            task.go(State.RUNNING)
            self._begin(task)
        for lane, taken in self._taken.items():
            while self._may_take(lane) and (first := self._schedule.take(lane)):
                assert isinstance(first, _Task)
                taken.append(first)
            if taken and lane not in self._running:
                self._begin(taken[0])

    def _may_take(self, lane: Lane) -> bool:
        """Whether a lane takes one more: what it has taken nothing overtakes."""
        if lane is Lane.DISK:
            return sum(task.op.bytes for task in self._taken[lane]) < FLYING_BYTES_MAX
        return not self._taken[lane] and lane not in self._running

    def _may_compute(self, task: _Task) -> bool:
        """Whether the user's thread may compute `task` now."""
        if not task.of_user or task.state is not State.READY:
            return False
        if self._machine.device_is_cpu:
            return True
        first = self._schedule.first(Lane.COMPUTE)
        ahead = first is not None and (first.key, first.serial) < (task.key, task.serial)
        return Lane.COMPUTE not in self._running and not ahead

    def _begin(self, task: _Task) -> None:
        """Run a task from now on; on a CPU device the user's thread is beside the compute lane."""
        beside = task.of_user and self._machine.device_is_cpu
        self._running["user" if beside else task.op.lane] = task
        task.start, task.left = self._now, task.seconds
        self._go_on(task, 1.0)
        self._share(task)

    def _go_on(self, task: _Task, pace: float) -> None:
        """Do what is left of a task at a pace; 1 is that of a task alone."""
        task.since, task.pace, task.stop = self._now, pace, self._now + task.left / pace
        heapq.heappush(self._events, (task.stop, task.serial, task))

    def _share(self, changed: _Task) -> None:
        """Share PCIe between a collective and copies, of which one has begun or ended."""
        machine, capacity = self._machine, self._machine.pcie_bytes_per_s
        if not capacity or machine.nodes == 1 or changed.op.lane not in _PCIE:
            return
        tasks = {lane: self._running[lane] for lane in _PCIE if lane in self._running}
        paces = dict.fromkeys(tasks, 1.0)
        for copy in [lane for lane in tasks if Lane.COMM in tasks and lane is not Lane.COMM]:
            both = [self._crosses(tasks[lane]) / capacity for lane in (Lane.COMM, copy)]
            pace, paces[copy] = _paces(*both)
            paces[Lane.COMM] = min(paces[Lane.COMM], pace)
        for lane, task in tasks.items():
            if paces[lane] != task.pace:
                task.left = max(0.0, task.left - (self._now - task.since) * task.pace)
                self._go_on(task, paces[lane])

    def _crosses(self, task: _Task) -> float:
        """Bytes a second that a task alone has cross PCIe, in each direction."""
        size: float = task.op.bytes
        if task.op.lane is Lane.COMM:
            sums = task.op.verb is Verb.EXCHANGE
            size = self._machine.axes(task.op.bytes, self._ranks, sums=sums)[1]
        return size / task.seconds if task.seconds else 0.0

    def _unblock(self) -> None:
        self._blocked_on = None
        self._waited += self._now - self._since

    def _finish(self, task: _Task) -> bool:
        """End an op. Returns whether that resumes the user's thread."""
        self._schedule.finish(task)
        task.stop = -1.0  # It ends once, whatever ends are still in the list.
        self._running = {by: one for by, one in self._running.items() if one is not task}
        if not task.of_user:
            self._taken[task.op.lane].popleft()
        if task.op.verb is not Verb.COLLECT:
            span = Span(task.op.lane, task.op, task.phase, task.step, task.start, self._now)
            self._spans.append(span)
        self._share(task)
        if task is self._blocked_on:
            self._unblock()
            return True
        return task.of_user


def _paces(one: float, other: float) -> tuple[float, float]:
    """The paces of two that want such parts of what they share, fairly: none waits for less than
    half of it."""
    if one + other <= 1:
        return 1.0, 1.0
    mine = min(one, max(0.5, 1 - other))
    return mine / one, min(1.0, (1 - mine) / other)


def _unfinished(tasks: list[_Task]) -> Iterator[_Task]:
    """The `tasks` that are not over, each looked at when the one before is over, none left."""
    yield from (task for task in tasks if not task.over)
    tasks.clear()
