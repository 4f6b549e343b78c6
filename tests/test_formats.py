"""The exact parts: record layout, the split of a float32 master, and each single rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpu_adam
from cpu_adam import FORMATS, Slot, StateFormat, format_for, rules, views
from cpu_adam.reference import accumulate, join, split
from tests.adam_states import assert_same_floats

Words = npt.NDArray[np.int64]

EDGE_RESIDUES = np.array([-0x8000, -0x7FFF, -1, 0, 1, 0x1234, 0x7FFF])
# Zeros, infinities, NaNs; the largest finite, the smallest subnormal and normal; one, another.
EDGE_WEIGHTS = np.array(
    [
        *(0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFFF),
        *(0x7F7F, 0xFF7F, 0x0001, 0x8001, 0x0080, 0x3F80, 0xBC23),
    ]
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small ops on a busy machine would wait for threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def is_nan(bits: Words) -> npt.NDArray[np.bool_]:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def float32_of(bits: Words) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def bits_of(master: torch.Tensor) -> Words:
    return master.numpy().view(np.uint32).astype(np.int64)


def weight_of(words: Words) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16)


def words_of(weight: torch.Tensor) -> Words:
    return weight.view(torch.int16).numpy().view(np.uint16).astype(np.int64)


def residue_of(values: Words) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int16))


def split_new(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    residue = torch.empty_like(master, dtype=torch.int16)
    split(master, weight, residue)
    return weight, residue


def joined(words: Words, residues: Words) -> Words:
    """What `join` is defined to give, as bits, in integer arithmetic."""
    plain = ((words << 16) + residues) & 0xFFFFFFFF
    return np.where(is_nan(plain), words << 16, plain)


def rounded(bits: Words) -> tuple[Words, Words]:
    """Nearest bfloat16, ties away from zero, and what is left: on sign and magnitude."""
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    floor, rest = magnitude >> 16, magnitude & 0xFFFF
    up = rest >= 0x8000
    word = (sign << 15) | (floor + up)
    left = rest - 0x10000 * up
    nan = is_nan(bits)
    return np.where(nan, 0x7FC0, word), np.where(nan, 0, left)


def interesting_floats() -> Words:
    """Random bit patterns, and around every exponent the values where rounding changes."""
    random = np.random.default_rng(1).integers(0, 2**32, 2**20, dtype=np.int64)
    near = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    low = (near[:, None] + np.array([0, 0x10000, 0x3F0000, 0x7E0000, 0x7F0000])).ravel()
    edges = (np.arange(512, dtype=np.int64)[:, None] << 23) + low  # every sign and exponent
    return np.concatenate([random, edges.ravel()])


def check_join(words: Words, residues: Words) -> None:
    master = join(weight_of(words), residue_of(residues))
    got, want = bits_of(master), joined(words, residues)
    weight_is_nan = (words & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(is_nan(got), weight_is_nan)
    np.testing.assert_array_equal(got[~weight_is_nan], want[~weight_is_nan])
    # The weight is what its master rounds to, and the residue too unless it had to be ignored.
    weight, residue = split_new(master)
    np.testing.assert_array_equal(words_of(weight)[~weight_is_nan], words[~weight_is_nan])
    kept = want == ((words << 16) + residues) & 0xFFFFFFFF
    kept &= ~weight_is_nan
    np.testing.assert_array_equal(residue.numpy()[kept], residues[kept])


def test_join_of_every_weight() -> None:
    words = np.arange(0x10000, dtype=np.int64)
    for residue in EDGE_RESIDUES:
        check_join(words, np.full_like(words, residue))


def test_join_of_every_residue() -> None:
    residues = np.arange(-0x8000, 0x8000, dtype=np.int64)
    for word in EDGE_WEIGHTS:
        check_join(np.full_like(residues, word), residues)


def test_split_is_lossless_and_rounds_ties_away() -> None:
    bits = interesting_floats()
    master = float32_of(bits)
    weight, residue = split_new(master)
    np.testing.assert_array_equal(bits_of(master), bits)  # the master is kept
    want_words, want_residues = rounded(bits)
    np.testing.assert_array_equal(words_of(weight), want_words)
    np.testing.assert_array_equal(residue.numpy(), want_residues)
    back = join(weight, residue)
    nan = is_nan(bits)
    assert nan.any()
    np.testing.assert_array_equal(bits_of(back)[~nan], bits[~nan])
    assert weight[nan].isnan().all()
    assert back[nan].isnan().all()


@pytest.mark.parametrize(
    ("bits", "word", "residue"),
    [
        (0x7F7FFFFF, 0x7F80, -1),  # the largest float32 rounds to infinity, and comes back
        (0xFF7FFFFF, 0xFF80, -1),
        (0x7F7F8000, 0x7F80, -0x8000),
        (0x7F7F7FFF, 0x7F7F, 0x7FFF),
        (0x7F800000, 0x7F80, 0),
        (0xFF800000, 0xFF80, 0),
        (0x80000000, 0x8000, 0),
        (0x00000001, 0x0000, 1),
        (0x80007FFF, 0x8000, 0x7FFF),
        (0x80008000, 0x8001, -0x8000),
        (0x7F800001, 0x7FC0, 0),  # a NaN that would be rounded to infinity
        (0x7FFFFFFF, 0x7FC0, 0),  # a NaN that would be carried to -0
        (0xFFFFFFFF, 0x7FC0, 0),  # a NaN that would be carried to +0
    ],
)
def test_split_at_the_edges(bits: int, word: int, residue: int) -> None:
    weight, rest = split_new(float32_of(np.array([bits])))
    assert (words_of(weight)[0], rest.item()) == (word, residue)
    assert is_nan(np.array([bits]))[0] or bits_of(join(weight, rest))[0] == bits


@pytest.mark.parametrize("length", [0, 1, 3, 15, 16, 17, 33, 63, 65, 1000])
def test_split_and_join_of_slices_are_slices(length: int) -> None:
    bits = interesting_floats()[:2000]
    bits[::7] |= 0x7F800000  # some NaN in every slice
    weight, residue = split_new(float32_of(bits))
    part_weight, part_residue = split_new(float32_of(bits)[5 : 5 + length])
    assert torch.equal(part_weight.view(torch.int16), weight[5 : 5 + length].view(torch.int16))
    assert torch.equal(part_residue, residue[5 : 5 + length])
    out = torch.empty(length)
    assert join(part_weight, part_residue, out=out) is out
    whole = join(weight, residue)
    assert torch.equal(out.view(torch.int32), whole[5 : 5 + length].view(torch.int32))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), -float("inf"), 1.0])
def test_an_edited_weight_never_makes_nan(value: float) -> None:
    residue = residue_of(np.arange(-0x8000, 0x8000, dtype=np.int64))
    weight = torch.full((0x10000,), 0.5, dtype=torch.bfloat16)
    weight.fill_(value)
    stale = join(weight, residue)
    assert not stale.isnan().any()
    if value == 0.0:
        assert torch.equal(
            stale[:0x8001].view(torch.int32), weight[:0x8001].float().view(torch.int32)
        )


def test_split_refuses_other_dtypes_and_shapes() -> None:
    weight, residue = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"asked for .*; found .*; likely cause: .*; try: "):
        cpu_adam.split(torch.zeros(3, dtype=torch.float64), weight, residue)
    with pytest.raises(ValueError, match="int16"):
        cpu_adam.join(residue, weight)
    with pytest.raises(ValueError, match="one shape"):
        cpu_adam.join(weight, residue[:2])


@given(elements=st.integers(0, 10**7) | st.integers(0, 300))
@pytest.mark.parametrize("name", FORMATS)
def test_slots_are_aligned_and_do_not_overlap(name: str, elements: int) -> None:
    row = FORMATS[name]
    offsets, total = row.slot_offsets(elements), row.record_bytes(elements)
    sizes = [slot.items(elements) * slot.bytes_per_item for slot in row.slots]
    ends = [start + size for start, size in zip(offsets, sizes)]
    assert len(offsets) == len(row.slots)
    assert all(offset % 64 == 0 for offset in (*offsets, total))
    assert all(0 <= following - end < 64 for end, following in zip(ends, (*offsets[1:], total)))
    payload = sum(sizes)
    assert 0 <= payload - elements * row.bytes_per_element < 8
    assert payload <= total < payload + 64 * len(row.slots) or elements == total == 0


@given(elements=st.integers(0, 300), extra=st.sampled_from([0, 1, 4096]))
@pytest.mark.parametrize("name", FORMATS)
def test_views_cover_their_slots_and_nothing_else(name: str, elements: int, extra: int) -> None:
    row = FORMATS[name]
    record = torch.zeros(row.record_bytes(elements) + extra, dtype=torch.uint8)
    found = views(record, row, elements)
    assert list(found) == [slot.name for slot in row.slots]
    for slot, offset in zip(row.slots, row.slot_offsets(elements)):
        view = found[slot.name]
        assert view.dtype == getattr(torch, slot.dtype)
        assert view.shape == (-(-elements // slot.elements_per_item),)
        assert view.element_size() == slot.bytes_per_item
        view.view(torch.uint8).add_(1)  # writes through, once to each of its bytes
        end = offset + slot.items(elements) * slot.bytes_per_item
        assert bool((record[offset:end] == 1).all())
    assert int(record.sum()) == sum(s.items(elements) * s.bytes_per_item for s in row.slots)


def test_views_refuse_what_is_no_record() -> None:
    row = FORMATS["exact"]
    with pytest.raises(ValueError, match=r"asked for .*; found .*; likely cause: .*; try: "):
        views(torch.zeros(1151, dtype=torch.uint8), row, 100)
    for wrong in (torch.zeros(4096), torch.zeros(2, 4096, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="contiguous 1-D uint8"):
            views(wrong, row, 100)


def test_the_table() -> None:
    assert format_for("bfloat16") is FORMATS["exact"]
    assert format_for("float32") is format_for("float32", "fp32") is FORMATS["fp32"]
    assert [slot.name for slot in FORMATS["exact"].slots] == ["residue", "exp_avg", "exp_avg_sq"]
    assert FORMATS["exact"].bytes_per_element == 10
    assert FORMATS["fp32"].bytes_per_element == 8
    assert format_for("bfloat16", "compact") is FORMATS["compact"]
    assert FORMATS["compact"].bytes_per_element == 4.0625
    assert format_for("bfloat16", rule="lion") is FORMATS["lion_exact"]
    assert format_for("float32", rule="sgd") is FORMATS["sgd_fp32"]
    with pytest.raises(
        ValueError, match=r"weights cannot be trained by muon; .*'muon' is not a rule"
    ):
        format_for("bfloat16", rule="muon")
    for name, row in FORMATS.items():
        assert name == row.name
        for slot in row.slots:
            assert getattr(torch, slot.dtype).itemsize == slot.bytes_per_item
    assert StateFormat("one", "float32", (Slot("a", "uint8", 1),)).record_bytes(65) == 128
    assert cpu_adam.formats.SLOT_ALIGNMENT_BYTES == 64


@pytest.mark.parametrize(
    ("weight_dtype", "states", "hint"),
    [
        ("float16", "exact", r"torch\.bfloat16\).* float32 .*torch\.autocast"),
        ("float64", "exact", r"model\.float\(\)"),
        ("float32", "compact", "states='exact'"),
        ("float16", "compact", "torch.autocast"),
        ("bfloat16", "tiny", "states='exact'"),
        ("bfloat16", "fp32", "states='exact'"),
    ],
)
def test_what_is_not_supported_is_refused_in_four_parts(
    weight_dtype: str, states: str, hint: str
) -> None:
    pattern = rf"{weight_dtype} weights cannot be trained.*; asked for .*; found .*; likely cause: "
    with pytest.raises(ValueError, match=rf"^{pattern}.*; try: .*{hint}") as caught:
        format_for(weight_dtype, states)
    there_are = "bfloat16 (states='exact' or 'compact') and float32 (states='exact')"
    assert f"; found formats only for {there_are}; " in str(caught.value)


def test_what_cannot_be_trained_at_all_is_not_said_of_its_states() -> None:
    with pytest.raises(ValueError, match=r"^float16 weights cannot be trained; "):
        format_for("float16")
    with pytest.raises(
        ValueError, match=r"^float32 weights cannot be trained with states='compact'"
    ):
        format_for("float32", "compact")
    with pytest.raises(
        ValueError, match=r"bfloat16 \(states='exact'\) and float32 \(states='exact'\); "
    ):
        format_for("float64", rule="lion")


# Each op that the reference is written in, against numpy on the same bits.


def random_bits(seed: int, count: int = 1 << 16) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    bits[: count // 8] &= 0x807FFFFF  # subnormals and zeros
    bits[count // 8 : count // 4] = bits[count // 8 : count // 4] & 0x83FFFFFF | 0x3C000000
    return rng.permutation(bits).view(np.float32)


OPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
    "mul": (torch.mul, np.multiply),
    "add": (torch.add, np.add),
    "sub": (torch.sub, np.subtract),
    "div": (torch.div, np.divide),
}


@pytest.mark.parametrize("op", OPS)
def test_ops_equal_numpy(op: str) -> None:
    ours, theirs = OPS[op]
    a, b = random_bits(1), random_bits(2)
    with np.errstate(all="ignore"):
        assert_same_floats(ours(torch.from_numpy(a), torch.from_numpy(b)), theirs(a, b))
        for scalar in (0.9, 1.0 - 0.9, 0.999, 1.0 - 0.999, 1e-8, 3e-39, 0.031606961, 1e30):
            number = torch.full((), scalar, dtype=torch.float32)
            want = theirs(a, np.float32(scalar))
            assert_same_floats(ours(torch.from_numpy(a), number), want)
            in_place = torch.from_numpy(a.copy())
            assert_same_floats(ours(in_place, number, out=in_place), want)


def square_root(x: npt.NDArray[np.float32]) -> torch.Tensor:
    source = torch.from_numpy(x)
    wide = torch.empty_like(source, dtype=torch.float64)
    return rules.square_root(source, wide, out=torch.empty_like(source))


def test_square_root_is_correctly_rounded() -> None:
    piece = 1 << 15
    for first in range(126 << 23, 128 << 23, piece):  # every significand, both exponent parities
        x = np.arange(first, first + piece, dtype=np.uint32).view(np.float32)
        assert np.array_equal(square_root(x).numpy(), np.sqrt(x))
    for x in (random_bits(3), np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0], np.float32)):
        with np.errstate(invalid="ignore"):
            assert_same_floats(square_root(x), np.sqrt(x))
            wide = torch.from_numpy(x).double().sqrt().float()
            assert_same_floats(wide, np.sqrt(x))


@pytest.mark.parametrize(
    ("into", "gradient"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_accumulate_rounds_the_exact_sum_once(into: torch.dtype, gradient: torch.dtype) -> None:
    a = torch.from_numpy(random_bits(11)).to(into)
    b = torch.from_numpy(random_bits(12)).to(gradient)
    want = a.clone().add_(b)
    got, kept = a.clone(), b.clone()
    accumulate(got, b)
    assert_same_floats(got.float(), want.float().numpy())
    assert torch.equal(kept.view(torch.uint8), b.view(torch.uint8))
    finite = (a.isfinite() & b.isfinite() & got.isfinite()).numpy()
    x, y, z = (t.double().numpy()[finite] for t in (a, b, got))
    if into == torch.float32:
        assert np.array_equal(z.astype(np.float32), (x.astype(np.float32) + y.astype(np.float32)))
    else:
        # Half a unit in the last place of a bfloat16 (8 bits, smallest step 2**-133) at the sum.
        exact = x.astype(np.longdouble) + y.astype(np.longdouble)
        half = np.ldexp(0.5, np.maximum(np.frexp(z)[1] - 8, -133))
        assert bool((np.abs(z - exact) <= half).all())


def test_accumulate_refuses_what_would_round_twice() -> None:
    with pytest.raises(ValueError, match=r"asked for .*; found .*; likely cause: .*; try: "):
        cpu_adam.accumulate(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2))
    with pytest.raises(ValueError, match="one shape"):
        cpu_adam.accumulate(torch.zeros(2), torch.zeros(1))
