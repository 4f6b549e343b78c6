"""The face of the engine: attach, detach, what is refused, several engines and the end."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.model.parameter import OffloadedParameter
from tests import training
from tests.faults import descriptors, nothing_leaks
from tests.small import MIXED, PLACEMENTS, adamw, config, small, tokens, torch_step
from tests.training import VOCABULARY, assert_same, attached, loss_of, plain, result_of, same_bits

# -- attach and detach ------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_detach_gives_everything_back(placement: tuple[str, str, str], tmp_path: Path) -> None:
    model = small(torch.bfloat16)
    mine = adamw(model)
    identity = {name: id(p) for name, p in model.named_parameters()}
    with nothing_leaks():
        back, optimizer = offload.attach(model, mine, config(placement, tmp_path))
        assert back is model
        assert isinstance(optimizer, torch.optim.Optimizer)
        for seed in range(3):
            torch_step(model, optimizer, seed)
        loss_of(model, tokens(3)).backward()
        weights = {name: v.clone() for name, v in model.state_dict(destination={}).items()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        states = optimizer.state_dict()["state"]
        back, original = offload.detach(model)
        assert back is model
        assert original is mine
        del optimizer
    assert {name: id(p) for name, p in model.named_parameters()} == identity
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert type(parameter) is nn.Parameter
        assert not hasattr(parameter, "_offload_home")
        assert same_bits(parameter.data, weights[name])
        assert parameter.grad is not None
        assert same_bits(parameter.grad, gradients[name])
        assert mine.state[parameter].keys() >= {"step", "exp_avg", "exp_avg_sq"}
        for slot, value in mine.state[parameter].items():
            assert same_bits(value, states[index][slot]), slot
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with pytest.raises(ValueError, match="not attached"):
        offload.engine_of(model)
    with pytest.raises(ValueError, match="not attached"):
        offload.detach(model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_torch_steps_with_what_a_bfloat16_model_is_handed_back(kind: Any, tmp_path: Path) -> None:
    model = small(torch.bfloat16)
    optimizer = kind(
        model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
    )
    _, attached = offload.attach(model, optimizer, config(MIXED, tmp_path))
    torch_step(model, attached)
    assert offload.detach(model)[1] is optimizer
    losses = [torch_step(model, optimizer) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_attach_again_after_detach_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with attached(MIXED, tmp_path) as run:
        for number in range(4):
            plain(run, number)
        expected = result_of(run)
    with attached(training.RESIDENT, tmp_path) as run:
        for number in range(2):
            plain(run, number)
        _, original = offload.detach(run.model)
        assert original is not None
        _, again = offload.attach(run.model, original, config(MIXED, tmp_path))
        on = training.Run(run.model, again, run.generator, run.losses)
        for number in range(2):
            plain(on, number)
        assert_same(result_of(on), expected)
        on.engine.close()


def test_tied_parameters_stay_tied_after_detach(tmp_path: Path) -> None:
    model = small(tied=True)
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    torch_step(model, optimizer)
    offload.detach(model)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("placement", ["device", "cpu", "nvme"])
def test_forward_only(placement: str, tmp_path: Path) -> None:
    model = small(torch.bfloat16)
    with torch.no_grad():
        expected = model(tokens())
    with nothing_leaks():
        asked = config((placement, "auto", "auto"), tmp_path)
        _, optimizer = offload.attach(model, None, asked)
        assert optimizer is None
        engine = offload.engine_of(model)
        kinds = {row.kind for row in engine.plan.rows()}
        assert kinds == {"weight"}
        for _ in range(2):
            with torch.no_grad():
                assert same_bits(model(tokens()), expected)
        loss = loss_of(model, tokens())
        with pytest.raises(RuntimeError, match="attached without an optimizer"):
            loss.backward()
        with torch.inference_mode():
            assert same_bits(model(tokens()), expected)
        offload.detach(model)
        del engine
    loss_of(model, tokens()).backward()


def test_engine_of_and_the_context_manager(tmp_path: Path) -> None:
    model = small()
    with nothing_leaks():
        _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
        with optimizer.engine as engine:
            assert offload.engine_of(model) is engine
            torch_step(model, optimizer)
        with pytest.raises(offload.EngineError, match="closed"):
            torch_step(model, optimizer)
        for call in (engine.settle, model.state_dict, optimizer.step):
            with pytest.raises(offload.EngineError, match="closed"):
                call()
        engine.close()
        del engine, optimizer


def test_the_report(tmp_path: Path) -> None:
    model = small()
    asked = config(("nvme", "nvme", "nvme"), tmp_path)
    _, optimizer = offload.attach(model, adamw(model), asked)
    with optimizer.engine as engine:
        before = engine.report()
        assert (before.steps, before.misses) == (0, 0)
        for seed in range(2):
            torch_step(model, optimizer, seed)
        engine.settle()
        report = engine.report()
        assert (report.steps, report.misses) == (2, 0)
        assert set(report.lanes) == {"compute", "h2d", "d2h", "cpu", "disk", "comm"}
        assert report.lanes["disk"].bytes > before.lanes["disk"].bytes  # it stays what it was
        assert report.lanes["disk"].busy_s > 0
        assert [use.tier for use in report.tiers] == ["device", "cpu", "nvme"]
        assert report.wall_s > before.wall_s
        assert 0 < report.compute_s <= report.wall_s
        exposed = sum(lane.exposed_s for lane in report.lanes.values())
        assert report.compute_s == pytest.approx(report.wall_s - exposed)
        assert report.tiers[2].resident_bytes > 0
        with pytest.raises(AttributeError):
            report.steps = 3  # type: ignore[misc]


# -- what is refused --------------------------------------------------------------------------


class Elsewhere(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        """Might do anything."""


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8, sparse=True), nn.Linear(8, VOCABULARY))


def hooked() -> nn.Module:
    model = small()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[union-attr]
    return model


class WithMetaBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.empty(4, device="meta"))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "RMSprop": (
        small,
        lambda m: torch.optim.RMSprop(m.parameters()),
        r"torch\.optim\.\S*RMSprop.*AdamW",
    ),
    "a subclass": (small, lambda m: Elsewhere(m.parameters()), "Elsewhere"),
    "no optimizer": (small, lambda m: "adamw", "str"),
    "amsgrad": (small, lambda m: adamw(m, amsgrad=True), "amsgrad=True.*amsgrad=False"),
    "capturable": (small, lambda m: adamw(m, capturable=True), "capturable"),
    "differentiable": (small, lambda m: adamw(m, differentiable=True), "differentiable"),
    "another model's": (small, lambda m: adamw(nn.Linear(3, 7)), r"\(7, 3\).*not in the model"),
    "float16": (lambda: small(torch.float16), adamw, "float16.*(autocast|bfloat16)"),
    "float64": (lambda: small(torch.float64), adamw, "float64.*(float32|bfloat16)"),
    "no parameters": (nn.Identity, lambda m: None, "no parameters"),
    "sparse gradients": (sparse, adamw, "sparse=False"),
    "a hook": (hooked, adamw, r"register_post_accumulate_grad_hook of .*register_hook"),
    "meta buffer": (WithMetaBuffer, adamw, "buffer table is on the meta device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_attached_is_refused_by_name(name: str, tmp_path: Path) -> None:
    build, make, message = REFUSED[name]
    model = build()
    values = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = make(model)
    with nothing_leaks(), pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        offload.attach(model, optimizer, config(MIXED, tmp_path))
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert same_bits(parameter.detach(), values[name].detach())
    if isinstance(optimizer, torch.optim.Optimizer) and name != "sparse gradients":
        optimizer.zero_grad()


def test_a_gradient_that_is_sparse_after_all_is_refused(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(VOCABULARY, 8))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.embedding(tokens, self.table, sparse=True)

    model = Lookup()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine, pytest.raises(ValueError, match=r"table.*sparse=False"):
        model(tokens()).sum().backward()


def test_the_original_optimizer_refuses_to_step(tmp_path: Path) -> None:
    model = small()
    mine = adamw(model)
    _, optimizer = offload.attach(model, mine, config(MIXED, tmp_path))
    with optimizer.engine:
        loss_of(model, tokens()).backward()
        with pytest.raises(RuntimeError, match="step the optimizer that attach returned"):
            mine.step()
        optimizer.step()


def test_copies_and_pickles_are_refused_or_right(tmp_path: Path) -> None:
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine as engine:
        torch_step(model, optimizer)
        values = {name: v.clone() for name, v in model.state_dict().items()}
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                call(engine)
            with pytest.raises(TypeError, match=r"state_dict.*hold a function that returns it"):
                call(optimizer)
        for parameter in (copy.deepcopy(model.norm.weight), copy.copy(model.norm.weight)):
            assert type(parameter) is nn.Parameter
            assert same_bits(parameter.detach(), values["norm.weight"])
        again = pickle.loads(pickle.dumps(model.norm.weight))
        assert type(again) is nn.Parameter
        assert same_bits(again.detach(), values["norm.weight"])
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert all(same_bits(loaded[name], values[name]) for name in values)
        torch_step(model, optimizer)


def test_a_copy_of_an_attached_model_is_a_plain_model(tmp_path: Path) -> None:
    model = small(tied=True)
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine as engine:
        torch_step(model, optimizer)
        expected = loss_of(model, tokens(8))
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copied, torch.load(buffer, weights_only=False)):
            assert all(type(p) is nn.Parameter for p in other.parameters())
            assert other.head.weight is other.embed.weight
            passes = engine.passes.number
            loss = loss_of(other, tokens(8))
            loss.backward()
            assert loss.item() == expected.item()
            assert engine.passes.number == passes
            assert other.head.weight.grad is not None
            other.zero_grad()
        expected.backward()
        gradient = model.head.weight.grad
        assert gradient is not None
        assert gradient.any()


# -- models on the meta device ----------------------------------------------------------------


@pytest.mark.parametrize("custom", [False, True])
def test_a_meta_model_starts_with_the_same_weights_everywhere(custom: bool, tmp_path: Path) -> None:
    def initialize(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, -0.1, 0.1)

    found = []
    for placement in PLACEMENTS:
        with torch.device("meta"):
            model = training.Net(layers=3, tied=True).to(torch.bfloat16)
        mine = adamw(model)
        torch.manual_seed(3)
        _, optimizer = offload.attach(
            model, mine, config(placement, tmp_path), initialize=initialize if custom else None
        )
        with optimizer.engine:
            start = {name: value.clone() for name, value in model.state_dict().items()}
            assert model.head.weight is model.embed.weight
            assert not any(p.is_meta for p in model.parameters())
            groups = [id(p) for group in optimizer.param_groups for p in group["params"]]
            assert groups == [id(p) for p in model.parameters()]
            torch_step(model, optimizer)
            found.append((start, loss_of(model, tokens()).item()))
    for start, loss in found:
        assert loss == found[0][1]
        assert all(same_bits(value, found[0][0][name]) for name, value in start.items())
        assert start["blocks.0.up.weight"].float().std() > 0.01
        assert torch.isfinite(start["blocks.2.down.weight"]).all()
        if not custom:
            assert torch.equal(start["blocks.1.norm.weight"], torch.ones(32).bfloat16())


class Tower(nn.Module):
    """A head that is tied and has a bias of its own; a scale that is not on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.head.weight = self.embed.weight
        with torch.device("cpu"):
            self.inner.bias = nn.Parameter(torch.full((16,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(x)))


def test_a_module_whose_parameters_belong_to_several_units(tmp_path: Path) -> None:
    found = []
    for placement in (training.RESIDENT, ("nvme", "nvme", "nvme")):
        with torch.device("meta"):
            model = Tower()
        torch.manual_seed(3)
        _, optimizer = offload.attach(model, adamw(model), config(placement, tmp_path))
        with optimizer.engine:
            assert model.inner.bias.eq(3).all()
            assert 0 < model.head.bias.abs().max() <= 0.25
            assert model.head.weight.float().std() > 0.1
            assert model.head.weight is model.embed.weight
            found.append([p.detach().clone() for p in model.parameters()])
            torch_step(model, optimizer)
    assert all(same_bits(one, other) for one, other in zip(*found))


def test_a_scheduler_goes_on_after_detach(tmp_path: Path) -> None:
    model = small()
    mine = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine, 0.5)
    _, optimizer = offload.attach(model, mine, config(MIXED, tmp_path))
    torch_step(model, optimizer)
    scheduler.step()
    offload.detach(model)
    torch_step(model, mine)
    scheduler.step()
    assert mine.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)


