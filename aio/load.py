"""Load on a drive: one thread that keeps `depth` transfers under way in one scratch file.

[Note: Fair load]
Transfers go through the file in order and begin anew at its end, as an optimizer's state is
streamed; a stretch of load goes on where the last one ended, so that no cache of the drive serves
it twice. The clock runs from the first submission until the last transfer is over, and all bytes
count: neither the filling of the queue nor its emptying is left out. A transfer that is over is
replaced at once, whether or not older ones are. `both` takes turns of one read and one write, in
the two halves of the file, so that as much is read as is written; twice `depth` are under way.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Iterator
from typing import TypeAlias

from aio import wait_any
from aio.backends import open_backend
from aio.figures import Mode, Sample
from aio.file import Backend, File
from aio.scratch import create_scratch
from aio.sweep import Setting, Spent
from aio.system import IO, SystemIO
from aio.ticket import Ticket

FILL_BLOCK_BYTES = 4 << 20
FILL_DEPTH = 8

WATCHED_MAX = 4
"""Of the transfers under way, the oldest so many are waited for: one that is late then holds up
none, and waiting costs as little for 32 as for 4."""

_UnderWay: TypeAlias = tuple[Ticket, float, memoryview]
"""A transfer, when it was submitted, and its memory."""


class Load:
    """A scratch file that several backends read and write, and memory for what is under way.

    Args:
        directory: where the file is to be; it has no name.
        size: bytes of the file, a multiple of 4096.
        backends: names, the first of which makes the file.
        block_bytes_max: longest transfer.
        under_way_bytes_max: most that is under way in one direction.
        depth_max: most transfers under way in one direction.
        written_bytes_max: most that may be written, the filling included.
        io: the system's calls, or a simulation of them, for which there is one backend only.

    Raises:
        OSError: there is no room, or the directory cannot be used; see `create_scratch`.
    """

    def __init__(
        self,
        directory: str,
        size: int,
        backends: tuple[str, ...],
        *,
        block_bytes_max: int,
        under_way_bytes_max: int,
        depth_max: int,
        written_bytes_max: int,
        io: IO | None = None,
    ) -> None:
        assert io is None or len(backends) == 1, backends
        self.bytes_written = 0
        self.written_bytes_max = written_bytes_max
        self._written_in_all_max = written_bytes_max
        self._at = {False: 0, True: 0}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self._memory = mmap.mmap(
                -1, 2 * max(under_way_bytes_max, FILL_BLOCK_BYTES * FILL_DEPTH)
            )
            _fill(memoryview(self._memory))
            self._files: dict[str, File] = {}
            for name in backends:
                backend = open_backend(
                    name,
                    depth=2 * depth_max,
                    piece_bytes=max(block_bytes_max, FILL_BLOCK_BYTES),
                    inflight_bytes_max=len(self._memory),
                    io=io,
                )
                opened.callback(backend.close)
                file = self._first(directory, size, backend)
                opened.callback(file.close)
                self._files[name] = file
            self._stack = opened.pop_all()

    @property
    def file(self) -> File:
        """The file, as the first backend has it."""
        return next(iter(self._files.values()))

    @property
    def file_system(self) -> str:
        """The type of the file system."""
        return self._io.file_system(self.file.fd)

    @property
    def fio_path(self) -> str:
        """Where another process finds the file, as long as it is open here."""
        return f"/proc/{os.getpid()}/fd/{self.file.fd}"

    def _first(self, directory: str, size: int, backend: Backend) -> File:
        """The scratch file; for backends after the first, the same one under a new descriptor."""
        self._io = backend.io
        if not self._files:
            return create_scratch(directory, size, backend)
        first = self.file
        assert isinstance(backend.io, SystemIO), backend.io
        fd = os.dup(first.fd)
        align = (first.memory_align_bytes, first.offset_align_bytes)
        return File(backend, fd, first.path, first.bytes, first.direct, first.notice, align)

    def fill(self) -> Iterator[Sample]:
        """Writes all of the file once, a part at a time: a first write is not like later ones."""
        setting = Setting(next(iter(self._files)), FILL_BLOCK_BYTES, FILL_DEPTH)
        self._at[True] = 0
        while self.bytes_written < self.file.bytes:
            block = min(setting.block_bytes, self.file.bytes - self.bytes_written)
            count = min(64, (self.file.bytes - self.bytes_written) // block)
            part = Setting(setting.backend, block, setting.depth)
            yield self._run("write", part, count, float("inf"))
        self._at[True] = 0

    def allow(self, share: float) -> None:
        """From now on no more than this share may be written of what the file's filling left."""
        left = self._written_in_all_max - self.file.bytes
        self.written_bytes_max = self.file.bytes + round(left * share)

    def run(self, mode: Mode, setting: Setting, seconds: float) -> Sample:
        """Load in one setting for about `seconds`, at least until it has been full once.

        Raises:
            Spent: no more may be written.
            OSError: a transfer failed.
        """
        count = 1 << 62
        if mode != "read":
            count = (self.written_bytes_max - self.bytes_written) // setting.block_bytes
            count *= 2 if mode == "both" else 1
        if count < setting.depth:
            raise Spent
        return self._run(mode, setting, count, seconds)

    def _run(self, mode: Mode, setting: Setting, count: int, seconds: float) -> Sample:
        """Load of at most `count` transfers."""
        block, depth = setting.block_bytes, setting.depth
        turns = {"read": (False,), "write": (True,), "both": (False, True)}[mode]
        memory = memoryview(self._memory)
        slots = [memory[at * block : (at + 1) * block] for at in range(depth * len(turns))]
        file, moved = self._files[setting.backend], {False: 0, True: 0}
        under_way: list[_UnderWay] = []
        latencies: list[float] = []
        clock = time.perf_counter
        cpu, started = time.process_time(), clock()
        try:
            for number in range(count):
                if not slots:
                    _reap(under_way, slots, latencies)
                    if clock() - started >= seconds and number % len(turns) == 0:
                        break
                writing, slot = turns[number % len(turns)], slots.pop()
                transfer = file.write_from if writing else file.read_into
                at = self._next(writing, block, halves=len(turns))
                under_way.append((transfer(slot, at), clock(), slot))
                moved[writing] += block
            while under_way:
                _reap(under_way, slots, latencies)
        finally:
            self.bytes_written += moved[True]
            for ticket, _, _ in under_way:  # The memory is theirs until they are over.
                with contextlib.suppress(OSError):
                    ticket.wait()
        return Sample(
            seconds=clock() - started,
            bytes_read=moved[False],
            bytes_written=moved[True],
            cpu_seconds=time.process_time() - cpu,
            latencies_s=tuple(latencies),
        )

    def _next(self, writing: bool, block: int, *, halves: int) -> int:
        """Where the next transfer begins."""
        size = self.file.bytes // halves
        start = size // 4096 * 4096 if writing and halves > 1 else 0
        at = self._at[writing]
        if at + block > size:
            at = 0
        self._at[writing] = at + block
        return start + at

    def close(self) -> None:
        """Ends all and leaves nothing behind."""
        self._stack.close()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reap(under_way: list[_UnderWay], slots: list[memoryview], latencies: list[float]) -> None:
    """Waits until at least one is over; takes all that are, and their memory back."""
    if not any(ticket.done() for ticket, _, _ in under_way):
        wait_any([ticket for ticket, _, _ in under_way[:WATCHED_MAX]])
    now, left = time.perf_counter(), []
    for one in under_way:
        ticket, since, slot = one
        if ticket.done():
            ticket.wait()
            latencies.append(now - since)
            slots.append(slot)
        else:
            left.append(one)
    under_way[:] = left


def _fill(whole: memoryview) -> None:
    """Bytes that no drive can compress or find twice at one place."""
    block = random.Random(0).randbytes(1 << 20)
    for start in range(0, whole.nbytes, len(block)):
        part = whole[start : start + len(block)]
        part[:] = block[: part.nbytes]
