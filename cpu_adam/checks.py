"""What the arguments of the update's functions must be: one set of checks for every kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cpu_adam.formats import StateFormat
from cpu_adam.hyper import STEPS, Hyper, refusal
from cpu_adam.memory import in_waves
from cpu_adam.spans import Part, Span

GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What a gradient may be, in the order in which native kernels number it."""


def check_turn(rule: str, step: int, format: StateFormat) -> None:
    """Raise ValueError unless this is a step of the rule that the format's state is for."""
    if not 1 <= step < STEPS:
        raise ValueError(refusal(f"step={step}", "the number of a step, from 1 to below 2**48"))
    if rule != format.rule:
        raise ValueError(
            f"asked for an update of {format.name} states, which are for {format.rule}; found "
            f"hyper-parameters of {rule}; likely cause: a format looked up without its rule; try: "
            f"format_for(..., rule=hyper.rule)"
        )


def check_turns(
    turns: Sequence[tuple[Hyper, int]], used: Iterable[int], format: StateFormat
) -> None:
    """Raise ValueError unless these are turns of the format's rule, and those used among them."""
    for hyper, step in turns:
        check_turn(hyper.rule, step, format)
    strays = [turn for turn in used if not 0 <= turn < len(turns)]
    if strays:
        raise ValueError(
            f"asked for the update of spans by their turns; found a span of turn {strays[0]}, not "
            f"among the {len(turns)} given; likely cause: a parameter group was added after "
            f"the table was built; try: build it anew"
        )


def check_start(first_element: int, format: StateFormat) -> None:
    """Raise ValueError unless a span of the format may start there in its parameter."""
    if first_element < 0 or first_element % format.group_elements:
        raise ValueError(
            f"asked for a {format.name} update of a span that starts at a multiple of "
            f"{format.group_elements} in its parameter and its chunk; found a start of "
            f"{first_element}; likely cause: a parameter was cut inside a group of elements that "
            f"share their scales; try: cut at multiples of {format.group_elements}"
        )


def check_parts(parts: Sequence[Part], chunk_elements: int, format: StateFormat) -> None:
    """Raise ValueError unless parts lie in their chunk, apart, and may start and end there."""
    for part in parts:
        _check_part(part, chunk_elements, format)
    for one, other in pairwise(sorted(part for part in parts if part.elements)):
        if other.start < one.start + one.elements:
            raise ValueError(
                f"asked for the update of parts that lie apart in their chunk; found "
                f"{one.elements} elements from {one.start} on and {other.elements} from "
                f"{other.start} on; likely cause: a part that is given twice; try: each "
                f"element in one part"
            )


def check_apart(spans: Sequence[Span], format: StateFormat, shared: Collection[str]) -> None:
    """Raise ValueError where two spans, contiguous, share other memory than slots of such names."""
    names = [slot.name for slot in format.slots if slot.name not in shared]
    waves = in_waves([(span.weight, *map(span.record_views.__getitem__, names)) for span in spans])
    if len(waves) > 1:
        raise ValueError(
            f"asked for a table of spans that share no memory, as they are updated at once; found "
            f"number {waves[1][0]} of {len(spans)} on memory of one before it; likely cause: a "
            f"span that is given twice, or slots of another span; try: a table for each of the two"
        )


def _check_part(part: Part, chunk_elements: int, format: StateFormat) -> None:
    """Raise ValueError unless a part lies in its chunk and may start and end there."""
    start, elements = part.start, part.elements
    end = start + elements
    if not 0 <= start <= end <= chunk_elements:
        raise ValueError(
            f"asked for the update of a part of a chunk of {chunk_elements} elements; found "
            f"{elements} elements from {start} on; likely cause: parts of another chunk; try: "
            f"starts counted from the chunk's own first element"
        )
    check_start(start, format)
    check_start(part.first_element, format)
    if elements and end % format.group_elements and end != chunk_elements and not part.is_last:
        raise ValueError(
            f"asked for a {format.name} update of a part that ends at a multiple of "
            f"{format.group_elements}, with its chunk or with its parameter; found an end at "
            f"{end} of {chunk_elements}, which would change the scales of elements left alone; "
            f"likely cause: a parameter was cut inside a group of elements that share their "
            f"scales; try: is_last=True where the parameter ends there"
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


def check_halves(weight: Tensor, residue: Tensor, master: Tensor | None = None) -> None:
    """Raise ValueError unless these are the halves of a split master, of one shape."""
    want = [(weight, torch.bfloat16), (residue, torch.int16)]
    if master is not None:
        want.append((master, torch.float32))
    if any(x.dtype != dtype or x.shape != weight.shape for x, dtype in want):
        raise ValueError(
            "asked for halves of one shape: bfloat16 weight, int16 residue, float32 master; found "
            + ", ".join(f"{x.dtype} {tuple(x.shape)}" for x, _ in want)
            + "; likely cause: arguments in another order; try: name them"
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
    elif (type(gradient) is not Tensor or type(parameter) is not torch.nn.Parameter) and (
        hasattr(gradient, "to_local") != hasattr(parameter, "to_local")
    ):
        found = f"a {type(gradient).__name__} for a {type(parameter).__name__}"
        cause = "a gradient that was sharded by hand"
        remedy = "gradient.full_tensor(), or distribute_tensor of it"
    if found:
        raise ValueError(
            f"asked for a step by a dense gradient in CPU memory, bfloat16, float16 or float32, "
            f"like its parameter; found {found} for a parameter of shape "
            f"{tuple(parameter.shape)}; likely cause: {cause}; try: {remedy}"
        )


def check_gradient(gradient: Tensor) -> None:
    """Raise ValueError unless the tensor is of a dtype that gradients may have."""
    if gradient.dtype not in GRADIENT_DTYPES:
        raise ValueError(
            f"asked for the sum of squares of a bfloat16, float16 or float32 tensor; found "
            f"{gradient.dtype}; likely cause: not a gradient; try: convert it with .float()"
        )
