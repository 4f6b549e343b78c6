"""Threads of Python that move bytes with preadv and pwritev: the backend that runs anywhere."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aio.errors import SHORTENED, os_error
from aio.file import File, check_limits
from aio.system import IO
from aio.transfer import Part, Ticket, asked, check_process, verb

if TYPE_CHECKING:
    from typing_extensions import Self

RETRIES_MAX = 64
"""Calls in a row without progress (EINTR, EAGAIN, nothing transferred) before giving up."""

RETRY_DELAY_S = 0.001


class ThreadTicket(Ticket):
    """A transfer by threads of Python, and how far it is."""

    __slots__ = ("_over", "error", "file", "running", "uncut", "writing")

    def __init__(self, file: File, writing: bool, parts: Sequence[Part]) -> None:
        super().__init__(f"{asked(writing, parts)} of {file.path}")
        self.file: File | None = file
        self.writing = writing
        self.uncut = deque(parts)
        self.running = 0  # pieces
        self.error: tuple[int, OSError] | None = None  # the first by offset
        self._over = threading.Event()

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._over.is_set()

    def finish(self) -> None:
        """The transfer is over and its buffers free."""
        self._over.set()

    def _wait(self) -> None:
        self._over.wait()

    def failure(self) -> OSError | None:
        """See Ticket.failure."""
        return self.error and self.error[1]


class ThreadBackend:
    """Worker threads for any number of files: the backend `python`, and the only one over `IO`.

    Threads are named, daemonic, joined by `close`. One that is dropped finishes what is under way.

    Args:
        threads: transfers that run at once.
        io: the system's calls, or a simulation of them.
        piece_bytes: longest transfer of one call, a multiple of 4096.

    Raises:
        ValueError: an argument is out of its range.
        OSError: a thread cannot be started (ENOMEM).
    """

    name = "python"

    def __init__(
        self,
        threads: int = 4,
        io: IO | None = None,
        *,
        piece_bytes: int = 4 << 20,
    ) -> None:
        check_limits(threads, piece_bytes)
        self._begin(Shared(io or IO(), piece_bytes), threads)

    def _begin(self, shared: Shared, threads: int) -> None:
        self.io = shared.io
        self._pid = os.getpid()
        # Threads hold what they share, never the backend, so that a dropped one is collected.
        self._shared = shared
        weakref.finalize(self, shared.close, self._pid).atexit = False
        self._threads = [
            threading.Thread(target=shared.work, name=f"aio-{number}", daemon=True)
            for number in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            shared.close(self._pid)
            shared.end_thread()
            raise OSError(errno.ENOMEM, f"no thread for file I/O: {error}") from error

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """See Backend.submit."""
        ticket, shared = ThreadTicket(file, writing, parts), self._shared
        check_process(self._pid, ticket.what)
        with shared.changed:
            if shared.closing or file.closed:
                closed = "backend" if shared.closing else "file"
                raise ValueError(f"{ticket.what}: the {closed} is closed; open a new one")
            if parts:
                shared.pending[file] = shared.pending.get(file, 0) + 1
                shared.queue.append(ticket)
                shared.wake()
        if not parts:
            ticket.finish()
        return ticket

    def drain(self, file: File) -> None:
        """See Backend.drain."""
        with self._shared.changed:
            self._shared.wake()  # Ctrl-C may have come before that of `submit`.
            self._shared.changed.wait_for(lambda: file not in self._shared.pending)

    def check_process(self) -> None:
        """See Backend.check_process."""
        check_process(self._pid, "file I/O")

    def close(self) -> None:
        """Finishes what is queued, then ends and joins the threads. Closing twice is fine."""
        self._shared.close(self._pid)
        if os.getpid() == self._pid:
            for thread in self._threads:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Piece:
    """What the system moves by one call or, where that falls short, several: what is left of it."""

    ticket: ThreadTicket
    file: File
    view: memoryview
    offset: int
    tries: int = 0
    """In a row without progress."""


class Shared:
    """What callers and threads of one backend share; `changed` guards all of it."""

    def __init__(self, io: IO, piece_bytes: int) -> None:
        self.io = io
        self.piece_bytes = piece_bytes
        self.changed = threading.Condition()  # Re-entrant: a finaliser may close.
        self.queue: deque[ThreadTicket] = deque()  # with bytes that are not yet cut
        self.pending: dict[File, int] = {}  # transfers that are not over
        self.closing = False
        self.pieces = 0

    def wake(self) -> None:
        """Has the threads look again. Lock held."""
        self.changed.notify_all()

    def close(self, pid: int) -> None:
        """Takes no more; the threads end once nothing is left to do."""
        if os.getpid() == pid:
            with self.changed:
                self.closing = True
                self.wake()

    def work(self) -> None:
        """The life of a thread."""
        while self._work_once():
            pass

    def end_thread(self) -> None:
        """Gives back what the thread alone needs."""

    def _work_once(self) -> bool:
        """Moves a piece; False when nothing is left to do. An idle thread keeps no buffer alive."""
        with self.changed:
            while (piece := self.take()) is None:
                if self.closing and not self.queue:
                    return False
                self.changed.wait()
        error = None
        call = self.io.pwritev if piece.ticket.writing else self.io.preadv
        while piece.view.nbytes and error is None:
            try:
                result = call(piece.file.fd, [piece.view], piece.offset)
            except OSError as refused:
                result = -(refused.errno or errno.EIO)
            error = self.advance(piece, result)
            if piece.tries:
                time.sleep(RETRY_DELAY_S)
        with self.changed:
            self.end(piece, error)
        return True

    def take(self) -> Piece | None:
        """The next piece, unless there is none. Lock held."""
        if not self.queue:
            return None
        ticket = self.queue[0]
        (view, offset), file = ticket.uncut[0], ticket.file
        count = min(self.piece_bytes, view.nbytes)
        ticket.uncut.popleft()
        if count < view.nbytes:
            ticket.uncut.appendleft(Part(view[count:], offset + count))
        elif not ticket.uncut:
            self.queue.popleft()
        ticket.running += 1
        self.pieces += 1
        assert file is not None
        return Piece(ticket, file, view[:count], offset)

    def advance(self, piece: Piece, result: int) -> OSError | None:
        """What the system said of a piece, bytes moved or -errno: it is at its end once nothing is
        left of its view, fails with the answer, or goes on where it stands."""
        writing, code = piece.ticket.writing, max(-result, 0)
        if code not in (0, errno.EINTR, errno.EAGAIN):
            return self._failed(piece, code)
        if result == 0 and not writing:
            return self._failed(piece, errno.EIO, f"the file ends at {piece.offset}", SHORTENED)
        count = max(result, 0)
        if count < piece.view.nbytes:
            count -= count % piece.file.offset_align_bytes  # the rest must start aligned again
        piece.view, piece.offset = piece.view[count:], piece.offset + count
        piece.tries = 0 if count else piece.tries + 1
        if piece.tries <= RETRIES_MAX:
            return None
        reason = os.strerror(code) if code else "nothing was transferred"
        return self._failed(piece, errno.EIO, f"{reason}, {piece.tries} times in a row")

    def _failed(
        self, piece: Piece, code: int, found: str | None = None, why: tuple[str, str] | None = None
    ) -> OSError:
        free = self.io.free_bytes(piece.file.fd) if code != errno.EIO else None
        what = f"{verb(piece.ticket.writing)} of {piece.view.nbytes} bytes at offset {piece.offset}"
        return os_error(code, what, piece.file.path, found=found, free=free, why=why)

    def end(self, piece: Piece, error: OSError | None) -> None:
        """A piece is over, and its transfer where it was the last. Lock held."""
        ticket, file = piece.ticket, piece.file
        piece.view = memoryview(b"")  # Given back before the ticket is done.
        self.pieces -= 1
        ticket.running -= 1
        if error and (ticket.error is None or piece.offset < ticket.error[0]):
            ticket.error = piece.offset, error
        if error and ticket.uncut:
            ticket.uncut.clear()
            self.queue.remove(ticket)
        if not ticket.running and not ticket.uncut:
            ticket.file = None
            ticket.finish()
            self.pending[file] -= 1
            if not self.pending[file]:
                del self.pending[file]
        self.wake()
