"""Transfers by the compiled engine: io_uring, Linux AIO or threads, without the GIL.

One thread of the engine cuts transfers into pieces, hands them to the kernel and takes what is
over; Python only starts and waits. See [Note: One thread] in src/engine.h and
[Note: Buffers under way] in src/module.cpp.
"""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aio import _native
from aio.errors import SHORTENED, STOPPED, os_error
from aio.file import ENGINE_VERSION, File, check_limits
from aio.system import IO
from aio.transfer import Part, Ticket, asked, check_process, verb

if TYPE_CHECKING:
    from typing_extensions import Self

if getattr(_native, "VERSION", 0) != ENGINE_VERSION:
    # An editable installation takes new Python with `git pull`, and new modules with `make` only.
    warnings.warn(
        "asked for the compiled modules that belong to the Python files here; found others, of "
        "another version, which are not used, and all is slower; likely cause: the files are "
        "newer, as after git pull; try: make, or pip install -e . again",
        RuntimeWarning,
        stacklevel=2,
    )
    raise ImportError(f"aio._native is not of version {ENGINE_VERSION}: run make")

_END_OF_FILE, _NO_PROGRESS, _STOPPED = 1, 2, 3


def explained(path: str, writing: bool, failure: tuple[int, int, int, int, int]) -> OSError:
    """What the engine says of a transfer that failed, in words."""
    code, cause, offset, count, last_code = failure
    text, why = None, None
    if cause == _END_OF_FILE:
        text, why = f"the file ends at {offset}", SHORTENED
    elif cause == _NO_PROGRESS:
        reason = os.strerror(last_code) if last_code else "nothing was transferred"
        text = f"{reason}, again and again"
    elif cause == _STOPPED:
        text, why = f"the engine has stopped ({os.strerror(last_code)})", STOPPED
    what = f"{verb(writing)} of {count} bytes at offset {offset}"
    free = IO().free_bytes(os.path.dirname(path)) if code != errno.EIO else None
    return os_error(code, what, path, found=text, free=free, why=why)


class NativeTicket(Ticket):
    """The ticket of a request of the engine."""

    __slots__ = ("_file_path", "_request", "_writing")

    def __init__(self, file: File, writing: bool, what: str, request: _native.Request) -> None:
        super().__init__(what)
        self._file_path = file.path
        self._writing = writing
        self._request = request

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._request.done()

    def _wait(self) -> None:
        self._request.wait()

    def failure(self) -> OSError | None:
        """See Ticket.failure."""
        found = self._request.failure()
        return None if found is None else explained(self._file_path, self._writing, found)


class NativeBackend:
    """A backend of the engine, for any number of files.

    A backend that is dropped finishes what is under way, like one that is closed.

    Args:
        name: `io_uring`, `linux_aio` or `threads`.
        depth: pieces under way at once; with `threads`, threads.
        piece_bytes: longest transfer of one call, a multiple of 4096.

    Raises:
        ValueError: an argument is out of its range.
        OSError: the kernel does not give it; see `aio.probe`.
    """

    def __init__(self, name: str, depth: int, piece_bytes: int) -> None:
        check_limits(depth, piece_bytes)
        self.name = name
        self.io = IO()
        self._pid = os.getpid()
        self._engine = _native.Engine(_native.KINDS.index(name), depth, piece_bytes)
        weakref.finalize(self, _close, self._engine, self._pid).atexit = False

    def address(self) -> int:
        """Where the engine lies, for other extensions; as long as the backend lives."""
        self.check_process()
        return self._engine.address()

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """See Backend.submit."""
        self.check_process()
        what = f"{asked(writing, parts)} of {file.path}"
        request = self._engine.submit(file, writing, file.offset_align_bytes, tuple(parts))
        if request is None:
            closed = "file" if file.closed else "backend"
            raise ValueError(f"{what}: the {closed} is closed; open a new one")
        return NativeTicket(file, writing, what, request)

    def drain(self, file: File) -> None:
        """See Backend.drain."""
        self._engine.drain(file.fd)

    def check_process(self) -> None:
        """See Backend.check_process."""
        check_process(self._pid, "file I/O")

    def close(self) -> None:
        """See Backend.close."""
        _close(self._engine, self._pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(engine: _native.Engine, pid: int) -> None:
    if os.getpid() == pid:
        engine.close()
