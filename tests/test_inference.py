"""torch.inference_mode: whatever is done first in it, a model trains after it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests import training
from tests.covering import by_turns
from tests.small import MIXED, PLACEMENTS, adamw, config, small, tokens, torch_step
from tests.training import RESIDENT, Positioned, Run, assert_same, attached, loss_of, plain, train


def first_in_inference(run: Run, number: int) -> None:
    with torch.inference_mode():
        run.loss()
    plain(run, number)


def first_without_gradients(run: Run, number: int) -> None:
    with torch.no_grad():
        run.loss()
    plain(run, number)


@pytest.mark.parametrize(("build", "placement"), by_turns([None, Positioned], PLACEMENTS))
def test_units_first_used_in_it_are_trained(
    build: Any, placement: tuple[str, str, str], tmp_path: Path
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
    assert all(training.same_bits(one, other) for one, other in zip(*weights))
