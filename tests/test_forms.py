"""Parameters that get another shape, dtype or order after attach: what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import Config
from tests.small import adamw
from tests.training import RESIDENT


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))


def config(placement: tuple[Any, Any, Any], directory: Path) -> Config:
    params, gradients, optimizer = placement
    return Config(params=params, gradients=gradients, optimizer=optimizer, nvme_path=str(directory))


def resized(model: Any) -> None:
    model[0].weight.data = torch.zeros(10, 8)


def transposed(model: Any) -> None:
    model[0].weight.data = model[0].weight.detach().t()


BY_RESIZING = (
    "shape (10, 8)",
    "shape (8, 8)",
    "likely the model was resized after attach",
    "after detach(), and attach it again",
)
BY_HALF = (
    "torch.float16",
    "torch.float32",
    "likely the model was converted after attach, by half(), and float16 weights cannot be trained",
    "make it bfloat16",
    "float32 and train under torch.autocast",
)
BY_CONVERTING = ("torch.bfloat16", "torch.float32", "converted after attach: do that before attach")
CHANGES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "resized": (resized, BY_RESIZING),
    "half": (lambda model: model.half(), BY_HALF),
    "bfloat16": (lambda model: model.bfloat16(), BY_CONVERTING),
    "transposed": (transposed, ("strides", "contiguous", "transposed", "detach()")),
}


@pytest.mark.parametrize("placement", [("cpu", "cpu", "nvme"), RESIDENT], ids="-".join)
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_form_is_told_by_its_name(how: str, placement: Any, tmp_path: Path) -> None:
    """Where it happens, or, of what is all on the device, at the step."""
    change, parts = CHANGES[how]
    model = layers()
    _, optimizer = offload.attach(model, adamw(model), config(placement, tmp_path))
    with optimizer.engine:
        model(torch.ones(1, 8)).sum().backward()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            gradient = model[0].weight.grad
            model[0].weight.grad = None
            change(model)
            model[0].weight.grad = gradient.new_ones(model[0].weight.shape, dtype=_dtype(model))
            optimizer.step()
    told = str(caught.value)
    assert told.startswith("0.weight")
    assert [part for part in parts if part not in told] == [], told
    others = {word for word in ("resized", "converted", "router") if word not in "".join(parts)}
    assert how == "transposed" or not [word for word in others if word in told], told


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = model[0].weight.dtype
    return dtype


def test_frozen_weights_may_be_half(tmp_path: Path) -> None:
    """So nothing is said of what can be trained."""
    model = layers()
    offload.attach(model, None, config(("cpu", "cpu", "cpu"), tmp_path))
    with offload.engine_of(model), pytest.raises(ValueError, match="do that before attach") as told:
        model.half()
    assert "cannot be trained" not in str(told.value)
    half = layers().half()
    offload.attach(half, None, config(("cpu", "cpu", "cpu"), tmp_path))
    offload.engine_of(half).close()


class Router(nn.Linear):
    """Makes itself float32 in its first forward, as that of Switch Transformers does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.float32)
        return super().forward(x.float())


def test_a_module_that_converts_itself_is_told_of_that_forward(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Router(8, 8)).bfloat16()

    x, placed = torch.ones(1, 8, dtype=torch.bfloat16), config(("cpu", "cpu", "cpu"), tmp_path)
    routed = model()
    _, optimizer = offload.attach(routed, adamw(routed), placed)
    advised = r"^1\.weight\.data .* torch\.float32, .* torch\.bfloat16, .*; likely its own forward "
    with optimizer.engine, pytest.raises(ValueError, match=rf"{advised}.*run one forward before"):
        routed(x)
    routed = model()
    routed(x)  # What is advised works.
    _, optimizer = offload.attach(routed, adamw(routed), placed)
    with optimizer.engine:
        routed(x).sum().backward()
        optimizer.step()
