"""A tensor of which this rank has a range: what `p.grad`, states and `state_dict()` are over ranks.

[Note: Flat shards]
A `FlatShard` has the shape of the full tensor and the values of consecutive elements of it. What
needs no other rank works on these: edits in place, element by element. Norms are the one thing that
asks the other ranks, as all of them clip. Anything else would need values that are not here, and
raises. torch.distributed.checkpoint saves and loads one as it is, and cuts it anew for any number
of ranks: it takes boxes, into which a range of elements in row-major order is cut. As the local
tensor of a DTensor it has the shape of that, and its boxes lie where that begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import add
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from offload.model.parameter import find, swapped
from offload.planning.profile import TensorPart
from offload.runtime.torch_internals import wrapper

_A: Any = torch.ops.aten

_NORMS = {_A._foreach_norm.Scalar, _A.linalg_vector_norm.default, _A.norm.Scalar}

_KEPT = {_A.detach.default, _A.alias.default, _A.clone.default, _A._to_copy.default}
"""What gives another shard, of the same range."""

_EDITS = frozenset(
    name
    for one in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "copy", "zero", "neg")
    for name in (f"{one}_", f"_foreach_{one}_")
) | {"fill_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"}
"""Edits in place that treat each element by itself."""

Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The first element of a box in row-major order, where it begins, and its sizes."""


class ShardError(RuntimeError):
    """Values were asked for of which this rank has a part."""


def _refused(what: str) -> Any:
    """A method that needs values of other ranks."""
    return lambda self, *_, **__: self._refuse(what)


