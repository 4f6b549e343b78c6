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
from aio.ticket import Ticket


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
        self._descriptor = threading.RLock()  # while it is used otherwise than by transfers
        self._syncing = self._close_after_sync = False  # both with that lock held
        self._close_fd = weakref.finalize(
            self, _close_fd, backend.io, fd, self._identity, self._pid
        )
        self._close_fd.atexit = False  # at exit threads may still write; the system closes it

    def counters(self) -> Counters:
        """Those of its backend, for all files that it serves. RuntimeError in a forked child."""
        return self._backend.counters()

    def sync(self) -> None:
        """See Region.sync."""
        self._check_process()  # before the lock, which a child may have inherited
        with self._descriptor:
            within_another = self._syncing
            try:
                self._syncing = True
                self._check_open("sync")
                if is_lost(self._backend.io, self.fd, self._identity):
                    raise self._no_descriptor("sync")
                self._fsync()
            finally:
                self._syncing = within_another
                if self._close_after_sync and not within_another:
                    self._close_fd()

    def _fsync(self) -> None:
        try:
            self._backend.io.fsync(self.fd)
        except OSError as error:
            raise os_error(error.errno or errno.EIO, "sync", self.path) from error

    def close(self) -> None:
        """See Region.close. In the midst of a `sync` of the same thread (a signal handler's close)
        it leaves the descriptor to that, which closes it at its end."""
        if os.getpid() != self._pid:
            return
        self.closed = True
        self._backend.drain(self)
        self.gone = True
        self._backend.drain(self)  # of what was queued by who had seen it open, and begun before
        with self._descriptor:
            if self._syncing:
                self._close_after_sync = True
                return
            lost = self._close_fd()
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
    except OSError:
        return True
    return any(now != then for now, then in zip(found, identity))  # where both are told