def test_a_meta_model_that_cannot_be_initialised_is_refused(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Own())
    mine = adamw(model)
    parameters = list(model.parameters())
    with nothing_leaks(), pytest.raises(ValueError, match=r"Own.*initialize="):
        offload.attach(model, mine, config(MIXED, tmp_path))
    assert all(p.is_meta for p in model.parameters())
    assert [id(p) for p in mine.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]


# -- several engines, and the end -------------------------------------------------------------


def test_two_engines_share_a_path(tmp_path: Path) -> None:
    everything = ("nvme", "nvme", "nvme")
    with attached(everything, tmp_path) as run:
        for number in range(3):
            plain(run, number)
        expected = result_of(run)
    with (
        nothing_leaks(),
        attached(everything, tmp_path) as one,
        attached(everything, tmp_path) as other,
    ):
        for number in range(3):
            plain(one, number)
            plain(other, number)
        assert_same(result_of(one), expected)
        assert_same(result_of(other), expected)
        del one, other
    assert list(tmp_path.iterdir()) == []


def hook_with_model(model: nn.Module, optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: list(model.parameters()))
    model.head.weight.register_hook(lambda gradient: model and gradient)  # type: ignore[union-attr]


def freeze(model: nn.Module, optimizer: Any) -> None:
    for wanted in (False, True):
        for parameter in model.parameters():
            parameter.requires_grad = wanted


@pytest.mark.parametrize("prepare", [hook_with_model, freeze])
def test_a_model_that_is_dropped_leaves_nothing(prepare: Any, tmp_path: Path) -> None:
    gc.collect()
    files = descriptors()
    with nothing_leaks():
        model = small()
        _, optimizer = offload.attach(
            model, adamw(model), config(("nvme", "nvme", "nvme"), tmp_path)
        )
        prepare(model, optimizer)
        torch_step(model, optimizer)
        assert descriptors() > files
        gone = weakref.ref(optimizer.engine)
        del model, optimizer, _
        gc.collect()
        assert gone() is None


def test_parameters_keep_class_and_hooks_of_the_model(tmp_path: Path) -> None:
    model = small()
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    model.norm.weight.register_hook(lambda gradient: gradient * 0)
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        assert type(model) is training.Net
        assert type(model.blocks[0]) is training.Block
        assert all(isinstance(p, OffloadedParameter) for p in model.parameters())
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        loss_of(model, tokens()).backward()
        assert seen == ["block"]
        assert not model.norm.weight.grad.any()  # type: ignore[union-attr]
        assert re.search("OffloadedParameter|Parameter", type(model.norm.weight).__name__)
