"""fio beside us: the same file, engine, block size and depth, in turns.

fio (https://fio.readthedocs.io) is what people measure drives with. It opens the very file of the
load by its descriptor in /proc, so that nothing is left on disk however either of us ends.

[Note: The same memory]
What a transfer costs the processor is mostly the looking up of its pages. Ours are huge where the
system has such; fio's are by `HUGE_PAGES`, as it would compare pages of 4 KiB with them otherwise.
Ours are there before the clock starts. fio fills what it writes before it starts its own, but what
it only reads into is made as it reads, slowly on a virtual machine. So it is told that it also
writes, in none of a hundred transfers: then it fills that too. Both are counted alike, from the
first submission until the last transfer is over. Nor does it change the bytes between two writes
(`--scramble_buffers`, half a processor's work and more), as ours are the same each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aio.figures import DOING, Mode
from aio.load import Load
from aio.ratio import Ratio
from aio.sweep import Setting, Spent

ENGINES = {
    "io_uring": "io_uring",
    "linux_aio": "libaio",
    "libaio": "libaio",
    "threads": "psync",
    "python": "psync",
}
"""fio's engine by backend."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment that gives a program huge pages where it asks for memory (glibc 2.35 or newer)."""

_RW = {
    "read": ("--rw=rw", "--rwmixread=100"),
    "write": ("--rw=write",),
    "both": ("--rw=rw",),
}
"""By mode; see [Note: The same memory]."""
TIMEOUT_S = 60.0
PATIENCE_S = 4.0
"""So long it may take until a first transfer ends."""
FOREVER_BYTES = 1 << 50


@dataclass(frozen=True, kw_only=True, slots=True)
class FioSample:
    """What one run of fio found."""

    bytes_per_s: float
    """In both directions together."""
    bytes: int
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One setting, ours against fio's, by round."""

    mode: Mode
    setting: Setting
    fio_setting: Setting
    """That of fio; its engine is the one of `ENGINES`."""
    ours_bytes_per_s: tuple[float, ...]
    fio_bytes_per_s: tuple[float, ...]
    ours_cpu_s_per_gb: float
    fio_cpu_s_per_gb: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our speed in multiples of fio's, by round."""
        return tuple(a / b for a, b in zip(self.ours_bytes_per_s, self.fio_bytes_per_s))

    @property
    def ratio(self) -> Ratio:
        """Of all rounds."""
        return Ratio.of(self.ratios)


def installed() -> str | None:
    """The path of fio, None where it is not installed."""
    return shutil.which("fio")


def run_fio(load: Load, mode: Mode, setting: Setting, seconds: float) -> FioSample:
    """One run of fio on the load's file. What it writes counts as written by the load.

    Raises:
        RuntimeError: fio failed, or said what is not understood.
        Spent: no more may be written.
    """
    left = load.written_bytes_max - load.bytes_written
    if mode != "read" and left < setting.under_way_bytes:
        raise Spent
    command = _command(load, mode, setting, seconds, FOREVER_BYTES if mode == "read" else left)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S + seconds,
            env={**os.environ, **HUGE_PAGES},
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"asked fio for {mode} for {seconds:g} s; found that it had not ended after "
            f"{TIMEOUT_S + seconds:g} s; likely the drive hangs; look at `dmesg`, or try without "
            "--compare"
        ) from error
    try:
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if done.returncode or found["error"]:
            raise ValueError(done.stderr.strip())
        runs = [found[way] for way in ("read", "write")]
        if not any(run["io_bytes"] for run in runs):
            if seconds < PATIENCE_S:  # The drive is slow, or busy with something else.
                return run_fio(load, mode, setting, 4 * max(seconds, 0.1))
            raise ValueError("no transfer ended in that time")
        sample = FioSample(
            bytes_per_s=sum(run["io_bytes"] / run["runtime"] for run in runs if run["runtime"])
            * 1e3,
            bytes=sum(run["io_bytes"] for run in runs),
            cpu_seconds=(found["usr_cpu"] + found["sys_cpu"]) / 100 * found["job_runtime"] / 1e3,
        )
    except (ValueError, KeyError, IndexError) as error:
        text = (done.stderr.strip() or str(error)).splitlines()
        raise RuntimeError(
            f"asked fio for {mode} by {ENGINES[setting.backend]}; found that it failed: "
            f"{text[-1] if text else 'no output'}; likely its engine is not usable here; try "
            "without --compare, or run: " + " ".join(command)
        ) from error
    load.bytes_written += found["write"]["io_bytes"]
    return sample


