"""What a unit costs in Python, per pass: resident ones and streamed ones, less a model without.

    PYTHONPATH=. python benchmarks/hooks.py

A unit is one small linear layer, or a wider one, so nearly all of the time is Python. Given are
microseconds per unit and pass, medians over rounds that take turns: of the user's thread, and of
all threads of the process (the lanes take the GIL too).
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

UNITS, WIDTH, WIDE, ROUNDS, STEPS = 64, 16, 128, 15, 4


class Chain(nn.Module):
    """Units one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(
    params: str | None, gradients: str = "device", states: str = "cpu", width: int = WIDTH
) -> tuple[Chain, Any]:
    """The model: plain, or attached with its weights in a tier."""
    model = Chain(width)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if params is None:
        return model, optimizer
    streamed = "512KiB" if width == WIDTH else "1MiB"
    small = {"device_memory": "4MiB" if params == "device" else streamed}
    config: Any = offload.Config(
        params=params, gradients=gradients, optimizer=states, cpu_memory="64MiB", **small
    )
    return offload.attach(model, optimizer, config)


def clocks() -> tuple[float, float]:
    """CPU seconds of this thread, and of the process."""
    return time.thread_time(), time.process_time()


def taken(model: Chain, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Microseconds per unit of a forward and of a backward, on the two clocks."""
    x = torch.zeros(1, model.width)
    found = {"forward": (0.0, 0.0), "backward": (0.0, 0.0)}
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


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], tuple[Chain, Any]]] = {
        "without an engine": lambda: build(None),
        "all on the device": lambda: build("device", "device", "device"),
        "weights and gradients on the device": lambda: build("device"),
        "weights on cpu, gradients on the device": lambda: build("cpu"),
        "weights and gradients on cpu": lambda: build("cpu", "cpu"),
        "wide, without an engine": lambda: build(None, width=WIDE),
        "wide, weights and gradients on cpu": lambda: build("cpu", "cpu", width=WIDE),
    }
    made = {name: make() for name, make in kinds.items()}
    rounds: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in kinds}
    for number in range(ROUNDS + 2):
        for name, pair in made.items():
            one = taken(*pair)
            if number >= 2:
                rounds[name].append(one)
    title = f"us per unit and pass, {UNITS} units, load {os.getloadavg()[0]:.1f}"
    table = Table(title=title)
    for column in ("", "forward", "all threads", "backward", "all threads"):
        table.add_column(column, justify="right")
    for name, seen in rounds.items():
        row = [
            statistics.median(one[verb][clock] for one in seen)
            for verb in ("forward", "backward")
            for clock in (0, 1)
        ]
        table.add_row(name, *(f"{value:.1f}" for value in row))
    Console().print(table)
    for _, optimizer in made.values():
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.engine.close()


if __name__ == "__main__":
    main()
