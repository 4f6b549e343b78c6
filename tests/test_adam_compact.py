"""The compact format: its codes, its rounding, what it keeps of the moments, what it refuses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpu_adam
from cpu_adam import FORMATS, AdamHyper, compact, reference, views
from cpu_adam.formats import DEVICE_BLOCK_ELEMENTS, GROUP_ELEMENTS
from cpu_adam.torch_state import from_plain, scales, to_plain

COMPACT = FORMATS["compact"]
CPU = torch.device("cpu")
CODES = (compact.MOMENTUM, compact.VARIANCE)


def hyper(**changes: Any) -> AdamHyper:
    base = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    return AdamHyper(**{**base, "decoupled": True, **changes})


class State:
    """A weight of zeros and its record of zeros."""

    def __init__(self, elements: int, name: str = "compact") -> None:
        self.format, self.elements = FORMATS[name], elements
        self.record = torch.zeros(self.format.record_bytes(elements), dtype=torch.uint8)
        self.slots = views(self.record, self.format, elements)
        self.weight = torch.zeros(elements, dtype=getattr(torch, self.format.weight_dtype))

    def update(self, gradient: torch.Tensor, by: AdamHyper, step: int, **options: Any) -> None:
        options = {"step": step, "format": self.format, **options}
        cpu_adam.update(self.weight, gradient, self.slots, by, **options)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """m and the root of v."""
        found = self.slots if self.format.group_elements == 1 else compact.decode(self.slots)
        return found["exp_avg"], found["exp_avg_sq"].double().sqrt().float()

    def bits(self) -> bytes:
        return self.weight.view(torch.uint8).numpy().tobytes() + self.record.numpy().tobytes()


def random(elements: int, seed: int, decades: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-decades, 1, elements)
    return torch.from_numpy((rng.normal(size=elements) * scale).astype("f4"))


def encode(moments: Mapping[str, torch.Tensor], slots: dict[str, torch.Tensor], step: int) -> None:
    """As after a step of groups without a past."""
    for code in CODES:
        encode_one(code, moments[code.name], torch.ones_like(slots[code.scale]), slots, step)


def encode_one(
    code: compact.Code,
    x: torch.Tensor,
    unit: torch.Tensor,
    slots: Mapping[str, torch.Tensor],
    step: int,
) -> None:
    scratch = dithers_of(0, x.numel(), step)
    scratch.flat(scratch.m).copy_(x)
    compact.encode(code, scratch.m, unit, slots, scratch)


def dithers_of(first_element: int, elements: int, step: int) -> compact.CodedScratch:
    scratch = compact.CodedScratch.made(elements, CPU)
    compact.dither(first_element, step, scratch)
    return scratch


# Codes.


def every_code() -> dict[str, torch.Tensor]:
    """Slots of 256 groups with all codes, each group with one of the largest."""
    codes = State(256 * GROUP_ELEMENTS).slots
    counted = torch.arange(256 * GROUP_ELEMENTS)
    codes["exp_avg"].copy_(counted // 2 % 256)
    codes["exp_avg"].masked_fill_(codes["exp_avg"] == compact.SIGN, 0)  # there is no -0
    codes["exp_avg_sq"].copy_(counted * 7 % 256)
    codes["exp_avg"][::GROUP_ELEMENTS] = compact.SIGN + 127
    codes["exp_avg_sq"][::GROUP_ELEMENTS] = 255
    return codes


def test_every_code_comes_back() -> None:
    """Whatever it is rounded by: what decays only is neither rounded nor changed."""
    codes, again = every_code(), State(256 * GROUP_ELEMENTS).slots
    for step, code in itertools.product((1, 2, 3), CODES):
        unit = random(256, step, 9).abs() + 1e-20
        encode_one(code, code.levels(codes[code.name]), unit, again, step)
        assert torch.equal(again[code.name], codes[code.name])
        assert torch.equal(again[code.scale], unit)


def test_levels_are_those_of_the_documentation() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for code, least in ((compact.MOMENTUM, -15), (compact.VARIANCE, -31)):
        magnitude = [c % 128 if code.signed else c for c in range(256)]
        want = [(1 + c % 8 / 8) * 2.0 ** (least + c // 8) for c in magnitude]
        if code.signed:
            want = [x * (-1) ** (c >= 128) if c % 128 else 0.0 for c, x in enumerate(want)]
        assert code.levels(codes).tolist() == want


def test_what_was_restored_decodes_to_the_same_bits() -> None:
    """All codes, with scales from the smallest that it is promised for to the largest."""
    codes, again = every_code(), State(256 * GROUP_ELEMENTS).slots
    for name, least, largest in (("exp_avg", -100, 120), ("exp_avg_sq", -95, 120)):
        scales = 2.0 ** torch.linspace(least, largest, 256).double()
        codes[name + "_scale"].copy_(scales)
        assert float(codes[name + "_scale"][0]) == 2.0**least
        assert float(codes[name + "_scale"][-1]) == 2.0**largest
    weights = torch.arange(256 * GROUP_ELEMENTS, dtype=torch.int16)
    codes["residue"].copy_(weights)
    from_plain(to_plain(codes, COMPACT), again, COMPACT)
    for name, slot in codes.items():
        assert torch.equal(again[name], slot), name


def test_a_span_larger_than_a_block_is_restored() -> None:
    some, times = State(1 << 16), DEVICE_BLOCK_ELEMENTS // (1 << 16) + 1
    encode(
        {"exp_avg": random(1 << 16, 1, 3), "exp_avg_sq": random(1 << 16, 2).abs()}, some.slots, 5
    )
    one, other = ({name: x.repeat(times) for name, x in some.slots.items()} for _ in range(2))
    for slot in other.values():
        slot.zero_()
    moments = to_plain(one, COMPACT)
    from_plain(moments | scales(one, COMPACT), other, COMPACT)
    for name, found in to_plain(other, COMPACT).items():
        assert torch.equal(found, moments[name]), name


@pytest.mark.parametrize("decades", [0, 3, 10])
def test_moments_from_elsewhere_are_rounded_to_the_nearest(decades: int) -> None:
    m, v = random(10_000, 1, decades), random(10_000, 2, decades).square()
    slots = State(10_000).slots
    from_plain({"exp_avg": m, "exp_avg_sq": v}, slots, COMPACT)
    decoded = compact.decode(slots)
    for code, want in ((compact.MOMENTUM, m), (compact.VARIANCE, v)):
        scale = slots[code.scale].repeat_interleave(GROUP_ELEMENTS)[:10_000]
        least = scale * 2.0 ** (1 - code.exponents) * (1.125 if code.signed else 1)
        error = (decoded[code.name] - want).abs()
        assert bool((error <= want.abs() / 16 + least * (0.53 if code.signed else 1.0)).all())
        fine = want.abs() > least
        assert bool((error <= want.abs() / 16 * 1.00001)[fine].all())


def test_moments_too_small_for_a_scale_are_restored_as_zero() -> None:
    """Down to the smallest subnormal number: a row that is idle for long has such."""
    tiny = 2.0 ** torch.arange(-149, -101, dtype=torch.float64).repeat_interleave(GROUP_ELEMENTS)
    slots = State(tiny.numel()).slots
    from_plain({"exp_avg": -tiny.float(), "exp_avg_sq": tiny.float()}, slots, COMPACT)
    for code in (compact.MOMENTUM, compact.VARIANCE):
        assert not slots[code.scale].any(), code.scale
        assert not slots[code.name].any(), code.name


def test_what_is_missing_is_restored_as_zero() -> None:
    state = State(200)
    for slot in state.slots.values():
        slot.fill_(3)
    from_plain({"exp_avg": torch.ones(200, dtype=torch.bfloat16)}, state.slots, COMPACT)
    found = to_plain(state.slots, COMPACT)
    assert found["exp_avg"].eq(1).all()
    assert not found["exp_avg_sq"].any()
    assert not found["residue"].any()


@pytest.mark.parametrize("decades", [0, 3, 20])
def test_codes_are_the_two_nearest(decades: int) -> None:
    m, v = random(10_000, 1, decades), random(10_000, 2, decades).abs() + 1e-18
    slots = State(10_000).slots
    encode({"exp_avg": m, "exp_avg_sq": v}, slots, 5)
    for code, want in ((compact.MOMENTUM, m), (compact.VARIANCE, v)):
        largest = code.exponents * 8 - 1
        levels = code.levels(torch.arange(largest + 1, dtype=torch.uint8)).double()
        scale = slots[code.scale].repeat_interleave(GROUP_ELEMENTS)[:10_000].double()
        level, found = want.double().abs() / scale, slots[code.name].long() & largest
        low, high = levels[(found - 1).clamp(min=0)], levels[(found + 1).clamp(max=largest)]
        assert bool(((level > low) | (found == 0)).all())
        assert bool(((level < high) | (level < 2) & (found == largest)).all())
        tops = torch.nn.functional.pad(found, (0, -10_000 % GROUP_ELEMENTS)).view(-1, 128).amax(1)
        assert int(tops.min()) >= largest - 7  # in the top binade
    assert bool((compact.decode(slots)["exp_avg"] * m >= 0).all())


def test_dither_is_even_in_a_group_and_over_steps() -> None:
    steps = [dithers_of(GROUP_ELEMENTS * 3, 1024, step) for step in range(1, 257)]
    dithers = torch.stack([one.dithers.view(-1) for one in steps])  # step, element
    thresholds = torch.stack([one.thresholds.view(-1) for one in steps])
    found = dithers.double() / 2**compact.CODE_BITS
    assert 0 <= float(found.min()) < float(found.max()) < 1
    assert float((found.mean(0) - 0.5).abs().max()) < 5 / math.sqrt(12 * 256)
    gaps = found.view(256, 8, GROUP_ELEMENTS).sort(-1).values.diff()
    assert float(gaps.max()) < 3 / GROUP_ELEMENTS
    after = (found[1:] - 0.5).mul(found[:-1] - 0.5).mean(0)  # of an element, step to step
    assert float(after.abs().max()) < 5 / 12 / math.sqrt(255)
    groups = thresholds.view(256, 8, GROUP_ELEMENTS).sort(-1).values
    assert bool((groups == groups[0, 0]).all())
    assert len(set(groups[0, 0].tolist())) > 30
    ranks = thresholds.double().sub(thresholds.double().mean()).div(thresholds.double().std())
    together = ranks.mul((found - 0.5) * math.sqrt(12)).mean(0)  # of the two of an element
    assert float(together.abs().max()) < 5 / math.sqrt(256)


@pytest.mark.parametrize("share", [1.0, 0.999, 0.9, 0.8889, 0.5, 0.3, 0.07, 0.01])
def test_small_momenta_are_kept_on_average(share: float) -> None:
    """Below the smallest level above 0, which is 1.125 * 2**-15 of a unit."""
    least = 1.125 * 2.0**-15
    elements = 4096 * GROUP_ELEMENTS
    m = torch.full((elements,), share * least)
    m[::GROUP_ELEMENTS] = 1.5
    slots = State(elements).slots
    encode({"exp_avg": m, "exp_avg_sq": m * m}, slots, 3)
    assert slots["exp_avg_scale"].eq(1).all()
    found = compact.decode(slots)["exp_avg"].view(-1, GROUP_ELEMENTS)[:, 1:]
    assert set(found.unique().tolist()) <= {0.0, least}
    mean = float(found.double().mean()) / least
    assert abs(mean - share) < 0.01 * share + 0.004  # thresholds are 128ths


# What is kept of the moments.

GRADIENTS = {
    "zero": lambda elements: torch.zeros(elements),
    "tiny": lambda elements: random(elements, 3, 1) * 1e-6,
    "constant": lambda elements: random(elements, 3, 1),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_moments_do_not_stall(name: str) -> None:
    elements, steps = 8 * GROUP_ELEMENTS, 2000 if cpu_adam.kernel().native else 300
    by = hyper(beta1=0.9999, beta2=0.9999, lr=1e-6)
    ours, exact = State(elements), State(elements, "fp32")
    start = random(elements, 4, 1)
    exact.slots["exp_avg"].copy_(start)
    exact.slots["exp_avg_sq"].copy_(start * start)
    encode(exact.slots, ours.slots, 1)
    gradient = GRADIENTS[name](elements)
    before = [float(x.abs().sum()) for x in exact.moments()]
    for step in range(2, steps + 2):
        ours.update(gradient, by, step)
        exact.update(gradient, by, step)
    for found, want, was in zip(ours.moments(), exact.moments(), before):
        change = float(want.abs().sum()) - was
        assert abs(change) > 0.01 * was  # there is something to follow
        error = float((found - want).abs().sum()) / float(want.abs().sum())
        drift = float(found.abs().sum()) - float(want.abs().sum())
        assert abs(drift) < 0.1 * abs(change), (drift, change)
        assert error < 0.1


def test_a_variance_above_zero_never_becomes_zero() -> None:
    state = State(GROUP_ELEMENTS)
    gradient = torch.full((GROUP_ELEMENTS,), 1e-12)
    gradient[7], gradient[8] = 1e6, 0.0
    for step in range(1, 20):
        state.update(gradient, hyper(), step)
    codes = state.slots["exp_avg_sq"]
    assert codes[7] >= 248  # in the top binade
    assert int(codes[8:].max()) == 0
    assert float(compact.decode(state.slots)["exp_avg_sq"].min()) > 0
    assert state.weight[8] == 0
    assert float(state.weight.abs().max()) < 20 * 1.2e-3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_poisons_its_group_and_no_other(value: float) -> None:
    state, clean = State(5 * GROUP_ELEMENTS), State(5 * GROUP_ELEMENTS)
    for step in (1, 2, 3):
        gradient = random(5 * GROUP_ELEMENTS, step)
        clean.update(gradient, hyper(), step)
        if step == 2:
            gradient[GROUP_ELEMENTS + 5] = value
        state.update(gradient, hyper(), step)
    here = slice(GROUP_ELEMENTS, 2 * GROUP_ELEMENTS)
    assert bool(state.weight[here].isnan().all())
    for name in ("exp_avg", "exp_avg_sq"):
        assert state.slots[name + "_scale"].isnan().tolist() == [False, True, False, False, False]
        assert not state.slots[name][here].any()
    others = torch.ones(5 * GROUP_ELEMENTS, dtype=torch.bool)
    others[here] = False
    assert torch.equal(state.weight[others], clean.weight[others])


def test_subnormal_and_huge_gradients_stay_finite() -> None:
    for size in (1e-45, 1e-40, 1e-30, 1e-20, 1e15, 1e18):
        state = State(300)
        for step in range(1, 6):
            state.update(random(300, step) * size, hyper(), step)
        assert bool(state.weight.isfinite().all())
        assert bool(state.slots["exp_avg_scale"].isfinite().all())
        assert float(state.weight.abs().max()) < 0.02
    zero = State(300)
    zero.update(torch.zeros(300), hyper(), 1)
    assert not any(bool(slot.any()) for slot in zero.slots.values())


# Independence of cuts; convergence; what is refused.


@given(cuts=st.lists(st.integers(0, 8), max_size=5), first=st.integers(0, 1 << 33))
def test_pieces_equal_the_whole(cuts: list[int], first: int) -> None:
    whole, pieces, elements = State(1000), State(1000), 1000
    first *= GROUP_ELEMENTS
    edges = [0, *(GROUP_ELEMENTS * cut for cut in sorted(cuts) if cut < 8), elements]
    for step in (1, 2):
        gradient = random(elements, step, 4)
        whole.update(gradient, hyper(), step, first_element=first)
        for start, end in itertools.pairwise(edges):
            reference.update(
                pieces.weight[start:end],
                gradient[start:end],
                reference.cut(pieces.slots, COMPACT, start, end - start),
                hyper(),
                step=step,
                format=COMPACT,
                first_element=first + start,
            )
    assert whole.bits() == pieces.bits()


def test_it_converges_on_a_quadratic_as_exact_does() -> None:
    target, errors = random(2570, 9, 3), []
    for name in ("compact", "exact"):
        state = State(2570, name)
        for step in range(1, 401):
            gradient = (state.weight.float() - target) * (1 + random(2570, step).abs())
            state.update(gradient, hyper(lr=0.05 * (1 - step / 401)), step)
        errors.append(float((state.weight.float() - target).abs().mean()))
    assert errors[0] < 2 * errors[1] + 1e-3


def test_a_span_that_cuts_a_group_is_refused() -> None:
    state = State(300)
    pattern = r"asked for .*multiple of 128.*; found .*; likely cause: .*; try: "
    with pytest.raises(ValueError, match=pattern):
        cpu_adam.update(
            state.weight,
            torch.zeros(300),
            state.slots,
            hyper(),
            step=1,
            format=COMPACT,
            first_element=64,
        )
    with pytest.raises(ValueError, match=pattern):
        cpu_adam.update_parts(
            state.weight,
            torch.zeros(300),
            state.slots,
            [cpu_adam.Part(100, 10)],
            [(hyper(), 1)],
            format=COMPACT,
        )
    short = {**state.slots, "exp_avg_scale": state.slots["exp_avg_scale"][:2]}
    with pytest.raises(ValueError, match="compact update"):
        cpu_adam.update(state.weight, torch.zeros(300), short, hyper(), step=1, format=COMPACT)
