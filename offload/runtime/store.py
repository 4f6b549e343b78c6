"""The nvme tier: reads and writes the values of a file layout, and checks every byte it reads."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import aio
from aio.backends import BACKEND_VARIABLE
from cpu_adam import crc32c
from offload.planning.layout import Extent, FileLayout
from offload.planning.machine import DriveSpeed
from offload.planning.profile import BLOCK_BYTES

CHECK_BYTES = 8 << 20
"""Largest transfer: one is checked while the next ones are in flight."""

Bytes = npt.NDArray[np.uint8]


class ChunkEntry(NamedTuple):
    """What the last write of a chunk left: its step, the CRC32C of its bytes, and which it was."""

    step: int
    crc: int
    write: int


_BEGUN, _ENDED, _STEP, _CRC = range(4)
"""Of a chunk: how many writes have begun, and how many had at the end of the last; the step and the
CRC32C of that. Compiled lanes have them as `Check`."""

NativeChunk = tuple[int, int, int, int, list["aio.NativePart"]]
"""A chunk for compiled lanes: its number, start and bytes in the value, the address of what is kept
of it, and where it lies."""


class Store:
    """A scratch volume of values, gone with the process. Several may share a directory.

    Calls block until the transfer is done, and release the GIL while they wait for the drive.
    Threads may call concurrently, unless one writes a chunk that another reads or writes.

    Args:
        directories: of the volume; several are striped over.
        layout: what the volume holds.
        io: the system's calls, or a simulation of them.
        depth: requests in flight on each drive.
        unit_bytes: of the stripe, on one drive before the next.
        weights: each directory's share, best its measured speed; by default equal.
        speeds: measured of each directory's drive. The store then uses the backend, block size and
            depth that were fastest, instead of `depth` and the first backend that works.

    Raises:
        ValueError: a weight is invalid, or so small that its drive would slow the others down.
        OSError: a file or its space is refused; nothing is left behind.
    """

    def __init__(
        self,
        directories: aio.Directory | Sequence[aio.Directory],
        layout: FileLayout,
        io: aio.IO | None = None,
        depth: int = 8,
        unit_bytes: int = aio.UNIT_BYTES,
        weights: Sequence[float] | None = None,
        speeds: Sequence[DriveSpeed | None] = (),
    ) -> None:
        self._extents = layout.index()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Guards what is kept of chunks; that of a chunk on a lane is the lane's."""
        self._first: dict[tuple[str, str], int] = {}
        """By value, the number of its first chunk."""
        numbers = itertools.accumulate((len(e.chunk_bytes) for e in layout.extents), initial=0)
        self._first = dict(zip(self._extents, numbers))
        self._checks = np.zeros((sum(len(e.chunk_bytes) for e in layout.extents), 4), np.int64)
        self._moved = np.zeros(2, np.int64)
        """Bytes that compiled lanes have read and written."""
        self.step = np.zeros(1, np.int64)
        """Stamped on what compiled lanes write."""
        self._volume = aio.create_volume(
            directories,
            layout.bytes,
            [partial(_backend_for, speed, depth, io) for speed in speeds]
            or partial(_backend_for, None, depth, io),
            unit_bytes=unit_bytes,
            weights=weights,
        )

    @property
    def path(self) -> str:
        """The directories of the files, for messages; the files have no names."""
        return self._volume.path

    @property
    def files(self) -> tuple[aio.File, ...]:
        """The scratch file in each directory that is in use."""
        return self._volume.files

    @property
    def direct(self) -> bool:
        """Whether all transfers bypass the page cache."""
        return self._volume.direct

    @property
    def notice(self) -> str | None:
        """What the user should know, a sentence for each directory concerned; else None."""
        return self._volume.notice

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._volume.bytes_read + int(self._moved[0])

    @property
    def bytes_written(self) -> int:
        """Bytes written so far."""
        return self._volume.bytes_written + int(self._moved[1])

    def counters(self) -> tuple[aio.Counters, ...]:
        """The backend's counters for each of `files`."""
        return self._volume.counters()

    def read(self, kind: str, unit: str, into: torch.Tensor, chunk: int | None = None) -> None:
        """Fill `into` with a chunk, or all chunks, of a value as last written.

        Args:
            kind, unit: which value; KeyError if the layout has none.
            into: uint8, one dimension, contiguous, on the CPU, 4096-aligned, of the chunks' size.
                After an error its content is undefined.
            chunk: its index, or None for all.

        Raises:
            ValueError: `into` is not as above, or a chunk was never, or not completely, written.
            OSError: with path and offset; EIO for a checksum mismatch. No transfer is in flight
                when it is raised.
        """
        extent = self._extents[kind, unit]
        numbers, start, data = self._chunks_of(extent, chunk, into)
        entries = [self._entry(extent, number) for number in numbers]
        with self._transfers(extent, numbers, start, data, writing=False) as by_chunk:
            for number, entry, transfers in zip(numbers, entries, by_chunk):
                crc = 0
                for memory, ticket in transfers:
                    self._wait(ticket, extent, number)
                    crc = crc32c(memory, crc)
                if crc != entry.crc:
                    raise self._mismatch(extent, number, entry.crc, crc)

    def write(
        self, kind: str, unit: str, source: torch.Tensor, step: int, chunk: int | None = None
    ) -> None:
        """Store `source` as a chunk, or all chunks, of a value.

        A chunk whose write fails cannot be read until a later write succeeds.

        Args:
            kind, unit, chunk: as for `read`.
            source: as `into` of `read`, with its padding.
            step: whose result this is.

        Raises:
            ValueError: `source` is not as above.
            OSError: with path and offset.
        """
        extent = self._extents[kind, unit]
        numbers, start, data = self._chunks_of(extent, chunk, source)
        checks = self._checks[self._first[kind, unit] :]
        with self._lock:
            checks[list(numbers), _BEGUN] += 1
        with self._transfers(extent, numbers, start, data, writing=True) as by_chunk:
            for number, transfers in zip(numbers, by_chunk):
                crc = 0
                for memory, _ in transfers:  # Overlaps the writes.
                    crc = crc32c(memory, crc)
                for _, ticket in transfers:
                    self._wait(ticket, extent, number)
                with self._lock:
                    checks[number, _STEP:] = step, crc
                    checks[number, _ENDED] = checks[number, _BEGUN]

    def entry(self, kind: str, unit: str, chunk: int) -> ChunkEntry | None:
        """The entry of a chunk; None if it is not readable."""
        with self._lock:
            begun, ended, step, crc = self._checks[self._first[kind, unit] + chunk].tolist()
        return ChunkEntry(step, crc, begun) if begun == ended > 0 else None

    # -- for compiled lanes ------------------------------------------------------------------------

    @property
    def native(self) -> bool:
        """Whether compiled lanes can do the transfers."""
        return self._volume.native

    def native_chunks(self, kind: str, unit: str, chunk: int | None) -> list[NativeChunk]:
        """A chunk, or all of a value, for compiled lanes."""
        extent = self._extents[kind, unit]
        numbers = range(len(extent.chunk_bytes)) if chunk is None else range(chunk, chunk + 1)
        start, found = extent.chunk_offsets[numbers[0]], []
        for number in numbers:
            at, size = extent.chunk_offsets[number], extent.chunk_bytes[number]
            parts = self._volume.native_parts(extent.offset + at, size)
            row = self._first[kind, unit] + number
            address = self._checks[row : row + 1].ctypes.data
            found.append((row, at - start, size, address, parts))
        return found

    def native_counts(self) -> tuple[int, int]:
        """Addresses of what compiled lanes count, and of the step that they stamp."""
        return self._moved.ctypes.data, self.step.ctypes.data

    def explain(self, failure: Sequence[int]) -> Exception:
        """What became of a transfer of a compiled lane, in the words of `read` and `write`."""
        from aio.native import explained  # There, as a compiled lane was.

        writing, row, code, cause, offset, count, last_code, found = failure
        key = next(key for key in reversed(self._first) if self._first[key] <= row)
        extent, number = self._extents[key], row - self._first[key]
        at, size = extent.offset + extent.chunk_offsets[number], extent.chunk_bytes[number]
        if code:
            path = self._volume.path_of(at, size)
            return self._failed(
                explained(path, bool(writing), (code, cause, offset, count, last_code)),
                extent,
                number,
            )
        if found < 0:
            return self._never_written(extent, number)
        return self._mismatch(extent, number, int(self._checks[row, _CRC]), found)

    def close(self) -> None:
        """Wait for transfers in flight, free the space. Idempotent; a no-op in a forked child."""
        if os.getpid() != self._pid:
            return
        self._volume.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chunks_of(
        self, extent: Extent, chunk: int | None, tensor: torch.Tensor
    ) -> tuple[range, int, Bytes]:
        """The chunks' indices, the offset of the first in the extent, the memory of `tensor`."""
        if chunk is None:
            numbers, start, size = range(len(extent.chunk_bytes)), 0, extent.bytes
        else:
            if not 0 <= chunk < len(extent.chunk_bytes):
                raise ValueError(
                    f"chunk {chunk} of {extent.kind} of {extent.unit!r}: it has "
                    f"{len(extent.chunk_bytes)}, counted from 0"
                )
            numbers, start = range(chunk, chunk + 1), extent.chunk_offsets[chunk]
            size = extent.chunk_bytes[chunk]
        found = None
        if tensor.device.type != "cpu" or tensor.dtype != torch.uint8:
            found = f"{tensor.dtype} on {tensor.device}"
        elif tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != size:
            found = f"shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        elif tensor.data_ptr() % BLOCK_BYTES:
            found = f"address {tensor.data_ptr():#x}"
        if found is not None:
            raise ValueError(
                f"{extent.kind} of {extent.unit!r} needs {size} contiguous bytes of CPU memory "
                f"(torch.uint8, one dimension) at a multiple of {BLOCK_BYTES}; found {found}; "
                "pass a slice of an arena"
            )
        return numbers, start, tensor.detach().numpy()

    @contextmanager
    def _transfers(
        self, extent: Extent, numbers: range, start: int, data: Bytes, *, writing: bool
    ) -> Iterator[list[list[tuple[Bytes, aio.Ticket]]]]:
        """Start all transfers of the chunks: a list per chunk, of memory and ticket.

        The memory must not be freed while a transfer is in flight, so leaving waits for all.
        """
        call = self._volume.write_from if writing else self._volume.read_into
        by_chunk: list[list[tuple[Bytes, aio.Ticket]]] = []
        try:
            for number in numbers:
                transfers: list[tuple[Bytes, aio.Ticket]] = []
                by_chunk.append(transfers)
                at = extent.chunk_offsets[number]
                end = at + extent.chunk_bytes[number]
                while at < end:
                    stop = min(at + CHECK_BYTES, end)
                    memory = data[at - start : stop - start]
                    transfers.append((memory, call(memory, extent.offset + at)))
                    at = stop
            yield by_chunk
        finally:
            aio.wait_all(ticket for transfers in by_chunk for _, ticket in transfers)

    def _wait(self, ticket: aio.Ticket, extent: Extent, number: int) -> None:
        try:
            ticket.wait()
        except OSError as error:
            raise self._failed(error, extent, number) from error

    def _failed(self, error: OSError, extent: Extent, number: int) -> OSError:
        text = f"chunk {number} of {extent.kind} of {extent.unit!r}: {error.strerror}"
        return OSError(error.errno, text, error.filename)

    def _entry(self, extent: Extent, number: int) -> ChunkEntry:
        entry = self.entry(extent.kind, extent.unit, number)
        if entry is None:
            raise self._never_written(extent, number)
        return entry

    def _never_written(self, extent: Extent, number: int) -> ValueError:
        return ValueError(
            f"chunk {number} of {extent.kind} of {extent.unit!r} in {self.path} was asked for "
            "but never completely written: likely an earlier write failed; write it first"
        )

    def _mismatch(self, extent: Extent, number: int, expected: int, found: int) -> OSError:
        offset = extent.offset + extent.chunk_offsets[number]
        size = extent.chunk_bytes[number]
        return OSError(
            errno.EIO,
            f"read of {size} bytes at offset {offset}, chunk "
            f"{number} of {extent.kind} of {extent.unit!r} failed: checksum mismatch (CRC32C "
            f"{found:#010x}, written as {expected:#010x}); likely the drive or the memory changed "
            "bits; look at `dmesg` and the drive's health, and use another drive",
            self._volume.path_of(offset, size),
        )


def _backend_for(speed: DriveSpeed | None, depth: int, io: aio.IO | None) -> aio.Backend:
    """The backend that was measured to be the fastest for a drive.

    It may have been measured under another kernel or container and not work here; then the first
    that works.
    """
    if speed is None:
        return aio.open_backend(depth=depth, io=io)
    piece_bytes = min(speed.block_bytes, CHECK_BYTES)
    opened = partial(aio.open_backend, depth=2 * speed.depth, piece_bytes=piece_bytes, io=io)
    try:
        return opened(os.environ.get(BACKEND_VARIABLE) or speed.backend)
    except ValueError:
        return opened()
