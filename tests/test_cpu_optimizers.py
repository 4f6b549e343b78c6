"""CPUAdam, CPULion and CPUSGD keep the semantics of torch.optim."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cpu_adam
from cpu_adam import CPUSGD, CPUAdam, CPULion, native
from tests import optimizers as helpers
from tests.optimizers import OURS, assert_same, every_optimizer, parameters, run, set_gradients


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.0},
        {"maximize": True, "weight_decay": 0.3},
        {"betas": (0.0, 0.999)},
    ],
)
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_equals_torch(
    options: dict[str, Any], decoupled: bool, implementation: dict[str, Any]
) -> None:
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"weight_decay": 0.01, **options}
    # torch's fused kernel reads a strided gradient in the order in which it lies in memory.
    params = helpers.contiguous(parameters()) if implementation.get("fused") else parameters()
    theirs = run(torch_class(params, **options, **implementation), 10)
    mine = run(CPUAdam(parameters(), decoupled_weight_decay=decoupled, **options), 10)
    helpers.assert_near(mine, theirs, options.get("lr", 1e-3), 10)


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
    ],
)
def test_sgd_equals_torch(options: dict[str, Any], implementation: dict[str, Any]) -> None:
    params = helpers.contiguous(parameters()) if implementation.get("fused") else parameters()
    theirs = run(torch.optim.SGD(params, lr=1e-2, **options, **implementation), 10)
    mine = run(CPUSGD(parameters(), lr=1e-2, **options), 10)
    helpers.assert_near(mine, theirs, 1.0, 10)


def test_lion_equals_its_paper() -> None:
    mine = run(CPULion(parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99)), 10)
    params = parameters()
    moments = [torch.zeros_like(p) for p in params]
    for step in range(10):
        set_gradients(params, step)
        for p, m in zip(params, moments):
            assert p.grad is not None
            direction = (0.9 * m + (1 - 0.9) * p.grad).sign()
            p.data = p.data * (1 - 1e-2 * 0.1) - 1e-2 * direction
            m.mul_(0.99).add_((1 - 0.99) * p.grad)
    helpers.assert_near(mine, [p.detach() for p in params], 1e-2, 10)


@given(
    lr=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)),
    eps=st.floats(1e-8, 1e-2),
    weight_decay=st.floats(0, 1),
    maximize=st.booleans(),
)
def test_first_step_equals_torch_for_any_hyper_parameters(lr: float, **options: Any) -> None:
    theirs = run(torch.optim.AdamW(parameters(), lr=lr, **options), 1)
    mine = run(CPUAdam(parameters(), lr=lr, **options), 1)
    helpers.assert_near(mine, theirs, lr, 1)


@every_optimizer
def test_bfloat16_parameters_have_float32_masters(kind: str) -> None:
    optimizer = OURS[kind](parameters(torch.bfloat16), lr=1e-3)
    wide = OURS[kind]([nn.Parameter(p.float()) for p in parameters(torch.bfloat16)], lr=1e-3)
    for step in range(5):
        set_gradients(optimizer.param_groups[0]["params"], step)
        for p, q in zip(optimizer.param_groups[0]["params"], wide.param_groups[0]["params"]):
            q.grad = p.grad.float()
        optimizer.step()
        wide.step()
    for p, q in zip(optimizer.param_groups[0]["params"], wide.param_groups[0]["params"]):
        master = cpu_adam.join(p.detach().contiguous(), optimizer.state[p]["residue"])
        assert_same([master], [q.detach()])


# Parameter groups, schedulers, closures, hooks.


@every_optimizer
def test_groups_have_their_own_hyper_parameters(kind: str) -> None:
    def build(p: list[nn.Parameter]) -> Any:
        return OURS[kind]([{"params": p[:3], "lr": 0.1}, {"params": p[3:]}], lr=1e-2)

    together = run(build(parameters()), 4)
    params = parameters()
    first, second = OURS[kind](params[:3], lr=0.1), OURS[kind](params[3:], lr=1e-2)
    for step in range(4):
        set_gradients(params, step)
        first.step()
        second.step()
    assert_same(together, [p.detach() for p in params])


def test_a_group_added_later_starts_at_its_first_step() -> None:
    params, twins = parameters(), parameters()
    mine, theirs = CPUAdam(params[:4]), torch.optim.AdamW(twins[:4])
    run(mine, 3)
    run(theirs, 3)
    mine.add_param_group({"params": params[4:], "lr": 0.1})
    theirs.add_param_group({"params": twins[4:], "lr": 0.1})
    helpers.assert_near(run(mine, 3, 3), run(theirs, 3, 3), 0.1, 6)
    assert float(mine.state[params[0]]["step"]) == 6
    assert float(mine.state[params[-1]]["step"]) == 3


@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_and_tensor_lr(tensor: bool) -> None:
    results = []
    for build in (torch.optim.AdamW, CPUAdam):
        optimizer = build(parameters(), lr=torch.tensor(0.1) if tensor else 0.1)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
            ],
            [3],
        )
        for step in range(8):
            run(optimizer, 1, step)
            scheduler.step()
        results.append([p.detach() for p in optimizer.param_groups[0]["params"]])
    helpers.assert_near(results[1], results[0], 0.1, 8)


@every_optimizer
def test_closures_and_hooks(kind: str) -> None:
    (p,) = params = [nn.Parameter(torch.ones(4))]
    optimizer = OURS[kind](params)
    seen = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        seen.append("closure")
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 4.0
    before.remove()
    optimizer.step(closure)
    assert seen == ["before", "closure", "after", "closure", "after"]


@every_optimizer
def test_parameters_without_gradients_are_left_alone(kind: str) -> None:
    params, twins = parameters(), parameters()
    optimizer, other = OURS[kind](params), OURS[kind](twins[::2])
    for step in range(4):
        set_gradients(params, step)
        set_gradients(twins, step)
        for p in params[1::2]:
            p.grad = None
        optimizer.step()
        other.step()
    assert all(p not in optimizer.state for p in params[1::2])
    assert_same([p.detach() for p in params], [p.detach() for p in twins])
    optimizer.zero_grad()
    optimizer.step()
    assert_same([p.detach() for p in params], [p.detach() for p in twins])


def test_gradients_that_come_and_go_count_their_own_steps() -> None:
    params, twins = parameters(), parameters()
    optimizers = [(CPUAdam(params), params), (torch.optim.AdamW(twins), twins)]
    for optimizer, mine in optimizers:
        for step in range(6):
            set_gradients(mine, step)
            for p in mine[step % 3 :: 3]:
                p.grad = None
            optimizer.step()
    helpers.assert_near([p.detach() for p in params], [p.detach() for p in twins], 1e-3, 6)


# What is refused.


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_are_not_offered_say_why(option: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}=True; found that .*; likely cause: .*; try: "):
        CPUAdam(parameters(), **{option: True})
    optimizer = CPUAdam(parameters())
    with pytest.raises(ValueError, match=option):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], option: True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.complex64), "view_as_real"),
        (torch.zeros(3, device="meta"), "on meta.*CPUOffloadPolicy"),
        (torch.zeros(3, dtype=torch.float16), "float16.*autocast"),
        (torch.zeros(3, dtype=torch.float64), "float64.*bfloat16"),
    ],
)
@every_optimizer
def test_parameters_that_cannot_be_served_are_refused(
    kind: str, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OURS[kind]([nn.Parameter(tensor)])


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (CPUAdam, {"lr": -1.0}),
        (CPUAdam, {"betas": (1.0, 0.9)}),
        (CPUAdam, {"states": "tiny"}),
        (CPULion, {"betas": (0.9, float("nan"))}),
        (CPUSGD, {"momentum": -0.1}),
        (CPUSGD, {"nesterov": True}),
        (CPUSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_hyper_parameters_without_a_step_are_refused(build: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"found .*; likely cause: .*; try: "):
        build(parameters(), **options)


@every_optimizer
def test_a_refused_step_changes_nothing(kind: str) -> None:
    params = parameters()
    optimizer = OURS[kind](params)
    run(optimizer, 2)
    before = [x.clone() for x in helpers.tensors_of(optimizer)]
    params[3].grad = torch.eye(3, 5).to_sparse()
    with pytest.raises(ValueError, match=r"dense gradient.*SparseAdam"):
        optimizer.step()
    set_gradients(params, 2)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr=nan"):
        optimizer.step()
    assert_same(helpers.tensors_of(optimizer), before)


# Memory.


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    original = native._run

    def counting(chosen: Any, operation: str, *arguments: Any) -> None:
        calls.append(operation)
        original(chosen, operation, *arguments)

    monkeypatch.setattr(native, "_run", counting)
    return calls


@pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")
def test_a_step_is_one_native_call_per_format(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [*parameters(), *parameters(torch.bfloat16)]
    optimizer = CPUAdam([{"params": params[:5], "lr": 0.1}, {"params": params[5:]}])
    run(optimizer, 1)
    calls = count_calls(monkeypatch)
    run(optimizer, 2, 1)
    assert sorted(calls) == ["exact", "exact", "fp32", "fp32"]


@every_optimizer
def test_layouts_of_gradients_do_not_matter(kind: str) -> None:
    memory = torch.randn(4, 8)
    layouts = [memory.t(), memory.t()[::2], memory[0].expand(6, 8), memory[:, ::3], memory[2, 5]]
    results = []
    for change in (lambda x: x, lambda x: x.contiguous().clone()):
        params = [nn.Parameter(torch.ones(x.shape)) for x in layouts]
        optimizer = OURS[kind](params, lr=0.1)
        for _ in range(2):
            for p, x in zip(params, layouts):
                p.grad = change(x)
            optimizer.step()
        results.append(helpers.tensors_of(optimizer))
    assert_same(*results)


@every_optimizer
def test_gradients_are_not_kept(kind: str) -> None:
    params = parameters()
    optimizer = OURS[kind](params)
    run(optimizer, 2)
    gradients = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    assert all(gradient() is None for gradient in gradients)


def test_steps_are_counted_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = CPUAdam([p := nn.Parameter(torch.ones(3))])
        for _ in range(300):
            p.grad = torch.ones(3)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(optimizer.state[p]["step"]) == 300


@every_optimizer
def test_versions_move_as_with_torch(kind: str) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = OURS[kind]([p])
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_replaced_are_seen(kind: str, dtype: torch.dtype) -> None:
    """Weights and states moved to other memory between steps, as those that prune or grow do."""
    plain, moved = OURS[kind](parameters(dtype)), OURS[kind](parameters(dtype))
    run(plain, 4)
    run(moved, 2)
    kept = []
    for p in moved.param_groups[0]["params"]:
        kept.append(p.data)
        p.data = p.data.clone()
        kept[-1].fill_(7)
        for key in list(moved.state[p]):
            kept.append(moved.state[p][key])
            moved.state[p][key] = kept[-1].clone()
            kept[-1].fill_(7)
    run(moved, 2, 2)
    assert_same(helpers.tensors_of(moved), helpers.tensors_of(plain))
    assert all(torch.all(x == 7) for x in kept)


@every_optimizer
def test_a_state_that_is_dropped_begins_anew(kind: str) -> None:
    params, twins = parameters(), parameters()
    optimizer = OURS[kind](params)
    run(optimizer, 2)
    for p, twin in zip(params, twins):
        twin.data.copy_(p.data)
        del optimizer.state[p]
    run(optimizer, 2, 2)
    assert_same([p.detach() for p in params], run(OURS[kind](twins), 2, 2))


# Weights that are edited between steps: see [Note: Edits] in cpu_adam/optimizer_base.py.


@every_optimizer
def test_an_edited_weight_is_served_as_written(kind: str) -> None:
    (p,) = params = [nn.Parameter(torch.randn(1000).bfloat16())]
    optimizer = OURS[kind](params, lr=1e-3, weight_decay=0.0)
    run(optimizer, 5)
    edited = torch.randn(1000).bfloat16()
    edited[::3] = 0.0
    edited[1::7] = 1e4
    with torch.no_grad():
        p.copy_(edited)
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, 1)
    assert_same([p.detach()], [edited])


def test_clipping_weights_after_every_step_does_not_stall_training() -> None:
    (p,) = params = [nn.Parameter(torch.ones(8, dtype=torch.bfloat16))]
    optimizer = CPUAdam(params, lr=1e-5, weight_decay=0.0)
    for _ in range(1000):
        p.grad = torch.ones(8, dtype=torch.bfloat16)
        optimizer.step()
        with torch.no_grad():
            p.clamp_(-1, 1)
    torch.testing.assert_close(p.detach().float(), torch.full((8,), 0.99), rtol=4e-3, atol=0)


# Gradients that are not finite, and scaled ones.


@every_optimizer
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(kind: str, unscale: bool) -> None:
    params, twins = parameters(), parameters()
    optimizer, plain = OURS[kind](params), OURS[kind](twins)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    clean = 0
    for step in range(6):
        set_gradients(params, step, scale=scaler.get_scale())
        if step == 3:
            assert params[4].grad is not None
            params[4].grad[0, 0, 0] = float("inf")
        else:
            set_gradients(twins, step)
            plain.step()
            clean += 1
        scaler.scale(torch.ones(()))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.skipped_steps == 1
    assert_same(helpers.tensors_of(optimizer), helpers.tensors_of(plain))


def test_every_counterpart_of_torch_has_its_arguments_here() -> None:
    import inspect

    for mine, theirs in itertools.product([CPUAdam], [torch.optim.AdamW, torch.optim.Adam]):
        assert set(inspect.signature(theirs).parameters) <= set(inspect.signature(mine).parameters)
    for name, theirs in inspect.signature(torch.optim.SGD).parameters.items():
        assert inspect.signature(CPUSGD).parameters[name].default == theirs.default
    for name, theirs in inspect.signature(torch.optim.AdamW).parameters.items():
        assert inspect.signature(CPUAdam).parameters[name].default == theirs.default
