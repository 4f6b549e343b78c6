"""What lies at the address of a tensor: whether native code may read and write there.

[Note: Addresses]
Native calls take addresses. A wrapper subclass (DTensor, a fake tensor, what a collective will
deliver) has none, nor has a storage that was resized to nothing; one that was made smaller ends
before its tensor does; torch's zero tensors are numbers without memory, and a tensor with the
negative bit holds the opposite of what lies there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Addresses = npt.NDArray[np.int64]
"""Addresses in memory, in bytes."""

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The classes whose objects are nothing but tensors."""
FEW = 64
_NO_DISPATCH = Tensor.__torch_dispatch__


def is_wrapper(x: Tensor) -> bool:
    """Whether a tensor is of a class that answers torch's operations itself."""
    kind = type(x)
    return kind not in PLAIN and kind.__torch_dispatch__ is not _NO_DISPATCH


def are_native(tensors: Iterable[Tensor]) -> bool:
    """Whether native code may take the addresses of tensors; else torch's operations serve them.

    Raises ValueError where neither can, for CPU memory that is not there: see [Note: Addresses].
    """
    found = True
    for x in tensors:
        if type(x) not in PLAIN and is_wrapper(x):
            raise ValueError(_refusal(x, f"a {type(x).__name__}, which has none of its own"))
        if not x.is_cpu:
            found = False
        elif x.data_ptr() == 0 and x.numel():
            if not x._is_zerotensor():
                raise ValueError(_refusal(x, "a storage without memory"))
            found = False
        elif not is_stored(x):
            raise ValueError(_refusal(x, f"a storage of {x.untyped_storage().nbytes()} bytes"))
        else:
            found = found and x.is_contiguous() and not x.is_neg()
    return found


def check_memory(x: Tensor) -> None:
    """Raise ValueError unless a tensor has memory that a step can write."""
    are_native([x])
    if x.numel() and x.is_cpu and x.data_ptr() == 0:
        raise ValueError(_refusal(x, "a zero tensor, which is a number without memory"))
    # Each dimension must step over all that the ones of smaller strides reach.
    reach = 0
    for stride, n in sorted((stride, n) for n, stride in zip(x.shape, x.stride()) if n > 1):
        if stride <= reach and x.numel():
            found = f"elements that may share memory (strides {x.stride()}: expand, as_strided)"
            raise ValueError(_refusal(x, found))
        reach += (n - 1) * stride


def is_stored(x: Tensor) -> bool:
    """Whether the storage of a tensor, not a wrapper, is as large as the tensor needs it to be."""
    if not x.numel():
        return True
    start, end = extent(x)
    return x.storage_offset() * x.element_size() + end - start <= x.untyped_storage().nbytes()


def storage_bytes(tensors: Iterable[Tensor]) -> list[int]:
    """The sizes of their storages, by a loop in C."""
    return list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))


class Storages:
    """The storages of tensors whose addresses are kept: each one once, held on to.

    An address stays right while the storage that it lies in is where it was and as large as it was.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {storage._cdata: storage for storage in map(Tensor.untyped_storage, tensors)}
        self._storages = list(found.values())
        self._places = self._look()

    def moved(self) -> bool:
        """Whether one of them is elsewhere or of another size than at first."""
        return not np.array_equal(self._look(), self._places)

    def _look(self) -> Addresses:
        """Address and size of each, of a few at a time: an update leaves none in cache."""
        kind = torch.UntypedStorage
        found = np.empty((2, len(self._storages)), np.int64)
        for first in range(0, len(self._storages), FEW):
            some = self._storages[first : first + FEW]
            for row, ask in zip(found, (kind.data_ptr, kind.nbytes)):
                row[first : first + FEW] = np.fromiter(map(ask, some), np.int64, len(some))
        return found


def readable(x: Tensor) -> Tensor:
    """The same numbers, such that they lie in memory as they are read; the tensor itself if so."""
    if is_wrapper(x):
        return x  # To be refused by whoever takes its address.
    if x.is_neg():
        x = x.resolve_neg()
    return x.clone() if x.data_ptr() == 0 and x._is_zerotensor() else x


def extent(x: Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one after the last of them."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.numel() * x.element_size()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return start, start + (last + 1) * x.element_size()


class Ranges:
    """Where tensors lie in memory, going by their first and last bytes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        ranges = np.array(sorted(extent(x) for x in tensors if x.numel()), np.int64).reshape(-1, 2)
        self._starts: Addresses = ranges[:, 0]
        self._ends = np.maximum.accumulate(ranges[:, 1])

    def overlap(self) -> bool:
        """Whether any two of them may share memory."""
        return bool((self._starts[1:] < self._ends[:-1]).any())

    def touched_by(self, starts: Addresses, ends: Addresses) -> list[int]:
        """Indices of other ranges, each from a first byte to before an end, that overlap these."""
        if not len(self._starts):
            return []
        # The first range that ends behind the start: those before it lie wholly before the other.
        first = np.searchsorted(self._ends, starts, side="right")
        nearest = np.append(self._starts, np.iinfo(np.int64).max)[first]
        return [int(i) for i in np.flatnonzero((nearest < ends) & (starts < ends))]


def _refusal(x: Tensor, found: str) -> str:
    return (
        f"asked for the address of a tensor's elements in CPU memory; found {found}, of "
        f"{x.dtype} and shape {tuple(x.shape)}; likely cause: a tensor subclass where its local "
        f"tensor is meant, a fake tensor, or a storage that was resized; try: a plain "
        f"tensor: to_local() of a DTensor, and storages that hold their elements"
    )
