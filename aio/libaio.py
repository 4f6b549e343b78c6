"""Transfers by the PyPI package `libaio`: for machines where the engine was not compiled.

One thread of Python submits and reaps; it holds the GIL except while it waits. Asynchronous for
O_DIRECT only, like all of Linux AIO. See [Note: Lifetimes] in pool.py: it holds here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import libaio
import numpy as np

from aio.counters import LATENCIES, Counters, latency_bucket
from aio.pool import (
    RETRIES_MAX,
    RETRY_DELAY_S,
    Request,
    check_limits,
    close_at_exit,
    failure_of,
)
from aio.system import ALIGN_BYTES, IO, SystemIO
from aio.ticket import Ticket

if TYPE_CHECKING:
    from aio.file import File


class _Piece:
    """Bytes [at, stop) of a request, the system's to move; `bytes` are held of those in flight."""

    __slots__ = ("at", "began", "bytes", "due", "request", "start", "stop", "tries")

    def __init__(self, request: Request, start: int, stop: int) -> None:
        self.request = request
        self.start = self.at = start
        self.stop = stop
        self.bytes = stop - start
        self.tries = 0
        self.due = self.began = 0.0


class _State:
    """What callers and the thread share; `changed` guards the queue, closing and the counts."""

    def __init__(self, depth: int, piece_bytes: int, inflight_bytes_max: int) -> None:
        self.depth = depth
        self.piece_bytes = piece_bytes
        self.inflight_bytes_max = inflight_bytes_max
        self.io: IO = SystemIO()
        self.pid = os.getpid()
        self.context: Any = libaio.AIOContext(depth)
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # also by what is over
        self.changed = threading.Condition()
        self.queue: deque[Request] = deque()
        self.closing = False
        self.ended = False
        self.pieces = 0  # cut and not over
        self.inflight_bytes = 0
        self.ready: list[_Piece] = []  # the thread's alone, as are those submitted
        self.submitted = 0
        self.bytes = {False: 0, True: 0}  # by whether they were written
        self.operations = self.retries = self.depth_max = 0
        self.latencies = [0] * LATENCIES
        self.cpu_seconds = 0.0


