"""What people do in loops: the bits of the same loop without an engine, on other tiers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests import training
from tests.training import Net, Regions, Result, Run, batch, fails, fp32, plain, without_idle_states

# -- groups and schedulers ---------------------------------------------------------------------


def of_blocks(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)


def groups_added_later(run: Run, number: int) -> None:
    model: Any = run.model
    if number == 1:
        run.optimizer.add_param_group({"params": [model.head.weight], "lr": 3e-2})
    if number == 2:
        group = {"params": [model.embed.weight, *model.norm.parameters()], "weight_decay": 0.1}
        run.optimizer.add_param_group(group)
    for _ in range(2):
        run.loss().backward()
    run.step()


def thawed(run: Run, number: int) -> None:
    """Blocks frozen after attach, and let go one by one from the last."""
    model: Any = run.model
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index >= 4 - number)
    plain(run, number)


def group_taken_out(run: Run, number: int) -> None:
    if number == 1:
        vars(run)["group"] = run.optimizer.param_groups.pop()
    if number == 3:
        run.optimizer.param_groups.append(vars(run)["group"])
    plain(run, number)


def scheduled(make: Callable[[Any], Any], run: Run, number: int) -> None:
    if number == 0:
        vars(run)["scheduler"] = make(run.optimizer)
    run.loss().backward()
    run.optimizer.step()
    scheduler = vars(run)["scheduler"]
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(run.losses[-1])
    else:
        scheduler.step()
    run.extra += [group["lr"] for group in run.optimizer.param_groups]
    run.optimizer.zero_grad()


def sequential(optimizer: Any) -> Any:
    one = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    other = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [one, other], milestones=[2])


def chained(optimizer: Any) -> Any:
    one = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2)
    return lr_scheduler.ChainedScheduler([one, lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=9.0),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    found = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


# -- gradients ----------------------------------------------------------------------------------


def zeroed_anywhere(run: Run, number: int) -> None:
    model, optimizer = run.model, run.optimizer
    optimizer.zero_grad(set_to_none=False)
    loss = run.loss()
    model.zero_grad(set_to_none=number % 2 == 0)  # Between a forward and its backward.
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    run.loss().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    run.loss().backward()
    optimizer.step()
    model.zero_grad()


def gradients_by_hand(run: Run, number: int) -> None:
    parameters = list(run.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(run.loss(), parameters)):
        parameter.grad = gradient
    noise = torch.Generator().manual_seed(number)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad += 1e-3 * torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
    nn.utils.clip_grad_value_(parameters, 0.1)
    run.extra.append(nn.utils.get_total_norm([p.grad for p in parameters]).item())  # type: ignore
    run.step()


def clipped_one_by_one(run: Run, number: int) -> None:
    run.loss().backward()
    for parameter in run.model.parameters():
        run.extra.append(nn.utils.clip_grad_norm_(parameter, 0.1).item())
    run.step()


def hooked_gradients(run: Run, number: int) -> None:
    """Hooks on parameters, on modules' outputs and inputs, and around whole backwards."""
    model: Any = run.model
    handles = [
        model.blocks[1].up.weight.register_hook(lambda g: g * 0.5),
        model.embed.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)),
        model.blocks[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
        model.blocks[3].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)),
        model.blocks[4].register_forward_hook(lambda m, a, out: out * 1.5),
    ]
    for _ in range(2):
        run.loss().backward()
    for handle in handles:
        handle.remove()
    plain(run, number)


def failed_backward_kept(run: Run, number: int) -> None:
    """What came of a backward that raised is stepped with, as torch does."""
    hook = run.model.blocks[2].down.weight.register_hook(fails)  # type: ignore
    loss = run.loss()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    run.step()
    with pytest.raises(ZeroDivisionError):
        handle = run.model.head.register_forward_pre_hook(fails)  # type: ignore
        try:
            run.loss()
        finally:
            handle.remove()
    plain(run, number)


# -- between the steps ----------------------------------------------------------------------------


def averaged(run: Run, number: int) -> None:
    if number == 0:
        multi = get_ema_multi_avg_fn(0.9)
        vars(run)["ema"] = AveragedModel(run.model, multi_avg_fn=multi)
        vars(run)["mean"] = copy.deepcopy(run.model)
    plain(run, number)
    ema, mean = vars(run)["ema"], vars(run)["mean"]
    ema.update_parameters(run.model)
    with torch.no_grad():
        for one, other in zip(mean.parameters(), run.model.parameters()):
            one.lerp_(other, 0.1)
        run.extra += [p.float().sum().item() for p in (*ema.parameters(), *mean.parameters())]


def ema_swapped_in(run: Run, number: int) -> None:
    """The averaged weights are evaluated in the model itself, then taken out again."""
    plain(run, number)
    with torch.no_grad():
        kept = [p.detach().clone() for p in run.model.parameters()]
        for parameter in run.model.parameters():
            parameter.copy_(parameter * 0.5)
        run.loss()
        for parameter, before in zip(run.model.parameters(), kept):
            parameter.data.copy_(before)


def by_hand(run: Run, number: int) -> None:
    plain(run, number)
    run.loss().backward()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter -= 1e-2 * parameter.grad
    run.optimizer.zero_grad()


def rewound(run: Run, number: int) -> None:
    plain(run, number)
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    states = copy.deepcopy(run.optimizer.state_dict())
    plain(run, number)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(states)
    plain(run, number)


