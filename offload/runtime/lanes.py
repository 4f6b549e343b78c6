"""The lanes: threads that run what may start, the earliest deadline first.

What may start, and which goes first, say the books. When an op fails, or a lane in any other way,
or the bookkeeping of either side, nothing more is started, every blocked wait ends, and the next
call raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from offload.program.ops import Lane, Op
from offload.program.schedule import Task
from offload.runtime import entry
from offload.runtime.books import Books, CompiledBooks
from offload.runtime.device import Device
from offload.runtime.entry import EngineError
from offload.runtime.trace import LaneUse, Ran, Stepped, Trace, Waited


class LaneStats:
    """What the lanes of an engine have done, and who waited for whom; under a lock of its own."""

    def __init__(self, books: Books | CompiledBooks, device: Device, trace: Trace | None):
        """Nothing is done yet; record in `trace` where given."""
        self._books, self._device, self.trace = books, device, trace
        self._lock = threading.Lock()
        self._counted: dict[Lane, float] = {}
        """By lane, when what was counted last had ended."""
        self._use: dict[Lane, LaneUse] = {lane: LaneUse() for lane in Lane if lane != Lane.COMM}

    @contextmanager
    def waited(self, lane: Lane) -> Iterator[None]:
        """A context: the user's thread waits inside for the device, and `lane` is the reason."""
        since = time.perf_counter()
        try:
            yield
        finally:
            if not self._device.is_host:
                self._expose(lane, since, time.perf_counter())

    def blame(self, task: Task, since: float) -> None:
        """Book the time since `since` on the lanes that led to `task`, latest first."""
        until = time.perf_counter()
        path = self._books.path(task)
        for lane, ready_at in path:
            begin = max(ready_at, since)
            if until > begin:
                self._expose(lane, begin, until)
                until = begin
        if until > since and len(path) > (not task.of_user):
            self._expose(path[-1][0], since, until)

    @property
    def use(self) -> dict[Lane, LaneUse]:
        """What each lane has done so far; it stays what it was when it was asked for."""
        with self._lock:
            for lane, use in self._use.items():
                seconds, moved, operations = self._books.used(lane)
                use.busy_s += seconds
                use.bytes += moved
                use.operations += operations
            return {lane: replace(use) for lane, use in self._use.items()}

    def count(self, op: Op, since: float) -> float:
        """Book what `op` has done since then on its lane, whoever did it. Returns the time."""
        use, now = self._use[op.lane], time.perf_counter()
        with self._lock:  # What threads of a lane do at the same time counts once.
            use.busy_s += max(0.0, now - max(since, self._counted.get(op.lane, 0.0)))
            self._counted[op.lane] = now
            use.bytes += op.bytes
            use.operations += 1
        return now

    def _expose(self, lane: Lane, since: float, until: float) -> None:
        with self._lock:
            self._use[lane].exposed_s += until - since
            if self.trace is not None:
                self.trace.waited.append(Waited(lane, since, until))

    def stepped(self, number: int, misses: int) -> None:
        """The user's `step()` was called, for the `number`-th time."""
        if self.trace is not None:
            with self._lock:
                self.trace.stepped.append(Stepped(number, time.perf_counter(), misses))

    def note(self, op: Op, start: float, stop: float) -> None:
        """An op, or something else of the user's own, has run."""
        if self.trace is not None:
            with self._lock:
                self.trace.ran.append(Ran(op.lane, op, start, stop))

    def traced(self) -> Trace | None:
        """What was recorded so far; None where nothing is."""
        with self._lock:
            if self.trace is None:
                return None
            if found := self._books.ran():
                ran = sorted([*self.trace.ran, *found], key=attrgetter("stop"))
                self.trace.ran.clear()
                self.trace.ran.extend(ran)
            return self.trace.copy()


Pace = Callable[[Op, float], float]
"""When an op that began at that time may end at the earliest, by `time.perf_counter`."""

LOOK_AGAIN_S = 0.1
"""So often whoever is blocked looks whether signals came."""


