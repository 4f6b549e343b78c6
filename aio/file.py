"""An open file whose transfers run in the background, and what a backend is to it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Protocol

from aio.region import Region
from aio.system import ALIGN_BYTES, IO
from aio.transfer import Part, Ticket

DEPTH_MAX = 4096
"""Pieces that may be under way at once in one backend."""

PIECE_BYTES_MAX = 1 << 30
"""One call of the system moves at most about 2 GiB on Linux."""

ENGINE_VERSION = 6
"""Of the compiled engine, as `src/module.cpp` has it."""


class Backend(Protocol):
    """What moves the bytes: see `aio.open_backend`."""

    name: str
    io: IO

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """Starts a transfer of all `parts`; File has checked bounds and alignment.

        Raises:
            ValueError: the backend or the file is closed.
            RuntimeError: called in a forked child.
        """

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is under way."""

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child."""

    def close(self) -> None:
        """Finishes what is queued, then ends. Closing twice is fine, as is a fork.

        Ctrl-C ends the wait, but not the work; closing again waits again.
        """


class File(Region):
    """A file of fixed size; see Region.

    Attributes:
        path: for messages; an unnamed file shows its directory.
        filled: whether zeros were written into all of it, as space could not be reserved.
        fd: for backends. Nobody else may close it.
    """

    def __init__(
        self,
        backend: Backend,
        fd: int,
        path: str,
        bytes: int,
        direct: bool,
        notice: str | None,
        align: tuple[int, int] = (ALIGN_BYTES, ALIGN_BYTES),
    ) -> None:
        """`align`: what O_DIRECT asks of addresses, and of offsets and lengths, in bytes."""
        self.path = path
        self.bytes = bytes
        self.direct = direct
        self.notice = notice
        self.memory_align_bytes, self.offset_align_bytes = align if direct else (1, 1)
        self.filled = False
        self.fd = fd
        self.closed = False
        self._backend = backend
        self._pid = os.getpid()
        self._close_fd = weakref.finalize(self, _close_fd, backend.io, fd, self._pid)
        self._close_fd.atexit = False  # at exit threads may still write; the system closes it

    def close(self) -> None:
        """See Region.close."""
        if os.getpid() != self._pid:
            return
        self.closed = True
        self._backend.drain(self)
        self._close_fd()

    def _start(self, writing: bool, parts: Sequence[Part]) -> Ticket:
        return self._backend.submit(self, writing, parts)

    def _check_process(self) -> None:
        self._backend.check_process()


def _close_fd(io: IO, fd: int, pid: int) -> None:
    if os.getpid() == pid:
        io.close(fd)


def check_limits(depth: int, piece_bytes: int) -> None:
    """Raises ValueError where a backend cannot have these."""
    if not 1 <= depth <= DEPTH_MAX:
        raise ValueError(f"depth={depth}: expected 1 to {DEPTH_MAX}; try 32")
    if piece_bytes % ALIGN_BYTES or not 0 < piece_bytes <= PIECE_BYTES_MAX:
        raise ValueError(
            f"piece_bytes={piece_bytes}: expected a multiple of {ALIGN_BYTES} up to "
            f"{PIECE_BYTES_MAX}, as O_DIRECT and preadv ask; try {4 << 20}"
        )
