"""Transfers on their way through a backend whose threads are of Python: queued, cut, counted.

[Note: What a forked child may touch]
Threads do not survive a fork, and a lock held at that moment stays held in the child for ever.
So whatever a finaliser, `close` or a transfer would do is preceded by a look at the process id,
before any lock: in a child, closing does nothing and a transfer raises RuntimeError. Descriptors
that the child inherited go with the child.

[Note: What a signal handler may interrupt]
A handler that raises (Ctrl-C) may do so between any two steps of the thread that started Python,
never in ours. So a caller changes what is shared in one step, by which a request is in the queue or
is not; all counting is for the threads that serve it.

[Note: Lifetimes]
Worker threads hold the `Requests`, never the backend, so that a dropped backend is collected; its
finaliser only tells the threads to end, because a collection may run in any thread, also in one
of these, and with the lock held: so it does not wait for that, and threads look once in a while.
Waiting for the threads is for `close` and for the exit of the interpreter. A queued
request holds its file and its buffers; nothing holds them once the ticket is done.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aio.counters import LATENCIES, Counters, latency_bucket
from aio.errors import BROKEN, SHORTENED, os_error
from aio.file import File
from aio.part import Part, described, verb
from aio.system import ALIGN_BYTES, IO
from aio.ticket import QueuedTicket, Ticket

if TYPE_CHECKING:
    from typing_extensions import Self

PIECE_BYTES_MAX = 1 << 30
"""One call of the system moves at most about 2 GiB on Linux."""

RETRIES_MAX = 64
"""Calls in a row without progress (EINTR, EAGAIN, nothing transferred) before giving up."""

RETRY_DELAY_S = 0.001

SLEEP_S_MAX = 1.0
"""A wake gets lost where a finaliser cannot have the lock, or something else closed a pipe."""

_NOTHING = memoryview(b"")


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
    """One transfer on its way: which bytes are not yet cut into pieces, and what still runs."""

    __slots__ = ("_given", "_uncut", "begun", "failure", "failure_offset", "file", "running",
                 "ticket", "writing")  # fmt: skip

    def __init__(self, file: File, writing: bool, parts: Sequence[Part]) -> None:
        self.ticket = QueuedTicket(described(writing, parts, file.path))
        self.file = file
        self.writing = writing
        self.begun = False  # and counted in its file
        self.running = 0  # pieces
        self.failure: OSError | None = None
        self.failure_offset = 0
        self._uncut = deque(parts)
        self._given = 0  # bytes of the first of these that are cut

    @property
    def cut_up(self) -> bool:
        """Whether no bytes are left to be cut."""
        return not self._uncut

    def next_bytes(self, most: int) -> int:
        """Bytes of the piece that `cut` would answer."""
        return min(most, self._uncut[0].view.nbytes - self._given)

    def cut(self, most: int) -> Piece:
        """The next piece, of at most so many bytes."""
        view, offset = self._uncut[0]
        start, stop = self._given, self._given + self.next_bytes(most)
        self._given = stop
        if stop == view.nbytes:
            self._uncut.popleft()
            self._given = 0
        self.running += 1
        return Piece(self, view[start:stop], offset + start)

    def give_up(self, failure: OSError, offset: int) -> None:
        """A piece failed where it stood, at `offset`: nothing more is cut."""
        if self.failure is None or offset < self.failure_offset:
            self.failure, self.failure_offset = failure, offset
        self._uncut.clear()


class Piece:
    """What the system moves by one call or, where that falls short, several: what is left of it."""

    __slots__ = ("began", "bytes", "due", "offset", "request", "rest", "tries", "view")

    def __init__(self, request: Request, view: memoryview, offset: int) -> None:
        self.request = request
        self.view = view
        self.offset = offset
        self.bytes = view.nbytes  # held of those in flight, to its end
        self.tries = 0  # in a row without progress
        self.rest = 0  # of the last answer, what is no whole block
        self.due = self.began = 0.0

    def moved(self, count: int) -> int:
        """The system moved so many bytes: how many of them count, in whole blocks of the file."""
        self.rest = count % self.request.file.offset_align_bytes
        count -= self.rest  # the rest must start aligned again
        self.view = self.view[count:]
        self.offset += count
        self.tries = 0 if count else self.tries + 1
        return count

    def failed(
        self, io: IO, code: int, found: str | None = None, why: tuple[str, str] | None = None
    ) -> OSError:
        """What to raise where it failed with errno `code` at the point where it stands."""
        request = self.request
        asked = f"{verb(request.writing)} of {self.view.nbytes} bytes at offset {self.offset}"
        free = io.free_bytes(request.file.fd) if code != errno.EIO else None
        return os_error(code, asked, request.file.path, found=found, free=free, why=why)

    def at_end_of_file(self, io: IO) -> OSError:
        """What to raise where a read found no bytes."""
        return self.failed(io, errno.EIO, f"the file ends at {self.offset}", SHORTENED)

    def without_progress(self, io: IO, code: int) -> OSError | None:
        """What to raise where that goes on for too long; `code`: 0, or the last answer's errno."""
        if self.tries <= RETRIES_MAX:
            return None
        if self.rest and not self.request.writing:  # The same again and again: it ends in a block.
            self.offset, self.view = self.offset + self.rest, self.view[self.rest :]
            return self.at_end_of_file(io)
        reason = os.strerror(code) if code else "nothing was transferred"
        return self.failed(io, errno.EIO, f"{reason}, {self.tries} times in a row")


