"""The compact format: a byte per moment, in groups of 128 elements that share two float32 scales.

[Note: Compact states]
Groups are counted from the first element of the parameter. A group keeps the largest |m| and the
largest sqrt(v) of its elements as scales, and for each element two codes, q in -127 ... 127 and r
in 0 ... 255, which stand for

    m = m_scale * (q * |q| / 127**2)        sqrt(v) = v_scale * (r**2 / 255**2)

(the variance as its root, and a companding function, as in arXiv 2602.23349; the function is
another, see below). A step decodes, updates in float32 and encodes what came out. Its arithmetic is
`adam`'s but for the moments, whose factors are folded into the scales: see `adam` here.

Rounding. Nearest rounding would stall: with beta2 = 0.9999 a code of 100 would decay to 99.995 and
be rounded back for ever. A code is therefore rounded up or down by a *dither*, an integer that is
added to the code in fixed point, before its fraction (14 bits for q, 15 for r) is cut off: unbiased
over steps. The dither depends on the element's place in the parameter and on the step alone, so no
cut into chunks, thread or machine can change it. The largest of a group is kept as it is.

Squares. Adam divides one moment by the root of the other, element by element, so both must reach
far below the largest of the group, and about as far: a root that is too coarse freezes elements
of small gradients, a momentum that is coarser than the root throws them about. With squares the
smallest step of m is 1/16129 of the largest; the smallest root of a group that has one above 0 is
r = 2, 1/16256. (Also that of an element without gradients: it has m = 0, so it does not move.)

What is not finite. A group with a NaN or an infinity among its m, or its roots, has a scale of NaN
and codes of 0: it decodes as NaN from then on. One whose largest is below 2**-80 is stored as zero
(no root of a float32 above 0 is). Everything is a correctly rounded float32 operation or one of
integers, so that compiled kernels find the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpu_adam.formats import GROUP_ELEMENTS
from cpu_adam.rules import Factors, Scratch, adam_step, decayed, scaled, square_root

MOMENTUM_BITS, ROOT_BITS = 14, 15
"""Bits below the point of a code in fixed point; its dither has as many."""
LARGEST_MOMENTUM, LARGEST_ROOT, LEAST_ROOT = 127, 255, 2
"""Codes."""
TINY, INFINITE = 0x17800000, 0x7F800000
"""Bits of 2**-80 and of infinity in float32."""


def decode(codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 moments of a span from the slots of its record: `exp_avg` and `exp_avg_sq`."""
    m, root = _decoded(codes)
    return {"exp_avg": m, "exp_avg_sq": root.mul_(root)}


def _decoded(codes: Mapping[str, Tensor], *decays: Tensor) -> tuple[Tensor, Tensor]:
    """m and the root of v, each times its decay where there are any."""
    q, r = codes["exp_avg"].float(), codes["exp_avg_sq"].float()
    m_unit = codes["exp_avg_scale"] * _scalar(1.0 / LARGEST_MOMENTUM**2, q)
    root_unit = codes["exp_avg_sq_scale"] * _scalar(1.0 / LARGEST_ROOT**2, r)
    for unit, decay in zip((m_unit, root_unit), decays):
        unit.mul_(decay)
    return q.mul(q.abs()).mul_(_spread(m_unit, q)), r.mul(r).mul_(_spread(root_unit, r))


def adam(
    p: Tensor,
    g: Tensor,
    codes: Mapping[str, Tensor],
    f: Factors,
    s: Scratch,
    first_element: int,
    step: int,
) -> None:
    """One step of Adam on a span: a master, its gradient and the slots of its record.

    As `rules.adam`, but for the moments. With g scaled and decayed first where there is an L2 decay
    (scale is 1 below then), and the products in brackets rounded once for all elements:

        m = q * |q| * (m_scale / 127**2 * beta1) + g * ((1 - beta1) * scale)
        r = r * r * (v_scale / 255**2 * sqrt(beta2))
        h = g * (sqrt(1 - beta2) * scale)
        v = r * r + h * h

    first_element: where the span starts in its parameter, a multiple of 128. step: the number of
    the step.
    """
    beta1, root_beta2, root_rest2 = f.tensors[11:14]
    shares = f.tensors[2], root_rest2
    if f.numbers[1] == 0.0:
        g = g.float()
        shares = shares[0] * f.tensors[0], root_rest2 * f.tensors[0]
    else:
        g = decayed(p, scaled(g, f, s), f, s)
    m, root = _decoded(codes, beta1, root_beta2)
    m.add_(torch.mul(g, shares[0], out=s.term))
    h = torch.mul(g, shares[1], out=s.term)
    v = root.mul_(root).add_(h.mul_(h))
    root = square_root(v, s.wide, out=v)
    adam_step(p, m, s.term.copy_(root), f, s)
    _encode(m, root, codes, *dither(first_element, m.numel(), step, m.device))


def encode(
    moments: Mapping[str, Tensor], codes: Mapping[str, Tensor], first_element: int, step: int
) -> None:
    """Write the slots of a span's record from the float32 moments that a step came to.

    first_element: where the span starts in its parameter, a multiple of 128. step: the number of
    that step.
    """
    m, root = moments["exp_avg"], _root(moments["exp_avg_sq"])
    _encode(m, root, codes, *dither(first_element, m.numel(), step, m.device))


