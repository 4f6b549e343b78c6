"""The compact format: a byte per moment, in groups of 128 elements that share two float32 scales.

[Note: Compact states]
Groups are counted from the first element of the parameter. A group keeps two scales, and for each
element two codes, which stand for

    m = sign * level(q) * m_scale
    v = level(r) * v_scale

with q in 0 ... 127, the sign of m above it in the byte (128 is +0, as 0 is), r in 0 ... 255. (A
byte per moment as in arXiv 2602.23349; codes, scales and rounding are others, see below.)

Levels. A code is the exponent of a float32 and the first three bits behind its point: those of q
are 0 and 2**-15 * (1 + 1/8) ... 2**0 * (1 + 7/8), those of r 2**-31 * 1 ... 2**0 * (1 + 7/8). So a
code is cut out of the bits of a number, and put back among constant ones. Adam divides one moment
by the root of the other, element by element, so both must reach far below the largest of the group,
and about as far: the root of v to 1/63000 of it, m to 1/55000. An element of small gradients would
otherwise rest, or be thrown about.

Units. A step works on numbers divided by `unit = scale * beta`: the levels are what moments decay
to, no operation is spent on it, and no rounding either: where there is no gradient codes stay as
they are for ever and their scale decays. What a group's numbers are multiplied by (the learning
rate, the shares of the gradient, eps) takes the unit in, once for the group. The scale after the
step is the unit times the power of two that lifts the largest of the group to the top binade. A
group without a past (its unit is below 2**-100, as at first) has levels of 0 and a unit of 1.

Rounding. Nearest rounding would stall: with beta2 = 0.9999 what a gradient adds is less than half a
code. A code is therefore rounded up or down by a *dither*, an integer that is added to the bits
below it before they are cut off: unbiased over steps. A momentum below the smallest level becomes
that level or 0, by a second number, the *threshold* that it must reach: also unbiased, so that an
element which gains a hundredth of a level in each step gathers it. (v does without: its codes end
at 2**-31, and none is 0.) Both depend on the element's place in the parameter and on the step
alone, so no cut into chunks, thread or machine can change them.

What is not finite. A group with a NaN or an infinity among its m, or its v, or whose scale would
be above 2**120, has a scale of NaN and codes of 0: it decodes as NaN from then on. (That is a v of
gradients of some 1e19, or of some 1e20 times what the group had before.) One whose scale would be
below 2**-100 is stored as zero, and a v without a past below 2**-95: that of gradients of some
1e-13, which a step only feels where eps is as small. Everything is a correctly rounded float32
operation or one of integers, so that compiled kernels find the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from cpu_adam.formats import GROUP_ELEMENTS, GROUP_SCRATCH_ITEMS, scratch_bytes
from cpu_adam.rules import Factors, Scratch, decayed, scaled, square_root


@dataclass(frozen=True, slots=True)
class Code:
    """How one of the moments is kept."""

    name: str
    """Of the slot of its codes; that of their scales is longer by `_scale`."""
    exponents: int
    """Binades that its levels lie in."""

    @property
    def scale(self) -> str:
        """Name of the slot of scales."""
        return f"{self.name}_scale"

    @property
    def signed(self) -> bool:
        """Whether the eighth bit is a sign, and the code 0 stands for 0."""
        return self.exponents == 16

    def levels(self, codes: Tensor, *room: Tensor) -> Tensor:
        """What codes, uint8, stand for, with their signs: float32, exact.

        room: the result (float32), an int32 and a bool tensor, of one shape; else they are made.
        """
        dtypes = torch.float32, torch.int32, torch.bool
        out, spare, mask = room or (torch.empty_like(codes, dtype=dtype) for dtype in dtypes)
        bits = out.view(torch.int32).copy_(codes).bitwise_and_(self.exponents * STEPS - 1)
        torch.eq(bits, 0, out=mask)
        bits.bitwise_left_shift_(CODE_BITS).add_((ONE - (self.exponents - 1) * BINADE) << 16)
        if self.signed:
            bits.bitwise_or_(spare.copy_(codes).bitwise_and_(SIGN).bitwise_left_shift_(24))
            bits.masked_fill_(mask, 0)
        return out


CODE_BITS = 20
"""Bits of a float32 below a code."""
STEPS = 8
"""Codes in a binade."""
STEP, BINADE, ONE = 1 << CODE_BITS - 16, 1 << 7, 127 << 7
"""A code, an exponent and the number 1 in the upper half of a float32."""
MOMENTUM = Code("exp_avg", exponents=16)
VARIANCE = Code("exp_avg_sq", exponents=32)
SIGN = 128
TINY, LARGE = 2.0**-100, 2.0**120
"""What scales lie between."""
NEAREST = 1 << CODE_BITS - 1
"""The dither that rounds to the nearest code."""


class CodedScratch(Scratch):
    """The temporaries of one block of coded states: `scratch_bytes(elements, coded=True)`.

    Those of any block, and more. Here they are rows of groups, (groups, 128), the last one filled
    up: what lies behind the last element means nothing. Some memory serves two in turns.
    """

    def __init__(self, elements: int, memory: Tensor) -> None:
        super().__init__(elements, memory)
        groups = -(-elements // GROUP_ELEMENTS)
        row = 4 * GROUP_ELEMENTS * groups

        def grid(start: int, dtype: torch.dtype) -> Tensor:
            size = GROUP_ELEMENTS * groups * dtype.itemsize
            return memory[start : start + size].view(dtype).view(groups, GROUP_ELEMENTS)

        self.gradients, self.dithers = grid(row, torch.float32), grid(row, torch.int32)
        self.terms, self.thresholds = grid(2 * row, torch.float32), grid(2 * row, torch.int32)
        self.m, self.v = grid(3 * row, torch.float32), grid(6 * row, torch.float32)
        self.wides = grid(4 * row, torch.float64)
        self.halves, self.masks = grid(4 * row, torch.int32), grid(5 * row, torch.bool)
        """In the place of `wides`."""
        small = memory[7 * row :][: 4 * GROUP_SCRATCH_ITEMS * groups]
        self.longs = small[: 16 * groups].view(torch.int64).view(2, groups)
        """Two numbers for each group."""
        self.wide_of_groups = self.longs[0].view(torch.float64)
        self.floats = small[16 * groups :].view(torch.float32).view(-1, groups)
        """Twelve."""

    @classmethod
    def made(cls, elements: int, device: torch.device) -> CodedScratch:
        """In memory of its own."""
        size = scratch_bytes(elements, coded=True)
        return cls(elements, torch.empty(size, dtype=torch.uint8, device=device))

    def flat(self, rows: Tensor) -> Tensor:
        """The elements of some rows."""
        return rows.view(-1)[: self.elements]


def decode(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 moments of a span from the slots of its record: `exp_avg` and `exp_avg_sq`."""
    return {
        code.name: code.levels(codes := slots[code.name]).mul_(_spread(slots[code.scale], codes))
        for code in (MOMENTUM, VARIANCE)
    }


