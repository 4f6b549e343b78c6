"""The rows of the first hour, by stage, and what trains those of a stage that are not there yet.

    PYTHONPATH=. python benchmarks/gpu/rows.py 3b-first [--seconds 460] [--nvme-path DIR] [--dry]
    PYTHONPATH=. python benchmarks/gpu/rows.py 'cpu-cpu 16k$'    # those of a pattern, again

A process attaches once and trains one point after the other, the most telling first. One that
fails, or takes too long, is a line that says so; the next one runs all the same. What there is no
time for is named, and comes in the next call.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import train
from benchmarks.gpu.results import COLUMNS, compared, keep, kept, table, used_columns

CAPS = {
    "3b device-cpu-cpu": "16GiB",
    "3b cpu-cpu-cpu": "6GiB",
    "3b device-device-device": "56GiB",
    "3b nvme-nvme-nvme": "6GiB",
    "7b device-cpu-cpu": "24GiB",
    "7b cpu-cpu-cpu": "8GiB",
    "7b device-device-device": "110GiB",
    "7b auto": "24GiB",
}
"""By size and placement, `--device-memory`: most bytes that the engine takes of the device."""

RUN_SECONDS_MAX = 240
RUN_SECONDS_LEAST = 30
"""With less left, nothing new is begun."""

END_SECONDS = 15
"""Of those of a run, for its start and its end."""


@dataclass(frozen=True, slots=True)
class Run:
    """A process: one attach, and the points it trains."""

    size: str
    placement: str
    points: tuple[str, ...]
    clip: bool = False
    chunk: int | None = None
    ranks: bool = False

    @property
    def name(self) -> str:
        """Of its rows, before the point."""
        options = (
            [" clip"] * self.clip
            + [" ranks"] * self.ranks
            + [f" chunk{(self.chunk or 1).bit_length() - 1}"] * bool(self.chunk)
        )
        return f"{self.size} {self.placement}{''.join(options)}"

    @property
    def rows(self) -> dict[str, str]:
        """Its points by the names of their rows."""
        return {f"{self.name} {point}": point for point in self.points}


OTHERS = ("4k", "32k", "16kx4")
HOUR: dict[str, tuple[Run, ...]] = {
    "3b-first": (
        Run("3b", "torch-fp32", ("16k",)),
        Run("3b", "device-cpu-cpu", ("16k",)),
        Run("3b", "cpu-cpu-cpu", ("16k",)),
        Run("3b", "cpu-cpu-cpu", ("16k",), ranks=True),
        Run("3b", "torch-bf16", ("16k",)),
        Run("3b", "device-cpu-cpu", ("16k",), chunk=1 << 24),
    ),
    "7b-first": (
        Run("7b", "torch-fp32", ("16k", "32k")),
        Run("7b", "device-cpu-cpu", ("16k", "32k")),
        Run("7b", "cpu-cpu-cpu", ("16k", "32k")),
    ),
    "3b": (
        Run("3b", "device-cpu-cpu", ("16k",), clip=True),
        Run("3b", "deepspeed-2", ("16k",)),
        Run("3b", "deepspeed-3", ("16k",)),
        Run("3b", "deepspeed-2", ("16k",), clip=True),
        Run("3b", "fsdp2", ("16k",)),
        Run("3b", "fsdp2", ("16k",), clip=True),
        Run("3b", "device-cpu-cpu", ("16k",), ranks=True),
        Run("3b", "device-device-device", ("16k", *OTHERS)),
        Run("3b", "torch-fp32", OTHERS),
        Run("3b", "device-cpu-cpu", ("16k-unsaid", *OTHERS)),
        Run("3b", "cpu-cpu-cpu", ("16k-unsaid", *OTHERS)),
        Run("3b", "cpu-cpu-cpu", ("16k",), clip=True),
        Run("3b", "device-device-device", ("16k",), clip=True),
        Run("3b", "torch-bf16", ("4k", "32k")),
        Run("3b", "torch-compiled", ("16k",)),
    ),
    "7b": (
        Run("7b", "device-cpu-cpu", ("16k",), clip=True),
        Run("7b", "device-device-device", ("16k", "32k")),
        Run("7b", "auto", ("16k",)),
        Run("7b", "torch-bf16", ("16k", "32k")),
        Run("7b", "device-cpu-cpu", ("4k", "16kx4", "16k-unsaid")),
        Run("7b", "torch-fp32", ("4k", "16kx4")),
    ),
    "nvme": (Run("3b", "nvme-nvme-nvme", ("32k",)),),
}
"""By stage, in the order of their worth."""


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", help=f"{', '.join(HOUR)}, or a pattern of names of rows")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--dry", action="store_true", help="with a few bytes, for a try")
    return parser.parse_args()


def wanted(stage: str) -> list[tuple[Run, list[str]]]:
    """The runs of a stage with the points that are not there yet; of a pattern all, again."""
    there, found = kept().get("train", {}), []
    for run in HOUR.get(stage) or itertools.chain(*HOUR.values()):
        points = [
            point
            for row, point in run.rows.items()
            if (row not in there if stage in HOUR else re.search(stage, row))
        ]
        found += [(run, points)] if points else []
    return found


def arguments(run: Run, points: list[str], args: argparse.Namespace, limit: float) -> list[str]:
    """Those of `train.py`."""
    given = ["--size", "dry" if args.dry else run.size, "--placement", run.placement]
    given += ["--name", run.name, "--points", *points, "--nvme-path", args.nvme_path]
    given += ["--clip"] * run.clip + ["--ranks"] * run.ranks + ["--dry"] * args.dry
    given += ["--chunk", str(run.chunk)] if run.chunk else []
    cap = CAPS.get(f"{run.size} {run.placement}")
    given += ["--device-memory", cap] if cap else []
    return [*given, "--seconds", str(limit - END_SECONDS)]


def trained(given: list[str], limit: float) -> str:
    """Train in a process of its own; what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *given]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:.0f} s"
    if done.returncode == 0:
        return ""
    print(done.stderr, file=sys.stderr)
    last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
    return f"exit status {done.returncode}: {last[0][:200]}"


