"""What the arguments of the update's functions must be: one set of checks for every kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_adam.formats import StateFormat

GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a gradient may be, in the order in which native kernels number it."""


def refusal(found: str, asked: str) -> str:
    """The message for a hyper-parameter with which no step is defined."""
    return (
        f"asked for {asked}; found {found}; likely cause: a wrong value in a parameter group or a "
        f"scheduler; try: print optimizer.param_groups before the step"
    )


def check_step(step: int) -> None:
    """Raise ValueError unless `step` is the number of a step."""
    if step < 1:
        raise ValueError(refusal(f"step={step}", "the number of a step, counted from 1"))


def check_span(
    weight: Tensor, gradient: Tensor, slots: Sequence[Tensor], format: StateFormat
) -> None:
    """Raise ValueError unless the tensors of `update` fit each other and the format."""
    dtypes = [format.weight_dtype, *(slot.dtype for slot in format.slots)]
    tensors = [weight, *slots]
    fits = len(tensors) == len(dtypes) and gradient.dtype in GRADIENT_DTYPES
    fits = fits and all(x.dtype == getattr(torch, dtype) for x, dtype in zip(tensors, dtypes))
    if not fits or weight.dim() != 1 or any(x.shape != weight.shape for x in (gradient, *slots)):
        raise ValueError(
            f"asked for a {format.name} update of 1-D tensors of one length: weight and slots of "
            f"{dtypes} and a bfloat16, float16 or float32 gradient; found weight and slots "
            f"{[(str(x.dtype), tuple(x.shape)) for x in tensors]}, gradient {gradient.dtype} "
            f"{tuple(gradient.shape)}; likely cause: a record of another format or span; try: take "
            f"the slots from cpu_adam.views and slice every argument alike"
        )


def check_parts(weight: Tensor, residue: Tensor, master: Tensor | None = None) -> None:
    """Raise ValueError unless these are the parts of a split master, of one shape."""
    want = [(weight, torch.bfloat16), (residue, torch.int16)]
    if master is not None:
        want.append((master, torch.float32))
    if any(x.dtype != dtype or x.shape != weight.shape for x, dtype in want):
        raise ValueError(
            "asked for parts of one shape: bfloat16 weight, int16 residue, float32 master; found "
            + ", ".join(f"{x.dtype} {tuple(x.shape)}" for x, _ in want)
            + "; likely cause: arguments in another order; try: name them"
        )


def check_sum(into: Tensor, gradient: Tensor) -> None:
    """Raise ValueError unless `gradient` can be accumulated into `into`."""
    fits = into.dtype == torch.float32 and gradient.dtype in GRADIENT_DTYPES
    fits = fits or (into.dtype == torch.bfloat16 and gradient.dtype == torch.bfloat16)
    if not fits or into.shape != gradient.shape:
        raise ValueError(
            f"asked to accumulate into float32, or bfloat16 into bfloat16, of one shape; found "
            f"{gradient.dtype} {tuple(gradient.shape)} into {into.dtype} {tuple(into.shape)}; "
            f"likely cause: gradients of another dtype than their buffer; try: float32 buffers"
        )


def check_gradient(gradient: Tensor) -> None:
    """Raise ValueError unless the tensor is of a dtype that gradients may have."""
    if gradient.dtype not in GRADIENT_DTYPES:
        raise ValueError(
            f"asked for the sum of squares of a bfloat16, float16 or float32 tensor; found "
            f"{gradient.dtype}; likely cause: not a gradient; try: convert it with .float()"
        )