class Requests:
    """What callers and threads of one backend share; `lock` guards all of it.

    It is taken as it is and not by way of `changed`: see LockSignal.

    Raises:
        ValueError: a limit is out of its range.
    """

    def __init__(self, io: IO, piece_bytes: int, inflight_bytes_max: int) -> None:
        check_limits(piece_bytes, inflight_bytes_max)
        self.io = io
        self.piece_bytes = piece_bytes
        self.inflight_bytes_max = inflight_bytes_max
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.queue: deque[Request] = deque()  # with bytes that are not yet cut
        self.pieces = 0  # cut and not over
        self.inflight_bytes = 0
        self.closing = False
        self.broken: str | None = None  # what was found where the system serves us no longer
        self.depth_max = 0
        self._bytes = {False: 0, True: 0}  # by whether they were written
        self._operations = self._retries = 0
        self._latencies = [0] * LATENCIES
        self._cpu_seconds: dict[int, float] = {}  # by thread

    def wake(self) -> None:
        """Called with the lock held, when there is something for the threads to look at."""
        self.changed.notify_all()

    def release(self) -> None:
        """Gives back what the threads would have, where they cannot be started."""

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError where the backend or the file is closed, OSError where the backend broke.
        """
        with self.lock:
            what, path = request.ticket.what, request.file.path
            if self.broken is not None:
                raise os_error(errno.EIO, what, path, found=self.broken, why=BROKEN)
            if self.closing or request.file.closed:
                closed = "backend" if self.closing else "file"
                raise ValueError(f"{what}: the {closed} is closed; open a new one")
            self.queue.append(request)
            self.wake()

    def take(self) -> Piece | None:
        """The next piece, unless there is none or it is too much to be in flight. Lock held."""
        if not self.queue:
            return None
        request = self.queue[0]
        if self.inflight_bytes + request.next_bytes(self.piece_bytes) > self.inflight_bytes_max:
            return None
        if not request.begun:
            request.begun = True
            request.file.pending += 1
        piece = request.cut(self.piece_bytes)
        if request.cut_up:
            self.queue.popleft()
        self.pieces += 1
        self.inflight_bytes += piece.bytes
        return piece

    def count(self, piece: Piece, moved: int, calls: int, retries: int, seconds: float) -> None:
        """Counts what some calls for a piece have come to. Lock held."""
        file, writing = piece.request.file, piece.request.writing
        self._bytes[writing] += moved
        self._operations += calls
        self._retries += retries
        self._latencies[latency_bucket(seconds / calls)] += calls
        self._cpu_seconds[threading.get_ident()] = time.thread_time()
        file.operations += calls
        if writing:
            file.bytes_written += moved
        else:
            file.bytes_read += moved

    def end(self, piece: Piece, failure: OSError | None) -> None:
        """A piece is over, and its request where it was the last. Lock held."""
        request = piece.request
        piece.view = _NOTHING
        self.pieces -= 1
        self.inflight_bytes -= piece.bytes
        request.running -= 1
        if failure is not None:
            if not request.cut_up:
                self.queue.remove(request)
            request.give_up(failure, piece.offset)
        if request.running == 0 and request.cut_up:
            request.file.pending -= 1
            request.ticket.finish(request.failure)
        self.changed.notify_all()

    def counters(self) -> Counters:
        """Totals so far."""
        with self.lock:
            return Counters(
                self._bytes[False],
                self._bytes[True],
                self._operations,
                self._retries,
                self.depth_max,
                tuple(self._latencies),
                sum(self._cpu_seconds.values()),
            )


class Queued:
    """What callers see of a backend whose threads are of Python: see [Note: Lifetimes].

    Args:
        requests: what it shares with `threads`.
        threads: daemonic, not yet started; they end when `requests.closing` is set and nothing is
            left to do.

    Raises:
        OSError: a thread cannot be started (ENOMEM).
    """

    def __init__(self, requests: Requests, threads: Sequence[threading.Thread]) -> None:
        self.io: IO = requests.io
        self._requests = requests
        self._threads = tuple(threads)
        weakref.finalize(self, _drop, requests).atexit = False
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            _tell_to_end(requests)
            requests.release()
            raise OSError(errno.ENOMEM, f"no thread for file I/O: {error}") from error
        _BACKENDS.add(self)

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """Queues a transfer of all `parts`; File has checked bounds and alignment.

        Raises:
            ValueError: the backend or the file is closed.
            RuntimeError: called in a forked child.
        """
        self.check_process()
        request = Request(file, writing, parts)
        if parts:
            self._requests.add(request)
        else:
            request.ticket.finish()
        return request.ticket

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is queued or running."""
        requests = self._requests
        with requests.lock:
            requests.wake()  # whoever queued something may have been interrupted before that
            while file.pending or any(request.file is file for request in requests.queue):
                requests.changed.wait()

    def counters(self) -> Counters:
        """Totals so far."""
        self.check_process()
        return self._requests.counters()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child ([Note: What a forked child may touch])."""
        if os.getpid() != self._requests.pid:
            raise RuntimeError(
                f"file I/O asked for in process {os.getpid()}, a fork of {self._requests.pid} "
                "which owns the threads; they do not survive a fork; open a backend in the child"
            )

    def close(self) -> None:
        """Finishes what is queued, then ends and joins the threads. Closing twice is fine."""
        if os.getpid() != self._requests.pid:
            return
        _tell_to_end(self._requests)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_BACKENDS: weakref.WeakSet[Queued] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for backend in list(_BACKENDS):
        backend.close()


def _drop(requests: Requests) -> None:
    """For finalisers: tells the threads to end; see [Note: Lifetimes]."""
    if os.getpid() != requests.pid:
        return
    requests.closing = True
    if requests.lock.acquire(blocking=False):
        try:
            requests.wake()
        finally:
            requests.lock.release()


def _tell_to_end(requests: Requests) -> None:
    if os.getpid() != requests.pid:
        return
    with requests.lock:
        requests.closing = True
        requests.wake()
