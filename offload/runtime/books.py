"""All that is queued on the lanes, under one lock, and who is woken when it is let go.

[Note: Books]
Tasks are queued, begun and ended under one lock. When it is let go, lanes that have something to
do are woken: each once, however much was queued for it, as a lane that wakes takes the GIL from who
queues. What is raised under the lock leaves the books half written, and ends everything.

[Note: Compiled books]
The books are kept in C++ (`src`) where the compiler was there and the device is the host,
but for `OFFLOAD_BOOKS=python`: the same order of starts and the same waits, which a test holds
against those here for random ops. Lanes then wait without the GIL and do their works without Python
([Note: Native work] of `native_work`), so the user's thread pays for one only when it is queued; a
small copy it does itself where the lane sleeps, as waking it takes as long. Fences of a device are
Python's, so its books are.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from cpu_adam.choice import require_version
from offload.planning.layout import CHUNK_STAGES
from offload.program.ops import OF_USER, Lane, Op
from offload.program.schedule import Fence, Passage, Run, Schedule, Scoreboard, State, Task
from offload.runtime.trace import SPANS_MAX, Ran

HISTORY_MAX = 16
"""How many tasks back a wait is traced to the lanes that caused it: an update is three or more on
the way through the tiers, and waits for a slot that another chunk had."""


@dataclass(frozen=True, slots=True)
class Known:
    """An op that may come again in every pass, with what does not change from one to the next."""

    op: Op
    run: Run | None
    """What it does, where that is always the same."""
    booked: Any
    """What the books keep of it: here the cells that it reads and those that it writes, see
    `program.cells`; an object of C++ in the compiled ones."""
    ready: bool
    """Whether it may be issued without a `run`: it has one, its lane does it on its own, or it is
    the user's own compute."""


