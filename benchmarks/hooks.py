"""What a unit costs in Python, per pass: resident ones and streamed ones, less a model without.

    PYTHONPATH=. python benchmarks/hooks.py

A unit is one small linear layer, so nearly all of the time is Python, and where weights are
streamed the lanes are what bounds the pass: some of the user's thread is spent on waiting for them.
Given are microseconds of processor time per unit and pass, over rounds that take turns: of the
user's thread (median and quartiles; and `more`, the median of what it is above the model without
an engine in the same round), and of all threads of the process (the lanes take the GIL too).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import offload

UNITS, WIDTH, ROUNDS, STEPS = 64, 16, 15, 4
VERBS = ("forward", "backward")


class Chain(nn.Module):
    """Units one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(params: str | None, gradients: str = "device") -> tuple[nn.Module, Any]:
    """The model: plain, or attached with its weights in a tier."""
    model = Chain()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if params is None:
        return model, optimizer
    small = {"device_memory": "4MiB" if params == "device" else "512KiB"}
    config: Any = offload.Config(
        params=params, gradients=gradients, optimizer="cpu", cpu_memory="64MiB", **small
    )
    return offload.attach(model, optimizer, config)


def clocks() -> tuple[float, float]:
    """CPU seconds of this thread, and of the process."""
    return time.thread_time(), time.process_time()


def taken(model: nn.Module, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Microseconds per unit of a forward and of a backward, on the two clocks."""
    x = torch.zeros(1, WIDTH)
    found = dict.fromkeys(VERBS, (0.0, 0.0))
    for _ in range(STEPS):
        marks = [clocks()]
        loss = model(x).sum()
        marks.append(clocks())
        loss.backward()
        marks.append(clocks())
        optimizer.zero_grad()
        for name, start, stop in zip(found, marks, marks[1:]):
            spent = [b - a for a, b in zip(start, stop)]
            mine, all_threads = (s * 1e6 / UNITS / STEPS for s in spent)
            found[name] = found[name][0] + mine, found[name][1] + all_threads
    return found


def seen_of(rounds: list[dict[str, tuple[float, float]]], verb: str, clock: int) -> list[float]:
    """What the rounds have found of a pass on one of the clocks, in their order."""
    return [one[verb][clock] for one in rounds]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "without an engine": lambda: build(None),
        "weights, gradients: device": lambda: build("device"),
        "weights: cpu, gradients: device": lambda: build("cpu"),
        "weights, gradients: cpu": lambda: build("cpu", "cpu"),
    }
    made = {name: make() for name, make in kinds.items()}
    rounds: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in kinds}
    for number in range(ROUNDS + 2):
        for name, pair in made.items():
            one = taken(*pair)
            if number >= 2:
                rounds[name].append(one)
    title = f"us of Python per unit and pass, {UNITS} units, load {os.getloadavg()[0]:.1f}"
    table = Table(title=title, caption="user's thread: median, and quartiles; all: all threads")
    for column in ("", "forward", "more", "all", "backward", "more", "all"):
        table.add_column(column, justify="right")
    least = [seen_of(rounds["without an engine"], verb, 0) for verb in VERBS]
    for name, seen in rounds.items():
        row = []
        for verb, without in zip(VERBS, least):
            mine, both = seen_of(seen, verb, 0), seen_of(seen, verb, 1)
            low, middle, high = statistics.quantiles(mine, n=4)
            more = statistics.median(own - bare for own, bare in zip(mine, without))
            row += [f"{middle:.1f} ({low:.1f} to {high:.1f})", f"{more:.1f}"]
            row.append(f"{statistics.median(both):.1f}")
        table.add_row(name, *row)
    Console(width=120).print(table)
    for _, optimizer in made.values():
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.engine.close()


if __name__ == "__main__":
    main()
