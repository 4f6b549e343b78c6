"""The update by compiled kernels: the same functions as `reference`, the same bits, faster.

Each function checks its arguments as the reference does and hands addresses to the kernel in use
(see [Note: Choice]). Tensors on other devices, strided ones, and everything where no compiled
kernel serves go to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_adam import reference
from cpu_adam.checks import (
    GRADIENT_DTYPES,
    check_apart,
    check_gradient,
    check_halves,
    check_parts,
    check_span,
    check_start,
    check_sum,
    check_turns,
)
from cpu_adam.checksum import crc32c
from cpu_adam.choice import Kernel, kernel
from cpu_adam.formats import StateFormat
from cpu_adam.hyper import Hyper
from cpu_adam.memory import Addresses, Places, are_native, readable
from cpu_adam.spans import ADDRESS_COLUMNS, Part, Span, Turns

_GRADIENTS = {dtype: number for number, dtype in enumerate(GRADIENT_DTYPES)}

Checksums = npt.NDArray[np.uint32]
"""CRC32C of what an update has written: of the weight, then of each slot in the format's order."""


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
    checksums: bool = False,
) -> Checksums | None:
    """One step of a rule on a span, in place: see `reference.update`, which defines it.

    Returns the checksums of what it has written where they are asked for.
    """
    found = update_parts(
        weight,
        gradient,
        record_views,
        [Part(0, weight.numel(), first_element)],
        [(hyper, step)],
        gradient_scale=gradient_scale,
        format=format,
        checksums=checksums,
    )
    return None if found is None else found[0]


