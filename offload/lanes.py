"""The lanes: one thread each, running what may start, the earliest deadline first.

What may start, and which goes first, say the books. When an op fails, or a lane in any other way,
or the bookkeeping of either side, nothing more is started, every blocked wait ends, and the next
call raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from offload import interrupt
from offload.books import HISTORY_MAX, Spans
from offload.compiled import books_of
from offload.device import Device
from offload.ledger import Ledger
from offload.program import Lane, Op
from offload.task import Fence, Key, Passage, Run, Task
from offload.trace import Trace

LOOK_AGAIN_S = 0.1
"""So often whoever is blocked looks whether signals came."""


def _nothing(*_: Any) -> None:
    """Done after closing unless there is more to do; stands in for what a task has run, too."""


class EngineError(RuntimeError):
    """A lane failed; `__cause__` is what it met. Training cannot go on with this engine."""


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
        self._books = books_of(lanes, self.fail, device, trace.ran.maxlen or 0 if trace else 0)
        self.ledger = ledger = Ledger(self._books, device, trace)
        self.count, self.waited, self.note = ledger.count, ledger.waited, ledger.note
        self._lock = threading.Lock()
        """Guards `_failure` and `ended`."""
        self.copies = self._books.copies and pace is None
        """Whether copies within CPU memory need no more than `spans`."""
        # What these do is said there; no call is so frequent as these.
        self.know, self.issue = self._books.know, self._books.issue
        self.issue_all = self._books.issue_all
        self.touching, self.all = self._books.touching, self._books.all
        self.passage, self.seal = self._books.passage, self._books.seal
        self.cancel, self.together = self._books.cancel, self._books.together
        self.finish: Callable[[Task], None] = (
            self._books.finish if self._books.copies else self._finish
        )
        """The user's compute is over (on the host; the device may have work left)."""
        self._pace = pace
        self.owner = trace and trace.key
        """Whose its calls are, for those that record them."""
        self._device = device
        self.closed = self.ended = False
        """Whether nobody shall use it any more; whether that is so or one has failed."""
        self._failure: BaseException | None = None
        intra_op_threads = torch.get_num_threads()
        self._threads = [
            threading.Thread(
                target=self._work, args=(lane,), name=f"offload-{lane.value}", daemon=True
            )
            for lane in lanes
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

    # -- submitting ---------------------------------------------------------------------------

    def submit(
        self,
        op: Op,
        waits: Iterable[Task],
        key: Key,
        run: Run | None = None,
        passage: Passage | None = None,
        spans: Spans | None = None,
    ) -> Task:
        """Queue an op behind `waits`; without `run` it is the user's own compute.

        With `passage` it is one of the ops of a chunk, and starts after `seal`; with `spans`, where
        lanes copy, it is that copy.
        """
        interrupt.owner = self.owner
        return self._books.submit(op, waits, key, run, passage, spans)

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
        interrupt.owner = self.owner
        if self._failure is not None:
            raise EngineError(
                f"a lane of the offload engine failed: {self._failure}. The weights in memory "
                "are not those of a finished step; start again from the last checkpoint"
            ) from self._failure

    def begin(self, task: Task) -> None:
        """Block until the user's compute `task` may start, and start it."""
        if not self._books.begin(task, 0.0):
            self._block(task, lambda: self._books.begin(task, LOOK_AGAIN_S))
        if self._device.is_host:
            return
        for fence in task.fences:
            fence.wait()
        task.streams = [self._device.stream()]

    def join(self, task: Task) -> None:
        """The user's compute `task`, which has begun, goes on on the current stream as well."""
        if not self._device.is_host and (stream := self._device.stream()) not in task.streams:
            for fence in task.fences:
                fence.wait()
            task.streams.append(stream)

    def _finish(self, task: Task) -> None:
        if self._device.is_host:
            self._books.finish(task)
        else:
            self.join(task)
            fences = [self._device.fence(stream) for stream in task.streams]
            self._books.finish(task, [fence for fence in fences if fence is not None])
        self.note(task.op, task.began_at, time.perf_counter())

    def wait(self, tasks: Iterable[Task]) -> None:
        """Block until all `tasks` are over, on the device too.

        Raises:
            EngineError: a lane failed, now or before.
        """
        for task in tasks:
            if not task.over:
                self._block(task, partial(self._books.over, task, LOOK_AGAIN_S))
            if task.fences:
                with self.waited(Lane.COMPUTE):
                    for fence in task.fences:
                        fence.synchronize()
        self.check()

    def drain(self) -> None:
        """Let the user's thread wait for all that its stream has queued: for compute."""
        with self.waited(Lane.COMPUTE):
            self._device.drain()

    def _block(self, task: Task, come: Callable[[], bool]) -> None:
        """Block until `come`, which waits for a while itself."""
        self.check()
        since = time.perf_counter()
        while not (found := come()) and self._failure is None and not self.closed:
            pass
        self.ledger.blame(task, since)
        self.check()
        if not found:
            raise EngineError("the offload engine was closed while it was in use")

    def close(self, then: Callable[[], None] = _nothing) -> None:
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
        self._books.forget()
        then()

    # -- the lane threads ---------------------------------------------------------------------

    def _work(self, lane: Lane) -> None:
        """The life of a lane. Whatever ends it early is told to all who wait, and never lost."""
        try:
            self._prepare()
            self._started.wait()
            with torch.no_grad():
                while (task := self._books.take(lane)) is not None:
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

    def _run(self, lane: Lane, task: Task) -> None:
        start = time.perf_counter()
        error: BaseException | None = None
        assert task.run is not None
        try:
            start += self._come(task, task.fences)
            work = task.run()
            if isinstance(work, Iterator):
                for fence in work:
                    if fence is not None:
                        start += self._come(task, [fence])
                    start += self._let_pass(lane, task)
            self._device.drain()
            if self._pace is not None:
                time.sleep(max(0.0, start + self._pace(task.op) - time.perf_counter()))
        except BaseException as caught:
            error = caught
        task.run = _nothing  # What its function held can go.
        now = self.count(task.op, start)
        if error is not None:
            self.fail(error)
            return
        self.note(task.op, start, now)
        self._books.finish(task)

    def _come(self, task: Task, fences: Sequence[Fence]) -> float:
        """Wait until the device is through with what is before `task`; the seconds that it took.
        Whoever waits for the task waits for that, till then, and not for its lane."""
        if all(fence.query() for fence in fences):
            return 0.0
        since = time.perf_counter()
        for fence in fences:
            fence.synchronize()
        task.history = ((Lane.COMPUTE, task.ready_at), *task.history[: HISTORY_MAX - 1])
        task.ready_at = time.perf_counter()
        return task.ready_at - since

    def _let_pass(self, lane: Lane, task: Task) -> float:
        """Between two pieces of `task`: do what is more urgent; the seconds that it took."""
        since = time.perf_counter()
        while (other := self._books.overtaking(lane, task)) is not None:
            self._run(lane, other)
        return time.perf_counter() - since