class Books:
    """The books of some lanes, by `Schedule` and `Scoreboard`."""

    native: Any = None
    """The extension whose lanes do works by themselves; what they and the user's computes did is
    then told by `used` and `ran`."""

    def __init__(self, lanes: Iterable[Lane], fail: Callable[[BaseException], None]):
        """Of these lanes; `fail` ends everything with an error."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Told when something has come that somebody is blocked by."""
        self._fail = fail
        self._depth = self._serial = 0
        self._blocked = 0
        """Threads that wait for `changed`."""
        self._schedule = Schedule(self._on_ready)
        self._board: Scoreboard[Task] = Scoreboard(
            taken_back=attrgetter("cancelled"),
            fixed=attrgetter("begun"),
            settled=attrgetter("settled"),
        )
        self._wake = {lane: threading.Condition(self.lock) for lane in lanes}
        self._woken: set[Lane] = set()
        """Lanes that are to be told that they have something to do."""
        self._stopped = self._closing = False

    # -- tasks --------------------------------------------------------------------------------

    def passage(self) -> Passage:
        """A new passage, to be given to `submit` and then to `seal`."""
        return Passage()

    def know(
        self,
        op: Op,
        reads: Sequence[object],
        writes: Sequence[object],
        run: Run | None = None,
        work: Any = None,
    ) -> Known:
        """Write an op down, to be issued any number of times; see `program.cells`."""
        ready = run is not None or op.verb in OF_USER
        return Known(op, run, (reads, writes), ready)

    def issue(
        self, known: Known, number: int, run: Run | None, passage: Passage | None = None
    ) -> Task:
        """Queue an op of the pass of that number behind those that touched its cells before.

        Without `run` it is the user's own compute, or what its lane does on its own.
        """
        (reads, writes), op = known.booked, known.op
        with self.lock, self:
            self._serial += 1
            task = Task(op, run, (number, op.deadline), self._serial, passage)
            self._schedule.add(task, self._board.waits(reads, writes))
            self._board.note(task, reads, writes)
        return task

    def issue_all(
        self, known: Sequence[Known], number: int, runs: Sequence[Run | None]
    ) -> list[Task]:
        """The same for several."""
        return [self.issue(one, number, run) for one, run in zip(known, runs)]

    def touching(self, reads: Sequence[object], writes: Sequence[object]) -> list[Task]:
        """Whom an op with these cells would have to wait for."""
        return self._board.waits(reads, writes)

    def all(self) -> list[Task]:
        """Tasks to wait for before anybody else has the places."""
        return self._board.all()

    def seal(self, passage: Passage) -> None:
        """All ops of `passage` are queued: let it start."""
        with self.lock, self:
            self._schedule.seal(passage)

    def cancel(self, tasks: Iterable[Task]) -> None:
        """Take back those of `tasks` that have not begun."""
        with self.lock, self:
            for task in tasks:
                if task.state in (State.WAITING, State.READY):
                    self._schedule.cancel(task)
            self._tell()

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

    def finish(self, task: Task, fences: Sequence[Fence] = ()) -> None:
        """`task` is done, on the device when `fences` are through."""
        with self.lock, self:
            task.fences = list(fences)
            self._schedule.finish(task)
            self._tell()

    def over(self, task: Task, seconds: float) -> bool:
        """Whether `task` is over, within `seconds`."""
        if not task.over and seconds:
            self._wait(lambda: task.over, seconds)
        return task.over

    def path(self, task: Task) -> list[tuple[Lane, float]]:
        """The lanes that led to `task`, latest first, each with the time since when it could."""
        own = [] if task.run is None else [(task.op.lane, task.ready_at)]
        return [*own, *task.history]

    # -- lanes --------------------------------------------------------------------------------

    def take(self, lane: Lane) -> Task | None:
        """Begin the most urgent task of `lane` as soon as there is one; None at the end.

        Where the device is ready for none of those that are, it waits for the first of them.
        """
        with self.lock:
            while not self._closing:
                task = None if self._stopped else self._schedule.take(lane)
                if task is not None:
                    return task
                self._wake[lane].wait()
            return None

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

    def forget(self) -> None:
        """Let go of all tasks, once no lane runs any more."""

    # -- the lock -----------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context: what is queued inside is made known to the lanes at its end."""
        with self.lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._wake_lanes()

    def __enter__(self) -> None:
        """With the lock held: `with books.lock, books`.

        The lock's own context is not Python's: no Ctrl-C can come between taking it and having to
        let it go.
        """
        self._depth += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._fail(error)
        finally:
            self._depth -= 1
            self._wake_lanes()

    def _wake_lanes(self) -> None:
        while not self._depth and self._woken:
            self._wake[self._woken.pop()].notify()

    def _wait(self, come: Callable[[], bool], seconds: float) -> None:
        """Wait once at most for something to change, unless what is awaited has come."""
        with self.lock:
            self._blocked += 1
            try:
                if not come() and not self._stopped:
                    self.changed.wait(seconds)
            finally:
                self._blocked -= 1

    def _tell(self) -> None:
        """Let who is blocked look again."""
        if self._blocked:
            self.changed.notify_all()

    def _on_ready(self, task: Task, last: Task | None) -> None:
        """Let the lane, or the user's thread, know of a task that is ready."""
        if not task.ready_at:
            task.ready_at = time.perf_counter()
            if last is not None and last.run is not None:
                task.history = ((last.op.lane, last.ready_at), *last.history[: HISTORY_MAX - 1])
        if task.run is not None:
            self._woken.add(task.op.lane)
        else:
            self._tell()


BOOKS_VARIABLE = "OFFLOAD_BOOKS"
"""Environment variable: `python` keeps the books in Python, the reference, where those in C++ could
serve."""

BOOKS_VERSION = 2
"""Of the compiled books, as `src/module.cpp` has it."""

_LANES = tuple(Lane)
_NUMBER = {lane: number for number, lane in enumerate(_LANES)}

_native: Any = None
"""The extension; None where it is not compiled, and the reference serves."""

