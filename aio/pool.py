"""A pool of threads that moves bytes with preadv and pwritev: the backend that runs anywhere.

See [Note: Lifetimes] in request.py.
"""

from __future__ import annotations

import errno
import threading
import time

from aio.request import RETRY_DELAY_S, SLEEP_S_MAX, Piece, Queued, Requests
from aio.system import IO, SystemIO


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
        requests = Requests(SystemIO() if io is None else io, piece_bytes, inflight_bytes_max)
        super().__init__(
            requests,
            [
                threading.Thread(target=_work, args=(requests,), name=f"aio-{n}", daemon=True)
                for n in range(threads)
            ],
        )


def _work(requests: Requests) -> None:
    while _work_once(requests):
        pass


def _work_once(requests: Requests) -> bool:
    """Moves one piece; False when the pool is closed and nothing is left to do.

    A function of its own, so that an idle thread keeps no file or buffer alive.
    """
    with requests.lock:
        while (piece := requests.take()) is None:
            if requests.closing and not requests.queue:
                return False
            requests.changed.wait(SLEEP_S_MAX)
        requests.depth_max = max(requests.depth_max, requests.pieces)
    began = time.monotonic()
    moved, calls, failure = _transfer(requests.io, piece)
    took = time.monotonic() - began
    with requests.lock:
        requests.count(piece, moved, calls, calls - 1, took)
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
