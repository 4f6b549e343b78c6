"""Under modes of torch's that a script may be in: the bits of plain torch, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from tests import training
from tests.training import RESIDENT, Net, Run, as_in_plain_torch, batch, fp32, in_turn, some_fast

CPU, NVME, MIXED = ("cpu",) * 3, ("nvme",) * 3, ("cpu", "device", "nvme")

Seen = list[Any]
"""What modes have seen."""


@contextmanager
def flops(seen: Seen) -> Iterator[None]:
    with FlopCounterMode(display=False) as mode:
        yield
    seen.append(mode.get_total_flops())


@contextmanager
def set_to(setter: Callable[[Any], None], value: Any, before: Any, seen: Seen) -> Iterator[None]:
    """A switch that is one for all threads."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def without(make: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Of a mode that tells nothing."""
    return lambda seen: make()


MODES: dict[str, Callable[[Seen], AbstractContextManager[Any]]] = {
    "flops": flops,
    "default device": partial(set_to, torch.set_default_device, "cpu", None),
    "default dtype": partial(set_to, torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": partial(set_to, torch.use_deterministic_algorithms, True, False),
    "anomaly": without(lambda: torch.autograd.set_detect_anomaly(True)),
    "autocast": without(lambda: torch.autocast("cpu", torch.bfloat16)),
    "profiler": without(lambda: torch.autograd.profiler.profile(use_cpu=True, record_shapes=True)),
    "saved on cpu": without(torch.autograd.graph.save_on_cpu),
}

Policy = Callable[..., CheckpointPolicy]


def of_products(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def of_all(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class Selective(nn.Module):
    """Two blocks in each region of a checkpoint that keeps what `policy` says."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.net, self.policy = Net(layers=4), policy

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.net.embed(tokens)
        for at in range(0, len(self.net.blocks), 2):
            two = nn.Sequential(*self.net.blocks[at : at + 2])
            keeps = partial(create_selective_checkpoint_contexts, self.policy)
            x = checkpoint(two, x, use_reentrant=False, context_fn=keeps)
        return self.net.head(self.net.norm(x))  # type: ignore[no-any-return]


def under(mode: str, backward: bool, run: Run, number: int) -> None:
    """A step whose forward, and backward too if asked, is under a mode."""
    seen: Seen = []
    tokens = batch(run.generator)
    with MODES[mode](seen):
        loss = training.loss_of(run.model, tokens)
        if backward:
            loss.backward()
    if not backward:
        loss.backward()
    run.step()
    run.extra.append([loss.item(), *seen])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("backward", some_fast([True, False]))
@pytest.mark.parametrize(("mode", "placement"), in_turn(MODES, [CPU, NVME, MIXED, RESIDENT]))
def test_as_in_plain_torch(
    mode: str, placement: tuple[str, str, str], backward: bool, tmp_path: Path
) -> None:
    as_in_plain_torch(partial(under, mode, backward), placement, tmp_path, **fp32(steps=2))


# Torch 2.15 says so wherever hooks on saved tensors are around a selective checkpoint.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("policy", some_fast([of_products, of_all]))
@pytest.mark.parametrize("placement", some_fast([CPU, NVME, MIXED]), ids="-".join)
def test_selective_checkpoints_in_the_least_memory(
    placement: tuple[str, str, str], policy: Policy, tmp_path: Path
) -> None:
    """Units that share a slot are used together in a recompute, which looks at all operations."""
    options = fp32(build=partial(Selective, policy))
    budgets = training.smallest_budgets(placement, tmp_path, **options)
    as_in_plain_torch(training.plain, placement, tmp_path, **options, **budgets)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda net, x: torch.func.grad(lambda y: net(y).sum())(x),
    "vmap": lambda net, x: torch.func.vmap(net)(x),
    "a parameter": lambda net, x: torch.func.grad(lambda y: (y * net[0].weight).sum())(x),
    "copies": lambda net, x: torch.func.grad(
        lambda copies: torch.func.functional_call(net, copies, (x,)).sum()
    )({name: p.detach().clone() for name, p in net.named_parameters()}),
}


def assert_refused(
    use: Callable[[Any, torch.Tensor], Any],
    told: str,
    placement: tuple[str, str, str],
    tmp_path: Path,
) -> None:
    """Of each step of an attached model `use` is refused, and it trains as it does without."""

    def loop(run: Run, number: int) -> None:
        x = torch.randn(8, 8, generator=run.generator)
        if hasattr(run.optimizer, "engine"):
            with pytest.raises((RuntimeError, AttributeError), match=told):
                use(run.model, x)
        loss = run.model(x).pow(2).mean()
        loss.backward()
        run.losses.append(loss.item())
        run.step()

    build = partial(torch.nn.Sequential, *(nn.Linear(8, 8) for _ in range(4)))
    as_in_plain_torch(loop, placement, tmp_path, **fp32(build=lambda: deepcopy(build())))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_and_training_goes_on(transform: str, tmp_path: Path) -> None:
    told = r"under a transform of torch\.func"
    assert_refused(TRANSFORMS[transform], told, NVME, tmp_path)


RECORDERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "torch.jit.trace": lambda net, x: torch.jit.trace(net, (x,)),
    "torch.export": lambda net, x: torch.export.export(net, (x,)),
    "make_fx": lambda net, x: make_fx(net)(x),
    "of a parameter": lambda net, x: torch.jit.trace(lambda y: y * net[0].weight, (x,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_records_a_model_is_refused_and_training_goes_on(
    recorder: str, tmp_path: Path
) -> None:
    """Traced, a slot's bytes of that moment would have been the weights for ever."""
    told = "records where values lie"
    assert_refused(RECORDERS[recorder], told, CPU, tmp_path)
