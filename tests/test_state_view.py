"""`optimizer.state`: reading is free, changing a copy is refused, assigning counts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from tests.training import Net, Run, attached, plain, same_bits


@contextmanager
def of_one_step(directory: Path) -> Iterator[Run]:
    build = lambda: Net(layers=2)  # noqa: E731
    with attached(("cpu", "cpu", "nvme"), directory, build=build) as made:
        plain(made, 0)
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with of_one_step(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One for all who change nothing of it."""
    with of_one_step(tmp_path_factory.mktemp("same")) as made:
        yield made


CHANGES: dict[str, Callable[[Any], object]] = {
    "zero_": lambda state: state["exp_avg"].zero_(),
    "a view": lambda state: state["exp_avg"].view(-1)[:3].fill_(1.0),
    "data": lambda state: state["exp_avg_sq"].data.mul_(2),
    "detach": lambda state: state["exp_avg_sq"].detach().clamp_(max=1e-3),
    "an item": lambda state: state["exp_avg"].__setitem__(0, 0.0),
    "in place": lambda state: state["step"].__iadd__(1),
    "out": lambda state: torch.add(state["exp_avg"], 1, out=state["exp_avg"]),
    "foreach": lambda state: torch._foreach_mul_([state["exp_avg"]], 0.5),
    "init": lambda state: nn.init.zeros_(state["exp_avg"]),
    "assigned": lambda state: state.__setitem__("exp_avg", torch.zeros(3)),
    "taken out": lambda state: state.pop("exp_avg"),
    "cleared": lambda state: state.clear(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_that_would_be_lost_is_refused(how: str, same: Run) -> None:
    weight: Any = same.model.head.weight
    with pytest.raises(RuntimeError, match=r"would be lost: clone\(\) it, change that, and assign"):
        CHANGES[how](same.optimizer.state[weight])
    with pytest.raises(ValueError, match="read-only"):
        same.optimizer.state[weight]["exp_avg"].numpy()[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(same.optimizer.state[weight]["exp_avg"])[0] = 0


def test_to_set_what_is_there_changes_nothing(run: Run) -> None:
    """As Lightning does, which moves states to the device where they are."""
    weight: Any = run.model.head.weight
    state = run.optimizer.state[weight]
    before = state["exp_avg"].clone()
    for name, value in state.items():
        state[name] = value.to("cpu")
        state[name] = value.clone()
    assert same_bits(run.optimizer.state[weight]["exp_avg"], before)
    for other in (before + 1e-3, before.bfloat16(), before[:1], None):
        with pytest.raises(RuntimeError, match="would be lost"):
            state["exp_avg"] = other


def test_reading_is_as_of_any_tensor(run: Run) -> None:
    weight: Any = run.model.head.weight
    state = run.optimizer.state[weight]
    moment = state["exp_avg"]
    assert isinstance(state, dict)
    assert type(moment + 1) is torch.Tensor
    assert type(moment.clone().zero_()) is torch.Tensor
    assert moment.norm() > 0
    torch.zeros_like(moment).copy_(moment)
    copied = copy.deepcopy(state)
    copied["exp_avg"].zero_()
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    again = torch.load(file)
    assert all(type(one) is torch.Tensor for one in again.values())
    assert same_bits(again["exp_avg"], moment.clone())


def test_a_state_that_is_assigned_counts(run: Run) -> None:
    weight: Any = run.model.head.weight
    state = run.optimizer.state[weight]
    run.optimizer.state[weight] = {**state, "exp_avg": state["exp_avg"] * 0.5}
    assert same_bits(run.optimizer.state[weight]["exp_avg"].clone(), state["exp_avg"] * 0.5)
    saved = run.optimizer.state_dict()
    saved["state"][0]["exp_avg"].zero_()
    saved["state"][0]["step"] += 3
    run.optimizer.load_state_dict(saved)
    first = run.optimizer.state[next(run.model.parameters())]
    assert not first["exp_avg"].any()
    assert first["step"] == 4
    del run.optimizer.state[weight]
    assert weight not in run.optimizer.state
    run.optimizer.state.clear()
    assert not len(run.optimizer.state)
    plain(run, 1)
    assert run.optimizer.state[weight]["step"] == 1


def test_a_model_that_returns_nothing_learns_its_order(tmp_path: Path) -> None:
    class Silent(Net):
        """Keeps its loss, and uses its blocks in another order than they are declared in."""

        def forward(self, tokens: torch.Tensor) -> Any:
            x = self.embed(tokens)
            for block in reversed(self.blocks):
                x = block(x)
            self.loss = self.head(self.norm(x)).float().logsumexp(-1).mean()

    with attached(("cpu", "cpu", "cpu"), tmp_path, build=Silent) as run:
        model: Any = run.model
        for _ in range(4):
            before = run.engine.passes.misses
            model(torch.arange(8).view(1, 8))
            model.loss.backward()
            run.step()
        assert run.engine.passes.misses == before


def test_units_served_apart_are_within_exposed_memory(tmp_path: Path) -> None:
    class Outer(nn.Module):
        """Calls a block inside another, so that both are in use together."""

        def __init__(self, inner: list[nn.Module]) -> None:
            super().__init__()
            self.own, self.inner = nn.Linear(64, 64), inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.inner:
                x = one(x)
            return self.own(x)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        blocks: list[nn.Module] = [nn.Linear(64, 64) for _ in range(7)]
        return nn.Sequential(*blocks, Outer(blocks))

    placement = ("nvme", "nvme", "nvme")
    options: dict[str, Any] = {"build": build, "device_memory": "128KiB"}
    with attached(placement, tmp_path, **options) as run:
        run.model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        run.step()
    with attached(placement, tmp_path, exposed_memory="4KiB", **options) as run:
        with pytest.raises(MemoryError, match="whose slot is in use by a unit that is used with"):
            run.model(torch.ones(1, 64, dtype=torch.bfloat16))
        assert isinstance(offload.engine_of(run.model), offload.Engine)