def update_parts(
    weight: Tensor,
    gradient: Tensor,
    record_views: Mapping[str, Tensor],
    parts: Sequence[Part],
    turns: Turns,
    *,
    gradient_scale: float = 1.0,
    format: StateFormat,
    checksums: bool = False,
    workspace: Tensor | None = None,
) -> Checksums | None:
    """Update parts of one chunk, each by its turn, by one native call.

    weight, gradient, record_views: of the whole chunk, as `reference.update` takes them. What lies
    in none of the parts is left alone, but for what follows the end of a parameter in its last
    group. turns: hyper-parameters and number of the step. Raises ValueError where something does
    not fit or parts overlap, before anything is changed.

    workspace: for tensors that no kernel serves, see `reference.update`.

    Returns, where they are asked for, a row of checksums for each part.
    """
    slots = [record_views[slot.name] for slot in format.slots if slot.name in record_views]
    check_span(weight, gradient, slots, format)
    check_turns(turns, {part.turn for part in parts}, format)
    check_parts(parts, weight.numel(), format)
    chosen = _kernel_for(weight, gradient, *slots)
    if chosen is None:
        spans = []
        for part in parts:
            here = slice(part.start, part.start + part.elements)
            cut = reference.cut(record_views, format, part.start, part.elements)
            span = Span(weight[here], gradient[here], cut, part.turn, part.first_element)
            spans.append(span)
        return _by_reference(spans, turns, gradient_scale, format, checksums, workspace)
    start, elements, first, turn, _ = np.array(parts, np.int64).reshape(len(parts), 5).T
    columns = [elements, turn, first]
    columns += [x.data_ptr() + start * x.itemsize for x in (gradient, weight)]
    for x, slot in zip(slots, format.slots):
        columns.append(x.data_ptr() + start // slot.elements_per_item * slot.bytes_per_item)
    rows = np.stack(columns, axis=1)
    factors = _factors(chosen, turns, gradient_scale)
    found = _run(chosen, format.name, gradient.dtype, rows, factors, checksums)
    _written(weight, *slots)
    return found


class UpdateTable:
    """Many spans that are updated by one native call: built once, used every step.

    The memory of weights, slots and gradients of its own is taken when they are handed over, and
    held: a tensor that is given other memory later (`set_`, `data =`) is not followed, one whose
    storage is resized is refused. Per span and on top of the memory's time a call costs one to two
    microseconds with such gradients (some of it to count versions up, which the calling thread does
    while the others have begun), more where each step brings its own, less with their addresses.
    """

    def __init__(
        self, spans: Sequence[Span], format: StateFormat, shared: Collection[str] = ()
    ) -> None:
        """All of one format. Raises ValueError for anything else, and where spans share memory.

        shared: slots that they may share, as the turns of those that do leave them alone.
        """
        self._format = format
        self._spans = spans = [span.detached() for span in spans]
        names = [slot.name for slot in format.slots]
        slots_of = [[s.record_views[n] for n in names if n in s.record_views] for s in spans]
        columns, rows = ADDRESS_COLUMNS + 2 + len(format.slots), []  # of a table: see src/sweep.h
        for span, slots in zip(spans, slots_of):
            check_span(span.weight, span.gradient, slots, format)
            check_start(span.first_element, format)
            at = (x.data_ptr() for x in (span.weight, *slots))
            rows.append((span.weight.numel(), span.turn, span.first_element, 0, *at))
        self._rows = np.array(rows, np.int64).reshape(len(spans), columns)
        tensors = [x for s, slots in zip(spans, slots_of) for x in (s.weight, *slots)]
        self._tensors, self._native = tensors, are_native(tensors)
        if self._native:
            check_apart(spans, format, shared)
        self._places = Places(tensors)
        self._written = [x for x in tensors if not x.is_inference()]
        self._turns = {span.turn for span in spans}
        self._elements = [span.weight.numel() for span in spans]
        self._own: list[Tensor] | None = None
        self._own_addresses: Addresses | None = None
        own = [span.gradient for span in spans if span.gradient is not None]
        if len(own) == len(self._spans):
            self.set_gradients(own)

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Take other gradients, one for each span in their order, of one dtype.

        They may have any shape with as many elements. Raises ValueError for anything else.
        """
        own = [gradient.detach() for gradient in gradients]
        self._check(own)
        self._own, self._own_addresses = own, _addresses(own) if are_native(own) else None
        self._places = Places([*self._tensors, *own])

    def update(
        self,
        turns: Turns,
        *,
        gradients: Sequence[Tensor] | None = None,
        addresses: Addresses | None = None,
        gradient_scale: float = 1.0,
        checksums: bool = False,
    ) -> Checksums | None:
        """Update every span by its turn: the hyper-parameters and the number of the step.

        gradients: as `set_gradients` takes them, for this step only: the table does not keep them.
        addresses: of these, from a caller that has itself looked whether they are plain contiguous
        tensors in memory that fit, and whether weights and slots are where they were.
        Returns, where they are asked for, a row of checksums for each span.
        """
        check_turns(turns, self._turns, self._format)
        looked_at = gradients is not None and addresses is not None
        if gradients is None:
            gradients, addresses = self._own, self._own_addresses
        if gradients is None:
            raise ValueError(
                "asked for an update by the gradients of the table; found spans without; likely "
                "cause: a table built for gradients that each step brings; try: update(gradients=)"
            )
        if not looked_at and self._places.moved():
            raise ValueError(
                "asked for the update of tensors where they were when the table was built; found "
                "a storage that has moved or is of another size; likely cause: resize_ of a "
                "weight, a slot or a gradient; try: build the table anew"
            )
        chosen = kernel()
        native = chosen.native is not None and self._native
        if addresses is None:
            self._check(gradients)
            if not are_native(gradients):
                gradients = [readable(gradient).contiguous() for gradient in gradients]
                native = native and are_native(gradients)
            addresses = _addresses(gradients)
        if not gradients or not native:
            spans = [
                replace(span, gradient=gradient.reshape(-1))
                for span, gradient in zip(self._spans, gradients)
            ]
            return _by_reference(spans, turns, gradient_scale, self._format, checksums)
        rows = self._rows.copy()  # Other threads may be in a call of their own.
        rows[:, ADDRESS_COLUMNS] = addresses
        factors = _factors(chosen, turns, gradient_scale)
        count_up = partial(torch.autograd.graph.increment_version, self._written)
        what = chosen, self._format.name, gradients[0].dtype
        return _run(*what, rows, factors, checksums, count_up)

    def _check(self, gradients: Sequence[Tensor]) -> None:
        """Raise ValueError if these are no gradients of the spans."""
        dtypes = set(map(attrgetter("dtype"), gradients))
        fits = len(dtypes) <= 1 and dtypes <= _GRADIENTS.keys()
        if not fits or list(map(Tensor.numel, gradients)) != self._elements:
            raise ValueError(
                f"asked for a gradient for each of {len(self._spans)} spans, of as many elements "
                f"and all of one dtype; found {len(gradients)} of {sorted(map(str, dtypes))}; "
                f"likely cause: a parameter without a gradient, or of another dtype; try: a table "
                f"for each dtype, of the parameters that have gradients"
            )


def _addresses(tensors: Sequence[Tensor]) -> Addresses:
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def split(master: Tensor, weight: Tensor, residue: Tensor) -> None:
    """Write a float32 master as bfloat16 weight and int16 residue: see `reference.split`."""
    check_halves(weight, residue, master)
    chosen = _kernel_for(master, weight, residue)
    if chosen is None:
        return reference.split(master, weight, residue)
    _run_on(chosen, "split", master, weight, residue)
    _written(weight, residue)


def join(weight: Tensor, residue: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 master of a bfloat16 weight and its int16 residue: see `reference.join`."""
    check_halves(weight, residue, out)
    chosen = _kernel_for(weight, residue, *(() if out is None else (out,)))
    if chosen is None:
        return reference.join(weight, residue, out)
    master = torch.empty_like(weight, dtype=torch.float32) if out is None else out
    _run_on(chosen, "join", weight, residue, master)
    _written(master)
    return master


def accumulate(into: Tensor, gradient: Tensor) -> None:
    """into += gradient, in place, rounded once: see `reference.accumulate`."""
    check_sum(into, gradient)
    chosen = _kernel_for(into, gradient)
    if chosen is None:
        return reference.accumulate(into, gradient)
    start, other = into.data_ptr(), gradient.data_ptr()
    if start != other and start < other + gradient.nbytes and other < start + into.nbytes:
        raise ValueError(
            f"asked to accumulate into other memory than the gradient's; found {into.nbytes} bytes "
            f"that begin {start - other:+} bytes from its first; likely cause: two views of one "
            f"tensor; try: gradient.clone()"
        )
    name = "accumulate_float32" if into.dtype == torch.float32 else "accumulate_bfloat16"
    _run_on(chosen, name, gradient, into, gradient=gradient.dtype)
    _written(into)


def sum_of_squares(
    gradient: Tensor,
    workspace: Tensor | None = None,
    wait: Callable[[], None] | None = None,
) -> float:
    """The sum of squares in float64, in a fixed order: see `reference.sum_of_squares`.

    workspace, wait: for a tensor that no kernel serves.
    """
    check_gradient(gradient)
    chosen = _kernel_for(gradient)
    if chosen is None or chosen.native is None:
        return reference.sum_of_squares(readable(gradient), workspace, wait)
    at = gradient.data_ptr(), gradient.numel()
    return float(chosen.native.sum_of_squares(chosen.index, _GRADIENTS[gradient.dtype], *at))


def is_finite(gradient: Tensor) -> bool:
    """Whether no element is NaN or infinite: see `reference.is_finite`."""
    return math.isfinite(sum_of_squares(gradient))


def stream(chosen: Kernel, operation: str, *tensors: Tensor, added: int = 0) -> None:
    """Read every byte of some tensors and write it back as it was, with the threads of an update.

    For benchmarks: the operation is `stream`, of one int32 tensor, or that of a state format
    (`stream_exact`), of its gradient (only read), weight and slots. added: to what is read, for
    tests.
    """
    gradient = GRADIENT_DTYPES[0] if operation == "stream" else tensors[0].dtype
    _run_on(chosen, operation, *tensors, gradient=gradient, factor=added)


def _kernel_for(*tensors: Tensor) -> Kernel | None:
    """The compiled kernel for these tensors, or None where the reference serves them."""
    chosen = kernel()
    return chosen if are_native(tensors) and chosen.native is not None else None


def _by_reference(
    spans: Sequence[Span],
    turns: Turns,
    scale: float,
    format: StateFormat,
    checksums: bool,
    workspace: Tensor | None = None,
) -> Checksums | None:
    for span in spans:
        assert span.gradient is not None
        hyper, step = turns[span.turn]
        reference.update(
            span.weight,
            span.gradient,
            span.record_views,
            hyper,
            step=step,
            gradient_scale=scale,
            format=format,
            first_element=span.first_element,
            workspace=workspace,
        )
    if not checksums:
        return None
    found = np.zeros((len(spans), 1 + len(format.slots)), np.uint32)
    for row, span in zip(found, spans):
        slots = (span.record_views[slot.name] for slot in format.slots)
        row[:] = [crc32c(x.cpu().contiguous()) for x in (span.weight, *slots)]
    return found


def _factors(chosen: Kernel, turns: Turns, scale: float) -> npt.NDArray[np.float32]:
    """A row for each turn, padded with zeros."""
    assert chosen.native is not None
    rows = np.zeros((len(turns), chosen.native.FACTORS), np.float32)
    with np.errstate(over="ignore"):  # A scale may be infinite, as the reference takes it.
        for row, (hyper, step) in zip(rows, turns):
            factors = hyper.factors(step, scale)
            row[: len(factors)] = [*factors.values()]
    return rows


def _run_on(
    chosen: Kernel,
    operation: str,
    *tensors: Tensor,
    gradient: torch.dtype = GRADIENT_DTYPES[0],
    factor: float = 0.0,
) -> None:
    """An operation by a single factor, on whole tensors; one without gradient has the first."""
    assert chosen.native is not None
    row = (tensors[0].numel(), 0, 0, *(x.data_ptr() for x in tensors))
    factors = np.full((1, chosen.native.FACTORS), factor, np.float32)
    _run(chosen, operation, gradient, np.array([row], np.int64), factors)


def _run(
    chosen: Kernel,
    operation: str,
    gradient: torch.dtype,
    rows: npt.NDArray[np.int64],
    factors: npt.NDArray[np.float32],
    checksums: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> Checksums | None:
    """One native call; the checksums of every array but the first, where they are asked for."""
    assert chosen.native is not None
    number = chosen.native.OPERATIONS.index(operation)
    written = rows.shape[1] - ADDRESS_COLUMNS - 1
    found = np.zeros((len(rows), written), np.uint32) if checksums else None
    what = chosen.index, number, _GRADIENTS[gradient]
    chosen.native.run(*what, rows, factors, found, meanwhile)
    return found


def _written(*tensors: Tensor) -> None:
    """Tell autograd what was changed in place, as torch's own operations do."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
