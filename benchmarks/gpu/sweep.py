"""Trains one size in every placement under its cap, each in its own process, and keeps a table.

    PYTHONPATH=. python benchmarks/gpu/sweep.py 7b [PLACEMENT ...] [--nvme-path DIR] [--seconds 570]

A placement that fails, or takes too long, is a line that says so; the next one runs all the same.
What there is no time left for is named: ask for it by name in a call of its own, whose lines are
then kept beside those that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import RESULTS, save, table
from offload.planning.machine import host_free_bytes

CAPS: dict[str, dict[str, str | None]] = {
    "1b": {
        "torch": None,
        "device-device-device": "24GiB",
        "auto": "8GiB",
        "cpu-cpu-cpu": "4GiB",
        "device-cpu-cpu": "6GiB",
        "nvme-cpu-nvme": "4GiB",
    },
    "3b": {
        "torch": None,
        "device-device-device": "56GiB",
        "auto": "16GiB",
        "cpu-cpu-cpu": "6GiB",
        "nvme-cpu-nvme": "6GiB",
    },
    "7b": {
        "torch": None,
        "auto": "24GiB",
        "cpu-cpu-cpu": "8GiB",
        "nvme-cpu-cpu": "8GiB",
        "device-device-device": "120GiB",
    },
    "dry": {"torch": None, "auto": "1GiB", "cpu-cpu-cpu": "64MiB", "nvme-cpu-nvme": "64MiB"},
}
"""By size and placement, `--device-memory`: most bytes that the engine takes of the device."""

HOST_SHARE = 0.85
"""Of the host's free memory, for the cpu tier: the machine is ours alone."""

RUN_SECONDS_MAX = 240
RUN_SECONDS_LEAST = 30
"""With less left, nothing new is begun."""

START_SECONDS = 15
"""Of those of a run, until it is asked how much time is left, and from its end to that here."""

BROKEN = ("it took more", "exit status", "no line")
"""How rows begin of runs that neither ended well nor were refused."""

COLUMNS = (
    *("size", "placement", "device_memory", "batch", "length", "steps"),
    *("step_s", "exposed_s", "of_torch"),
    *("tflops", "tokens_per_s", "h2d_exposed_s", "d2h_exposed_s", "cpu_exposed_s"),
    *("disk_exposed_s", "compute_exposed_s", "device_peak_gib", "device_tier_gib", "cpu_tier_gib"),
    *("nvme_tier_gib", "pinned_gib", "rss_gib", "attach_s", "misses", "refused"),
)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=CAPS)
    parser.add_argument("placements", nargs="*")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    return parser.parse_args()


def run(args: argparse.Namespace, placement: str, limit: float) -> dict[str, Any]:
    """One line of the table."""
    cap = CAPS[args.size].get(placement)
    row: dict[str, Any] = {"size": args.size, "placement": placement, "device_memory": cap}
    command = [sys.executable, str(Path(__file__).with_name("train.py"))]
    command += ["--size", args.size, "--placement", placement, "--nvme-path", args.nvme_path]
    command += ["--batch", str(args.batch), "--length", str(args.length)]
    command += ["--cpu-memory", str(int(host_free_bytes() * HOST_SHARE))]
    command += ["--device-memory", cap] if cap else []
    command += ["--seconds", str(limit - START_SECONDS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**row, "refused": f"it took more than {limit:.0f} s"}
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        return {**row, "refused": f"exit status {done.returncode}: {last[0][:200]}"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {**row, "refused": f"no line at the end of {done.stdout[-200:]!r}"}
    return found


def kept(size: str) -> dict[str, dict[str, Any]]:
    """Lines of an earlier call, by placement."""
    path = RESULTS / f"gpu-train-{size}.json"
    if not path.exists():
        return {}
    return {row["placement"]: row for row in json.loads(path.read_text("utf-8"))["rows"]}


def main() -> int:
    """1 where a run neither ended nor was refused."""
    args = asked()
    begun, rows, broken = time.monotonic(), kept(args.size), list[str]()
    for placement in args.placements or CAPS[args.size]:
        left = args.seconds - (time.monotonic() - begun)
        if left < RUN_SECONDS_LEAST:
            print(f"no time left for {placement}: ask for it by name")
            continue
        print(f"{args.size} {placement}", flush=True)
        rows[placement] = run(args, placement, min(RUN_SECONDS_MAX, left))
        if rows[placement].get("refused", "").startswith(BROKEN):
            broken.append(placement)
        base = rows.get("torch", {}).get("step_s")
        for row in rows.values():
            if base and row.get("step_s"):
                row["of_torch"] = row["step_s"] / base
        save(f"train-{args.size}", list(rows.values()))  # Now: the next one may end it all.
    print(table(list(rows.values()), COLUMNS))
    if broken:
        print(f"broken: {', '.join(broken)}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
