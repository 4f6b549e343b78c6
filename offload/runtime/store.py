"""The nvme tier: reads and writes the values of a file layout, and checks every byte it reads."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

import aio
from cpu_adam import crc32c
from offload.planning.layout import FileLayout
from offload.planning.machine import DriveSpeed, shares_of
from offload.planning.profile import BLOCK_BYTES, Kind
from offload.program.ops import ALL_CHUNKS, Value

Bytes = npt.NDArray[np.uint8]

AHEAD = 4
"""Chunks that are read or written beside the one at hand."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What `call` gives of each item, in order, on threads: up to `AHEAD` more have begun."""
    with ThreadPoolExecutor(AHEAD) as pool:
        begun = deque[Future[Result]]()
        for item in items:
            begun.append(pool.submit(call, item))
            if len(begun) > AHEAD:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


class Kept(NamedTuple):
    """What of a store outlives the process, in two homes each ([Note: Two homes] of aio.chunks)."""

    values: FileLayout
    """Whether their home is nvme or not."""
    name: str
    """Of the files."""
    homes: Sequence[Sequence[int]] | None
    """What another process left in the files, as of `Chunks.homes`; None where they are new."""
    close: Callable[[], None]
    """Called when the store is closed."""


class Store:
    """A volume of values, by default unnamed and gone with the process.

    Calls block until the transfer is done, and release the GIL while they wait for the drive.
    Threads may call concurrently, unless one writes a chunk that another reads or writes.

    Args:
        directories: of the volume; several are striped over, `unit_bytes` on one before the next.
        layout: what the volume holds.
        names: of the units, for messages.
        io: the system's calls, or a simulation of them.
        speeds: measured of each directory's drive, which then has its share.
        kept: what outlives the process.

    Raises:
        ValueError: a drive is so slow that it would slow the others down.
        OSError: a file or its space is refused; nothing is left behind.
    """

    def __init__(
        self,
        directories: aio.Directory | Sequence[aio.Directory],
        layout: FileLayout,
        names: Sequence[str],
        io: aio.IO | None = None,
        unit_bytes: int = aio.UNIT_BYTES,
        speeds: Sequence[DriveSpeed | None] = (),
        kept: Kept | None = None,
    ) -> None:
        twice = kept.values if kept is not None else {}
        layout = {**twice, **{key: sizes for key, sizes in layout.items() if key not in twice}}
        self._layout, self._names, self._kept = layout, names, kept
        self._pid = os.getpid()
        sizes = [*itertools.chain(*layout.values())]
        two_homes = sum(map(len, twice.values()))
        starts = itertools.accumulate(map(len, layout.values()), initial=0)
        self._first: dict[tuple[Kind, int], int] = dict(zip(layout, starts))
        """By value, the number of its first chunk."""
        self.volume = aio.create_volume(
            directories,
            sum(sizes) + sum(sizes[:two_homes]),
            partial(aio.open_backend, io=io),
            unit_bytes=unit_bytes,
            weights=shares_of(speeds) or None,
            name=kept and kept.name,
            there=kept is not None and kept.homes is not None,
        )
        self.chunks = aio.Chunks(self.volume, sizes, crc32c, self._name_of, two_homes)
        self.take_over()

    def take_over(self) -> bool:
        """Go back to what another process left, where it did: whatever was written since."""
        if self._kept is None or self._kept.homes is None:
            return False
        self.chunks.take_over(self._kept.homes)
        return True

    def _name_of(self, number: int) -> str:
        key, first = next(one for one in reversed(self._first.items()) if one[1] <= number)
        kind, unit = key
        return f"chunk {number - first} of {kind} of {self._names[unit]!r}"

    def read(self, value: Value, into: torch.Tensor) -> None:
        """Fill `into` with a value or chunk, as last written; see `Chunks.read`.

        `into` is flat uint8 on the CPU, 4096-aligned, of the chunks' size.
        """
        self.chunks.read(*self._chunks_of(value, into))

    def write(self, value: Value, source: torch.Tensor, step: int) -> None:
        """Store `source`, the result of a step, as `read` reads it; see `Chunks.write`."""
        self.chunks.write(*self._chunks_of(value, source), step)

    def entry(self, value: Value) -> aio.ChunkEntry | None:
        """The entry of a chunk; None if it is not readable."""
        return self.chunks.entry(*self.numbers(value))

    def numbers(self, value: Value) -> range:
        """The numbers in `chunks` of a chunk, or of all of a value."""
        kind, unit, chunk = value
        first, count = self._first[kind, unit], len(self._layout[kind, unit])
        found = range(first, first + count)
        return found if chunk == ALL_CHUNKS else found[chunk : chunk + 1]

    def close(self) -> None:
        """Wait for transfers in flight, free the space. Idempotent; a no-op in a forked child."""
        if os.getpid() != self._pid:
            return
        try:
            self.volume.close()
        finally:
            if self._kept is not None:
                self._kept.close()

    def _chunks_of(self, value: Value, tensor: torch.Tensor) -> tuple[range, Bytes]:
        """The numbers of the chunks, and the memory of `tensor`."""
        sizes = self._layout[value.kind, value.unit]
        size = sum(sizes) if value.chunk == ALL_CHUNKS else sizes[value.chunk]
        assert (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (torch.uint8, (size,), (1,))
        assert tensor.data_ptr() % BLOCK_BYTES == 0
        return self.numbers(value), tensor.detach().numpy()
