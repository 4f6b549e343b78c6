"""All that is queued on the lanes, under one lock, and who is woken when it is let go.

[Note: Books]
Tasks are queued, begun and ended under one lock. Who makes one ready wakes its lane, which goes on
when the lock is let go.

[Note: Compiled books]
The books are kept in C++ (`src`) where the compiler was there and the device is the host, or one
that they have a driver for, but for `OFFLOAD_BOOKS=python`: the same order of starts and the same
waits, which a test holds against those here for random ops. Lanes then wait without the GIL and do
their works without Python ([Note: Native work] of `native_work`), so the user's thread pays for one
only when it is queued; a small copy it does itself where the lane sleeps, as waking it takes as
long.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

from cpu_adam.choice import kernel, require_version
from offload.planning.layout import CHUNK_STAGES
from offload.planning.tiers import Tier
from offload.program.ops import OF_USER, Lane, Op, part_of
from offload.program.schedule import Schedule, Scoreboard, State, Task, Work
from offload.runtime.device import Fence
from offload.runtime.trace import SPANS_MAX, Ran

HISTORY_MAX = 16
"""How many tasks back a wait is traced to the lanes that caused it: a gradient on its way home, the
update that waits for it, and the fetch of the weights are several, and wait for others."""


@dataclass(frozen=True, slots=True)
class Known:
    """An op that comes again, with what does not change from one time to the next."""

    op: Op
    reads: Sequence[object]
    writes: Sequence[object]
    """The cells that it reads and writes, see `program.cells`."""
    work: Work | None = None


class Books:
    """The books of some lanes, by `Schedule` and `Scoreboard`."""

    def __init__(self, lanes: Iterable[Lane]):
        """Of these lanes."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Told when something has come that somebody is blocked by."""
        self._serial = 0
        self._schedule = Schedule(self._on_ready)
        self._board: Scoreboard[Task] = Scoreboard(
            taken_back=attrgetter("cancelled"),
            fixed=attrgetter("begun"),
            settled=attrgetter("over"),
        )
        self.touching, self.all = self._board.waits, self._board.all
        """Whom an op with these cells would have to wait for; who has any place."""
        self._begun: dict[Lane, list[Task]] = {lane: [] for lane in Lane}
        """Tasks of a lane that are begun, and parts of them not."""
        self._wake = {lane: threading.Condition(self.lock) for lane in lanes}
        self._stopped = self._closing = False
        self._ending: SimpleQueue[Any] = SimpleQueue()
        """The user's computes that the device has still to finish, with fences; None at the end."""

    # -- tasks --------------------------------------------------------------------------------

    know = Known
    """Writes an op down, to be issued any number of times; without work it is the user's."""

    def issue(self, ops: Sequence[Known], number: int, settings: object = None) -> list[Task]:
        """Queue ops of the pass of that number, each behind those that touched its cells before.

        Their works are given `settings`.
        """
        tasks = list[Task]()
        with self.lock:
            for one in ops:
                self._serial += 1
                key = number, one.op.deadline
                task = Task(one.op, one.work, key, self._serial, settings)
                self._schedule.add(task, self._board.waits(one.reads, one.writes))
                self._board.note(task, one.reads, one.writes)
                tasks.append(task)
        return tasks

    def cancel(self, tasks: Iterable[Task]) -> None:
        """Take back those of `tasks` that have not begun."""
        with self.lock:
            for task in tasks:
                if task.state in (State.WAITING, State.READY):
                    self._schedule.cancel(task)
            self.changed.notify_all()

    def begin(self, task: Task, seconds: float) -> bool:
        """Begin the user's `task` once it is ready; False where it is not within `seconds`."""
        assert task.state in (State.WAITING, State.READY), (
            "a task begins once, if it is not taken back"
        )
        if task.state is State.WAITING and seconds:
            self._wait(lambda: task.state is not State.WAITING, seconds)
        if task.state is not State.READY or self._stopped:
            return False
        task.go(State.RUNNING)  # Without the lock: what the user may begin no lane touches.
        task.began_at = time.perf_counter()
        return True

    def finish(self, task: Task) -> None:
        """`task`, or a part of it, is done."""
        with self.lock:
            task.open -= 1
            if not task.open:
                self._schedule.finish(task)
                if task.work is not None:  # What it held can go.
                    task.work, task.settings = lambda _: None, None
                self.changed.notify_all()

    def finish_later(self, task: Task, fences: Sequence[Fence]) -> None:
        """The user's `task` is done when the device has come to these."""
        task.ended_at = time.perf_counter()
        self._ending.put((task, fences))

    def end(self) -> None:
        """The life of the thread that waits for that, until the books are closed."""
        while (one := self._ending.get()) is not None:
            for fence in one[1]:
                fence.synchronize()
            self.finish(one[0])

    def over(self, task: Task, seconds: float) -> bool:
        """Whether `task` is over, within `seconds`."""
        if not task.over and seconds:
            self._wait(lambda: task.over, seconds)
        return task.over

    def path(self, task: Task) -> list[tuple[Lane, float]]:
        """The lanes that led to `task`, latest first, each with the time since when it could."""
        return [*_lane_of(task), *task.history]

    # -- lanes --------------------------------------------------------------------------------

    def take(self, lane: Lane) -> tuple[Task, Op, Callable[[], object]] | None:
        """Begin the most urgent task of `lane` as soon as there is one, or the next part of one
        that is begun; None at the end. With it the op, with the bytes of the part, and the work
        with its settings."""
        with self.lock:
            while not self._closing:
                task = None if self._stopped else self._next(lane)
                if task is not None:
                    share = task.op.bytes // len(getattr(task.work, "parts", [task.work]))
                    part = partial(task.parts.pop(), task.settings)
                    return task, replace(task.op, bytes=share), part
                self._wake[lane].wait()
            return None

    def _next(self, lane: Lane) -> Task | None:
        """The task of which a part begins."""
        first, begun = self._schedule.first(lane), self._begun[lane]
        begun[:] = [task for task in begun if task.parts]
        task = min([*begun, *([first] if first else [])], key=attrgetter("key"), default=None)
        if task is not None and task is first:
            self._schedule.take(lane)
            task.parts = list(getattr(task.work, "parts", [task.work]))[::-1]
            task.open = len(task.parts)
            begun.append(task)
            self._wake[lane].notify_all()
        return task

    def used(self, lane: Lane) -> tuple[float, int, int]:
        """Seconds, bytes and number of works that a lane has done on its own since last asked."""
        return 0.0, 0, 0

    def ran(self) -> list[Ran]:
        """The last of those, and of the user's computes, since that was asked, as they ended."""
        return []

    def stop(self, *, closing: bool) -> None:
        """Start nothing more and end all waits; with `closing`, those of the lanes too."""
        with self.lock:
            self._stopped = True
            self._closing = self._closing or closing
            for wake in self._wake.values() if closing else ():
                wake.notify_all()
            self.changed.notify_all()
        if closing:
            self._ending.put(None)

    def _wait(self, come: Callable[[], bool], seconds: float) -> None:
        """Wait once at most for something to change, unless what is awaited has come."""
        with self.lock:
            if not come() and not self._stopped:
                self.changed.wait(seconds)

    def _on_ready(self, task: Task, last: Task | None) -> None:
        """Let the lane, or the user's thread, know of a task that is ready."""
        if not task.ready_at:
            task.ready_at = time.perf_counter()
            if last is not None and (lane := _lane_of(last)):
                task.history = (*lane, *last.history)[:HISTORY_MAX]
        if task.work is not None:
            self._wake[task.op.lane].notify()
        else:
            self.changed.notify_all()