class LibAio:
    """The backend `libaio`, for any number of files.

    Args:
        depth: pieces under way at once.
        piece_bytes: longest transfer of one call, a multiple of 4096.
        inflight_bytes_max: bytes handed to the system at once, at least `piece_bytes`.

    Raises:
        ValueError: an argument is out of its range.
        OSError: the kernel has no room for it; see `aio.probe`.
    """

    name = "libaio"

    def __init__(
        self,
        *,
        depth: int = 32,
        piece_bytes: int = 4 << 20,
        inflight_bytes_max: int = 256 << 20,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: expected at least 1; try 32")
        check_limits(piece_bytes, inflight_bytes_max)
        self._state = _State(depth, piece_bytes, inflight_bytes_max)
        self.io = self._state.io
        self._thread = threading.Thread(
            target=_work, args=(self._state,), name="aio-libaio", daemon=True
        )
        weakref.finalize(self, _tell_to_end, self._state).atexit = False
        self._thread.start()
        close_at_exit(self)

    def submit(self, file: File, writing: bool, view: memoryview, offset: int) -> Ticket:
        """Queues a transfer of the bytes of `view`; File has checked bounds and alignment.

        Raises:
            ValueError: the backend or the file is closed.
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
            os.eventfd_write(state.wake, 1)
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
                state.cpu_seconds,
            )

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child ([Note: What a forked child may touch])."""
        if os.getpid() != self._state.pid:
            raise RuntimeError(
                f"file I/O asked for in process {os.getpid()}, a fork of {self._state.pid} which "
                "owns the thread; it does not survive a fork; open a backend in the child"
            )

    def close(self) -> None:
        """Finishes what is queued, then ends and joins the thread. Closing twice is fine."""
        if os.getpid() != self._state.pid:
            return
        _tell_to_end(self._state)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> LibAio:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell_to_end(state: _State) -> None:
    if os.getpid() != state.pid:
        return
    with state.changed:
        state.closing = True
        if not state.ended:
            os.eventfd_write(state.wake, 1)


def _work(state: _State) -> None:
    while _work_once(state):
        pass
    with state.changed:
        state.ended = True
        os.close(state.wake)
    state.context.close()


def _work_once(state: _State) -> bool:
    """Cuts, submits, waits, takes what is over; False when closed and nothing is left to do."""
    with state.changed:
        if state.closing and not state.queue and not state.pieces:
            return False
        _cut(state)
    now = time.monotonic()
    due = [piece for piece in state.ready if piece.due <= now]
    state.ready = [piece for piece in state.ready if piece.due > now]
    state.ready += due[_submit(state, due, now) :]
    state.depth_max = max(state.depth_max, state.submitted)
    waiting = select.poll()
    waiting.register(state.wake, select.POLLIN)
    waiting.poll(RETRY_DELAY_S * 1e3 if state.ready else None)
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(state.wake)
    for block, result, _ in state.context.getEvents(0, timeout=0):
        state.submitted -= 1
        _complete(state, block.piece, result)
    state.cpu_seconds = time.thread_time()
    return True


def _cut(state: _State) -> None:
    while state.queue and state.pieces < state.depth:
        request = state.queue[0]
        start = request.given
        stop = min(start + state.piece_bytes, request.view.nbytes)
        if state.inflight_bytes + stop - start > state.inflight_bytes_max:
            return
        state.ready.append(_Piece(request, start, stop))
        request.given = stop
        request.running += 1
        state.pieces += 1
        state.inflight_bytes += stop - start
        if stop == request.view.nbytes:
            state.queue.popleft()


def _submit(state: _State, pieces: list[_Piece], now: float) -> int:
    """Hands pieces to the kernel: how many are not to be handed over again."""
    done = 0
    while done < len(pieces):
        blocks = [_block(state, piece) for piece in pieces[done:]]
        try:
            taken = state.context.submit(blocks)
        except OSError as error:  # of the first; the others were not looked at
            if error.errno in (errno.EAGAIN, errno.EINTR):
                break
            _complete(state, pieces[done], -(error.errno or errno.EIO))
            done += 1
            continue
        for piece in pieces[done : done + taken]:
            piece.began = now
        state.submitted += taken
        done += taken
        if taken == 0:
            break
    return done


def _block(state: _State, piece: _Piece) -> Any:
    request = piece.request
    view = request.view[piece.at : piece.stop]
    address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    block = libaio.AIOBlock(
        libaio.AIOBLOCK_MODE_WRITE if request.writing else libaio.AIOBLOCK_MODE_READ,
        request.file.fd,
        [(ctypes.c_char * view.nbytes).from_address(address)],  # also of what is read-only
        request.offset + piece.at,
        eventfd=state.wake,
    )
    block.piece = piece
    return block


def _complete(state: _State, piece: _Piece, result: int) -> None:
    """What the kernel said of a piece: it is over, goes on where it stands, or has failed."""
    request, failure = piece.request, None
    moved = max(result, 0)
    if request.file.direct:
        moved -= moved % ALIGN_BYTES  # what is left must start aligned again
    if result < 0 and -result not in (errno.EINTR, errno.EAGAIN):
        failure = failure_of(state.io, request, piece.at, piece.stop, -result)
    elif result == 0 and not request.writing:
        text = f"the file ends at {request.offset + piece.at}"
        failure = failure_of(state.io, request, piece.at, piece.stop, errno.EIO, text)
    elif moved == 0:
        piece.tries += 1
        piece.due = time.monotonic() + RETRY_DELAY_S
        if piece.tries > RETRIES_MAX:
            reason = os.strerror(-result) if result < 0 else "nothing was transferred"
            text = f"{reason}, {piece.tries} times in a row"
            failure = failure_of(state.io, request, piece.at, piece.stop, errno.EIO, text)
    else:
        piece.at += moved
        piece.tries = 0
    with state.changed:
        _count(state, piece, moved)
        if failure is None and piece.at < piece.stop:
            state.retries += 1
            state.ready.append(piece)
        else:
            _end(state, piece, failure)


def _count(state: _State, piece: _Piece, moved: int) -> None:
    file, writing = piece.request.file, piece.request.writing
    state.bytes[writing] += moved
    state.operations += 1
    state.latencies[latency_bucket(time.monotonic() - piece.began)] += 1
    file.operations += 1
    if writing:
        file.bytes_written += moved
    else:
        file.bytes_read += moved


def _end(state: _State, piece: _Piece, failure: OSError | None) -> None:
    request = piece.request
    state.pieces -= 1
    state.inflight_bytes -= piece.bytes
    request.running -= 1
    if failure is not None:
        if request.failure is None or piece.start < request.failure_offset:
            request.failure, request.failure_offset = failure, piece.start
        if request.given < request.view.nbytes:
            state.queue.remove(request)
            request.given = request.view.nbytes
    if request.running == 0 and request.given == request.view.nbytes:
        request.view = memoryview(b"")
        request.file.pending -= 1
        request.ticket.finish(request.failure)
        state.changed.notify_all()
