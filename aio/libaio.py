"""Transfers by the PyPI package `libaio`: for machines where the engine was not compiled.

One thread of Python submits and reaps, and lets the GIL go in the kernel's calls. Asynchronous for
O_DIRECT only, like all of Linux AIO. See [Note: Lifetimes] and [Note: Without memory] in
request.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import libaio

from aio.errors import BROKEN
from aio.file import is_lost
from aio.queued import Queued
from aio.region import address_of
from aio.request import RETRY_DELAY_S, Broken, Piece, Requests
from aio.system import IO, SystemIO
from aio.ticket import NO_MEMORY, SLEEP_S_MAX, taken_out

NEVER = float("inf")
"""When a piece is due that the kernel has."""

_LOST: Broken = (errno.ENOMEM, "no memory was left for what libaio had to say", None)


class _Wake:
    """A pipe, on which the kernel waits beside what is under way.

    A pipe has an inode of its own, which tells it from what has its numbers where something else in
    the process closed it: see [Note: Descriptors closed by others] in file.py. All eventfds have
    one in common.
    """

    _ends: Sequence[int] = ()

    def __init__(self, io: IO) -> None:
        self._io = io
        self._identities: list[tuple[int, ...]] = []
        self._setting: list[threading.Lock] = []  # each held by a call of `set` in its midst
        self._closing = False
        self._closer = threading.Lock()  # never waited for
        self._closed: list[int] = []  # ends
        self._ends = ends = list[int]()
        # No step of Python between call and list, where a signal handler could raise.
        made = map(os.pipe2, (os.O_CLOEXEC | os.O_NONBLOCK,))
        ends.extend(itertools.chain.from_iterable(made))
        self._identities += [io.identity(fd) for fd in self._ends]

    def is_ours(self) -> bool:
        return not any(map(self._lost, (0, 1)))

    def set(self) -> None:
        under_way = threading.Lock()
        try:
            with under_way:  # let go in one step, whatever a signal handler raises
                self._setting.append(under_way)
                if not self._closing and not self._lost(1):
                    with contextlib.suppress(BlockingIOError):  # full: it is set
                        os.write(self._ends[1], b"\0")
        finally:
            taken_out(self._setting, under_way)
            self._close_unless_used()

    def clear(self) -> None:
        if not self._lost(0):
            with contextlib.suppress(BlockingIOError):
                os.read(self._ends[0], 1 << 16)  # all that it holds

    def close(self) -> None:
        """Who is in the midst of `set`, which no lock keeps out, closes it at the end of that."""
        self._closing = True
        self._close_unless_used()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        """Closes what the exception of a signal handler has left open; at exit the system does."""
        if not at_exit():
            self._close_ends()

    def _close_unless_used(self) -> None:
        if not self._closing or any(one.locked() for one in self._setting.copy()):
            return
        if self._closer.acquire(blocking=False):  # else somebody is at it
            try:
                self._close_ends()
            finally:
                self._closer.release()

    def _close_ends(self) -> None:
        for end, fd in enumerate(self._ends):
            if end not in self._closed:
                if not self._lost(end):
                    os.close(fd)
                self._closed.append(end)

    def block(self) -> Any:
        """A poll, to be submitted, that is over once it is set."""
        return libaio.AIOBlock(
            libaio.AIOBLOCK_MODE_POLL, self._ends[0], event_mask=int(select.POLLIN)
        )

    def _lost(self, end: int) -> bool:
        return bool(self._identities) and is_lost(self._io, self._ends[end], self._identities[end])


class _State(Requests):
    """What callers and the thread share, and what the thread alone knows."""

    def __init__(self, depth: int, piece_bytes: int, inflight_bytes_max: int) -> None:
        super().__init__(SystemIO(), piece_bytes, inflight_bytes_max)
        self.depth = depth
        self.context: Any = libaio.AIOContext(depth + 1)  # and what wakes it
        try:
            self.waker = _Wake(self.io)
        except BaseException:
            self.context.close()
            raise
        self.armed = False  # the kernel waits for the pipe, too
        self.cut: list[Piece | None] = [None] * depth  # and not over: the thread's alone
        self.submitted = 0

    def cut_all(self) -> None:
        """Cuts as many pieces as there is room for. Lock held."""
        for place, taken in enumerate(self.cut):
            if taken is None:
                self.cut[place] = self.take()
                if self.cut[place] is None:
                    return

    def end(self, piece: Piece, failure: OSError | None) -> None:
        """See Requests.end."""
        Requests.end(self, piece, failure)  # and not `super()`, which takes memory
        self.cut[self.cut.index(piece)] = None

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
    broken: Broken | None = None

    def give_up() -> None:
        _give_up(state, broken or _LOST)

    try:
        while _cut(state):
            _submit(state)
            _reap(state)
    except Exception as error:  # the kernel refuses the very calls: nobody is left waiting
        broken = _why(error)
    with state.lock:
        state.broken = broken
        state.closing = state.ended = True
    _insist(state.waker.close)
    try:
        _insist(state.context.close)  # returns when nothing is under way
    finally:
        if broken is not None:
            _insist(give_up)


def _why(error: Exception) -> Broken:
    if isinstance(error, (MemoryError, ctypes.ArgumentError)):  # what the kernel has said is lost
        return _LOST
    try:
        return errno.EIO, f"libaio takes no more calls ({type(error).__name__}: {error})", BROKEN
    except MemoryError:
        return _LOST


def _insist(step: Callable[[], object]) -> None:
    """Begins it anew until there is memory for all of it."""
    while True:
        try:
            step()
            return
        except MemoryError:
            continue


def _give_up(state: _State, broken: Broken) -> None:
    """Everything fails, and nothing more is taken on."""
    while True:
        for piece in state.cut:
            if piece is not None:
                state.end(piece, _failed(state, piece, broken))
        with state.lock:
            state.cut_all()
            if not state.pieces and not state.waiting:
                return


def _failed(state: _State, piece: Piece, broken: Broken) -> OSError:
    try:
        return piece.failed(state.io, *broken)
    except MemoryError:
        return NO_MEMORY


def _cut(state: _State) -> bool:
    """Cuts what there is room for; False when closed and nothing is left to do."""
    if not state.waker.is_ours():
        raise OSError(errno.EBADF, "its pipe is closed, or another file's")
    try:
        with state.lock:
            if not state.pieces and state.is_over():
                return False
            state.cut_all()
    except MemoryError:  # there may be more the next time
        time.sleep(RETRY_DELAY_S)
    return True


def _submit(state: _State) -> None:
    """Hands to the kernel what is due, until it has no room."""
    blocks, now = [], time.monotonic()
    for piece in state.cut:
        if piece is not None and piece.due <= now:
            try:
                blocks.append(_block(state, piece))
                piece.began = now
            except MemoryError:
                state.end(piece, NO_MEMORY)
    while blocks:
        try:
            taken = _taken(state, blocks)
        except OSError as error:  # of the first; the others were not looked at
            _complete(state, blocks.pop(0).piece, -(error.errno or errno.EIO))
            continue
        for block in blocks[:taken]:
            block.piece.due = NEVER
        state.submitted += taken
        if taken == 0:
            return
        del blocks[:taken]


def _taken(state: _State, blocks: list[Any]) -> int:
    """How many the kernel has taken. After a MemoryError that is not known."""
    try:
        return int(state.context.submit(blocks))
    except (BlockingIOError, InterruptedError):
        return 0
    except ctypes.ArgumentError:  # no memory for the very call, so that there was none
        return 0


def _reap(state: _State) -> None:
    """Waits until something is over, or there is more to do; takes what is over."""
    if not state.armed:
        state.armed = _taken(state, [state.waker.block()]) == 1
    if state.pieces > state.submitted or not state.armed:
        wait_s = RETRY_DELAY_S
    elif state.submitted == 0 and (state.waiting or state.closing):  # what was cut was refused
        wait_s = 0.0
    else:
        wait_s = SLEEP_S_MAX
    events: list[tuple[Any, int, int]] = []
    with contextlib.suppress(InterruptedError, ctypes.ArgumentError):  # as in `_taken`
        events = state.context.getEvents(1, timeout=wait_s)
    for block, result, _ in events:
        if block.mode == libaio.AIOBLOCK_MODE_POLL:
            state.armed = False
            state.waker.clear()
        else:
            state.submitted -= 1
            _complete(state, block.piece, result)


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
    failure: OSError | None = NO_MEMORY
    try:
        moved, failure = _outcome(state, piece, result)
        again = failure is None and piece.view.nbytes > 0
        now = time.monotonic()
        with state.lock:
            state.count(piece, moved, 1, int(again), now - piece.began)
        piece.due = now + RETRY_DELAY_S if piece.tries else 0.0
    except MemoryError:  # it is not counted
        piece.due = 0.0
    if failure is not None or not piece.view.nbytes:
        state.end(piece, failure)


def _outcome(state: _State, piece: Piece, result: int) -> tuple[int, OSError | None]:
    """Bytes that count, and what has failed."""
    code = max(-result, 0)
    if code not in (0, errno.EINTR, errno.EAGAIN):
        return 0, piece.failed(state.io, code)
    if result == 0 and not piece.request.writing:
        return 0, piece.at_end_of_file(state.io)
    return piece.moved(max(result, 0)), piece.without_progress(state.io, code)
