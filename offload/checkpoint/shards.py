"""Sets of tensors in safetensors files with an index, as Hugging Face writes them, of any size.

A set is written and read in the order of its tensors, part by part: what is in memory is the window
of one file. The index has the CRC32C of each tensor (`metadata.crc32c`), which is compared when the
last part has been read.

Source of the format: https://huggingface.co/docs/safetensors (a header of JSON after its length in
8 bytes, then the tensors without gaps); of the index: `model.safetensors.index.json` there.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

import aio
from aio.errors import naming
from cpu_adam import crc32c
from cpu_adam.checksum import crc32c_combined
from cpu_adam.formats import GROUP_ELEMENTS
from offload.checkpoint.schema import Each, check, file_name, shown, text

SHARD_BYTES = 5 << 30
PART_ELEMENTS = 4 << 20
"""Most numbers that are read at once where nothing else says how many."""

FILES_MAX = 3
"""So many files of a set have memory for what is read ahead."""

JSON_BYTES_MAX = 100_000_000
"""As of a header in the library of the format."""

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The format's names of torch's dtypes."""

WEIGHTS, SCALE = "model", "_scale"
"""The set of weights; the end of the names of those with a number for each group of elements."""

Bytes = npt.NDArray[np.uint8]


class Tensor(NamedTuple):
    """What a set has of a tensor besides its values; the dtype as torch names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of each of its values."""
        return getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return prod(self.shape) * self.itemsize

    def parts(self, most: int) -> Iterator[tuple[int, int]]:
        """Start and count of parts of at most so many numbers, in order."""
        elements = prod(self.shape)
        return ((at, min(most, elements - at)) for at in range(0, elements, most))


Sets = dict[str, dict[str, Tensor]]
"""By prefix of its files, the tensors of each set in their order, by name."""

Values: TypeAlias = Callable[[str, str, int, int], torch.Tensor]
"""What every source of values is, and all that takes values asks: of a set (its prefix) and a name,
from a number on, so many numbers, 1-D in CPU memory. Those of a tensor are asked for in order."""


