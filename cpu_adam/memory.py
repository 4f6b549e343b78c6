"""What lies at the address of a tensor: whether native code may read and write there.

[Note: Addresses]
Native calls take addresses. A wrapper subclass (DTensor, a fake tensor, what a collective will
deliver) has none, nor has a storage that was resized to nothing; one that was made smaller ends
before its tensor does; torch's zero tensors are numbers without memory, and a tensor with the
negative bit holds the opposite of what lies there.

[Note: Asked in C]
A table asks all its tensors before each call where they are. An update leaves none of them in
cache, and a method of Python's takes some fifty nanoseconds besides: thousands of tensors are a
matter of milliseconds. So they are asked through torch's C interface (shim.h of its AOTInductor,
whose functions stay from version to version), by a loop in C that knows no more of them than that
they answer a number. Their handle is the address of a `Tensor` of C++, which is a pointer to what
`_cdata` gives. What they answer is first compared with what Python's methods say; where that
differs, or they are missing, those are asked.

[Note: Huge pages]
An update goes through many arrays once, and a processor finds out where each page of each of them
lies: with pages of 4 KiB memory gives up to a fifth less, on a virtual machine. Most give huge
pages only to memory for which they were asked (`madvise`), before it is touched.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_adam.choice import kernel

Addresses = npt.NDArray[np.int64]
"""Addresses in memory, in bytes."""

HUGE_PAGE_BYTES = 2 << 20

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The classes whose objects are nothing but tensors."""
_NO_DISPATCH = Tensor.__torch_dispatch__


def is_wrapper(x: Tensor) -> bool:
    """Whether a tensor is of a class that answers torch's operations itself."""
    kind = type(x)
    return kind not in PLAIN and kind.__torch_dispatch__ is not _NO_DISPATCH


def on_huge_pages(x: Tensor) -> Tensor:
    """A new contiguous tensor, its memory (where it has some) asked to lie on huge pages.

    Those that fit into it whole. See [Note: Huge pages].
    """
    if x.is_cpu and x.nbytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        first = x.data_ptr() + -x.data_ptr() % HUGE_PAGE_BYTES
        last = (x.data_ptr() + x.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first < last:  # Where the system has none it says no, and all is as it was.
            _system().madvise(first, last - first, mmap.MADV_HUGEPAGE)
    return x


@cache
def _system() -> ctypes.CDLL:
    """The functions of the C library."""
    found = ctypes.CDLL(None)
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


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


class Places:
    """Where tensors lie and how large their storages are: see [Note: Asked in C].

    An address stays right while its tensor is where it was and the storage as large as it was. The
    tensors are held.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._handles = np.array([x._cdata for x in self._tensors], np.int64)
        self._seen = self._look()
        here = _questions() is not None and all(x.is_cpu for x in self._tensors)
        self._native = kernel().native if here else None
        if self._native is not None and self.moved():  # Other answers than Python's: never seen.
            self._native = None

    def moved(self) -> bool:
        """Whether one of them is elsewhere, or has a storage of another size, than at first."""
        if self._native is not None:
            return not self._native.answers_are(_questions(), self._handles, self._seen)
        return not np.array_equal(self._look(), self._seen)

    def _look(self) -> Addresses:
        """A row for each: its address, and the bytes of its storage."""
        rows = zip(map(Tensor.data_ptr, self._tensors), storage_bytes(self._tensors))
        return np.array([*rows], np.int64).reshape(-1, 2)


@cache
def _questions() -> Addresses | None:
    """Addresses of the functions in C that `Places` asks; None where torch has none such."""
    try:
        library = ctypes.CDLL(torch._C.__file__)  # And what that was linked with.
        found = [library.aoti_torch_get_data_ptr, library.aoti_torch_get_storage_size]
    except (AttributeError, OSError):
        return None
    return np.array([ctypes.cast(x, ctypes.c_void_p).value for x in found], np.int64)


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

    def touched_by(self, starts: Addresses, ends: Addresses) -> list[int]:
        """Indices of other ranges, each from a first byte to before an end, that overlap these."""
        if not len(self._starts):
            return []
        # The first range that ends behind the start: those before it lie wholly before the other.
        first = np.searchsorted(self._ends, starts, side="right")
        nearest = np.append(self._starts, np.iinfo(np.int64).max)[first]
        return [int(i) for i in np.flatnonzero((nearest < ends) & (starts < ends))]


def in_waves(owners: Sequence[Iterable[Tensor]]) -> list[list[int]]:
    """Numbers of owners of tensors: each in the first wave in which it may share no memory.

    Owners whose tensors may share memory, going by first and last bytes, come in waves one after
    the other, in their own order: as many as the longest chain of them has members.
    """
    found = [(*extent(x), i) for i, owned in enumerate(owners) for x in owned if x.numel()]
    starts, ends, owner = np.array(sorted(found), np.int64).reshape(-1, 3).T
    apart = starts[1:] >= np.maximum.accumulate(ends)[:-1]  # From all that begin before.
    clusters: list[set[int]] = [set() for _ in owners]
    for i, cluster in zip(owner.tolist(), [0, *np.cumsum(apart).tolist()]):
        clusters[i].add(cluster)
    waves: list[list[int]] = []
    taken: dict[int, int] = {}  # By cluster the waves that have one of its owners.
    for i, mine in enumerate(clusters):
        wave = max((taken.get(cluster, 0) for cluster in mine), default=0)
        taken.update(dict.fromkeys(mine, wave + 1))
        if wave == len(waves):
            waves.append([])
        waves[wave].append(i)
    return waves


def _refusal(x: Tensor, found: str) -> str:
    return (
        f"asked for the address of a tensor's elements in CPU memory; found {found}, of "
        f"{x.dtype} and shape {tuple(x.shape)}; likely cause: a tensor subclass where its local "
        f"tensor is meant, a fake tensor, or a storage that was resized; try: a plain "
        f"tensor: to_local() of a DTensor, and storages that hold their elements"
    )
