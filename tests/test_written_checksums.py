"""Checksums of what an update has written, taken in the same pass: those of the arrays after it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import cpu_adam
from cpu_adam import FORMATS, Part, Span, UpdateTable, choice, crc32c, update, update_parts, views
from cpu_adam.formats import StateFormat
from tests.adam_states import hyper_of, told
from tests.test_adam_native import PIECE, THREADS

BLOCK = 16384
"""Elements that src/sweep.cpp updates before it takes their CRC."""
GROUP = 128
"""What a part of any format may start at a multiple of."""

every_kernel = pytest.mark.parametrize("kernel", choice.available())
every_format = pytest.mark.parametrize("name", FORMATS)

Chunk = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Weight, gradient and views of the record."""


def chunk(name: str, elements: int, seed: int = 0) -> Chunk:
    fmt = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = torch.randn(2, elements, generator=generator)
    record = torch.zeros(fmt.record_bytes(elements), dtype=torch.uint8)
    dtype = getattr(torch, fmt.weight_dtype)
    return weight.to(dtype), gradient.to(torch.bfloat16), views(record, fmt, elements)


def cut(whole: Chunk, fmt: StateFormat, start: int, elements: int) -> Chunk:
    weight, gradient, slots = whole
    here = slice(start, start + elements)
    parts = {}
    for slot in fmt.slots:
        first = start // slot.elements_per_item
        parts[slot.name] = slots[slot.name][first : first + slot.items(elements)]
    return weight[here], gradient[here], parts


def plainly(chunks: Sequence[Chunk], fmt: StateFormat) -> list[list[int]]:
    """The checksums of the arrays as they are now."""
    arrays = ((weight, *(slots[s.name] for s in fmt.slots)) for weight, _, slots in chunks)
    return [[crc32c(x) for x in row] for row in arrays]


def bits(whole: Chunk) -> list[bytes]:
    weight, _, slots = whole
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in (weight, *slots.values())]


@every_kernel
@every_format
def test_one_span(kernel: str, name: str) -> None:
    fmt, by = FORMATS[name], hyper_of(name)
    lengths = (0, 1, 17, 63, 64, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * PIECE, 3 * PIECE + 77)
    for elements in lengths:
        got, without = chunk(name, elements), chunk(name, elements)
        with choice.forced(kernel):
            for step in (1, 2):
                found = update(*got, by, step=step, format=fmt, checksums=True)
                assert found is not None
                assert found.dtype == np.uint32
                assert found.tolist() == plainly([got], fmt)[0], elements
                assert update(*without, by, step=step, format=fmt) is None
        assert bits(got) == bits(without)


@every_format
def test_many_spans_by_any_number_of_threads(name: str) -> None:
    fmt, turns = FORMATS[name], [(hyper_of(name), 1), (hyper_of(name, lr=0.5), 9)]
    lengths = [0, *range(1, 300, 23), 0, 2 * PIECE + 1, 64, PIECE, 0, 1, PIECE - 64, 5000, 0]
    chunks = [chunk(name, elements, elements) for elements in lengths]
    table = UpdateTable([Span(*whole, k % 2) for k, whole in enumerate(chunks)], fmt)
    try:
        for kernel, threads in itertools.product(choice.available(), THREADS):
            cpu_adam.set_threads(threads)
            with choice.forced(kernel), told(kernel, threads):
                found = table.update(turns, checksums=True)
                assert found is not None
                assert found.tolist() == plainly(chunks, fmt)
                if threads == THREADS[-1]:
                    assert table.update(turns) is None
    finally:
        cpu_adam.set_threads(None)


@every_kernel
@every_format
def test_parts_of_a_chunk(kernel: str, name: str) -> None:
    fmt, turns = FORMATS[name], [(hyper_of(name), 3)]
    whole = chunk(name, 2 * PIECE)
    ends = [0, GROUP, 2 * GROUP + 60, 40 * GROUP, 41 * GROUP, 41 * GROUP, PIECE + 5 * GROUP + 1]
    starts = [-(-end // GROUP) * GROUP for end in ends]
    parts = [
        Part(start, end - start, 7 * GROUP, is_last=end % GROUP != 0)
        for start, end in zip(starts, ends[1:])
    ]
    with choice.forced(kernel):
        found = update_parts(*whole, parts, turns, format=fmt, checksums=True)
    assert found is not None
    cuts = [cut(whole, fmt, part.start, part.elements) for part in parts]
    assert found.tolist() == plainly(cuts, fmt)


@every_kernel
def test_nothing_at_all(kernel: str) -> None:
    with choice.forced(kernel):
        found = UpdateTable([], FORMATS["exact"]).update([], checksums=True)
        assert found is not None
        assert found.shape == (0, 4)
        assert UpdateTable([], FORMATS["fp32"]).update([]) is None


def test_strided_tensors() -> None:
    fmt, by = FORMATS["fp32"], hyper_of("fp32")
    weight, gradient, slots = chunk("fp32", 100)
    wide = torch.zeros(100, 2)
    wide[:, 0] = weight
    strided = update(wide[:, 0], gradient, slots, by, step=1, format=fmt, checksums=True)
    assert strided is not None
    assert strided.tolist() == plainly([(wide[:, 0].contiguous(), gradient, slots)], fmt)[0]
