"""A tier on drives: reads and writes the values of a layout, checks every byte that comes back."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

import aio
from aio.backends import BACKEND_VARIABLE
from cpu_adam import crc32c
from offload import records
from offload.machine import DriveSpeed
from offload.records import BLOCK_BYTES, ChunkEntry, Extent, FileLayout

CHECK_BYTES = 8 << 20
"""Transfers are split so: one stretch is checked while the next ones are on their way."""

Bytes = npt.NDArray[np.uint8]


class Store:
    """A scratch volume of values, gone with the process. Several may share a directory.

    Calls block until the bytes are where they should be, without holding the GIL while they wait
    for the drive. Threads may call at once, as long as no two touch the same chunk and one of
    them writes.

    Args:
        directories: where it is made: one, or several that it is striped over.
        layout: what it holds.
        io: the system's calls, or a simulation of them.
        depth: pieces of transfers that are under way at once on each drive.
        unit_bytes: bytes on one drive before the next one's turn.
        weights: by directory its share, best its measured speed; by default all are equal.
        speeds: by directory what was measured of its drive: it is asked in the way that was best
            then, in place of `depth` pieces of 4 MiB by the first backend that works.

    Raises:
        ValueError: a weight is none, or so small that its drive would only slow the others down.
        OSError: a file cannot be made or its space not be had; nothing is left behind.
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
        self.layout = layout
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the table of entries
        self._entries: dict[tuple[str, str, int], ChunkEntry] = {}
        self._block_lock = threading.Lock()
        size = max([BLOCK_BYTES, *(extent.header_bytes for extent in layout.extents)])
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._block: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self._volume = aio.create_volume(
            directories,
            layout.bytes,
            [partial(_asking, speed, depth, io) for speed in speeds]
            or partial(_asking, None, depth, io),
            unit_bytes=unit_bytes,
            weights=weights,
        )
        try:
            self._put_block(records.pack_file_header(layout), 0)
        except BaseException:
            self._volume.close()
            raise

    @property
    def path(self) -> str:
        """The files, for messages; they have no names, so this shows their directories."""
        return self._volume.path

    @property
    def files(self) -> tuple[aio.File, ...]:
        """The scratch file of each directory that holds a part."""
        return self._volume.files

    @property
    def direct(self) -> bool:
        """Whether all transfers go past the page cache."""
        return self._volume.direct

    @property
    def notice(self) -> str | None:
        """A sentence for a person for each directory that is not as it should be, else None."""
        return self._volume.notice

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, headers included."""
        return self._volume.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes written so far, headers included."""
        return self._volume.bytes_written

    def counters(self) -> tuple[aio.Counters, ...]:
        """What the backend of each of `files` has done so far."""
        return self._volume.counters()

    def read(self, kind: str, unit: str, into: torch.Tensor, chunk: int | None = None) -> None:
        """Fills `into` with a chunk as it was last written, or with the whole extent.

        Args:
            kind, unit: which value; KeyError where the layout has none.
            into: uint8, one dimension, contiguous, on the CPU, 4096-aligned, of the padded
                length. After an error its content is undefined.
            chunk: its number; None is all of them.

        Raises:
            ValueError: `into` is not as above, or a chunk was never (or not completely) written.
            OSError: with path and offset; EIO for a checksum mismatch. Chunks are read before
                one is reported; none is still on its way then.
        """
        extent = self.layout.extent(kind, unit)
        numbers, start, data = self._span(extent, chunk, into)
        entries = [self._entry(extent, number) for number in numbers]
        with self._transfers(extent, numbers, start, data, writing=False) as parts:
            for number, entry, pieces in zip(numbers, entries, parts):
                crc = 0
                for piece, ticket in pieces:
                    self._wait(ticket, extent, number)
                    crc = crc32c(piece, crc)
                if crc != entry.crc:
                    raise self._mismatch(extent, number, entry.crc, crc)

    def write(
        self, kind: str, unit: str, source: torch.Tensor, step: int, chunk: int | None = None
    ) -> None:
        """Puts `source` in the place of a chunk or of the whole extent, as of `step`.

        A chunk whose write fails cannot be read until a later write succeeds. The header on disk
        is left as it is: see `write_header`.

        Args:
            kind, unit, chunk: as for `read`.
            source: as `into` of `read`; the padding is stored as it is.
            step: the step whose result this is.

        Raises:
            ValueError: `source` is not as above.
            OSError: with path and offset.
        """
        extent = self.layout.extent(kind, unit)
        numbers, start, data = self._span(extent, chunk, source)
        with self._lock:
            for number in numbers:
                self._entries.pop((kind, unit, number), None)
        with self._transfers(extent, numbers, start, data, writing=True) as parts:
            for number, pieces in zip(numbers, parts):
                crc = 0
                for piece, _ in pieces:  # while the drive is at work
                    crc = crc32c(piece, crc)
                for _, ticket in pieces:
                    self._wait(ticket, extent, number)
                with self._lock:
                    self._entries[kind, unit, number] = ChunkEntry(step, crc)

    def entry(self, kind: str, unit: str, chunk: int) -> ChunkEntry | None:
        """What the last complete write of a chunk left: the same object until the next begins."""
        with self._lock:
            return self._entries.get((kind, unit, chunk))

    def write_header(self, kind: str, unit: str) -> None:
        """Puts the header of a value on disk: steps and checksums of the last writes.

        Raises:
            ValueError: a chunk was never (or not completely) written.
            OSError: with path and offset.
        """
        extent = self.layout.extent(kind, unit)
        entries = [self._entry(extent, number) for number in range(len(extent.chunks))]
        with self._block_lock:
            self._put_block(records.pack_header(extent, entries), extent.header_offset)

    def read_header(self, kind: str, unit: str) -> records.Header:
        """The header of a value as it is on disk.

        Raises:
            OSError: with path and offset; EIO where it is damaged or that of another value.
        """
        extent = self.layout.extent(kind, unit)
        with self._block_lock:
            block = self._block[: extent.header_bytes]
            self._volume.read_into(block, extent.header_offset).wait()
            data = block.tobytes()
        path = self._volume.path_of(extent.header_offset, extent.header_bytes)
        asked = f"read of the header of {kind} of {unit!r} at offset {extent.header_offset}"
        try:
            header = records.unpack_header(data)
        except ValueError as error:
            raise OSError(errno.EIO, f"{asked} failed: {error}", path) from error
        if (header.kind, header.chunks) != (extent.kind, extent.chunks):
            raise OSError(
                errno.EIO,
                f"{asked} failed: found a {header.kind} of {len(header.chunks)} chunks that is not "
                "the one laid out here; likely the drive misplaced a write; use another drive",
                path,
            )
        return header

    def close(self) -> None:
        """Waits for work under way, gives the space back. Closing twice is fine, as is a fork."""
        if os.getpid() != self._pid:
            return
        self._volume.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put_block(self, data: bytes, offset: int) -> None:
        block = self._block[: len(data)]
        block[:] = np.frombuffer(data, dtype=np.uint8)
        self._volume.write_from(block, offset).wait()

    def _span(
        self, extent: Extent, chunk: int | None, tensor: torch.Tensor
    ) -> tuple[range, int, Bytes]:
        """The chunks meant, the offset of the first in the extent, the memory of `tensor`."""
        if chunk is None:
            numbers, start, size = range(len(extent.chunks)), 0, extent.bytes
        else:
            if not 0 <= chunk < len(extent.chunks):
                raise ValueError(
                    f"chunk {chunk} of {extent.kind} of {extent.unit!r}: it has "
                    f"{len(extent.chunks)}, counted from 0"
                )
            numbers, start = range(chunk, chunk + 1), extent.chunk_offsets[chunk]
            size = extent.chunks[chunk].padded_bytes
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
        """All transfers of the chunks, started: per chunk its stretches and their tickets.

        On leaving, well or not, none is under way: the memory is the caller's again.
        """
        call = self._volume.write_from if writing else self._volume.read_into
        parts: list[list[tuple[Bytes, aio.Ticket]]] = []
        try:
            for number in numbers:
                pieces: list[tuple[Bytes, aio.Ticket]] = []
                parts.append(pieces)
                at = extent.chunk_offsets[number]
                end = at + extent.chunks[number].padded_bytes
                while at < end:
                    stop = min(at + CHECK_BYTES, end)
                    piece = data[at - start : stop - start]
                    pieces.append((piece, call(piece, extent.offset + at)))
                    at = stop
            yield parts
        finally:
            aio.wait_all(ticket for pieces in parts for _, ticket in pieces)

    def _wait(self, ticket: aio.Ticket, extent: Extent, number: int) -> None:
        try:
            ticket.wait()
        except OSError as error:
            text = f"chunk {number} of {extent.kind} of {extent.unit!r}: {error.strerror}"
            raise OSError(error.errno, text, error.filename) from error

    def _entry(self, extent: Extent, number: int) -> ChunkEntry:
        entry = self.entry(extent.kind, extent.unit, number)
        if entry is None:
            raise ValueError(
                f"chunk {number} of {extent.kind} of {extent.unit!r} in {self.path} was asked for "
                "but never completely written; likely a write failed before; write it first"
            )
        return entry

    def _mismatch(self, extent: Extent, number: int, expected: int, found: int) -> OSError:
        offset = extent.offset + extent.chunk_offsets[number]
        size = extent.chunks[number].padded_bytes
        return OSError(
            errno.EIO,
            f"read of {size} bytes at offset {offset}, chunk "
            f"{number} of {extent.kind} of {extent.unit!r} failed: checksum mismatch (CRC32C "
            f"{found:#010x}, written as {expected:#010x}); likely the drive or the memory changed "
            "bits; look at `dmesg` and the drive's health, and use another drive",
            self._volume.path_of(offset, size),
        )


def _asking(speed: DriveSpeed | None, depth: int, io: aio.IO | None) -> aio.Backend:
    """A backend that asks a drive in the way that was measured to be its best.

    Where that was found under another kernel or in another container and does not work here, the
    first backend that does takes its place.
    """
    if speed is None:
        return aio.open_backend(depth=depth, io=io)
    piece_bytes = min(speed.block_bytes, CHECK_BYTES)
    opened = partial(aio.open_backend, depth=2 * speed.depth, piece_bytes=piece_bytes, io=io)
    try:
        return opened(os.environ.get(BACKEND_VARIABLE) or speed.backend)
    except ValueError:
        return opened()
