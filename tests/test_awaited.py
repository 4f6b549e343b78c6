"""Residents whose states live elsewhere: from step() until somebody uses them, and after."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from cpu_adam import CPUAdam
from offload.awaited import AwaitedParameter
from tests.optimizers import of_any_dtype
from tests.small import adamw, config, small, tokens, torch_step
from tests.test_residents import hooks_of
from tests.training import (
    VOCABULARY,
    Run,
    assert_same,
    attached,
    batch,
    in_turn,
    plain,
    same_bits,
    train,
    train_alone,
    without_idle_states,
)

ON_CPU, ON_NVME = ("device", "device", "cpu"), ("device", "device", "nvme")


def waiting(model: nn.Module) -> int:
    return sum(type(p) is AwaitedParameter for p in model.parameters())


def all_of(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("placement", [ON_CPU, ON_NVME], ids="-".join)
def test_plain_from_its_first_use_on(
    placement: tuple[str, str, str], clip: float | None, tmp_path: Path
) -> None:
    with attached(placement, tmp_path, max_grad_norm=clip) as run:
        assert run.engine.plan.residents == set(range(len(run.engine.units)))
        for number in range(2):
            plain(run, number)
            assert waiting(run.model) == all_of(run.model)
            run.loss()
            assert all(type(p) is nn.Parameter for p in run.model.parameters())
            assert sum(hooks_of(child) for child in run.model.children()) == 0
            assert not any(vars(p) for p in run.model.parameters())
            assert all(p._backward_hooks is None for p in run.model.parameters())


def test_hooks_of_the_user_stay(tmp_path: Path) -> None:
    seen: list[str] = []
    with attached(ON_CPU, tmp_path) as run:
        model: Any = run.model
        model.head.weight.register_hook(lambda _: seen.append("gradient"))
        model.head.register_forward_pre_hook(lambda *_: seen.append("call"))
        for number in range(3):
            plain(run, number)
    assert seen == ["call", "gradient"] * 3


def test_a_model_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(ON_CPU, tmp_path))
    torch_step(model, optimizer)
    assert waiting(model) == all_of(model)
    gone = weakref.ref(optimizer.engine), weakref.ref(model)
    del model, optimizer, _
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


def test_a_unit_waits_for_its_own_update_alone(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        plain(run, 0)
        model: Any = run.model
        model.blocks[0](torch.zeros(1, 32).bfloat16())
        model.head.weight.sum()
        met = {*model.blocks[0].parameters(), model.head.weight}
        assert {p for p in model.parameters() if type(p) is nn.Parameter} == met


def test_code_past_the_trap_sees_no_old_weights(tmp_path: Path) -> None:
    """As kernels of other extensions do: announced by the module, else not numbers at all."""
    seen: list[torch.Tensor] = []

    def past(module: Any, *_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            seen.append(module.weight.clone().detach())

    with attached(ON_CPU, tmp_path) as run:
        model: Any = run.model
        plain(run, 0)
        past(model.head)
        assert seen[0].isnan().all()
        forward = model.head.forward
        model.head.forward = lambda x: past(model.head) or forward(x)
        run.loss()
        assert same_bits(seen[1], model.head.weight.detach())


def test_views_and_held_gradients_let_the_step_wait(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        model: Any = run.model
        view, array = model.head.weight.data, model.norm.weight.detach()
        run.loss().backward()
        held, viewed = model.norm.bias.grad, model.embed.weight.grad.view(-1)
        before = held.clone(), viewed.clone()
        bias: Any = model.blocks[1].up.bias
        buffer: Any = np.ones(bias.shape, np.uint16)  # Memory that torch did not make.
        bias.grad = torch.from_numpy(buffer).view(torch.bfloat16)
        run.optimizer.step()
        plain_now = {name for name, p in model.named_parameters() if type(p) is nn.Parameter}
        of_block = {f"blocks.1.{name}" for name, _ in model.blocks[1].named_parameters()}
        assert plain_now == {"embed.weight", "norm.weight", "norm.bias", "head.weight"} | of_block
        assert view.data_ptr() == model.head.weight.data_ptr()
        assert array.data_ptr() == model.norm.weight.data_ptr()
        assert held is model.norm.bias.grad
        assert same_bits(before[0], held)
        assert same_bits(before[1], viewed)


LOOPS: dict[str, Callable[[Run, int], None]] = {}


def loop(function: Callable[[Run, int], None]) -> Callable[[Run, int], None]:
    LOOPS[function.__name__] = function
    return function


@loop
def zeroed_by_the_model(run: Run, number: int) -> None:
    run.loss().backward()
    run.optimizer.step()
    run.model.zero_grad(set_to_none=number % 2 == 0)


@loop
def never_zeroed(run: Run, number: int) -> None:
    run.loss().backward()
    run.optimizer.step()


@loop
def stepped_twice(run: Run, number: int) -> None:
    run.loss().backward()
    run.optimizer.step()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=number == 1)


@loop
def gradients_changed_after_the_step(run: Run, number: int) -> None:
    run.loss().backward()
    run.optimizer.step()
    for index, parameter in enumerate(run.model.parameters()):
        if index % 4 == 0:
            assert parameter.grad is not None
            run.extra.append(parameter.grad.float().sum().item())
            parameter.grad.mul_(0.5)
        elif index % 4 == 1:
            parameter.grad = torch.full_like(parameter, 1e-3)
        elif index % 4 == 2:
            parameter.grad = None


@loop
def an_older_graph(run: Run, number: int) -> None:
    """Nothing of it needs weights, so torch lets it come after the step."""
    model: Any = run.model
    late = model.embed(batch(run.generator)).float().sum() + model.blocks[1].norm.bias.sum()
    later = model.embed(batch(run.generator)).float().mean()
    run.loss().backward()
    run.optimizer.step()
    late.backward()
    run.extra.append(model.blocks[1].norm.bias.grad.float().sum().item())
    later.backward()
    if number == 1:
        run.optimizer.zero_grad()


@loop
def other_data_after_the_step(run: Run, number: int) -> None:
    plain(run, number)
    for index, parameter in enumerate(run.model.parameters()):
        if index % 3 == 0:
            parameter.data = parameter.data * 0.5
        elif index % 3 == 1:
            with torch.no_grad():
                parameter.set_(parameter.detach() * 0.5)  # type: ignore[no-untyped-call]


@loop
def without_a_forward_of_the_model(run: Run, number: int) -> None:
    model: Any = run.model
    x = F.embedding(batch(run.generator), model.embed.weight)
    for block in model.blocks:
        x = block.down(F.gelu(block.up(x)))
    logits = F.linear(x, model.head.weight).float()
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), torch.zeros(32, dtype=torch.long))
    run.losses.append(loss.item())
    loss.backward()
    run.step()


@loop
def some_without_a_gradient(run: Run, number: int) -> None:
    run.loss().backward()
    for parameter in list(run.model.parameters())[number::2]:
        parameter.grad = None
    run.step()


@loop
def frozen_after_the_backward(run: Run, number: int) -> None:
    """Torch steps them once more, and the next backward brings them nothing."""
    run.loss().backward()
    some = list(run.model.parameters())[number::3]
    for parameter in some:
        parameter.requires_grad_(False)
    run.step()
    for parameter in some:
        parameter.requires_grad_(True)


@loop
def stepped_in_inference_mode(run: Run, number: int) -> None:
    run.loss().backward()
    with torch.inference_mode():
        run.optimizer.step()
        if number == 1:
            run.losses.append(run.model(batch(run.generator)).float().sum().item())
    run.optimizer.zero_grad()


@pytest.mark.parametrize(("name", "placement"), in_turn(LOOPS, [ON_CPU, ON_NVME]))
def test_the_bits_of_plain_torch(
    name: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    ours = train(placement, tmp_path, LOOPS[name], steps=4)
    assert_same(without_idle_states(ours), without_idle_states(train_alone(LOOPS[name], steps=4)))


def test_gradients_are_given_up_without_a_wait(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        for zero in (run.optimizer.zero_grad, run.model.zero_grad):
            for to_none in (True, False):
                run.loss().backward()
                run.optimizer.step()
                zero(set_to_none=to_none)
                assert waiting(run.model) == all_of(run.model)
                found = [p.grad for p in run.model.parameters()]
                assert all((g is None) if to_none else not g.any() for g in found)  # type: ignore
                del found


COPIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: _loaded(p),
    "nn.Parameter": nn.Parameter,
    "of the model": lambda p: copy.deepcopy(_Holding(p)).weight,
    "numpy": lambda p: torch.from_numpy(p.detach().float().numpy()).bfloat16(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "array of pointers": lambda p: p.untyped_storage().tolist() and p.detach(),
    "torch.func": lambda p: torch.func.vmap(lambda row: row * p)(torch.ones(1).bfloat16())[0],
}


class _Holding(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight


def _loaded(parameter: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", COPIES)
def test_whatever_is_made_of_one_has_the_new_values(how: str, tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        weight: Any = run.model.head.weight
        plain(run, 0)
        assert type(weight) is AwaitedParameter
        with torch.no_grad():
            found = COPIES[how](weight)
        assert type(weight) is nn.Parameter
        assert type(found) in (nn.Parameter, torch.Tensor)
        assert same_bits(found.detach(), weight.detach())
        assert not weight.isnan().any()


def test_swapped_for_another_after_the_step(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        plain(run, 0)
        weight: Any = run.model.head.weight
        other = nn.Parameter(torch.ones_like(weight))
        plain(run, 1)
        torch.utils.swap_tensors(weight, other)
        assert type(weight) is type(other) is nn.Parameter
        assert weight.eq(1).all()
        assert not vars(weight)
        plain(run, 2)


@pytest.mark.parametrize("first", [0, 1])
def test_together_with_parameters_at_rest(first: int, tmp_path: Path) -> None:
    """In one call with streamed ones, in either order."""
    budget = {"device_memory": "216KiB", "dtype": torch.bfloat16}
    with attached(("auto", "device", "cpu"), tmp_path, **budget) as run:
        residents = run.engine.plan.residents
        assert 0 < len(residents) < len(run.engine.units)
        plain(run, 0)
        streamed = next(u for u in run.engine.units if u.index not in residents)
        here = run.engine.units[min(residents)]
        pair = [here.parameters[0], streamed.parameters[0]]
        pair = pair[:: 1 - 2 * first]
        assert not any(norm.isnan() for norm in torch._foreach_norm(pair))
        plain(run, 1)
        assert waiting(run.model)
        assert not torch.block_diag(*pair).isnan().any()
        plain(run, 2)


def test_taken_off_or_asleep_right_after_the_step(tmp_path: Path) -> None:
    models = [small(), small()]
    alone = CPUAdam(models[1].parameters(), lr=1e-2)
    _, ours = offload.attach(
        models[0], CPUAdam(models[0].parameters(), lr=1e-2), config(ON_CPU, tmp_path)
    )
    for optimizer, model in ((ours, models[0]), (alone, models[1])):
        torch_step(model, optimizer)
        model(tokens()).sum().backward()
        optimizer.step()
    offload.sleep(models[0])
    offload.wake(models[0])
    ours.step()
    alone.step()
    offload.detach(models[0])
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert type(one) is nn.Parameter
        assert same_bits(one.detach(), other.detach())
        assert same_bits(one.grad, other.grad)  # type: ignore[arg-type]


def test_an_update_that_fails_shows_nothing_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with attached(ON_CPU, tmp_path) as run:
        run.loss().backward()
        monkeypatch.setattr("offload.updates.update_parts", broken)
        run.optimizer.step()
        model: Any = run.model
        for look in (run.loss, model.head.weight.sum, run.engine.settle, run.optimizer.step):
            with pytest.raises(offload.EngineError, match="on purpose"):
                look()


def test_closed_while_awaited(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        plain(run, 0)
        run.engine.close()
        with pytest.raises(offload.EngineError, match="closed"):
            run.model.head.weight.sum()  # type: ignore[union-attr,operator]
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_compiled_meets_plain_parameters(whole: bool, tmp_path: Path) -> None:
    """No hooks, no classes that change, so nothing is compiled twice."""
    compiled: list[int] = []
    seen: list[list[int]] = []

    def counting(graph: Any, _: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    def feature(run: Run, number: int) -> None:
        if number < 2:
            plain(run, number)
            return
        model: Any = run.model
        if number == 2:
            run.extra = [torch.compile(model, backend=counting)] if whole else []
            for block in () if whole else model.blocks:
                block.compile(backend=counting)
            assert waiting(model) == all_of(model) or not hasattr(run.optimizer, "engine")
        called, run.model = run.model, run.extra[0] if whole else run.model
        plain(run, number)
        run.model = called
        assert not waiting(model)
        seen.append(list(compiled))

    results = []
    for train_it in (
        lambda: train(ON_CPU, tmp_path, feature, steps=6),
        lambda: train_alone(feature, steps=6),
    ):
        torch._dynamo.reset()
        compiled.clear()
        result = train_it()
        result.extra = []
        results.append(without_idle_states(result))
    assert_same(*results)
    assert len(seen[0]) == 1
    assert seen == [seen[0]] * 8  # In four steps of each.


@of_any_dtype
def test_a_gradient_of_another_dtype_is_refused(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        weight: Any = run.model.head.weight
        run.loss().backward()
        weight.grad = None
        weight.grad_dtype = torch.float32
        weight.grad = torch.ones_like(weight, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"head\.weight is .*float32"):
            run.optimizer.step()
        weight.grad = None
        weight.grad_dtype = torch.bfloat16
        run.step()


def test_two_parameters_in_one_memory_are_refused_and_nothing_is_done(tmp_path: Path) -> None:
    """Lanes would update both there at once; pieces of one buffer share nothing."""

    def apart(run: Run, number: int) -> None:
        one, other = (block.up.weight for block in run.model.blocks[:2])  # type: ignore
        if not number:
            both = torch.stack((one.data, other.data))
            one.data, other.data = both.unbind()
        run.loss().backward()
        if hasattr(run.optimizer, "engine"):
            kept = other.data
            other.data = one.data
            with pytest.raises(RuntimeError, match=r"up\.weight and .*up\.weight share memory"):
                run.optimizer.step()
            other.data = kept
        run.step()

    ours, alone = train(ON_CPU, tmp_path, apart), train_alone(apart)
    assert_same(*(without_idle_states(one) for one in (ours, alone)))