def restore(moments: Mapping[str, Tensor], codes: Mapping[str, Tensor]) -> None:
    """Write the slots of a span's record from float32 moments that come from elsewhere.

    Rounds to the nearest code. What `decode` gave is decoded to the same bits again: the largest of
    a group may be an ulp or two beside the scale that it was decoded with, which is looked for.
    """
    device = codes["exp_avg"].device
    halves = [torch.full((), 1 << bits >> 1, device=device) for bits in (MOMENTUM_BITS, ROOT_BITS)]
    _encode(moments["exp_avg"], _root(moments["exp_avg_sq"]), codes, *halves)
    found = {name: codes[name].clone() for name in ("exp_avg_scale", "exp_avg_sq_scale")}
    for ulps in (-2, -1, 1, 2, 0):
        nearby = {
            name: (x.view(torch.int32) + ulps).view(torch.float32) for name, x in found.items()
        }
        again = decode({**codes, **nearby})
        for name in ("exp_avg", "exp_avg_sq"):
            scale = codes[name + "_scale"]
            others = _of_groups(again[name] != moments[name]).any(1)
            kept = others | ~(found[name + "_scale"] > 0)
            scale.copy_(scale.where(kept, nearby[name + "_scale"]))


def _root(v: Tensor) -> Tensor:
    return square_root(v, torch.empty_like(v, dtype=torch.float64), out=torch.empty_like(v))


def _encode(
    m: Tensor, root: Tensor, codes: Mapping[str, Tensor], for_m: Tensor, for_root: Tensor
) -> None:
    """Write the slots of a span's record; what the codes are rounded by is given."""
    scale = _scales(m, codes["exp_avg_scale"])
    fixed = _fixed(m.abs(), scale, LARGEST_MOMENTUM << MOMENTUM_BITS).copysign_(m)
    code = _rounded(fixed, 1.5 * 2.0**23).add_(for_m) >> MOMENTUM_BITS
    codes["exp_avg"].copy_(code.mul_(_spread(scale > 0, code)))

    scale = _scales(root, codes["exp_avg_sq_scale"])
    fixed = _fixed(root, scale, LARGEST_ROOT << ROOT_BITS)
    code = _rounded(fixed, 2.0**23).add_(for_root) >> ROOT_BITS
    codes["exp_avg_sq"].copy_(code.clamp_(min=LEAST_ROOT).mul_(_spread(scale > 0, code)))


def dither(
    first_element: int, elements: int, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Integers to round the codes of m and of the root of each element of a span by.

    A group's seed is the upper half of a 64-bit hash (splitmix64) of its number and the step's. To
    it is added the place in the group times a constant, modulo 2**32, whose upper 14 bits (15 with
    one to spare) are the golden section and whose lower 15 the root of two less one: the dither of
    a group is spread evenly, and that of an element differs from step to step. The upper bits of
    the sum are for m, the lower ones for the root.
    """
    groups = -(-elements // GROUP_ELEMENTS)
    x = torch.arange(groups, dtype=torch.int64, device=device)
    x = x + _wrapped(first_element // GROUP_ELEMENTS + step * 0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _wrapped(0x94D049BB133111EB)
    seed = _shifted(x, 32)
    places = torch.arange(GROUP_ELEMENTS, dtype=torch.int64, device=device) * 0x9E363505
    x = (seed[:, None] + places & 0xFFFFFFFF).view(-1)[:elements]
    return (x >> 32 - MOMENTUM_BITS).int(), (x & (1 << ROOT_BITS) - 1).int()


def _scales(x: Tensor, into: Tensor) -> Tensor:
    """Each group's largest magnitude, or NaN, or 0: see [Note: Compact states]."""
    bits = _of_groups(x.view(torch.int32)) & 0x7FFFFFFF
    largest = bits.amax(1)  # of integers: NaN is above everything
    kept = largest.where((largest >= TINY) & (largest < INFINITE), 0).view(torch.float32)
    into.copy_(kept.masked_fill_(largest >= INFINITE, torch.nan))
    return into


def _of_groups(x: Tensor) -> Tensor:
    """A row per group, the last one padded with zeros (False)."""
    return pad(x, (0, -x.numel() % GROUP_ELEMENTS)).view(-1, GROUP_ELEMENTS)


def _fixed(x: Tensor, scale: Tensor, largest: int) -> Tensor:
    """largest * sqrt(x / scale); anything where the scale is no number above 0."""
    product = x * _spread(torch.full_like(scale, float(largest**2)) / scale, x)
    return square_root(product, torch.empty_like(x, dtype=torch.float64), out=product)


def _rounded(x: Tensor, power: float) -> Tensor:
    """Integers from float32: adding the power rounds, and they are found in its low bits."""
    zero = _scalar(power, x)
    return (x + zero).view(torch.int32) - zero.view(torch.int32)


def _spread(of_groups: Tensor, like: Tensor) -> Tensor:
    """Each group's item, for each of the elements of `like`."""
    return of_groups.repeat_interleave(GROUP_ELEMENTS)[: like.numel()]


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _wrapped(x: int) -> int:
    """An integer modulo 2**64, as torch has it: signed."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """The unsigned shift to the right of 64-bit integers."""
    return (x >> bits) & ((1 << 64 - bits) - 1)
