"""The optimizer update in readable torch ops: the definition that every faster kernel must equal.

What a step computes is in `cpu_adam.rules`, with the contract on arithmetic that all of it follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from cpu_adam import compact
from cpu_adam.checks import check_span
from cpu_adam.compact import CodedScratch
from cpu_adam.formats import (
    DEVICE_BLOCK_ELEMENTS,
    SUM_BLOCK_ELEMENTS,
    StateFormat,
    scratch_bytes,
)
from cpu_adam.hyper import Hyper
from cpu_adam.rules import RULES, Factors, Scratch

BLOCK_ELEMENTS = 32 * 1024
"""Elements updated at a time on a CPU: a block and its temporaries stay in a core's cache, and
torch runs ops of this size on the calling thread alone."""
_CANONICAL_NAN = 0x7FC0  # bfloat16


def views(record: Tensor, format: StateFormat, elements: int) -> dict[str, Tensor]:
    """Typed views of the slots of a record, by slot name; nothing is copied.

    record: uint8, 1-D, contiguous, at least `format.record_bytes(elements)` long (padding may
    follow). Each view is 1-D of `slot.items(elements)` items. Raises ValueError if the record is
    anything else.
    """
    need = format.record_bytes(elements)
    plain = record.dtype == torch.uint8 and record.dim() == 1 and record.is_contiguous()
    if not plain or record.numel() < need:
        raise ValueError(
            f"asked for the slots of a {format.name} record of {elements} elements, a contiguous "
            f"1-D uint8 tensor of {need} bytes; found {record.dtype} of shape "
            f"{tuple(record.shape)}; likely cause: a typed or strided view, or a record of another "
            f"chunk size or state format; try: the bytes, tensor.view(torch.uint8), sized with "
            f"StateFormat.record_bytes"
        )
    found: dict[str, Tensor] = {}
    for slot, offset in zip(format.slots, format.slot_offsets(elements)):
        raw = record[offset : offset + slot.items(elements) * slot.bytes_per_item]
        found[slot.name] = raw.view(getattr(torch, slot.dtype))
    return found


def cut(
    record_views: Mapping[str, Tensor], format: StateFormat, start: int, elements: int
) -> dict[str, Tensor]:
    """Views of the slots of part of a chunk: `elements` from `start` on, which starts a group."""
    found = {}
    for slot in format.slots:
        first = start // slot.elements_per_item
        found[slot.name] = record_views[slot.name][first : first + slot.items(elements)]
    return found


@torch.no_grad()
def split(master: Tensor, weight: Tensor, residue: Tensor) -> None:
    """Write a float32 `master` as the bfloat16 `weight` that is served and an int16 `residue`.

    All of one shape; `weight` and `residue` are overwritten, `master` is kept. With `bits` the bits
    of the master and integers modulo 2**32,

        weight = (bits + 0x8000) >> 16        residue = bits - (weight << 16)

    which rounds to nearest, ties away from zero, and lies in -0x8000 ... 0x7FFF. A finite master
    from 0x7F7F8000 up rounds to an infinite weight with a negative residue, and still comes back.
    Infinity has residue 0. A NaN, whatever its sign and payload, is weight 0x7FC0 and residue 0
    (the formula would carry it into infinity or zero). `join` is the inverse.
    """
    _split(master, weight, residue, torch.empty_like(master, dtype=torch.int32))


def _split(
    master: Tensor, weight: Tensor, residue: Tensor, scratch: Tensor, mask: Tensor | None = None
) -> None:
    bits = master.view(torch.int32)
    high = weight.view(torch.int16)
    torch.add(bits, 0x8000, out=scratch)
    high.copy_(scratch.bitwise_right_shift_(16))
    residue.copy_(bits)  # keeps the low 16 bits, which is bits - (high << 16)
    if _may_hold_nan(master):
        nan = torch.ne(master, master, out=mask)
        high.masked_fill_(nan, _CANONICAL_NAN)
        residue.masked_fill_(nan, 0)


@torch.no_grad()
def join(weight: Tensor, residue: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 master of a bfloat16 `weight` and its int16 `residue`, all of one shape.

    With integers modulo 2**32, bits = (weight << 16) + residue. Where these bits are those of a NaN
    (exponent all ones, fraction not zero) the residue is ignored: bits = weight << 16.

    Of such pairs `split` writes only the NaN weight with residue 0; others arise when a weight is
    edited and its residue is not: a zero with a negative residue decodes as that
    zero, an infinity with a positive one as that infinity. So only a NaN weight decodes as NaN.
    """
    master = torch.empty_like(weight, dtype=torch.float32) if out is None else out
    _join(weight, residue, master)
    return master


