"""Read a durable run: its commit, the layout of its record files, and the values in them.

See [Note: Commits] of `commits`, which writes it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import lru_cache, partial
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

import aio
from aio.volume import Extent
from cpu_adam import crc32c
from cpu_adam.formats import format_for
from cpu_adam.reference import cut, views
from cpu_adam.torch_state import scales, to_plain
from offload.checkpoint.directory import check_fields, read_checked
from offload.checkpoint.schema import Each, Maybe, check, count, file_name, flag, shown, text, told
from offload.checkpoint.shards import WEIGHTS, Tensor, items, name_of
from offload.planning.profile import ITEM_BYTES

COMMIT, PREVIOUS = "commit.json", "previous.json"
RANK = "rank-"
"""What begins the names of the directories of ranks."""

ELSEWHERE = (
    "the directories of other ranks are on other machines; let Config.durable be one that all share"
)

FORMAT = 1


def record_files(directory: str, layout: Mapping[str, Any]) -> list[str]:
    """The paths of the record files of a layout: beside it where a folder is empty."""
    name, pairs = layout["name"], enumerate(layout["folders"])
    return [os.path.join(directory, folder, f"{name}.{drive}") for drive, folder in pairs]


def read_commit(directory: str, name: str = COMMIT) -> tuple[dict[str, Any], dict[str, Any]]:
    """A commit and its layout, whose fields are those that `RunDirectory` writes; refused where one
    is damaged, or a file that it names is not there."""
    path = os.path.join(directory, name)
    commit = read_checked(path, FORMAT)
    check(commit, _COMMIT, path)
    check_fields({"format": FORMAT, **commit["run"]}, f"{path}: run")
    path = os.path.join(directory, commit["layout"])
    _require(path, commit, "the directory was not copied as a whole; copy it again")
    layout = read_layout(path)
    with told(path, "where the values of a commit lie", "it is of another commit, or was changed"):
        _check_places(commit, layout, whole="part" not in commit["run"])
    for file, folder in zip(record_files(directory, layout), layout["folders"]):
        likely = f"its drive is elsewhere; mount it there, or let {folder!r} be a link to it"
        _require(file, commit, likely if folder else "it was not copied along; copy it again")
    return commit, layout


def _require(path: str, commit: Mapping[str, Any], likely: str) -> None:
    if not os.path.lexists(path):
        found = f"asked for the commit of step {commit['run']['step']}; found no such file"
        found += f"; likely it was deleted, or {likely}; or begin anew under another name"
        raise FileNotFoundError(errno.ENOENT, found, path)


def read_layout(path: str) -> dict[str, Any]:
    """A layout, each field of which can be what it says."""
    layout = read_checked(path, FORMAT)
    check(layout, _LAYOUT, path)
    return layout


def _check_places(commit: Mapping[str, Any], layout: Mapping[str, Any], *, whole: bool) -> None:
    """Refuse a layout that names what is not there: all sums of it stay within the files. It has
    the `whole` of each parameter, or a range."""
    unit_bytes, pattern = layout["stripes"]
    if unit_bytes % aio.ALIGN_BYTES or not 0 < len(pattern) <= 64 or not unit_bytes:
        raise ValueError("stripes that are none")
    if set(pattern) != set(range(len(layout["folders"]))):
        raise ValueError("stripes over other files")
    seen = dict[str, int]()
    for chunk in layout["chunks"]:
        dtypes = {layout["parameters"][piece[0]][0] for piece in chunk["pieces"]}
        (dtype,) = dtypes or {"float32"}
        for value in filter(None, (chunk["weight"], chunk["state"])):
            number, offset, size = value
            if commit["homes"][number][0] > 1 or offset + size > layout["second"]:
                raise ValueError(f"value {number} lies beyond the end")
        fmt = format_for(dtype, layout["states"], layout["rule"]) if chunk["state"] else None
        if fmt and not 0 < fmt.record_bytes(chunk["elements"]) <= chunk["state"][2]:
            raise ValueError("a record that is too short")
        for name, start, at, elements in chunk["pieces"]:
            if seen.setdefault(name, 0 if whole else start) != start:
                raise ValueError(f"{shown(name)} has a gap")
            seen[name] += elements
            if (at + elements) * ITEM_BYTES[dtype] > chunk["weight"][2]:
                raise ValueError(f"{shown(name)} lies beyond the end of a chunk")
            if fmt and at + elements > chunk["elements"]:
                raise ValueError(f"the state of {shown(name)} lies beyond the end of a chunk")
    for name, (_, shape, _) in layout["parameters"].items():
        if seen.get(name, 0) != prod(shape) if whole else seen.get(name, 0) > prod(shape):
            raise ValueError(f"{shown(name)} is not there as a whole")


class _Range(NamedTuple):
    """Where part of a parameter lies."""

    start: int
    """Of its elements, the first."""
    chunk: int
    """Of the layout."""
    chunk_start: int
    elements: int


class PartReader:
    """Reads what one directory has of a commit, and checks every byte."""

    def __init__(self, directory: str, commit: Mapping[str, Any], layout: Mapping[str, Any]):
        """Open the record files, and read the buffers."""
        self.commit, self._layout = commit, layout
        self._stripes = aio.Stripes(layout["stripes"][0], tuple(layout["stripes"][1]))
        self._fds, self._paths = list[int](), record_files(directory, layout)
        self._places = dict[str, list[_Range]]()
        for number, chunk in enumerate(layout["chunks"]):
            for name, start, at, elements in chunk["pieces"]:
                self._places.setdefault(name, []).append(_Range(start, number, at, elements))
        self.buffers = _read_buffers(directory, commit)
        self._bytes = lru_cache(2)(self._read_bytes)
        self._plain = lru_cache(2)(self._read_plain)
        try:
            for path in self._paths:
                self._fds.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
            if sum(os.fstat(fd).st_size for fd in self._fds) < layout["second"]:
                raise OSError(errno.EIO, "cut short", " and ".join(self._paths))
        except OSError as error:
            self.close()
            found = (
                f"asked for the values of a commit; found: {error.strerror}; likely not all was "
                "copied; copy it again, or begin anew under another name"
            )
            raise OSError(error.errno, found, error.filename) from error

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that there are, by name."""
        parameters = self._layout["parameters"].items()
        found = {k: Tensor(k, dtype, tuple(shape)) for k, (dtype, shape, _) in parameters}
        buffers = self.buffers.items()
        return found | {k: Tensor(k, name_of(v.dtype), tuple(v.shape)) for k, v in buffers}

    def parts(
        self, prefix: str, name: str
    ) -> Iterator[tuple[int, int, Callable[[], torch.Tensor]]]:
        """The parts of a parameter that are here, in order: where each begins in the parameter, its
        size, and what reads it."""
        for place in self._places.get(name, []):
            sizes = items(prefix, place.start), items(prefix, place.elements)
            yield *sizes, partial(self._part, prefix, name, place)

    def _part(self, prefix: str, name: str, place: _Range) -> torch.Tensor:
        if prefix != WEIGHTS:
            return self._plain(name, place)[prefix]
        content = self._bytes("weight", place.chunk)
        weights = content.view(getattr(torch, self._layout["parameters"][name][0]))
        return weights[place.chunk_start :][: place.elements]

    def _read_plain(self, name: str, place: _Range) -> dict[str, torch.Tensor]:
        """The slots of part of a state."""
        layout = self._layout
        fmt = format_for(layout["parameters"][name][0], layout["states"], layout["rule"])
        elements = layout["chunks"][place.chunk]["elements"]
        slots = views(self._bytes("state", place.chunk), fmt, elements)
        part = cut(slots, fmt, place.chunk_start, place.elements)
        return to_plain(part, fmt) | scales(part, fmt)

    def _extents(self, value: Sequence[int]) -> Iterator[Extent]:
        """Where a value of a chunk lies."""
        number, offset, size = value
        offset += self.commit["homes"][number][0] * self._layout["second"]
        return self._stripes.extents(offset, size)

    def _read_bytes(self, kind: str, chunk: int) -> torch.Tensor:
        chunks, will_need = self._layout["chunks"], os.POSIX_FADV_WILLNEED
        number, _, size = chunks[chunk][kind]
        crc = self.commit["homes"][number][2]
        content = torch.empty(size, dtype=torch.uint8)
        whole = memoryview(content.numpy())  # type: ignore[arg-type]
        for following in chunks[chunk + 1 : chunk + 2]:  # Likely the one that is read next.
            for one in self._extents(following[kind]) if following[kind] else ():
                os.posix_fadvise(self._fds[one.drive], one.offset, one.stop - one.start, will_need)
        for extent in self._extents(chunks[chunk][kind]):
            at = extent.start
            while at < extent.stop:
                part = whole[at : extent.stop]
                count = os.preadv(
                    self._fds[extent.drive], [part], extent.offset + at - extent.start
                )
                if not count:
                    raise OSError(errno.EIO, "the file is cut short", self._paths[extent.drive])
                at += count
        if (found := crc32c(content.numpy(), 0)) != crc:
            raise OSError(
                errno.EIO,
                f"chunk {chunk} ({kind}): checksum mismatch (CRC32C {found:#010x}, written as "
                f"{crc:#010x}); likely the drive changed bits; `offload inspect` tells what is "
                "whole",
                " and ".join(self._paths),
            )
        return content

    def check(self) -> list[str]:
        """Read every chunk. What is wrong, a line each."""
        wrong = list[str]()
        for number, chunk in enumerate(self._layout["chunks"]):
            for kind in ("weight", "state"):
                if chunk[kind] is None:
                    continue
                try:
                    self._read_bytes(kind, number)
                except OSError as error:
                    wrong.append(f"{error.filename}: {error.strerror}")
        return wrong

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())


