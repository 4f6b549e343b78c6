"""An attach that fails leaves the model and the optimizer as they were."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import hooks
from offload.states import States
from tests.training import ALL_PLACEMENTS, RESIDENT, Net, config_of, some_fast


def fail_half_way(
    placement: tuple[str, str, str], on: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attach a model that lies `on` a device and has gradients, and look at it afterwards."""
    torch.manual_seed(1)
    model = Net().to(torch.bfloat16).to(on)
    model.register_buffer("told", torch.ones(3, device=on))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    groups = [list(group["params"]) for group in optimizer.param_groups]
    held = [(p, p.detach().clone(), p.grad) for p in model.parameters()]

    def broken(self: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(States, "clear", broken)
        with pytest.raises(ZeroDivisionError):
            offload.attach(model, optimizer, config_of(placement, directory))
    gc.collect()
    for parameter, before, gradient in held:
        assert type(parameter) is torch.nn.Parameter
        assert parameter.device == before.device
        assert torch.equal(parameter, before)
        assert parameter.grad is gradient
    assert model.told.device.type == on
    for old, group in zip(groups, optimizer.param_groups):
        assert list(map(id, group["params"])) == list(map(id, old))
    optimizer.step()
    assert not list(directory.iterdir())
    model(torch.zeros(1, 4, dtype=torch.long, device=on)).sum().backward()


@pytest.mark.parametrize(
    "placement", some_fast([("nvme", "cpu", "nvme"), RESIDENT, *ALL_PLACEMENTS]), ids="-".join
)
def test_an_attach_that_fails_leaves_all_as_it_was(
    placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_half_way(placement, "cpu", tmp_path, monkeypatch)


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("nvme", "device", "cpu"), RESIDENT])
def test_a_graph_of_before_has_its_gradients_or_is_refused(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """It saved parameters as they are, and the backward would find what stands in their place."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).view(1, 8)
    model(tokens).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    loss = model(tokens).sum()
    _, attached = offload.attach(model, optimizer, config_of(placement, tmp_path))
    with attached.engine:
        if placement == RESIDENT:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            attached.zero_grad()
            model(tokens).sum().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("device", "device", "cpu")])
def test_values_beside_one_that_cannot_be_initialised_stay(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    model = Net()
    up = model.blocks[1].up
    up.bias = torch.nn.Parameter(torch.zeros(up.out_features, device="meta"))
    held = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    optimizer = torch.optim.AdamW(model.parameters())

    def initialize(module: torch.nn.Module) -> None:
        torch.nn.init.zeros_(module.weight)  # type: ignore[arg-type]
        raise OSError("no such file, on purpose")

    with pytest.raises(OSError, match="on purpose"):
        offload.attach(model, optimizer, config_of(placement, tmp_path), initialize=initialize)
    assert up.bias.is_meta
    for name, value in held.items():
        assert torch.equal(model.get_parameter(name), value)
    _, attached = offload.attach(
        model, optimizer, config_of(placement, tmp_path), initialize=lambda one: None
    )
    with attached.engine:
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in held.items())


@pytest.mark.parametrize("broken", range(0, 24, 5))
def test_hooks_that_cannot_all_be_put_on_are_taken_off(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = Net(), list[Any]()
    optimizer = torch.optim.AdamW(model.parameters())
    config = config_of(("cpu", "cpu", "cpu"), tmp_path)

    def poor(*args: Any, **options: Any) -> Any:
        made.append(args)
        if len(made) > broken:
            raise MemoryError("on purpose")
        return inner(*args, **options)

    inner = hooks._hook
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "_hook", poor)
        with pytest.raises(MemoryError, match="on purpose"):
            offload.attach(model, optimizer, config)
    model.extra = torch.nn.Linear(2, 2)
    del model.extra
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    offload.attach(model, optimizer, config)[1].engine.close()
