"""Formats: layouts are aligned and disjoint, headers round-trip, hostile bytes are refused."""

import contextlib
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_adam import crc32c
from offload.records import (
    BLOCK_BYTES,
    KINDS,
    ChunkEntry,
    ChunkSpec,
    FileLayout,
    Segment,
    ValueSpec,
    lay_out_file,
    pack_file_header,
    pack_header,
    unpack_file_header,
    unpack_header,
)
from tests.examples import cheap

U32, U64 = 2**32 - 1, 2**64 - 1

segments = st.builds(
    lambda name, ends: Segment(name, min(ends), max(ends)),
    st.integers(0, U32),
    st.lists(st.integers(0, U64), min_size=2, max_size=2, unique=True),
)


def chunks(whole: bool):
    sizes = st.integers(1, 40_000)
    if whole:
        sizes = sizes.map(lambda size: -(-size // BLOCK_BYTES) * BLOCK_BYTES)
    made = st.builds(ChunkSpec, sizes, st.lists(segments, max_size=5).map(tuple))
    return st.lists(made, min_size=1, max_size=8).map(tuple)


@st.composite
def layouts(draw) -> FileLayout:
    keys = draw(st.lists(st.tuples(st.sampled_from(KINDS), st.text(max_size=3)), unique=True))
    specs = [ValueSpec(kind, unit, draw(chunks(kind != "state"))) for kind, unit in keys[:6]]
    return lay_out_file(specs)


def entries_of(extent):
    return [ChunkEntry(7 * n, 12345 * n) for n in range(len(extent.chunks))]


@given(layouts())
def test_layout_is_aligned_disjoint_and_complete(layout):
    spans = [(0, BLOCK_BYTES)]
    for extent in layout.extents:
        assert layout.extent(extent.kind, extent.unit) is extent
        spans.append((extent.header_offset, extent.header_offset + extent.header_bytes))
        assert extent.header_offset + extent.header_bytes == extent.offset
        end = 0
        for chunk, at in zip(extent.chunks, extent.chunk_offsets, strict=True):
            assert at == end
            end = at + chunk.padded_bytes
            assert chunk.bytes <= chunk.padded_bytes < chunk.bytes + BLOCK_BYTES
            spans.append((extent.offset + at, extent.offset + end))
        assert end == extent.bytes
    assert all(number % BLOCK_BYTES == 0 for span in spans for number in span)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert spans[-1][1] == layout.bytes
    assert unpack_file_header(pack_file_header(layout)) == layout.bytes


@given(layouts())
def test_header_round_trip(layout):
    for extent in layout.extents:
        data = pack_header(extent, entries_of(extent))
        assert len(data) == extent.header_bytes
        header = unpack_header(data)
        assert (header.kind, header.chunks) == (extent.kind, extent.chunks)
        assert list(header.entries) == entries_of(extent)


def reseal(data: bytearray) -> bytes:
    """A valid CRC over whatever `data` says: only the checks behind it can refuse it."""
    data[12:16] = bytes(4)
    data[12:16] = struct.pack("<I", crc32c(bytes(data)))
    return bytes(data)


def sample_header() -> bytes:
    spec = ValueSpec("state", "u", (ChunkSpec(5000, (Segment(3, 0, 9),)), ChunkSpec(10, ())))
    (extent,) = lay_out_file([spec]).extents
    return pack_header(extent, entries_of(extent))


@given(st.binary(max_size=200), st.integers(0, 3))
@cheap(100)
def test_random_bytes_are_refused(data, blocks):
    for candidate in (data, data.ljust(blocks * BLOCK_BYTES, b"\0")):
        for unpack in (unpack_header, unpack_file_header):
            with pytest.raises(ValueError, match="found"):
                unpack(candidate)


@given(st.lists(st.tuples(st.integers(0, 130), st.integers(1, 255)), min_size=1, max_size=4))
@cheap(150)
def test_mutated_bytes_are_refused(changes):
    good = sample_header()
    data = bytearray(good)
    for at, flip in changes:
        data[at] ^= flip
    if bytes(data) != good:
        with pytest.raises(ValueError, match="found"):
            unpack_header(bytes(data))
    with contextlib.suppress(ValueError):  # nothing else may come of it
        header = unpack_header(reseal(data))
        assert 1 <= len(header.chunks) == len(header.entries)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (8, "<I", 2, "format version 2"),
        (16, "<I", 0, "kind 0"),
        (16, "<I", 9, "kind 9"),
        (20, "<I", 0, "0 chunks"),
        (20, "<I", U32, "4294967295 chunks"),
        (20, "<I", 160, "chunk of no bytes|chunk 2 of no bytes"),
        (20, "<I", 1, "not zero"),
        (24, "<Q", 0, "chunk 0 of no bytes"),
        (44, "<I", U32, "segments in chunk 0"),
        (52, "<Q", 9, r"elements \[9, 9\)"),
        (4000, "<I", 1, "not zero"),
    ],
)
def test_nonsense_is_named(at, form, value, message):
    data = bytearray(sample_header())
    struct.pack_into(form, data, at, value)
    with pytest.raises(ValueError, match=message):
        unpack_header(reseal(data))


def test_truncated_and_foreign_headers():
    good = sample_header()
    with pytest.raises(ValueError, match="100 bytes"):
        unpack_header(good[:100])
    with pytest.raises(ValueError, match="CRC32C"):
        unpack_header(good + bytes(BLOCK_BYTES))
    with pytest.raises(ValueError, match="magic"):
        unpack_file_header(good)
    full = bytearray(good[:24] + struct.pack("<QQII", 1, 0, 0, 0) * 169 + bytes(16))
    struct.pack_into("<I", full, 20, 170)
    with pytest.raises(ValueError, match="170 chunks"):
        unpack_header(reseal(full))
    big = bytearray(good[:24] + struct.pack("<QQII", 1, 0, 0, 0) * 169 + bytes(16))
    struct.pack_into("<I", big, 20, 169)
    struct.pack_into("<I", big, 44, 1)  # the first chunk now has a segment: too little is left
    with pytest.raises(ValueError, match="found"):
        unpack_header(reseal(big))


def test_what_only_we_can_get_wrong():
    with pytest.raises(AssertionError, match="no multiple of 4 KiB"):
        ValueSpec("weight", "u", (ChunkSpec(100, ()), ChunkSpec(100, ())))
    with pytest.raises(AssertionError):
        Segment(0, 5, 5)
    with pytest.raises(AssertionError, match="twice"):
        lay_out_file([ValueSpec("state", "u", (ChunkSpec(1, ()),))] * 2)
    with pytest.raises(KeyError, match="gradient of 'u'"):
        lay_out_file([]).extent("gradient", "u")
