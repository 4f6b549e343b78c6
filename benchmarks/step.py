"""The training step of a GPT of 202 M parameters in five placements: seconds, ratios to torch.

    PYTHONPATH=. python benchmarks/step.py DIRECTORY [--rounds 5] [--placements cpu nvme ...]

Width 1024, 12 layers, vocabulary 24576, batch 2 x 256, bfloat16, AdamW: the model by which peers
are measured. Each placement takes two steps unseen, then `--rounds` steps that are timed with the
wait for their updates. "plain" is torch's own fused AdamW without an engine. To compare two
versions run both in turns. Files are made in DIRECTORY and none is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import offload

WIDTH, DEPTH, HEADS, WORDS, LENGTH, BATCH = 1024, 12, 16, 24576, 256, 2

PLACEMENTS: dict[str, tuple[str, str, str] | None] = {
    "plain": None,
    "device": ("device", "device", "device"),
    "states": ("device", "device", "cpu"),
    "cpu": ("cpu", "cpu", "cpu"),
    "states-nvme": ("cpu", "cpu", "nvme"),
    "nvme": ("nvme", "nvme", "nvme"),
}
"""Tiers of parameters, gradients and optimizer states."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A decoder with an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step_seconds(
    placement: tuple[str, str, str] | None, directory: str, rounds: int
) -> list[float]:
    """Seconds of each step that counts, with the updates that it began."""
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = GPT().to(torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=placement is None or None)
    if placement is None:
        model.to(device)
    else:
        tiers: Any = dict(zip(("params", "gradients", "optimizer"), placement))
        asked = offload.Config(**tiers, nvme_path=directory if "nvme" in placement else ())
        _, optimizer = offload.attach(model, optimizer, asked)
    found = []
    for _ in range(rounds + 2):
        tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), device=device)
        start = time.perf_counter()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if placement is not None:
            optimizer.engine.settle()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - start)
    if placement is not None:
        optimizer.engine.close()
    return found[2:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    asked = parser.parse_args()
    table = Table(
        title=f"a step of 202 M parameters, {asked.rounds} rounds, torch {torch.__version__}"
    )
    for column in ("placement", "median s", "least s", "most s", "of plain"):
        table.add_column(column, justify="right")
    plain = None
    for name in asked.placements:
        found = step_seconds(PLACEMENTS[name], asked.directory, asked.rounds)
        median = statistics.median(found)
        plain = median if name == "plain" else plain
        ratio = "" if plain is None else f"{median / plain:.2f}"
        table.add_row(name, f"{median:.2f}", f"{min(found):.2f}", f"{max(found):.2f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
