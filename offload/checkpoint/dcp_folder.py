"""Folders of torch.distributed.checkpoint (DCP), read and written chunk by chunk.

[Note: DCP folders]
`.metadata` is a pickle: of each tensor of a state dict the dtype, the shape and the chunks (boxes);
by name and offset of a chunk where its bytes lie, which `torch.save` has written, as it has what is
no tensor; and of each flat name its path in the state dict. A pickle can run code: here torch's
classes become records, and others are refused. Chunks are mapped. Nothing has a checksum.

Source: torch/distributed/checkpoint (metadata, filesystem, default_planner), of 2.13.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from offload.checkpoint.schema import COUNT_MAX, check, count, file_name, shown
from offload.checkpoint.shards import (
    NAMES,
    PART_ELEMENTS,
    Tensor,
    Values,
    bytes_of,
    name_of,
    write_file,
)

OBJECT_BYTES_MAX = 16 << 20
CHUNKS_MAX = 1 << 10
"""So many chunks are kept mapped."""

Path = tuple[str | int, ...]
Shape = tuple[int, ...]
_RECORDS = re.compile(
    r"torch\.distributed\.(checkpoint|_shard)(\.\w+)+|torch\.serialization\._get_layout|"
    r"pathlib(\._local)?\.\w+"
)
_STORED = {"relative_path": file_name, "offset": count, "length": count}


class _Record:
    """An object of a class of torch's: its state, or what it was made of."""

    state: Any = None

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # That in C has a memo of any size that a file asks for.
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) == ("torch", "Size"):
            return tuple
        if _RECORDS.fullmatch(f"{module}.{name}"):
            return _Record
        raise ValueError(f"a {module}.{name}, which could run code")


class _Place(NamedTuple):
    """Where an entry lies, and of a chunk which part of its tensor it is."""

    file: str
    start: int
    length: int
    offsets: Shape = ()
    sizes: Shape = ()


def box_at(shape: Shape, start: int, most: int) -> tuple[Shape, Shape]:
    """Offsets and sizes of the largest box of at most so many elements which in order are those of
    a tensor from `start` on."""
    shape = (1, *shape)
    rows = [max(prod(shape[axis:]), 1) for axis in range(1, len(shape) + 1)]
    offsets = [start // row % max(size, 1) for row, size in zip(rows, shape)]
    axis = next(at for at, row in enumerate(rows) if row <= most and start % row == 0)
    size = min(most // rows[axis], shape[axis] - offsets[axis])
    return tuple(offsets[1:]), (*[1] * axis, size, *shape[axis + 1 :])[1:]


# -- read ------------------------------------------------------------------------------------------


class Folder:
    """What a folder has: tensors, objects, and the path of each, by its flat name."""

    def __init__(self, where: str):
        self.where = where
        self._chunk = lru_cache(CHUNKS_MAX)(self._map)
        with open(os.path.join(where, ".metadata"), "rb") as file:
            found = _Unpickler(file).load().state
        there: dict[Any, _Place] = {}
        for index, one in found["storage_data"].items():
            name, stored = index.state["fqn"], one.state
            check(stored, _STORED, f"the place of {shown(name)}")
            there[name, index.state.get("offset")] = _Place(*(stored[key] for key in _STORED))
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, _Place] = {}
        self._chunks: dict[str, list[_Place]] = {}
        known = found["state_dict_metadata"]
        paths = found["planner_data"] or {}  # In the order of the state dict.
        self.paths = {name: paths.get(name, (name,)) for name in {**paths, **known}}
        for name, path in self.paths.items():
            if not path or not all(type(one) in (str, int) for one in path):
                raise ValueError(f"{shown(name)} of path {shown(path)}")
            one = known[name].state
            if not one:
                self.objects[name] = there[name, None]
                continue
            self.tensors[name] = Tensor(name, one["properties"].state[0], one["size"])
            boxes = [(box.state["offsets"], box.state["sizes"]) for box in one["chunks"]]
            self._chunks[name] = [
                there[name, offsets]._replace(offsets=offsets, sizes=sizes)
                for offsets, sizes in boxes
            ]
            self._check(self.tensors[name], self._chunks[name])

    def _check(self, one: Tensor, chunks: list[_Place]) -> None:
        if one.dtype not in NAMES:
            raise ValueError(f"{shown(one.name)} of {one.dtype}, which no save has")
        shape, item = one.shape, one.itemsize
        for box in (*chunks, _Place("", 0, COUNT_MAX, (0,) * len(shape), shape)):
            within = len(box.offsets) == len(box.sizes) == len(shape) and all(
                count(at) and count(size) and at + size <= most
                for at, size, most in zip(box.offsets, box.sizes, shape)
            )
            if not within or prod(box.sizes) * item > box.length:
                raise ValueError(f"{shown(one.name)} of shape {shown(shape)}, with a part {box}")
        if sum(prod(box.sizes) for box in chunks) != prod(shape):
            raise ValueError(f"{shown(one.name)}, of which a part is missing")

    def _load(self, place: _Place, device: str) -> Any:
        with open(os.path.join(self.where, place.file), "rb") as file:
            view: Any = _create_file_view(file, place.start, place.length)
            return torch.load(view, weights_only=True, map_location=device)

    def object(self, name: str) -> Any:
        """What is no tensor, or one number."""
        place = self.objects[name] if name in self.objects else self._chunks[name][0]
        if place.length > OBJECT_BYTES_MAX:
            raise ValueError(f"{shown(name)} of {place.length} bytes, more than is offered")
        found = self._load(place, "cpu")
        return found.item() if isinstance(found, torch.Tensor) else found

    def _map(self, dtype: str, place: _Place) -> Any:
        """A chunk, where it lies: integers of its items' size."""
        found = self._load(place, "meta")  # It has no memory, and knows where its values begin.
        if (name_of(found.dtype), found.shape) != (dtype, place.sizes):
            raise ValueError(f"a part in {place.file} of {found.dtype} and {found.shape}")
        path, item = os.path.join(self.where, place.file), found.itemsize
        content = np.memmap(path, np.uint8, "r", place.start, (place.length,))
        start = found.untyped_storage()._checkpoint_offset + found.storage_offset() * item
        strides = [step * item for step in found.stride()]
        return np.ndarray(place.sizes, f"i{item}", content.data, start, strides)

    def values(self, name: str, start: int, count: int) -> torch.Tensor:
        """So many elements of a tensor from one on, 1-D.

        Raises:
            OSError, ValueError: a chunk cannot be read, or is none of this tensor's.
        """
        one, done = self.tensors[name], 0
        found = torch.zeros(count, dtype=getattr(torch, one.dtype))
        items = bytes_of(found).view(f"i{found.itemsize}")
        while done < count:
            offsets, sizes = box_at(one.shape, start + done, count - done)
            block = items[done : done + prod(sizes)].reshape(sizes)
            self._fill(block, offsets, one)
            done += block.size
        return found

    def _fill(self, block: Any, offsets: Shape, one: Tensor) -> None:
        """Copy the parts of all chunks into a block, which is a box of a tensor."""
        filled = 0
        for place in self._chunks[one.name]:
            ends = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(offsets, block.shape, place.offsets, place.sizes)
            ]
            if all(start < stop for start, stop in ends):
                mine, theirs = (
                    tuple(slice(start - at, stop - at) for (start, stop), at in zip(ends, of))
                    for of in (offsets, place.offsets)
                )
                block[mine] = self._chunk(one.dtype, place)[theirs]
                filled += prod(stop - start for start, stop in ends)
        if filled != block.size:
            raise ValueError(f"{shown(one.name)}, of which a part is there twice")


