"""The kernels of a device against the reference: compiled as C++, and the PTX that is shipped."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import pytest
import torch

from benchmarks.gpu import make_ptx
from cpu_adam import FORMATS, Part, choice, native, reference
from cpu_adam.checks import GRADIENT_DTYPES
from tests import adam_states
from tests.adam_states import VARIANTS, State, assert_same, assert_same_state, hyper_of, special
from tests.device_build import OPERATIONS, ROWS, TABLE, Blocks, Launches, blocks_of, on_the_cpu
from tests.ptx import Program
from tests.stand_in import kernels
from tests.training import in_turn, some_fast, some_rows_fast

LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 255, 257, 511, 1000, 1153)


class Launching:
    """What makes launches of the kernels in one of their forms."""

    def __init__(self, blocks: Blocks, *, is_ptx: bool) -> None:
        self._blocks, self.is_ptx = blocks, is_ptx

    def __call__(self, **options: Any) -> Launches:
        return Launches(self._blocks, **options)


@pytest.fixture(scope="module", params=["c++", "ptx"])
def launching(request: pytest.FixtureRequest) -> Launching:
    if request.param == "ptx":
        return Launching(Program(choice.ptx().decode()).launch, is_ptx=True)
    return Launching(blocks_of(ctypes.CDLL(str(kernels()))), is_ptx=False)


def assert_updates_as_the_reference(
    launcher: Launches, state: State, by: Any, **options: Any
) -> State:
    want, before = state.clone(), len(launcher.launched)
    want.update(reference, by, **options)
    with on_the_cpu(launcher), adam_states.told(options):
        state.update(native, by, **options)
        assert_same_state(state, want)
    assert [entry for entry, _ in launcher.launched[before:]] == [state.format.name]
    return state


@pytest.mark.parametrize(("name", "dtype"), in_turn(FORMATS, GRADIENT_DTYPES))
def test_update_is_the_reference(name: str, dtype: torch.dtype, launching: Launching) -> None:
    """As `test_adam_native` has it, with all options; and with grids that share rows otherwise."""
    options = itertools.product(
        VARIANTS[FORMATS[name].rule], (False, True), (1.0, 0.37, float("nan"))
    )
    lengths, scales = itertools.cycle(LENGTHS), []
    for seed, (changes, maximize, scale) in enumerate(options):
        launcher = launching(columns=(None, 1, 3)[seed % 3])
        by = hyper_of(name, **changes, maximize=maximize)
        places = ((1, 0, 0), (2, 1, 384), ((1 << 24) + 3, 5, 1 << 40))
        at = seed // 3 + seed  # PTX, which is interpreted, has one of them with all the rest.
        for step, offset, first in (places[at % 3],) if launching.is_ptx else places:
            state = State(name, next(lengths), dtype, seed=seed, offset=offset)
            given = {"step": step, "gradient_scale": scale, "first_element": first}
            assert_updates_as_the_reference(launcher, state, by, **given)
            if scale == scale:
                scales += [x for key, x in state.slots.items() if key.endswith("_scale")]
    if scales:
        found = torch.cat(scales)
        assert float((found.isfinite() & (found > 0)).float().mean()) > 0.5
        assert bool(found.isnan().any())


@pytest.mark.parametrize(
    ("gradient", "apart"), some_rows_fast([(-1e-3, 7), (-1e-3, 1), (0.0, 1), (-0.0, 1)])
)
def test_every_pair_of_codes(gradient: float, apart: int, launching: Launching) -> None:
    """In the fast tier each code with some of the others."""
    codes = torch.arange(0, 1 << 16, apart)
    state = State("compact", len(codes), torch.float32)
    groups = len(state.slots["exp_avg_scale"])
    state.gradient.fill_(gradient)
    state.slots["exp_avg"].copy_(codes & 255)
    state.slots["exp_avg_sq"].copy_(codes >> 8)
    state.slots["exp_avg_scale"].copy_(torch.logspace(-110, 125, groups, 2.0))
    state.slots["exp_avg_sq_scale"].copy_(torch.logspace(125, -110, groups, 2.0))
    assert_updates_as_the_reference(launching(), state, hyper_of("compact"), step=7)


@pytest.mark.parametrize("name", some_fast(FORMATS))
def test_a_launch_does_many_parts_each_by_its_step(name: str, launching: Launching) -> None:
    group, count = FORMATS[name].group_elements, 2 * ROWS + 1
    lengths = [group * (1 + k % 5) for k in range(count - 1)] + [3 * group + 1]
    starts = [0, *itertools.accumulate(lengths)]
    whole = State(name, starts[-1], torch.bfloat16)
    want, steps = whole.clone(), [(hyper_of(name, lr=10.0**-k), k + 1) for k in range(3)]
    parts = [Part(start, n, k * group, k % 3) for k, (start, n) in enumerate(zip(starts, lengths))]
    parts[-1] = parts[-1]._replace(is_last=True)
    for part in parts:
        by, step = steps[part.step]
        here = {"step": step, "first_element": part.first_element, "gradient_scale": 0.5}
        want.part(part.start, part.elements).update(reference, by, **here)
    got, launcher = whole.clone(), launching()
    with on_the_cpu(launcher):
        given = got.weight, got.gradient, got.slots, parts, steps
        native.update_parts(*given, gradient_scale=0.5, format=got.format)
    assert_same_state(got, want)
    assert [rows for _, rows in launcher.launched] == [ROWS, ROWS, 1]


@pytest.mark.parametrize("dtype", some_fast(GRADIENT_DTYPES))
def test_sums_of_squares_are_the_reference(dtype: torch.dtype, launching: Launching) -> None:
    for elements in (1, 2, 31, 33, 1000, 1023, 1024, 1025, 2048, 5000, 100_001):
        x = torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)
        sums = launching(columns=elements % 3 or None).squares(x)
        assert torch.equal(sums, reference.leaf_sums(x, None)[: len(sums)])
    assert launching().squares(special(5000, 3)).isnan().any()
    assert launching().squares(torch.tensor([1.0, float("-inf")])).tolist() == [float("inf")]


def test_accumulation_and_masters_are_the_reference(launching: Launching) -> None:
    a, b = special(2000, 1), special(2000, 2)
    for into, dtype in ((torch.float32, d) for d in (*GRADIENT_DTYPES,)):
        check_accumulated(launching(), a.to(into), b.to(dtype))
    check_accumulated(launching(), a.bfloat16(), b.bfloat16())
    weight, residue = torch.empty(2000, dtype=torch.bfloat16), torch.empty(2000, dtype=torch.int16)
    wanted = torch.empty_like(weight), torch.empty_like(residue)
    reference.split(a, *wanted)
    with on_the_cpu(launching()):
        native.split(a, weight, residue)
        assert_same(native.join(weight, residue), reference.join(*wanted))
    assert_same(weight, wanted[0])
    assert_same(residue, wanted[1])


def check_accumulated(launcher: Launches, into: torch.Tensor, by: torch.Tensor) -> None:
    want = into.clone().add_(by)
    with on_the_cpu(launcher):
        native.accumulate(into, by)
    assert launcher.launched
    nan = want.isnan()  # Torch leaves the payload of a bfloat16 NaN open, too.
    assert torch.equal(into.isnan(), nan)
    assert_same(into.masked_fill(nan, 0.0), want.masked_fill(nan, 0.0))


# What is shipped.


def test_the_ptx_was_made_of_these_sources() -> None:
    """Whoever changes what it is made of runs `python benchmarks/gpu/make_ptx.py`."""
    assert set(make_ptx.sources()) > {"../operations.inc", "rules.inc", "units.inc", "scalar.cuh"}
    head = choice.ptx().decode().split("\n")[0]
    assert head.endswith(make_ptx.digest()), "python benchmarks/gpu/make_ptx.py"


def test_arithmetic_of_the_ptx_is_rounded_once_and_correctly() -> None:
    text = choice.ptx().decode()
    assert ".version 7.0\n.target sm_70\n" in text
    assert not re.findall(r"fma|approx|ftz|div\.full|rcp|\.local|\.func", text)
    found = set(re.findall(r"\b([a-z]+)((?:\.\w+)*?)\.f(?:32|64)\b", text))
    plain = {"mov", "selp", "setp", "cvt"}
    rounded = {(op, how) for op, how in found if op not in plain and op not in ("ld", "st")}
    assert {how for _, how in rounded} == {".rn"}, rounded
    assert {op for op, _ in rounded} == {"add", "sub", "mul", "div", "sqrt"}
    assert set(re.findall(r"\bcvt\.(?:\w+\.)*f32|cvt\.f\w+\.\w+", text)) == {
        "cvt.f64.f32",
        "cvt.rzi.u64.f32",  # The number of the step.
    }


def test_the_ptx_has_an_entry_for_all_that_is_launched() -> None:
    text = choice.ptx().decode()
    assert {*re.findall(r"\.visible \.entry (\w+)\(", text)} == {*OPERATIONS, choice.SQUARES}
    size = TABLE.itemsize
    assert set(re.findall(r"_param_0\[(\d+)\]", text)) == {str(size)}
    assert size <= 4096


def test_the_kernels_of_the_cpu_have_the_same_face() -> None:
    kernels = pytest.importorskip("cpu_adam._kernels")
    assert kernels.OPERATIONS == OPERATIONS
    assert kernels.FACTORS == Launches.FACTORS
