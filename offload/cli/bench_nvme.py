"""`offload bench nvme`: what drives can do, and whether that is enough to train from them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro

from aio import backends, bench, fio
from aio.figures import Found
from aio.load import FILL_DEPTH
from aio.system import is_memory
from offload.cli import (
    Signals,
    bad_input,
    bench_nvme_report,
    bench_nvme_saved,
    broken,
    display,
    gpus,
    measuring,
    nearest,
)
from offload.cli.bench_nvme_verdict import FormatVerdict, Verdict
from offload.cli.console import Output
from offload.cli.flags import Flags, flag
from offload.config import format_bytes, parse_bytes
from offload.disks import disks_below, same_drive
from offload.machine import host_free_bytes, nvme_free_bytes, unreadable_speeds

BLOCK_BYTES_MAX = 256 << 20
DEPTH_MAX = 256
REQUESTS_MAX = 4096  # of one backend
FILE_BYTES_MIN = 1 << 20
SECONDS_MIN, SECONDS_MAX = 1.0, 3600.0
COMPARE_SECONDS = 2 * 2 * bench.COMPARE_ROUNDS * bench.COMPARE_SECONDS
"""What a comparison with fio takes for each path, about."""

_List = tyro.conf.arg(help_behavior_hint="")
_Optional = tyro.conf.arg(metavar="FILE", help_behavior_hint="")
_Fio = tyro.conf.arg(metavar="fio", help_behavior_hint="")
_GPU, _ENDURANCE = "h100", "600TB"
"""What is assumed where nothing is given."""


def _named(metavar: str) -> Any:
    """A flag that may be left out, with so called a value."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


_Paths = tyro.conf.arg(
    metavar="PATH [PATH ...]", help_behavior_hint="", help="Directories, one on each drive."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvme:
    """Measure drives: the best way to ask them for bytes, how fast they then read, write and do
    both at once, and what that means for training. Works in a file without a name, gone at any end.

    Raises:
        ValueError: a field holds what it cannot mean; the message names the flag.
    """

    paths: tyro.conf.Positional[Annotated[tuple[str, ...], _Paths]] = ()

    seconds: float = 60.0
    """Seconds to measure, about, for all paths together. Writing the files (--size) is part of it,
    and takes longer on a slow drive; a comparison comes on top."""

    size: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "4GiB"
    """Size of the file on each drive: take more than the drive's cache holds."""

    writes_max: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "100GiB"
    """Most bytes to write to each path: writing wears drives."""

    backends: Annotated[tuple[str, ...], _List] = ()
    """Ways to ask the kernel, such as io_uring threads. Default: all that work here."""

    blocks: Annotated[tuple[str, ...], _List] = ()
    """Sizes of one transfer to try, such as 1MiB 4MiB. Default: 256 KiB to 16 MiB."""

    depths: Annotated[tuple[int, ...], _List] = ()
    """Numbers of transfers at once to try, such as 1 8 32. Default: 1 to 32."""

    compare: Annotated[
        Literal["fio"] | None, tyro.conf.arg(metavar="fio", help_behavior_hint="")
    ] = None
    """Run fio too, if it is installed: same file, same setting, in turns. Default: not."""

    model: Annotated[str, tyro.conf.arg(metavar="COUNT")] = "7B"
    """Parameters of the model that the verdict is about."""

    gpu: Annotated[str | None, _named("GPU")] = None
    """The GPU that the verdict is about, or its dense bf16 TFLOP/s. Default: h100, and the verdict
    says that this is assumed."""

    endurance: Annotated[str | None, _named("BYTES")] = None
    """Bytes that each drive endures, as its data sheet says (TBW). Default: 600TB, and the verdict
    says that this is assumed."""

    save: bool = True
    """Keep the speeds for later: training and doctor use them."""

    plot: Annotated[str | None, _Optional] = None
    """File for heat maps too (.png, .svg, .pdf); needs matplotlib. Default: none."""

    json: bool = False
    """One JSON object on standard output, nothing else there."""

    def __post_init__(self) -> None:
        right = SECONDS_MIN <= self.seconds <= SECONDS_MAX
        few = ", as less measures nothing" if self.seconds < SECONDS_MIN else ""
        self._check("seconds", right, f"{SECONDS_MIN:g} to {SECONDS_MAX:g}{few}")
        self._check("plot", self.plot != "", "the path of a file")
        right = all(1 <= depth <= DEPTH_MAX for depth in self.depths)
        self._check("depths", right, f"numbers from 1 to {DEPTH_MAX}")
        blocks = [_bytes(block) for block in self.blocks]
        right = all(b % 4096 == 0 and 0 < b <= BLOCK_BYTES_MAX for b in blocks)
        self._check("blocks", right, "multiples of 4 KiB up to 256 MiB, such as 1MiB 4MiB")
        for name in ("size", "writes_max"):
            right = _bytes(getattr(self, name)) >= FILE_BYTES_MIN
            self._check(name, right, "bytes, such as 4GiB, at least 1MiB")
        self._check("model", _amount(self.model) >= 1, "a number of parameters, such as 7B")
        right = self.endurance is None or _amount(self.endurance) >= 1
        self._check("endurance", right, "bytes, such as 600TB")
        right = self.gpu is None or gpus.flops_of(self.gpu) is not None
        like = "" if right else nearest(str(self.gpu), tuple(gpus.GPUS))
        self._check("gpu", right, f"dense bf16 TFLOP/s, or one of {', '.join(gpus.GPUS)}{like}")

    def _check(self, name: str, right: bool, expected: str) -> None:
        if not right:
            value = getattr(self, name)
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"{flag(name)} {shown}: expected {expected}")


