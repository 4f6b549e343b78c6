"""The lanes: one thread each, running what may start, the earliest deadline first.

What may start, and which goes first, says `Schedule`. When an op fails, or a lane in any other way,
or the bookkeeping of either side, nothing more is started, every blocked wait ends, and the next
call raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from offload.books import Books
from offload.device import Device
from offload.program import Lane, Op
from offload.schedule import Schedule
from offload.task import Key, Passage, Run, State, Task
from offload.trace import Ran, Stepped, Trace, Waited

HISTORY_MAX = 16
"""How many tasks back a wait is traced to the lanes that caused it: an update is three or more on
the way through the tiers, and waits for a slot that another chunk had."""


def _nothing(*_: Any) -> None:
    """Done after closing unless there is more to do; stands in for what a task has run, too."""


class EngineError(RuntimeError):
    """A lane failed; `__cause__` is what it met. Training cannot go on with this engine."""


@dataclass(slots=True)
class LaneUse:
    """What a lane has done so far."""

    busy_s: float = 0.0
    exposed_s: float = 0.0
    """Time that the user's thread was blocked and this lane was the reason."""
    bytes: int = 0
    operations: int = 0


class Lanes:
    """All lanes of an engine."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        device: Device,
        pace: Callable[[Op], float] | None = None,
        trace: Trace | None = None,
    ):
        """Start a thread for each of `lanes`.

        Args:
            lanes: those that have ops.
            device: the compute device; each thread works on it, on a stream of its own.
            pace: least seconds that an op takes, for tests that imitate slower hardware.
            trace: where to record what is done.

        Raises:
            EngineError: a lane could not prepare itself; with what it met as its cause.
        """
        self._books = Books(lanes, self.fail)
        self._lock = self._books.lock
        self._changed = threading.Condition(self._lock)
        self._blocked = 0
        """Threads that wait for `_changed`."""
        self._schedule = Schedule(self._on_ready)
        self._pace = pace
        self._trace = trace
        self._device = device
        self._serial = 0
        self._closing = False
        self._failure: BaseException | None = None
        self.use: dict[Lane, LaneUse] = {lane: LaneUse() for lane in Lane if lane != Lane.COMM}
        intra_op_threads = torch.get_num_threads()
        self._threads = [
            threading.Thread(
                target=self._work, args=(lane,), name=f"offload-{lane.value}", daemon=True
            )
            for lane in lanes
        ]
        started = threading.Barrier(len(lanes) + 1)
        self._started = started
        try:
            for thread in self._threads:
                thread.start()
            started.wait()
        except BaseException:
            started.abort()
            self.close()
            if self._failure is None:
                raise  # A thread that could not start, or Ctrl-C.
            raise EngineError(
                f"a lane of the offload engine could not start: {self._failure}"
            ) from self._failure
        finally:
            # A lane set this to one for itself, which new threads would inherit.
            torch.set_num_threads(intra_op_threads)

    # -- submitting ---------------------------------------------------------------------------

    def submit(
        self,
        op: Op,
        waits: Iterable[Task],
        key: Key,
        run: Run | None = None,
        passage: Passage | None = None,
    ) -> Task:
        """Queue an op behind `waits`; without `run` it is the user's own compute.

        With `passage` it is one of the ops of a chunk, and starts after `seal`.
        """
        with self._lock, self._books:
            self._serial += 1
            task = Task(op, run, key, self._serial, passage)
            self._schedule.add(task, waits)
        return task

    def seal(self, passage: Passage) -> None:
        """All ops of `passage` are queued: let it start."""
        with self._lock, self._books:
            self._schedule.seal(passage)

    def cancel(self, tasks: Iterable[Task]) -> None:
        """Take back those of `tasks` that have not begun."""
        with self._lock, self._books:
            for task in tasks:
                if task.state in (State.WAITING, State.READY):
                    self._schedule.cancel(task)
            self._tell()

    def fail(self, error: BaseException) -> None:
        """Start nothing more, end every wait with `error`: the first one told is the failure."""
        with self._lock:
            self._failure = self._failure or error
            self._changed.notify_all()

    # -- the user's thread --------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a lane has failed.

        Raises:
            EngineError: with the lane's error as its cause.
        """
        if self._failure is not None:
            raise EngineError(
                f"a lane of the offload engine failed: {self._failure}. The weights in memory "
                "are not those of a finished step; start again from the last checkpoint"
            ) from self._failure

    def begin(self, task: Task) -> None:
        """Block until the user's compute `task` may start, and start it."""
        if task.state is State.WAITING or self._failure is not None:
            self._block(task, lambda: task.state is not State.WAITING)
        for fence in task.fences:
            fence.wait()
        task.streams = [] if self._device.is_host else [self._device.stream()]
        task.go(State.RUNNING)  # Without the lock: what the user may begin no lane touches.
        task.began_at = time.perf_counter()

    def join(self, task: Task) -> None:
        """The user's compute `task`, which has begun, goes on on the current stream as well."""
        if not self._device.is_host and (stream := self._device.stream()) not in task.streams:
            for fence in task.fences:
                fence.wait()
            task.streams.append(stream)

    def finish(self, task: Task) -> None:
        """The user's compute `task` is over (on the host; the device may have work left)."""
        self.join(task)
        fences = [self._device.fence(stream) for stream in task.streams]
        with self._lock, self._books:
            task.fences = [fence for fence in fences if fence is not None]
            self._finish(task)
            if self._trace is not None:
                now = time.perf_counter()
                self._trace.ran.append(Ran(task.op.lane, task.op, task.began_at, now))

    def wait(self, tasks: Iterable[Task]) -> None:
        """Block until all `tasks` are over, on the device too.

        Raises:
            EngineError: a lane failed, now or before.
        """
        for task in tasks:
            if not task.over:
                self._block(task, lambda task=task: task.over)  # type: ignore[misc]
            for fence in task.fences:
                fence.synchronize()
        self.check()

    def _block(self, task: Task, over: Callable[[], bool]) -> None:
        self.check()
        if over():
            return
        since = time.perf_counter()
        with self._changed:
            self._blocked += 1
            try:
                while not over() and self._failure is None and not self._closing:
                    self._changed.wait(0.1)
            finally:
                self._blocked -= 1
        self._blame(task, since)
        self.check()
        if not over():
            raise EngineError("the offload engine was closed while it was in use")

    def _blame(self, task: Task, since: float) -> None:
        """Book the time since `since` on the lanes that led to `task`, latest first."""
        until = time.perf_counter()
        own = () if task.run is None else ((task.op.lane, task.ready_at),)
        for lane, ready_at in (*own, *task.history):
            begin = max(ready_at, since)
            if until > begin:
                self._expose(lane, begin, until)
                until = begin
        if until > since and task.history:
            self._expose(task.history[-1][0], since, until)

    def count(self, op: Op, since: float) -> float:
        """Book what `op` has done since then on its lane, whoever did it. Returns the time."""
        use, now = self.use[op.lane], time.perf_counter()
        use.busy_s += now - since
        use.bytes += op.bytes
        use.operations += 1
        return now

    def _expose(self, lane: Lane, since: float, until: float) -> None:
        self.use[lane].exposed_s += until - since
        if self._trace is not None:
            self._trace.waited.append(Waited(lane, since, until))

    def close(self, then: Callable[[], None] = _nothing) -> None:
        """Stop all lanes after what they are running, drop what has not begun, then do `then`.

        Called by the garbage collector in a lane itself it lets another thread do all that: the
        lane may hold the lock, and cannot wait for its own end.
        """
        if threading.current_thread() in self._threads:
            self._closing = True
            threading.Thread(
                target=self.close, args=(then,), name="offload-close", daemon=True
            ).start()
            return
        with self._lock:
            self._closing = True
            self._books.wake_all()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # Else it never started.
                thread.join()
        then()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context: what is queued inside is made known to the lanes at its end."""
        with self._lock, self._books:
            yield

    def stepped(self, number: int, misses: int) -> None:
        """The user's `step()` was called, for the `number`-th time."""
        if self._trace is not None:
            self._trace.stepped.append(Stepped(number, time.perf_counter(), misses))

    @property
    def traces(self) -> bool:
        """Whether what is done is recorded."""
        return self._trace is not None

    def note(self, op: Op, start: float, stop: float) -> None:
        """Something of the user's own, that waited for nothing, has run."""
        with self._lock:
            if self._trace is not None:
                self._trace.ran.append(Ran(op.lane, op, start, stop))

    def traced(self) -> Trace | None:
        """What was recorded so far; None where nothing is."""
        with self._lock:
            return None if self._trace is None else self._trace.copy()

    # -- the lane threads ---------------------------------------------------------------------

    def _work(self, lane: Lane) -> None:
        """The life of a lane. Whatever ends it early is told to all who wait, and never lost."""
        try:
            self._prepare()
            self._started.wait()
            with torch.no_grad():
                while (task := self._next(lane)) is not None:
                    self._run(lane, task)
        except threading.BrokenBarrierError:
            pass  # Another lane could not start.
        except BaseException as error:
            self.fail(error)
            self._started.abort()

    def _prepare(self) -> None:
        """Set this thread up for its lane."""
        torch.get_num_threads()  # A thread's first call takes over the number of the process.
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        self._device.enter()

    def _next(self, lane: Lane) -> Task | None:
        """Begin the most urgent task of `lane` as soon as there is one; None at the end.

        Where the device is ready for none of those that are, it waits for the first of them.
        """
        with self._lock:
            while not self._closing:
                task = None if self._failure is not None else self._schedule.take(lane)
                if task is not None:
                    return task
                self._books.sleep(lane)
            return None

    def _run(self, lane: Lane, task: Task) -> None:
        start = time.perf_counter()
        error: BaseException | None = None
        assert task.run is not None
        try:
            for fence in task.fences:
                fence.synchronize()
            work = task.run()
            if isinstance(work, Iterator):
                for _ in work:
                    start += self._let_pass(lane, task)
            self._device.drain()
            if self._pace is not None:
                time.sleep(max(0.0, start + self._pace(task.op) - time.perf_counter()))
        except BaseException as caught:
            error = caught
        with self._lock, self._books:
            now = self.count(task.op, start)
            task.run, task.fences = _nothing, []  # What its function held can go.
            if error is not None:
                self.fail(error)
                return
            self._finish(task)
            if self._trace is not None:
                self._trace.ran.append(Ran(lane, task.op, start, now))

    def _let_pass(self, lane: Lane, task: Task) -> float:
        """Between two pieces of `task`: do what is more urgent; the seconds that it took."""
        since = time.perf_counter()
        while (other := self._overtaking(lane, task)) is not None:
            self._run(lane, other)
        return time.perf_counter() - since

    def _overtaking(self, lane: Lane, task: Task) -> Task | None:
        """Begin what may start at once and is more urgent than `task`, if there is any."""
        with self._lock:
            other = self._schedule.first(lane)
            if other is None or other.key >= task.key or self._closing or self._failure is not None:
                return None
            return None if other.fenced else self._schedule.take(lane)

    # -- under the lock -----------------------------------------------------------------------

    def _finish(self, task: Task) -> None:
        self._schedule.finish(task)
        self._tell()

    def _tell(self) -> None:
        """Let who is blocked look again."""
        if self._blocked:
            self._changed.notify_all()

    def _on_ready(self, task: Task, last: Task | None) -> None:
        """Let the lane, or the user's thread, know of a task that is ready."""
        if not task.ready_at:
            task.ready_at = time.perf_counter()
            if last is not None and last.run is not None:
                task.history = ((last.op.lane, last.ready_at), *last.history[: HISTORY_MAX - 1])
        if task.run is not None:
            self._books.ready(task)
        elif self._blocked:
            self._changed.notify_all()
