"""The compact format: a byte per moment, in groups of 128 elements that share two float32 scales.

[Note: Compact states]
Groups are counted from the first element of the parameter. A group keeps the largest |m| and the
largest sqrt(v) of its elements as scales, and for each element two codes, which stand for

    m = sign * level(q) * (m_scale * (1 / level(127)))
    sqrt(v) = level(r) * (v_scale * (1 / level(255)))

with q in 0 ... 127, the sign of m above it in the byte (no -0: 128 is +0, as 0 is), r in 0 ... 255,
and each reciprocal rounded once to float32. (The variance as its root, and a companding function,
as in arXiv 2602.23349; the function is another, see below.) A step decodes, updates in float32 and
encodes what came out. Its arithmetic is `adam`'s but for the moments, whose factors are folded into
the scales: see `adam` here.

Levels. A code is a *segment* and a step within it; each segment is twice as long as the one below,
and has as many steps: 16 for q, 32 for r, in 8 segments. That is how telephony compands (mu-law,
ITU-T G.711), and how a float32 is made: the bits of 2**-15 + level, less those of 2**-15, are the
code and what lies between it and the next one. So encoding is an addition and a shift, and decoding
a subtraction. (Codes that were squares needed two roots more: 12.5 instead of 11.9 ns in LOG.md.)
Adam divides one moment by the root of the other, element by element, so both must reach far below
the largest of the group, and about as far: a root that is too coarse freezes elements of small
gradients, a momentum that is coarser than the root throws them about. The smallest q is 1/3952 of
the largest; the smallest root of a group that has one above 0 is r = 2, 1/4016. (Also that of an
element without gradients: it has m = 0, so it does not move.)

Rounding. Nearest rounding would stall: with beta2 = 0.9999 a code of 100 would decay to 99.998 and
be rounded back for ever. A code is therefore rounded up or down by a *dither*, an integer that is
added to the bits below it before they are cut off: unbiased over steps. The dither depends on the
element's place in the parameter and on the step alone, so no cut into chunks, thread or machine can
change it. It stays clear of the smallest and the largest by 16, more than what float32 loses here:
the largest of a group is kept as it is.

What is not finite. A group with a NaN, an infinity or anything from 2**118 on among its m, or its
roots, has a scale of NaN and codes of 0: it decodes as NaN from then on. (From about there on the
factor by which codes are made is no normal number, and more is lost than dithers stay clear of; and
a gradient that makes such an m makes v infinite.) One whose largest is below 2**-80 is stored as
zero (no root of a float32 above 0 is). Everything is a correctly rounded float32 operation or one
of integers, so that compiled kernels find the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpu_adam.formats import GROUP_ELEMENTS
from cpu_adam.rules import Factors, Scratch, adam_step, decayed, scaled, square_root


@dataclass(frozen=True, slots=True)
class Code:
    """How one of the moments is kept."""

    name: str
    """Of the slot of its codes; that of their scales is longer by `_scale`."""
    bits: int
    """Bits below a code: what lies between it and the next one."""
    largest: int
    """The largest code, without its sign."""
    signed: bool
    hash_bit: int
    """Where in the hash of a group the bits are by which its dither is changed."""

    @property
    def scale(self) -> str:
        """Name of the slot of scales."""
        return f"{self.name}_scale"

    @property
    def largest_level(self) -> float:
        """The level of the largest code."""
        return float(self.levels(torch.tensor(self.largest, dtype=torch.int32)))

    def levels(self, codes: Tensor) -> Tensor:
        """What codes without a sign, int32, stand for: float32, exact."""
        return ((codes << self.bits) + FIRST_BITS).view(torch.float32).sub_(FIRST)


MOMENTUM = Code("exp_avg", bits=19, largest=127, signed=True, hash_bit=48)
ROOT = Code("exp_avg_sq", bits=18, largest=255, signed=False, hash_bit=32)
LEAST_ROOT = 2
"""The smallest code of a root in a group that has one above 0."""
SIGN = 128
FIRST, FIRST_BITS = 2.0**-15, 0x38000000
"""Level 0 is stored as this float32, with these bits."""
CLEAR = 16
"""How far a dither stays clear of the code's smallest and largest bits."""
TINY, TOO_LARGE = 0x17800000, 0x7A800000
"""Bits of 2**-80 and of 2**118 in float32."""


