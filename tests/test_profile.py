"""The layout of a unit: every trainable element in one chunk, everything aligned."""

from __future__ import annotations

import itertools
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.profile import (
    BLOCK_BYTES,
    CHUNK_ELEMENTS,
    ITEM_BYTES,
    LEAF_ELEMENTS,
    Parameter,
    Profile,
    Unit,
    lay_out_unit,
    profile_of,
    round_up,
)
from tests.examples import cheap
from tests.profiles import plan_of, unit, units, wanted_parameters


def found_one_by_one(profile: Profile, name: str) -> list[tuple[int, int, int]]:
    """(unit, chunk, element in it) of each element of a parameter, by the bytes of its weight."""
    ((unit, index),) = (
        (u, i)
        for u, one in enumerate(profile.units)
        for i, parameter in enumerate(one.parameters)
        if parameter.name == name
    )
    one, found = profile.units[unit], list[tuple[int, int, int]]()
    item = ITEM_BYTES[one.parameters[index].dtype]
    for element in range(one.parameters[index].elements):
        at = one.weight_offset(index) + element * item
        ((chunk, offset),) = (
            (number, offset)
            for number, (offset, size) in enumerate(one.weight_chunks)
            if offset <= at < offset + size
        )
        found.append((unit, chunk, (at - offset) // item))
        if one.parameters[index].trainable:  # So do gradients, and records by their chunk.
            spec, kept = one.chunks[chunk], ITEM_BYTES[one.gradient_dtype(index)]
            there = one.gradient_offset(index) + element * kept - spec.gradient_offset
            assert there == found[-1][2] * kept < spec.gradient_bytes
    return found


@st.composite
def small_profiles(draw: st.DrawFn) -> Profile:
    sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=3)
    made = []
    for i in range(draw(st.integers(1, 2))):
        kinds: dict[str, Any] = {
            "dtype": draw(st.sampled_from(["bfloat16", "float32"])),
            "gradient_dtype": draw(st.sampled_from(["param", "fp32"])),
        }
        made.append(
            unit(f"unit{i}", *draw(sizes), frozen=draw(sizes), chunk_elements=2048, **kinds)
        )
    return profile_of(made)


@given(st.data())
@cheap(40)
def test_the_pieces_of_a_parameter_are_those_found_one_by_one(data: st.DataObject) -> None:
    one = data.draw(small_profiles())
    for parameter in itertools.chain(*(spec.parameters for spec in one.units)):
        at, found = 0, list[tuple[int, int, int]]()
        for piece in one.locate(parameter.name):
            assert (piece.parameter_start, piece.parameter_stop) == (at, at + piece.elements)
            assert one.units[piece.unit].parameters[piece.parameter] is parameter
            at = piece.parameter_stop
            here = range(piece.chunk_start, piece.chunk_start + piece.elements)
            assert here
            found += [(piece.unit, piece.chunk, element) for element in here]
        assert found == found_one_by_one(one, parameter.name)
    for number, spec in enumerate(one.units):
        by_chunk = one.by_chunk(number)
        by_name = [piece for p in spec.parameters for piece in one.locate(p.name)]
        assert list(itertools.chain(*by_chunk.values())) == by_name
        assert list(by_chunk) == sorted(by_chunk)


@given(units())
@cheap(100)
def test_alignment_and_order(one: Unit) -> None:
    for parameter in one.parameters:
        segment = one.segments[parameter.segment]
        assert parameter.start % LEAF_ELEMENTS == 0
        assert parameter.start + parameter.elements <= segment.elements
        assert (parameter.dtype, parameter.trainable) == (segment.dtype, segment.trainable)
    for before, after in pairwise(one.parameters):
        assert before.segment != after.segment or before.start + before.elements <= after.start
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
    for chunk, weight in zip(one.chunks, one.weight_chunks):
        segment = one.segments[chunk.segment]
        assert segment.trainable
        assert 0 < chunk.elements <= CHUNK_ELEMENTS
        assert weight == (weights, chunk.elements * ITEM_BYTES[segment.dtype])
        assert chunk.gradient_offset == gradients
        assert chunk.gradient_bytes == chunk.elements * ITEM_BYTES[segment.gradient_dtype]
        assert weight[1] % BLOCK_BYTES == chunk.gradient_bytes % BLOCK_BYTES == 0
        weights += weight[1]
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


@given(wanted_parameters(), st.sampled_from(["param", "fp32"]))
@cheap(50)
def test_all_parameters_are_there(wanted: list[Parameter], gradient_dtype: str) -> None:
    one = lay_out_unit("unit", wanted, gradient_dtype=gradient_dtype)
    found = {(p.name, p.shape, p.dtype, p.trainable) for p in one.parameters}
    assert found == {(w.name, w.shape, w.dtype, w.trainable) for w in wanted}
    assert len(one.parameters) == len(wanted)
    for segment in one.segments:
        kept = segment.dtype if gradient_dtype == "param" else "float32"
        assert segment.gradient_dtype == kept


def test_a_unit_by_hand() -> None:
    one = unit("u", 100, 3000, frozen=[5])
    assert [(p.name, p.segment, p.start, p.start + p.elements) for p in one.parameters] == [
        ("u.p0", 0, 0, 100),
        ("u.p1", 0, 1024, 4024),
        ("u.f0", 1, 0, 5),
    ]
    assert [s.elements for s in one.segments] == [4096, 2048]
    assert (one.weight_bytes, one.gradient_bytes) == (12288, 8192)
    found = profile_of([one]).by_chunk(0, {0, 1})
    assert found == {0: [(0, 0, 0, 0, 0, 100), (0, 0, 1, 1024, 0, 3000)]}


def test_a_parameter_over_several_chunks() -> None:
    one = unit("u", 100, 2 * CHUNK_ELEMENTS, dtype="float32")
    assert [chunk.elements for chunk in one.chunks] == [CHUNK_ELEMENTS] * 2 + [1024]
    assert [piece.parameter_start for piece in profile_of([one]).locate("u.p1")] == [
        0,
        CHUNK_ELEMENTS - 1024,
        2 * CHUNK_ELEMENTS - 1024,
    ]


def test_a_dtype_that_a_unit_cannot_hold() -> None:
    with pytest.raises(ValueError, match="parameter p is of dtype int8"):
        lay_out_unit("u", [Parameter("p", (3,), "int8", True)])


def test_scalars_and_empty_parameters() -> None:
    one = lay_out_unit(
        "u", [Parameter("s", (), "float32", True), Parameter("e", (0,), "float32", True)]
    )
    assert [p.elements for p in one.parameters] == [1, 0]
    assert [piece.parameter for piece in profile_of([one]).by_chunk(0)[0]] == [0]
    assert not unit("empty", 0, frozen=[0]).trainable


def test_a_unit_of_many_parameters_is_laid_out_quickly() -> None:
    wanted = [Parameter(f"p{i}", (1 << 20,), "bfloat16", True) for i in range(4000)]
    start = time.process_time()
    one = lay_out_unit("experts", wanted)
    assert time.process_time() - start < 2.0
    assert len(one.chunks) == 4000


def test_orders_that_are_not_known() -> None:
    made = [unit("embed", 5, backward=False), unit("a", 5), unit("head", 5)]
    profile = profile_of(made)
    assert (profile.forward, profile.backward) == ((0, 1, 2), (2, 1))
    assert profile_of(made, forward=[0, 1, 2, 1]).backward == (1, 2)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
@cheap(100)
def test_round_up(count: int, multiple: int) -> None:
    found = round_up(count, multiple)
    assert found % multiple == 0
    assert count <= found < count + multiple


def test_records_lie_one_after_the_other() -> None:
    found = plan_of(profile_of([unit("wide", 40 << 20)]))
    sizes = found.sizes.chunks["state"][0]
    assert found.sizes.record_offsets[0][:40] == [sum(sizes[:n]) for n in range(40)]
    assert found.bytes_of("state", 0) == sum(sizes)
    (wide,) = found.profile.units
    assert wide.weight_chunks is wide.weight_chunks