def _lane_of(task: Task) -> tuple[tuple[Lane, float], ...]:
    """The lane that does a task, and since when it could; none while the user computes it."""
    if task.work is not None:  # A stream is the drive's, whatever lane computes.
        on_drive = any(use.place.tier == "nvme" for use in task.op.reads)
        return ((Lane.DISK if on_drive else task.op.lane, task.ready_at),)
    return ((Lane.COMPUTE, task.ended_at),) if task.ended_at else ()


BOOKS_VARIABLE = "OFFLOAD_BOOKS"
"""Environment variable: `python` keeps the books in Python, the reference, where those in C++ could
serve."""

BOOKS_VERSION = 7
"""Of the compiled books, as `src/module.cpp` has it."""

_LANES = tuple(Lane)
NUMBER = {lane: number for number, lane in enumerate(_LANES)}
"""Of each lane, in the compiled books."""

WAYS: tuple[tuple[Tier, Tier], ...] = (
    ("cpu", "cpu"),
    ("nvme", "cpu"),
    ("cpu", "nvme"),
    ("device", "cpu"),
    ("cpu", "device"),
)
"""Of the parts that compiled lanes tell of (`Part` in src/task.h): no way, and those in which a
stream moves what it works on."""

_native: Any = None
"""The extension; None where it is not compiled, and the reference serves."""