class CommitReader:
    """Reads the values of a commit, by parameter and range."""

    def __init__(self, found: Iterable[tuple[str, Any, Any]], path: str):
        """Open the parts of the commit in `path`: the directory, the commit and the layout of each;
        step, random numbers and buffers are those of the first."""
        with ExitStack() as opened:
            self._parts = [opened.enter_context(closing(PartReader(*one))) for one in found]
            self._path, self._opened = path, opened.pop_all()
        self.commit: Mapping[str, Any] = self._parts[0].commit
        self.tensors = self._parts[0].tensors
        """The parameters and buffers that there are, by name, in full."""

    def values(self, prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        """See `Values`; the sets are those of a save."""
        if (buffer := self._parts[0].buffers.get(name)) is not None:
            return buffer.reshape(-1)[start : start + count]
        every = chain.from_iterable(one.parts(prefix, name) for one in self._parts)
        found = list[torch.Tensor]()
        for at, size, read in sorted(every, key=itemgetter(0)):
            first, last = max(start, at), min(start + count, at + size)
            if first < last:
                found.append(read()[first - at : last - at])
        if (here := sum(map(len, found))) < count:
            told = (
                f"asked for {count} elements of {name}; found {here}: likely units or the number "
                f"of ranks are others, and {ELSEWHERE}, or go on as it was"
            )
            raise FileNotFoundError(errno.ENOENT, told, self._path)
        return found[0] if len(found) == 1 else torch.cat(found)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


def _read_buffers(directory: str, commit: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if commit["buffers"] is None:
        return {}
    name, crc = commit["buffers"]
    path = os.path.join(directory, name)
    with open(path, "rb") as file:
        content = file.read()
    if crc32c(np.frombuffer(content, np.uint8), 0) != crc:
        raise OSError(errno.EIO, "checksum mismatch; likely the drive changed bits", path)
    return safetensors.torch.load(content)


# -- what the files can say ------------------------------------------------------------------------


def _inode(value: Any) -> bool:
    """the number of a directory"""
    return type(value) is int and 0 <= value < 1 << 64


def _records(value: Any) -> bool:
    """the name of record files"""
    return text(value) and re.fullmatch("offload-[0-9a-f]{8}", value) is not None


def _dtype(value: Any) -> bool:
    """a dtype of weights"""
    return text(value) and value in ITEM_BYTES


_VALUE = (count, count, count)
_CHUNK = {
    "weight": _VALUE,
    "state": Maybe(_VALUE),
    "elements": count,
    "pieces": [(text, count, count, count)],
}
_LAYOUT = {
    "format": count,
    "rule": text,
    "states": text,
    "parameters": Each(text, (_dtype, [count], flag)),
    "chunks": [_CHUNK],
    "second": count,
    "folders": [text],
    "stripes": (count, [count]),
    "inode": _inode,
    "name": _records,
}
_COMMIT = {
    "format": count,
    "layout": file_name,
    "homes": [(count, count, count)],
    "buffers": Maybe((file_name, count)),
    "forward": flag,
    "run": Each(text, lambda value: True),
}
