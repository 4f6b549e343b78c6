"""The update by compiled kernels: the same functions as `reference`, the same bits, faster.

Each function checks its arguments and hands addresses to the kernel in use (see [Note: Choice]).
Strided tensors, and everything where no kernel serves, go to the reference.

[Note: Rows]
A native call takes a table of integers, a row for each span: its number of elements, the row of
factors of its step, where it starts in its parameter, then the addresses of its gradient, its
weight and its slots (src/sweep.h). `update_parts` lays out the rows of one call, an `UpdateTable`
those of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_adam import reference
from cpu_adam.checks import GRADIENT_DTYPES, check_dtypes, check_span
from cpu_adam.choice import Kernel, kernel
from cpu_adam.formats import StateFormat
from cpu_adam.hyper import Hyper
from cpu_adam.memory import are_native
from cpu_adam.spans import ADDRESS_COLUMNS, Part, Span, Steps, check_parts, check_steps

Rows = npt.NDArray[np.int64]
"""See [Note: Rows]."""

GRADIENT_NUMBERS = {dtype: number for number, dtype in enumerate(GRADIENT_DTYPES)}


def update(
    weight: Tensor,
    gradient: Tensor,
    record_views: Mapping[str, Tensor],
    hyper: Hyper,
    *,
    step: int,
    gradient_scale: float = 1.0,
    format: StateFormat,
    first_element: int = 0,
) -> None:
    """One step of a rule on a span, in place: see `reference.update`, which defines it."""
    update_parts(
        weight,
        gradient,
        record_views,
        [Part(0, weight.numel(), first_element)],
        [(hyper, step)],
        gradient_scale=gradient_scale,
        format=format,
    )


def update_parts(
    weight: Tensor,
    gradient: Tensor,
    record_views: Mapping[str, Tensor],
    parts: Sequence[Part],
    steps: Steps,
    *,
    gradient_scale: float = 1.0,
    format: StateFormat,
    workspace: Tensor | None = None,
) -> None:
    """Update parts of one chunk, each by its step, by one native call.

    weight, gradient, record_views: of the whole chunk, as `reference.update` takes them. What lies
    in none of the parts is left alone, but for what follows the end of a parameter in its last
    group. steps: hyper-parameters and number of each. workspace: for tensors that no kernel serves,
    see `reference.update`. Raises ValueError where something does not fit or parts overlap, before
    anything is changed.
    """
    slots = [record_views[slot.name] for slot in format.slots if slot.name in record_views]
    check_span(weight, gradient, slots, format)
    check_steps(steps, format)
    check_parts(parts, steps, weight.numel(), format)
    chosen = _kernel_for(weight, gradient, *slots)
    if chosen is None:
        spans, gradients = [], []
        for part in parts:
            here = slice(part.start, part.start + part.elements)
            cut = reference.cut(record_views, format, part.start, part.elements)
            spans.append(Span(weight[here], cut, part.step, part.first_element))
            gradients.append(gradient[here])
        return _by_reference(spans, gradients, steps, gradient_scale, format, workspace)
    start, elements, first, step, _ = np.array(parts, np.int64).reshape(len(parts), 5).T
    columns = [elements, step, first]
    columns += [x.data_ptr() + start * x.itemsize for x in (gradient, weight)]
    for x, slot in zip(slots, format.slots):
        columns.append(x.data_ptr() + start // slot.elements_per_item * slot.bytes_per_item)
    rows = np.stack(columns, axis=1)
    _run(chosen, format.name, gradient.dtype, rows, factor_rows(chosen, steps, gradient_scale))
    _written([weight, *slots])


class UpdateTable:
    """Spans of one format with tensors of their own, updated by one native call: laid out once.

    Weights and slots are held, and stay where they are; each step brings its own gradients.
    """

    def __init__(self, spans: Sequence[Span], format: StateFormat) -> None:
        """Raises ValueError where tensors are not of the format."""
        self._format, self._spans = format, spans
        rows = []
        tensors: list[Tensor] = []
        for span in spans:
            slots = [span.record_views[slot.name] for slot in format.slots]
            check_span(span.weight, None, slots, format)
            at = (x.data_ptr() for x in (span.weight, *slots))
            rows.append((span.weight.numel(), span.step, span.first_element, 0, *at))
            tensors += [span.weight, *slots]
        columns = ADDRESS_COLUMNS + 2 + len(format.slots)
        self._rows = np.array(rows, np.int64).reshape(len(spans), columns)
        self._native = are_native(tensors)
        self._written = [x for x in tensors if not x.is_inference()]

    def update(
        self, steps: Steps, gradients: Sequence[Tensor], *, gradient_scale: float = 1.0
    ) -> None:
        """Update every span by its step: the hyper-parameters and their number.

        gradients: of one dtype, one for each span and with as many elements, contiguous and in CPU
        memory; that is the caller's to see to. Raises ValueError for steps of another rule.
        """
        check_steps(steps, self._format)
        chosen = kernel()
        if chosen.native is None or not self._native or not gradients:
            flat = [gradient.reshape(-1) for gradient in gradients]
            return _by_reference(self._spans, flat, steps, gradient_scale, self._format)
        at = np.fromiter(map(Tensor.data_ptr, gradients), np.int64, len(gradients))
        self._rows[:, ADDRESS_COLUMNS] = at
        factors = factor_rows(chosen, steps, gradient_scale)
        _run(chosen, self._format.name, gradients[0].dtype, self._rows, factors)
        torch.autograd.graph.increment_version(self._written)


def split(master: Tensor, weight: Tensor, residue: Tensor) -> None:
    """Write a float32 master as bfloat16 weight and int16 residue: see `reference.split`."""
    check_dtypes((master, torch.float32), (weight, torch.bfloat16), (residue, torch.int16))
    chosen = _kernel_for(master, weight, residue)
    if chosen is None:
        return reference.split(master, weight, residue)
    _run_on(chosen, "split", master, weight, residue)
    _written([weight, residue])


def join(weight: Tensor, residue: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 master of a bfloat16 weight and its int16 residue: see `reference.join`."""
    master = torch.empty_like(weight, dtype=torch.float32) if out is None else out
    check_dtypes((weight, torch.bfloat16), (residue, torch.int16), (master, torch.float32))
    chosen = _kernel_for(weight, residue, master)
    if chosen is None:
        return reference.join(weight, residue, master)
    _run_on(chosen, "join", weight, residue, master)
    _written([master])
    return master


