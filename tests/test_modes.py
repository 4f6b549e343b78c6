"""Under every mode of torch's that a loop may be in: the bits of plain torch, and what a mode sees.

What the engine itself does is no business of a mode's, see `offload.aside`.
"""

from __future__ import annotations

from collections import Counter
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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from tests.training import (
    ALL_PLACEMENTS,
    RESIDENT,
    Net,
    Run,
    assert_same,
    attached,
    batch,
    loss_of,
    smallest_budgets,
    some_fast,
    train,
    train_alone,
    without_idle_states,
)

Seen = list[Any]
"""What modes have seen."""


class Operations(TorchDispatchMode):
    """Counts all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts all functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(kind: Any, seen: Seen) -> Iterator[None]:
    with kind() as mode:
        yield
    mode.seen.pop("aten.detach.default", None)  # Torch's own, of what any saved-tensor hook gives.
    seen.append(sorted(mode.seen.items()))


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


@contextmanager
def both(seen: Seen) -> Iterator[None]:
    """Of either kind, and each twice."""
    with Operations(), Functions(), counting(Functions, seen), counting(Operations, seen):
        yield


def without(make: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Of a mode that tells nothing."""
    return lambda seen: make()


MODES: dict[str, Callable[[Seen], AbstractContextManager[Any]]] = {
    "operations": partial(counting, Operations),
    "functions": partial(counting, Functions),
    "both": both,
    "flops": flops,
    "on meta": without(lambda: torch.device("meta")),
    "default device": partial(set_to, torch.set_default_device, "cpu", None),
    "default dtype": partial(set_to, torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": partial(set_to, torch.use_deterministic_algorithms, True, False),
    "anomaly": without(lambda: torch.autograd.set_detect_anomaly(True)),
    "autocast": without(lambda: torch.autocast("cpu", torch.bfloat16)),
    "profiler": without(lambda: torch.autograd.profiler.profile(use_cpu=True, record_shapes=True)),
    "saved on cpu": without(torch.autograd.graph.save_on_cpu),
    "mutation allowed": without(torch.autograd.graph.allow_mutation_on_saved_tensors),
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
        loss = loss_of(run.model, tokens)
        if backward:
            loss.backward()
    if not backward:
        loss.backward()
    run.step()
    run.extra.append([loss.item(), *seen])


def spread() -> list[tuple[str, bool, tuple[str, str, str]]]:
    """Every mode in every placement, each time around another part of the step than before."""
    found = []
    for number, mode in enumerate(MODES):
        turned = ALL_PLACEMENTS[10 + number :] + ALL_PLACEMENTS[: 10 + number]
        always = mode == "mutation allowed"  # Torch wants its backward inside, too.
        found.append([(mode, always or at % 2 == 0, place) for at, place in enumerate(turned)])
    return [case for turn in zip(*found) for case in turn]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("case", some_fast(spread(), fast=4), ids=str)
def test_as_in_plain_torch(case: tuple[str, bool, tuple[str, str, str]], tmp_path: Path) -> None:
    mode, backward, placement = case
    loop = partial(under, mode, backward)
    options: dict[str, Any] = {"dtype": torch.float32, "steps": 2}
    ours, alone = train(placement, tmp_path, loop, **options), train_alone(loop, **options)
    assert_same(without_idle_states(ours), without_idle_states(alone))


# Torch 2.15 says so wherever hooks on saved tensors are around a selective checkpoint.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("policy", some_fast([of_all, of_products]))
@pytest.mark.parametrize(
    "placement", some_fast([("cpu", "cpu", "cpu"), *ALL_PLACEMENTS]), ids="-".join
)
def test_selective_checkpoints_in_the_least_memory(
    placement: tuple[str, str, str], policy: Policy, tmp_path: Path
) -> None:
    """Units that share a slot are used together in a recompute, which looks at all operations."""
    options: dict[str, Any] = {"build": partial(Selective, policy), "dtype": torch.float32}
    budgets = smallest_budgets(placement, tmp_path, **options)
    ours = train(placement, tmp_path, **options, **budgets)
    assert_same(without_idle_states(ours), without_idle_states(train_alone(**options)))


def test_a_mode_that_only_torch_holds_stays(tmp_path: Path) -> None:
    """It is taken off and put back, and torch before 2.11 lets go of it where it is taken off."""
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        Operations().__enter__()
        try:
            run.loss().backward()
            run.step()
        finally:
            mode: Any = _get_current_dispatch_mode()
            mode.__exit__(None, None, None)
        assert mode.seen["aten.mm.default"]


def test_a_parameter_at_rest_is_read_under_a_mode_once(tmp_path: Path) -> None:
    """The engine's copy is not seen, the function that was asked for is."""

    def touched(run: Run, number: int) -> None:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        for kind in (Operations, Functions):
            with kind() as mode:
                torch.sin(weight)
                weight.detach()
                weight.clone()
                torch.ones(2)
            run.extra.append(dict(mode.seen))

    placements = [RESIDENT, ("cpu",) * 3, ("nvme",) * 3]
    found = [train(p, tmp_path, touched, steps=1).extra for p in placements]
    assert found[0] == found[1] == found[2]
    assert found[0][0]["aten.sin.default"] == 1


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
    options: dict[str, Any] = {"build": lambda: deepcopy(build()), "dtype": torch.float32}
    ours = train(placement, tmp_path, loop, **options)
    assert_same(without_idle_states(ours), without_idle_states(train_alone(loop, **options)))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused_and_training_goes_on(transform: str, tmp_path: Path) -> None:
    """They ended the process: what they give to a tensor's data dies with them."""
    told = r"under a transform of torch\.func"
    assert_refused(TRANSFORMS[transform], told, ("nvme", "nvme", "nvme"), tmp_path)


RECORDERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "torch.jit.trace": lambda net, x: torch.jit.trace(net, (x,)),
    "torch.jit.trace of a part": lambda net, x: torch.jit.trace(net[1], (x,)),
    "torch.jit.script": lambda net, x: torch.jit.script(net),
    "torch.export": lambda net, x: torch.export.export(net, (x,)),
    "torch.export of a part": lambda net, x: torch.export.export(net[1], (x,)),
    "torch.export, strict": lambda net, x: torch.export.export(net, (x,), strict=True),
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
    assert_refused(RECORDERS[recorder], told, ("cpu", "cpu", "cpu"), tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recorder", ["torch.jit.trace", "torch.export", "make_fx"])
def test_residents_are_recorded_as_torchs_own(recorder: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    with attached(("device", "device", "cpu"), tmp_path, build=build, dtype=torch.float32) as run:
        x = torch.randn(8, 8, generator=run.generator)
        for _ in range(2):
            run.model(x).sum().backward()
            run.step()
            with torch.no_grad():
                made = RECORDERS[recorder](run.model, x)
                found = (made.module() if recorder == "torch.export" else made)(x)
                assert torch.equal(found, run.model(x))
