"""What a unit costs in Python, per pass: resident ones and streamed ones, less a model without.

    PYTHONPATH=. python benchmarks/hooks.py

A unit is one linear layer of 1 KiB, so nearly all of the time is Python, or of 66 KiB: what that
takes more, above the plain model of its width, is copies (weights in, gradients to their place and
home), which whoever makes them ready does where they are as small. Given are microseconds per unit
and pass, medians over rounds that take turns: of the user's thread, what of that is above the plain
model in the same round, and of all threads of the process. The second table is of a loop that
steps: what the first forward after a step costs where the update is waited for.
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
VERBS = ("forward", "backward", "step")


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
    params: str | None,
    gradients: str = "device",
    states: str = "cpu",
    width: int = WIDTH,
    micro_batches: int | None = None,
) -> tuple[Chain, Any]:
    """The model: plain, or attached with its weights in a tier."""
    model = Chain(width)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if params is None:
        return model, optimizer
    streamed = "576KiB" if width == WIDTH else "1MiB"
    small = {"device_memory": "4MiB" if params == "device" else streamed}
    config: Any = offload.Config(
        params=params,
        gradients=gradients,
        optimizer=states,
        cpu_memory="64MiB",
        micro_batches=micro_batches,
        **small,
    )
    return offload.attach(model, optimizer, config)


def clocks() -> tuple[float, float]:
    """CPU seconds of this thread, and of the process."""
    return time.thread_time(), time.process_time()


Taken = dict[str, tuple[float, float]]


def taken(model: Chain, optimizer: Any, *, steps: bool) -> Taken:
    """Microseconds per unit of a forward, a backward and a step, on the two clocks."""
    x = torch.zeros(1, model.width)
    found = dict.fromkeys(VERBS[: 2 + steps], (0.0, 0.0))
    for _ in range(STEPS):
        marks = [clocks()]
        loss = model(x).sum()
        marks.append(clocks())
        loss.backward()
        marks.append(clocks())
        if steps:
            optimizer.step()
            marks.append(clocks())
        optimizer.zero_grad()
        for name, start, stop in zip(found, marks, marks[1:]):
            spent = [b - a for a, b in zip(start, stop)]
            mine, all_threads = (s * 1e6 / UNITS / STEPS for s in spent)
            found[name] = found[name][0] + mine, found[name][1] + all_threads
    if not isinstance(optimizer, torch.optim.AdamW):
        optimizer.engine.settle()  # What its lanes have left is not the next one's.
    return found


def show(kinds: dict[str, Callable[[], tuple[Chain, Any]]], *, steps: bool) -> None:
    """Print the table of some kinds of model."""
    made = {name: make() for name, make in kinds.items()}
    rounds: dict[str, list[Taken]] = {name: [] for name in kinds}
    for number in range(ROUNDS + 2):
        for name, pair in made.items():
            one = taken(*pair, steps=steps)
            if number >= 2:
                rounds[name].append(one)
    what = "pass and step" if steps else "pass"
    table = Table(title=f"us per unit and {what}, {UNITS} units, load {os.getloadavg()[0]:.1f}")
    table.add_column("", justify="right")
    verbs = VERBS[: 2 + steps]
    for verb in verbs:
        for column in (verb, "above plain", "all threads"):
            table.add_column(column, justify="right")
    for name, seen in rounds.items():
        plain = rounds[
            next(other for other in kinds if made[other][0].width == made[name][0].width)
        ]
        row = []
        for verb in verbs:
            mine = [one[verb][0] for one in seen]
            above = [value - one[verb][0] for value, one in zip(mine, plain)]
            row += [mine, above, [one[verb][1] for one in seen]]
        table.add_row(name, *(f"{statistics.median(values):.1f}" for values in row))
    Console(width=120).print(table)
    for _, optimizer in made.values():
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.engine.close()


def main() -> None:
    """Print the tables."""
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
    show(kinds, steps=False)
    kinds = {name: kinds[name] for name in list(kinds)[:3]}
    # With micro-batches declared units are announced; of two, none is updated inside backward.
    kinds["the same, announced"] = lambda: build("device", micro_batches=2)
    show(kinds, steps=True)


if __name__ == "__main__":
    main()
