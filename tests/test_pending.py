"""Residents whose states live elsewhere: from step() until somebody uses them, and after."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from cpu_adam import CPUAdam
from offload.model.resident import PendingParameter
from offload.program.ops import Op, Verb
from tests import training
from tests.small import adamw, config, small, tokens, torch_step
from tests.training import Run, attached, batch, plain, same_bits, some_fast, without_idle_states

ON_CPU, ON_NVME = ("device", "device", "cpu"), ("device", "device", "nvme")


def pending(model: nn.Module) -> int:
    return sum(type(p) is PendingParameter for p in model.parameters())


def all_of(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("placement", some_fast([ON_NVME, ON_CPU]), ids="-".join)
def test_plain_from_its_first_use_on(
    placement: tuple[str, str, str], clip: float | None, tmp_path: Path
) -> None:
    with attached(placement, tmp_path, max_grad_norm=clip) as run:
        assert run.engine.plan.residents == set(range(len(run.engine.units)))
        for number in range(2):
            plain(run, number)
            assert pending(run.model) == all_of(run.model)
            run.loss()
            assert all(type(p) is nn.Parameter for p in run.model.parameters())
            assert not any(vars(p) for p in run.model.parameters())


def test_aliases_from_before_the_step_show_it_when_it_lands(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        run.loss().backward()
        view, gradient = weight.data, weight.grad
        before, kept = view.clone(), gradient.clone()
        run.optimizer.step()
        run.engine.settle()
        assert same_bits(view, weight.detach())
        assert not same_bits(view, before)
        assert weight.grad is gradient
        assert same_bits(gradient, kept)


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
    assert pending(model) == all_of(model)
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
def other_data_after_the_step(run: Run, number: int) -> None:
    plain(run, number)
    for parameter in list(run.model.parameters())[::2]:
        parameter.data = parameter.data * 0.5


@loop
def without_a_forward_of_the_model(run: Run, number: int) -> None:
    model: Any = run.model
    x = F.embedding(batch(run.generator), model.embed.weight)
    for block in model.blocks:
        x = block.down(F.gelu(block.up(x)))
    logits = F.linear(x, model.head.weight).float()
    loss = F.cross_entropy(logits.view(-1, training.VOCABULARY), torch.zeros(32, dtype=torch.long))
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
def stepped_in_inference_mode(run: Run, number: int) -> None:
    run.loss().backward()
    with torch.inference_mode():
        run.optimizer.step()
        if number == 1:
            run.losses.append(run.model(batch(run.generator)).float().sum().item())
    run.optimizer.zero_grad()


@pytest.mark.parametrize(("name", "placement"), training.in_turn(LOOPS, [ON_CPU, ON_NVME]))
def test_the_bits_of_plain_torch(
    name: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    training.as_in_plain_torch(LOOPS[name], placement, tmp_path, steps=4)


def test_gradients_are_given_up_without_a_wait(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        plain(run, 0)
        assert pending(run.model) == all_of(run.model)
        assert all(p.grad is None for p in run.model.parameters())


COPIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "deepcopy": copy.deepcopy,
    "saved": lambda p: _loaded(p),
    "numpy": lambda p: torch.from_numpy(p.detach().float().numpy()).bfloat16(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}


def _loaded(parameter: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def test_whatever_is_made_of_one_has_the_new_values(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        for how, made in COPIES.items():
            plain(run, 0)
            assert type(weight) is PendingParameter
            with torch.no_grad():
                found = made(weight)
            assert type(weight) is nn.Parameter, how
            assert type(found) in (nn.Parameter, torch.Tensor), how
            assert same_bits(found.detach(), weight.detach()), how


def test_together_with_parameters_at_rest(tmp_path: Path) -> None:
    """In one call with streamed ones."""
    budget = {"device_memory": "216KiB", "dtype": torch.bfloat16}
    with attached(("auto", "device", "cpu"), tmp_path, **budget) as run:
        residents = run.engine.plan.residents
        assert 0 < len(residents) < len(run.engine.units)
        plain(run, 0)
        streamed = next(u for u in run.engine.units if u.index not in residents)
        here = run.engine.units[min(residents)]
        pair = [here.parameters[0], streamed.parameters[0]]
        assert not any(norm.isnan() for norm in torch._foreach_norm(pair))
        plain(run, 1)
        assert pending(run.model)
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


def test_an_update_that_fails_shows_nothing_old(tmp_path: Path) -> None:
    def broken(op: Op, since: float) -> float:
        if op.verb is Verb.UPDATE:
            raise ZeroDivisionError("on purpose")
        return since

    with attached(ON_CPU, tmp_path, pace=broken) as run:
        run.loss().backward()
        run.optimizer.step()
        model: Any = run.model
        for look in (run.loss, model.head.weight.sum, run.engine.settle, run.optimizer.step):
            with pytest.raises(offload.EngineError, match="on purpose"):
                look()


def test_closed_while_pending(tmp_path: Path) -> None:
    with attached(ON_CPU, tmp_path) as run:
        plain(run, 0)
        run.engine.close()
        with pytest.raises(offload.EngineError, match="closed"):
            run.model.head.weight.sum()  # type: ignore[union-attr,operator]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("whole", some_fast([False, True]))
def test_nothing_is_compiled_again_in_a_later_step(whole: bool, tmp_path: Path) -> None:
    """Though classes of parameters change in each."""
    compiled: list[int] = []
    seen: list[int] = []

    def counting(graph: Any, _: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    def feature(run: Run, number: int) -> None:
        if number == 1:
            vars(run)["compiled"] = torch.compile(run.model, backend=counting)
            for block in () if whole else run.model.blocks:  # type: ignore[union-attr]
                block.compile(backend=counting)
        model = run.model
        if whole and number:
            run.model = vars(run)["compiled"]
        plain(run, number)
        run.model = model
        seen.append(len(compiled))

    torch._dynamo.reset()
    ours = training.train(ON_CPU, tmp_path, feature, steps=5)
    assert seen[1] > 0
    assert seen[1:] == [seen[1]] * 4
    torch._dynamo.reset()
    training.assert_same(
        without_idle_states(ours), without_idle_states(training.train_alone(feature, steps=5))
    )
