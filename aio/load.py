"""Load on a drive: `depth` blocks under way, one thread that asks for them, one scratch file.

[Note: Fair load]
A backend is opened for every stretch of load, with blocks as its pieces and `depth` of them under
way. It is asked for more at once than that, many blocks in one request, as the engine asks: so it
is the backend that keeps the drive busy, and what is measured is not who asks, as a request costs a
thread of Python 0.1 to 0.3 ms. They are as long as leaves REQUESTS_MIN of them in a stretch. They
go through the file in order and begin anew at its end, as an optimizer's state is streamed; a
stretch goes on where the last one ended, so that no cache of the drive serves it twice. A request
that is over is replaced at once, whether or not older ones are. The clock runs from the first
submission until the last request is over, and all bytes count: neither the filling of the queue nor
its emptying is left out. Processor time is that of the thread that asks and of the backend's own,
in user space and in the kernel, as fio counts its job's; what else this process does (drawing a bar
of progress) is not in it. `both` takes turns of one read and one write, in the two halves of the
file, so that as much is read as is written; twice `depth` blocks are under way.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Iterator
from typing import TypeAlias

from aio.backends import open_backend
from aio.figures import Mode, Sample
from aio.file import Backend, File
from aio.joint import wait_all, wait_any
from aio.scratch import create_scratch
from aio.sweep import Setting, Spent
from aio.system import IO
from aio.ticket import Ticket

FILL_BLOCK_BYTES = 4 << 20
FILL_DEPTH = 8
REQUEST_BYTES_MIN, REQUEST_BYTES_MAX = 8 << 20, 128 << 20
"""Of one request, where a block is not longer and the file not too short."""
REQUESTS_MIN = 8
"""In a stretch of load, where they are longer than REQUEST_BYTES_MIN; and in the whole file."""

WATCHED_MAX = 4
"""Of the requests under way, the oldest so many are waited for: one that is late then holds up
none, and waiting costs as little for 32 as for 4."""

_UnderWay: TypeAlias = tuple[Ticket, memoryview]
"""A request and its memory."""


class Load:
    """A scratch file that all backends read and write, and memory for what is under way.

    Args:
        directory: where the file is to be; it has no name.
        size: bytes of the file, a multiple of 4096.
        backend: name of the one that makes and fills the file.
        block_bytes_max: longest block.
        under_way_bytes_max: most that is under way in one direction.
        written_bytes_max: most that may be written, the filling included.
        io: a simulation in place of the system's calls.

    Raises:
        OSError: there is no room, or the directory cannot be used; see `create_scratch`.
        ValueError: to make the file takes more than may be written.
    """

    def __init__(
        self,
        directory: str,
        size: int,
        backend: str,
        *,
        block_bytes_max: int,
        under_way_bytes_max: int,
        written_bytes_max: int,
        io: IO | None = None,
    ) -> None:
        self.bytes_written = 0
        self.written_bytes_max = written_bytes_max
        self._written_in_all_max = written_bytes_max
        self._at = {False: 0, True: 0}
        self._bytes_per_s = 0.0  # the most that was seen
        self._io = io
        self._memory = _huge(memory_bytes(size, block_bytes_max, under_way_bytes_max))
        _fill(memoryview(self._memory))
        self._first = Setting(backend, FILL_BLOCK_BYTES, FILL_DEPTH)
        with contextlib.ExitStack() as opened:
            made = opened.enter_context(contextlib.closing(self._open(self._first, FILL_DEPTH)))
            self.file = opened.enter_context(create_scratch(directory, size, made))
            self._stack = opened.pop_all()
        self.file_system = made.io.file_system(self.file.fd)
        self.bytes_written = self.file.bytes_written  # zeros, where space cannot be reserved
        self._making_bytes = self.bytes_written + size
        if self.bytes_written and self._making_bytes > written_bytes_max:
            self.close()
            raise ValueError(
                f"asked for a file of {size} bytes in {directory} and for at most "
                f"{written_bytes_max} to be written; found that making it writes {size} bytes of "
                f"zeros first; likely cause: {self.file_system} cannot reserve space; try: a file "
                "of half the size, or to let more be written"
            )

    def _open(self, setting: Setting, depth: int) -> Backend:
        """A backend that keeps `depth` blocks under way."""
        return open_backend(
            setting.backend,
            depth=depth,
            piece_bytes=setting.block_bytes,
            inflight_bytes_max=setting.block_bytes * depth,
            io=self._io,
        )

    @property
    def fio_path(self) -> str:
        """Where another process finds the file, as long as it is open here."""
        return f"/proc/{os.getpid()}/fd/{self.file.fd}"

    def fill(self) -> Iterator[Sample]:
        """Writes all of the file once, a part at a time: a first write is not like later ones."""
        self._at[True] = 0
        while left := self._making_bytes - self.bytes_written:
            block = min(self._first.block_bytes, left)
            count = min(64, left // block)
            part = Setting(self._first.backend, block, self._first.depth)
            yield self._run("write", part, block, count, float("inf"))
        self._at[True] = 0

    def allow(self, share: float) -> None:
        """From now on no more than this share may be written of what the file's filling left."""
        left = self._written_in_all_max - self._making_bytes
        self.written_bytes_max = self._making_bytes + round(left * share)

    def run(self, mode: Mode, setting: Setting, seconds: float) -> Sample:
        """Load in one setting for about `seconds`, at least until it has been full once.

        Raises:
            Spent: no more may be written.
            OSError: a transfer failed.
        """
        request, count = self._request_bytes(mode, setting, seconds), 1 << 62
        if mode != "read":
            left = self.written_bytes_max - self.bytes_written
            if left < max(request, setting.under_way_bytes):
                raise Spent
            count = left // request * (2 if mode == "both" else 1)
        return self._run(mode, setting, request, count, seconds)

    def _request_bytes(self, mode: Mode, setting: Setting, seconds: float) -> int:
        """Whole blocks that are asked for at once: see [Note: Fair load]."""
        many = round(self._bytes_per_s * seconds / REQUESTS_MIN)
        most = min(max(REQUEST_BYTES_MIN, many), REQUEST_BYTES_MAX, self.file.bytes // REQUESTS_MIN)
        if mode == "both":
            most = min(most, setting.under_way_bytes // 2)
        return max(1, most // setting.block_bytes) * setting.block_bytes

    def _run(
        self, mode: Mode, setting: Setting, request: int, count: int, seconds: float
    ) -> Sample:
        """Load of at most `count` requests."""
        turns = {"read": (False,), "write": (True,), "both": (False, True)}[mode]
        depth = setting.depth * len(turns)
        memory = memoryview(self._memory)
        requests = -(-depth * setting.block_bytes // request) + len(turns)
        assert requests * request <= memory.nbytes, (setting, request)
        slots = [memory[at * request : (at + 1) * request] for at in range(requests)]
        with contextlib.closing(self._open(setting, depth)) as backend:
            file, moved = _lent(self.file, backend), {False: 0, True: 0}
            under_way: list[_UnderWay] = []
            clock = time.perf_counter
            cpu, started = _cpu_seconds(backend), clock()
            try:
                for number in range(count):
                    if not slots:
                        _reap(under_way, slots)
                        if clock() - started >= seconds and number % len(turns) == 0:
                            break
                    writing, slot = turns[number % len(turns)], slots.pop()
                    transfer = file.write_from if writing else file.read_into
                    at = self._next(writing, request, halves=len(turns))
                    under_way.append((transfer(slot, at), slot))
                    moved[writing] += request
                while under_way:
                    _reap(under_way, slots)
            finally:
                self.bytes_written += moved[True]
                wait_all(ticket for ticket, _ in under_way)  # The memory is theirs until then.
            sample = Sample(
                seconds=clock() - started,
                bytes_read=moved[False],
                bytes_written=moved[True],
                cpu_seconds=_cpu_seconds(backend) - cpu,
                latencies=backend.counters().latencies,
            )
        self._bytes_per_s = max(self._bytes_per_s, sample.bytes_per_s)
        return sample

    def _next(self, writing: bool, request: int, *, halves: int) -> int:
        """Where the next transfer begins."""
        size = self.file.bytes // halves
        start = size // 4096 * 4096 if writing and halves > 1 else 0
        at = self._at[writing]
        if at + request > size:
            at = 0
        self._at[writing] = at + request
        return start + at

    def close(self) -> None:
        """Ends all and leaves nothing behind."""
        self._stack.close()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def memory_bytes(size: int, block_bytes_max: int, under_way_bytes_max: int) -> int:
    """Memory that a Load takes: for both directions, and for requests that wait their turn."""
    more = 3 * max(block_bytes_max, min(REQUEST_BYTES_MAX, size // REQUESTS_MIN))
    return max(2 * under_way_bytes_max + more, (FILL_DEPTH + 1) * FILL_BLOCK_BYTES)


def _reap(under_way: list[_UnderWay], slots: list[memoryview]) -> None:
    """Waits until at least one is over; takes all that are, and their memory back."""
    if not any(ticket.done() for ticket, _ in under_way):
        wait_any([ticket for ticket, _ in under_way[:WATCHED_MAX]])
    left = []
    for one in under_way:
        ticket, slot = one
        if ticket.done():
            ticket.wait()
            slots.append(slot)
        else:
            left.append(one)
    under_way[:] = left


def _cpu_seconds(backend: Backend) -> float:
    return time.thread_time() + backend.counters().cpu_seconds


def _lent(file: File, backend: Backend) -> File:
    """The same open file for another backend; closing it remains its owner's."""
    align = (file.memory_align_bytes, file.offset_align_bytes)
    found = File(backend, file.fd, file.path, file.bytes, file.direct, file.notice, align)
    found._close_fd.detach()
    return found


def _huge(size: int) -> mmap.mmap:
    """Memory in huge pages where the system has them, as the engine's: the kernel looks every page
    of a transfer up, and in pages of 4 KiB that is most of a transfer's processor time."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _fill(whole: memoryview) -> None:
    """Bytes that no drive can compress or find twice at one place."""
    block = random.Random(0).randbytes(1 << 20)
    for start in range(0, whole.nbytes, len(block)):
        part = whole[start : start + len(block)]
        part[:] = block[: part.nbytes]
