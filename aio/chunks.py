"""Chunks of a volume: each written and read whole, with a checksum that every read looks at.

A chunk whose write fails cannot be read until a later write succeeds. Of each chunk is kept how
many writes have begun, and how many had at the end of the last one; the step and the checksum of
that, and of the one before it, so that an error tells what a read found instead. Compiled code that
does the transfers by itself (`native_chunks`; `Check` in src/chunks.h) counts in the same place.

[Note: Two homes]
The first chunks may have two places each, their homes. A write goes to the home that is not
protected, however often, and a read finds what was written last. `protect` names other homes: what
they hold then stays, whatever happens, until it is called again.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aio.transfer import Ticket, wait_all
from aio.volume import NativePart, Volume

CHECK_BYTES = 8 << 20
"""Largest transfer: one is checked while the next ones are in flight."""

Bytes = npt.NDArray[np.uint8]

_BEGUN, _ENDED, _STEP, _CRC, _EARLIER_STEP, _EARLIER_CRC, _HOME, _PROTECTED = range(8)

NativeChunk = tuple[int, int, int, int, list[list[NativePart]]]
"""A chunk for compiled code: its number, start and bytes in the memory, the address of what is kept
of it, and where it lies, by home."""


class ChunkEntry(NamedTuple):
    """What the last write of a chunk left: its step, its checksum, and which write it was."""

    step: int
    crc: int
    write: int


class Chunks:
    """The chunks of a volume, by number, one after the other from its start.

    Calls block until the transfer is done. Threads may call concurrently, unless one writes a chunk
    that another reads or writes.

    Args:
        volume: theirs from now on.
        sizes: bytes of each.
        crc: the checksum of bytes, continuing from that of the bytes before (CRC32C).
        name: of a chunk, for messages: "chunk 3 of ...".
        two_homes: so many, from the first on, have two ([Note: Two homes]); the second ones lie
            behind all chunks, and are protected at first.
    """

    def __init__(
        self,
        volume: Volume,
        sizes: Sequence[int],
        crc: Callable[[Bytes, int], int],
        name: Callable[[int], str],
        two_homes: int = 0,
    ) -> None:
        self.volume = volume
        self.two_homes = two_homes
        self._offsets = np.cumsum([0, *sizes])
        self._crc, self._name = crc, name
        self._lock = threading.Lock()
        """Guards `_kept` and `_moved`, where no compiled code is at work."""
        self._kept = np.zeros((len(sizes), 8), np.int64)
        self._kept[:two_homes, _PROTECTED] = 1
        self._moved = np.zeros(2, np.int64)
        """Bytes read and written."""
        self.step = np.zeros(1, np.int64)
        """Stamped on what compiled code writes."""

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read so far."""
        return int(self._moved[0])

    @property
    def bytes_written(self) -> int:
        """Bytes of chunks written so far."""
        return int(self._moved[1])

    def entry(self, number: int) -> ChunkEntry | None:
        """The entry of a chunk; None if it is not readable."""
        with self._lock:
            begun, ended, step, crc, *_ = self._kept[number].tolist()
        return ChunkEntry(step, crc, begun) if begun == ended > 0 else None

    def homes(self) -> npt.NDArray[np.int64]:
        """Of each chunk that has two homes: that of its last write, its step and its checksum. None
        of them is being written.

        Raises:
            ValueError: one was never, or not completely, written.
        """
        for number in range(self.two_homes):
            self._readable(number)
        return self._kept[: self.two_homes, [_HOME, _STEP, _CRC]]

    def take_over(self, homes: Sequence[Sequence[int]]) -> None:
        """Let these, which another process left as `homes` gives them, be what was written last."""
        kept = self._kept[: self.two_homes]
        kept[:, [_HOME, _STEP, _CRC]] = homes
        kept[:, _BEGUN] += 1
        kept[:, _ENDED] = kept[:, _BEGUN]
        self.protect(kept[:, _HOME])

    def protect(self, homes: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Let writes leave these homes alone from now on. None is under way."""
        self._kept[: self.two_homes, _PROTECTED] = homes

    def read(self, numbers: range, into: Bytes) -> None:
        """Fill `into` with chunks as last written; after an error its content is undefined.

        Raises:
            ValueError: one was never, or not completely, written.
            OSError: with path and offset; EIO where the checksum is another. No transfer is in
                flight when it is raised.
        """
        entries = [self._readable(number) for number in numbers]
        with self._transfers(numbers, into, writing=False) as by_chunk:
            for number, entry, transfers in zip(numbers, entries, by_chunk):
                crc = 0
                for memory, ticket in transfers:
                    self._wait(ticket, number)
                    crc = self._crc(memory, crc)
                with self._lock:
                    self._moved[0] += self._size(number)
                if crc != entry.crc:
                    raise self._mismatch(number, entry.crc, crc)

    def write(self, numbers: range, source: Bytes, step: int) -> None:
        """Store `source`, the result of a step, as chunks.

        Raises:
            OSError: with path and offset.
        """
        with self._lock:
            self._kept[list(numbers), _BEGUN] += 1
        homes = [self._home(number, writing=True) for number in numbers]
        with self._transfers(numbers, source, writing=True) as by_chunk:
            for number, home, transfers in zip(numbers, homes, by_chunk):
                crc = 0
                for memory, _ in transfers:  # Overlaps the writes.
                    crc = self._crc(memory, crc)
                for _, ticket in transfers:
                    self._wait(ticket, number)
                with self._lock:
                    kept = self._kept[number]
                    kept[_STEP:_PROTECTED] = step, crc, *kept[_STEP:_EARLIER_STEP], home
                    kept[_ENDED] = kept[_BEGUN]
                    self._moved[1] += self._size(number)

    @contextmanager
    def _transfers(
        self, numbers: range, data: Bytes, *, writing: bool
    ) -> Iterator[list[list[tuple[Bytes, Ticket]]]]:
        """Start all transfers of the chunks: a list per chunk, of memory and ticket.

        The memory must not be freed while a transfer is in flight, so leaving waits for all.
        """
        call = self.volume.write_from if writing else self.volume.read_into
        by_chunk: list[list[tuple[Bytes, Ticket]]] = []
        try:
            start = int(self._offsets[numbers[0]])
            for number in numbers:
                transfers: list[tuple[Bytes, Ticket]] = []
                by_chunk.append(transfers)
                first, size = int(self._offsets[number]) - start, self._size(number)
                place = self._place(number, self._home(number, writing=writing))
                for at in range(0, size, CHECK_BYTES):
                    memory = data[first + at : first + min(at + CHECK_BYTES, size)]
                    transfers.append((memory, call(memory, place + at)))
            yield by_chunk
        finally:
            wait_all(ticket for transfers in by_chunk for _, ticket in transfers)

    def _size(self, number: int) -> int:
        return int(self._offsets[number + 1] - self._offsets[number])

    def _home(self, number: int, *, writing: bool) -> int:
        """That which a write goes to, or a read comes from."""
        home, protected = map(int, self._kept[number, _HOME:])
        return home if not writing or number >= self.two_homes else 1 - protected

    def _place(self, number: int, home: int) -> int:
        """Where in the volume a home of a chunk starts."""
        return int(self._offsets[number] + home * self._offsets[-1])

    def _extent(self, number: int, *, writing: bool = False) -> tuple[int, int]:
        """Where a chunk is read, or written, and its bytes."""
        return self._place(number, self._home(number, writing=writing)), self._size(number)

    # -- for compiled code -------------------------------------------------------------------------

    def native_chunks(self, numbers: range) -> list[NativeChunk]:
        """Some chunks, where the volume is native."""
        found = []
        for number in numbers:
            size, start = self._size(number), int(self._offsets[number] - self._offsets[numbers[0]])
            places = [self._place(number, home) for home in range(1 + (number < self.two_homes))]
            parts = [self.volume.native_parts(place, size) for place in places]
            found.append((number, start, size, self._kept[number].ctypes.data, parts))
        return found

    def native_counts(self) -> tuple[int, int]:
        """Addresses of what compiled code counts, and of the step that it stamps."""
        return self._moved.ctypes.data, self.step.ctypes.data

    def explain(self, failure: Sequence[int]) -> Exception:
        """What became of a transfer of compiled code, in the words of `read` and `write`."""
        from aio.native import explained  # There, as the code was compiled.

        writing, number, code, cause, offset, count, last_code, found = failure
        if code:
            path = self.volume.path_of(*self._extent(number, writing=bool(writing)))
            error = explained(path, bool(writing), (code, cause, offset, count, last_code))
            return self._failed(error, number)
        if found < 0:
            return self._never_written(number)
        return self._mismatch(number, int(self._kept[number, _CRC]), found)

    # -- failures ----------------------------------------------------------------------------------

    def _wait(self, ticket: Ticket, number: int) -> None:
        try:
            ticket.wait()
        except OSError as error:
            raise self._failed(error, number) from error

    def _failed(self, error: OSError, number: int) -> OSError:
        return OSError(error.errno, f"{self._name(number)}: {error.strerror}", error.filename)

    def _readable(self, number: int) -> ChunkEntry:
        entry = self.entry(number)
        if entry is None:
            raise self._never_written(number)
        return entry

    def _never_written(self, number: int) -> ValueError:
        return ValueError(
            f"{self._name(number)} in {self.volume.path} was asked for but never completely "
            "written: likely an earlier write failed; write it first"
        )

    def _mismatch(self, number: int, expected: int, found: int) -> OSError:
        offset, size = self._extent(number)
        likely = "likely the drive or the memory changed bits"
        others = np.flatnonzero((self._kept[:, _CRC] == found) & (self._kept[:, _ENDED] > 0))
        if others.size:
            step = self._kept[others[0], _STEP]
            likely = (
                f"these are bytes of {self._name(int(others[0]))}, written in step {step}: likely "
                "the drive mixed up two places"
            )
        elif self._kept[number, _EARLIER_CRC] == found:
            before, after = self._kept[number, [_EARLIER_STEP, _STEP]]
            likely = f"these are those of step {before}: likely the drive lost the write of {after}"
        return OSError(
            errno.EIO,
            f"read of {size} bytes at offset {offset}, {self._name(number)} failed: checksum "
            f"mismatch (CRC32C {found:#010x}, written as {expected:#010x}); {likely}; look at "
            "`dmesg` and the drive's health, and use another drive",
            self.volume.path_of(offset, size),
        )
