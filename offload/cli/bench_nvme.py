"""`offload bench nvme`: what drives can do, and what that means for training from them."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Annotated

import tyro

import aio
from aio.system import is_memory
from cpu_adam import FORMATS
from offload.cli import Signals, bad_input
from offload.cli.console import Output, Progress, emit, others_percent
from offload.cli.drive_load import FILE_BYTES_UNIT, TURNS, Load, Mode
from offload.cli.flags import AsJson, check_field, parse_flags
from offload.planning.machine import DriveSpeed, mount_point, nvme_free_bytes, save_speed
from offload.planning.tiers import parse_bytes

SECONDS_MIN, SECONDS_MAX = 5.0, 3600.0
ROUNDS = 7
"""In each, reading, writing and both have a turn, so that a drift of the drive falls on all."""
DOING = {"read": "reading", "write": "writing", "both": "reading and writing at once"}
CACHED_WRITES = 1.5
"""A drive that writes so many times as fast as it reads has a cache that took the bytes."""
MODEL_PARAMETERS = 7e9

_Bytes = tyro.conf.arg(metavar="BYTES")
_Paths = tyro.conf.arg(
    metavar="PATH [PATH ...]", help_behavior_hint="", help="Directories, one on each drive."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvme(AsJson):
    """Measure drives: how fast they read, write and do both at once by what training uses, and what
    that means for it. Works in a file without a name, gone at any end. The backend is that of
    training, too: AIO_BACKEND names another.
    """

    paths: tyro.conf.Positional[Annotated[tuple[str, ...], _Paths]] = ()

    seconds: float = 20.0
    """Seconds to measure each drive, about; the first write of the file comes on top."""

    size: Annotated[str, _Bytes] = "4GiB"
    """Size of the file on each drive: take more than the drive's cache holds."""

    save: bool = True
    """Keep the speeds for later: training uses them."""

    def __post_init__(self) -> None:
        right = SECONDS_MIN <= self.seconds <= SECONDS_MAX
        check_field(self, "seconds", right, f"{SECONDS_MIN:g} to {SECONDS_MAX:g}")
        check_field(self, "size", self.file_bytes > 0, "bytes, such as 4GiB, at least 1MiB")

    @property
    def file_bytes(self) -> int:
        """Size of the file on each drive."""
        return parse_bytes(self.size) // FILE_BYTES_UNIT * FILE_BYTES_UNIT


@dataclass(slots=True)
class Found:
    """What was found for one path."""

    path: str
    direct: bool
    """Whether O_DIRECT held; without it the page cache was measured too."""
    bytes_written: int = 0
    rates: dict[Mode, list[float]] = field(default_factory=dict)
    """Bytes per second by round."""

    @property
    def medians(self) -> dict[Mode, float]:
        """Bytes per second by mode."""
        return {mode: statistics.median(rates) for mode, rates in self.rates.items()}

    @property
    def each_way_bytes_per_s(self) -> float:
        """Bytes read and as many written per second, at once or in turns, as is faster."""
        rates = self.medians
        return max(1 / (1 / rates["read"] + 1 / rates["write"]), rates["both"] / 2)

    @property
    def doubts(self) -> Iterator[str]:
        """Why the figures may mislead."""
        if not self.direct:
            yield "without O_DIRECT this may be the page cache's speed; the drive may be far slower"
        rates = self.medians
        if rates["write"] > CACHED_WRITES * rates["read"]:
            yield "likely a cache took the writes, and long training writes slower: a larger --size"

    @property
    def verdict(self) -> str:
        """What it means for somebody who trains, in a few sentences."""
        rate, size = self.each_way_bytes_per_s, FORMATS["exact"].bytes_per_element
        doubts = f" But {'; '.join(self.doubts)}." if any(self.doubts) else ""
        return (
            f"{self.path}: the optimizer state (exact bf16) of {rate / size / 1e6:.0f} M "
            "parameters is read and written back each second, that of a 7B model in "
            f"{MODEL_PARAMETERS * size / rate:.3g} s: a step whose compute takes longer hides the "
            f"drive. Each step writes {MODEL_PARAMETERS * size / 1e9:.4g} GB.{doubts}"
        )