class Lanes:
    """All lanes of an engine."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        device: Device,
        *,
        pace: Pace | None = None,
        trace: Trace | None = None,
        books: CompiledBooks | None = None,
        explain: Callable[[BaseException], BaseException] = lambda error: error,
    ):
        """Start the threads of `lanes`.

        Args:
            lanes: those that have ops, each as often as it has threads.
            device: the compute device; each thread works on it, on a stream of its own.
            pace: when an op may end, for tests that imitate slower hardware.
            trace: where to record what is done.
            books: those that serve; None: those of Python.
            explain: what the error of a failed work is to the user.

        Raises:
            EngineError: a lane could not prepare itself; with what it met as its cause.
        """
        self._books: Any = books or Books(lanes)
        self.stats = stats = LaneStats(self._books, device, trace)
        self.count, self.waited, self.note = stats.count, stats.waited, stats.note
        self._lock = threading.Lock()
        """Guards `_failure` and `ended`."""
        self.know = self._books.know
        self.issue: Callable[..., list[Task]] = self._books.issue
        self.touching, self.all = self._books.touching, self._books.all
        self.cancel = self._books.cancel
        self._mark = device.fence if books is None else device.handle
        """Of a stream of the user's, what the books need to wait for it."""
        direct = books is not None and device.is_host
        self.finish: Callable[[Task], None] = self._books.finish if direct else self._finish
        """The user's compute is over, or will be when the device is through with it."""
        self._explain = explain
        self._inside = threading.local()
        """By thread, the seconds of what another lane has done inside its op."""
        self._pace = pace
        self.owner = trace and trace.key
        """Whose its calls are, for those that record them."""
        self._device = device
        self.closed = self.ended = False
        """Whether nobody shall use it any more; whether that is so or one has failed."""
        self._failure: BaseException | None = None
        intra_op_threads = torch.get_num_threads()
        runs: list[tuple[str, Any]] = [(one.value, partial(self._work, one)) for one in lanes]
        if not device.is_host:
            runs.append(("ending", self._end))
        self._threads = [
            threading.Thread(target=run, name=f"offload-{name}", daemon=True) for name, run in runs
        ]
        self._started = started = threading.Barrier(len(lanes) + 1)
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

    def fail(self, error: BaseException) -> None:
        """Start nothing more, end every wait with `error`: the first one told is the failure."""
        with self._lock:
            self._failure = self._failure or error
            self.ended = True
        self._books.stop(closing=False)

    @contextmanager
    def once(self) -> Iterator[None]:
        """What cannot be done again where an error leaves it half done, and ends everything."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    # -- the user's thread --------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a lane has failed. Every call into the engine begins so, or submits something.

        Raises:
            EngineError: with the lane's error as its cause.
        """
        entry.owner = self.owner
        if self._failure is not None:
            raise EngineError(
                f"a lane of the offload engine failed: {self._failure}. The weights in memory "
                "are not those of a finished step; start again from the last checkpoint"
            ) from self._failure

    def begin(self, task: Task) -> None:
        """Block until the user's compute `task` may start, and start it."""
        if not self._device.is_host:
            task.streams = []
        if not self._books.begin(task, 0.0):
            self._block(task, lambda: self._books.begin(task, LOOK_AGAIN_S))
        self.join(task)

    def join(self, task: Task) -> None:
        """The user's compute `task`, which has begun, goes on on the current stream as well."""
        if not self._device.is_host and (stream := self._device.stream()) not in task.streams:
            task.streams.append(stream)

    def _finish(self, task: Task) -> None:
        if isinstance(self._books, Books):
            self.note(task.op, task.began_at, time.perf_counter())
        if self._device.is_host:
            self._books.finish(task)
            return
        self.join(task)
        try:
            self._books.finish_later(task, [self._mark(stream) for stream in task.streams])
        except RuntimeError as error:  # Of the device's driver.
            self.fail(error)
            self.check()

    def _end(self) -> None:
        """Let the user's computes be over, in their order, when the device is through with them."""
        try:
            self._books.end()
        except BaseException as error:
            self.fail(error)

    def did(self, op: Op, since: float) -> None:
        """An op has run since then, inside another one of a lane."""
        if self._pace is not None:
            time.sleep(max(0.0, self._pace(op, since) - time.perf_counter()))
        now = self.count(op, since)
        self.note(op, since, now)
        self._inside.seconds += now - since

    def wait(self, tasks: Iterable[Task]) -> None:
        """Block until all `tasks` are over, on the device too.

        Raises:
            EngineError: a lane failed, now or before.
        """
        for task in tasks:
            if not task.over:
                self._block(task, partial(self._books.over, task, LOOK_AGAIN_S))
        self.check()

    def drain(self) -> None:
        """Let the user's thread wait for all that its stream has queued: for compute."""
        with self.waited(Lane.COMPUTE):
            self._device.drain()

    def _block(self, task: Task, come: Callable[[], bool]) -> None:
        """Block until `come`, which waits for a while itself."""
        self.check()
        since = time.perf_counter()
        with entry.interruptible():
            while not (found := come()) and self._failure is None and not self.closed:
                pass
        self.stats.blame(task, since)
        self.check()
        if not found:
            raise EngineError("the offload engine was closed while it was in use")

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Stop all lanes after what they are running, drop what has not begun, then do `then`.

        Called by the garbage collector in a lane itself it lets another thread do all that: the
        lane may hold the lock, and cannot wait for its own end.
        """
        if threading.current_thread() in self._threads:
            self.closed = self.ended = True
            threading.Thread(
                target=self.close, args=(then,), name="offload-close", daemon=True
            ).start()
            return
        self.closed = self.ended = True
        self._books.stop(closing=True)
        for thread in self._threads:
            if thread.ident is not None:  # Else it never started.
                thread.join()
        then()

    # -- the lane threads ---------------------------------------------------------------------

    def _work(self, lane: Lane) -> None:
        """The life of a lane. Whatever ends it early is told to all who wait, and never lost."""
        try:
            self._prepare()
            self._started.wait()
            with torch.no_grad():
                while (taken := self._books.take(lane)) is not None:
                    self._run(*taken)
                    del taken  # While the lane sleeps it holds nothing.
        except threading.BrokenBarrierError:
            pass  # Another lane could not start.
        except BaseException as error:
            self.fail(self._explain(error))
            self._started.abort()

    def _prepare(self) -> None:
        """Set this thread up for its lane."""
        torch.get_num_threads()  # A thread's first call takes over the number of the process.
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        self._device.enter()

    def _run(self, task: Task, op: Op, work: Callable[[], object]) -> None:
        start, self._inside.seconds = time.perf_counter(), 0.0
        error: BaseException | None = None
        try:
            work()
            start += self._inside.seconds
            self._device.drain()
            if self._pace is not None:
                time.sleep(max(0.0, self._pace(op, start) - time.perf_counter()))
        except BaseException as caught:
            error = caught
        now = self.count(op, start)
        if error is not None:
            self.fail(error)
            return
        self.note(op, start, now)
        self._books.finish(task)