class FlatShard(torch.Tensor):
    """See [Note: Flat shards]."""

    _local: torch.Tensor
    _first: int
    _name: str
    _norms: Callable[[Sequence[torch.Tensor], float], torch.Tensor]
    _part: TensorPart | None
    is_copy = False
    """Whether edits of it would be lost, and so are refused."""

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        shape: Sequence[int],
        first: int,
        name: str,
        norms: Callable[[Sequence[torch.Tensor], float], torch.Tensor],
        part: TensorPart | None = None,
    ) -> FlatShard:
        """The elements from `first` on, `local`, of a tensor of `shape`, which may be a `part`.

        `norms` gives the norms of tensors of which each rank has a part, on all of them.
        """
        one: FlatShard = wrapper(cls, tuple(shape), dtype=local.dtype, device=local.device)
        one._local, one._first, one._name, one._norms = local, first, name, norms
        one._part = part
        return one

    def local(self) -> tuple[range, torch.Tensor]:
        """Which elements are here, in row-major order, and their values."""
        return range(self._first, self._first + self._local.numel()), self._local

    def _with(self, local: torch.Tensor) -> FlatShard:
        return FlatShard(local, self.shape, self._first, self._name, self._norms, self._part)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatShard({tuple(self.shape)}, {self.dtype}, {self._here()} are here)"

    def _here(self) -> str:
        elements, of = self.local()[0], f"of {self.numel()}"
        return f"{elements.start} to {elements.stop} {of}" if elements else f"none {of}"

    __reduce_ex__ = _refused("torch.save or a pickle")
    tolist = _refused("tolist()")
    numpy = _refused("numpy()")
    untyped_storage = _refused("the memory (by safetensors, likely)")

    def __deepcopy__(self, memo: object) -> FlatShard:
        return self._with(self._local.clone())

    def _refuse(self, what: str) -> NoReturn:
        raise ShardError(
            f"{what} of {self._name} was asked for, of whose elements {self._here()} are on this "
            "rank. Values: on all ranks together, `with offload.gathered(model):`; those here: "
            "offload.local(p). To save: on all ranks offload.save(model, optimizer, folder), or "
            "torch.distributed.checkpoint. DistributedDataParallel and fully_shard: leave them "
            "out, as the engine cuts the model and sums its gradients itself"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do what needs these elements alone, and refuse the rest."""
        kwargs, found = kwargs or {}, list(find((args, kwargs), FlatShard))
        if func in _NORMS:
            return _norms_of(func, found, args, kwargs)
        if func in _KEPT:
            return found[0]._with(func(found[0]._local, *args[1:], **kwargs))
        into, whole = found[0], func is _A.copy_.default and args[0].shape == args[1].shape
        if whole and len(found) == 1 and into is args[0] and not into.is_copy:
            there = into.local()[0]  # All values are given, as of a DTensor by a state dict.
            into._local.copy_(args[1].reshape(-1)[there.start : there.stop])
            return into
        edits = func._schema.name.removeprefix("aten::") in _EDITS and _fit(args, found)
        if not edits or any(one.is_copy for one in find(args[:1], FlatShard)):
            found[0]._refuse(f"{func._schema.name}()")
        here = {id(one): one._local for one in found}
        found_here = func(*swapped(args, here), **swapped(kwargs, here))
        return args[0] if found_here is not None else None

    # -- torch.distributed.checkpoint ------------------------------------------------------------

    def boxes(self) -> Iterator[Box]:
        """The boxes of which the elements here are made, in order."""
        here = self.local()[0]
        for begin, offsets, sizes in boxes(tuple(self.shape), here.start, here.stop):
            if self._part is not None:
                offsets = tuple(map(add, self._part.start, offsets))
            yield begin, offsets, sizes

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        whole = self.size() if self._part is None else torch.Size(self._part.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for _, offsets, sizes in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for first, offsets, sizes in self.boxes():
            if index.offset is None or tuple(index.offset) == offsets:
                at = first - self._first
                return self._local[at : at + prod(sizes)].view(sizes)
        raise ValueError(f"{self._name} has no part at {index.offset} on this rank")


def boxes(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """Cut the elements from `first` to `stop` of a tensor into boxes: at most two for each
    dimension, less one."""
    if first >= stop:
        return
    if len(shape) < 2:
        yield first, (first,) * len(shape), (stop - first,) * len(shape)
        return
    row = prod(shape[1:])
    below, above = -(-first // row), stop // row
    if below > above:  # All in one row.
        yield from _inside(shape, first // row, first, stop)
        return
    yield from _inside(shape, below - 1, first, below * row)
    if above > below:
        rest = shape[1:]
        yield below * row, (below, *(0,) * len(rest)), (above - below, *rest)
    yield from _inside(shape, above, above * row, stop)


def _inside(shape: tuple[int, ...], at: int, first: int, stop: int) -> Iterator[Box]:
    """The boxes of elements that lie in one row."""
    begin = at * prod(shape[1:])
    for start, offsets, sizes in boxes(shape[1:], first - begin, stop - begin):
        yield start + begin, (at, *offsets), (1, *sizes)


def _fit(args: Any, found: Sequence[FlatShard]) -> bool:
    """Whether all tensors of an edit are shards alike in shape and range, or single numbers."""
    lists = [one if isinstance(one, (list, tuple)) else [one] for one in args]
    for place in zip(*(one if len(one) > 1 else one * len(lists[0]) for one in lists)):
        tensors = [one for one in place if isinstance(one, torch.Tensor)]
        ranges = {(one.shape, one.local()[0]) for one in tensors if isinstance(one, FlatShard)}
        plain = [one for one in tensors if not isinstance(one, FlatShard)]
        if len(ranges) != 1 or any(one.dim() for one in plain):
            return False
    return isinstance(lists[0][0], FlatShard)


def _norms_of(func: Any, found: Sequence[FlatShard], args: Any, kwargs: Any) -> Any:
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    others = args[2:], kwargs.keys() - {"ord", "dtype"}
    if (
        any(others)
        or order is None
        or not order > 0
        or (isinstance(args[0], list) and len(found) < len(args[0]))
    ):
        found[0]._refuse(f"{func._schema.name}() over some dimensions, or of mixed tensors")
    norms = found[0]._norms([one._local for one in found], float(order))
    made = [norm.to(kwargs.get("dtype") or one.dtype) for norm, one in zip(norms, found)]
    return made if isinstance(args[0], list) else made[0]
