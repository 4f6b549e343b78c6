"""The bytes on disk: where every chunk of a file lies, and the headers that say what it is.

Headers of extents are not written by the engine yet, as nothing is durable: only tests use them.
Pure: plain data in, plain data out. docs/formats.md is the specification in a page.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cpu_adam.checksum import crc32c

BLOCK_BYTES = 4096
"""Everything on disk starts at a multiple of this and is padded to one, as O_DIRECT needs."""

FORMAT_VERSION = 1

Kind = Literal["weight", "gradient", "state"]
"""A kind of value."""

KINDS: tuple[Kind, ...] = ("weight", "gradient", "state")
"""In the order of what a fast home saves, and of their codes on disk, which count from 1."""

FILE_MAGIC = b"OFFLOADF"
HEADER_MAGIC = b"OFFLOADH"

_FILE = struct.Struct("<8sIIQ")  # magic, version, CRC32C, bytes of the file
_HEADER = struct.Struct("<8sIIII")  # magic, version, CRC32C, kind, chunks
_CHUNK = struct.Struct("<QQII")  # bytes, step, CRC32C, segments
_SEGMENT = struct.Struct("<IQQ")  # name index, start, stop
_CRC_AT = 12  # of both headers: their CRC is taken with these four bytes zero
_U32, _U64 = 1 << 32, 1 << 64


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of the flattened parameter `name_index` of the manifest's list."""

    name_index: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.name_index < _U32, self
        assert 0 <= self.start < self.stop < _U64, self


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A stretch of `bytes` that is read, checked and written as one; what its elements are."""

    bytes: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        assert 0 < self.bytes < _U64, self

    @property
    def padded_bytes(self) -> int:
        """Bytes it takes on disk."""
        return round_up(self.bytes, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """All that a file stores of one kind for one unit."""

    kind: Kind
    unit: str
    chunks: tuple[ChunkSpec, ...]

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.chunks, f"{self.kind} of {self.unit} has no chunks"
        if self.kind != "state":  # read straight into a slot, where chunks follow without gaps
            assert all(chunk.bytes % BLOCK_BYTES == 0 for chunk in self.chunks[:-1]), (
                f"{self.kind} of {self.unit}: a chunk before the last is no multiple of 4 KiB"
            )


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a value lies: its header, then its chunks, all offsets multiples of 4 KiB.

    `offset` and `bytes` are those of the data, `chunk_offsets` are relative to `offset`.
    """

    kind: Kind
    unit: str
    header_offset: int
    header_bytes: int
    offset: int
    bytes: int
    chunk_offsets: tuple[int, ...]
    chunks: tuple[ChunkSpec, ...]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Every extent of one file, in file order, and the size of the file."""

    extents: tuple[Extent, ...]
    bytes: int
    _index: dict[tuple[str, str], Extent] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {(extent.kind, extent.unit): extent for extent in self.extents}
        assert len(index) == len(self.extents), "a kind of a unit is laid out twice"
        object.__setattr__(self, "_index", index)

    def extent(self, kind: str, unit: str) -> Extent:
        """The extent of `kind` of `unit`. KeyError where the file has none."""
        try:
            return self._index[kind, unit]
        except KeyError:
            raise KeyError(
                f"{kind} of {unit!r} is in none of the {len(self.extents)} extents of the file"
            ) from None


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """What changes with each write of a chunk: the step, and the CRC32C of its padded bytes."""

    step: int
    crc: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header block as read back."""

    kind: Kind
    chunks: tuple[ChunkSpec, ...]
    entries: tuple[ChunkEntry, ...]


def lay_out_file(values: Sequence[ValueSpec]) -> FileLayout:
    """Places `values` one after the other behind the block of the file's own header."""
    at = BLOCK_BYTES
    extents = []
    for value in values:
        header_bytes = _header_bytes(value.chunks)
        offsets, end = [], 0
        for chunk in value.chunks:
            offsets.append(end)
            end += chunk.padded_bytes
        data = at + header_bytes
        extents.append(
            Extent(
                value.kind, value.unit, at, header_bytes, data, end, tuple(offsets), value.chunks
            )
        )
        at = data + end
    return FileLayout(tuple(extents), at)


def pack_file_header(layout: FileLayout) -> bytes:
    """The first 4 KiB of a file."""
    return _sealed(_FILE.pack(FILE_MAGIC, FORMAT_VERSION, 0, layout.bytes), BLOCK_BYTES)