def initialised(run: Run, number: int) -> None:
    model: Any = run.model
    plain(run, number)
    fills: list[Any] = [
        nn.init.normal_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.trunc_normal_,
        nn.init.eye_,
        partial(nn.init.sparse_, sparsity=0.1),
        nn.init.uniform_,
    ]
    for fill, block in zip(fills[4 * number :], (*model.blocks[:4],)):
        fill(block.up.weight)
        nn.init.zeros_(block.up.bias)
        nn.init.ones_(block.norm.weight)
    model.blocks[4].apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else 0)


def generated(run: Run, number: int) -> None:
    """Sampling between a forward and its backward, and between micro-batches."""
    loss = run.loss()
    with torch.no_grad():
        tokens = batch(run.generator)[:, :2]
        for _ in range(4):
            chances = run.model(tokens)[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    run.extra.append(tokens.tolist())
    loss.backward()
    with torch.inference_mode():
        run.loss()
    run.loss().backward()
    run.step()


def functional(run: Run, number: int) -> None:
    """The model called with other values, and with its own, in the place of its parameters."""
    doubled = {name: p.detach() * 2 for name, p in run.model.named_parameters()}
    tokens = batch(run.generator)
    logits = torch.func.functional_call(run.model, doubled, (tokens,))
    run.extra.append(logits.float().sum().item())
    own = dict(run.model.named_parameters())
    torch.func.functional_call(run.model, own, (tokens,)).float().logsumexp(-1).sum().backward()
    plain(run, number)


# -- what is saved, and in what precision ---------------------------------------------------------


def saved_on_cpu(run: Run, number: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = run.loss()
    loss.backward()
    run.step()


def autocast(dtype: torch.dtype, run: Run, number: int, cache: bool = True) -> None:
    """Two forwards in one region, whose cache of weights they share."""
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
        loss = run.loss() + run.loss()
    loss.backward()
    run.step()


def scaled(run: Run, number: int) -> None:
    """The stock scaler with fp16, and a step that it skips."""
    scaler = vars(run).setdefault("scaler", torch.amp.GradScaler("cpu", 2.0**12, growth_interval=2))
    for micro_batch in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run.loss()
        if number == 1 and micro_batch == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    scaler.unscale_(run.optimizer)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad()
    run.extra += [scaler.get_scale(), str(norm.item())]


def some_added(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": [*model.blocks.parameters()]}, {"params": [model.head.weight]}]
    )


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "groups added later": (groups_added_later, {"optimizer": of_blocks, "steps": 4}),
    "thawed": (thawed, {"steps": 4}),
    "group taken out": (group_taken_out, {"optimizer": some_added, "steps": 4}),
    "zeroed anywhere": (zeroed_anywhere, {}),
    "gradients by hand": (gradients_by_hand, {}),
    "clipped one by one": (clipped_one_by_one, {}),
    "hooked gradients": (hooked_gradients, {}),
    "hooked gradients, regions": (hooked_gradients, {"build": Regions}),
    "failed backward kept": (failed_backward_kept, {}),
    "averaged": (averaged, {}),
    "EMA swapped in": (ema_swapped_in, fp32()),
    "by hand": (by_hand, fp32()),
    "rewound": (rewound, {}),
    "initialised": (initialised, fp32()),
    "generated": (generated, {}),
    "functional": (functional, {}),
    "saved on cpu": (saved_on_cpu, {}),
    "saved on cpu, checkpoints": (saved_on_cpu, {"build": partial(Net, checkpointed=True)}),
    "autocast": (partial(autocast, torch.bfloat16), fp32()),
    "autocast, tied": (partial(autocast, torch.bfloat16), fp32(build=partial(Net, tied=True))),
    "autocast, no cache": (partial(autocast, torch.bfloat16, cache=False), fp32()),
    "autocast, checkpoints": (
        partial(autocast, torch.bfloat16),
        fp32(build=partial(Net, checkpointed=True)),
    ),
    "autocast, reentrant": (
        partial(autocast, torch.bfloat16),
        fp32(build=partial(Regions, reentrant=True)),
    ),
    "fp16 and scaler": (scaled, fp32(steps=4)),
    "fp16 and scaler, tied": (scaled, fp32(steps=4, build=partial(Net, tied=True))),
    **{
        name: (partial(scheduled, make), {"steps": 5, "build": partial(Net, layers=1)})
        for name, make in SCHEDULERS.items()
    },
}


FAST = {
    "groups added later",
    "zeroed anywhere",
    "hooked gradients",
    "failed backward kept",
    "averaged",
    "rewound",
    "saved on cpu",
    "autocast, tied",
    "fp16 and scaler",
    "OneCycleLR",
}
"""Loops of the fast tier."""


NOT_RESIDENT = [one for one in zip(CASES, itertools.cycle(training.SAMPLED[1:])) if one[0] in FAST]


@cache
def alone(case: str) -> Result:
    feature, options = CASES[case]
    return without_idle_states(training.train_alone(feature, **options))


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize(("case", "placement"), training.everywhere(CASES, NOT_RESIDENT))
def test_the_bits_without_an_engine(
    case: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    feature, options = CASES[case]
    ours = training.train(placement, tmp_path, feature, **options)
    training.assert_same(without_idle_states(ours), alone(case))
