"""torch.inference_mode: whatever is done first in it, a model trains after it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.small import MIXED, PLACEMENTS, adamw, config, small, tokens, torch_step
from tests.training import (
    RESIDENT,
    Positioned,
    Run,
    alone,
    assert_same,
    attached,
    config_of,
    loss_of,
    plain,
    same_bits,
    train,
)


def first_in_inference(run: Run, number: int) -> None:
    with torch.inference_mode():
        run.loss()
    plain(run, number)


def first_without_gradients(run: Run, number: int) -> None:
    with torch.no_grad():
        run.loss()
    plain(run, number)


@pytest.mark.parametrize("build", [None, Positioned], ids=["", "positions"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_units_first_used_in_it_are_trained(
    placement: tuple[str, str, str], build: Any, tmp_path: Path
) -> None:
    options = {} if build is None else {"build": build}
    expected = train(RESIDENT, tmp_path, first_without_gradients, **options)
    assert_same(train(placement, tmp_path, first_in_inference, **options), expected)


def test_gradients_first_seen_in_it_go_on(tmp_path: Path) -> None:
    norms = []
    for inference in (True, False):
        with attached(("cpu", "nvme", "cpu"), tmp_path) as run:
            run.loss().backward()
            with torch.inference_mode() if inference else nullcontext():
                held = [p.grad for p in run.model.parameters()]
            run.loss().backward()
            norms.append([g.float().norm().item() for g in held if g is not None])
            run.step()
    assert norms[0] == norms[1]


@pytest.mark.parametrize("placement", [RESIDENT, MIXED], ids="-".join)
def test_attached_and_detached_in_it(placement: tuple[str, str, str], tmp_path: Path) -> None:
    weights = []
    for mode in (torch.inference_mode, nullcontext):
        model = small()
        optimizer = adamw(model)
        torch_step(model, optimizer)
        with mode():
            _, attached_optimizer = offload.attach(model, optimizer, config(placement, tmp_path))
        torch_step(model, attached_optimizer)
        loss_of(model, tokens()).backward()
        with mode():
            offload.detach(model)
        optimizer.step()
        torch_step(model, optimizer)
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(same_bits(one, other) for one, other in zip(*weights))


def test_a_model_built_in_it_is_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"weight was made under torch\.inference_mode"):
        offload.attach(model, None, config(RESIDENT, tmp_path))


class Encoded(nn.Module):
    """Torch's own transformer, given masked places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([[False, False, True], [False, False, False]])
        return self.encoder(x, src_key_padding_mask=mask)  # type: ignore[no-any-return]


def encoded(placement: tuple[str, str, str] | None, directory: Path) -> list[torch.Tensor]:
    """What it gives right after a step, and once more, masked places too."""
    torch.manual_seed(1)
    model = Encoded()
    optimizer = alone(adamw(model))
    if placement is not None:
        model, optimizer = offload.attach(model, optimizer, config_of(placement, directory))
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2))
    model(x).pow(2).sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        found = [model(x), model(x)]
    if placement is not None:
        optimizer.engine.close()
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("placement", [("device", "device", "cpu"), ("cpu", "cpu", "cpu")])
def test_torchs_own_transformer_evaluates_as_alone(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """By its fast path where it has no hooks, see [Note: Fast path]."""
    torch.backends.mha.set_fastpath_enabled(placement[0] == "device")
    try:
        expected = encoded(None, tmp_path)
        torch.backends.mha.set_fastpath_enabled(True)
        found = encoded(placement, tmp_path)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("placement", [("device", "device", "cpu"), ("cpu", "cpu", "cpu")])
def test_that_it_evaluates_otherwise_is_told(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    model = Encoded()
    _, optimizer = offload.attach(model, adamw(model), config_of(placement, tmp_path))
    with optimizer.engine as engine:
        told = [one for one in engine.notices if "fast path" in one]
    assert len(told) == (placement[0] == "cpu")
