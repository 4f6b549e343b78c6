"""Exposed time of a step on a paced device, and what the simulator predicted: a table.

    PYTHONPATH=. python benchmarks/overlap.py

Compute is a sleep, copies, updates and I/O are real and slowed to the speeds of `SLOW`, so the
figures say how well the engine hides work, not how fast the machine is. Exposed is what a step
takes beyond the compute asked for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.test_overlap import LARGE, NVME, SLOW, UNITS, lane_seconds, measured, predicted

RATIOS = (0.5, 1.0, 1.15, 1.3, 1.5, 2.0)


def main() -> None:
    torch.set_num_threads(1)
    table = Table(
        title=f"{UNITS} units on nvme, disk at {SLOW.disk_read_bytes_per_s / 1e6:.0f} MB/s"
    )
    for column in ("compute / disk", "step s", "exposed", "predicted step s", "exposed"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as directory:
        case = NVME, Path(directory), LARGE
        disk = lane_seconds(case)
        for ratio in RATIOS:
            seconds = ratio * disk / (3 * UNITS)
            step, exposed = measured(case, seconds)
            timeline = predicted(case, seconds)
            table.add_row(
                f"{ratio:.2f}",
                f"{step:.3f}",
                f"{exposed / step:.1%}",
                f"{timeline.step_seconds:.3f}",
                f"{timeline.exposed / timeline.step_seconds:.1%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
