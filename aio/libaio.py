"""Transfers by the PyPI package `libaio`: for machines where the engine was not compiled.

One thread of Python submits and reaps, and lets the GIL go in the kernel's calls. Asynchronous for
O_DIRECT only, like all of Linux AIO.
"""

from __future__ import annotations

import ctypes
import errno
import time
from typing import Any

import libaio

from aio.file import check_limits
from aio.region import address_of
from aio.system import IO
from aio.threads import RETRY_DELAY_S, Piece, Shared, ThreadBackend


class LibaioBackend(ThreadBackend):
    """The backend `libaio`, for any number of files.

    Args:
        depth: pieces under way at once.
        piece_bytes: longest transfer of one call, a multiple of 4096.

    Raises:
        ValueError: an argument is out of its range.
        OSError: the kernel has no room for it; see `aio.probe`.
    """

    name = "libaio"

    def __init__(self, depth: int, piece_bytes: int) -> None:
        check_limits(depth, piece_bytes)
        self._begin(_LibaioShared(depth, piece_bytes), 1)


class _LibaioShared(Shared):
    """An eventfd tells the thread both of what is over and of what is new."""

    def __init__(self, depth: int, piece_bytes: int) -> None:
        super().__init__(IO(), piece_bytes)
        self._depth = depth
        self._context: Any = libaio.AIOContext(depth)
        self._context.getEvents(0)  # to see whether a container forbids that
        self._event: Any = libaio.EventFD(flags=libaio.EFD_CLOEXEC)
        self._ready: list[Piece] = []  # cut, and not with the kernel

    def wake(self) -> None:
        """See Shared.wake."""
        super().wake()
        if self._event is not None:
            self._event.write(1)

    def work(self) -> None:
        """See Shared.work."""
        while self._cut():
            self._submit()
            if self._ready:
                time.sleep(RETRY_DELAY_S)
            else:
                self._event.read()
            events = self._context.getEvents(0)
            while events:  # Popped, so that the buffers of what is over are held by nobody.
                block, result, _ = events.pop()
                piece = block.piece
                del block
                self._over(piece, self.advance(piece, result))
                del piece
        self.end_thread()

    def end_thread(self) -> None:
        """See Shared.end_thread."""
        with self.changed:
            self._event, event = None, self._event
        event.close()
        self._context.close()

    def _cut(self) -> bool:
        """Cuts what there is room for; False when closed and nothing is left to do."""
        with self.changed:
            while self.pieces < self._depth and (piece := self.take()):
                self._ready.append(piece)
            return not self.closing or self.pieces > 0 or bool(self.queue)

    def _submit(self) -> None:
        """Hands to the kernel what is ready, until it has no room."""
        while self._ready:
            try:
                taken = self._context.submit([self._block(piece) for piece in self._ready])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as refused:  # of the first; the others were not looked at
                piece = self._ready.pop(0)
                self._over(piece, self.advance(piece, -(refused.errno or errno.EIO)))
                continue
            del self._ready[:taken]

    def _block(self, piece: Piece) -> Any:
        view = piece.view
        block = libaio.AIOBlock(
            libaio.AIOBLOCK_MODE_WRITE if piece.ticket.writing else libaio.AIOBLOCK_MODE_READ,
            piece.file.fd,
            [(ctypes.c_char * view.nbytes).from_address(address_of(view))],  # of what is read-only
            piece.offset,
            eventfd=self._event,
        )
        block.piece = piece
        return block

    def _over(self, piece: Piece, error: OSError | None) -> None:
        """What the kernel had is over: the piece ends, or what is left of it is ready again."""
        if error is None and piece.view.nbytes:
            self._ready.append(piece)
            return
        with self.changed:
            self.end(piece, error)
