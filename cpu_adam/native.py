"""The update by compiled kernels: the same functions as `reference`, the same bits, faster.

Each function checks its arguments as the reference does and hands addresses to the kernel in use
(see [Note: Choice]). Tensors on other devices, strided ones, and everything where no compiled
kernel serves go to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_adam import reference
from cpu_adam.checks import (
    GRADIENT_DTYPES,
    check_gradient,
    check_parts,
    check_span,
    check_step,
    check_sum,
)
from cpu_adam.choice import Kernel, kernel
from cpu_adam.formats import StateFormat
from cpu_adam.reference import AdamHyper

_FACTORS = 12  # numbers in a row of factors
_NONE = np.zeros((1, _FACTORS), np.float32)
_GRADIENTS = {dtype: number for number, dtype in enumerate(GRADIENT_DTYPES)}


def update(
    weight: Tensor,
    gradient: Tensor,
    record_views: Mapping[str, Tensor],
    hyper: AdamHyper,
    *,
    step: int,
    gradient_scale: float = 1.0,
    format: StateFormat,
) -> None:
    """One step of AdamW or Adam on a span, in place: see `reference.update`, which defines it."""
    slots = [record_views[slot.name] for slot in format.slots if slot.name in record_views]
    check_step(step)
    check_span(weight, gradient, slots, format)
    chosen = _kernel_for(weight, gradient, *slots)
    if chosen is None:
        reference.update(
            weight,
            gradient,
            record_views,
            hyper,
            step=step,
            gradient_scale=gradient_scale,
            format=format,
        )
        return
    rows = np.array([_row(weight, gradient, slots)], np.int64)
    factors = np.array([_factors(hyper, step, gradient_scale)], np.float32)
    _run(chosen, f"adam_{format.name}", gradient.dtype, rows, factors)
    _written(weight, *slots)


@dataclass(frozen=True, slots=True)
class Span:
    """Elements that are updated together: the tensors that `update` takes, and whose turn it is."""

    weight: Tensor
    gradient: Tensor
    record_views: Mapping[str, Tensor]
    turn: int = 0
    """Which of the turns handed to `UpdateTable.update` is this span's."""


class UpdateTable:
    """Many spans that are updated by one native call: built once, used every step.

    A call costs well under a microsecond per span on top of the memory's time, so that a model of
    many small parameters is updated as fast as one of few large ones.
    """

    def __init__(self, spans: Sequence[Span], format: StateFormat) -> None:
        """All of one format, with gradients of one dtype. Raises ValueError for anything else."""
        self._format = format
        self._spans = list(spans)
        self._slots = [
            [
                span.record_views[slot.name]
                for slot in format.slots
                if slot.name in span.record_views
            ]
            for span in spans
        ]
        for span, slots in zip(self._spans, self._slots):
            check_span(span.weight, span.gradient, slots, format)
        tensors = [x for s, slots in zip(spans, self._slots) for x in (s.weight, *slots)]
        self._native = _are_native(tensors)
        self._written = [x for x in tensors if not x.is_inference()]
        self._turns = 1 + max((span.turn for span in spans), default=-1)
        self._rows = np.array(
            [_row(s.weight, s.gradient, slots, s.turn) for s, slots in zip(spans, self._slots)],
            np.int64,
        ).reshape(len(self._spans), 4 + len(format.slots))
        self._look_at_gradients()

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Take other gradients, one for each span in their order, of the same shapes."""
        if len(gradients) != len(self._spans):
            raise ValueError(
                f"asked to set the gradients of {len(self._spans)} spans; found {len(gradients)}; "
                f"likely cause: a parameter without a gradient; try: a table of those that have one"
            )
        for k, (span, gradient) in enumerate(zip(self._spans, gradients)):
            check_span(span.weight, gradient, self._slots[k], self._format)
            self._spans[k] = Span(span.weight, gradient, span.record_views, span.turn)
        self._rows[:, 2] = [gradient.data_ptr() for gradient in gradients]
        self._look_at_gradients()

    def update(
        self, turns: Sequence[tuple[AdamHyper, int]], *, gradient_scale: float = 1.0
    ) -> None:
        """Update every span by its turn: the hyper-parameters and the number of the step."""
        for _, step in turns:
            check_step(step)
        if self._turns > len(turns):
            raise ValueError(
                f"asked for the update of spans by their turns; found a span whose turn is not "
                f"among the {len(turns)} given; likely cause: a parameter group was added after "
                f"the table was built; try: build it anew"
            )
        if not self._spans:
            return
        chosen = kernel()
        if chosen.native is None or not self._native or not self._native_gradients:
            for span in self._spans:
                hyper, step = turns[span.turn]
                reference.update(
                    span.weight,
                    span.gradient,
                    span.record_views,
                    hyper,
                    step=step,
                    gradient_scale=gradient_scale,
                    format=self._format,
                )
            return
        factors = [_factors(hyper, step, gradient_scale) for hyper, step in turns]
        operation = f"adam_{self._format.name}"
        _run(chosen, operation, self._dtype, self._rows, np.array(factors, np.float32))
        torch.autograd.graph.increment_version(self._written)

    def _look_at_gradients(self) -> None:
        self._native_gradients = _are_native(span.gradient for span in self._spans)
        dtypes = {span.gradient.dtype for span in self._spans} or {torch.float32}
        if len(dtypes) != 1:
            raise ValueError(
                f"asked for a table of spans with gradients of one dtype; found "
                f"{sorted(map(str, dtypes))}; likely cause: parameters of several dtypes; try: a "
                f"table for each"
            )
        (self._dtype,) = dtypes


def split(master: Tensor, weight: Tensor, residue: Tensor) -> None:
    """Write a float32 master as bfloat16 weight and int16 residue: see `reference.split`."""
    check_parts(weight, residue, master)
    chosen = _kernel_for(master, weight, residue)
    if chosen is None:
        return reference.split(master, weight, residue)
    _run_on(chosen, "split", master, weight, residue)
    _written(weight, residue)


def join(weight: Tensor, residue: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 master of a bfloat16 weight and its int16 residue: see `reference.join`."""
    check_parts(weight, residue, out)
    chosen = _kernel_for(weight, residue, *(() if out is None else (out,)))
    if chosen is None:
        return reference.join(weight, residue, out)
    master = torch.empty(weight.shape, dtype=torch.float32) if out is None else out
    _run_on(chosen, "join", weight, residue, master)
    _written(master)
    return master


