"""Transfers by the compiled engine: io_uring, Linux AIO or threads, without the GIL.

One thread of the engine cuts transfers into pieces, hands them to the kernel and takes what is
over; Python only starts and waits. See [Note: One thread] in src/engine.h and
[Note: Buffers under way] in src/module.cpp.

[Note: Registered memory]
The kernel must find the pages of a buffer for every transfer. Memory that is registered once is
found faster, but stays in place: it counts against `ulimit -l`, so where that does not allow it,
transfers go the usual way. io_uring only.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aio import _native
from aio.built import require_version
from aio.counters import Counters
from aio.errors import BROKEN, SHORTENED, os_error
from aio.file import File
from aio.part import Part, check_limits, described, verb
from aio.region import ENGINE_VERSION, Memory, view_of
from aio.system import IO, SystemIO
from aio.ticket import Ticket

require_version(_native, ENGINE_VERSION)

DEPTH_MAX = 4096
"""Pieces that may be under way at once in one backend."""

_END_OF_FILE, _NO_PROGRESS, _QUEUE_BROKEN = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong on purpose in an engine, for tests; by default nothing."""

    errors: Mapping[int, int] = field(default_factory=dict)
    """errno by number of the piece handed to the kernel, from 1; it is not handed over then."""
    seed: int = 0
    """Of the shares of pieces that follow."""
    short_rate: float = 0.0
    """How often only a part is moved, not aligned."""
    retry_rate: float = 0.0
    """How often EINTR or EAGAIN is the answer."""
    refusal_rate: float = 0.0
    """How often the kernel has no room for a piece."""
    broken_at: int = 0
    """Number of the piece from which on the kernel refuses all; 0: it does not."""


class NativeTicket(Ticket):
    """The ticket of a request of the engine."""

    __slots__ = ("_path", "_request", "_writing")

    def __init__(self, what: str, writing: bool, path: str, request: _native.Request) -> None:
        super().__init__(what)
        self._writing = writing
        self._path = path
        self._request = request

    def done(self) -> bool:
        """Whether the transfer is over, well or not."""
        return self._request.done()

    def _wait(self, timeout: float | None) -> bool:
        return self._request.wait(timeout)

    def _failed(self) -> OSError | None:
        found = self._request.failure()
        if found is None:
            return None
        code, cause, offset, count, tries, last_code, free = found
        text, why = None, None
        if cause == _END_OF_FILE:
            text, why = f"the file ends at {offset}", SHORTENED
        elif cause == _NO_PROGRESS:
            reason = os.strerror(last_code) if last_code else "nothing was transferred"
            text = f"{reason}, {tries} times in a row"
        elif cause == _QUEUE_BROKEN:
            text, why = f"the kernel takes no more calls ({os.strerror(last_code)})", BROKEN
        asked = f"{verb(self._writing)} of {count} bytes at offset {offset}"
        free_bytes = None if free < 0 else free
        return os_error(code, asked, self._path, found=text, free=free_bytes, why=why)

    def _failed_at(self) -> int:
        found = self._request.failure()
        return 0 if found is None else found[2]

    def watch(self, signal: _native.Signal) -> None:  # type: ignore[override]
        """See Ticket.watch."""
        self._request.watch(signal)

    def unwatch(self, signal: _native.Signal) -> None:  # type: ignore[override]
        """See Ticket.unwatch."""
        self._request.unwatch(signal)