# -- write -----------------------------------------------------------------------------------------


def write_folder(
    where: str,
    tensors: Mapping[Path, tuple[str, Tensor]],
    objects: Iterable[tuple[Any, list[Path]]],
    values: Values,
    moved: Callable[[int], None],
) -> None:
    """Write a folder, as one process does with `dcp.save`. Torch's own writer keeps every tensor
    until its file is closed: here there is one chunk in memory.

    Args:
        where: an empty directory.
        tensors: by path in the state dict, each with the prefix of its set.
        objects: what is no tensor, and its paths: with several it is there once.
        values: of the tensors.
        moved: is told of bytes.

    Raises:
        OSError: something cannot be written.
    """
    known: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with open(os.path.join(where, name := "__0_0.distcp"), "xb") as file:

        def put(content: Any) -> _StorageInfo:
            start = file.tell()
            torch.save(content, file)
            return _StorageInfo(name, start, file.tell() - start)

        for content, all_ in objects:
            place = put(content)
            for path in all_:
                paths[flat := _flat(path)] = path
                known[flat], places[MetadataIndex(flat)] = BytesStorageMetadata(), place
        for path, (prefix, one) in tensors.items():
            paths[flat := _flat(path)] = path
            dtype, chunks, at = getattr(torch, one.dtype), list[ChunkStorageMetadata](), 0
            while not chunks or at < prod(one.shape):  # One of no elements has a chunk, too.
                offsets, sizes = box_at(one.shape, at, PART_ELEMENTS)
                part = torch.empty(sizes, dtype=dtype)
                if part.numel():  # Copied, as torch writes all of what a view is of.
                    part.view(-1).copy_(values(prefix, one.name, at, part.numel()))
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
                places[MetadataIndex(flat, offsets)] = put(part)
                moved(part.nbytes)
                at += part.numel()
            kind = TensorProperties(dtype=dtype)
            known[flat] = TensorStorageMetadata(kind, torch.Size(one.shape), chunks)
        file.flush()
        os.fsync(file.fileno())
    metadata = Metadata(known, paths, places, version=CURRENT_DCP_VERSION)
    write_file(os.path.join(where, ".metadata"), pickle.dumps(metadata))


def _flat(path: Path) -> str:
    return ".".join(map(str, path))
