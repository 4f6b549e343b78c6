"""Every kernel that this machine can run against the reference, bit for bit."""

from __future__ import annotations

import itertools
import math
import mmap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpu_adam
from cpu_adam import FORMATS, AdamHyper, Part, choice, native, reference
from cpu_adam.checks import GRADIENT_DTYPES
from cpu_adam.hyper import Hyper
from cpu_adam.native import UpdateTable
from cpu_adam.spans import Span
from tests import adam_states
from tests.adam_states import State, assert_same, assert_same_state, hyper, hyper_of, special, told

COMPILED = [name for name in choice.available() if name != "python"]
PIECE = 32 * 1024
"""Elements of a piece of work in src/sweep.cpp: longer spans are cut."""
LENGTHS = (0, 1, 7, 15, 16, 17, 63, 64, 65, 129, 511, 513, 1000)
"""As many as share no factor with the number of cases that go through them."""
THREADS = (1, 2, 3, 5)

every_kernel = pytest.mark.parametrize("kernel", COMPILED)
needs_kernels = pytest.mark.skipif(not COMPILED, reason="no kernel is compiled")


@pytest.fixture
def many_threads() -> Iterator[None]:
    cpu_adam.set_threads(3)
    yield
    cpu_adam.set_threads(None)


def assert_updates_as_the_reference(state: State, by: Any, **options: Any) -> None:
    """By every kernel, each from what `state` is now; it is what they make of it afterwards."""
    before, want = state.clone(), state.clone()
    want.update(reference, by, **options)
    for kernel in COMPILED:
        state.become(before)
        with choice.forced(kernel), told(kernel, options):
            state.update(native, by, **options)
            assert_same_state(state, want)


@needs_kernels
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_update_is_the_reference(name: str, dtype: torch.dtype, turn: int) -> None:
    """Half of the options in the fast tier: of them and the dtype, all meet but one at a time."""
    all_options = itertools.product(
        enumerate(adam_states.VARIANTS[FORMATS[name].rule]),
        (False, True),
        enumerate((1.0, 0.37, float("nan"))),
    )
    turn += GRADIENT_DTYPES.index(dtype)
    options = (
        (changes, maximize, scale)
        for (one, changes), maximize, (other, scale) in all_options
        if (one + maximize + other + turn) % 2 == 0
    )
    lengths, coded = itertools.cycle(LENGTHS), FORMATS[name].coded
    scales = []
    for seed, (changes, maximize, scale) in enumerate(options):
        by = hyper_of(name, **changes, maximize=maximize)
        for step, offset, first in ((1, 0, 0), (2, 1, 384), ((1 << 24) + 3, 5, 1 << 40)):
            state = State(name, next(lengths), dtype, seed=seed, offset=offset)
            if coded and scale == scale:
                scales += [x for key, x in state.slots.items() if key.endswith("_scale")]
            assert_updates_as_the_reference(
                state, by, step=step, gradient_scale=scale, first_element=first
            )
    if coded:
        found = torch.cat(scales)
        assert float((found.isfinite() & (found > 0)).float().mean()) > 0.6
        assert bool(found.isnan().any())


@needs_kernels
@pytest.mark.parametrize("exponent", [119, 121, 127])
def test_compact_of_huge_momenta(exponent: int) -> None:
    """A scale above 2**120 is as one that is not finite."""
    state = State("compact", 12800, torch.float32)
    for slot in state.slots.values():
        slot.zero_()
    state.weight.fill_(1.0)
    mantissa = 1 + np.random.default_rng(exponent).random(12800, "f4").clip(0.0, 0.99)
    state.gradient.copy_(torch.from_numpy(mantissa) * 2.0**exponent)
    assert_updates_as_the_reference(state, hyper_of("compact", beta1=0.0), step=3)
    scales = state.slots["exp_avg_scale"]
    assert bool((scales.isnan() if exponent > 120 else scales.isfinite()).all())


@needs_kernels
@pytest.mark.parametrize("gradient", [0.0, -0.0, -1e-3])
def test_every_pair_of_codes(gradient: float) -> None:
    state = State("compact", 1 << 16, torch.float32)
    state.gradient.fill_(gradient)
    state.slots["exp_avg"].copy_(torch.arange(1 << 16) & 255)
    state.slots["exp_avg_sq"].copy_(torch.arange(1 << 16) >> 8)
    state.slots["exp_avg_scale"].copy_(torch.logspace(-30, 30, 512, 2.0))
    state.slots["exp_avg_sq_scale"].copy_(torch.logspace(30, -30, 512, 2.0))
    assert_updates_as_the_reference(state, hyper_of("compact"), step=7)