class Native:
    """A backend of the engine, for any number of files.

    A backend that is dropped finishes what is under way, like one that is closed.

    Args:
        name: `io_uring`, `linux_aio` or `threads`.
        depth: pieces under way at once; with `threads`, threads.
        piece_bytes: longest transfer of one call, a multiple of 4096.
        inflight_bytes_max: bytes handed to the system at once, at least `piece_bytes`.
        faults: what goes wrong on purpose.

    Raises:
        ValueError: an argument is out of its range.
        OSError: the kernel does not give it; see `aio.probe`.
    """

    def __init__(
        self,
        name: str,
        *,
        depth: int = 32,
        piece_bytes: int = 4 << 20,
        inflight_bytes_max: int = 256 << 20,
        faults: Faults | None = None,
    ) -> None:
        if name not in _native.KINDS:
            raise ValueError(f"backend {name!r}: the engine has {', '.join(_native.KINDS)}")
        if not 1 <= depth <= DEPTH_MAX:
            raise ValueError(f"depth={depth}: expected 1 to {DEPTH_MAX}; try 32")
        check_limits(piece_bytes, inflight_bytes_max)
        wrong = Faults() if faults is None else faults
        self.name = name
        self._pid = os.getpid()
        self._engine = _native.Engine(
            _native.KINDS.index(name),
            depth,
            piece_bytes,
            inflight_bytes_max,
            wrong.errors,
            wrong.seed,
            wrong.short_rate,
            wrong.retry_rate,
            wrong.refusal_rate,
            wrong.broken_at,
        )
        self.io: IO = _EngineIO(self._engine, self._pid)
        self._finish = weakref.finalize(self, _finish, self._engine, self._pid)

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """Starts a transfer of all `parts`; File has checked bounds and alignment.

        Raises:
            ValueError: the backend or the file is closed.
            RuntimeError: called in a forked child.
        """
        self.check_process()
        what = described(writing, parts, file.path)
        request = self._engine.submit(file, writing, file.offset_align_bytes, tuple(parts))
        if request is None:
            closed = "file" if file.closed else "backend"
            raise ValueError(f"{what}: the {closed} is closed; open a new one")
        return NativeTicket(what, writing, file.path, request)

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is queued or running."""
        self._engine.drain(file.fd)

    def register(self, buffer: Memory) -> Registration:
        """Has the kernel keep the pages of `buffer` at hand: see [Note: Registered memory].

        Any number of slabs of at most 1 GiB each; transfers within one of them profit. Where it is
        not to be had, the answer says why, and everything works as before.

        Raises:
            ValueError: the memory is read-only, not contiguous, or none.
            TypeError: it is none that transfers could move.
        """
        self.check_process()
        return Registration(self._engine, self._pid, buffer)

    def counters(self) -> Counters:
        """Totals so far."""
        self.check_process()
        return Counters(*self._engine.counters())

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child: [Note: What a forked child may touch]."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"file I/O asked for in process {os.getpid()}, a fork of {self._pid} which "
                "owns the threads; they do not survive a fork; open a backend in the child"
            )

    def close(self) -> None:
        """Finishes what is queued, then ends the thread. Closing twice is fine.

        What a signal handler raises (Ctrl-C) ends the wait, but not the work: nothing new is taken,
        the thread goes on by itself, and closing again waits again.
        """
        if os.getpid() == self._pid:
            self._engine.close()

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Registration:
    """Memory that the kernel knows, until `close` or until the backend is closed.

    Attributes:
        registered: whether it does.
        reason: one sentence for a person where it does not, else None.
    """

    def __init__(self, engine: _native.Engine, pid: int, buffer: Memory) -> None:
        view = view_of(buffer)
        if view.readonly or not view.nbytes or not view.c_contiguous:
            found = "read-only" if view.readonly else "not contiguous" if view.nbytes else "none"
            raise ValueError(
                f"asked to register {view.nbytes} bytes with the kernel; found that they are "
                f"{found}; likely it is not the memory that was "
                "meant; give what transfers will read into"
            )
        array = np.frombuffer(view, dtype=np.uint8)
        address = int(array.ctypes.data)
        code = engine.register_buffer(address, array.nbytes)
        self.registered = code == 0
        self.reason = None if self.registered else _why_not_registered(code, array.nbytes)
        self._release = weakref.finalize(self, _unregister, engine, pid, address, array)
        self._release.atexit = False
        if not self.registered:
            self._release.detach()

    def close(self) -> None:
        """Lets the pages go. Closing twice is fine."""
        self._release()


def _unregister(
    engine: _native.Engine, pid: int, address: int, array: npt.NDArray[np.uint8]
) -> None:
    if os.getpid() == pid:
        engine.unregister_buffer(address, array.nbytes)


def _why_not_registered(code: int, count: int) -> str:
    reasons = {
        errno.ENOMEM: "it is more than `ulimit -l` leaves; raise that limit",
        errno.EINVAL: "the kernel is older than 5.19, or the memory cannot be kept in place",
        errno.EOPNOTSUPP: "only io_uring has that",
        errno.ENOBUFS: "as many slabs as can be are registered already",
    }
    why = reasons.get(code, os.strerror(code))
    return f"{count} bytes are not registered with the kernel: {why}."


class _EngineIO(SystemIO):
    """The real calls; the engine forgets a descriptor before it is closed, and one that was closed
    by others when its number is given again."""

    def __init__(self, engine: _native.Engine, pid: int) -> None:
        self._engine = engine
        self._pid = pid

    def open(self, path: str, flags: int, mode: int) -> int:
        """See IO.open."""
        fd = super().open(path, flags, mode)
        if os.getpid() == self._pid:
            self._engine.forget(fd)
        return fd

    def close(self, fd: int) -> None:
        """See IO.close."""
        if os.getpid() == self._pid:
            self._engine.forget(fd)
        super().close(fd)


def _finish(engine: _native.Engine, pid: int) -> None:
    if os.getpid() == pid:
        engine.close()
