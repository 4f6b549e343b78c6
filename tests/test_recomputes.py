"""What autograd saves of weights, and recomputes with them, where few models have it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import training
from tests.structures import STRUCTURES
from tests.training import Net, Regions, Run, as_in_plain_torch, batch, fp32, plain

CPU, NVME = ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")


@pytest.mark.parametrize("kind", ["weights read without a call", "functions that keep weights"])
def test_a_weight_that_is_saved_at_rest_is_found_again(kind: str, tmp_path: Path) -> None:
    as_in_plain_torch(plain, CPU, tmp_path, **fp32(build=STRUCTURES[kind]))


class Gained(nn.Module):
    """Checkpoints what is in it, where it uses a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(32))

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * self.gain
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


def of_blocks(kind: type[nn.Module], net: type[Net], **options: Any) -> nn.Module:
    """A model with blocks of a kind."""
    made = net(**options)
    made.blocks = nn.ModuleList(kind() for _ in range(2))
    return made


class Looked(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block((x @ block.layers[0].weight).tanh())
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def freezing(run: Run, number: int) -> None:
    plain(run, number)
    for block in run.model.blocks:
        block.gain.requires_grad_(False)


def test_what_is_frozen_and_recomputed_at_rest_keeps_its_values(tmp_path: Path) -> None:
    as_in_plain_torch(freezing, CPU, tmp_path, **fp32(build=partial(of_blocks, Gained, Looked)))


class Counting(Gained):
    """Keeps an average, behind which the last thing to be saved is a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(32))
        self.layers[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x) * self.gain
        self.average.mul_(0.5).add_(x.detach().mean((0, 1)))  # type: ignore[operator]
        return self.layers[1](x + self.average)  # type: ignore[no-any-return]


def test_a_recompute_ends_where_that_of_plain_torch_does(tmp_path: Path) -> None:
    made = partial(of_blocks, Counting, Net, checkpointed=True)
    as_in_plain_torch(plain, CPU, tmp_path, **fp32(build=made))


class Aside(Gained):
    """Leaves what it has made in an attribute, so that no hook is told of its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = super().forward(x)
        return self.made.detach()


class Asides(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, blocks = self.embed(tokens), self.blocks
        for block in blocks:
            block(x)
            x = block.made
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_what_is_recomputed_inside_may_leave_by_another_way(tmp_path: Path) -> None:
    as_in_plain_torch(plain, CPU, tmp_path, **fp32(build=partial(of_blocks, Aside, Asides)))


def test_a_unit_around_others_may_be_recomputed_twice(tmp_path: Path) -> None:
    build = partial(of_blocks, Gained, Net, checkpointed=True)
    as_in_plain_torch(plain, NVME, tmp_path, **fp32(build=build))


class Again(Net):
    """A block is read and called in a checkpoint, and called after it, as the head is where there
    is an early exit."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        block: Any = self.blocks[0]
        return (x @ block.down.weight).tanh() @ block.up.weight  # type: ignore[no-any-return]

    def region(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, *_ = self.blocks
        x = self.read(first(third(second(self.read(x)))))
        return third(second(x))  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.region, self.embed(tokens), use_reentrant=self.reentrant)
        return self.head(self.norm(self.blocks[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_finds_a_weight_at_rest_as_the_forward_did(
    reentrant: bool, tmp_path: Path
) -> None:
    made = partial(Again, reentrant=reentrant)
    least = training.smallest_budgets(NVME, tmp_path, build=made, dtype=torch.float32)
    as_in_plain_torch(plain, NVME, tmp_path, **fp32(build=made), **least)


def test_a_weight_that_a_node_has_taken_stays_while_its_input_is_recomputed(tmp_path: Path) -> None:
    as_in_plain_torch(plain, NVME, tmp_path, **fp32(build=Regions))


def chunked(run: Run, number: int) -> None:
    """Losses in reentrant checkpoints, which read the weight of the head."""
    head: Any = run.model.head
    for _ in range(2):
        x = run.model(batch(run.generator))
        checkpoint(lambda x: (x @ head.weight).exp().mean(), x, use_reentrant=True).backward()
    run.step()


def test_the_backward_inside_a_checkpoint_of_the_loss_counts_for_none(tmp_path: Path) -> None:
    as_in_plain_torch(chunked, NVME, tmp_path, micro_batches=2, **fp32())
