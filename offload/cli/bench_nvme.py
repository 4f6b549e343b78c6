"""`offload bench nvme`: what drives can do, and what that means for training from them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Literal

import tyro

import aio
from aio.system import is_memory
from cpu_adam import FORMATS
from offload.cli import Signals, bad_input
from offload.cli.console import Output, Progress, others_percent
from offload.cli.drive_fio import check_fio, compare
from offload.cli.drive_load import DEPTHS, FILE_BYTES_UNIT, Figure, Load, Mode, search, settings
from offload.cli.flags import check_field, parse_flags
from offload.planning.machine import DriveSpeed, mount_point, nvme_free_bytes, save_speed
from offload.planning.tiers import parse_bytes

SECONDS_MIN, SECONDS_MAX = 5.0, 3600.0
WRITES: dict[Mode, float] = {"read": 0.0, "write": 0.4, "both": 0.8}
"""Share of the bytes left after the first write that may be written by the end of each search; a
comparison may write the rest."""
DOING = {"read": "reading", "write": "writing", "both": "reading and writing at once"}
CACHED_WRITES = 1.5
"""A drive that writes so many times as fast as it reads has a cache that took the bytes."""
MODEL_PARAMETERS = 7e9

_Bytes = tyro.conf.arg(metavar="BYTES")
_Paths = tyro.conf.arg(
    metavar="PATH [PATH ...]", help_behavior_hint="", help="Directories, one on each drive."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvme:
    """Measure drives: the best block size and depth, how fast they then read, write and do both at
    once, and what that means for training. Works in a file without a name, gone at any end. The
    backend is that of training: AIO_BACKEND names another.
    """

    paths: tyro.conf.Positional[Annotated[tuple[str, ...], _Paths]] = ()

    seconds: float = 60.0
    """Seconds to measure each drive, about; the first write of the file and a comparison come on
    top."""

    size: Annotated[str, _Bytes] = "4GiB"
    """Size of the file on each drive: take more than the drive's cache holds."""

    writes_max: Annotated[str, _Bytes] = "100GiB"
    """Most bytes to write to each drive: writing wears drives."""

    compare: Annotated[
        Literal["fio"] | None, tyro.conf.arg(metavar="fio", help_behavior_hint="")
    ] = None
    """Run fio too, if it is installed: same file, same setting, in turns. Default: not."""

    save: bool = True
    """Keep the speeds for later: training uses them."""

    json: bool = False
    """One JSON object on standard output, nothing else there."""

    def __post_init__(self) -> None:
        right = SECONDS_MIN <= self.seconds <= SECONDS_MAX
        check_field(self, "seconds", right, f"{SECONDS_MIN:g} to {SECONDS_MAX:g}")
        check_field(self, "size", self.file_bytes > 0, "bytes, such as 4GiB, at least 1MiB")
        right = parse_bytes(self.writes_max) >= 2 * self.file_bytes
        expected = f"bytes, at least twice --size {self.size}: to make the file can take as much"
        check_field(self, "writes_max", right, expected)

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
    figures: dict[Mode, Figure] = field(default_factory=dict)
    """Without those modes for which no more could be written."""
    ratios: dict[Mode, list[float]] = field(default_factory=dict)
    """Our speed in multiples of fio's, by round."""

    @property
    def each_way_bytes_per_s(self) -> float:
        """Bytes read and as many written per second, at once or in turns, as is faster; 0 where
        that is not known."""
        rates = {mode: figure.bytes_per_s for mode, figure in self.figures.items()}
        if "write" not in rates:
            return 0.0
        in_turns = 1 / (1 / rates["read"] + 1 / rates["write"])
        return max(in_turns, rates.get("both", 0.0) / 2)

    @property
    def doubts(self) -> Iterator[str]:
        """Why the figures may mislead."""
        if not self.direct:
            yield "without O_DIRECT this may be the page cache's speed; the drive may be far slower"
        write, read = self.figures.get("write"), self.figures["read"]
        if write and write.bytes_per_s > CACHED_WRITES * read.bytes_per_s:
            yield "likely a cache took the writes, and long training writes slower: a larger --size"
        if left_out := [mode for mode in WRITES if mode not in self.figures]:
            yield f"no figure for {' and '.join(left_out)}: --writes-max is used up"

    @property
    def verdict(self) -> str:
        """What it means for somebody who trains, in a few sentences."""
        told, doubts = f"{self.path}:", list(self.doubts)
        if rate := self.each_way_bytes_per_s:
            size = FORMATS["exact"].bytes_per_element
            told += (
                f" the optimizer state (exact bf16) of {rate / size / 1e6:.0f} M parameters is "
                "read and written back each second, that of a 7B model in "
                f"{MODEL_PARAMETERS * size / rate:.3g} s: a step whose compute takes longer hides "
                f"the drive. Each step writes {MODEL_PARAMETERS * size / 1e9:.4g} GB."
            )
        return told + f" But {'; '.join(doubts)}." * bool(doubts)


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
            with contextlib.closing(aio.open_backend(depth=2 * max(DEPTHS))) as opened:
                backend = opened.name
            if asked.compare:
                check_fio(backend)
        left_out = [path for path in given if path not in paths]
        notices = [f"{path} is on the file system of another path: left out" for path in left_out]
        if busy := others_percent():
            notices.append(f"other programs keep {busy}% of the processors busy: figures suffer")
        notices.append(
            f"measuring for about {asked.seconds * len(paths):.0f} s; writes a file of "
            f"{asked.size} without a name to {' and '.join(paths)}, and again over it, at most "
            f"{asked.writes_max} to each; the file is gone however this ends"
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
        sys.stdout.write(json.dumps({"kind": "bench nvme", "found": each}, indent=2) + "\n")


def measure(
    asked: Nvme,
    path: str,
    backend: str,
    progress: Callable[[float, str], None] = lambda share, what: None,
    io: aio.IO | None = None,
) -> Found:
    """All there is to find of one path."""
    choice = random.Random(0)
    progress(0.0, f"the first write in {path}")
    with Load(path, asked.file_bytes, backend, io) as load:
        found = Found(path, load.file.direct)
        filled = load.bytes_written
        left = parse_bytes(asked.writes_max) - filled
        for number, (mode, share) in enumerate(WRITES.items()):
            progress((number + 1) / 5, f"{DOING[mode]} in {path}")
            load.bytes_written_max = filled + round(left * share)
            tried, measured = settings(backend, mode, asked.file_bytes), partial(load.run, mode)
            if best := search(tried, measured, asked.seconds / len(WRITES), choice=choice):
                found.figures[mode] = best
        if asked.compare:
            progress(4 / 5, f"beside fio in {path}")
            load.bytes_written_max = filled + left
            found.ratios = compare(load, found.figures)
        found.bytes_written = load.bytes_written
    return found


def _show(console: Output, found: Found) -> None:
    """The figures of a drive and what follows for training."""
    direct = "O_DIRECT" if found.direct else "no O_DIRECT"
    console.sentence(f"\n{found.path} ({direct})", style="italic")
    for mode, one in found.figures.items():
        low, high = min(one.rates) / 1e9, max(one.rates) / 1e9
        line = f"{mode:6}{one.setting!s:24}{one.bytes_per_s / 1e9:6.2f} GB/s ({low:.2f}-{high:.2f})"
        if ratios := found.ratios.get(mode):
            mean = statistics.geometric_mean(ratios)
            line += f", {mean:.2f} of fio's ({min(ratios):.2f}-{max(ratios):.2f})"
        console.sentence(line)
    console.sentence(found.verdict + "\n")


def _saved(found: Found, busy: int) -> str:
    """Keeps the speeds of a drive for planning, and says where, or why not."""
    if not found.direct or len(found.figures) < len(WRITES):
        return f"not saved: {'; '.join(found.doubts)}"
    read, write, both = (found.figures[mode] for mode in WRITES)
    speed = DriveSpeed(
        read_bytes_per_s=read.bytes_per_s,
        write_bytes_per_s=write.bytes_per_s,
        both_bytes_per_s=both.bytes_per_s,
        backend=both.setting.backend,
        block_bytes=both.setting.block_bytes,
        depth=both.setting.depth,
        measured=datetime.now().isoformat(timespec="seconds"),
        others_percent=busy,
    )
    try:
        saved = save_speed(found.path, speed)
        return f"saved to {saved}, where training finds it; remove it to forget it"
    except OSError as error:
        return (
            f"the speeds could not be saved to {error.filename}: {error.strerror}; likely its disk "
            "is full, or it is not yours; try: OFFLOAD_MACHINE=FILE on another disk, or --no-save"
        )
