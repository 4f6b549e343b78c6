"""An open file whose transfers run in the background, and what a backend is to it."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aio.region import Region
from aio.system import ALIGN_BYTES, IO
from aio.transfer import Part, Ticket

DEPTH_MAX = 4096
"""Pieces that may be under way at once in one backend."""

PIECE_BYTES_MAX = 1 << 30
"""One call of the system moves at most about 2 GiB on Linux."""

LATENCIES = 32
"""Length of the latency histogram: its last count takes what is longer than 35 minutes."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals of a backend since it was opened, at one moment. Pieces still under way are not in."""

    bytes_read: int = 0
    bytes_written: int = 0
    operations: int = 0
    """Calls of the system that moved bytes, or were to."""
    retries: int = 0
    """Operations that had to be followed by another for the same bytes."""
    depth_max: int = 0
    """Most pieces that were under way at once."""
    latencies: tuple[int, ...] = (0,) * LATENCIES
    """Operations that took from 2**k to 2**(k+1) microseconds; the first, all below 2."""
    cpu_seconds: float = 0.0
    """Processor time of the backend's threads; workers of the kernel's own are not in it."""

    def __add__(self, other: Counters) -> Counters:
        """Of both together; `depth_max` is that of the deeper one, as they had theirs apart."""
        return Counters(
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            operations=self.operations + other.operations,
            retries=self.retries + other.retries,
            depth_max=max(self.depth_max, other.depth_max),
            latencies=tuple(map(operator.add, self.latencies, other.latencies)),
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
        )

    def seconds_at(self, share: float) -> float:
        """Seconds within which this share of the operations was over, a power of two from above;
        0 without any.

        >>> Counters(latencies=(0, 3, 1, *[0] * 29)).seconds_at(0.5)
        4e-06
        """
        wanted, seen = share * sum(self.latencies), 0
        for bucket, count in enumerate(self.latencies):
            seen += count
            if count and seen >= wanted:
                return float(2 ** (bucket + 1)) * 1e-6
        return 0.0


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

    def counters(self) -> Counters:
        """Totals so far, of all files."""

    def close(self) -> None:
        """Finishes what is queued, then ends. Closing twice is fine, as is a fork.

        Ctrl-C ends the wait, but not the work; closing again waits again.
        """


class File(Region):
    """A file of fixed size; see Region.

    Attributes:
        path: for messages; an unnamed file shows its directory.
        bytes_read, bytes_written, operations: totals so far; operations counts system calls.
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
        self.bytes_read = 0
        self.bytes_written = 0
        self.operations = 0
        self.fd = fd
        self.closed = False
        self._backend = backend
        self._pid = os.getpid()
        self._close_fd = weakref.finalize(self, _close_fd, backend.io, fd, self._pid)
        self._close_fd.atexit = False  # at exit threads may still write; the system closes it

    def counters(self) -> Counters:
        """Those of its backend, for all files that it serves. RuntimeError in a forked child."""
        return self._backend.counters()

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


def check_limits(depth: int, piece_bytes: int, inflight_bytes_max: int) -> None:
    """Raises ValueError where a backend cannot have these."""
    if not 1 <= depth <= DEPTH_MAX:
        raise ValueError(f"depth={depth}: expected 1 to {DEPTH_MAX}; try 32")
    if piece_bytes % ALIGN_BYTES or not 0 < piece_bytes <= PIECE_BYTES_MAX:
        raise ValueError(
            f"piece_bytes={piece_bytes}: expected a multiple of {ALIGN_BYTES} up to "
            f"{PIECE_BYTES_MAX}, as O_DIRECT and preadv ask; try {4 << 20}"
        )
    if inflight_bytes_max < piece_bytes:
        raise ValueError(
            f"inflight_bytes_max={inflight_bytes_max} is less than one piece of {piece_bytes} "
            "bytes, so that nothing could ever start; raise it"
        )


def latency_bucket(seconds: float) -> int:
    """The number of the count in `Counters.latencies` for an operation of so many seconds."""
    return min(max(int(seconds * 1e6), 1).bit_length() - 1, LATENCIES - 1)
