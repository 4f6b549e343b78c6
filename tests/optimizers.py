"""What the tests of the optimizers for CPU memory share: parameters, gradients, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpu_adam

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 5), (2, 3, 4), (700,))
OURS: dict[str, Callable[..., Any]] = {
    "adam": cpu_adam.CPUAdam,
    "lion": cpu_adam.CPULion,
    "sgd": lambda params, **options: cpu_adam.CPUSGD(params, **{"momentum": 0.9, **options}),
}
every_optimizer = pytest.mark.parametrize("kind", OURS)
of_any_dtype = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"),
    reason="torch before 2.10 has no gradients of another dtype than their parameter",
)

FOUR_PARTS = r"(?s)asked .*; found .*; likely cause: .*; try: "
"""What a message must have."""


def freed(x: Tensor, left: int = 0) -> Tensor:
    """A tensor whose storage has only so many bytes left."""
    x.untyped_storage().resize_(left)
    return x


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    """One of each shape, one that is a transposed view, one with gaps between its elements."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors.append(torch.randn(6, 4, generator=generator).t())
    tensors = [x.to(dtype) for x in tensors]
    tensors.append(torch.randn(9, 4, generator=generator).to(dtype)[:, ::2])
    return [nn.Parameter(x) for x in tensors]


def contiguous(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().contiguous()) for p in params]


def set_gradients(params: Sequence[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """New gradients, of sizes that differ widely."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        size = 10.0 ** torch.randint(-5, 2, p.shape, generator=generator)
        p.grad = (torch.randn(p.shape, generator=generator) * size * scale).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[torch.Tensor]:
    """The optimizer's parameters after steps by the same gradients for every optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach() for p in params]


def assert_near(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], lr: float, steps: int
) -> None:
    """Within 8 units in the last place per step of the weight, or of ten of its largest steps."""
    for mine, theirs in zip(got, want):
        unit = torch.clamp(theirs.double().abs(), min=10 * lr) * torch.finfo(torch.float32).eps
        assert torch.all((mine.double() - theirs.double()).abs() <= 8 * steps * unit)


def bits(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    assert [bits(x) for x in got] == [bits(x) for x in want]


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and all states, in a fixed order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p.detach() for p in params]
    for p in params:
        state = optimizer.state.get(p, {})
        found += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return found
