"""A pool of threads that moves bytes with preadv and pwritev: the backend that runs anywhere.

[Note: What a forked child may touch]
Threads do not survive a fork, and a lock held at that moment stays held in the child for ever.
So whatever a finaliser, `close` or a transfer would do is preceded by a look at the process id,
before any lock: in a child, closing does nothing and a transfer raises RuntimeError. Descriptors
that the child inherited go with the child.

[Note: Lifetimes]
Worker threads hold the `_State`, never the Pool, so that a dropped Pool is collected; its
finaliser only tells the threads to end, because a collection may run in any thread, also in one
of these. Waiting for the threads is for `close` and for the exit of the interpreter. A queued
request holds its file and its buffer; nothing holds the buffer once the ticket is done.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from aio.counters import LATENCIES, Counters, latency_bucket
from aio.errors import os_error
from aio.system import ALIGN_BYTES, IO, SystemIO
from aio.ticket import Ticket

if TYPE_CHECKING:
    from aio.file import File

PIECE_BYTES_MAX = 1 << 30
"""One call of the system moves at most about 2 GiB on Linux."""

RETRIES_MAX = 64
"""Calls in a row without progress (EINTR, EAGAIN, nothing transferred) before giving up."""

RETRY_DELAY_S = 0.001


def check_limits(piece_bytes: int, inflight_bytes_max: int) -> None:
    """Raises ValueError where a backend cannot have these."""
    if piece_bytes % ALIGN_BYTES or not 0 < piece_bytes <= PIECE_BYTES_MAX:
        raise ValueError(
            f"piece_bytes={piece_bytes}: expected a multiple of {ALIGN_BYTES} up to "
            f"{PIECE_BYTES_MAX}, as O_DIRECT and preadv ask; try {4 << 20}"
        )
    if inflight_bytes_max < piece_bytes:
        raise ValueError(
            f"inflight_bytes_max={inflight_bytes_max} is less than one piece of {piece_bytes} "
            "bytes, so that nothing could ever start; raise it"
        )


class Request:
    """One transfer on its way: which bytes are given out to threads, and what is still running.

    `view` goes when it is over: nothing holds the buffer then.
    """

    __slots__ = ("failure", "failure_offset", "file", "given", "offset", "running", "ticket",
                 "view", "writing")  # fmt: skip

    def __init__(self, file: File, writing: bool, view: memoryview, offset: int) -> None:
        verb = "write" if writing else "read"
        self.ticket = Ticket(f"{verb} of {view.nbytes} bytes at offset {offset} of {file.path}")
        self.file = file
        self.writing = writing
        self.view = view
        self.offset = offset
        self.given = 0
        self.running = 0
        self.failure: OSError | None = None
        self.failure_offset = 0


class _State:
    """What threads share; `changed` guards all of it."""

    def __init__(self, io: IO, piece_bytes: int, inflight_bytes_max: int) -> None:
        self.io = io
        self.piece_bytes = piece_bytes
        self.inflight_bytes_max = inflight_bytes_max
        self.changed = threading.Condition()
        self.queue: deque[Request] = deque()
        self.inflight_bytes = 0
        self.closing = False
        self.pid = os.getpid()
        self.bytes = {False: 0, True: 0}  # by whether they were written
        self.operations = self.retries = self.running = self.depth_max = 0
        self.latencies = [0] * LATENCIES
        self.cpu_seconds: dict[int, float] = {}  # by thread


class Pool:
    """Worker threads for any number of files: the backend `python`, and the only one over `IO`.

    Threads are named, daemonic, joined by `close`.

    Args:
        threads: transfers that run at once.
        io: the system's calls, or a simulation of them.
        piece_bytes: longest transfer of one call, a multiple of 4096.
        inflight_bytes_max: bytes handed to the system at once, at least `piece_bytes`.

    Raises:
        ValueError: an argument is out of its range.
    """

    name = "python"

    def __init__(
        self,
        threads: int = 4,
        io: IO | None = None,
        *,
        piece_bytes: int = 4 << 20,
        inflight_bytes_max: int = 64 << 20,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: a pool needs at least one; try 4")
        check_limits(piece_bytes, inflight_bytes_max)
        self.io: IO = SystemIO() if io is None else io
        self._state = _State(self.io, piece_bytes, inflight_bytes_max)
        self._threads = [
            threading.Thread(target=_work, args=(self._state,), name=f"aio-{n}", daemon=True)
            for n in range(threads)
        ]
        weakref.finalize(self, _tell_to_end, self._state).atexit = False
        for thread in self._threads:
            thread.start()
        close_at_exit(self)

    def submit(self, file: File, writing: bool, view: memoryview, offset: int) -> Ticket:
        """Queues a transfer of the bytes of `view`; File has checked bounds and alignment.

        Raises:
            ValueError: the pool or the file is closed.
            RuntimeError: called in a forked child.
        """
        self.check_process()
        state = self._state
        request = Request(file, writing, view, offset)
        if view.nbytes == 0:
            request.ticket.finish()
            return request.ticket
        with state.changed:
            if state.closing:
                raise ValueError(f"{request.ticket.what}: the pool is closed; open a new one")
            if file.closed:
                raise ValueError(f"{request.ticket.what}: the file is closed; open a new one")
            file.pending += 1
            state.queue.append(request)
            state.changed.notify_all()
        return request.ticket

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is queued or running."""
        with self._state.changed:
            while file.pending:
                self._state.changed.wait()

    def counters(self) -> Counters:
        """Totals so far."""
        state = self._state
        with state.changed:
            return Counters(
                state.bytes[False],
                state.bytes[True],
                state.operations,
                state.retries,
                state.depth_max,
                tuple(state.latencies),
                sum(state.cpu_seconds.values()),
            )

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child ([Note: What a forked child may touch])."""
        if os.getpid() != self._state.pid:
            raise RuntimeError(
                f"file I/O asked for in process {os.getpid()}, a fork of {self._state.pid} which "
                "owns the threads; they do not survive a fork; open a pool in the child"
            )

    def close(self) -> None:
        """Finishes what is queued, then ends and joins the threads. Closing twice is fine."""
        if os.getpid() != self._state.pid:
            return
        _tell_to_end(self._state)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Closable(Protocol):
    """A backend, as far as the exit of the interpreter is concerned."""

    def close(self) -> None:
        """Finishes what is queued, then ends and joins the threads."""


_BACKENDS: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(backend: Closable) -> None:
    """For backends with threads of Python: closes this one when the interpreter ends."""
    _BACKENDS.add(backend)


@atexit.register
def _close_all() -> None:
    for backend in list(_BACKENDS):
        backend.close()


def _tell_to_end(state: _State) -> None:
    if os.getpid() != state.pid:
        return
    with state.changed:
        state.closing = True
        state.changed.notify_all()


def _work(state: _State) -> None:
    while _work_once(state):
        pass


def _work_once(state: _State) -> bool:
    """Moves one piece; False when the pool is closed and nothing is left to do.

    A function of its own, so that an idle thread keeps no file or buffer alive.
    """
    with state.changed:
        while not (state.queue and _fits(state, state.queue[0])):
            if state.closing and not state.queue:
                return False
            state.changed.wait()
        request = state.queue[0]
        start = request.given
        stop = min(start + state.piece_bytes, request.view.nbytes)
        request.given = stop
        request.running += 1
        state.inflight_bytes += stop - start
        if stop == request.view.nbytes:
            state.queue.popleft()
        state.running += 1
        state.depth_max = max(state.depth_max, state.running)
    began = time.monotonic()
    moved, calls, failure = _transfer(state.io, request, start, stop)
    took = time.monotonic() - began
    with state.changed:
        state.inflight_bytes -= stop - start
        request.running -= 1
        _count(state, request, moved, calls, took)
        if failure is not None:
            if request.failure is None or start < request.failure_offset:
                request.failure, request.failure_offset = failure, start
            if request.given < request.view.nbytes:
                state.queue.remove(request)
                request.given = request.view.nbytes
        if request.running == 0 and request.given == request.view.nbytes:
            request.view = memoryview(b"")
            request.file.pending -= 1
            request.ticket.finish(request.failure)
        state.changed.notify_all()
    return True


def _fits(state: _State, request: Request) -> bool:
    size = min(state.piece_bytes, request.view.nbytes - request.given)
    return state.inflight_bytes + size <= state.inflight_bytes_max


def _count(state: _State, request: Request, moved: int, calls: int, seconds: float) -> None:
    state.running -= 1
    state.bytes[request.writing] += moved
    state.operations += calls
    state.retries += calls - 1
    state.latencies[latency_bucket(seconds / calls)] += calls
    state.cpu_seconds[threading.get_ident()] = time.thread_time()
    request.file.operations += calls
    if request.writing:
        request.file.bytes_written += moved
    else:
        request.file.bytes_read += moved


def _transfer(io: IO, request: Request, start: int, stop: int) -> tuple[int, int, OSError | None]:
    """Moves bytes [start, stop) of a request: (bytes moved, calls made, what failed)."""
    file, call = request.file, io.pwritev if request.writing else io.preadv
    at, calls, idle, reason = start, 0, 0, "nothing was transferred"
    while at < stop:
        calls += 1
        try:
            count = call(file.fd, [request.view[at:stop]], request.offset + at)
        except (InterruptedError, BlockingIOError) as error:
            count, reason = 0, os.strerror(error.errno or 0)
        except OSError as error:
            return at - start, calls, failure_of(io, request, at, stop, error.errno or errno.EIO)
        except Exception as error:  # a broken injected IO must not leave waiters waiting
            text = f"{type(error).__name__}: {error}"
            return at - start, calls, failure_of(io, request, at, stop, errno.EIO, text)
        else:
            if count == 0 and not request.writing:
                text = f"the file ends at {request.offset + at}"
                return at - start, calls, failure_of(io, request, at, stop, errno.EIO, text)
        if file.direct:
            count -= count % ALIGN_BYTES  # what is left must start aligned again
        at += count
        idle = 0 if count else idle + 1
        if idle > RETRIES_MAX:
            text = f"{reason}, {idle} times in a row"
            return at - start, calls, failure_of(io, request, at, stop, errno.EIO, text)
        if idle:
            time.sleep(RETRY_DELAY_S)
    return at - start, calls, None


def failure_of(
    io: IO, request: Request, at: int, stop: int, code: int, found: str | None = None
) -> OSError:
    """What to raise where the bytes [at, stop) of a request failed with errno `code`."""
    verb = "write" if request.writing else "read"
    asked = f"{verb} of {stop - at} bytes at offset {request.offset + at}"
    free = io.free_bytes(request.file.fd) if code != errno.EIO else None
    return os_error(code, asked, request.file.path, found=found, free=free)