def adam(
    p: Tensor,
    g: Tensor,
    slots: Mapping[str, Tensor],
    f: Factors,
    s: CodedScratch,
    first_element: int,
    step: int,
) -> None:
    """One step of Adam on a span: a master, its gradient and the slots of its record.

    As `rules.adam`, in units. With g scaled and decayed first where there is an L2 decay (scale is
    1 below then), and what is in the first paragraph once for a group:

        m_unit = m_scale * beta1, 1 without a past
        v_unit = v_scale * beta2, 1 without a past
        share = ((1 - beta1) * scale) / m_unit
        root_share = (sqrt(1 - beta2) * scale) / sqrt(v_unit)
        d_unit = sqrt(v_unit) * (1 / sqrt(1 - beta2**t))
        move = (lr / (1 - beta1**t)) * (m_unit / d_unit)

        m = level(q) + g * share
        h = g * root_share
        v = level(r) + h * h
        p = p - (p * (lr * weight_decay) + m / (sqrt(v) + eps / d_unit) * move)

    first_element: where the span starts in its parameter, a multiple of 128. step: the number of
    the step.
    """
    share, root_share = f["rest1"], f["root_rest2"]
    if f.numbers["decay_l2"] == 0.0:
        s.gradient.copy_(g)
        share, root_share = share * f["scale"], root_share * f["scale"]
    else:
        decayed(p, scaled(g, f, s), f, s)  # It is in s.gradient.
    m_unit, v_unit, root_unit, d_unit, factor = s.floats[:5]
    _past(MOMENTUM, slots, f["beta1"], m_unit, s.m, s)
    _past(VARIANCE, slots, f["beta2"], v_unit, s.v, s)
    square_root(v_unit, s.wide_of_groups, out=root_unit)
    torch.mul(root_unit, f["correction2"], out=d_unit)

    torch.div(share, m_unit, out=factor)
    s.m.add_(torch.mul(s.gradients, factor[:, None], out=s.terms))
    torch.div(root_share, root_unit, out=factor)
    h = torch.mul(s.gradients, factor[:, None], out=s.terms)
    s.v.add_(h.mul_(h))

    torch.div(f["eps"], d_unit, out=factor)
    denominator = square_root(s.v, s.wides, out=s.terms).add_(factor[:, None])
    torch.div(m_unit, d_unit, out=factor).mul_(f["step_size"])
    torch.div(s.m, denominator, out=s.terms).mul_(factor[:, None])
    p.sub_(torch.mul(p, f["decay"], out=s.gradient).add_(s.term))

    dither(first_element, step, s)
    encode(MOMENTUM, s.m, m_unit, slots, s)
    encode(VARIANCE, s.v, v_unit, slots, s)


