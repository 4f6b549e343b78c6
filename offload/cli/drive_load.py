"""Load on a drive, as training puts it there.

[Note: Fair load]
The backend is that of training, whose depth and pieces serve any drive (docs/decisions.md), and
requests are about as long as chunks of states. They go through the file in order, and a stretch
continues where the last one ended, so that no cache of the drive serves a block twice. The clock
runs from the first submission until the last request is over, and all bytes count. `both`
alternates reads and writes in the two halves of the file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import random
import time
from typing import Literal

import aio
from aio.backends import PIECE_BYTES

Mode = Literal["read", "write", "both"]
TURNS: dict[Mode, tuple[bool, ...]] = {"read": (False,), "write": (True,), "both": (False, True)}
"""By mode, whether each request of a round writes."""

FILE_BYTES_UNIT = 1 << 20
REQUEST_BYTES, REQUESTS = 8 << 20, 8
"""Of one request, unless the file is too short; and how many are under way."""


class Load:
    """A scratch file without a name, written once, and memory for what is under way."""

    def __init__(self, directory: str, size: int, backend: str, io: aio.IO | None = None) -> None:
        """`size`: a multiple of FILE_BYTES_UNIT; `io`: a simulation of the system's calls."""
        self._at = {False: 0, True: 0}
        self._request = min(REQUEST_BYTES, size // (2 * REQUESTS))
        self.piece_bytes = min(PIECE_BYTES, self._request)
        self._memory = _memory(REQUESTS * self._request)
        with contextlib.ExitStack() as opened:
            made = opened.enter_context(contextlib.closing(aio.open_backend(backend, io=io)))
            self.file = opened.enter_context(aio.create_scratch(directory, size, made))
            self.backend = made.name
            self.bytes_written = size if self.file.filled else 0
            self.run("write", math.inf, size)  # A first write is slower.
            self._stack = opened.pop_all()

    def run(self, mode: Mode, seconds: float, most_bytes: int = 1 << 62) -> float:
        """Bytes per second, both directions together, in about `seconds` of load, or of so many
        bytes."""
        turns, size = TURNS[mode], self._request
        memory = memoryview(self._memory)
        slots = [memory[at : at + size] for at in range(0, memory.nbytes, size)]
        under_way: list[tuple[aio.Ticket, memoryview]] = []
        moved, started = 0, time.perf_counter()
        try:
            for number in range(most_bytes // size):
                if not slots:
                    _reap(under_way, slots)
                    if time.perf_counter() - started >= seconds and number % len(turns) == 0:
                        break
                writing, slot = turns[number % len(turns)], slots.pop()
                transfer = self.file.write_from if writing else self.file.read_into
                under_way.append((transfer(slot, self._next(writing, halves=len(turns))), slot))
                moved += size
                self.bytes_written += size * writing
            while under_way:
                _reap(under_way, slots)
        finally:
            aio.wait_all(ticket for ticket, _ in under_way)  # The memory is theirs until then.
        return moved / (time.perf_counter() - started)

    def _next(self, writing: bool, *, halves: int) -> int:
        """Where the next transfer begins; with two halves writes are in the second."""
        size = self.file.bytes // halves
        at = self._at[writing] if self._at[writing] + self._request <= size else 0
        self._at[writing] = at + self._request
        return at + (size if writing and halves > 1 else 0)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _reap(under_way: list[tuple[aio.Ticket, memoryview]], slots: list[memoryview]) -> None:
    """Waits for the oldest; takes all that are over, and their memory back."""
    under_way[0][0].wait()
    over = [ticket.done() for ticket, _ in under_way]
    for ticket, slot in itertools.compress(under_way, over):
        ticket.wait()
        slots.append(slot)
    under_way[:] = [one for one, done in zip(under_way, over) if not done]


def _memory(size: int) -> mmap.mmap:
    """Bytes that no drive can compress, in huge pages as the engine's: the kernel looks up every
    page of a transfer, and in pages of 4 KiB that is most of a transfer's processor time."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = random.Random(0).randbytes(min(size, 1 << 20))
    for _ in range(size // len(block)):
        memory.write(block)
    return memory
