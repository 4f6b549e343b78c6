"""Whose time a streamed unit's is: the interpreter's, torch's, the engine's C++, the C library's.

    PYTHONPATH=. python benchmarks/hooks_shares.py

The units of 1 KiB of `hooks.py`, whose user's thread is first timed without being watched and then
sampled by `perf` (Linux's own; Debian's package `linux-perf`), which slows it: so a sample tells
only in which library the time goes, and in which pass. Given are microseconds per unit and pass
above the plain model: its time in all, split as the samples are. What Python costs is the column
`interpreter`: all of libpython, also where torch calls it; what torch does for the hooks (its own
calls of them, weights bound and put at rest, gradients copied) is torch's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hooks import STEPS, UNITS, Chain, build, taken
from rich.console import Console
from rich.table import Table

ROUNDS, SAMPLED_SECONDS, SAMPLES_PER_SECOND = 20, 30, 1000
KINDS: dict[str, tuple[str | None, str]] = {
    "plain": (None, "device"),
    "gradients on the device": ("cpu", "device"),
    "all on cpu": ("cpu", "cpu"),
}
VERBS = ("forward", "backward")
OWNERS = {
    "interpreter": ("libpython", "python3"),
    "torch": ("libtorch", "libc10", "_C."),
    "engine's C++": ("_books", "_whole", "_cpu_adam", "_native"),
    "C library": ("libc.", "libc-", "libstdc++", "libm.", "libm-", "libpthread", "[vdso]", "ld-"),
}
"""By what the name of a library begins with; the rest is the kernel's."""

Made = dict[str, tuple[Chain, Any]]
Windows = list[tuple[float, float, str, str]]
"""(begin, end, kind, pass), on the monotonic clock."""


def owner_of(library: str) -> str:
    """Whose the time is that is spent in a library."""
    name = os.path.basename(library)
    return next((who for who, begins in OWNERS.items() if name.startswith(begins)), "kernel")


def watched(made: Made, samples: Path) -> Windows:
    """Run all kinds in turns under perf, and tell when which pass of which ran."""
    perf = ["perf", "record", "-q", "-e", "cpu-clock", "-k", "CLOCK_MONOTONIC"]
    perf += ["-F", str(SAMPLES_PER_SECOND), "-t", str(os.getpid()), "-o", str(samples)]
    with subprocess.Popen(perf, stderr=subprocess.DEVNULL) as watching:
        time.sleep(1.0)
        windows: Windows = []
        end = time.monotonic() + SAMPLED_SECONDS
        while time.monotonic() < end:
            for kind, (model, optimizer) in made.items():
                x = torch.zeros(1, model.width)
                for _ in range(STEPS):
                    began = time.monotonic()
                    loss = model(x).sum()
                    between = time.monotonic()
                    loss.backward()
                    windows.append((began, between, kind, "forward"))
                    windows.append((between, time.monotonic(), kind, "backward"))
                    optimizer.zero_grad()
                if kind != "plain":
                    optimizer.engine.settle()
        watching.send_signal(signal.SIGINT)
    return windows


def shares(samples: Path, windows: Windows) -> dict[tuple[str, str], Counter[str]]:
    """How many samples each owner has, by kind and pass."""
    script = ["perf", "script", "-i", str(samples), "-F", "time,ip,dso"]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    begins = [begin for begin, *_ in windows]
    found: dict[tuple[str, str], Counter[str]] = {}
    for line in lines:
        at, _, library = line.strip().partition(": ")
        inside = bisect_right(begins, float(at)) - 1
        if inside >= 0 and float(at) <= windows[inside][1]:
            _, _, kind, verb = windows[inside]
            owner = owner_of(library.rsplit("(", 1)[-1].rstrip(") "))
            found.setdefault((kind, verb), Counter())[owner] += 1
    return found


def main() -> None:
    """Time, sample, and print the table."""
    if shutil.which("perf") is None:
        sys.exit("hooks_shares.py: `perf` was not found: apt-get install linux-perf")
    torch.set_num_threads(1)
    made: Made = {kind: build(*where) for kind, where in KINDS.items()}
    rounds = [{k: taken(*pair, steps=False) for k, pair in made.items()} for _ in range(ROUNDS + 2)]
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "samples")
        counts = shares(samples, watched(made, samples))
    title = f"us per unit and pass above plain, {UNITS} units, Python {sys.version.split()[0]}"
    table = Table(title=title)
    for column in ("", "pass", "in all", *OWNERS, "kernel", "samples"):
        table.add_column(column, justify="right")
    for kind in list(made)[1:]:
        for verb in VERBS:
            split = Counter[str]()
            for one, sign in ((kind, 1), ("plain", -1)):
                own, spent = counts[one, verb], median(r[one][verb][0] for r in rounds[2:])
                for owner, count in own.items():
                    split[owner] += sign * spent * count / own.total()  # type: ignore[assignment]
            each = [f"{split[owner]:.1f}" for owner in (*OWNERS, "kernel")]
            total = counts[kind, verb].total()
            table.add_row(kind, verb, f"{sum(split.values()):.1f}", *each, str(total))
    Console(width=120).print(table)
    for _, optimizer in made.values():
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.engine.close()


if __name__ == "__main__":
    main()
