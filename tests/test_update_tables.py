"""Tables of spans: the memory that they were built for, and the gradients that they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cpu_adam
from cpu_adam import Span, UpdateTable, format_for
from tests.optimizers import FOUR_PARTS, freed


def table(elements: int) -> tuple[Tensor, UpdateTable, Any]:
    weight = torch.ones(elements)
    slots = {name: torch.zeros(elements) for name in ("exp_avg", "exp_avg_sq")}
    built = UpdateTable([Span(weight, None, slots)], format_for("float32", "exact"))
    hyper = cpu_adam.AdamHyper(
        lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True
    )
    return weight, built, hyper


def test_a_table_holds_the_memory_that_it_was_built_for() -> None:
    weight, built, hyper = table(1 << 16)
    first = weight.detach()
    weight.data = torch.full((1 << 16,), 7.0)
    built.update([(hyper, 1)], gradients=[torch.ones(1 << 16)])
    assert (weight == 7).all()
    assert (first < 1).all()
    for resized in (lambda: freed(first, 1 << 17), lambda: first.resize_(1 << 20)):
        resized()
        with pytest.raises(ValueError, match=FOUR_PARTS):
            built.update([(hyper, 2)], gradients=[torch.ones(1 << 16)])


def test_a_table_holds_the_memory_of_its_own_gradients() -> None:
    weight, built, hyper = table(1 << 16)
    gradient = torch.ones(1 << 16)
    built.set_gradients([gradient])
    kept = gradient.detach()
    gradient.data = torch.full((1 << 16,), torch.nan)
    built.update([(hyper, 1)])
    assert (weight < 1).all()
    kept.fill_(0.0)
    before = weight.clone()
    built.update([(hyper, 2)])
    assert (weight < before).all()  # by its momentum: the gradient is finite, and was read anew
    for resized in (lambda: freed(kept), lambda: kept.untyped_storage().resize_(1 << 20)):
        resized()
        with pytest.raises(ValueError, match=FOUR_PARTS):
            built.update([(hyper, 3)])
    built.set_gradients([torch.ones(1 << 16)])
    built.update([(hyper, 3)])


def test_a_table_reads_its_gradients_where_no_kernel_can() -> None:
    weight, built, hyper = table(8)
    conjugate = torch.ones(8, dtype=torch.complex64).mul_(1j).conj()
    built.set_gradients([conjugate.imag])  # the opposite of what lies in memory
    assert conjugate.imag.is_neg()
    built.update([(hyper, 1)])
    assert (weight > 1).all()


@pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")
def test_calls_of_one_table_do_not_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, built, hyper = table(16)
    rows: list[Any] = []
    original = cpu_adam.native._run

    def keeping(chosen: Any, operation: str, dtype: Any, row: Any, *rest: Any) -> Any:
        rows.append(row)
        return original(chosen, operation, dtype, row, *rest)

    monkeypatch.setattr(cpu_adam.native, "_run", keeping)
    first, second = torch.ones(16), torch.ones(16)
    for gradient in (first, second):
        built.update([(hyper, 1)], gradients=[gradient])
    assert [first.data_ptr(), second.data_ptr()] == [int(row[0, 3]) for row in rows]
