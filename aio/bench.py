"""What a drive can do, found with few measurements in a given time; prints nothing.

For every path: a scratch file is written once, then the best setting is searched for reading,
writing and both at once (sweep.py), first among block sizes and depths of the preferred backend,
then in the best of those among all backends: the preferred one, unless another is surely faster.
The chosen ones are measured anew, in turns. Several paths are measured one after the other, and at
the end all at once.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from aio.figures import DOING, MODES, Cell, Figure, Found, Mode, Sample
from aio.fio import Compared, compare
from aio.load import Load, memory_bytes
from aio.sweep import Setting, Spent, Sweep, sweep
from aio.system import IO

BLOCKS_BYTES = tuple(1 << bits for bits in range(18, 25))
"""256 KiB to 16 MiB."""
DEPTHS = (1, 2, 4, 8, 16, 32)
UNDER_WAY_BYTES_MAX = 128 << 20
"""In one direction."""

BACKENDS_SHARE, FIGURES_SHARE = 0.15, 0.25
"""Of the time after the file is written: for the choice of the backend, for the figures."""
FIGURES_SECONDS, FIGURES_SHARE_MAX = 2.0, 0.5
"""For the figures at least so much of that time, where it is not more than this share."""
WRITES_OF_SEARCH: dict[Mode, float] = {"read": 0.0, "write": 0.2, "both": 0.4}
WRITES_OF_FIGURES, WRITES_OF_COMPARISON = 0.6, 0.95
"""Share of the bytes that may be written after the filling, of what is done up to there."""
FASTER = 1.03
"""In multiples of a backend: what is surely faster than that takes the place of a preferred one."""
FIGURE_TURNS = 4
COMPARE_ROUNDS = 6
COMPARE_SECONDS = 0.8

Progress = Callable[[float, str], None]
"""Told which share of the whole is done, and what is measured now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to measure."""

    paths: tuple[str, ...]
    file_bytes: int
    """Of each scratch file."""
    written_bytes_max: int
    """To each path."""
    seconds: float
    """About how long it may take, but for the comparison."""
    backends: tuple[str, ...]
    """The preferred first."""
    blocks_bytes: tuple[int, ...] = BLOCKS_BYTES
    depths: tuple[int, ...] = DEPTHS
    fio: bool = False
    """Whether to compare with fio."""
    seed: int = 0
    """Of the order of measurements."""
    io: IO | None = None
    """A simulation in place of the system's calls."""

    def settings(self, backend: str, mode: Mode) -> list[Setting]:
        """The grid: what fits into half of the file, or a quarter for both at once."""
        most = min(UNDER_WAY_BYTES_MAX, self.file_bytes // (4 if mode == "both" else 2))
        return [
            Setting(backend, block, depth)
            for block in self.blocks_bytes
            for depth in self.depths
            if block * depth <= most
        ]

    @property
    def under_way_bytes(self) -> int:
        """Most that is under way in one direction."""
        return max(setting.under_way_bytes for setting in self.settings("", "read"))

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes: of every path to the end, as all are measured together then."""
        return len(self.paths) * memory_bytes(
            self.file_bytes, max(self.blocks_bytes), self.under_way_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """All paths at once, each in its own setting."""

    mode: Mode
    bytes_per_s: float
    """Of all paths, in both directions."""
    of_sum: float
    """As a share of the sum of what each gives alone."""


def measure(
    wanted: Wanted, progress: Progress = lambda share, what: None
) -> Iterator[Found | list[Compared] | Together]:
    """Measures path by path and yields what was found: a Found, then what fio did beside, for
    each; at the end, of several paths, all of them together.

    Raises:
        OSError: a path cannot be used or has no room, or a transfer failed.
        RuntimeError: fio failed.
    """
    started, count = time.perf_counter(), len(wanted.paths)
    loads: list[Load] = []
    finds: list[Found] = []
    with contextlib.ExitStack() as opened:
        for number, path in enumerate(wanted.paths):
            left = started + wanted.seconds - time.perf_counter()
            load = opened.enter_context(_load(wanted, path))
            one = _Path(wanted, path, load, _within(progress, number, count))
            found = one.found(left / (count - number))
            loads.append(load)
            finds.append(found)
            yield found
            if wanted.fio:
                yield one.compared(found)
        if count > 1:
            yield from _together(loads, finds, progress)


def _load(wanted: Wanted, path: str) -> Load:
    return Load(
        path,
        wanted.file_bytes,
        wanted.backends[0],
        block_bytes_max=max(wanted.blocks_bytes),
        under_way_bytes_max=wanted.under_way_bytes,
        written_bytes_max=wanted.written_bytes_max,
        io=wanted.io,
    )


def _within(progress: Progress, number: int, count: int) -> Progress:
    """Progress with one path as progress of the whole."""
    return lambda share, what: progress((number + share) / count, what)


class _Path:
    """Measures one path."""

    def __init__(self, wanted: Wanted, path: str, load: Load, progress: Progress) -> None:
        self._wanted = wanted
        self._path = path
        self._load = load
        self._progress = progress
        self._choice = random.Random(wanted.seed)
        self._cells: dict[tuple[Mode, Setting], list[float]] = {}
        self._left_out: list[tuple[Mode, str]] = []

    def found(self, seconds: float) -> Found:
        """All there is to find in about so many seconds."""
        started = time.perf_counter()
        fills = []
        for sample in self._load.fill():
            self._progress(0.0, f"the first write in {self._path}")
            fills.append(sample)
        filled = time.perf_counter()
        left = max(0.0, started + seconds - filled)
        kept = min(max(FIGURES_SHARE * left, FIGURES_SECONDS), FIGURES_SHARE_MAX * left)
        fill_rate = sum(s.bytes for s in fills) / sum(s.seconds for s in fills)
        best: dict[Mode, Setting] = {}
        for mode in MODES:
            self._load.allow(WRITES_OF_SEARCH[mode])
            share = min((left - kept) / 3, self._writing_seconds(mode, fill_rate))
            base = (time.perf_counter() - started) / max(seconds, 1e-9)
            try:
                best[mode] = self._search(mode, share, base, seconds)
            except Spent:
                self._left_out.append((mode, "as many bytes as allowed have been written"))
        over = started + seconds
        return Found(
            path=self._path,
            file_bytes=self._load.file.bytes,
            file_system=self._load.file_system,
            direct=self._load.file.direct,
            notice=self._load.file.notice,
            fill_bytes_per_s=fill_rate,
            figures=tuple(self._figures(best, over)),
            bytes_written=self._load.bytes_written,
            cells=tuple(self._seen()),
            left_out=tuple(self._left_out),
        )

    def _writing_seconds(self, mode: Mode, fill_rate: float) -> float:
        """For how long the bytes that may be written now will do, so that a sweep comes to its end.

        An overwrite is about twice as fast as the first write, and of both at once it is half.
        """
        if mode == "read":
            return math.inf
        left = self._load.written_bytes_max - self._load.bytes_written
        return left / fill_rate / (2 if mode == "write" else 1)

    def _search(self, mode: Mode, seconds: float, base: float, whole: float) -> Setting:
        """The best setting of a mode, in about so many seconds."""
        backends = self._wanted.backends
        main = seconds * (1 - BACKENDS_SHARE if len(backends) > 1 else 1)
        first = self._swept(mode, self._wanted.settings(backends[0], mode), main, base, whole)
        if len(backends) == 1:
            return first.best
        best = first.best
        others = [Setting(name, best.block_bytes, best.depth) for name in backends]
        base += main / max(whole, 1e-9)
        try:
            second = self._swept(mode, others, seconds - main, base, whole)
        except Spent:
            return best
        unbeaten = (
            setting
            for setting in others
            if not any(second.compared(s, setting).low > FASTER for s in others)
        )
        return next(unbeaten, best)

    def _swept(
        self, mode: Mode, settings: Sequence[Setting], seconds: float, base: float, whole: float
    ) -> Sweep:
        def measured(setting: Setting, turn_seconds: float) -> float:
            rate = self._load.run(mode, setting, turn_seconds).bytes_per_s
            self._cells.setdefault((mode, setting), []).append(rate)
            return rate

        def told(share: float, setting: Setting) -> None:
            done = base + share * seconds / max(whole, 1e-9)
            self._progress(min(1.0, done), f"{DOING[mode]} in {self._path}")

        return sweep(settings, measured, seconds, choice=self._choice, progress=told)

    def _figures(self, best: dict[Mode, Setting], over: float) -> Iterator[Figure]:
        """The chosen settings, measured anew in turns until the time is over."""
        samples: dict[Mode, list[Sample]] = {mode: [] for mode in best}
        for turn in range(FIGURE_TURNS):
            for number, (mode, setting) in enumerate(best.items()):
                self._progress(1.0, f"the best settings in {self._path}")
                turns = (FIGURE_TURNS - turn) * len(best) - number
                done = 1 - (turns - 1) / (FIGURE_TURNS * len(best))
                before = WRITES_OF_SEARCH["both"]
                self._load.allow(before + done * (WRITES_OF_FIGURES - before))
                seconds = max(0.0, (over - time.perf_counter()) / turns)
                try:
                    samples[mode].append(self._load.run(mode, setting, seconds))
                except Spent:
                    continue
        for mode, found in samples.items():
            if found:
                yield Figure.of(mode, best[mode], found)
            else:
                self._left_out.append((mode, "as many bytes as allowed have been written"))

    def _seen(self) -> Iterator[Cell]:
        for (mode, setting), rates in self._cells.items():
            yield Cell(mode, setting, statistics.median(rates), len(rates))

    def compared(self, found: Found) -> list[Compared]:
        """The chosen settings of reading and writing beside fio in the same.

        Empty where no more may be written.
        """
        self._load.allow(WRITES_OF_COMPARISON)
        cells = [(f.mode, f.setting, f.setting) for f in found.figures if f.mode != "both"]
        told = self._progress
        try:
            return list(compare(self._load, cells, COMPARE_ROUNDS, COMPARE_SECONDS, told))
        except Spent:
            return []


def _together(
    loads: Sequence[Load], finds: Sequence[Found], progress: Progress
) -> Iterator[Together]:
    """All drives at once, a thread for each."""
    with ThreadPoolExecutor(len(loads)) as threads:
        for mode in MODES:
            figures = [found.figure(mode) for found in finds]
            chosen = [figure for figure in figures if figure is not None]
            if len(chosen) < len(loads):
                continue
            progress(1.0, f"{DOING[mode]} on all drives together")
            for load in loads:
                load.allow(1.0 if mode == "both" else 0.975)
            jobs = [
                threads.submit(load.run, mode, figure.setting, 1.0)
                for load, figure in zip(loads, chosen)
            ]
            wait(jobs)  # also where one failed: a load is one thread's at a time
            try:
                rate = sum(job.result().bytes_per_s for job in jobs)
            except Spent:
                continue
            alone = sum(figure.bytes_per_s for figure in chosen)
            yield Together(mode=mode, bytes_per_s=rate, of_sum=rate / alone)
