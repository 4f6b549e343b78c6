"""Transfers on their way through a backend whose threads are of Python: queued, cut, counted.

[Note: What a forked child may touch]
Threads do not survive a fork, and a lock held at that moment stays held in the child for ever.
So whatever a finaliser, `close` or a transfer would do is preceded by a look at the process id,
before any lock: in a child, closing does nothing and a transfer raises RuntimeError. Descriptors
that the child inherited go with the child.

[Note: What a signal handler may interrupt]
A handler may run, and raise (Ctrl-C), between any two steps of the thread that started Python, and
may itself transfer, sync, wait and close, as may a finaliser, which a collection runs anywhere. So
callers take no lock: a handler that waited for a transfer, with the lock held by what it
interrupts, would wait for ever. A caller changes what is shared in one step, by which a request is
in the queue or is not, and looks afterwards whether that was too late; whoever takes it out of the
queue has it. All counting is for the threads that serve it, and the lock theirs alone. They run no
handlers, but finalisers, which are refused what would wait for these threads (`check_thread`).
"I write mine, then read yours" leans on the GIL: without one a wake may be lost until SLEEP_S_MAX.

[Note: Without memory]
A thread that finds none for a step leaves things as they were before it, fails the transfer that
the step was for (ENOMEM), and goes on. What is over must end all the same, so `end` is begun anew
until it is through: each of its parts takes what memory it needs before it changes anything.

[Note: Lifetimes]
Worker threads hold the `Requests`, never the backend, so that a dropped backend is collected; its
finaliser only tells the threads to end, as it may run in one of these. Waiting for the threads is
for `close` and for the exit of the interpreter. A queued request holds its file and its buffers;
nothing holds them once the ticket is done.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from aio.counters import LATENCIES, Counters, latency_bucket
from aio.errors import SHORTENED, os_error
from aio.file import File
from aio.part import Part, check_limits, described, verb
from aio.system import IO
from aio.ticket import (
    NO_MEMORY,
    SLEEP_S_MAX,
    THIS_THREAD,
    LockSignal,
    QueuedTicket,
    Signal,
    by_a_handler,
    set_all,
    taken_out,
)

RETRIES_MAX = 64
"""Calls in a row without progress (EINTR, EAGAIN, nothing transferred) before giving up."""

RETRY_DELAY_S = 0.001

_NOTHING = memoryview(b"")


Broken: TypeAlias = "tuple[int, str, tuple[str, str] | None]"
"""Why nothing is served any more: the errno, what was found, and `why` of `os_error`."""


class Request:
    """One transfer on its way: which bytes are not yet cut into pieces, and what still runs."""

    __slots__ = ("_given", "_uncut", "failure", "failure_offset", "file", "over", "running",
                 "ticket", "writing")  # fmt: skip

    def __init__(self, file: File, writing: bool, parts: Sequence[Part]) -> None:
        self.ticket = QueuedTicket(described(writing, parts, file.path), file.path)
        self.file = file
        self.writing = writing
        self.running = 0  # pieces
        self.over = False
        self.failure: OSError | None = None
        self.failure_offset = 0
        self._uncut = deque(parts)
        self._given = 0  # bytes of the first of these that are cut

    @property
    def cut_up(self) -> bool:
        """Whether no bytes are left to be cut."""
        return not self._uncut

    @property
    def uncut_offset(self) -> int:
        """Where in the file the bytes begin that are not yet cut."""
        return self._uncut[0].offset + self._given

    def next_bytes(self, most: int) -> int:
        """Bytes of the piece that `cut` would answer."""
        return min(most, self._uncut[0].view.nbytes - self._given)

    def cut(self, most: int) -> Piece:
        """The next piece, of at most so many bytes. Without memory for it, nothing is changed."""
        view, offset = self._uncut[0]
        start, stop = self._given, self._given + self.next_bytes(most)
        piece = Piece(self, view[start:stop], offset + start)
        self._given = stop
        if stop == view.nbytes:
            self._uncut.popleft()
            self._given = 0
        self.running += 1
        return piece

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


def _closed_meanwhile(request: Request) -> OSError:
    found = "the file is closed" if request.file.closed else "the backend is closed"
    why = ("it was closed meanwhile", "open a new one")
    try:
        return os_error(errno.EBADF, request.ticket.what, request.file.path, found=found, why=why)
    except MemoryError:
        return NO_MEMORY


class Requests:
    """What callers and threads of one backend share; the lock is for the threads alone.

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
        self.queue: deque[Request] = deque()  # not begun
        self.cutting: Request | None = None  # begun, with bytes that are not yet cut
        self.pieces = 0  # cut and not over
        self.inflight_bytes = 0
        self.closing = False
        self.ended = False  # what is queued from now on is not served
        self.serving = 0  # threads
        self.broken: Broken | None = None  # where the system serves us no longer
        self.depth_max = 0
        self._bytes = {False: 0, True: 0}  # by whether they were written
        self._operations = self._retries = 0
        self._latencies = [0] * LATENCIES
        self._cpu_seconds: dict[int, float] = {}  # by thread
        self._signals: list[Signal] = []  # of callers that wait until something is over

    def wake(self) -> None:
        """There is something for the threads to look at. Called by anybody, takes no lock."""

    def release(self) -> None:
        """Gives back what the threads would have, where they cannot be started."""

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError where the backend or the file is closed, OSError where the backend broke.
        """
        self._refuse(request)
        self.queue.append(request)
        self.wake()
        too_late = self.ended or request.file.closed
        if too_late and taken_out(self.queue, request):  # else a thread has it
            self._refuse(request)

    def _refuse(self, request: Request) -> None:
        what, path = request.ticket.what, request.file.path
        if self.broken is not None:
            code, found, why = self.broken
            raise os_error(code, what, path, found=found, why=why)
        if self.closing or request.file.closed:
            closed = "backend" if self.closing else "file"
            raise ValueError(f"{what}: the {closed} is closed; open a new one")

    def has(self, file: File) -> bool:
        """Whether a transfer of `file` is queued or running.

        The queue is looked at first, by a copy of one step: what leaves it is pending before.
        """
        return any(one.file is file for one in self.queue.copy()) or file.pending > 0

    @property
    def waiting(self) -> bool:
        """Whether there are bytes to be cut."""
        return self.cutting is not None or bool(self.queue)

    def wait_until(self, over: Callable[[], bool]) -> None:
        """Returns when `over`, which is asked whenever something ends."""
        while not over():
            signal = LockSignal()
            try:
                self._signals.append(signal)
                if not over():  # what ends from now on is told
                    signal.wait(SLEEP_S_MAX)
            finally:
                taken_out(self._signals, signal)

    def is_over(self) -> bool:
        """Whether a thread may leave. Lock held."""
        if not self.closing or self.waiting:
            return False
        self.ended = True
        self.ended = not self.waiting  # what was queued just before is served
        return self.ended

    def take(self) -> Piece | None:
        """The next piece, unless there is none or it is too much to be in flight. Lock held."""
        if self.cutting is None:
            self._begin()
        request = self.cutting
        if request is None:
            return None
        try:
            pieces = self.pieces + 1
            inflight_bytes = self.inflight_bytes + request.next_bytes(self.piece_bytes)
            if inflight_bytes > self.inflight_bytes_max:
                return None
            piece = request.cut(self.piece_bytes)
        except MemoryError:
            self._fail(request, NO_MEMORY, request.uncut_offset)
            self.wake()  # for the next
            return None
        if request.cut_up:
            self.cutting = None
        self.pieces, self.inflight_bytes = pieces, inflight_bytes
        if pieces > self.depth_max:
            self.depth_max = pieces
        return piece

    def _begin(self) -> None:
        """Takes the next request out of the queue, unless that is empty."""
        while self.cutting is None and self.queue:
            try:
                request = self.queue[0]
            except IndexError:  # the caller has taken it back
                continue
            file = request.file
            file.pending += 1  # before it leaves the queue: see `has`
            if not taken_out(self.queue, request):
                file.pending -= 1
                self.tell()
                continue
            self.cutting = request
            if file.gone:
                self._fail(request, _closed_meanwhile(request), request.uncut_offset)

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
        """A piece is over, and its request where it was the last: see [Note: Without memory]."""
        while True:
            try:
                with self.lock:
                    return self._end(piece, failure)
            except MemoryError:
                continue

    def _end(self, piece: Piece, failure: OSError | None) -> None:
        request = piece.request
        if piece.bytes:  # that is not counted yet
            pieces, running = self.pieces - 1, request.running - 1
            inflight_bytes = self.inflight_bytes - piece.bytes
            self.pieces, self.inflight_bytes, request.running = pieces, inflight_bytes, running
            piece.bytes, piece.view = 0, _NOTHING
        if failure is not None:
            self._fail(request, failure, piece.offset)
        elif request.running == 0 and request.cut_up:
            self._finish(request)

    def _fail(self, request: Request, failure: OSError, offset: int) -> None:
        """Nothing more of it is begun."""
        request.give_up(failure, offset)
        if request is self.cutting:
            self.cutting = None
        if request.running == 0:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if not request.ticket.done():
            request.ticket.finish(request.failure, request.failure_offset)
        if not request.over:  # afterwards: who closes the file finds its tickets done
            request.file.pending -= 1
            request.over = True
        self.tell()

    def abandon(self) -> None:
        """Fails what was queued as the last thread left, by who was interrupted there."""
        while self.serving == 0 and self.queue:
            try:
                request = self.queue[0]
            except IndexError as error:  # somebody else has taken it
                if by_a_handler(error):
                    raise
                return
            request.ticket.finish(_closed_meanwhile(request), request.uncut_offset)
            taken_out(self.queue, request)  # afterwards: a handler may raise before that

    def tell(self) -> None:
        """Something is over."""
        set_all(self._signals)

    def serve(self, work: Callable[[], None]) -> None:
        """The life of a thread: `work`, and then it is told that it is over."""
        try:
            THIS_THREAD.serves = True
            work()
        finally:
            with self.lock:
                self.serving -= 1
            self.tell()

    def counters(self) -> Counters:
        """Totals so far."""
        return Counters(
            self._bytes[False],
            self._bytes[True],
            self._operations,
            self._retries,
            self.depth_max,
            tuple(self._latencies),
            sum(list(self._cpu_seconds.values())),
        )
