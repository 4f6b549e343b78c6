"""Tables of spans: the memory that they were built for, and the gradients that they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cpu_adam
from cpu_adam import Part, Span, UpdateTable, format_for, memory, update_parts
from cpu_adam.memory import Places
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


@pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")
@pytest.mark.parametrize("elements", [7, 1 << 20])
def test_a_failure_to_count_versions_is_told_when_all_is_done(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for fails in (False, True):
        weight, built, hyper = table(elements)
        built.set_gradients([torch.ones(elements)])
        before = weight._version
        if fails:
            monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda xs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                built.update([(hyper, 1)])
        else:
            built.update([(hyper, 1)])
            assert weight._version > before
        weights.append(weight)
    assert torch.equal(*weights)
    assert (weights[0] < 1).all()


@pytest.mark.parametrize("at", range(3))
def test_spans_that_share_memory_are_refused(at: int) -> None:
    """An element of a weight or of a moment."""
    base = torch.zeros(31)
    arrays = [list(torch.zeros(3, 16)) for _ in range(3)]
    names, fmt = ("exp_avg", "exp_avg_sq"), format_for("float32", "exact")
    UpdateTable([Span(w, None, dict(zip(names, moments))) for w, *moments in arrays], fmt)
    arrays[0][at], arrays[2][at] = base[:16], base[15:]
    spans = [Span(w, None, dict(zip(names, moments))) for w, *moments in arrays]
    with pytest.raises(ValueError, match=FOUR_PARTS) as caught:
        UpdateTable(spans, fmt)
    assert "number 2 of 3" in str(caught.value)
    UpdateTable(spans[:2], fmt)


def test_parts_that_overlap_are_refused() -> None:
    weight, gradient = torch.zeros(16), torch.ones(16)
    slots = {name: torch.zeros(16) for name in ("exp_avg", "exp_avg_sq")}
    by = cpu_adam.AdamHyper(
        lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True
    )
    fmt, turns = format_for("float32", "exact"), [(by, 1)]
    parts = [Part(8, 4), Part(0, 8), Part(4, 0), Part(12, 4)]  # One of nothing is in nobody's way.
    with pytest.raises(ValueError, match=FOUR_PARTS):
        update_parts(weight, gradient, slots, [*parts, Part(11, 1)], turns, format=fmt)
    assert not weight.any()
    update_parts(weight, gradient, slots, parts, turns, format=fmt)
    assert weight.all()


def test_tables_see_the_same_with_and_without_the_interface_of_torch_in_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = torch.ones(96)
    tensors = [base[:64], torch.zeros(3, 5).t(), torch.ones(7, dtype=torch.uint8), base[96:]]
    asking = Places(tensors)
    if cpu_adam.kernel().native is not None:
        assert asking._native is not None  # Every torch that is served has what is asked.
    monkeypatch.setattr(memory, "_questions", lambda: None)
    plain = Places(tensors)
    assert plain._native is None
    monkeypatch.undo()
    changes: list[Any] = [
        lambda: base.untyped_storage().resize_(1 << 20),  # elsewhere
        lambda: tensors[1].untyped_storage().resize_(0),
        lambda: tensors[2].untyped_storage().resize_(3),
    ]
    for change in changes:
        before = Places(tensors), plain
        assert [one.moved() for one in before] == [False, False]
        change()
        assert [one.moved() for one in before] == [True, True]
        monkeypatch.setattr(memory, "_questions", lambda: None)
        plain = Places(tensors)
        monkeypatch.undo()


def test_other_answers_than_those_of_python_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if a later torch gave the number of elements in the place of the storage's size."""
    real = memory._questions()
    if real is None or cpu_adam.kernel().native is None:
        pytest.skip("nobody to ask")
    monkeypatch.setattr(memory, "_questions", lambda: real[::-1].copy())
    tensors = [torch.ones(5)]
    found = Places(tensors)
    assert found._native is None
    assert not found.moved()
    tensors[0].untyped_storage().resize_(8)
    assert found.moved()
