"""Load on a drive: blocks under way in a scratch file, and the search for the best setting.

[Note: Fair load]
Every stretch of load opens a backend with blocks as its pieces and `depth` of them under way.
Requests are longer than blocks, as the engine's are, so that the backend and not this thread keeps
the drive busy. They go through the file in order, and a stretch continues where the last one ended,
so that no cache of the drive serves a block twice. The clock runs from the first submission until
the last request is over, and all bytes count. `both` alternates reads and writes in the two halves
of the file; twice `depth` blocks are under way.

[Note: Successive halving]
Every round gives all remaining settings the same time and drops the slower half (Karnin, Koren
and Somekh, "Almost optimal exploration in multi-armed bandits", 2013). The finalists share half of
the time. After the first round the settings take turns in random order, so that a drift of the
drive falls on all alike. The choice is the finalist with the fewest bytes under way among those
whose median is within AS_FAST of the fastest: it needs less memory and has the lower latency.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import aio

Mode = Literal["read", "write", "both"]

BLOCKS_BYTES = tuple(256 << 10 << power for power in range(7))
DEPTHS = (1, 2, 4, 8, 16, 32)
UNDER_WAY_BYTES_MAX = 128 << 20
"""In one direction."""
FILE_BYTES_UNIT = 1 << 20
REQUEST_BYTES_MIN, REQUEST_BYTES_MAX = 8 << 20, 128 << 20
"""Of one request, unless the block is longer or the file too short."""
REQUESTS_MIN = 8
"""In a stretch of load and in the whole file."""

FINALISTS_MAX, FINAL_TURNS = 4, 5
AS_FAST = 0.97
"""Of the fastest's rate: above it a setting counts as equal."""
UNDER_WAY_SECONDS_MAX = 0.25
"""A setting with more bytes under way than the drive moves in this time is left out: no drive needs
so much to be busy (Little's law)."""


class Spent(Exception):
    """As many bytes as allowed have been written."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How to ask a drive for bytes."""

    backend: str
    block_bytes: int
    depth: int
    """Blocks under way."""

    @property
    def under_way_bytes(self) -> int:
        """Bytes under way."""
        return self.block_bytes * self.depth

    def __str__(self) -> str:
        return f"{self.block_bytes / 2**20:g} MiB x {self.depth} {self.backend}"


@dataclass(frozen=True, slots=True)
class Figure:
    """The best setting and its speeds in bytes per second, by turn."""

    setting: Setting
    rates: tuple[float, ...]

    @property
    def bytes_per_s(self) -> float:
        """The median."""
        return statistics.median(self.rates)


