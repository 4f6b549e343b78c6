"""torch.compile on blocks, on the whole model, and on functions of the user's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.small import MIXED, adamw, config, small, tokens, torch_step
from tests.training import Run, alone, as_in_plain_torch, fp32, loss_of, plain, same_bits, some_fast


def _blocks(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def _whole(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def broken_at_units(model: Any) -> None:
    """Let graphs end where an engine ends them: what inductor fuses is rounded otherwise."""
    for module in (model.embed, *model.blocks, model.norm, model.head):
        module.register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))
        module.register_forward_hook(torch._dynamo.disable(lambda *_: None))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own.
@pytest.mark.parametrize(
    ("how", "before", "backend", "checkpointed"),
    [
        *itertools.product(
            (_blocks, _whole), (True, False), ("aot_eager", "inductor"), (True, False)
        )
    ],
)
@pytest.mark.slow
def test_compiled(how: Any, before: bool, backend: str, checkpointed: bool, tmp_path: Path) -> None:
    """Blocks, or what lies between two hooks of the engine, give the same bits."""

    def run(attached: bool) -> Any:
        torch._dynamo.reset()
        model = small(checkpointed=checkpointed)
        optimizer = alone(adamw(model))
        if not attached:
            broken_at_units(model)
        used = how(model, backend) if before or not attached else model
        if attached:
            _, optimizer = offload.attach(used, optimizer, config(MIXED, tmp_path))
        if attached and not before:
            used = how(model, backend)
        losses = [torch_step(used, optimizer, seed) for seed in range(3)]
        with torch.no_grad():
            losses.append(loss_of(used, tokens()).item())
        return losses, [p.detach().clone() for p in model.parameters()]

    (ours, weights), (theirs, wanted) = run(True), run(False)
    assert ours == theirs
    assert all(same_bits(one, other) for one, other in zip(weights, wanted))


def compiled(run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
    """By dynamo where there is an engine; torch alone computes the same without it, and sooner."""
    attached = hasattr(run.optimizer, "engine")
    return torch.compile(function, backend="eager") if attached else function


def compiled_loss(run: Run, number: int) -> None:
    """That uses weights at rest, one given and one found."""
    bias = run.model.norm.bias

    def penalized(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return loss + weight.pow(2).sum() * bias[:1].exp().squeeze()

    compiled(run, penalized)(run.loss(), run.model.head.weight).backward()
    run.step()


def compiled_edit(run: Run, number: int) -> None:
    plain(run, number)
    with torch.no_grad():
        compiled(run, lambda weight: weight.mul_(0.5).sum())(run.model.head.weight)


def compiled_step(run: Run, number: int) -> None:
    """With all that such a step asks of parameters."""
    weights = list(run.model.parameters())

    def step() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(weights, 0.5)
        seen = weights[-1].T.sum() + weights[-1].data.sum()
        weights[-1].data = weights[-1].data * 0.9
        run.step()
        return norm + seen

    run.loss().backward()
    run.extra.append(compiled(run, step)().item())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own.
@pytest.mark.filterwarnings("ignore:Profiler function:UserWarning")
@pytest.mark.parametrize("feature", some_fast([compiled_step, compiled_loss, compiled_edit]))
def test_what_is_compiled_outside_of_the_model_has_true_weights(
    feature: Any, tmp_path: Path
) -> None:
    """Its graph is broken where it touches one that is at rest."""
    torch._dynamo.reset()
    as_in_plain_torch(feature, MIXED, tmp_path, **fp32())