def _join(
    weight: Tensor,
    residue: Tensor,
    master: Tensor,
    spare: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    bits = master.view(torch.int32)
    bits.copy_(weight.view(torch.int16)).mul_(1 << 16).add_(residue)
    if _may_hold_nan(master):
        plain = weight.float() if spare is None else spare.copy_(weight)
        torch.where(torch.ne(master, master, out=mask), plain, master, out=master)


def _may_hold_nan(x: Tensor) -> bool:
    """False where NaN handling can be skipped. Looks on a CPU only: elsewhere a look is a wait."""
    if x.device.type != "cpu":
        return True
    return x.numel() > 0 and math.isnan(x.amax().item())  # the maximum propagates NaN


@torch.no_grad()
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
    workspace: Tensor | None = None,
) -> None:
    """One step of a rule on a span, in place.

    weight: 1-D, of `format.weight_dtype`. gradient: 1-D bfloat16, float16 or float32, never
    written. record_views: one 1-D tensor for each slot of `format`, by name. All of one length (in
    items of the slot) and on one device; slices of a chunk are welcome, as elements do not depend
    on each other, but for groups: a slice starts with one and ends with one or with the parameter,
    as its scales become those of its own elements. hyper: of the rule that the format is
    for. step: the number of this step, from 1. gradient_scale: what the gradient is multiplied by
    (unscale, clip). first_element: where in its parameter the span starts. workspace: memory for
    temporaries, uint8 on the same device, of `scratch_bytes` of the largest span (as `coded` as the
    format is); else it is made.

    With p the float32 master (`join` of weight and residue, or the weight itself), and each
    operation rounded once to float32 as in [Note: Arithmetic] of `cpu_adam.rules`:

        g = float32(gradient)
        g = g * gradient_scale                      unless the scale is 1
        g = -g                                      if maximize

    then the rule (`cpu_adam.rules`) changes p and its state, and p is written back (`split`).
    Raises ValueError if shapes or dtypes do not fit.
    """
    slots = [record_views[slot.name] for slot in format.slots if slot.name in record_views]
    check_span(weight, gradient, slots, format)
    elements = weight.numel()
    if elements == 0:
        return
    device = weight.device
    factors = Factors(hyper.factors(step, gradient_scale), device)
    block, group = _block_elements(device), format.group_elements
    block = min(elements, -(-block // group) * group)
    if workspace is None:
        workspace = torch.empty(
            scratch_bytes(block, coded=format.coded), dtype=torch.uint8, device=device
        )
    rule = RULES[hyper.rule]
    for start in range(0, elements, block):
        count = min(block, elements - start)
        scratch = (CodedScratch if format.coded else Scratch)(count, workspace)
        w, g = weight[start : start + count], gradient[start : start + count]
        state = cut(record_views, format, start, count)
        residue = state.get("residue")
        master = w if residue is None else scratch.master
        if residue is not None:
            _join(w, residue, master, scratch.term, scratch.mask)
        if isinstance(scratch, CodedScratch):
            compact.adam(master, g, state, factors, scratch, first_element + start, step)
        else:
            rule(master, g, state, factors, scratch)
        if residue is not None:
            _split(master, w, residue, scratch.bits, scratch.mask)


def _block_elements(device: torch.device) -> int:
    return BLOCK_ELEMENTS if device.type == "cpu" else DEVICE_BLOCK_ELEMENTS


@torch.no_grad()
def accumulate(into: Tensor, gradient: Tensor) -> None:
    """into += gradient, in place, with one rounding to the dtype of `into`.

    Of one shape. into: float32 (gradient bfloat16, float16 or float32) or bfloat16 (gradient
    bfloat16: the float32 sum of two bfloat16 numbers is wide enough for its rounding to be that of
    the exact sum). Equals torch's `into.add_(gradient)`.
    """
    into.add_(gradient)


Node = tuple[int, int, float]
"""A subtree of a sum of squares: its number among those of its level, the level (0: a leaf), the
sum."""


def push(nodes: list[Node], node: Node) -> None:
    """Append a subtree to those left of it; the two halves of a larger one become that."""
    index, level, total = node
    while index % 2 and nodes and nodes[-1][1] == level:
        index, level, total = index // 2, level + 1, nodes.pop()[2] + total
    nodes.append((index, level, total))


def total(nodes: Sequence[Node]) -> float:
    """The sum of the squares of a parameter, of which these are all subtrees."""
    return reduce(lambda right, node: node[2] + right, reversed(nodes), 0.0)


@torch.no_grad()
def square_sums(
    gradient: Tensor,
    first_leaf: int = 0,
    workspace: Tensor | None = None,
    wait: Callable[[], None] | None = None,
) -> list[Node]:
    """The sum of the squares of part of a gradient: the largest subtrees in it, from the left.

    gradient: bfloat16, float16 or float32, of any shape, read in row-major order. Each element is
    squared in float64, which is exact. The squares of a parameter, zero-padded, are cut into leaves
    of 1024; a leaf is summed by a halving tree: x[i] + x[i + n/2] for i < n/2, repeated on the n/2
    sums until one is left. Above them neighbours are added, 2 i and 2 i + 1, level by level; what
    has none at the right end goes up as it is. So parts that begin with a leaf (`first_leaf`),
    pushed in order, have the same `total` wherever the parameter is cut. NaN and infinity
    propagate. workspace: memory for temporaries, uint8 on the same device, of `squares_bytes`; else
    it is made. wait: lets the host wait for what this thread has queued on the device; without it,
    reading the sums does, and may spin a core.
    """
    sums, nodes = leaf_sums(gradient, workspace), list[Node]()
    if wait is not None:
        wait()
    for leaf in enumerate(sums[: -(-gradient.numel() // SUM_BLOCK_ELEMENTS)].tolist(), first_leaf):
        push(nodes, (leaf[0], 0, leaf[1]))
    return nodes


def leaf_sums(gradient: Tensor, workspace: Tensor | None) -> Tensor:
    """The sums of the leaves in the workspace, zero-padded to a power of two."""
    flat = gradient.reshape(-1)
    elements = max(flat.numel(), 1)
    width = min(SUM_BLOCK_ELEMENTS, 1 << (elements - 1).bit_length())
    rows = -(-min(elements, _block_elements(flat.device)) // width)
    padded = 1 << (-(-elements // width) - 1).bit_length()
    size = 8 * (rows * width + padded)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=flat.device)
    memory = workspace[:size].view(torch.float64)
    squares, sums = memory[: rows * width], memory[rows * width :].zero_()
    for part, part_sums in zip(torch.split(flat, rows * width), torch.split(sums, rows)):
        count = -(-part.numel() // width)
        wide = squares[: count * width]
        wide[part.numel() :].zero_()
        wide[: part.numel()].copy_(part)
        part_sums[:count].copy_(_halving_tree(wide.mul_(wide).view(count, width)))
    return sums


def _halving_tree(x: Tensor) -> Tensor:
    """Sum the last dimension, a power of two long: its lower half plus its upper half, repeated.

    What lies there is overwritten.
    """
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half].add_(x[..., half:])
    return x[..., 0]