def _past(
    code: Code, slots: Mapping[str, Tensor], decay: Tensor, unit: Tensor, x: Tensor, s: CodedScratch
) -> None:
    """Write the units of groups, and to `x` the levels of their elements."""
    torch.mul(slots[code.scale], decay, out=unit)
    code.levels(slots[code.name], *(s.flat(rows) for rows in (x, s.halves, s.masks)))
    none = torch.lt(unit, TINY, out=_flags(s.floats[5]))
    unit.masked_fill_(none, 1.0)
    x.masked_fill_(none[:, None], 0.0)


def _flags(numbers: Tensor) -> Tensor:
    """As many bools in the place of some numbers."""
    return numbers.view(torch.bool)[: numbers.numel()]


def encode(
    code: Code, x: Tensor, unit: Tensor, slots: Mapping[str, Tensor], s: CodedScratch
) -> None:
    """Write codes and scales of a span, rounded by the dithers and thresholds in `s`.

    x: a moment that a step came to, rows of float32, in units of its group: `unit`. Overwritten,
    unit is not.
    """
    scale, spare = s.floats[6], s.floats[7]
    wrong, small = _flags(s.floats[8]), _flags(s.floats[9])
    number = spare.view(torch.int32)
    half = torch.bitwise_and(x.view(torch.int32), 0x7FFFFFFF, out=s.halves)
    half.add_(s.dithers).bitwise_right_shift_(16)
    half.masked_fill_(torch.ne(x, x, out=s.masks), 0xFF << 7)
    half.view(-1)[s.elements :].zero_()
    top = torch.amax(half, 1, out=s.floats[10].view(torch.int32))
    top.bitwise_right_shift_(7)  # an exponent, 127 that of 1
    torch.bitwise_left_shift(top, 23, out=number)
    torch.mul(unit, spare, out=scale)
    scale.masked_fill_(torch.le(scale, LARGE, out=wrong).logical_not_(), torch.nan)
    torch.lt(top, code.exponents, out=wrong)
    scale.masked_fill_(wrong.logical_or_(torch.lt(scale, TINY, out=small)), 0.0)
    half.sub_(torch.sub(top, code.exponents - 1, out=number).mul_(BINADE)[:, None])
    if code.signed:
        below = torch.lt(half, s.thresholds, out=s.masks)
        half.clamp_(min=STEP).masked_fill_(below, 0)
    half.clamp_(min=0).bitwise_right_shift_(CODE_BITS - 16)
    if code.signed:
        half.add_(x.view(torch.int32).bitwise_right_shift_(31).bitwise_and_(SIGN))
    half.masked_fill_(torch.gt(scale, 0, out=small).logical_not_()[:, None], 0)
    slots[code.name].copy_(s.flat(half))
    slots[code.scale].copy_(scale)


ULPS = (0, 1, -1, 2, -2)

RESTORED_ELEMENTS = 1 << 20
"""That are restored at once: the temporaries take some ten times their bytes."""


