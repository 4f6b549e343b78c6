"""An open file whose transfers run in the background: its descriptor, counters, closing."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from aio.counters import Counters
from aio.errors import os_error
from aio.part import Part, asked, verb
from aio.region import Region
from aio.system import ALIGN_BYTES, IO
from aio.ticket import Ticket, taken_out


class Backend(Protocol):
    """What moves the bytes: see `aio.open_backend`."""

    name: str
    io: IO

    def submit(self, file: File, writing: bool, parts: Sequence[Part]) -> Ticket:
        """Starts a transfer that File has checked.

        ValueError where the file or the backend is closed.
        """

    def drain(self, file: File) -> None:
        """Returns when no transfer of `file` is under way."""

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child."""

    def counters(self) -> Counters:
        """Totals so far, of all files."""

    def close(self) -> None:
        """Finishes what is queued, then ends. Closing twice is fine, as is a fork."""


class File(Region):
    """A file of fixed size; see Region.

    [Note: Descriptors closed by others]
    Where something else in the process closes the descriptor, the next file that anybody opens has
    its number. So which file it is of is looked at before each transfer, sync and close (some
    microseconds): nobody else's file is written or closed. A transfer that is under way at that
    moment may still fail with EBADF, or meet the other file.

    Attributes:
        path: for messages; an unnamed file shows its directory.
        bytes_read, bytes_written, operations: totals so far; operations counts system calls.
        fd, pending, gone: for backends; `pending` transfers are begun and not over, and none is to
            be begun once it is `gone`.
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
        self.bytes_read = 0
        self.bytes_written = 0
        self.operations = 0
        self.fd = fd
        self.pending = 0
        self._backend = backend
        self._pid = os.getpid()
        self._identity = backend.io.identity(fd)
        self.closed = False
        self.gone = False
        self._syncs: list[threading.Lock] = []  # of any thread, each held in its midst
        self._close_fd = weakref.finalize(
            self, _close_fd, backend.io, fd, self._identity, self._pid
        )
        self._close_fd.atexit = False  # at exit threads may still write; the system closes it

    def counters(self) -> Counters:
        """Those of its backend, for all files that it serves. RuntimeError in a forked child."""
        return self._backend.counters()

    def sync(self) -> None:
        """See Region.sync."""
        self._check_process()
        under_way = threading.Lock()
        try:
            with under_way:  # let go in one step, whatever a signal handler raises
                self._syncs.append(under_way)  # first: who closes it leaves the descriptor to us
                self._check_open("sync")
                if is_lost(self._backend.io, self.fd, self._identity):
                    raise self._no_descriptor("sync")
                self._fsync()
        finally:
            taken_out(self._syncs, under_way)
            if self.gone:
                self._close_descriptor()

    def _fsync(self) -> None:
        try:
            self._backend.io.fsync(self.fd)
        except OSError as error:
            if error.errno is None:  # what a signal handler has raised
                raise
            raise os_error(error.errno, "sync", self.path) from error

    def close(self) -> None:
        """See Region.close. A descriptor that is being synced (by another thread, or by what a
        signal handler has interrupted) is closed at the end of that, and not waited for."""
        if os.getpid() != self._pid:
            return
        self.closed = True
        self._backend.drain(self)
        self.gone = True
        self._backend.drain(self)  # of what was queued by who had seen it open, and begun before
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        """Closes it once, by whoever comes first, unless it is being synced."""
        if any(sync.locked() for sync in self._syncs.copy()) or not self._close_fd.alive:
            return
        try:
            lost = self._close_fd()
        except BaseException:  # of a signal handler
            if not self._close_fd.alive:  # it has forgotten what to call, and may not have done so
                _close_fd(self._backend.io, self.fd, self._identity, self._pid)
            raise
        if lost:
            raise self._no_descriptor("close")

    def _start(self, writing: bool, parts: Sequence[Part]) -> Ticket:
        if is_lost(self._backend.io, self.fd, self._identity):
            self._check_open(verb(writing))  # a signal handler may have closed it since
            raise self._no_descriptor(asked(writing, parts))
        return self._backend.submit(self, writing, parts)

    def _no_descriptor(self, what: str) -> OSError:
        found = f"its descriptor {self.fd} is closed, or another file's"
        return os_error(errno.EBADF, what, self.path, found=found)

    def _check_process(self) -> None:
        self._backend.check_process()


def _close_fd(io: IO, fd: int, identity: tuple[int, ...], pid: int) -> bool:
    """Closes a descriptor, once; whether it could not, as it is lost."""
    if os.getpid() != pid:
        return False
    if is_lost(io, fd, identity):
        return True
    io.close(fd)
    return False


def is_lost(io: IO, fd: int, identity: tuple[int, ...]) -> bool:
    """Whether `fd` is another file's by now, or nobody's."""
    try:
        found = io.identity(fd)
    except OSError as error:
        if error.errno != errno.EBADF:  # what a signal handler has raised
            raise
        return True
    if found == identity:
        return False
    return any(now != then for now, then in zip(found, identity))  # where both are told