def accumulate(into: Tensor, gradient: Tensor) -> None:
    """into += gradient, in place, rounded once: see `reference.accumulate`."""
    narrow = into.dtype == torch.bfloat16
    wanted = torch.bfloat16 if narrow else GRADIENT_DTYPES
    check_dtypes((into, (torch.float32, torch.bfloat16)), (gradient, wanted))
    chosen = _kernel_for(into, gradient)
    if chosen is None:
        return reference.accumulate(into, gradient)
    name = "accumulate_bfloat16" if narrow else "accumulate_float32"
    _run_on(chosen, name, gradient, into, gradient=gradient.dtype)
    _written([into])


def square_sums(
    gradient: Tensor,
    first_leaf: int = 0,
    workspace: Tensor | None = None,
    wait: Callable[[], None] | None = None,
) -> list[reference.Node]:
    """The sum of squares of part of a gradient, by subtrees: see `reference.square_sums`.

    workspace, wait: for a tensor that no kernel serves.
    """
    check_dtypes((gradient, GRADIENT_DTYPES))
    chosen = _kernel_for(gradient)
    if chosen is None or chosen.native is None:
        return reference.square_sums(gradient, first_leaf, workspace, wait)
    at = GRADIENT_NUMBERS[gradient.dtype], gradient.data_ptr(), gradient.numel()
    return cast("list[reference.Node]", chosen.native.square_sums(chosen.index, *at, first_leaf))


def sum_of_squares(gradient: Tensor) -> float:
    """The sum of squares in float64, in a fixed order: see `reference.square_sums`."""
    return reference.total(square_sums(gradient))


def _kernel_for(*tensors: Tensor) -> Kernel | None:
    """The compiled kernel for these tensors, or None where the reference serves them."""
    chosen = kernel()
    return chosen if are_native(tensors) and chosen.native is not None else None


def _by_reference(
    spans: Sequence[Span],
    gradients: Sequence[Tensor],
    steps: Steps,
    scale: float,
    format: StateFormat,
    workspace: Tensor | None = None,
) -> None:
    for span, gradient in zip(spans, gradients):
        hyper, step = steps[span.step]
        reference.update(
            span.weight,
            gradient,
            span.record_views,
            hyper,
            step=step,
            gradient_scale=scale,
            format=format,
            first_element=span.first_element,
            workspace=workspace,
        )


def factor_rows(chosen: Kernel, steps: Steps, scale: float) -> npt.NDArray[np.float32]:
    """A row of the kernels' factors for each step, padded with zeros."""
    assert chosen.native is not None
    rows = np.zeros((len(steps), chosen.native.FACTORS), np.float32)
    with np.errstate(over="ignore"):  # A scale may be infinite, as the reference takes it.
        for row, (hyper, step) in zip(rows, steps):
            factors = hyper.factors(step, scale)
            row[: len(factors)] = [*factors.values()]
    return rows


def _run_on(
    chosen: Kernel, operation: str, *tensors: Tensor, gradient: torch.dtype = GRADIENT_DTYPES[0]
) -> None:
    """An operation without factors, on whole tensors; one without gradient has the first."""
    assert chosen.native is not None
    row = (tensors[0].numel(), 0, 0, *(x.data_ptr() for x in tensors))
    factors = np.zeros((1, chosen.native.FACTORS), np.float32)
    _run(chosen, operation, gradient, np.array([row], np.int64), factors)


def _run(
    chosen: Kernel,
    operation: str,
    gradient: torch.dtype,
    rows: Rows,
    factors: npt.NDArray[np.float32],
) -> None:
    """One native call."""
    assert chosen.native is not None
    number = chosen.native.OPERATIONS.index(operation)
    chosen.native.run(chosen.index, number, GRADIENT_NUMBERS[gradient], rows, factors)


def _written(tensors: Iterable[Tensor]) -> None:
    """Tell autograd what was changed in place, as torch's own operations do."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
