"""A small model, its optimizer and one step of torch's own loop, for tests of the face."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.training import RESIDENT, Net, batch, config_of, loss_of

MIXED = ("nvme", "cpu", "device")
PLACEMENTS = [RESIDENT, ("nvme", "nvme", "cpu"), MIXED]

config = config_of


def small(dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    torch.manual_seed(1)
    return Net(layers=3, **options).to(dtype)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def tokens(seed: int = 7) -> torch.Tensor:
    return batch(torch.Generator().manual_seed(seed))


def torch_step(model: nn.Module, optimizer: Any, seed: int = 7) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, tokens(seed))
    loss.backward()
    optimizer.step()
    return loss.item()