def decode(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 moments of a span from the slots of its record: `exp_avg` and `exp_avg_sq`."""
    root = _decoded(ROOT, slots)
    return {"exp_avg": _decoded(MOMENTUM, slots), "exp_avg_sq": root.mul_(root)}


def _decoded(code: Code, slots: Mapping[str, Tensor], decay: Tensor | None = None) -> Tensor:
    """m or the root of v, times its decay where there is one."""
    found, scale = slots[code.name].int(), slots[code.scale]
    factor = scale * torch.full_like(scale, 1.0 / code.largest_level)
    if decay is not None:
        factor.mul_(decay)
    levels = code.levels(found & code.largest)
    if code.signed:
        levels = levels.where(found < SIGN, 0.0 - levels)  # no -0
    return levels.mul_(_spread(factor, levels))


def adam(
    p: Tensor,
    g: Tensor,
    slots: Mapping[str, Tensor],
    f: Factors,
    s: Scratch,
    first_element: int,
    step: int,
) -> None:
    """One step of Adam on a span: a master, its gradient and the slots of its record.

    As `rules.adam`, but for the moments. With g scaled and decayed first where there is an L2 decay
    (scale is 1 below then), and the products in brackets rounded once for all elements:

        m = sign * level(q) * (m_scale * (1 / level(127)) * beta1) + g * ((1 - beta1) * scale)
        r = level(r) * (v_scale * (1 / level(255)) * sqrt(beta2))
        h = g * (sqrt(1 - beta2) * scale)
        v = r * r + h * h

    first_element: where the span starts in its parameter, a multiple of 128. step: the number of
    the step.
    """
    share, root_share = f["rest1"], f["root_rest2"]
    if f.numbers["decay_l2"] == 0.0:
        g = g.float()
        share, root_share = share * f["scale"], root_share * f["scale"]
    else:
        g = decayed(p, scaled(g, f, s), f, s)
    m = _decoded(MOMENTUM, slots, f["beta1"])
    root = _decoded(ROOT, slots, f["root_beta2"])
    m.add_(torch.mul(g, share, out=s.term))
    h = torch.mul(g, root_share, out=s.term)
    v = root.mul_(root).add_(h.mul_(h))
    root = square_root(v, s.wide, out=v)
    adam_step(p, m, s.term.copy_(root), f, s)
    encode(m, root, slots, *dither(first_element, m.numel(), step, m.device))


def temporaries_bytes(elements: int) -> int:
    """The most that `adam` takes at once beside its scratch, and a fifth for how it is cut."""
    return 48 * -(-elements // GROUP_ELEMENTS) * GROUP_ELEMENTS


def restore(moments: Mapping[str, Tensor], slots: Mapping[str, Tensor]) -> None:
    """Write the slots of a span's record from float32 moments that come from elsewhere.

    Rounds to the nearest code. What `decode` gave is decoded to the same bits again, for scales of
    roots from 2**-62 on (below, v is subnormal and does not tell its root): the largest of a group
    may be an ulp or two beside the scale that it was decoded with, which is looked for.
    """
    m, v = moments["exp_avg"], moments["exp_avg_sq"]
    root = square_root(v, torch.empty_like(v, dtype=torch.float64), out=torch.empty_like(v))
    halves = [torch.tensor(1 << code.bits - 1, device=v.device).int() for code in (MOMENTUM, ROOT)]
    encode(m, root, slots, *halves)
    found = {code: slots[code.scale].clone() for code in (MOMENTUM, ROOT)}
    for ulps in (-2, -1, 1, 2, 0):
        nearby = {code: (x.view(torch.int32) + ulps).view(x.dtype) for code, x in found.items()}
        again = decode({**slots, **{code.scale: x for code, x in nearby.items()}})
        for code, first in found.items():
            scale = slots[code.scale]
            others = _of_groups(again[code.name] != moments[code.name]).any(1)
            scale.copy_(scale.where(others | ~(first > 0), nearby[code]))


def encode(
    m: Tensor, root: Tensor, slots: Mapping[str, Tensor], for_m: Tensor, for_root: Tensor
) -> None:
    """Write the slots of a span's record; what the codes are rounded by is given, as of `dither`.

    m, root: the momentum and the root of the variance that a step came to, float32.
    """
    scale = _scales(m, slots[MOMENTUM.scale])
    code = _code(MOMENTUM, m.abs(), scale, for_m) + m.signbit() * SIGN
    slots[MOMENTUM.name].copy_(code.mul_(_spread(scale, code).isfinite()))

    scale = _scales(root, slots[ROOT.scale])
    code = _code(ROOT, root, scale, for_root).clamp_(min=LEAST_ROOT)
    slots[ROOT.name].copy_(code.mul_(_spread(scale > 0, code)))


def _code(code: Code, x: Tensor, scale: Tensor, dither: Tensor) -> Tensor:
    """Codes of magnitudes, int32; anything where the scale is no number."""
    factor = torch.full_like(scale, code.largest_level).div_(scale).where(scale > 0, 0.0)
    levels = x.mul(_spread(factor, x)).add_(FIRST)
    return levels.view(torch.int32).sub_(FIRST_BITS).add_(dither) >> code.bits


def dither(
    first_element: int, elements: int, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Integers to round the codes of m and of the root of each element of a span by.

    Over a group the upper seven bits are those of the place in the group, for m in the reverse
    order: 128 points that lie evenly in both directions (Hammersley's). In all of a group the same
    bits are then flipped, those of a 64-bit hash (splitmix64, less its last xor-shift) of its
    number and the step's: the points stay even, and the dither of an element differs from step to
    step.
    """
    groups = -(-elements // GROUP_ELEMENTS)
    x = torch.arange(groups, dtype=torch.int64, device=device)
    x = x + _wrapped(first_element // GROUP_ELEMENTS + step * 0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _wrapped(0x94D049BB133111EB)
    places = torch.arange(GROUP_ELEMENTS, dtype=torch.int64, device=device)
    backwards = sum((places >> bit & 1) << 6 - bit for bit in range(7))
    found = []
    for code, even in ((MOMENTUM, backwards), (ROOT, places)):
        flips = (_shifted(x, code.hash_bit) * 2 * CLEAR & (1 << code.bits) - 1)[:, None]
        found.append((flips ^ (even << code.bits - 7) + CLEAR).view(-1)[:elements].int())
    return found[0], found[1]


def _scales(x: Tensor, into: Tensor) -> Tensor:
    """Each group's largest magnitude, or NaN, or 0: see [Note: Compact states]."""
    bits = _of_groups(x.view(torch.int32)) & 0x7FFFFFFF
    largest = bits.amax(1)  # of integers: NaN is above everything
    kept = largest.where((largest >= TINY) & (largest < TOO_LARGE), 0).view(torch.float32)
    into.copy_(kept.masked_fill_(largest >= TOO_LARGE, torch.nan))
    return into


def _of_groups(x: Tensor) -> Tensor:
    """A row per group, the last one padded with zeros (False)."""
    return pad(x, (0, -x.numel() % GROUP_ELEMENTS)).view(-1, GROUP_ELEMENTS)


def _spread(of_groups: Tensor, like: Tensor) -> Tensor:
    """Each group's item, for each of the elements of `like`."""
    return of_groups.repeat_interleave(GROUP_ELEMENTS)[: like.numel()]


def _wrapped(x: int) -> int:
    """An integer modulo 2**64, as torch has it: signed."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """The unsigned shift to the right of 64-bit integers."""
    return (x >> bits) & ((1 << 64 - bits) - 1)