def settings(backend: str, mode: Mode, file_bytes: int) -> list[Setting]:
    """All settings to try: those that fit into half of the file, or a quarter for `both`."""
    most = min(UNDER_WAY_BYTES_MAX, file_bytes // (4 if mode == "both" else 2))
    grid = (Setting(backend, block, depth) for block in BLOCKS_BYTES for depth in DEPTHS)
    return [setting for setting in grid if setting.under_way_bytes <= most]


class Load:
    """A scratch file without a name, written once, and memory for what is under way."""

    def __init__(self, directory: str, size: int, backend: str, io: aio.IO | None = None) -> None:
        """`size`: a multiple of FILE_BYTES_UNIT; `io`: a simulation of the system's calls."""
        self._at = {False: 0, True: 0}
        self._bytes_per_s = 0.0  # the most that was seen
        self._io = io
        self._memory = _memory(min(2 * size, 2 * UNDER_WAY_BYTES_MAX + 3 * REQUEST_BYTES_MAX))
        unit = FILE_BYTES_UNIT
        first = Setting(backend, unit, min(32, size // unit))
        with contextlib.ExitStack() as opened:
            made = opened.enter_context(contextlib.closing(self._open(first, first.depth)))
            self.file = opened.enter_context(aio.create_scratch(directory, size, made))
            self.bytes_written = size if self.file.filled else 0
            self._run("write", first, unit, size // unit, math.inf)  # A first write is slower.
            self._stack = opened.pop_all()
        self.bytes_written_max = self.bytes_written
        """Writing stops there: it wears drives. The user of the load raises it."""

    def _open(self, setting: Setting, depth: int) -> aio.Backend:
        """A backend that keeps `depth` blocks under way."""
        return aio.open_backend(
            setting.backend,
            depth=depth,
            piece_bytes=setting.block_bytes,
            inflight_bytes_max=setting.block_bytes * depth,
            io=self._io,
        )

    def run(self, mode: Mode, setting: Setting, seconds: float) -> float:
        """Bytes per second, both directions together, in about `seconds` of load."""
        request, count = self._request_bytes(mode, setting, seconds), 1 << 62
        if mode != "read":
            left = self.bytes_written_max - self.bytes_written
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

    def _run(self, mode: Mode, setting: Setting, request: int, count: int, seconds: float) -> float:
        """Load of at most `count` requests, at least until as many as fit are under way."""
        turns = {"read": (False,), "write": (True,), "both": (False, True)}[mode]
        depth = setting.depth * len(turns)
        memory = memoryview(self._memory)
        requests = -(-depth * setting.block_bytes // request) + len(turns)
        assert requests * request <= memory.nbytes, (setting, request)
        slots = [memory[at * request : (at + 1) * request] for at in range(requests)]
        with contextlib.closing(self._open(setting, depth)) as backend:
            file, moved = _lent(self.file, backend), 0
            under_way: list[tuple[aio.Ticket, memoryview]] = []
            started = time.perf_counter()
            try:
                for number in range(count):
                    if not slots:
                        _reap(under_way, slots)
                        if time.perf_counter() - started >= seconds and number % len(turns) == 0:
                            break
                    writing, slot = turns[number % len(turns)], slots.pop()
                    transfer = file.write_from if writing else file.read_into
                    at = self._next(writing, request, halves=len(turns))
                    under_way.append((transfer(slot, at), slot))
                    moved += request
                    self.bytes_written += request * writing
                while under_way:
                    _reap(under_way, slots)
            finally:
                aio.wait_all(ticket for ticket, _ in under_way)  # The memory is theirs until then.
            rate = moved / (time.perf_counter() - started)
        self._bytes_per_s = max(self._bytes_per_s, rate)
        return rate

    def _next(self, writing: bool, request: int, *, halves: int) -> int:
        """Where the next transfer begins; with two halves writes are in the second."""
        size = self.file.bytes // halves
        at = self._at[writing] if self._at[writing] + request <= size else 0
        self._at[writing] = at + request
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


def _lent(file: aio.File, backend: aio.Backend) -> aio.File:
    """The same open file for another backend; closing it remains its owner's."""
    align = (file.memory_align_bytes, file.offset_align_bytes)
    found = aio.File(backend, file.fd, file.path, file.bytes, file.direct, file.notice, align)
    found._close_fd.detach()
    return found


def _memory(size: int) -> mmap.mmap:
    """Bytes that no drive can compress, in huge pages as the engine's: the kernel looks up every
    page of a transfer, and in pages of 4 KiB that is most of a transfer's processor time."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = random.Random(0).randbytes(1 << 20)
    for _ in range(size // len(block)):
        memory.write(block)
    return memory


def search(
    settings: Iterable[Setting],
    measure: Callable[[Setting, float], float],
    seconds: float,
    *,
    choice: random.Random,
    clock: Callable[[], float] = time.perf_counter,
) -> Figure | None:
    """The best setting, found in about `seconds`: see [Note: Successive halving].

    Args:
        measure: bytes per second of a setting, found within about so many seconds. Once it raises
            `Spent`, the choice is made by what is known; None without any figure.
    """
    started, left = clock(), sorted(settings, key=lambda setting: setting.under_way_bytes)
    rates: dict[Setting, list[float]] = {}
    halvings = math.ceil(math.log2(max(1.0, len(left) / FINALISTS_MAX)))

    def rate(setting: Setting) -> float:
        return statistics.median(rates[setting][-FINAL_TURNS:])

    def left_out(setting: Setting) -> bool:
        slow = max(map(rate, rates), default=math.inf) * UNDER_WAY_SECONDS_MAX
        too_much = setting not in rates and setting.under_way_bytes > slow
        return too_much or (bool(rates) and clock() - started >= seconds)

    with contextlib.suppress(Spent):
        for number in range(halvings + 1):
            final = number == halvings
            over = started + seconds * (1.0 if final else (number + 1) / halvings / 2)
            turns = FINAL_TURNS if final else 1
            each = max(0.0, over - clock()) / (turns * len(left))
            for _ in range(turns):
                for setting in choice.sample(left, len(left)) if rates else left:
                    if not left_out(setting):
                        rates[setting] = [*rates.get(setting, ()), measure(setting, each)]
            left = sorted((one for one in left if one in rates), key=rate, reverse=True)
            left = left if final else left[: -(-len(left) // 2)]
    left = [setting for setting in left if setting in rates]
    if not left:
        return None
    fastest = max(map(rate, left))
    equal = (setting for setting in left if rate(setting) >= AS_FAST * fastest)
    best = min(equal, key=lambda setting: setting.under_way_bytes)
    return Figure(best, tuple(rates[best][-FINAL_TURNS:]))