@needs_kernels
@given(data=st.data())
def test_update_is_the_reference_for_any_factors(data: st.DataObject) -> None:
    number = st.floats(0.0, 1e6, width=32)
    by = AdamHyper(
        lr=data.draw(number),
        beta1=data.draw(st.floats(0.0, 1.0, exclude_max=True)),
        beta2=data.draw(st.floats(0.0, 1.0, exclude_max=True)),
        eps=data.draw(number),
        weight_decay=data.draw(number),
        decoupled=data.draw(st.booleans()),
        maximize=data.draw(st.booleans()),
    )
    name, dtype = (
        data.draw(st.sampled_from([name for name, row in FORMATS.items() if row.rule == "adam"])),
        data.draw(st.sampled_from(GRADIENT_DTYPES)),
    )
    step, scale = data.draw(st.integers(1, 1 << 40)), data.draw(st.floats(-1e6, 1e6, width=32))
    state = State(name, data.draw(st.integers(0, 700)), dtype, seed=data.draw(st.integers(0, 1000)))
    assert_updates_as_the_reference(state, by, step=step, gradient_scale=scale)


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_threads_do_not_matter(name: str, many_threads: None) -> None:
    state, by = State(name, 5 * PIECE + 77, torch.bfloat16), hyper_of(name)
    before, want = state.clone(), state.clone()
    want.update(reference, by, step=3)
    for kernel, count in itertools.product(COMPILED, THREADS):
        state.become(before)
        cpu_adam.set_threads(count)
        with choice.forced(kernel), told(kernel, count):
            assert cpu_adam.threads() == count
            state.update(native, by, step=3)
            assert_same_state(state, want)


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_table_is_the_spans(name: str, many_threads: None) -> None:
    lengths = [*LENGTHS, PIECE, PIECE + 1, *(37,) * 300, 2 * PIECE + 3]
    group = FORMATS[name].group_elements
    lengths = [-(-length // group) * group for length in lengths[:-1]] + lengths[-1:]
    whole = State(name, sum(lengths), torch.float16)
    before, want, again = whole.clone(), whole.clone(), whole.clone()
    ends = list(itertools.accumulate(lengths))
    steps = [(hyper_of(name, lr=10.0**-k), k + 1) for k in range(3)]
    cuts = [whole.part(end - length, length) for length, end in zip(lengths, ends)]
    spans = [Span(cut.weight, cut.slots, k % 3, k * group) for k, cut in enumerate(cuts)]
    parts = [
        Part(end - length, length, k * group, k % 3)
        for k, (length, end) in enumerate(zip(lengths, ends))
    ]
    options: dict[str, Any] = {"gradient_scale": 0.5, "format": whole.format}
    for k, part in enumerate(parts):
        by, step = steps[k % 3]
        here = {"step": step, "first_element": k * group, "gradient_scale": 0.5}
        want.part(part.start, part.elements).update(reference, by, **here)
    for kernel in COMPILED:
        whole.become(before)
        again.become(before)
        with choice.forced(kernel), told(kernel):
            table = UpdateTable(spans, whole.format)
            table.update(steps, [cut.gradient for cut in cuts], gradient_scale=0.5)
            native.update_parts(again.weight, again.gradient, again.slots, parts, steps, **options)
            assert_same_state(again, want)
            assert_same_state(whole, want)


def test_tables_refuse_what_does_not_fit() -> None:
    state = State("fp32", 10, torch.float32)
    with pytest.raises(ValueError, match="fp32 update"):
        UpdateTable([Span(state.weight[:3], state.slots)], state.format)
    for hyper_and_step in ((hyper_of("lion_fp32"), 1), (hyper(), 0), (hyper(), 1 << 48)):
        with pytest.raises(ValueError, match=r"asked .*; found .*; likely cause: .*; try: "):
            UpdateTable([Span(state.weight, state.slots)], state.format).update(
                [hyper_and_step], [state.gradient]
            )
    state.update(native, hyper(), step=(1 << 48) - 1)


@pytest.mark.parametrize("kernel", choice.available())
def test_parts_of_a_chunk_leave_the_rest_alone(kernel: str) -> None:
    got = State("exact", 1000, torch.bfloat16)
    want = got.clone()
    parts = [Part(10, 100, 7, 1), Part(500, 0), Part(110, 1), Part(999, 1, 3, 1)]
    steps: list[tuple[Hyper, int]] = [(hyper(), 2), (hyper(lr=0.1), 5)]
    with choice.forced(kernel):
        native.update_parts(got.weight, got.gradient, got.slots, parts, steps, format=got.format)
        native.update_parts(got.weight, got.gradient, got.slots, [], [], format=got.format)
    for part in parts:
        by, step = steps[part.step]
        want.part(part.start, part.elements).update(reference, by, step=step)
    assert_same_state(got, want)


def test_parts_that_do_not_fit_are_refused_before_anything_is_changed() -> None:
    state = State("exact", 100, torch.bfloat16)
    before = state.clone()
    good = Part(0, 10)
    apart = (Part(95, 6), Part(-1, 3), Part(0, -1), Part(0, 10, -1))
    for wrong in (*apart, Part(5, 10), Part(10, 1, 0, 1)):
        with pytest.raises(ValueError, match=r"asked for .*; found .*; likely cause: .*; try: "):
            native.update_parts(
                state.weight,
                state.gradient,
                state.slots,
                [good, wrong],
                [(hyper(), 1)],
                format=state.format,
            )
    assert_same_state(state, before)


@pytest.mark.parametrize("kernel", choice.available())
def test_a_part_does_not_change_the_scales_of_its_neighbours(kernel: str) -> None:
    """It ends with its group, its chunk or its parameter."""
    state, (by, step) = State("compact", 300, torch.float32), (hyper(), 1)
    before = state.clone()

    def update(part: Part) -> None:
        with choice.forced(kernel):
            native.update_parts(
                state.weight, state.gradient, state.slots, [part], [(by, step)], format=state.format
            )

    with pytest.raises(ValueError, match=r"asked for .*at a multiple of 128.*; try: is_last"):
        update(Part(0, 10))
    assert_same_state(state, before)
    for part in (Part(0, 128), Part(256, 44), Part(128, 10, is_last=True)):
        update(part)
        before.part(part.start, part.elements).update(reference, by, step=step)
        assert_same_state(state, before)


@every_kernel
def test_every_weight_and_residue_round_trips(kernel: str, many_threads: None) -> None:
    edges = [*range(-5, 6), *range(-0x8000, -0x7FF8), *range(0x7FF8, 0x8000), 0x4000, -0x4000]
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(len(edges))
    residue = torch.tensor(edges, dtype=torch.int16).repeat_interleave(1 << 16)
    weight = weight.view(torch.bfloat16)
    want = reference.join(weight, residue)
    again = torch.empty_like(weight), torch.empty_like(residue)
    reference.split(want, *again)
    with choice.forced(kernel):
        master = native.join(weight, residue)
        got = torch.empty_like(weight), torch.empty_like(residue)
        native.split(master, *got)
    assert_same(master, want)
    assert_same(got[0], again[0])
    assert_same(got[1], again[1])


@every_kernel
def test_every_half_is_read_right(kernel: str) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        got, want = torch.zeros(2, 1 << 16)
        with choice.forced(kernel):
            native.accumulate(got, words.view(dtype))
        reference.accumulate(want, words.view(dtype))
        assert_same(got, want)


@every_kernel
@pytest.mark.parametrize("elements", [*LENGTHS, 3 * PIECE + 5])
def test_accumulate_is_the_reference(kernel: str, elements: int) -> None:
    pairs = [(torch.float32, dtype) for dtype in GRADIENT_DTYPES]
    for into, dtype in (*pairs, (torch.bfloat16, torch.bfloat16)):
        got, gradient = special(elements, 1).to(into), special(elements, 2).to(dtype)
        want = got.clone()
        with choice.forced(kernel):
            native.accumulate(got, gradient)
        reference.accumulate(want, gradient)
        # torch's own NaN of bfloat16 depends on where in the tensor it lies.
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan)
        assert_same(got.masked_fill(nan, 0), want.masked_fill(nan, 0))


@every_kernel
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_sum_of_squares_is_the_reference(
    kernel: str, dtype: torch.dtype, many_threads: None
) -> None:
    for elements in (*LENGTHS, 1023, 1024, 1025, 5000, 9 * PIECE + 11):
        for offset in (0, 1, 3):
            x = special(elements + offset, elements)
            x = x.masked_fill(~x.to(dtype).isfinite(), 0.5).to(dtype)[offset:]
            with choice.forced(kernel):
                assert native.square_sums(x, offset) == reference.square_sums(x, offset)
    for odd in (torch.inf, torch.nan):
        x = torch.ones(3000, dtype=dtype).index_fill(0, torch.tensor(2000), odd)
        with choice.forced(kernel):
            assert str(native.square_sums(x)) == str(reference.square_sums(x))
    largest = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(native.sum_of_squares(largest))


@every_kernel
@pytest.mark.parametrize("name", ["sgd_exact", "sgd_fp32"])
@pytest.mark.parametrize("elements", [5, 1037])
def test_sgd_without_momentum_does_not_touch_its_buffer(
    kernel: str, name: str, elements: int
) -> None:
    """It may be memory that other threads and spans have too; here it cannot be written."""
    state = State(name, elements, torch.float32)
    held = mmap.mmap(-1, 4 * elements, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it must not be written
        state.slots["momentum_buffer"] = torch.frombuffer(held, dtype=torch.float32)
    by = hyper_of(name, momentum=0.0)
    with choice.forced(kernel):
        state.update(native, by, step=1)
    assert not state.slots["momentum_buffer"].any()
