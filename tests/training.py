"""Small models and training loops that the runtime tests run in every placement."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

VOCABULARY = 50
TIERS = ("device", "cpu", "nvme")
ALL_PLACEMENTS = tuple(itertools.product(TIERS, repeat=3))
"""(params, gradients, optimizer), all 27."""

RESIDENT = ("device", "device", "device")


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, head; tied, frozen or checkpointed on demand."""

    def __init__(
        self,
        *,
        width: int = 32,
        layers: int = 5,
        tied: bool = False,
        checkpointed: bool = False,
        reentrant: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointed, self.reentrant = checkpointed, reentrant
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
            x = self.drop(x)
        return self.head(self.norm(x))


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 16), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).float()
    return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.roll(1, 1).view(-1))


@dataclass
class Run:
    """A training run under way, and what it leaves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    losses: list[float] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)

    @property
    def engine(self) -> offload.Engine:
        return self.optimizer.engine  # type: ignore[attr-defined]

    def loss(self) -> torch.Tensor:
        loss = loss_of(self.model, batch(self.generator))
        self.losses.append(loss.item())
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Feature = Callable[[Run, int], None]
"""One training step in some loop: the run and the number of the step."""


def plain(run: Run, number: int) -> None:
    run.loss().backward()
    run.step()


@contextmanager
def attached(
    placement: tuple[str, str, str],
    directory: Any,
    *,
    build: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **config: Any,
) -> Iterator[Run]:
    """A fresh model and optimizer, seeded, attached with everything forced to its tier."""
    torch.manual_seed(1)
    model = build().to(dtype)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer(model)
    params, gradients, states = placement
    budgets = {"device_memory": "64MiB", "cpu_memory": "64MiB", "nvme_space": "256MiB"}
    asked = offload.Config(
        params=params,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        optimizer=states,  # type: ignore[arg-type]
        nvme_path=(str(directory),),
        **{**budgets, **config},
    )
    _, attached_optimizer = offload.attach(model, made, asked)
    run = Run(model, attached_optimizer, torch.Generator().manual_seed(7))
    try:
        yield run
    finally:
        run.engine.close()


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]]
    extra: list[Any]


def train(
    placement: tuple[str, str, str],
    directory: Any,
    feature: Feature = plain,
    *,
    steps: int = 3,
    **options: Any,
) -> Result:
    """Train some steps and read everything back."""
    with attached(placement, directory, **options) as run:
        torch.manual_seed(2)
        for number in range(steps):
            feature(run, number)
        return result_of(run)


def result_of(run: Run) -> Result:
    """All losses, weights and moments of a run, in memory of their own."""
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    return Result(run.losses, weights, run.optimizer.state_dict()["state"], run.extra)


def assert_same(one: Result, other: Result) -> None:
    """Bit for bit."""
    assert one.losses == other.losses
    assert one.extra == other.extra
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        assert same_bits(value, other.weights[name]), name
    assert one.states.keys() == other.states.keys()
    for key, slots in one.states.items():
        assert slots.keys() == other.states[key].keys()
        for name, value in slots.items():
            assert same_bits(value, other.states[key][name]), (key, name)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat, flat_other = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(flat, flat_other)
