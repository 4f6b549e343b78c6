"""Folders of torch.distributed.checkpoint (DCP), read and written chunk by chunk.

[Note: DCP folders]
`.metadata` is a pickle: of each tensor of a state dict the dtype, the shape and the chunks (boxes);
by name and offset of a chunk where its bytes lie, which `torch.save` has written, as it has what is
no tensor; and of each flat name its path in the state dict. A pickle can run code: here torch's
classes become records, and others are refused. Chunks are mapped. Nothing has a checksum.

[Note: Names in DCP folders]
A state dict is nested: `model`, and the optimizer's `state` and `param_groups`, with whatever is
beside them. States are by the names of parameters where torch's `get_state_dict` was asked, nested
or flattened; `optimizer.state_dict()` has numbers. Which parameter has which number is in no file,
unless the optimizer was given named parameters: it is concluded where shapes leave one choice.

Source: torch/distributed/checkpoint (metadata, filesystem, default_planner), of 2.13.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from io import BytesIO
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

from aio.errors import naming
from offload.checkpoint.deepspeed_shards import Checkpoint, rule_of
from offload.checkpoint.directory import FORMAT, decoded, encoded
from offload.checkpoint.saving import progress, states_of
from offload.checkpoint.schema import COUNT_MAX, Refusal, check, count, file_name, shown, told
from offload.checkpoint.shards import (
    NAMES,
    PART_ELEMENTS,
    WEIGHTS,
    Sets,
    Tensor,
    Values,
    bytes_of,
    name_of,
    write_file,
)
from offload.parallel.flat_shard import boxes

OBJECT_BYTES_MAX = 16 << 20
CHUNKS_MAX = 1 << 10
"""So many chunks are kept mapped."""

RESIDUE, STEP = "residue", "step"
HEAD_ELEMENTS = 1 << 10
"""By which tied weights are looked for."""

_ASKED = "a folder of torch.distributed.checkpoint", "it is damaged, or of another release"
"""Of a sentence on what is damaged: what was asked for, and the likely cause."""

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


class _Entry(NamedTuple):
    """Where an entry lies, and of a chunk which part of its tensor it is."""

    file: str
    start: int
    length: int
    offsets: Shape = ()
    sizes: Shape = ()


# -- read ------------------------------------------------------------------------------------------


class Folder:
    """What a folder has: tensors, objects, and the path of each, by its flat name."""

    def __init__(self, where: str):
        self.where = where
        self._chunk = lru_cache(CHUNKS_MAX)(self._map)
        with open(os.path.join(where, ".metadata"), "rb") as file:
            found = _Unpickler(file).load().state
        there: dict[Any, _Entry] = {}
        for index, one in found["storage_data"].items():
            name, stored = index.state["fqn"], one.state
            check(stored, _STORED, f"the place of {shown(name)}")
            there[name, index.state.get("offset")] = _Entry(*(stored[key] for key in _STORED))
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, _Entry] = {}
        self._chunks: dict[str, list[_Entry]] = {}
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

    def _check(self, one: Tensor, chunks: list[_Entry]) -> None:
        if one.dtype not in NAMES:
            raise ValueError(f"{shown(one.name)} of {one.dtype}, which no save has")
        shape, item = one.shape, one.itemsize
        for box in (*chunks, _Entry("", 0, COUNT_MAX, (0,) * len(shape), shape)):
            within = len(box.offsets) == len(box.sizes) == len(shape) and all(
                count(at) and count(size) and at + size <= most
                for at, size, most in zip(box.offsets, box.sizes, shape)
            )
            if not within or prod(box.sizes) * item > box.length:
                raise ValueError(f"{shown(one.name)} of shape {shown(shape)}, with a part {box}")
        if sum(prod(box.sizes) for box in chunks) != prod(shape):
            raise ValueError(f"{shown(one.name)}, of which a part is missing")

    def _load(self, place: _Entry, device: str) -> Any:
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

    def _map(self, dtype: str, place: _Entry) -> Any:
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
        """So many elements of a tensor from one on, 1-D."""
        one = self.tensors[name]
        found = torch.zeros(count, dtype=getattr(torch, one.dtype))
        items = bytes_of(found).view(f"i{found.itemsize}")
        for first, offsets, sizes in boxes(one.shape, start, start + count):
            self._fill(items[first - start :][: prod(sizes)].reshape(sizes), offsets, one)
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


# -- its state dicts -----------------------------------------------------------------------------


def open_dcp(where: str) -> Checkpoint:
    """Map a folder: weights, and where it has an optimizer its states and groups, by name."""
    with told(where, *_ASKED):
        return _checkpoint(Folder(where))


def _checkpoint(folder: Folder) -> Checkpoint:
    found = (re.match(r"(|.*\.)param_groups\.", name) for name in folder.paths)
    homes = {match[1] for match in found if match}
    if len(homes) > 1:
        raise Refusal(f"{folder.where}: several optimizers, {shown(sorted(homes))}; not offered")
    mine = tuple(f"{home}{part}." for home in homes for part in ("state", "param_groups"))
    others = [name for name in folder.paths if not name.startswith(mine or "\0")]
    stems: dict[Path, dict[str, str]] = {}
    for name in filter(folder.tensors.get, others):
        *stem, last = folder.paths[name]
        stems.setdefault(tuple(stem), {})[str(last)] = name
    chosen = [stem for stem in stems if stem[-1:] == ("model",)] or [*stems]
    if len(chosen) != 1:
        raise Refusal(
            f"{folder.where}: asked for the weights of a model; found tensors under "
            f"{shown(chosen)}; expected those of one `model`"
        )
    weights, notices = stems[chosen[0]], list[str]()
    rest = [name for name in others if name not in set(weights.values())]
    optimizer = _Optimizer(folder, *homes) if homes else None
    groups, slots = optimizer.named(weights, notices) if optimizer else ([], {})
    trained = {name for group in groups for name in group["parameters"]}
    _drop_tied(folder, weights, trained, notices)
    places: dict[str, dict[str, str]] = {WEIGHTS: weights}
    states: dict[str, Any] = {}
    for name, all_ in slots.items():
        steps = int(folder.object(all_.pop(STEP))) if STEP in all_ else 1  # That of SGD has none.
        states[name] = {"steps": steps, "slots": all_}
        for slot, at in all_.items():
            if folder.tensors[at].shape != folder.tensors[weights[name]].shape:
                raise ValueError(f"{shown(at)} of another shape than {shown(name)}")
            places.setdefault(slot, {})[name] = at
    sets = {
        prefix: {name: folder.tensors[at]._replace(name=name) for name, at in named.items()}
        for prefix, named in places.items()
    }

    def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        with told(folder.where, *_ASKED):
            return folder.values(places[prefix][name], start, count)

    step = max((state["steps"] for state in states.values()), default=0)
    run = {"format": FORMAT, "step": step, "user": _user(folder, rest, notices)}
    if optimizer:
        kinds = {*sets} - {WEIGHTS, RESIDUE}
        unstepped = "sgd" if groups and "momentum" in groups[0]["options"] else "adam"
        rule = rule_of(kinds) if kinds else unstepped
        run["optimizer"] = {"rule": rule, "groups": groups, "states": states}
    # All weights are castable, as in `model.to`: nothing tells buffers from parameters.
    return Checkpoint(sets, values, run, weights.keys(), notices=notices)


class _Optimizer:
    """The names of an optimizer's entries: of each state its slots, of each group its options."""

    def __init__(self, folder: Folder, home: str):
        self._folder = folder
        self.slots: dict[str, dict[str, str]] = {}
        options: dict[str, dict[str, str]] = {}
        for part, found in (("state", self.slots), ("param_groups", options)):
            for name in folder.paths:
                if name.startswith(f"{home}{part}."):
                    key, _, one = name.removeprefix(f"{home}{part}.").rpartition(".")
                    if one == STEP or name in folder.tensors or part == "param_groups":
                        found.setdefault(key, {})[one] = name
        numbered = [key for key, one in options.items() if "params" in one]
        self.groups = [self._read(options[key]) for key in sorted(numbered, key=int)]
        flat: dict[str, dict[str, Any]] = {}
        for key, one in options.items() if not numbered else ():  # They were flattened.
            read = self._read(one)
            group = flat.setdefault(repr(sorted(read.items())), {**read, "params": []})
            group["params"].append(key)
        self.groups += flat.values()

    def _read(self, options: dict[str, str]) -> dict[str, Any]:
        return {option: self._folder.object(name) for option, name in options.items()}

    def named(
        self, weights: dict[str, str], notices: list[str]
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
        """Groups as a save has them, and slots, by the names of the parameters."""
        shapes = {name: self._folder.tensors[at].shape for name, at in weights.items()}
        names: dict[Any, str] = {}
        for group in self.groups:
            names |= dict(zip(group["params"], group.pop("param_names", group["params"])))
        if not all(isinstance(one, str) for one in names.values()):
            _drop_tied(self._folder, weights, (), notices)
            names = self._by_shape({name: shapes[name] for name in weights})
            notices.append(
                "states of numbers were given to parameters by order and shape: right if each "
                "group had its parameters in the model's order; torch's get_state_dict writes names"
            )
        groups = []
        for group in self.groups:
            of = [names[one] for one in group.pop("params")]
            of = [one for one in of if 0 not in shapes[one]]
            groups.append({"parameters": of, "options": encoded(group, "options of a group")})
        keys = {str(key): name for key, name in names.items()}
        return groups, {keys[key]: one for key, one in self.slots.items() if keys[key] in shapes}

    def _by_shape(self, shapes: dict[str, Shape]) -> dict[Any, str]:
        """The parameters that numbers stand for, where there is one way to see it."""
        numbers = [one for group in self.groups for one in group["params"]]
        if len(self.groups) == 1 and len(numbers) == len(shapes):
            return dict(zip(numbers, shapes))
        found: dict[Any, str] = {}
        for shape in set(shapes.values()):
            names = [name for name, one in shapes.items() if one == shape]
            mine = (
                [one for one in group["params"] if self._shape(one) == shape]
                for group in self.groups
            )
            of_groups = [one for one in mine if one]
            if [len(one) for one in of_groups] == [len(names)]:
                found |= zip(of_groups[0], names)
        if lost := [one for one in numbers if one not in found]:
            raise Refusal(
                f"{self._folder.where}: states by number; found no parameter, or several ways to "
                f"choose one, for {shown(lost)}; save what torch's get_state_dict gives, which has "
                "names"
            )
        return found

    def _shape(self, number: Any) -> Any:
        slots = [at for slot, at in self.slots.get(str(number), {}).items() if slot != STEP]
        return self._folder.tensors[slots[0]].shape if slots else None


def _drop_tied(folder: Folder, weights: dict[str, str], trained: Any, notices: list[str]) -> None:
    """Leave out the second name of each matrix that has two. All that a folder says of that are
    equal bits: matrices of one number only do not count, nor two that were trained."""
    found: dict[Any, str] = {}
    for name in sorted(weights, key=lambda name: name not in trained):
        one = folder.tensors[weights[name]]
        if len(one.shape) < 2 or 0 in one.shape:
            continue
        head = folder.values(weights[name], 0, min(HEAD_ELEMENTS, prod(one.shape)))
        first = found.setdefault((one.dtype, one.shape, bytes_of(head).tobytes()), name)
        if first == name or name in trained or bool((head == head[0]).all()):
            continue
        pairs = (
            [folder.values(weights[each], *part) for each in (first, name)]
            for part in one.parts(PART_ELEMENTS)
        )
        if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            notices.append(f"left out: {name}, which has the bits of {first}: likely they are tied")
            del weights[name]


def _user(folder: Folder, names: list[str], notices: list[str]) -> Any:
    """What is beside model and optimizer, nested as it was."""
    found: dict[Any, Any] = {}
    for name in names:
        if name in folder.tensors and folder.tensors[name].shape:
            notices.append(f"left out: {name}, a tensor beside the model's")
            continue
        path = folder.paths[name]
        try:
            value = encoded(folder.object(name), name)
        except (TypeError, ValueError, RuntimeError, pickle.PickleError) as error:
            notices.append(f"left out: {name}: {' '.join(str(error).split())[:200]}")
            continue
        at = found
        for one in path[:-1]:
            at = at.setdefault(one, {})
        at[path[-1]] = decoded(value)
    return encoded(found["user"] if found.keys() == {"user"} else found or None, "user")


# -- write -----------------------------------------------------------------------------------------


def write_dcp(where: str, made: Checkpoint, what: str) -> None:
    """Write what a save of `made` would have to an empty directory, with the names that torch's
    `get_state_dict` gives, nested and flattened. `what` stands beside the bar.
    """
    saved, states = made.run.get("optimizer", {"rule": "", "groups": []}), states_of(made.run)
    sets: Sets = {**made.sets, STEP: {name: Tensor(name, "float32", ()) for name in states}}
    tensors: dict[Path, tuple[str, Tensor]] = {}
    for prefix, named in sets.items():
        for name, one in named.items():
            state: Path = ("optimizer", "state", name, prefix)
            tensors[("model", name) if prefix == WEIGHTS else state] = prefix, one

    def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        if prefix == STEP:
            return torch.tensor([float(states[name]["steps"])])
        return made.values(prefix, name, start, count)

    objects: list[tuple[Any, list[Path]]] = []
    kind: Any = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(saved["rule"])
    default = kind([torch.zeros(1)]).param_groups[0] if kind else {}
    for number, group in enumerate(saved["groups"]):
        options = {**default, **decoded(group["options"]), "params": group["parameters"]}
        for option, value in options.items():
            flat: list[Path] = [
                ("optimizer", f"param_groups.{name}.{option}")
                for name in group["parameters"]
                if option != "params" and not name.isdigit()  # A group is a digit.
            ]
            objects.append((value, [("optimizer", "param_groups", number, option), *flat]))
    for beside in ("user", "scheduler"):
        if made.run.get(beside) is not None:
            objects.append((decoded(made.run[beside]), [(beside,)]))
    with progress(what, sets) as moved:
        write_folder(where, tensors, objects, values, moved)


def write_folder(
    where: str,
    tensors: Mapping[Path, tuple[str, Tensor]],
    objects: Iterable[tuple[Any, list[Path]]],
    values: Values,
    moved: Callable[[int], None],
) -> None:
    """Write to an empty directory, as one process does with `dcp.save`. Torch's own writer keeps
    every tensor until its file is closed: here there is one chunk in memory.

    Tensors are by path in the state dict, each with the prefix of its set. An object that is no
    tensor has one path or several. `moved` is told of bytes.
    """
    known: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    full = os.path.join(where, name := "__0_0.distcp")
    with open(full, "xb", buffering=0) as file:

        def put(content: Any) -> _StorageInfo:
            torch.save(content, made := BytesIO())  # Of a file it does not tell why it fails.
            start, rest = file.tell(), made.getbuffer()
            with naming("write", full):
                while rest:
                    rest = rest[file.write(rest) :]
            return _StorageInfo(name, start, file.tell() - start)

        for content, all_ in objects:
            place = put(content)
            for path in all_:
                paths[flat := _flat(path)] = path
                known[flat], places[MetadataIndex(flat)] = BytesStorageMetadata(), place
        for path, (prefix, one) in tensors.items():
            paths[flat := _flat(path)] = path
            dtype, chunks = getattr(torch, one.dtype), list[ChunkStorageMetadata]()
            cut = [b for at, n in one.parts(PART_ELEMENTS) for b in boxes(one.shape, at, at + n)]
            for first, offsets, sizes in cut or [(0, (0,) * len(one.shape), one.shape)]:
                part = torch.empty(sizes, dtype=dtype)
                if part.numel():  # Copied, as torch writes all of what a view is of.
                    part.view(-1).copy_(values(prefix, one.name, first, part.numel()))
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
                places[MetadataIndex(flat, offsets)] = put(part)
                moved(part.nbytes)
            kind = TensorProperties(dtype=dtype)
            known[flat] = TensorStorageMetadata(kind, torch.Size(one.shape), chunks)
        with naming("flush", full):
            os.fsync(file.fileno())
    metadata = Metadata(known, paths, places, version=CURRENT_DCP_VERSION)
    write_file(os.path.join(where, ".metadata"), pickle.dumps(metadata))


def _flat(path: Path) -> str:
    return ".".join(map(str, path))