def rebase(weight_old: Tensor, weight_new: Tensor, residue: Tensor) -> None:
    """Zero the residue of each element whose weight bits changed: see `reference.rebase`."""
    check_parts(weight_old, residue)
    check_parts(weight_new, residue)
    chosen = _kernel_for(weight_old, weight_new, residue)
    if chosen is None:
        return reference.rebase(weight_old, weight_new, residue)
    _run_on(chosen, "rebase", weight_old, weight_new, residue)
    _written(residue)


def accumulate(into: Tensor, gradient: Tensor) -> None:
    """into += gradient, in place, rounded once: see `reference.accumulate`."""
    check_sum(into, gradient)
    chosen = _kernel_for(into, gradient)
    if chosen is None:
        return reference.accumulate(into, gradient)
    name = "accumulate_float32" if into.dtype == torch.float32 else "accumulate_bfloat16"
    rows = np.array([[into.numel(), 0, gradient.data_ptr(), into.data_ptr()]], np.int64)
    _run(chosen, name, gradient.dtype, rows, _NONE)
    _written(into)


def sum_of_squares(gradient: Tensor) -> float:
    """The sum of squares in float64, in a fixed order: see `reference.sum_of_squares`."""
    check_gradient(gradient)
    chosen = _kernel_for(gradient)
    if chosen is None or chosen.native is None:
        return reference.sum_of_squares(gradient)
    number = _GRADIENTS[gradient.dtype]
    found: float = chosen.native.sum_of_squares(
        chosen.index, number, gradient.data_ptr(), gradient.numel()
    )
    return found


def _kernel_for(*tensors: Tensor) -> Kernel | None:
    """The compiled kernel for these tensors, or None where the reference serves them."""
    chosen = kernel()
    return chosen if chosen.native is not None and _are_native(tensors) else None


def _are_native(tensors: Iterable[Tensor]) -> bool:
    return all(x.is_cpu and x.is_contiguous() for x in tensors)


def _row(
    weight: Tensor, gradient: Tensor, slots: Sequence[Tensor], factors: int = 0
) -> tuple[int, ...]:
    addresses = (x.data_ptr() for x in (gradient, weight, *slots))
    return (weight.numel(), factors, *addresses)


def _factors(hyper: AdamHyper, step: int, scale: float) -> tuple[float, ...]:
    """The scalars of a step as the reference has them, in the order of src/kernel.inc.

    The native sequence always multiplies by `scale` and `shrink`, where 1 is the same as nothing;
    the sign of the scale climbs or descends.
    """
    decay = hyper.weight_decay
    l2 = decay != 0.0 and not hyper.decoupled
    decoupled = decay != 0.0 and hyper.decoupled
    return (
        -scale if hyper.maximize else scale,
        decay if l2 else 0.0,
        1.0 - hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        math.sqrt(1.0 - hyper.beta2**step),
        hyper.eps,
        1.0 - hyper.lr * decay if decoupled else 1.0,
        hyper.lr / (1.0 - hyper.beta1**step),
        float(l2),
        *(0.0,) * (_FACTORS - 10),
    )


def _run_on(chosen: Kernel, operation: str, *tensors: Tensor) -> None:
    """An operation without gradient and factors, on whole tensors."""
    row = (tensors[0].numel(), 0, *(x.data_ptr() for x in tensors))
    _run(chosen, operation, GRADIENT_DTYPES[0], np.array([row], np.int64), _NONE)


def _run(
    chosen: Kernel,
    operation: str,
    gradient: torch.dtype,
    rows: npt.NDArray[np.int64],
    factors: npt.NDArray[np.float32],
) -> None:
    assert chosen.native is not None
    number = chosen.native.OPERATIONS.index(operation)
    chosen.native.run(chosen.index, number, _GRADIENTS[gradient], rows, factors)


def _written(*tensors: Tensor) -> None:
    """Tell autograd what was changed in place, as torch's own operations do."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
