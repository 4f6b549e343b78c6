"""aio against fio: block sizes 1, 4, 16 MiB x depths 1, 8, 32 x read and write, ratios only.

    PYTHONPATH=. python benchmarks/nvme.py DIRECTORY [--backend io_uring] [--rounds 5] [--json FILE]

Same engine, block and depth, in turns round after round, on the same unnamed file. Drives whose
speed jumps leave only ratios to trust: geometric means with 95% intervals, by cell and over all.
Then the setting that the sweep chose in a first round, against the best that fio showed in it, in
the rounds after it. Nothing is left on disk. A run of 5 rounds takes about three minutes; other
work on the drive or the processors falls on both, but widens the intervals.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aio.backends import compared
from aio.figures import Mode
from aio.fio import ENGINES, Compared, compare, run_fio
from aio.load import Load
from aio.ratio import Ratio
from aio.sweep import Setting, sweep

MIB = 1 << 20
BLOCKS_BYTES = (1 * MIB, 4 * MIB, 16 * MIB)
DEPTHS = (1, 8, 32)
MODES: tuple[Mode, ...] = ("read", "write")
LOOK_INTO = 0.85
"""Cells below this ratio are marked."""
SWEEP_SECONDS = 10.0


def grid(backend: str) -> list[Setting]:
    return [Setting(backend, block, depth) for block in BLOCKS_BYTES for depth in DEPTHS]


def shown(ratio: Ratio) -> str:
    mark = " <" if ratio.mean < LOOK_INTO else ""
    return f"{ratio.mean:.3f} ({ratio.low:.2f}-{ratio.high:.2f}){mark}"


def table(title: str, found: list[Compared]) -> Table:
    columns = ("", "ours", "fio's", "ours GB/s", "fio GB/s", "ratio", "CPU s/GB", "fio's")
    made = Table(*columns, title=title, title_justify="left")
    for one in found:
        made.add_row(
            one.mode,
            f"{one.setting.block_bytes / MIB:g} MiB x {one.setting.depth}",
            f"{one.fio_setting.block_bytes / MIB:g} MiB x {one.fio_setting.depth}",
            f"{sorted(one.ours_bytes_per_s)[len(one.ratios) // 2] / 1e9:.2f}",
            f"{sorted(one.fio_bytes_per_s)[len(one.ratios) // 2] / 1e9:.2f}",
            shown(one.ratio),
            f"{one.ours_cpu_s_per_gb:.3f}",
            f"{one.fio_cpu_s_per_gb:.3f}",
        )
    return made


def chosen(load: Load, backend: str, seconds: float) -> list[tuple[Mode, Setting, Setting]]:
    """By mode the setting that our sweep chooses, and the best that fio shows, in one round."""
    cells: list[tuple[Mode, Setting, Setting]] = []
    for mode in MODES:
        fio = max(grid(backend), key=lambda s: run_fio(load, mode, s, seconds).bytes_per_s)
        best = sweep(
            grid(backend),
            lambda setting, time: load.run(mode, setting, time).bytes_per_s,  # noqa: B023
            SWEEP_SECONDS,
            choice=random.Random(0),
        ).best
        cells.append((mode, best, fio))
    return cells


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--backend", default=compared()[0][0], choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each turn")
    parser.add_argument("--size", type=int, default=4096, help="MiB of the file")
    parser.add_argument("--choice", action="store_true", help="only what the sweep chose")
    parser.add_argument("--json", type=Path, help="a file for every figure")
    return parser.parse_args()


def main() -> None:
    asked, console = arguments(), Console()
    settings = grid(asked.backend)
    same: list[tuple[Mode, Setting, Setting]] = [(m, s, s) for m in MODES for s in settings]
    with (
        Load(
            asked.directory,
            asked.size * MIB,
            asked.backend,
            block_bytes_max=max(BLOCKS_BYTES),
            under_way_bytes_max=max(s.under_way_bytes for s in settings),
            written_bytes_max=1 << 50,
        ) as load,
        Progress(console=console, transient=True) as bar,
    ):
        task = bar.add_task("writing the file", total=1.0)
        for _ in load.fill():
            pass

        def told(share: float, what: str) -> None:
            bar.update(task, completed=share, description=what)

        cells = [] if asked.choice else list(compare(load, same, asked.rounds, asked.seconds, told))
        told(0.0, "the sweep, and fio's best")
        picked = chosen(load, asked.backend, asked.seconds)
        best = list(compare(load, picked, asked.rounds, asked.seconds, told))
        direct = load.file.direct
    if cells:
        show(console, f"{asked.backend} beside fio's {ENGINES[asked.backend]}", cells)
    console.print(table("what the sweep chose, against fio's best", best))
    console.print(f"O_DIRECT {direct}", highlight=False)
    if asked.json:
        found = {"cells": [asdict(c) for c in cells], "best": [asdict(c) for c in best]}
        asked.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def show(console: Console, title: str, cells: list[Compared]) -> None:
    """All cells, and what they come to together."""
    console.print(table(title, cells))
    pooled = {m: Ratio.of([r for c in cells if c.mode == m for r in c.ratios]) for m in MODES}
    pooled_all = Ratio.of([ratio for cell in cells for ratio in cell.ratios])
    told_all = ", ".join(f"{mode} {shown(ratio)}" for mode, ratio in pooled.items())
    console.print(f"all cells {shown(pooled_all)}; {told_all}", highlight=False)
    cpu = Ratio.of([c.ours_cpu_s_per_gb / c.fio_cpu_s_per_gb for c in cells])
    console.print(f"CPU seconds per GB in multiples of fio's: {shown(cpu)}", highlight=False)


if __name__ == "__main__":
    main()
