"""The layout of a unit: every trainable element in one chunk, everything aligned."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.layout import Plan
from offload.planning.profile import (
    BLOCK_BYTES,
    CHUNK_ELEMENTS,
    ITEM_BYTES,
    PARAMETER_ALIGN_ELEMENTS,
    ParameterSpec,
    Unit,
    lay_out_unit,
    profile_of,
    round_up,
)
from tests.examples import cheap
from tests.profiles import plan_of, unit, units, wanted_parameters


@given(units())
@cheap(100)
def test_spans_cover_every_trainable_parameter_once(one: Unit) -> None:
    covered: dict[int, list[tuple[int, int]]] = {}
    for chunk in one.chunks:
        for span in chunk.slices:
            parameter = one.parameters[span.parameter]
            assert parameter.segment == chunk.segment
            assert 0 <= span.chunk_start < span.chunk_start + span.elements <= chunk.elements
            at = chunk.start + span.chunk_start
            assert at == parameter.start + span.parameter_start
            stop = span.parameter_start + span.elements
            covered.setdefault(span.parameter, []).append((span.parameter_start, stop))
    for index, parameter in enumerate(one.parameters):
        ranges = covered.get(index, [])
        if not parameter.trainable:
            assert ranges == []
            continue
        assert ranges[0][0] == 0
        assert ranges[-1][1] == parameter.elements
        assert all(first[1] == second[0] for first, second in pairwise(ranges))


@given(units())
@cheap(100)
def test_alignment_and_order(one: Unit) -> None:
    for parameter in one.parameters:
        segment = one.segments[parameter.segment]
        assert parameter.start % PARAMETER_ALIGN_ELEMENTS == 0
        assert parameter.stop <= segment.elements
        assert (parameter.dtype, parameter.trainable) == (segment.dtype, segment.trainable)
    for before, after in pairwise(one.parameters):
        assert before.segment != after.segment or before.stop <= after.start
    weights = gradients = 0
    for segment in one.segments:
        assert segment.weight_offset == weights
        weights += segment.elements * ITEM_BYTES[segment.dtype]
        if segment.trainable:
            assert segment.gradient_offset == gradients
            gradients += segment.elements * ITEM_BYTES[segment.gradient_dtype]
        assert weights % BLOCK_BYTES == gradients % BLOCK_BYTES == 0
    assert (one.weight_bytes, one.gradient_bytes) == (weights, gradients)
    trainable = [segment.trainable for segment in one.segments]
    assert trainable == sorted(trainable, reverse=True)


@given(units())
@cheap(100)
def test_chunks_cut_the_trainable_segments(one: Unit) -> None:
    weights = gradients = 0
    for chunk in one.chunks:
        segment = one.segments[chunk.segment]
        assert segment.trainable
        assert 0 < chunk.elements <= CHUNK_ELEMENTS
        assert chunk.weight_offset == weights
        assert chunk.gradient_offset == gradients
        assert chunk.weight_bytes == chunk.elements * ITEM_BYTES[segment.dtype]
        assert chunk.gradient_bytes == chunk.elements * ITEM_BYTES[segment.gradient_dtype]
        assert chunk.weight_bytes % BLOCK_BYTES == chunk.gradient_bytes % BLOCK_BYTES == 0
        weights += chunk.weight_bytes
        gradients += chunk.gradient_bytes
    assert gradients == one.gradient_bytes
    assert one.trainable == bool(gradients)


@given(units())
@cheap(50)
def test_pieces_follow_one_another(one: Unit) -> None:
    at = 0
    for offset, size in one.weight_chunks:
        assert offset == at
        at += size
    assert at == one.weight_bytes


@given(wanted_parameters(), st.sampled_from(["param", "float32"]))
@cheap(50)
def test_all_parameters_are_there(wanted: list[ParameterSpec], gradient_dtype: str) -> None:
    one = lay_out_unit("unit", wanted, gradient_dtype=gradient_dtype)
    found = {(p.name, p.shape, p.dtype, p.trainable) for p in one.parameters}
    assert found == {(w.name, w.shape, w.dtype, w.trainable) for w in wanted}
    assert len(one.parameters) == len(wanted)
    for segment in one.segments:
        kept = segment.dtype if gradient_dtype == "param" else gradient_dtype
        assert segment.gradient_dtype == kept


def test_a_unit_by_hand() -> None:
    one = unit("u", 100, 3000, frozen=[5])
    assert [(p.name, p.segment, p.start, p.stop) for p in one.parameters] == [
        ("u.p0", 0, 0, 100),
        ("u.p1", 0, 1024, 4024),
        ("u.f0", 1, 0, 5),
    ]
    assert [s.elements for s in one.segments] == [4096, 2048]
    assert (one.weight_bytes, one.gradient_bytes) == (12288, 8192)
    assert [(s.parameter, s.chunk_start, s.elements) for s in one.chunks[0].slices] == [
        (0, 0, 100),
        (1, 1024, 3000),
    ]


def test_a_parameter_over_several_chunks() -> None:
    one = unit("u", 100, 2 * CHUNK_ELEMENTS, dtype="float32")
    assert [chunk.elements for chunk in one.chunks] == [CHUNK_ELEMENTS] * 2 + [1024]
    spans = [span for chunk in one.chunks for span in chunk.slices if span.parameter == 1]
    assert [span.parameter_start for span in spans] == [
        0,
        CHUNK_ELEMENTS - 1024,
        2 * CHUNK_ELEMENTS - 1024,
    ]


def test_a_dtype_that_a_unit_cannot_hold() -> None:
    with pytest.raises(ValueError, match="parameter p is of dtype int8"):
        lay_out_unit("u", [ParameterSpec("p", (3,), "int8", True)])


def test_scalars_and_empty_parameters() -> None:
    one = lay_out_unit(
        "u", [ParameterSpec("s", (), "float32", True), ParameterSpec("e", (0,), "float32", True)]
    )
    assert [p.elements for p in one.parameters] == [1, 0]
    assert [span.parameter for chunk in one.chunks for span in chunk.slices] == [0]
    assert not unit("empty", 0, frozen=[0]).trainable


def test_a_unit_of_many_parameters_is_laid_out_quickly() -> None:
    wanted = [ParameterSpec(f"p{i}", (1 << 20,), "bfloat16", True) for i in range(4000)]
    start = time.process_time()
    one = lay_out_unit("experts", wanted)
    assert time.process_time() - start < 2.0
    assert len(one.chunks) == 4000


def test_orders_that_are_not_known() -> None:
    made = [unit("embed", 5, backward=False), unit("a", 5), unit("head", 5)]
    profile = profile_of(made)
    assert (profile.forward, profile.backward) == ((0, 1, 2), (2, 1))
    assert profile_of(made, forward=[0, 1, 2, 1]).backward == (1, 2)
    assert profile_of(made, backward=[1]).backward == (1,)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
@cheap(100)
def test_round_up(count: int, multiple: int) -> None:
    found = round_up(count, multiple)
    assert found % multiple == 0
    assert count <= found < count + multiple


def test_where_chunks_lie_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step asks for every chunk, in a lane that has the GIL."""
    found = plan_of(profile_of([unit("wide", 40 << 20)]))
    looks, look = [0], Plan.record_bytes

    def counted(*args: Any) -> int:
        looks[0] += 1
        return look(*args)

    monkeypatch.setattr(Plan, "record_bytes", counted)
    for _, chunk in itertools.product(range(2), range(40)):
        found.record_offset(0, chunk)
    assert looks == [40]
    (wide,) = found.profile.units
    assert wide.weight_chunks is wide.weight_chunks
