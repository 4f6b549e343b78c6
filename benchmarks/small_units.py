"""A chain of small blocks, in CPU memory and on nvme, beside plain torch, by the size of its units.

    PYTHONPATH=. python benchmarks/small_units.py DIRECTORY [--rows 256 2048] [--fused 0 2048 ...]

A block is a linear layer of 66 KiB in float32. Neighbours are fused to units of at most `--fused`
KiB: 0 is none, no number what the engine itself chooses. Given are, of a step with its update,
medians over rounds that take turns: milliseconds; the ratio to plain torch's fused AdamW in the
same round, with quartiles; and the same ratio in CPU time of the user's thread, which other
programs disturb less, but waits do not count in. Files are made in DIRECTORY and none is left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import offload
from offload.planning import profile

WIDTH = 128
Made = tuple[nn.Module, Any]


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def build(blocks: int, tier: Any, fused: int | None, directory: str) -> Made:
    """The model: plain where no tier is given, else attached with all of it in the tier."""
    model = Chain(blocks)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=tier is None or None)
    if tier is None:
        return model, optimizer
    path = directory if tier == "nvme" else ()
    config = offload.Config(params=tier, gradients=tier, optimizer=tier, nvme_path=path)
    if fused is None:
        return offload.attach(model, optimizer, config)
    with mock.patch.multiple(profile, FUSED_BYTES_MAX=fused << 10, FUSED_PARTS_MIN=1):
        return offload.attach(model, optimizer, config)


def step_seconds(model: nn.Module, optimizer: Any, rows: int) -> tuple[float, float]:
    """Seconds of a step with its update, by the clock and of this thread."""
    x = torch.ones(rows, WIDTH)
    start, spent = time.perf_counter(), time.thread_time()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if not isinstance(optimizer, torch.optim.AdamW):
        optimizer.engine.settle()
    return time.perf_counter() - start, time.thread_time() - spent


def show(made: dict[tuple[Any, int | None], Made], rows: int, rounds: int) -> None:
    """Print the table for a number of rows in a batch."""
    found: dict[tuple[Any, int | None], list[tuple[float, float]]] = {key: [] for key in made}
    for number in range(rounds + 2):
        for key, pair in made.items():
            seconds = step_seconds(*pair, rows)
            if number >= 2:
                found[key].append(seconds)
    table = Table(title=f"{rows} rows, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for column in ("all on", "KiB", "units", "ms", "of plain", "quartiles", "CPU time"):
        table.add_column(column, justify="right")
    plain = found[None, None]
    for (tier, fused), seconds in found.items():
        optimizer = made[tier, fused][1]
        wall, thread = (
            statistics.quantiles([mine[at] / its[at] for mine, its in zip(seconds, plain)])
            for at in (0, 1)
        )
        table.add_row(
            tier or "plain torch",
            "" if tier is None else "chosen" if fused is None else str(fused),
            "" if tier is None else str(len(optimizer.engine.units)),
            f"{statistics.median(mine for mine, _ in seconds) * 1e3:.2f}",
            f"{wall[1]:.3f}",
            f"{wall[0]:.3f} to {wall[2]:.3f}",
            f"{thread[1]:.3f}",
        )
    Console().print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiers", nargs="+", default=["cpu", "nvme"])
    parser.add_argument("--fused", type=int, nargs="+", default=[0])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made = {(None, None): build(asked.blocks, None, None, asked.directory)}
    for tier in asked.tiers:
        for fused in (*asked.fused, None):
            made[tier, fused] = build(asked.blocks, tier, fused, asked.directory)
    for rows in asked.rows:
        show(made, rows, asked.rounds)
    for _, optimizer in made.values():
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.engine.close()


if __name__ == "__main__":
    main()