def unpack_file_header(data: bytes) -> int:
    """The size in bytes that a file's first block says it has. ValueError as `unpack_header`."""
    _check_seal(data, FILE_MAGIC, "file header")
    return int(_FILE.unpack_from(data)[3])


def pack_header(extent: Extent, entries: Sequence[ChunkEntry]) -> bytes:
    """The header of `extent`, exactly `extent.header_bytes` long, one entry per chunk."""
    assert len(entries) == len(extent.chunks), (len(entries), len(extent.chunks))
    code = KINDS.index(extent.kind) + 1
    parts = [_HEADER.pack(HEADER_MAGIC, FORMAT_VERSION, 0, code, len(extent.chunks))]
    for chunk, entry in zip(extent.chunks, entries):
        parts.append(_CHUNK.pack(chunk.bytes, entry.step, entry.crc, len(chunk.segments)))
        parts += [_SEGMENT.pack(s.name_index, s.start, s.stop) for s in chunk.segments]
    return _sealed(b"".join(parts), extent.header_bytes)


def unpack_header(data: bytes) -> Header:
    """What a header of `len(data)` bytes says.

    Raises:
        ValueError: wrong magic, version or CRC, truncated, or counts and ranges that cannot be;
            the message says which and what was found. Nothing is believed before it is checked.
    """
    _check_seal(data, HEADER_MAGIC, "header")
    _, _, _, code, count = _HEADER.unpack_from(data)
    if not 1 <= code <= len(KINDS):
        raise _bad("header", f"kind {code}, expected 1 to {len(KINDS)}")
    if not 1 <= count <= (len(data) - _HEADER.size) // _CHUNK.size:
        raise _bad("header", f"{count} chunks, which {len(data)} bytes cannot describe")
    at = _HEADER.size
    chunks, entries = [], []
    for number in range(count):
        if at + _CHUNK.size > len(data):
            raise _bad("header", f"an end before chunk {number} of {count}")
        size, step, crc, segments = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if size == 0:
            raise _bad("header", f"chunk {number} of no bytes")
        if segments > (len(data) - at) // _SEGMENT.size:
            raise _bad("header", f"{segments} segments in chunk {number}, past its end")
        ranges = [_SEGMENT.unpack_from(data, at + n * _SEGMENT.size) for n in range(segments)]
        at += segments * _SEGMENT.size
        for name, start, stop in ranges:
            if start >= stop:
                raise _bad("header", f"elements [{start}, {stop}) of name {name}, no range")
        chunks.append(ChunkSpec(size, tuple(Segment(*found) for found in ranges)))
        entries.append(ChunkEntry(step, crc))
    if any(data[at:]):
        raise _bad("header", f"bytes after its last chunk, at {at}, that are not zero")
    return Header(KINDS[code - 1], tuple(chunks), tuple(entries))


def _header_bytes(chunks: tuple[ChunkSpec, ...]) -> int:
    segments = sum(len(chunk.segments) for chunk in chunks)
    size = _HEADER.size + len(chunks) * _CHUNK.size + segments * _SEGMENT.size
    return round_up(size, BLOCK_BYTES)


def _sealed(fields: bytes, size: int) -> bytes:
    """`fields` padded with zeros to `size`, with the CRC of all of it put in."""
    block = bytearray(fields.ljust(size, b"\0"))
    assert len(block) == size, (len(fields), size)
    struct.pack_into("<I", block, _CRC_AT, crc32c(bytes(block)))
    return bytes(block)


def _check_seal(data: bytes, magic: bytes, what: str) -> None:
    if len(data) < BLOCK_BYTES or len(data) % BLOCK_BYTES:
        raise _bad(what, f"{len(data)} bytes, expected a positive multiple of {BLOCK_BYTES}")
    if data[:8] != magic:
        raise _bad(what, f"{bytes(data[:8])!r}, expected the magic {magic!r}")
    version, crc = struct.unpack_from("<II", data, 8)
    if version != FORMAT_VERSION:
        raise _bad(what, f"format version {version}, expected {FORMAT_VERSION}")
    found = crc32c(data[:_CRC_AT] + bytes(4) + data[_CRC_AT + 4 :])
    if found != crc:
        raise _bad(what, f"CRC32C {found:#010x}, expected {crc:#010x}")


def _bad(what: str, found: str) -> ValueError:
    return ValueError(
        f"asked to read a {what}, found {found}; the block is damaged, or was not written by "
        "this program or version; restore it from a copy, or start anew"
    )
