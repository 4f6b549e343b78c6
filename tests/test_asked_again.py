"""What finds no memory, or a drive that fails once, is told; asked again it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.small import adamw, config, small, tokens
from tests.training import attached, loss_of, same_bits

ON_CPU = ("device", "device", "cpu")


@contextmanager
def no_memory(method: str, after: int = 0) -> Iterator[list[int]]:
    """One call of a method of tensors finds no memory, after so many that do; how many came."""
    calls: list[int] = []
    torchs: Callable[..., Any] = getattr(torch.Tensor, method)

    def refused(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == after:
            raise MemoryError("there is none just now")
        return torchs(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, method, refused)
        yield calls


def test_a_gradient_whose_copy_found_no_memory_is_still_owed(tmp_path: Path) -> None:
    """It is the lanes' until they have updated its resident."""
    with attached(ON_CPU, tmp_path) as run:
        run.loss().backward()
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        want = weight.grad.clone()
        run.optimizer.step()
        with no_memory("clone"), pytest.raises(MemoryError):
            weight.grad  # noqa: B018
        assert same_bits(weight.grad, want)


@pytest.mark.parametrize("after", [0, 3])
def test_a_model_whose_gradients_found_no_memory_stays_attached(after: int, tmp_path: Path) -> None:
    """They are of another dtype in the engine, or come from another memory."""
    model = small(torch.bfloat16)
    settings = config(("cpu", "cpu", "cpu"), tmp_path, gradient_dtype="fp32")
    offload.attach(model, adamw(model), settings)
    classes = {type(p) for p in model.parameters()}
    loss_of(model, tokens()).backward()
    want = [p.grad.to(p.dtype) for p in model.parameters()]  # type: ignore[union-attr]
    with no_memory("to", after) as calls, pytest.raises(MemoryError):
        offload.detach(model)
    assert len(calls) == after + 1
    assert {type(p) for p in model.parameters()} == classes
    loss_of(model, tokens())
    offload.detach(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(same_bits(p.grad, one) for p, one in zip(model.parameters(), want))  # type: ignore
