"""fio beside a load: the same file, engine, block size and depth, in turns.

fio (https://fio.readthedocs.io) is what people measure drives with. It opens the file of the load
by its descriptor in /proc, so nothing is left on disk however either of the two ends.

[Note: The same memory]
Most of a transfer's processor time is the lookup of its pages, so fio gets huge pages, as the load
has. fio fills memory that it writes before its clock starts, but memory that it only reads into is
faulted in during the run; declared as a mix of 100% reads it fills that memory too.
`--scramble_buffers` would cost it half a processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from functools import partial

from aio.backends import DEPTH
from offload.cli.drive_load import Load, Mode, Spent

ENGINES = {"io_uring": "io_uring", "linux_aio": "libaio"}
"""fio's engine by backend; with the others nothing is compared."""

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment that gives a program huge pages where it asks for memory (glibc 2.35 or newer)."""
_RW: dict[Mode, tuple[str, ...]] = {
    "read": ("--rw=rw", "--rwmixread=100"),
    "write": ("--rw=write",),
}
"""By mode; see [Note: The same memory]."""
ROUNDS, SECONDS = 6, 0.8
TIMEOUT_S = 60.0
FOREVER_BYTES = 1 << 50


def check_fio(backend: str) -> None:
    """Refuses a comparison that cannot be."""
    found = f"the backend {backend}" if shutil.which("fio") else "no fio on PATH"
    if found == "no fio on PATH" or backend not in ENGINES:
        raise ValueError(
            f"asked for --compare fio; found {found}; likely cause: it is not installed, or the "
            f"backend is none of {', '.join(ENGINES)}; try: apt install fio (or dnf, pacman)"
        )


def run_fio(load: Load, mode: Mode, seconds: float) -> float:
    """Bytes per second of a run of fio on the load's file. What it writes counts as the load's."""
    left = FOREVER_BYTES if mode == "read" else load.bytes_written_max - load.bytes_written
    if left < load.piece_bytes:
        raise Spent
    engine = ENGINES[load.backend]
    command = [
        "fio",
        "--name=beside",
        f"--filename=/proc/{os.getpid()}/fd/{load.file.fd}",
        *_RW[mode],
        f"--bs={load.piece_bytes}",
        f"--ioengine={engine}",
        f"--iodepth={DEPTH}",
        f"--direct={int(load.file.direct)}",
        f"--runtime={max(1, round(seconds * 1e3))}ms",
        f"--size={load.file.bytes}",
        f"--io_size={left - left % load.piece_bytes}",  # Which fio rounds up.
        "--thread",
        "--allow_file_create=0",
        "--overwrite=1",
        "--fallocate=none",
        "--invalidate=0",
        "--scramble_buffers=0",
        "--output-format=json",
    ]
    environment = {**os.environ, **_HUGE_PAGES}
    done, most = None, TIMEOUT_S + seconds
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=most, env=environment
        )
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if done.returncode or found["error"]:
            raise ValueError(done.stderr.strip())
        load.bytes_written += found["write"]["io_bytes"]
        return 1e3 * float(found[mode]["io_bytes"]) / float(found[mode]["runtime"])
    except (ValueError, KeyError, IndexError, ArithmeticError, subprocess.TimeoutExpired) as error:
        told = done and done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(
            f"asked fio for {mode} by {engine}; found that it failed: "
            f"{told or error}; likely its engine is not usable here, or the drive hangs; try "
            "without --compare, or run: " + " ".join(command)
        ) from error


def compare(load: Load) -> dict[Mode, list[float]]:
    """Our speed in multiples of fio's, by mode and round; rounds outermost, so that a drift falls
    on all alike. Within a round both take turns at being first. Each turn may write its part of
    what is left, so that a fast drive does not spend it all in the first.
    """
    each = (load.bytes_written_max - load.bytes_written) // (2 * ROUNDS)
    ratios: dict[Mode, list[float]] = {}
    for number in range(ROUNDS):
        for mode in _RW:
            rates = dict[bool, float]()
            with contextlib.suppress(Spent):
                for ours in (number % 2 == 0, number % 2 == 1):
                    load.bytes_written_max = load.bytes_written + each
                    rates[ours] = (load.run if ours else partial(run_fio, load))(mode, SECONDS)
                ratios.setdefault(mode, []).append(rates[True] / rates[False])
    return ratios