with contextlib.suppress(ImportError):
    _found = importlib.import_module("offload.runtime._books")
    require_version(_found, BOOKS_VERSION)
    _native = _found


class CompiledBooks:
    """The books of all lanes; see `Books` for what each call does."""

    native: Any = _native

    def __init__(self, kept: int = SPANS_MAX) -> None:
        """Nothing is queued; of what has run, remember the last so many."""
        self._books = books = _native.Books(len(_LANES), CHUNK_STAGES, kept)
        self._cells: dict[object, int] = {}
        """The number of every place."""
        self.passage = _native.make_passage
        self.seal, self.cancel = books.seal, books.cancel
        self.begin, self.over = books.begin, books.over
        self.finish: Callable[..., None] = books.finish
        self.all, self.stop, self.forget = books.all, books.stop, books.forget
        self._issue, self._issue_all = books.issue, books.issue_all
        self._issue_chunk = books.issue_chunk

    def know(
        self,
        op: Op,
        reads: Iterable[object],
        writes: Iterable[object],
        run: Run | None = None,
        work: Any = None,
    ) -> Known:
        """Write an op down; `work` its lane does on its own."""
        cells = self._numbers(reads), self._numbers(writes)
        ready = bool(work or run) or op.verb in OF_USER
        booked = _native.make_known(_NUMBER[op.lane], op.deadline, op.bytes, op, work, *cells)
        return Known(op, None if work else run, booked, ready)

    def _numbers(self, cells: Iterable[object]) -> list[int]:
        return [self._cells.setdefault(cell, len(self._cells)) for cell in cells]

    def issue(
        self, known: Known, number: int, run: Run | None, passage: Passage | None = None
    ) -> Any:
        """Queue an op of the pass of that number behind those that touched its cells before."""
        return self._issue(known.booked, number, run, passage)

    def issue_all(self, known: Sequence[Known], number: int, runs: Sequence[Run | None]) -> Any:
        """The same for several, in one call."""
        return self._issue_all([one.booked for one in known], number, list(runs))

    def issue_chunk(
        self, known: Sequence[Known], number: int, settings: Any, *, staged: bool
    ) -> Any:
        """The ops of a chunk, whose works are given `settings`, in one call."""
        return self._issue_chunk([one.booked for one in known], number, staged, settings)

    def touching(self, reads: Iterable[object], writes: Iterable[object]) -> Any:
        """Whom an op with these cells would have to wait for."""
        return self._books.touching(self._numbers(reads), self._numbers(writes))

    def path(self, task: Task) -> list[tuple[Lane, float]]:
        """The lanes that led to `task`, latest first."""
        _, _, path = self._books.look(task)
        return [(_LANES[number], since) for number, since in path]

    def look(self, task: Task) -> Any:
        """Its urgency, and the serial numbers of those that it waits for."""
        return self._books.look(task)[:2]

    def take(self, lane: Lane, *, wait: bool = True) -> Any:
        """Begin the most urgent task of `lane`; without `wait` only if there is one now."""
        return self._books.take(_NUMBER[lane], wait)

    def used(self, lane: Lane) -> Any:
        """What a lane has done on its own."""
        return self._books.used(_NUMBER[lane])

    def ran(self) -> list[Ran]:
        """The last works and computes of the user since that was asked."""
        return [Ran(op.lane, op, start, stop) for op, start, stop in self._books.ran()]

    def together(self) -> AbstractContextManager[None]:
        """Lanes begin at once: those that copy disturb nobody."""
        return nullcontext()


def books_of(
    lanes: Iterable[Lane], fail: Callable[[BaseException], None], kept: int, *, fences: bool
) -> Books | CompiledBooks:
    """The compiled books, or the reference where the device may have `fences`."""
    if not fences and _native is not None and os.environ.get(BOOKS_VARIABLE) != "python":
        return CompiledBooks(kept)
    return Books(lanes, fail)
