"""What tensors that are handed over must be: one set of checks for every kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_adam.formats import StateFormat

GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a gradient may be, in the order in which native kernels number it."""


def check_dtypes(*tensors: tuple[Tensor, torch.dtype | Sequence[torch.dtype]]) -> None:
    """Raise ValueError unless tensors have the shape of the first, each one of its dtypes."""
    wanted = [(dtype,) if isinstance(dtype, torch.dtype) else dtype for _, dtype in tensors]
    found = [(x.dtype, tuple(x.shape)) for x, _ in tensors]
    shape = found[0][1]
    if any(dtype not in want or own != shape for (dtype, own), want in zip(found, wanted)):
        asked = " and ".join(" or ".join(map(str, want)) for want in wanted)
        raise ValueError(
            f"asked for tensors of one shape, of {asked}; "
            f"found {found}; likely cause: arguments in another order, or not converted; try: name "
            f"them, and .float()"
        )


def check_span(
    weight: Tensor, gradient: Tensor | None, slots: Sequence[Tensor], format: StateFormat
) -> None:
    """Raise ValueError unless the tensors of `update` fit each other and the format."""
    dtypes = [format.weight_dtype, *(slot.dtype for slot in format.slots)]
    tensors = [weight, *slots]
    fits = len(tensors) == len(dtypes)
    fits = fits and all(x.dtype == getattr(torch, dtype) for x, dtype in zip(tensors, dtypes))
    fits = fits and weight.dim() == 1
    if gradient is not None:
        fits = fits and gradient.dtype in GRADIENT_DTYPES and gradient.shape == weight.shape
    if not fits or any(
        tuple(x.shape) != (slot.items(weight.numel()),) for x, slot in zip(slots, format.slots)
    ):
        given = None if gradient is None else (str(gradient.dtype), tuple(gradient.shape))
        raise ValueError(
            f"asked for a {format.name} update of 1-D tensors of one length: weight and slots of "
            f"{dtypes} and a bfloat16, float16 or float32 gradient; found weight and slots "
            f"{[(str(x.dtype), tuple(x.shape)) for x in tensors]}, gradient {given}; likely cause: "
            f"a record of another format or span; try: take the slots from cpu_adam.views and "
            f"slice every argument alike"
        )


def check_residue(residue: Tensor) -> None:
    """Raise ValueError unless integers are lower halves of masters: they would lose their bits."""
    low, high = torch.iinfo(torch.int16).min, torch.iinfo(torch.int16).max
    if residue.numel() and not low <= int(residue.min()) <= int(residue.max()) <= high:
        raise ValueError(
            f"asked to load a residue, whole numbers from {low} to {high}; found "
            f"{int(residue.min())} to {int(residue.max())}; likely cause: a damaged checkpoint, or "
            f"a residue of another format; try: an earlier checkpoint, or one without residues, "
            f"which begins from the bfloat16 weights"
        )


def check_dense(gradient: Tensor, parameter: Tensor) -> None:
    """Raise ValueError unless a step can be taken by this gradient of the parameter."""
    found = cause = remedy = ""
    if gradient.layout is not torch.strided:
        found = f"one of layout {gradient.layout}"
        cause = "nn.Embedding(sparse=True)"
        remedy = "sparse=False, or torch.optim.SparseAdam for that parameter"
    elif gradient.dtype not in GRADIENT_DTYPES:
        found = f"one of {gradient.dtype}"
        cause = "a loss in another precision"
        remedy = "parameter.grad = parameter.grad.float()"
    elif gradient.numel() != parameter.numel() or not gradient.is_cpu:
        found = f"one of shape {tuple(gradient.shape)} on {gradient.device}"
        cause = "a gradient of what the parameter was before `data =`"
        remedy = "zero_grad() where a parameter is changed"
    if found:
        raise ValueError(
            f"asked for a step by a dense gradient in CPU memory, bfloat16, float16 or float32, "
            f"like its parameter; found {found} for a parameter of shape "
            f"{tuple(parameter.shape)}; likely cause: {cause}; try: {remedy}"
        )
