"""aio against fio: block sizes 1, 4, 16 MiB x depths 1, 8, 32 x read and write, ratios only.

    PYTHONPATH=. python benchmarks/nvme.py DIRECTORY [--rounds 5] [--only cells] [--record FILE]

Same engine, block and depth, in turns round after round, on the same unnamed file. Drives whose
speed jumps leave only ratios to trust: geometric means with 95% intervals, by cell and over all.
Then the setting that the sweep chose in a first round, against the best that fio showed in it, in
the rounds after it. Nothing is left on disk. A run of 5 rounds takes about three minutes; other
work on the drive or the processors falls on both, but widens the intervals.

Drives slow down for minutes after much writing, so many rounds are best taken in several short
runs: with `--record` a run adds its figures to those in the file, and shows all of them together.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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


def chosen(
    load: Load, backend: str, seconds: float, seed: int
) -> list[tuple[Mode, Setting, Setting]]:
    """By mode the setting that our sweep chooses, and the best that fio shows, in one round."""
    cells: list[tuple[Mode, Setting, Setting]] = []
    for mode in MODES:
        fio = max(grid(backend), key=lambda s: run_fio(load, mode, s, seconds).bytes_per_s)
        best = sweep(
            grid(backend),
            lambda setting, time: load.run(mode, setting, time).bytes_per_s,  # noqa: B023
            SWEEP_SECONDS,
            choice=random.Random(seed),
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
    parser.add_argument("--only", choices=("cells", "choice"), help="not the other half")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep's order")
    parser.add_argument("--record", type=Path, help="a file of figures, to be added to")
    return parser.parse_args()


def main() -> None:
    asked, console = arguments(), Console()
    settings = grid(asked.backend)
    cells, best = ([], []) if asked.record is None else recorded(asked.record)
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

        if asked.only != "choice":
            same = [(mode, s, s) for mode in MODES for s in settings]
            cells += compare(load, same, asked.rounds, asked.seconds, told)
        if asked.only != "cells":
            told(0.0, "the sweep, and fio's best")
            picked = chosen(load, asked.backend, asked.seconds, asked.seed)
            best += compare(load, picked, asked.rounds, asked.seconds, told)
        direct = load.file.direct
    if cells:
        show(console, f"{asked.backend} beside fio's {ENGINES[asked.backend]}", pooled(cells))
    if best:
        show_chosen(console, best)
    console.print(f"O_DIRECT {direct}", highlight=False)
    if asked.record is not None:
        found = {"cells": [asdict(c) for c in cells], "best": [asdict(c) for c in best]}
        asked.record.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def recorded(path: Path) -> tuple[list[Compared], list[Compared]]:
    """The cells and choices of earlier runs."""

    def read(one: dict[str, Any]) -> Compared:
        settings = {key: Setting(**one[key]) for key in ("setting", "fio_setting")}
        rates = {key: tuple(one[key]) for key in ("ours_bytes_per_s", "fio_bytes_per_s")}
        return Compared(**(one | settings | rates))

    if not path.exists():
        return [], []
    found = json.loads(path.read_text("utf-8"))
    return [read(one) for one in found["cells"]], [read(one) for one in found["best"]]


def pooled(runs: list[Compared]) -> list[Compared]:
    """The same cells of several runs as one."""
    cells: dict[tuple[Mode, Setting, Setting], Compared] = {}
    for run in runs:
        key = run.mode, run.setting, run.fio_setting
        cells[key] = joined(cells[key], run) if key in cells else run
    return list(cells.values())


def joined(one: Compared, other: Compared) -> Compared:
    """All rounds of both; processor seconds as the mean of the rounds."""
    counts = len(one.ratios), len(other.ratios)

    def mean(a: float, b: float) -> float:
        return (a * counts[0] + b * counts[1]) / sum(counts)

    return replace(
        one,
        ours_bytes_per_s=one.ours_bytes_per_s + other.ours_bytes_per_s,
        fio_bytes_per_s=one.fio_bytes_per_s + other.fio_bytes_per_s,
        ours_cpu_s_per_gb=mean(one.ours_cpu_s_per_gb, other.ours_cpu_s_per_gb),
        fio_cpu_s_per_gb=mean(one.fio_cpu_s_per_gb, other.fio_cpu_s_per_gb),
    )


def show(console: Console, title: str, cells: list[Compared]) -> None:
    """All cells, and what they come to together."""
    console.print(table(title, cells))
    by_mode = {m: Ratio.of([r for c in cells if c.mode == m for r in c.ratios]) for m in MODES}
    in_all = Ratio.of([ratio for cell in cells for ratio in cell.ratios])
    told = ", ".join(f"{mode} {shown(ratio)}" for mode, ratio in by_mode.items())
    console.print(f"all cells {shown(in_all)}; {told}", highlight=False)
    cpu = Ratio.of([c.ours_cpu_s_per_gb / c.fio_cpu_s_per_gb for c in cells])
    console.print(f"CPU seconds per GB in multiples of fio's: {shown(cpu)}", highlight=False)


def show_chosen(console: Console, best: list[Compared]) -> None:
    """Every choice, and what they come to: by round, and where there are several by choice."""
    console.print(table("what the sweep chose, against fio's best", best))
    for mode in MODES:
        choices = [one for one in best if one.mode == mode]
        rounds = Ratio.of([ratio for one in choices for ratio in one.ratios])
        means = Ratio.of([one.ratio.mean for one in choices])
        console.print(
            f"{mode}: all rounds {shown(rounds)}; {len(choices)} choices {shown(means)}",
            highlight=False,
        )


if __name__ == "__main__":
    main()
