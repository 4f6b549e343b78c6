"""Files that are written or read from start to end, a few blocks at a time.

A block is on its way to the drive, or from it, while the caller fills or empties another. Memory is
what the blocks take, whatever the size of the file, and none of the page cache where the drive
takes O_DIRECT.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from aio.errors import naming, os_error
from aio.file import Backend, File
from aio.scratch import create_file, turn_direct_on
from aio.system import ALIGN_BYTES
from aio.transfer import Ticket, wait_all

BLOCK_BYTES = 4 << 20
BLOCKS = 6

Bytes = npt.NDArray[np.uint8]


class Writer:
    """A new file, written from its start to its end.

    Args:
        path: of no file yet.
        size: bytes that it will have; they are reserved at once.
        backend: what moves them.

    Raises:
        OSError: see `aio.create_file`; nothing is left behind.
    """

    def __init__(self, path: str, size: int, backend: Backend) -> None:
        self.path, self._size, self._io = path, size, backend.io
        self._file: File = create_file(path, max(size, 1), backend)
        self._blocks = [_block(min(BLOCK_BYTES, self._file.bytes)) for _ in range(BLOCKS)]
        self._tickets: list[Ticket | None] = [None] * BLOCKS
        self._written = 0
        """Bytes taken over; what of them fills no block yet is in the last one begun."""

    def write(self, data: Bytes) -> None:
        """Append `data`, whose memory is the caller's again.

        Raises:
            OSError: an earlier block, or this one, could not be written; with path and offset.
        """
        assert self._written + data.size <= self._size, "more than the file was made for"
        while data.size:
            number, filled = divmod(self._written, BLOCK_BYTES)
            block = self._blocks[number % BLOCKS]
            if not filled:
                self._wait(number % BLOCKS)
            count = min(data.size, BLOCK_BYTES - filled)
            block[filled : filled + count] = data[:count]
            data = data[count:]
            self._written += count
            if filled + count == BLOCK_BYTES:
                self._send(number, BLOCK_BYTES)

    def close(self, *, whole: bool = True) -> None:
        """Flush what was written to the drive, and close; without `whole` only close.

        Raises:
            OSError: a block could not be written, or flushed.
        """
        try:
            if whole:
                assert self._written == self._size, "less than the file was made for"
                number, filled = divmod(self._written, BLOCK_BYTES)
                if filled:
                    self._blocks[number % BLOCKS][filled:] = 0
                    self._send(number, -(-filled // ALIGN_BYTES) * ALIGN_BYTES)
                for at in range(BLOCKS):
                    self._wait(at)
                with naming("flush", self.path):
                    self._io.truncate(self._file.fd, self._size)
                    self._io.sync(self._file.fd)
        finally:
            wait_all(one for one in self._tickets if one is not None)
            self._file.close()

    def _send(self, number: int, count: int) -> None:
        at = number % BLOCKS
        block = self._blocks[at][:count]
        self._tickets[at] = self._file.write_from(block, number * BLOCK_BYTES)

    def _wait(self, at: int) -> None:
        ticket, self._tickets[at] = self._tickets[at], None
        if ticket is not None:
            ticket.wait()


class Reader:
    """A file that is read mostly from its start to its end: blocks ahead are under way.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """

    def __init__(self, path: str, backend: Backend) -> None:
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        fd, io = backend.io.open(path, flags, 0), backend.io
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "asked to read a file; found none, but something", path)
            self.path, self.size = path, found.st_size
            whole = self.size // ALIGN_BYTES * ALIGN_BYTES
            self._tail = np.frombuffer(os.pread(fd, ALIGN_BYTES, whole), np.uint8)
            """Past the last full 4 KiB, which O_DIRECT would read beyond the end."""
            align, notice = turn_direct_on(io, fd, writing=False)
            direct = align is not None
            self._file = File(backend, fd, path, whole, direct, notice, align or (1, 1))
        except BaseException:
            io.close(fd)
            raise
        self._held: OrderedDict[int, tuple[Bytes, Ticket]] = OrderedDict()
        self._free: list[Bytes] = []
        self.let_go()

    def let_go(self, blocks: int = BLOCKS) -> None:
        """Give the memory of all blocks back, until more is read into so many new ones."""
        wait_all(ticket for _, ticket in self._held.values())
        self._held.clear()
        self._free = [_block(BLOCK_BYTES) for _ in range(blocks)]  # Untouched, so none is taken.

    def read(self, at: int, into: Bytes) -> None:
        """Copy the bytes from offset `at` on.

        Raises:
            OSError: they cannot be read; EIO where the file ends before.
        """
        if at + into.size > self._file.bytes + self._tail.size:
            raise os_error(
                errno.EIO, f"read of {into.size} bytes at offset {at}, past the end", self.path
            )
        while into.size:
            if at >= self._file.bytes:
                found = self._tail[at - self._file.bytes :]
            else:
                number, within = divmod(at, BLOCK_BYTES)
                found = self._block(number)[within:]
            count = min(found.size, into.size)
            into[:count] = found[:count]
            into, at = into[count:], at + count

    def _block(self, number: int) -> Bytes:
        last = -(-self._file.bytes // BLOCK_BYTES)
        wanted = range(number, min(number + BLOCKS - 1, last))
        for one in wanted:
            if one in self._held:
                continue
            if not self._free:
                gone = next(held for held in self._held if held not in wanted)
                memory, ticket = self._held.pop(gone)
                wait_all([ticket])  # Nobody has asked how it ended.
                self._free.append(memory)
            start = one * BLOCK_BYTES
            memory = self._free.pop()
            part = memory[: min(BLOCK_BYTES, self._file.bytes - start)]
            self._held[one] = memory, self._file.read_into(part, start)
        memory, ticket = self._held[number]
        ticket.wait()
        return memory[: min(BLOCK_BYTES, self._file.bytes - number * BLOCK_BYTES)]

    def close(self) -> None:
        """Wait for what is under way, and close."""
        self.let_go(blocks=0)
        self._file.close()


def _block(size: int) -> Bytes:
    """Memory at an address that O_DIRECT takes."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)
