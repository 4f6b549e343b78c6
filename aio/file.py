"""An open file whose transfers run in the background: bounds, alignment, counters, closing."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt

from aio.counters import Counters
from aio.system import ALIGN_BYTES, IO
from aio.ticket import Ticket

if TYPE_CHECKING:
    from typing_extensions import Buffer

Memory: TypeAlias = Union["Buffer", npt.NDArray[Any]]
"""What transfers read and write: any object with the buffer protocol."""


class Backend(Protocol):
    """What moves the bytes: see `aio.open_backend`."""

    name: str
    io: IO

    def submit(self, file: File, writing: bool, view: memoryview, offset: int) -> Ticket:
        """Starts a transfer that File has checked, counted in `file.pending` until it is over.

        ValueError where the file or the backend is closed.
        """

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is under way."""

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child."""

    def counters(self) -> Counters:
        """Totals so far, of all files."""

    def close(self) -> None:
        """Finishes what is under way, then ends. Closing twice is fine."""


class File:
    """A file of fixed size. Transfers may be asked for by several threads at once.

    Attributes:
        path: for messages; an unnamed file shows its directory.
        bytes: size of the file.
        direct: whether O_DIRECT is on, so that addresses, lengths and offsets must be multiples
            of 4096.
        notice: one sentence for a person where something is not as it should be, else None.
        bytes_read, bytes_written, operations: totals so far; operations counts system calls.
        closed: whether `close` was called.
        fd, pending: for backends; `pending` transfers are under way.
    """

    def __init__(
        self, backend: Backend, fd: int, path: str, bytes: int, direct: bool, notice: str | None
    ) -> None:
        self.path = path
        self.bytes = bytes
        self.direct = direct
        self.notice = notice
        self.bytes_read = 0
        self.bytes_written = 0
        self.operations = 0
        self.fd = fd
        self.pending = 0
        self._backend = backend
        self._pid = os.getpid()
        self.closed = False
        self._close_fd = weakref.finalize(self, _close_fd, backend.io, fd, self._pid)
        self._close_fd.atexit = False  # at exit threads may still write; the system closes it

    def read_into(self, buffer: Memory, offset: int) -> Ticket:
        """Starts to fill all of `buffer` from `offset` bytes into the file.

        Args:
            buffer: C-contiguous writable memory (memoryview, NumPy array, mmap). It belongs to
                the transfer until the ticket is done.
            offset: bytes from the start of the file.

        Raises:
            ValueError: the buffer cannot be used, is not aligned, or reaches past the end, or
                the file is closed.
            RuntimeError: called in a forked child.
        """
        return self._backend.submit(self, False, self._check(buffer, offset, False), offset)

    def write_from(self, buffer: Memory, offset: int) -> Ticket:
        """Starts to write all of `buffer` at `offset` bytes into the file.

        Args and Raises are those of `read_into`; the buffer may be read-only.
        """
        return self._backend.submit(self, True, self._check(buffer, offset, True), offset)

    def sync(self) -> None:
        """Returns when everything written by finished transfers is durable."""
        self._check_open("sync")
        self._backend.io.fsync(self.fd)

    def close(self) -> None:
        """Waits for transfers under way, then closes. Closing twice is fine.

        In a forked child it does nothing: see [Note: What a forked child may touch] in pool.py.
        """
        if os.getpid() != self._pid:
            return
        self.closed = True
        self._backend.drain(self)
        self._close_fd()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, asked: str) -> None:
        self._backend.check_process()
        if self.closed:
            raise ValueError(f"{asked} of {self.path}: the file is closed; open a new one")

    def _check(self, buffer: Memory, offset: int, writing: bool) -> memoryview:
        """The bytes of `buffer`, once everything that can be wrong about them is ruled out."""
        view = memoryview(cast("Buffer", buffer))
        verb = "write" if writing else "read"
        asked = f"{verb} of {view.nbytes} bytes at offset {offset}"
        self._check_open(asked)
        if not view.c_contiguous:
            raise ValueError(
                f"{asked} of {self.path}: the buffer is not C-contiguous, so that it is not one "
                "stretch of memory; pass a contiguous copy"
            )
        if view.readonly and not writing:
            raise ValueError(
                f"{asked} of {self.path}: the buffer is read-only; pass a bytearray, mmap or array"
            )
        if offset < 0 or offset + view.nbytes > self.bytes:
            raise ValueError(
                f"{asked} of {self.path}: outside of its {self.bytes} bytes; the size it was "
                "created with is too small, or the offset wrong"
            )
        if view.nbytes == 0:
            return memoryview(b"")
        array = np.frombuffer(view, dtype=np.uint8)
        if self.direct:
            found = {"address": int(array.ctypes.data), "length": view.nbytes, "offset": offset}
            wrong = [f"{key} {value}" for key, value in found.items() if value % ALIGN_BYTES]
            if wrong:
                raise ValueError(
                    f"{asked} of {self.path}: {' and '.join(wrong)} not a multiple of "
                    f"{ALIGN_BYTES}, which O_DIRECT needs; use memory from mmap and whole blocks"
                )
        return array.data


def _close_fd(io: IO, fd: int, pid: int) -> None:
    if os.getpid() == pid:
        io.close(fd)