def _bytes(text: str) -> int:
    """Bytes such as 4GiB, 0 where it is none."""
    with contextlib.suppress(ValueError):
        return parse_bytes(text)
    return 0


def _amount(text: str) -> float:
    """A number such as 7B or 600TB, in powers of ten, 0 where it is none."""
    found = re.fullmatch(
        r"(\d{1,12}(?:\.\d{1,6})?)\s?([KMGBTP]?)B?", text, re.ASCII | re.IGNORECASE
    )
    if found is None:
        return 0.0
    powers = {"": 0, "K": 3, "M": 6, "G": 9, "B": 9, "T": 12, "P": 15}
    return float(found[1]) * 10.0 ** powers[found[2].upper()]


FLAGS = Flags(
    kind=Nvme,
    command="offload bench nvme",
    known=tuple(field.name for field in dataclasses.fields(Nvme) if field.name != "paths"),
)
"""The flags of `offload bench nvme`."""


def command(arguments: Sequence[str]) -> None:
    """Measures as `arguments` say; what can be refused is refused before a byte is written.

    Raises:
        BadInput: the arguments, or a path cannot be used or has no room.
        Stopped: by Ctrl-C or SIGTERM; nothing is left on disk.
    """
    with Signals() as signals:
        signals.where = "before anything was measured; nothing was written"
        asked = FLAGS.parse(arguments)
        # Results go to standard output, progress and remarks to standard error.
        console, remarks = Output(stderr=asked.json), Output(stderr=True)
        others_percent = measuring.others_percent()
        busy = measuring.busy(others_percent)
        with bad_input():
            draw = asked.plot and measuring.drawing(asked.plot, "offload.cli.bench_nvme_plot")
            wanted, notices = _wanted(asked)
            _check_room(asked, wanted)
        notices += [one for one in (busy, asked.save and unreadable_speeds()) if one]
        for notice in [*notices, _announced(asked, wanted)]:
            _note(remarks, f"note: {notice}")
        report = bench_nvme_report.Report()
        with measuring.bar(remarks) as progress:

            def told(share: float, what: str) -> None:
                signals.where = (
                    f"while measuring {what}; {len(report.found)} of {len(wanted.paths)} drives "
                    "measured; the file is gone, nothing is left on disk"
                )
                progress(share, what)

            with bad_input():
                for one in bench.measure(wanted, told):
                    report.add(one)
                    told_of = bench_nvme_report.shown(one, narrow=display.is_narrow(console.width))
                    console.print(*told_of, sep="\n", highlight=False)
                    _remark(one, remarks)
        signals.where = "after the last figure; nothing is left on disk"
        told_verdict, config, formats = _concluded(asked, wanted, report, console, busy)
        _note(remarks, _kept(asked, report, others_percent))
        if draw:
            _note(remarks, draw(report.found))
    if asked.json:
        found = {
            "kind": "bench nvme",
            "machine": {
                "cpu": measuring.processor(),
                "cores": measuring.cores(),
                "system": platform.platform(),
            },
            "notices": notices,
            **report.as_dict(),
            "formats": [asdict(one) for one in formats],
            "verdict": told_verdict,
            "config": config,
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")


def _kept(asked: Nvme, report: bench_nvme_report.Report, others_percent: int) -> str:
    """What became of the speeds."""
    return bench_nvme_saved.saved(report, others_percent) if asked.save else "not saved"


def _wanted(asked: Nvme) -> tuple[bench.Wanted, list[str]]:
    """What to measure, and what the user should know about it."""
    if not asked.paths:
        raise ValueError(
            "asked to measure drives; found no path; likely cause: it was forgotten; try: offload "
            "bench nvme /mnt/nvme, a directory on the drive where you can write"
        )
    paths, notices = _one_on_each_drive([os.path.abspath(path) for path in asked.paths])
    usable, left_out = backends.compared(_requests(asked, len(paths)))
    for name in asked.backends:
        if name not in (*usable, "python"):
            reason = left_out.get(name, "there is none of that name" + nearest(name, usable))
            raise ValueError(
                f"--backends {name}: cannot be used here: {reason}; there are {', '.join(usable)}"
            )
    notices += [f"without {name}: {reason}" for name, reason in left_out.items()]
    fio_wanted = asked.compare == "fio"
    if fio_wanted and fio.installed() is None:
        raise ValueError(
            "asked for --compare fio; found no fio on PATH; likely cause: it is not installed; "
            "try: apt install fio (or dnf, pacman)"
        )
    wanted = bench.Wanted(
        paths=paths,
        file_bytes=_bytes(asked.size) // 4096 * 4096,
        written_bytes_max=_bytes(asked.writes_max),
        seconds=asked.seconds,
        backends=measuring.once(asked.backends or usable),
        blocks_bytes=measuring.once([_bytes(b) for b in asked.blocks]) or bench.BLOCKS_BYTES,
        depths=measuring.once(asked.depths) or bench.DEPTHS,
        fio=fio_wanted,
    )
    if not wanted.settings("", "both"):
        raise ValueError(
            f"asked for --size {asked.size} with the given --blocks and --depths; found no "
            "setting whose bytes under way fit into a quarter of the file, and into 128 MiB; "
            "likely cause: the file is too small, or the blocks too large; try: a larger "
            "--size, or --blocks 1MiB --depths 1 8"
        )
    return wanted, notices


def _requests(asked: Nvme, drives: int) -> int:
    """Requests that backends hold at once: of each drive those that are measured, of reads and
    writes at once, and those that made its file; each wants one more to be woken by."""
    deepest = max(asked.depths or bench.DEPTHS)
    return min(drives * (2 * deepest + FILL_DEPTH + 2), REQUESTS_MAX)


def _one_on_each_drive(paths: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The first path on each drive, and what to say of the others and of what is no drive.

    Raises:
        OSError: a path cannot be used.
    """
    for path in paths:
        nvme_free_bytes((path,), asked="it")  # refuses what is no directory on a disk
    kept, told = [], []
    for path, first in zip(paths, same_drive(paths)):
        if path == paths[first]:
            kept.append(path)
        else:
            names = ", ".join(sorted(disks_below(path)))
            told.append(f"{path} is on the drive of {paths[first]} ({names}): measured once, there")
    in_memory = [path for path in kept if is_memory(path)]
    told += [bench_nvme_report.memory(in_memory)] if in_memory else []
    return measuring.once(kept), list(measuring.once(told))


def _check_room(asked: Nvme, wanted: bench.Wanted) -> None:
    """Refuses what would fill a drive or the memory, or may not be written.

    Raises:
        ValueError: there is too little room.
    """
    for path in wanted.paths:
        free = nvme_free_bytes((path,))
        if free < wanted.file_bytes:
            fits = min(free // 2, wanted.written_bytes_max // 4) >> 20
            remedy = f"--size {fits}MiB" if fits else "free some space, or another drive"
            raise ValueError(
                f"asked for a file of {asked.size} in {path} (--size); found {format_bytes(free)} "
                f"free; likely cause: the drive is too full, or too small; try: {remedy}"
            )
    if wanted.file_bytes > wanted.written_bytes_max:
        raise ValueError(
            f"asked for a file of {asked.size} (--size); found that {asked.writes_max} may be "
            "written (--writes-max), and to make the file takes more; likely cause: a limit for "
            f"smaller files; try: --writes-max {wanted.file_bytes >> 18}MiB"
        )
    needed, memory = wanted.memory_bytes, host_free_bytes() // 2
    if needed > memory:
        raise ValueError(
            f"asked for transfers that take {format_bytes(needed)} of memory; found "
            f"{format_bytes(2 * memory)} free, of which half may be taken; likely cause: large "
            "blocks at great depths; try: --blocks 1MiB --depths 1 8"
        )


def _announced(asked: Nvme, wanted: bench.Wanted) -> str:
    """What will be done to the drives, before it is."""
    more = f", then about {COMPARE_SECONDS:.0f} s beside fio for each path" if wanted.fio else ""
    each = " to each" if len(wanted.paths) > 1 else " in all"
    return (
        f"measuring for about {asked.seconds:.0f} s{more}; writes a file of {asked.size} without a "
        f"name to {' and '.join(wanted.paths)}, and again and again over it, at most "
        f"{asked.writes_max}{each}; the file is gone however this ends"
    )


def _remark(one: object, remarks: Output) -> None:
    if isinstance(one, Found):
        told = [one.notice] if one.notice and not is_memory(one.path) else []
        told += [f"no figure for {mode}: {why} (--writes-max)" for mode, why in one.left_out]
        for notice in told:
            _note(remarks, f"note: {notice}")


def _note(remarks: Output, text: str) -> None:
    """A line that may hold names of files, whose brackets are no markup."""
    remarks.sentence(text)


def _concluded(
    asked: Nvme,
    wanted: bench.Wanted,
    report: bench_nvme_report.Report,
    console: Output,
    busy: str | None,
) -> tuple[str, str, Sequence[FormatVerdict]]:
    """Prints what follows: the verdict, what to paste, and a row for each state format."""
    if in_memory := [path for path in wanted.paths if is_memory(path)]:
        told = bench_nvme_report.memory(in_memory)
        _note(console, told)
        return told, "", ()
    verdict = _verdict(asked, report)
    told = bench_nvme_report.verdict(verdict, report)
    told += f" But {busy}." if busy else ""
    narrow = display.is_narrow(console.width)
    console.print(bench_nvme_report.formats(verdict, narrow=narrow))
    console.sentence(broken(told, min(console.width, 80), "") + "\n")
    config = bench_nvme_report.config(wanted.paths, report, wanted.backends)
    _note(console, config)
    return told, config, verdict.formats


def _verdict(asked: Nvme, report: bench_nvme_report.Report) -> Verdict:
    gpu = asked.gpu or _GPU
    free_bytes = None
    with contextlib.suppress(OSError):
        free_bytes = nvme_free_bytes(tuple(found.path for found in report.found))
    return Verdict(
        parameters=_amount(asked.model),
        model=asked.model,
        gpu=gpus.shown(gpu),
        gpu_flops=gpus.flops_of(gpu) or 0.0,
        endurance_bytes=_amount(asked.endurance or _ENDURANCE) * len(report.found),
        each_way=report.each_way(),
        free_bytes=free_bytes,
        gpu_assumed=asked.gpu is None,
        endurance_assumed=asked.endurance is None,
    )