with contextlib.suppress(ImportError):
    _found = importlib.import_module("offload.runtime._books")
    require_version(_found, BOOKS_VERSION)
    _native = _found


class CompiledBooks:
    """The books of all lanes; see `Books` for what each call does."""

    def __init__(self, kept: int = SPANS_MAX, driver: Any = None) -> None:
        """Nothing is queued; of what has run, remember the last so many."""
        disk = NUMBER[Lane.DISK]
        self._books = books = _native.Books(len(_LANES), disk, CHUNK_STAGES, kept, driver)
        self._numbers: dict[object, int] = {}
        """Of every place."""
        self.issue, self.cancel = books.issue, books.cancel
        self.begin, self.over = books.begin, books.over
        self.finish: Callable[..., None] = books.finish
        self.finish_later, self.end = books.finish_later, books.end
        self.all, self.stop = books.all, books.stop

    def know(
        self,
        op: Op,
        reads: Iterable[object],
        writes: Iterable[object],
        work: Any = None,
    ) -> Any:
        """Write an op down; `work` is an object of C++, or what Python is to do."""
        cells, of_user = (self._numbered(reads), self._numbered(writes)), op.verb in OF_USER
        return _native.make_known(NUMBER[op.lane], op.deadline, op.bytes, op, work, *cells, of_user)

    def _numbered(self, names: Iterable[object]) -> list[int]:
        return [self._numbers.setdefault(one, len(self._numbers)) for one in names]

    def touching(self, reads: Iterable[object], writes: Iterable[object]) -> Any:
        """Whom an op with these cells would have to wait for."""
        return self._books.touching(self._numbered(reads), self._numbered(writes))

    def path(self, task: Task) -> list[tuple[Lane, float]]:
        """The lanes that led to `task`, latest first."""
        _, _, path = self._books.look(task)
        return [(_LANES[number], since) for number, since in path]

    def look(self, task: Task) -> Any:
        """Its urgency, and the serial numbers of those that it waits for."""
        return self._books.look(task)[:2]

    def first(self, lane: Lane, *, wait: bool = False) -> Any:
        """Begin the most urgent task of `lane` that is Python's, with `wait` as soon as there is
        one."""
        return self._books.take(NUMBER[lane], wait)

    def take(self, lane: Lane) -> tuple[Any, Op, Callable[[], object]] | None:
        """See `Books.take`; what needs no Python the lane does itself meanwhile."""
        task = self.first(lane, wait=True)
        if task is None:
            return None
        op, work, settings = self._books.call(task)
        return task, op, partial(work, settings)

    def used(self, lane: Lane) -> Any:
        """What a lane has done on its own."""
        return self._books.used(NUMBER[lane])

    def ran(self) -> list[Ran]:
        """The last works and computes of the user since that was asked."""
        found = []
        for op, part, size, start, stop in self._books.ran():
            one = part_of(op, size, *WAYS[part]) if part else replace(op, bytes=size)
            found.append(Ran(one.lane, one, start, stop))
        return found


def native_books() -> Any:
    """The extension of the compiled books; None where they, or the kernels, are not to serve."""
    chosen = os.environ.get(BOOKS_VARIABLE) != "python" and kernel().native is not None
    return _native if chosen else None