def main() -> int:
    """0 where every row is there, 1 where a run broke, 4 where there was no time for some."""
    args, begun = asked(), time.monotonic()
    broken, late, first = list[str](), list[str](), True
    for run, points in wanted(args.stage):
        if run.placement.startswith("deepspeed") and find_spec("deepspeed") is None:
            print(f"{run.name}: left out, as DeepSpeed is not installed")
            continue
        left = args.seconds - (time.monotonic() - begun)
        if left < RUN_SECONDS_LEAST:
            late.append(run.name)
            continue
        limit = min(RUN_SECONDS_MAX, left)
        given = arguments(run, points, args, limit)
        print(f"{run.name}: {', '.join(points)}", flush=True)
        wrong = ""
        if args.dry and not first:
            train.run(given)  # A process takes longer to start than this.
        else:
            wrong = trained(given, limit)
        first, there = False, kept().get("train", {})
        missing = [row for row, point in run.rows.items() if point in points and row not in there]
        if wrong and limit < RUN_SECONDS_MAX and wrong.startswith("it took"):
            late.append(run.name)
        elif wrong:
            broken.append(f"{run.name} ({wrong})")
            keep("broken", {"row": run.name, "why": wrong})
            for row in missing:
                about = {"size": run.size, "placement": run.placement, "point": run.rows[row]}
                keep("train", {"row": row, **about, "refused": wrong})
        elif missing:
            late.append(run.name)
    rows = compared(kept().get("train", {}))
    print(table(rows, used_columns(rows, COLUMNS)))
    for what, names in (("broken", broken), ("no time left, so call again, for", late)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 1 if broken else 4 if late else 0


if __name__ == "__main__":
    sys.exit(main())
