"""What lies at the address of a tensor: whether native code may read and write there.

Native calls take addresses. A wrapper subclass (DTensor, a fake tensor) has none, nor has a storage
that was resized to nothing; a tensor with the negative bit holds the opposite of what lies there.

[Note: Huge pages]
An update goes through many arrays once, and a processor finds out where each page of each of them
lies: with pages of 4 KiB memory gives up to a fifth less, on a virtual machine. Most give huge
pages only to memory for which they were asked (`madvise`), before it is touched.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

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

    Raises ValueError where neither can: a tensor without memory of its own.
    """
    found = True
    for x in tensors:
        if type(x) not in PLAIN and is_wrapper(x):
            raise ValueError(_refusal(x, f"a {type(x).__name__}, which has none of its own"))
        if x.is_cpu and x.data_ptr() == 0 and x.numel():
            raise ValueError(_refusal(x, "a storage without memory"))
        found = found and x.is_cpu and x.is_contiguous() and not x.is_neg()
    return found


def check_apart(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError where contiguous parameters share memory: a step updates all at once."""
    found = [x for x in parameters if x.is_contiguous() and x.numel()]
    for one, other in pairwise(sorted(found, key=Tensor.data_ptr)):
        shared = one.data_ptr() + one.nbytes - other.data_ptr()
        if shared > 0:
            raise ValueError(
                f"asked for a step of parameters with memory of their own; found two, of shapes "
                f"{tuple(one.shape)} and {tuple(other.shape)}, that share {shared} bytes; likely "
                f"cause: weights tied by p.data = q.data, or views of one tensor as parameters; "
                f"try: one parameter in both modules, or the viewed tensor as the parameter"
            )


def _refusal(x: Tensor, found: str) -> str:
    return (
        f"asked for the address of a tensor's elements in CPU memory; found {found}, of "
        f"{x.dtype} and shape {tuple(x.shape)}; likely cause: a tensor subclass where its local "
        f"tensor is meant, a fake tensor, or a storage that was resized; try: a plain "
        f"tensor: to_local() of a DTensor, and storages that hold their elements"
    )
