"""Resident units: torch's own parameters, hooks and gradients, and the engine's step."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import offload
from offload.cli.breakdown import breakdown
from offload.recording import run_of
from tests import training
from tests.covering import by_turns
from tests.small import small
from tests.training import RESIDENT, Run, as_in_plain_torch, assert_same, attached, plain, train

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> int:
    on_parameters = (
        getattr(p, name) or ()
        for p in module.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    own = (getattr(inner, name) for inner in module.modules() for name in HOOKS)
    return sum(len(found) for found in (*own, *on_parameters))


def test_a_resident_unit_is_torchs_own(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        assert run.engine.plan.residents == set(range(len(run.engine.units)))
        for number in range(2):
            plain(run, number)
            assert all(type(p) is nn.Parameter for p in run.model.parameters())
            assert sum(hooks_of(child) for child in run.model.children()) == 0
            assert not any(vars(p) for p in run.model.parameters())
        saved = io.BytesIO()
        torch.save(run.model.state_dict(), saved)
        assert len(saved.getvalue()) < 3 * sum(p.nbytes for p in run.model.parameters())
        safetensors.torch.save_model(run.model, str(tmp_path / "model.safetensors"))


def test_only_what_a_pass_needs_nothing_for_is_resident(tmp_path: Path) -> None:
    for placement, more in (
        (("device", "cpu", "device"), {}),
        (("device", "device", "cpu"), {"micro_batches": 1}),
        (("cpu", "device", "device"), {}),
        (RESIDENT, {"gradient_dtype": "fp32"}),
    ):
        with attached(placement, tmp_path, **more) as run:
            assert not run.engine.plan.residents, placement
    with attached(RESIDENT, tmp_path, gradient_dtype="fp32", dtype=torch.float32) as run:
        assert len(run.engine.plan.residents) == len(run.engine.units)


def frozen_but_one() -> nn.Module:
    model = small()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.head.weight)
    return model


@pytest.mark.parametrize("clip", training.some_fast([0.5, None]))
def test_beside_streamed_units(clip: float | None, tmp_path: Path) -> None:
    """Frozen units on the device, one that is trained elsewhere; and some of each by budget."""

    def feature(run: Run, number: int) -> None:
        run.loss().backward()
        if not hasattr(run.optimizer, "engine") and clip is not None:
            nn.utils.clip_grad_norm_(run.model.parameters(), clip)
        run.step()

    options: dict[str, Any] = {"build": frozen_but_one, "dtype": torch.float32}
    with attached(("device", "cpu", "cpu"), tmp_path, **options) as run:
        assert 0 < len(run.engine.plan.residents) < len(run.engine.units)
    ours = train(("device", "cpu", "cpu"), tmp_path, feature, max_grad_norm=clip, **options)
    assert_same(ours, train(RESIDENT, tmp_path, feature, max_grad_norm=clip, **options))
    if clip is None:
        as_in_plain_torch(feature, RESIDENT, tmp_path, **options)


@pytest.mark.parametrize(("device_memory", "clip"), by_turns(["500KiB", "700KiB"], [None, 0.5]))
def test_as_many_as_fit(device_memory: str, clip: float | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_grad_norm": clip, "dtype": torch.float32, "steps": 4}

    def feature(run: Run, number: int) -> None:
        for _ in range(2):
            run.loss().backward()
        run.step()
        run.extra.append(run.optimizer.grad_norm())  # type: ignore[attr-defined]

    budget = {"device_memory": device_memory}
    auto = train(("auto", "auto", "auto"), tmp_path, feature, **budget, **options)
    assert_same(auto, train(RESIDENT, tmp_path, feature, **options))


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "zeros": lambda model: [p.data.zero_() for p in model.parameters()],
    "clamped": lambda model: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "other memory": lambda model: [setattr(p, "data", p.data * 0.5) for p in model.parameters()],
    "loaded": lambda model: model.load_state_dict(
        {name: value + 0.25 for name, value in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize(
    ("how", "placement"), training.in_turn(EDITS, [RESIDENT, ("cpu", "cpu", "cpu")])
)
def test_edits_after_each_step_as_in_plain_torch(
    how: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """bf16 masters go on from what was written, as those of `cpu_adam` alone do."""

    def feature(run: Run, number: int) -> None:
        plain(run, number)
        with torch.no_grad():
            EDITS[how](run.model)

    ours = as_in_plain_torch(feature, placement, tmp_path)
    assert all(value.isfinite().all() for value in ours.weights.values())


def test_hooks_and_second_derivatives_are_torchs(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path, dtype=torch.float32) as run:
        weight: Any = run.model.head.weight
        seen: list[Any] = []
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        run.loss().backward()
        assert training.same_bits(seen[0], weight.grad)
        handle.remove()
        (first,) = torch.autograd.grad(run.loss(), [weight], create_graph=True)
        first.pow(2).sum().backward()
        run.step()


REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "half()": (RuntimeError, lambda model: model.half()),
    "another shape": (RuntimeError, lambda m: setattr(m.head.weight, "data", torch.zeros(4))),
    "transposed": (
        RuntimeError,
        lambda m: setattr(m.head.weight, "data", m.head.weight.data.t().contiguous().t()),
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_another_parameter_is_refused_at_the_step(how: str, tmp_path: Path) -> None:
    error, change = REFUSED[how]
    with attached(RESIDENT, tmp_path) as run:
        plain(run, 0)
        before = [p.detach().clone() for p in run.model.parameters()]
        run.loss().backward()
        gradients = [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
        change(run.model)
        with pytest.raises(error, match="its states are for"):
            run.optimizer.step()
        for parameter, value, gradient in zip(run.model.parameters(), before, gradients):
            parameter.grad = None
            parameter.data = value
            parameter.grad = gradient
        run.step()
        plain(run, 1)


def test_without_its_gradient_a_step_that_has_begun_is_completed(tmp_path: Path) -> None:
    placement = ("device", "cpu", "cpu")
    with attached(placement, tmp_path, build=frozen_but_one, micro_batches=1) as run:
        for number in range(2):
            plain(run, number)
        model: Any = run.model
        model.norm.requires_grad_(True)
        run.loss().backward()
        with pytest.raises(RuntimeError, match=r"norm\.weight .*was frozen when"):
            run.optimizer.step()
        model.norm.requires_grad_(False)
        model.norm.zero_grad()
        run.step()
        plain(run, 2)


def test_an_update_that_fails_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with attached(RESIDENT, tmp_path) as run:
        run.loss().backward()
        with monkeypatch.context() as patch:
            patch.setattr("offload.runtime.runner.Runner.perform", broken)
            with pytest.raises(ZeroDivisionError):
                run.optimizer.step()
        for call in (run.loss, run.optimizer.step, run.engine.settle):
            with pytest.raises(offload.EngineError, match="on purpose"):
                call()


def test_a_pass_counts_as_the_models_time(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        for _ in range(3):
            two_passes(run)
            run.step()
        found = run_of(run.engine)
        assert found is not None
        assert found.residents == len(run.engine.plan.residents) > 0
        assert "other" not in breakdown(found).parts
        assert breakdown(found).parts["model"] > 0


def two_passes(run: Run) -> None:
    for _ in range(2):
        run.loss().backward()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="of torch 2.13")
def test_gradients_of_another_dtype_in_the_same_memory(tmp_path: Path) -> None:
    found = []
    for memory in (torch.zeros(4 * 64), None):
        model = nn.Linear(16, 16, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        _, optimizer = offload.attach(model, optimizer, offload.Config())
        model.weight.grad_dtype = None
        for dtype in (torch.bfloat16, torch.float32):
            lies = torch.zeros(4 * 64) if memory is None else memory
            gradient = lies.view(dtype)[:256].view(16, 16)
            gradient.copy_(torch.arange(256).view(16, 16) - 100)
            model.weight.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        offload.engine_of(model).settle()
        found.append(model.weight.detach().clone())
        offload.detach(model)
    assert torch.equal(*found)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="of torch 2.13")
def test_gradients_of_another_dtype_are_refused_where_they_are_taken_over(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, build=lambda: small().bfloat16()) as run:
        for parameter in run.model.parameters():
            parameter.grad_dtype = torch.float32
        with pytest.raises(ValueError, match=r"is torch\.float32, and torch\.bfloat16 is kept"):
            plain(run, 0)
