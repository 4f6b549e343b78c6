"""What a file and a volume share: bytes, and all that can be wrong with a transfer of them."""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt

from aio.built import require_version
from aio.part import Part, verb
from aio.ticket import Ticket

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

ENGINE_VERSION = 1
"""Of the compiled engine, as `src/module.cpp` has it."""

try:
    from aio import _native

    require_version(_native, ENGINE_VERSION)
    from aio._native import address_of as address_of
except ImportError:

    def address_of(memory: memoryview) -> int:
        """Where the bytes of contiguous memory are."""
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


Memory: TypeAlias = Union["Buffer", npt.NDArray[Any]]
"""What transfers read and write: any object with the buffer protocol."""

Vector: TypeAlias = Union["list[Any]", "tuple[Any, ...]"]
"""Several pieces of memory that are one transfer, or the offsets of each."""


def view_of(buffer: Memory) -> memoryview:
    """The memory itself, never a copy. TypeError where it has none that can be moved."""
    try:
        view = memoryview(cast("Buffer", buffer))
    except TypeError as error:
        try:
            view = _by_dlpack(cast("npt.NDArray[Any]", buffer)).data
        except (AttributeError, TypeError, ValueError, BufferError, RuntimeError):
            raise TypeError(
                f"asked for a transfer of memory; found {type(buffer).__name__}; likely it is on "
                "another device, wants a gradient, or is of a type that buffers do not know, as "
                "bfloat16; try tensor.detach().view(torch.uint8)"
            ) from error
    if "O" in view.format:
        raise TypeError(
            "asked for a transfer of memory; found objects of Python; try an array of numbers"
        )
    return view


