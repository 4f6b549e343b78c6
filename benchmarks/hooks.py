"""What a unit costs in Python, per pass: resident ones and streamed ones, less a model without.

    PYTHONPATH=. python benchmarks/hooks.py

A unit is one linear layer of 1 KiB, so nearly all of the time is Python, or of 66 KiB: what that
takes more, above the plain model of its width, is copies (weights in, gradients to their place and
home), which whoever makes them ready does where they are as small. "Fused" are 16 neighbours to a
unit, so that the rest of a layer's time is that of its own hooks. Given are microseconds per layer
and pass, medians over rounds that take turns: of the user's thread, what of that is above the plain
model in the same round, and of all threads of the process. The second table is of a loop that
steps: what the first forward after a step costs where the update is waited for. Of the third the
layers are as many and have as many parameters as the blocks of a model of seven billion.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import offload
from offload.planning import profile

UNITS, WIDTH, WIDE, ROUNDS, STEPS = 64, 16, 128, 15, 4
VERBS = ("forward", "backward", "step")
BLOCKS, PARTS = 37, 9
"""Units of a model of seven billion parameters, and what is trained of each."""


class Chain(nn.Module):
    """Units one after the other."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.width = width

    def forward(self) -> torch.Tensor:
        x = torch.zeros(1, self.width, device=next(self.parameters()).device)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Block(nn.Module):
    """As many products of small matrices as a block of a language model has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def build(
    params: str | None,
    gradients: str = "device",
    states: str = "cpu",
    width: int = WIDTH,
    micro_batches: int | None = None,
    *,
    fused: bool = False,
    blocks: bool = False,
) -> tuple[Chain, Any]:
    """The model: plain, or attached with its weights in a tier."""
    model = Chain(width, 0 if blocks else UNITS)
    if blocks:
        model.layers.extend(Block() for _ in range(BLOCKS))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if params is None:
        return model, optimizer
    streamed = "8MiB" if fused or blocks else "576KiB" if width == WIDTH else "1MiB"
    small = {"device_memory": "4MiB" if params == "device" else streamed}
    config: Any = offload.Config(
        params=params,
        gradients=gradients,
        optimizer=states,
        cpu_memory="64MiB",
        micro_batches=micro_batches,
        **small,
    )
    with mock.patch.object(profile, "FUSED_BYTES_MAX", profile.FUSED_BYTES_MAX * fused):
        return offload.attach(model, optimizer, config)


def clocks() -> tuple[float, float]:
    """CPU seconds of this thread, and of the process."""
    return time.thread_time(), time.process_time()


Taken = dict[str, tuple[float, float]]


def taken(model: Chain, optimizer: Any, *, steps: bool) -> Taken:
    """Microseconds per unit of a forward, a backward and a step, on the two clocks."""
    found = dict.fromkeys(VERBS[: 2 + steps], (0.0, 0.0))
    for _ in range(STEPS):
        marks = [clocks()]
        loss = model()
        marks.append(clocks())
        loss.backward()
        marks.append(clocks())
        if steps:
            optimizer.step()
            marks.append(clocks())
        optimizer.zero_grad()
        for name, start, stop in zip(found, marks, marks[1:]):
            spent = [b - a for a, b in zip(start, stop)]
            mine, all_threads = (s * 1e6 / len(model.layers) / STEPS for s in spent)
            found[name] = found[name][0] + mine, found[name][1] + all_threads
    if not isinstance(optimizer, torch.optim.AdamW):
        optimizer.engine.settle()  # What its lanes have left is not the next one's.
    return found


def empty_hooks() -> tuple[Chain, Any]:
    """The plain model with as many hooks as a streamed unit has, that do nothing: before and after
    its forward, on its output's gradient, and on that of each parameter."""
    model, optimizer = build(None)

    def nothing(*_: object) -> None:
        pass

    def after(module: object, given: object, output: torch.Tensor) -> None:
        output.register_hook(nothing)

    for layer in model.layers:
        layer.register_forward_pre_hook(nothing)
        layer.register_forward_hook(after)
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(nothing)
    return model, optimizer


KINDS: dict[str, Callable[[], tuple[Chain, Any]]] = {
    "without an engine": lambda: build(None),
    "empty hooks": empty_hooks,
    "all on the device": lambda: build("device", "device", "device"),
    "weights and gradients on the device": lambda: build("device"),
    "weights on cpu, gradients on the device": lambda: build("cpu"),
    "weights and gradients on cpu": lambda: build("cpu", "cpu"),
    "the same, fused": lambda: build("cpu", "cpu", fused=True),
    "wide, without an engine": lambda: build(None, width=WIDE),
    "wide, weights and gradients on cpu": lambda: build("cpu", "cpu", width=WIDE),
    "wide, the same, fused": lambda: build("cpu", "cpu", width=WIDE, fused=True),
}

Rounds = dict[str, list[Taken]]
"""By kind."""


LARGE: dict[str, Callable[[], tuple[Chain, Any]]] = {
    "without an engine": lambda: build(None, blocks=True),
    "all in CPU memory": lambda: build("cpu", "cpu", micro_batches=1, blocks=True),
}


def measure(
    kinds: dict[str, Callable[[], tuple[Chain, Any]]], rounds: int = ROUNDS, *, steps: bool = False
) -> Rounds:
    """Some kinds of model by turns, after two rounds that do not count, on one thread of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = {name: make() for name, make in kinds.items()}
    found: Rounds = {name: [] for name in kinds}
    for number in range(rounds + 2):
        for name, pair in made.items():
            one = taken(*pair, steps=steps)
            if number >= 2:
                found[name].append(one)
    for _, optimizer in made.values():
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.engine.close()
    torch.set_num_threads(threads)
    return found


def above(rounds: Rounds, name: str, verb: str, plain: str = "without an engine") -> list[float]:
    """By round, what a kind's own thread takes above the plain model."""
    return [one[verb][0] - bare[verb][0] for one, bare in zip(rounds[name], rounds[plain])]


def show(rounds: Rounds) -> None:
    """Print the table of some kinds of model."""
    verbs = list(next(iter(rounds.values()))[0])
    what = "pass and step" if len(verbs) > 2 else "pass"
    table = Table(title=f"us per layer and {what}, load {os.getloadavg()[0]:.1f}")
    table.add_column("", justify="right")
    for verb in verbs:
        for column in (verb, "above plain", "all threads"):
            table.add_column(column, justify="right")
    for name, seen in rounds.items():
        plain = "wide, without an engine" if name.startswith("wide") else "without an engine"
        row = []
        for verb in verbs:
            row += [[one[verb][0] for one in seen], above(rounds, name, verb, plain)]
            row.append([one[verb][1] for one in seen])
        table.add_row(name, *(f"{statistics.median(values):.1f}" for values in row))
    Console(width=120).print(table)


def main() -> None:
    """Print the tables."""
    show(measure(KINDS))
    kinds = {name: KINDS[name] for name in ("without an engine", "all on the device")}
    kinds["weights and gradients on the device"] = lambda: build("device")
    # With micro-batches declared units are announced; of two, none is updated inside backward.
    kinds["the same, announced"] = lambda: build("device", micro_batches=2)
    show(measure(kinds, steps=True))
    show(measure(LARGE, steps=True))


if __name__ == "__main__":
    main()
