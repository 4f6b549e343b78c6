"""A pool of threads that moves bytes with preadv and pwritev: the backend that runs anywhere.

See [Note: Lifetimes] in request.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from queue import Empty, SimpleQueue

from aio.errors import os_error
from aio.queued import Queued
from aio.request import RETRY_DELAY_S, Piece, Requests
from aio.system import IO, SystemIO
from aio.ticket import NO_MEMORY, SLEEP_S_MAX


class Pool(Queued):
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
        requests = _Requests(
            threads, SystemIO() if io is None else io, piece_bytes, inflight_bytes_max
        )
        work = functools.partial(_work, requests)
        super().__init__(requests, work, [f"aio-{number}" for number in range(threads)])


class _Requests(Requests):
    """Requests whose threads sleep until there is a token for each."""

    def __init__(self, threads: int, io: IO, piece_bytes: int, inflight_bytes_max: int) -> None:
        super().__init__(io, piece_bytes, inflight_bytes_max)
        self.tokens: SimpleQueue[None] = SimpleQueue()  # whose `put` may interrupt another
        self._tokens_max = threads

    def wake(self) -> None:
        """See Requests.wake. Where tokens are left, somebody is about to look anyway."""
        if self.tokens.qsize() < self._tokens_max:
            self.tokens.put(None)


def _work(requests: _Requests) -> None:
    while True:
        try:
            if not _work_once(requests):
                return
        except MemoryError:  # what it was about is told; there may be more again
            time.sleep(RETRY_DELAY_S)


def _work_once(requests: _Requests) -> bool:
    """Moves one piece or sleeps; False when the pool is closed and nothing is left to do.

    A function of its own, so that an idle thread keeps no file or buffer alive.
    """
    with requests.lock:
        piece = requests.take()
    if piece is None:
        with requests.lock:
            over = requests.is_over()
        if over:
            requests.wake()  # the next thread
        else:
            with contextlib.suppress(Empty):
                requests.tokens.get(timeout=SLEEP_S_MAX)
        return not over
    failure: OSError | None = NO_MEMORY
    try:  # at once: what is taken must end, also where there is no memory to wake another
        if requests.waiting:
            requests.wake()
        began = time.monotonic()
        moved, calls, failure = _transfer(requests.io, piece)
        took = time.monotonic() - began
        with requests.lock:
            requests.count(piece, moved, calls, calls - 1, took)
    except MemoryError:
        raise
    except Exception as error:  # of a broken injected IO: no thread is lost by it
        ticket, found = piece.request.ticket, f"{type(error).__name__}: {error}"
        failure = os_error(errno.EIO, ticket.what, piece.request.file.path, found=found)
    finally:
        requests.end(piece, failure)
    return True


def _transfer(io: IO, piece: Piece) -> tuple[int, int, OSError | None]:
    """Moves all of a piece: (bytes moved, calls made, what failed)."""
    request, code, calls, moved = piece.request, 0, 0, 0
    fd, call = request.file.fd, io.pwritev if request.writing else io.preadv
    while piece.view.nbytes:
        calls += 1
        try:
            count = call(fd, [piece.view], piece.offset)
        except (InterruptedError, BlockingIOError) as error:
            count, code = 0, error.errno or 0
        except OSError as error:
            return moved, calls, piece.failed(io, error.errno or errno.EIO)
        except MemoryError:
            return moved, calls, piece.failed(io, errno.ENOMEM)
        except Exception as error:  # a broken injected IO must not leave waiters waiting
            return moved, calls, piece.failed(io, errno.EIO, f"{type(error).__name__}: {error}")
        else:
            if count == 0 and not request.writing:
                return moved, calls, piece.at_end_of_file(io)
        moved += piece.moved(count)
        if piece.tries:
            failure = piece.without_progress(io, code)
            if failure is not None:
                return moved, calls, failure
            time.sleep(RETRY_DELAY_S)
    return moved, calls, None