def _by_dlpack(tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A tensor as an array of the same memory."""
    array = np.from_dlpack(tensor)
    if array.flags.writeable:
        return array
    other = np.asarray(tensor)  # NumPy before 2.2 takes all for read-only; this may be a copy
    return other if other.ctypes.data == array.ctypes.data else array


class Region(ABC):
    """Bytes on one drive or several. Transfers may be asked for by several threads at once.

    Attributes:
        path: for messages.
        bytes: its size.
        direct: whether O_DIRECT is on, so that the page cache is left alone.
        notice: a sentence for a person for each thing that is not as it should be, else None.
        memory_align_bytes, offset_align_bytes: what addresses of buffers, and offsets and lengths
            of transfers, must be multiples of; 1 where transfers are buffered.
        closed: whether `close` was called.
    """

    path: str
    bytes: int
    direct: bool
    notice: str | None
    memory_align_bytes: int
    offset_align_bytes: int
    closed: bool

    def read_into(self, buffer: Memory | Vector, offset: int | Vector) -> Ticket:
        """Starts to fill all of `buffer` from `offset` bytes into the region.

        Args:
            buffer: C-contiguous writable memory (memoryview, NumPy array, mmap, a tensor in CPU
                memory), or a list of such. It belongs to the transfer until the ticket is done.
            offset: bytes from the start. Of several buffers a list with that of each, in any
                order, or one number where they lie one behind the other.

        Raises:
            ValueError: a buffer cannot be used, is not aligned, or reaches past the end, or
                the region is closed. Nothing was started then.
            OSError: the descriptor was closed by others (EBADF). Nothing was started then either,
                but on other drives of a volume, for which it waits.
            RuntimeError: called in a forked child, or by a finaliser in a thread of a backend.

        After any other exception, that is one of a signal handler, the transfer may be under way
        though its ticket is lost: `close` waits for it.
        """
        return self._start(False, self._parts(buffer, offset, False))

    def write_from(self, buffer: Memory | Vector, offset: int | Vector) -> Ticket:
        """Starts to write all of `buffer` at `offset` bytes into the region.

        Args and Raises are those of `read_into`; buffers may be read-only. Which of two that
        overlap in the region stays there is not said.
        """
        return self._start(True, self._parts(buffer, offset, True))

    @abstractmethod
    def sync(self) -> None:
        """Returns when everything written by finished transfers is durable."""

    @abstractmethod
    def close(self) -> None:
        """Waits for transfers under way, then closes. Closing twice is fine.

        What a signal handler raises (Ctrl-C) ends the wait; closing again waits again. A handler
        may transfer, wait, sync and close by itself, also in the midst of one of these.

        In a forked child it does nothing: see [Note: What a forked child may touch] in request.py.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _start(self, writing: bool, parts: Sequence[Part]) -> Ticket:
        """Starts a transfer that was checked."""

    @abstractmethod
    def _check_process(self) -> None:
        """Raises RuntimeError in a forked child."""

    def _check_open(self, asked: str) -> None:
        self._check_process()
        if self.closed:
            raise ValueError(f"{asked} of {self.path}: the file is closed; open a new one")

    def _parts(
        self, buffer: Memory | Vector, offset: int | Vector, writing: bool
    ) -> tuple[Part, ...]:
        """What is to be moved, checked; what is empty is left out."""
        if not isinstance(buffer, (list, tuple)) and not isinstance(offset, (list, tuple)):
            view, at = view_of(buffer), operator.index(offset)
            self._check_open(verb(writing))
            view = self._check(view, at, writing)
            return (Part(view, at),) if view.nbytes else ()
        buffers = buffer if isinstance(buffer, (list, tuple)) else [buffer]
        views = [view_of(one) for one in buffers]
        if isinstance(offset, (list, tuple)):
            offsets = [operator.index(at) for at in offset]
        else:
            sizes = (view.nbytes for view in views)
            offsets = list(itertools.accumulate(sizes, initial=operator.index(offset)))[:-1]
        if len(offsets) != len(buffers):
            raise ValueError(
                f"{verb(writing)} of {len(buffers)} buffers at {len(offsets)} "
                f"offsets of {self.path}: expected an offset for each; pass as many, or the first "
                "alone where they lie one behind the other"
            )
        self._check_open(verb(writing))
        checked = [Part(self._check(view, at, writing), at) for view, at in zip(views, offsets)]
        return tuple(part for part in checked if part.view.nbytes)

    def _check(self, view: memoryview, offset: int, writing: bool) -> memoryview:
        """The bytes of `view`, once everything that can be wrong about them is ruled out."""
        wrong = self._wrong(view, offset, writing)
        if wrong is not None:
            raise ValueError(
                f"{verb(writing)} of {view.nbytes} bytes at offset {offset} of {self.path}: {wrong}"
            )
        if view.nbytes == 0:
            return memoryview(b"")
        return view if view.format == "B" and view.ndim == 1 else np.frombuffer(view, np.uint8).data

    def _wrong(self, view: memoryview, offset: int, writing: bool) -> str | None:
        """What is, and what to do about it."""
        if not view.c_contiguous:
            return (
                "the buffer is not C-contiguous, so that it is not one "
                "stretch of memory; pass a contiguous copy"
            )
        if view.readonly and not writing:
            return "the buffer is read-only; pass a bytearray, mmap or array"
        length = view.nbytes
        if offset < 0 or offset + length > self.bytes:
            return (
                f"outside of its {self.bytes} bytes; the size it was "
                "created with is too small, or the offset wrong"
            )
        memory, block = self.memory_align_bytes, self.offset_align_bytes
        if length == 0 or memory == block == 1:
            return None
        address = address_of(view)
        if address % memory == length % block == offset % block == 0:
            return None
        found = (("address", address, memory), ("length", length, block), ("offset", offset, block))
        wrong = " and ".join(f"{name} {number}" for name, number, unit in found if number % unit)
        units = f"{block}" if memory == block else f"{memory} (addresses) or {block} (the rest)"
        return (
            f"{wrong} not a multiple of {units}, which "
            "O_DIRECT needs; use memory from mmap and whole blocks"
        )
