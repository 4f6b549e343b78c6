"""How near the update stays to float64 over long runs; nothing in it stalls or is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cpu_adam
from cpu_adam import CPUAdam
from tests.optimizers import of_any_dtype

ELEMENTS = 256
"""Parameters of each kind of gradient."""
KINDS = ("tiny", "huge", "sparse", "alternating", "constant", "mixed")
BETAS, EPS, LR = (0.9, 0.999), 1e-8, 1e-3


def adversarial(steps: int) -> Iterator[torch.Tensor]:
    """Float32 gradients, a row of each kind, that bring out rounding, overflow and stalling."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(ELEMENTS, generator=generator)
    for step in range(steps):
        noise = torch.randn(len(KINDS), ELEMENTS, generator=generator)
        noise[0] *= 1e-12
        noise[1] *= 1e12
        noise[2] *= torch.rand(ELEMENTS, generator=generator) < 0.01
        noise[3] = base * (-1) ** step + noise[3] * 1e-3
        noise[4] = base
        noise[5] *= 10.0 ** torch.randint(-8, 8, (ELEMENTS,), generator=generator)
        yield noise


class Float64:
    """AdamW in float64."""

    def __init__(self, p: torch.Tensor, weight_decay: float) -> None:
        self.p, self.steps, self.weight_decay = p.double(), 0, weight_decay
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)

    def step(self, gradient: torch.Tensor) -> None:
        (beta1, beta2), g = BETAS, gradient.double()
        self.steps += 1
        self.m.mul_(beta1).add_(g * (1 - beta1))
        self.v.mul_(beta2).add_(g * g * (1 - beta2))
        root = (self.v / (1 - beta2**self.steps)).sqrt() + EPS
        self.p *= 1 - LR * self.weight_decay
        self.p -= LR / (1 - beta1**self.steps) * self.m / root


def errors(steps: int, weight_decay: float) -> list[tuple[float, float]]:
    """By kind, the root mean square error of the weight: of `exact`'s master, of torch fused."""
    generator = torch.Generator().manual_seed(99)
    start = torch.randn(len(KINDS), ELEMENTS, generator=generator).bfloat16()
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    right = Float64(start, weight_decay)
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": weight_decay}
    ours = CPUAdam([mine], **options)
    torchs = torch.optim.AdamW([theirs], fused=True, **options)
    mine.grad_dtype = None  # A float32 gradient for a bfloat16 parameter.
    for gradient in adversarial(steps):
        mine.grad, theirs.grad = gradient, gradient
        ours.step()
        torchs.step()
        right.step(gradient)
    master = cpu_adam.join(mine.detach(), ours.state[mine]["residue"])
    wrong = [(x.detach().double() - right.p).square().mean(1).sqrt() for x in (master, theirs)]
    return list(zip(wrong[0].tolist(), wrong[1].tolist()))


def compare(steps: int, decayed: float) -> None:
    """Errors of one unit more or less in a thousand are chance; all kinds together must tie.

    decayed: at most this share of torch's error must be ours with weight decay, whose factor
    1 - lr * weight_decay torch rounds: the geometric mean over the kinds.
    """
    for weight_decay, most in ((0.0, 1.005), (0.01, decayed)):
        found = errors(steps, weight_decay)
        for kind, (mine, theirs) in zip(KINDS, found):
            print(f"decay {weight_decay}, {kind}: exact {mine:.4g}, torch fused {theirs:.4g}")
            assert mine <= 1.03 * theirs
        ratios = [math.log(mine / theirs) for mine, theirs in found]
        assert math.exp(sum(ratios) / len(ratios)) <= most


@of_any_dtype
def test_errors_over_some_steps_are_no_larger_than_those_of_torch() -> None:
    compare(50, decayed=0.3)


@of_any_dtype
@pytest.mark.slow
def test_errors_over_ten_thousand_steps_are_no_larger_than_those_of_torch() -> None:
    compare(10_000, decayed=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_correction_at_step_a_million(dtype: torch.dtype) -> None:
    """The first moment is a long mean: 1 - beta1**t is 0.6 then, and 1 - beta2**t 0.1."""
    beta1, beta2, step, n = 1 - 1e-6, 1 - 1e-7, 1_000_000, 1000
    p = nn.Parameter(torch.linspace(-1, 1, n).to(dtype))
    optimizer = CPUAdam([p], lr=0.1, betas=(beta1, beta2), eps=1e-8, weight_decay=0.0)
    p.grad = torch.linspace(0.5, 2, n).to(dtype)
    optimizer.step()
    state = optimizer.state[p]
    m = torch.linspace(-0.3, 0.4, n)
    v = torch.linspace(0.1, 0.2, n)
    start = cpu_adam.join(p.detach(), state["residue"]) if "residue" in state else p.detach()
    start = start.double()
    state["exp_avg"].copy_(m)
    state["exp_avg_sq"].copy_(v)
    state["step"].fill_(step - 1)
    optimizer.step()
    g = p.grad.double()
    # The betas of a step are rounded once to float32, as 1 - beta is: an error of 2**-25 of v.
    m64 = m.double() + (1 - beta1) * (g - m.double())
    v64 = v.double() + (1 - beta2) * (g * g - v.double())
    root = (v64 / (1 - beta2**step)).sqrt() + 1e-8
    right = start - 0.1 / (1 - beta1**step) * m64 / root
    master = cpu_adam.join(p.detach(), state["residue"]) if "residue" in state else p.detach()
    assert float(state["step"]) == step
    torch.testing.assert_close(master.double(), right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_betas_do_not_stall(dtype: torch.dtype) -> None:
    """Moments decay after the gradient has stopped, as powers of beta, over three orders."""
    beta, steps = 0.9999, 1000
    p = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = CPUAdam([p], lr=1e-7, betas=(beta, beta))
    p.grad = torch.logspace(-6, 3, 64).to(dtype)
    optimizer.step()
    first = {key: optimizer.state[p][key].double() for key in ("exp_avg", "exp_avg_sq")}
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        optimizer.step()
    for key, value in first.items():
        found = optimizer.state[p][key].double()
        torch.testing.assert_close(found, value * beta**steps, rtol=2e-4, atol=0)