def items(prefix: str, elements: int) -> int:
    """How many numbers a set has for so many elements that begin a group."""
    return -(-elements // GROUP_ELEMENTS) if prefix.endswith(SCALE) else elements


def index_of(prefix: str) -> str:
    """The name of a set's index."""
    return f"{prefix}.safetensors.index.json"


def head_of(directory: str, prefix: str) -> str:
    """The file that says what a set has: the only one where that is there, else the index."""
    single = os.path.join(directory, f"{prefix}.safetensors")
    return single if os.path.exists(single) else os.path.join(directory, index_of(prefix))


def name_of(dtype: torch.dtype) -> str:
    """As `Tensor` has it."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor in CPU memory."""
    return tensor.view(torch.uint8).numpy()


def joined(
    parts: Iterable[tuple[int, Callable[[], torch.Tensor]]], start: int, count: int
) -> torch.Tensor:
    """So many numbers, from one on, of parts that follow one another: the size of each, and what
    gives it, 1-D. Only those that are needed are asked for."""
    found = []
    for size, part in parts:
        first, last = max(start, 0), min(start + count, size)
        if first < last:
            found.append(part()[first:last])
        start -= size
    return found[0] if len(found) == 1 else torch.cat(found)


def set_writer(
    directory: str,
    prefix: str,
    tensors: Mapping[str, Tensor],
    backend: aio.Backend,
    shard_bytes: int,
) -> Generator[str | None, Bytes, None]:
    """Writes the tensors of a set to files `PREFIX-00001-of-N.safetensors`, and then their index.

    It yields the name of the tensor that it is to be sent the next part of, in the order of
    `tensors`; None when all is written. No file is larger than `shard_bytes`, but for a tensor that
    is. Closed early, it leaves a file that is not whole.
    """
    shards, crcs, files = _shards(tensors.values(), shard_bytes), dict[str, str](), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name, head = f"{prefix}-{number:05}-of-{len(shards):05}.safetensors", _head(shard)
        size = head.size + sum(one.bytes for one in shard)
        file = aio.Writer(os.path.join(directory, name), size, backend)
        try:
            file.write(head)
            for one in shard:
                left, crc = one.bytes, 0
                while left:
                    part = yield one.name
                    assert part.size <= left, f"{one.name}: too long"
                    file.write(part)
                    left, crc = left - part.size, crc32c(part, crc)
                files[one.name], crcs[one.name] = name, f"{crc:08x}"
        except BaseException:
            file.close(whole=False)
            raise
        file.close()
    total = sum(one.bytes for one in tensors.values())
    index = {"metadata": {"total_size": total, "crc32c": crcs}, "weight_map": files}
    path = os.path.join(directory, index_of(prefix))
    write_file(path, (json.dumps(index, indent=1) + "\n").encode())
    yield None


def _shards(tensors: Iterable[Tensor], most: int) -> list[list[Tensor]]:
    """The tensors of each file."""
    shards, filled = list[list[Tensor]]([[]]), 0
    for one in tensors:
        if one.dtype not in NAMES:
            raise ValueError(f"{one.name} is of {one.dtype}, which safetensors does not have")
        if filled and filled + one.bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.bytes
    return shards


def _head(shard: Iterable[Tensor]) -> Bytes:
    """What a file begins with."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in shard:
        form = {"dtype": NAMES[one.dtype], "shape": one.shape}
        header[one.name] = {**form, "data_offsets": (at, at + one.bytes)}
        at += one.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


class _Found(NamedTuple):
    """Where a tensor lies, and its checksum, where the index has one."""

    tensor: Tensor
    file: aio.Reader
    start: int
    crc: int | None


def checksum(value: Any) -> bool:
    """a checksum of eight hexadecimal digits"""
    return text(value) and re.fullmatch("[0-9a-f]{8}", value) is not None


class SetsReader:
    """Reads the tensors of sets, best in the order in which they lie."""

    def __init__(
        self, directory: str, prefixes: Iterable[str], backend: aio.Backend, *, links: bool = False
    ):
        """Read of each `PREFIX.safetensors`, or where there is none the index, and all headers.
        `links` are followed, as the cache of Hugging Face has files, or refused.

        Raises:
            OSError: a file is missing, or cannot be read.
            ValueError: one is none of the format, with what is wrong in it.
        """
        self._directory, self._backend, self._links = directory, backend, links
        self._files: list[aio.Reader] = []
        self._recent: dict[str, list[aio.Reader]] = {}
        """By set those that have memory, the last one last."""
        self.shared = False
        """Whether several processes read it, each some parts: then `check` compares checksums."""
        self.parts: dict[tuple[str, str], tuple[int, int, int]] = {}
        """Of tensors of which a part was read: from which byte on, to which, and its checksum."""
        self.places: dict[str, dict[str, _Found]] = {}
        """By set and name."""
        try:
            for prefix in prefixes:
                self.places[prefix] = {place.tensor.name: place for place in self._open(prefix)}
        except BaseException:
            self.close()
            raise

    def _open(self, prefix: str) -> Iterator[_Found]:
        index = head_of(self._directory, prefix)
        if not index.endswith(".json"):
            yield from self._header(os.path.basename(index))
            return
        found = read_json(index)
        files: Any = found.get("weight_map")
        check(files, Each(text, file_name), f"{index}: weight_map")
        metadata = found.get("metadata")
        crcs: Any = metadata.get("crc32c", {}) if isinstance(metadata, dict) else {}
        check(crcs, Each(text, checksum), f"{index}: crc32c")
        there = set[tuple[str, str]]()
        for file in dict.fromkeys(files.values()):
            for place in self._header(file):
                name = place.tensor.name
                there.add((name, file))
                yield place._replace(crc=int(crcs[name], 16) if name in crcs else None)
        if other := there ^ files.items():
            name, file = min(other)
            raise ValueError(f"{index} and {shown(file)}: only one of them has {shown(name)}")

    def _header(self, file: str) -> Iterator[_Found]:
        path = os.path.join(self._directory, file)
        path = os.path.realpath(path) if self._links else path
        reader = aio.Reader(path, self._backend)
        self._files.append(reader)
        try:
            with safe_open(path, "pt") as header:  # It checks all of it.
                slices = {name: header.get_slice(name) for name in header.offset_keys()}
        except SafetensorError as error:
            raise ValueError(
                f"{path}: no safetensors file, or cut short or changed: {shown(error)}"
            ) from error
        known = {theirs: ours for ours, theirs in NAMES.items()}
        for name, one in slices.items():
            if one.get_dtype() not in known:
                raise ValueError(f"{path}: {shown(name)} is of {one.get_dtype()}, not offered")
        found = [Tensor(k, known[v.get_dtype()], tuple(v.get_shape())) for k, v in slices.items()]
        at = reader.size - sum(one.bytes for one in found)  # There are no gaps.
        for one in found:
            yield _Found(one, reader, at, None)
            at += one.bytes

    @property
    def tensors(self) -> Sets:
        """What there is."""
        return {
            prefix: {name: place.tensor for name, place in places.items()}
            for prefix, places in self.places.items()
        }

    def values(self, prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        """See `Values`. With the last part of a tensor its checksum is compared."""
        place, recent = self.places[prefix][name], self._recent.setdefault(prefix, [])
        found = torch.empty(count, dtype=getattr(torch, place.tensor.dtype))
        into, start = bytes_of(found), start * found.itemsize
        if place.file in recent:
            recent.remove(place.file)
        recent.append(place.file)
        if len(recent) > FILES_MAX:
            recent.pop(0).let_go()
        place.file.read(place.start + start, into)
        first, done, crc = self.parts.pop((prefix, name), (start, start, 0))
        assert done == start, f"{name}: parts out of order"
        done, crc = done + into.size, crc32c(into, crc)
        if self.shared or first or done < place.tensor.bytes:
            self.parts[prefix, name] = first, done, crc
        else:
            self._check(place, crc)
        return found

    def check(self, parts: Iterable[Mapping[tuple[str, str], tuple[int, int, int]]]) -> None:
        """Compare the checksums of tensors that several processes have read, each its `parts`."""
        found: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        for one in parts:
            for key, part in one.items():
                found.setdefault(key, []).append(part)
        for (prefix, name), each in found.items():
            place, at, crc = self.places[prefix][name], 0, 0
            for first, last, value in sorted(each):
                if first == at:
                    at, crc = last, crc32c_combined(crc, value, last - first)
            if at == place.tensor.bytes:
                self._check(place, crc)

    @staticmethod
    def _check(place: _Found, crc: int) -> None:
        if place.crc is not None and crc != place.crc:
            raise OSError(
                errno.EIO,
                f"{place.tensor.name}: checksum mismatch (CRC32C {crc:#010x}, written as "
                f"{place.crc:#010x}); likely the drive or a copy changed bits; load another "
                "checkpoint",
                place.file.path,
            )

    def close(self) -> None:
        """Close all files."""
        for one in self._files:
            one.close()


def read_json(path: str) -> dict[str, Any]:
    """The object in a file of JSON, which is refused where it is none, or too large."""
    with open(path, "rb") as file:
        small = os.fstat(file.fileno()).st_size <= JSON_BYTES_MAX
        text = file.read() if small else b"null"  # A bound given to read() is allocated at once.
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON where it should be: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: larger than {JSON_BYTES_MAX} bytes, or no object of JSON")
    return found


def private(path: str, flags: int) -> int:
    """An opener of files of this user alone, which follows no link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_file(path: str, content: bytes) -> None:
    """A new file, flushed to the drive; one that was left there by another process goes."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    with naming("write", path), open(path, "xb", opener=private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
