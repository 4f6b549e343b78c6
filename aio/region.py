"""What a file and a volume share: bytes, and all that can be wrong with a transfer of them."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

import numpy as np
import numpy.typing as npt

from aio.transfer import Part, Ticket, verb

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

Memory: TypeAlias = Union["Buffer", npt.NDArray[Any]]
"""What transfers read and write: any object with the buffer protocol, or a tensor."""


def address_of(view: memoryview) -> int:
    """Where the bytes of contiguous memory are."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def view_of(buffer: Memory) -> memoryview:
    """The memory itself, never a copy. TypeError where it has none that can be moved."""
    try:
        try:
            view = memoryview(cast("Buffer", buffer))
        except TypeError:
            view = np.from_dlpack(cast("npt.NDArray[Any]", buffer)).data
    except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(
            f"asked for a transfer of memory; found {type(buffer).__name__}; likely it is a list "
            "of buffers (each is a transfer of its own), is on another device, wants a gradient, "
            "or is of a type that buffers do not know, as bfloat16; "
            "try tensor.detach().view(torch.uint8)"
        ) from error
    if "O" in view.format:
        raise TypeError(
            "asked for a transfer of memory; found objects of Python; try an array of numbers"
        )
    return view


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

    def read_into(self, buffer: Memory, offset: int) -> Ticket:
        """Starts to fill all of `buffer` from `offset` bytes into the region.

        Args:
            buffer: C-contiguous writable memory (memoryview, NumPy array, mmap, a tensor in CPU
                memory). It belongs to the transfer until the ticket is done.
            offset: bytes from the start.

        Raises:
            ValueError: the buffer cannot be used, is not aligned, or reaches past the end, or
                the region is closed. Nothing was started then.
            TypeError: it is no memory that can be moved.
            RuntimeError: called in a forked child.
        """
        return self._start(False, self._parts(buffer, offset, False))

    def write_from(self, buffer: Memory, offset: int) -> Ticket:
        """Starts to write all of `buffer` at `offset` bytes into the region.

        Args and Raises are those of `read_into`; buffers may be read-only. Which of two that
        overlap in the region stays there is not said.
        """
        return self._start(True, self._parts(buffer, offset, True))

    @abstractmethod
    def close(self) -> None:
        """Waits for transfers under way, then closes. Closing twice is fine.

        Ctrl-C ends the wait; closing again waits again. In a forked child it does nothing: see
        [Note: What a forked child may touch] in transfer.py.
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

    def _parts(self, buffer: Memory, offset: int, writing: bool) -> tuple[Part, ...]:
        """What is to be moved, checked; nothing where it is empty."""
        view, offset = view_of(buffer), operator.index(offset)
        self._check_process()
        if self.closed:
            raise ValueError(f"{verb(writing)} of {self.path}: the file is closed; open a new one")
        wrong = self._wrong(view, offset, writing)
        if wrong is not None:
            raise ValueError(
                f"{verb(writing)} of {view.nbytes} bytes at offset {offset} of {self.path}: {wrong}"
            )
        if view.nbytes == 0:
            return ()
        if view.format != "B" or view.ndim != 1:
            view = np.frombuffer(view, np.uint8).data
        return (Part(view, offset),)

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