def _command(load: Load, mode: Mode, setting: Setting, seconds: float, bytes_max: int) -> list[str]:
    """The load of `Load.run`, ended by what comes first, the time or the bytes."""
    engine, depth = ENGINES[setting.backend], setting.depth * (2 if mode == "both" else 1)
    command = [
        installed() or "fio",
        "--name=beside",
        f"--filename={load.fio_path}",
        *_RW[mode],
        f"--bs={setting.block_bytes}",
        f"--ioengine={engine}",
        f"--direct={int(load.file.direct)}",
        f"--runtime={max(1, round(seconds * 1e3))}ms",
        "--thread",
        "--allow_file_create=0",
        "--overwrite=1",
        "--fallocate=none",
        "--invalidate=0",
        "--scramble_buffers=0",
        "--group_reporting",
        "--output-format=json",
    ]
    if engine == "psync":  # A thread for each transfer, each in a part of the file.
        part = max(setting.block_bytes, load.file.bytes // depth // 4096 * 4096)
        parts = max(1, load.file.bytes // part)
        command += [f"--numjobs={depth}", f"--size={part}"]
        command += [f"--offset_increment={part if parts >= depth else 0}"]
        command += [f"--io_size={bytes_max // depth}"]
    else:
        command += [f"--iodepth={depth}", f"--size={load.file.bytes}"]
        command += [f"--io_size={bytes_max}"]
    return command


def compare(
    load: Load,
    cells: Sequence[tuple[Mode, Setting, Setting]],
    rounds: int,
    seconds: float,
    progress: Callable[[float, str], None] = lambda share, what: None,
) -> Iterator[Compared]:
    """Our setting against fio's, for every cell; rounds outermost, so a drift falls on all alike.

    Within a round and cell both take turns at being first. What may still be written is shared
    out evenly over the turns that write, so that a fast drive does not spend it all in the first.

    Raises:
        RuntimeError: fio failed.
        Spent: not even one round may be written. Where it is fewer than asked, these count.
    """
    written_bytes_max = load.written_bytes_max
    writing_turns = 2 * rounds * sum(mode != "read" for mode, _, _ in cells)
    ours: list[list[float]] = [[] for _ in cells]
    fios: list[list[float]] = [[] for _ in cells]
    cpu = [[0.0, 0.0, 0.0, 0.0] for _ in cells]  # Our seconds and bytes, then fio's.
    done = 0
    with contextlib.suppress(Spent):
        for number in range(rounds):
            for at, (mode, setting, other) in enumerate(cells):
                progress((number + at / len(cells)) / rounds, f"{DOING[mode]} beside fio")
                for turn in (number % 2, 1 - number % 2):
                    if mode != "read":
                        left = written_bytes_max - load.bytes_written
                        load.written_bytes_max = load.bytes_written + left // writing_turns
                        writing_turns -= 1
                    if turn:
                        found = run_fio(load, mode, other, seconds)
                        fios[at].append(found.bytes_per_s)
                        cpu[at][2] += found.cpu_seconds
                        cpu[at][3] += found.bytes
                    else:
                        sample = load.run(mode, setting, seconds)
                        ours[at].append(sample.bytes_per_s)
                        cpu[at][0] += sample.cpu_seconds
                        cpu[at][1] += sample.bytes
            done += 1
    load.written_bytes_max = written_bytes_max
    if not done:
        raise Spent
    for at, (mode, setting, other) in enumerate(cells):
        yield Compared(
            mode=mode,
            setting=setting,
            fio_setting=other,
            ours_bytes_per_s=tuple(ours[at][:done]),
            fio_bytes_per_s=tuple(fios[at][:done]),
            ours_cpu_s_per_gb=cpu[at][0] / cpu[at][1] * 1e9,
            fio_cpu_s_per_gb=cpu[at][2] / cpu[at][3] * 1e9,
        )