def command(arguments: list[str]) -> None:
    """Measures as `arguments` say; what can be refused is refused before a byte is written."""
    asked = parse_flags(Nvme, "offload bench nvme", arguments)
    # Results go to standard output, progress and remarks to standard error.
    console, remarks = Output(stderr=asked.json), Output(stderr=True)
    with Signals() as signals:
        signals.where = "before anything was measured; nothing was written"
        with bad_input():
            given = [os.path.abspath(path) for path in asked.paths]
            for path in given:
                nvme_free_bytes((path,), asked="it")  # Refuses what is no directory on a disk.
            memory = [path for path in given if is_memory(path)]
            if memory or not given:
                raise ValueError(
                    "asked to measure drives; found "
                    f"{f'{memory[0]}, which is memory' if memory else 'no path'}; likely cause: "
                    "the drive's path was forgotten or mixed up; try: offload bench nvme "
                    "/mnt/nvme, a directory where you can write"
                )
            mounts = [mount_point(path) for path in given]
            paths = [given[mounts.index(mount)] for mount in dict.fromkeys(mounts)]
            with contextlib.closing(aio.open_backend()) as opened:
                backend = opened.name
        left_out = [path for path in given if path not in paths]
        notices = [f"{path} is on the file system of another path: left out" for path in left_out]
        if busy := others_percent():
            notices.append(f"other programs keep {busy}% of the processors busy: figures suffer")
        notices.append(
            f"measuring for about {asked.seconds * len(paths):.0f} s; writes a file of "
            f"{asked.size} without a name to {' and '.join(paths)}, and over it for half of that "
            "time; the file is gone however this ends"
        )
        remarks.notes(notices)
        found: list[Found] = []
        with Progress(remarks) as progress, bad_input():
            for number, path in enumerate(paths):

                def said(share: float, what: str, done: int = number) -> None:
                    signals.where = f"while measuring {what}; nothing is left on disk"
                    progress.show(f"measuring {what}", (done + share) / len(paths))

                found.append(measure(asked, path, backend, said))
                _show(console, found[-1])
                if asked.save:
                    remarks.notes([_saved(found[-1], busy)])
    if asked.json:
        each = [asdict(one) | {"verdict": one.verdict} for one in found]
        emit({"kind": "bench nvme", "found": each})


def measure(
    asked: Nvme,
    path: str,
    backend: str,
    progress: Callable[[float, str], None] = lambda share, what: None,
    io: aio.IO | None = None,
) -> Found:
    """All there is to find of one path."""
    progress(0.0, f"the first write in {path}")
    with Load(path, asked.file_bytes, backend, io) as load:
        found = Found(path, load.file.direct)
        for number, mode in enumerate([*TURNS] * ROUNDS):
            progress((number + 1) / (ROUNDS * len(TURNS) + 1), f"{DOING[mode]} in {path}")
            rate = load.run(mode, asked.seconds / ROUNDS / len(TURNS))
            found.rates.setdefault(mode, []).append(rate)
        found.bytes_written = load.bytes_written
    return found


def _show(console: Output, found: Found) -> None:
    """The figures of a drive and what follows for training."""
    direct = "O_DIRECT" if found.direct else "no O_DIRECT"
    console.sentence(f"\n{found.path} ({direct})", style="italic")
    for mode, rate in found.medians.items():
        low, high = min(found.rates[mode]) / 1e9, max(found.rates[mode]) / 1e9
        console.sentence(f"{mode:6}{rate / 1e9:6.2f} GB/s ({low:.2f}-{high:.2f})")
    console.sentence(found.verdict + "\n")


def _saved(found: Found, busy: int) -> str:
    """Keeps the speeds of a drive for planning, and says where, or why not."""
    if not found.direct:
        return f"not saved: {'; '.join(found.doubts)}"
    rates = {f"{mode}_bytes_per_s": rate for mode, rate in found.medians.items()}
    now = datetime.now().isoformat(timespec="seconds")
    speed = DriveSpeed(**rates, measured=now, others_percent=busy)
    try:
        saved = save_speed(found.path, speed)
        return f"saved to {saved}, where training finds it; remove it to forget it"
    except OSError as error:
        return (
            f"the speeds could not be saved to {error.filename}: {error.strerror}; likely its disk "
            "is full, or it is not yours; try: OFFLOAD_MACHINE=FILE on another disk, or --no-save"
        )
