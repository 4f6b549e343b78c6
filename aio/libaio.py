"""Transfers by the PyPI package `libaio`: for machines where the engine was not compiled.

One thread of Python submits and reaps; it holds the GIL except while it waits. Asynchronous for
O_DIRECT only, like all of Linux AIO. See [Note: Lifetimes] in request.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import select
import time
from typing import Any

import libaio

from aio.errors import BROKEN
from aio.file import is_lost
from aio.queued import Queued
from aio.region import address_of
from aio.request import RETRY_DELAY_S, Piece, Requests
from aio.system import IO, SystemIO
from aio.ticket import NO_MEMORY, SLEEP_S_MAX


class _Wake:
    """A pipe, on which the kernel waits beside what is under way.

    A pipe has an inode of its own, which tells it from what has its numbers where something else in
    the process closed it: see [Note: Descriptors closed by others] in file.py. All eventfds have
    one in common.
    """

    def __init__(self, io: IO) -> None:
        self._io = io
        self._ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._identities = [io.identity(fd) for fd in self._ends]
        self._open = [0, 1]
        self._setting: list[None] = []  # one for each call of `set` in its midst
        self._closing = False

    def is_ours(self) -> bool:
        return not any(map(self._lost, (0, 1)))

    def set(self) -> None:
        try:
            self._setting.append(None)
            if not self._closing and not self._lost(1):
                with contextlib.suppress(BlockingIOError):  # full: it is set
                    os.write(self._ends[1], b"\0")
        finally:
            self._setting.pop()
            self._close_unless_used()

    def clear(self) -> None:
        if not self._lost(0):
            with contextlib.suppress(BlockingIOError):
                os.read(self._ends[0], 1 << 16)  # all that it holds

    def close(self) -> None:
        """Without a lock, as `set` has none: who is in the midst of that closes it."""
        self._closing = True
        self._close_unless_used()

    def _close_unless_used(self) -> None:
        while self._closing and not self._setting and self._open:
            with contextlib.suppress(IndexError):
                end = self._open.pop()
                if not self._lost(end):
                    os.close(self._ends[end])

    def block(self) -> Any:
        """A poll, to be submitted, that is over once it is set."""
        return libaio.AIOBlock(
            libaio.AIOBLOCK_MODE_POLL, self._ends[0], event_mask=int(select.POLLIN)
        )

    def _lost(self, end: int) -> bool:
        return is_lost(self._io, self._ends[end], self._identities[end])


class _State(Requests):
    """What callers and the thread share, and what the thread alone knows."""

    def __init__(self, depth: int, piece_bytes: int, inflight_bytes_max: int) -> None:
        super().__init__(SystemIO(), piece_bytes, inflight_bytes_max)
        self.depth = depth
        self.context: Any = libaio.AIOContext(depth + 1)  # and what wakes it
        try:
            self.waker = _Wake(self.io)
        except OSError:
            self.context.close()
            raise
        self.armed = False  # the kernel waits for the pipe, too
        self.ready: list[Piece] = []  # the thread's alone, as are those submitted
        self.submitted = 0
        self.live: set[Piece] = set()  # cut and not over

    def take(self) -> Piece | None:
        """See Requests.take."""
        piece = super().take()
        if piece is not None:
            self.live.add(piece)
        return piece

    def end(self, piece: Piece, failure: OSError | None) -> None:
        """See Requests.end."""
        self.live.discard(piece)
        super().end(piece, failure)

    def release(self) -> None:
        """See Requests.release."""
        self.waker.close()
        self.context.close()

    def wake(self) -> None:
        """See Requests.wake."""
        self.waker.set()


class LibAio(Queued):
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
        state = _State(depth, piece_bytes, inflight_bytes_max)
        super().__init__(state, functools.partial(_work, state), ["aio-libaio"])


def _work(state: _State) -> None:
    broken: str | None = None
    try:
        while _work_once(state):
            pass
    except Exception as error:  # the kernel refuses the very calls: nobody is left waiting
        broken = f"libaio takes no more calls ({type(error).__name__}: {error})"
    with state.lock:
        state.broken = broken
        state.closing = state.ended = True
        state.waker.close()
    try:
        state.context.close()  # returns when nothing is under way
    finally:
        if broken is not None:
            _give_up(state, broken)


def _give_up(state: _State, found: str) -> None:
    """Everything fails, and nothing more is taken on."""
    with state.lock:
        for piece in list(state.live):
            state.end(piece, _failed(state, piece, found))
        while state.waiting:
            if (one := state.take()) is not None:
                state.end(one, _failed(state, one, found))


def _failed(state: _State, piece: Piece, found: str) -> OSError:
    try:
        return piece.failed(state.io, errno.EIO, found, BROKEN)
    except MemoryError:
        return NO_MEMORY


def _work_once(state: _State) -> bool:
    """Cuts, submits, waits, takes what is over; False when closed and nothing is left to do."""
    if not state.waker.is_ours():
        raise OSError(errno.EBADF, "its pipe is closed, or another file's")
    with state.lock:
        if not state.pieces and state.is_over():
            return False
        while state.pieces < state.depth and (piece := state.take()) is not None:
            state.ready.append(piece)
    now = time.monotonic()
    due = [piece for piece in state.ready if piece.due <= now]
    state.ready = [piece for piece in state.ready if piece.due > now]
    state.ready += due[_submit(state, due, now) :]
    state.depth_max = max(state.depth_max, state.submitted)
    _reap(state)
    return True


def _reap(state: _State) -> None:
    """Waits until something is over, or there is more to do; takes what is over."""
    if not state.armed:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            state.armed = state.context.submit([state.waker.block()]) == 1
    if state.ready or not state.armed:
        wait_s = RETRY_DELAY_S
    elif state.submitted == 0 and (state.waiting or state.closing):  # what was cut was refused
        wait_s = 0.0
    else:
        wait_s = SLEEP_S_MAX
    events: list[tuple[Any, int, int]] = []
    with contextlib.suppress(InterruptedError):
        events = state.context.getEvents(1, timeout=wait_s)
    for block, result, _ in events:
        if block.mode == libaio.AIOBLOCK_MODE_POLL:
            state.armed = False
            state.waker.clear()
        else:
            state.submitted -= 1
            _complete(state, block.piece, result)


def _submit(state: _State, pieces: list[Piece], now: float) -> int:
    """Hands pieces to the kernel: how many are not to be handed over again."""
    done = 0
    while done < len(pieces):
        blocks = [_block(state, piece) for piece in pieces[done:]]
        for piece in pieces[done:]:
            piece.began = now
        try:
            taken = state.context.submit(blocks)
        except OSError as error:  # of the first; the others were not looked at
            if error.errno in (errno.EAGAIN, errno.EINTR):
                break
            _complete(state, pieces[done], -(error.errno or errno.EIO))
            done += 1
            continue
        state.submitted += taken
        done += taken
        if taken == 0:
            break
    return done


def _block(state: _State, piece: Piece) -> Any:
    view = piece.view
    block = libaio.AIOBlock(
        libaio.AIOBLOCK_MODE_WRITE if piece.request.writing else libaio.AIOBLOCK_MODE_READ,
        piece.request.file.fd,
        [(ctypes.c_char * view.nbytes).from_address(address_of(view))],  # also of what is read-only
        piece.offset,
    )
    block.piece = piece
    return block


def _complete(state: _State, piece: Piece, result: int) -> None:
    """What the kernel said of a piece: it is over, goes on where it stands, or has failed."""
    moved, code, failure = 0, max(-result, 0), None
    if code not in (0, errno.EINTR, errno.EAGAIN):
        failure = piece.failed(state.io, code)
    elif result == 0 and not piece.request.writing:
        failure = piece.at_end_of_file(state.io)
    else:
        moved = piece.moved(max(result, 0))
        failure = piece.without_progress(state.io, code)
        piece.due = time.monotonic() + RETRY_DELAY_S if piece.tries else 0.0
    again = failure is None and piece.view.nbytes > 0
    with state.lock:
        state.count(piece, moved, 1, int(again), time.monotonic() - piece.began)
        if again:
            state.ready.append(piece)
        else:
            state.end(piece, failure)