def restore(
    moments: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the slots of a span's record from float32 moments that come from elsewhere.

    Rounds to the nearest code. What `decode` gave is decoded to the same bits again, for scales of
    v from 2**-95 on (below, its smallest levels are subnormal): the largest of a group is a level
    of its scale, so the scale is looked for among those that it may be a level of. Of a group with
    few numbers several may fit; `scales`, those of the record, say which it was, so that the record
    is the same. Where none fits, the moments come from elsewhere, and the scale is a power of two.
    """
    elements, known = slots[MOMENTUM.name].numel(), scales or {}
    for code, first in product((MOMENTUM, VARIANCE), range(0, elements, RESTORED_ELEMENTS)):
        span = slice(first, first + RESTORED_ELEMENTS)
        groups = slice(first // GROUP_ELEMENTS, (first + RESTORED_ELEMENTS) // GROUP_ELEMENTS)
        scale = known[code.scale][groups] if code.scale in known else None
        codes, found_scales = _restored(code, _of_groups(moments[code.name][span]), scale)
        there = slots[code.name][span]
        there.copy_(codes.view(-1)[: there.numel()])
        slots[code.scale][groups].copy_(found_scales)


def _restored(code: Code, x: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of moments, a row for each group, of which the scales may be known."""
    largest = x.abs().amax(1)
    binade = (largest.view(torch.int32) & 0xFF << 23).view(torch.float32)
    codes, scales = _nearest(code, x, binade.masked_fill(largest < TINY, 1.0))
    left = scales > 0  # groups whose scale is still looked for
    tries = product((True, False) if known is not None else (False,), ULPS, range(STEPS))
    for exact, ulps, step in tries:
        scale = largest / (1 + step / STEPS)
        scale = (scale.view(torch.int32) + ulps).view(torch.float32)
        some = (x[:, :8] / scale[:, None]).view(torch.int32)
        some = (some + 8 & (1 << CODE_BITS) - 1) <= 16  # almost levels
        rows = (left & some.all(1)).nonzero().view(-1)
        if not len(rows):
            continue
        found, scale = _nearest(code, x[rows], scale[rows])
        decoded = code.levels(found) * scale[:, None]
        fits = ((decoded == x[rows]) | (x[rows] == 0.0)).all(1)  # 0 behind the last element
        if exact and known is not None:
            fits &= scale == known[rows]
        rows = rows[fits]
        codes[rows], scales[rows], left[rows] = found[fits], scale[fits], False
    return codes, scales


def _nearest(code: Code, x: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of moments, a row for each group, by units that are near their largest."""
    slots = {code.name: torch.empty_like(x, dtype=torch.uint8).view(-1)}
    slots[code.scale] = torch.empty_like(unit)
    s = CodedScratch.made(x.numel(), x.device)
    s.dithers.fill_(NEAREST)
    s.thresholds.fill_(_threshold(GROUP_ELEMENTS))
    encode(code, torch.div(x, unit[:, None], out=s.m), unit, slots, s)
    return slots[code.name].view_as(x), slots[code.scale]


def dither(first_element: int, step: int, s: CodedScratch) -> None:
    """Write the integers to round the codes of a span by: `s.dithers` and `s.thresholds`.

    The dither's upper seven bits are over a group those of the place in it, in reverse order: 128
    points that lie evenly, also in each part of the group. In all of a group the same bits are then
    flipped, those of a 64-bit hash (splitmix64, less its last xor-shift) of its number and the
    step's: the points stay even, and the dither of an element differs from step to step. The
    threshold is the same for elements of a group as far apart as they are many, and turns by
    other bits of the hash.
    """
    x, spare = s.longs
    even, turned = _tables(x.device)
    torch.arange(len(x), out=x)
    x.add_(_wrapped(first_element // GROUP_ELEMENTS + step * 0x9E3779B97F4A7C15))
    x.bitwise_xor_(_shifted(x, 30, spare)).mul_(_wrapped(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shifted(x, 27, spare)).mul_(_wrapped(0x94D049BB133111EB))
    flips = s.floats[5].view(torch.int32)
    flips.copy_(_shifted(x, 32, spare).bitwise_and_((1 << CODE_BITS) - 1))
    torch.bitwise_xor(flips[:, None], even, out=s.dithers)
    turns = _shifted(x, 56, spare).bitwise_and_(GROUP_ELEMENTS - 1)
    torch.index_select(turned, 0, turns, out=s.thresholds)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the places in a group: what a dither is before its bits are flipped, and thresholds.

    Those in a row for each number of places that they are turned by.
    """
    places = range(GROUP_ELEMENTS)
    even = [int(f"{place:07b}"[::-1], 2) << CODE_BITS - 7 for place in places]
    thresholds = [_threshold(2 * (place * 37 % GROUP_ELEMENTS) + 1) for place in places]
    turned = [thresholds[turns:] + thresholds[:turns] for turns in places]
    both = torch.tensor([even, *turned], dtype=torch.int32).to(device, non_blocking=True)
    if device.type != "cpu":  # Other streams read it, too.
        there = torch.Event(device)
        there.record(torch.accelerator.current_stream(device))
        there.synchronize()
    return both[0], both[1:]


def _threshold(share: int) -> int:
    """Where a momentum begins to become the smallest level, in halves above the code 0.

    One that is `level` becomes the smallest level if `level / smallest > share / 256`. Its code,
    which goes on below 0, is compared: levels are (8 + code % 8) * 2**(code // 8), the smallest 9.
    """
    code = 1
    while (8 + (code - 1) % STEPS) * 256 > share * 9 << -((code - 1) // STEPS):
        code -= 1
    return code * STEP


def _of_groups(x: Tensor) -> Tensor:
    """A row per group, the last one padded with zeros (False)."""
    return pad(x, (0, -x.numel() % GROUP_ELEMENTS)).view(-1, GROUP_ELEMENTS)


def _spread(of_groups: Tensor, like: Tensor) -> Tensor:
    """Each group's item, for each of the elements of `like`."""
    return of_groups.repeat_interleave(GROUP_ELEMENTS)[: like.numel()]


def _wrapped(x: int) -> int:
    """An integer modulo 2**64, as torch has it: signed."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(x: Tensor, bits: int, out: Tensor) -> Tensor:
    """The unsigned shift to the right of 64-bit integers."""
    torch.bitwise_right_shift(x, bits, out=out)
    return out.bitwise_and_((1 << 64 - bits) - 1)
