"""Copies between the device and CPU memory that is not registered, by way of some that is.

[Note: Bounce]
A driver copies memory that is not registered through a small buffer of its own, piece by piece
while the host looks on, at a fraction of the bus; to register it for one copy takes longer than to
copy it. So bytes go through two registered pieces in turn: while the device moves one, the host
copies the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.arena import Arena
from offload.device import CPU, Device
from offload.task import Fence

PIECE_BYTES = 32 << 20
"""Of each of the two pieces."""

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies flat bytes into the first from the second, and returns when they are there."""


@contextmanager
def bounce(device: Device, most: int) -> Iterator[Copy]:
    """What copies up to `most` bytes at a time, until the end of the context; any kinds of memory.

    Raises:
        MemoryError: there is no memory for the pieces.
    """
    if device.is_host:
        yield _at_once
        return
    size = min(PIECE_BYTES, most)
    arena = Arena(2 * size, CPU, driver=device.driver, edges=(size,))
    pieces = [arena.tensor[:size], arena.tensor[size:]]

    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        if device.holds(into) == device.holds(source):
            _at_once(into, source)
            device.drain()
        elif device.holds(into):
            _send(device, into, source, pieces)
        else:
            _fetch(device, into, source, pieces)

    try:
        yield copy
    finally:
        device.drain()  # A copy may be under way: after an error, or of who goes on by himself.
        arena.close()


def _at_once(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)


def _send(
    device: Device, into: torch.Tensor, source: torch.Tensor, pieces: list[torch.Tensor]
) -> None:
    """From CPU memory to the device."""
    left: list[Fence | None] = [None, None]
    """By piece, the copy out of it."""
    for turn, (into_part, part) in enumerate(_parts(into, source, len(pieces[0]))):
        piece, before = pieces[turn % 2][: len(part)], left[turn % 2]
        if before is not None:
            before.synchronize()
        piece.copy_(part)
        device.copy(into_part, piece)
        left[turn % 2] = device.fence(device.stream())
    device.drain()


def _fetch(
    device: Device, into: torch.Tensor, source: torch.Tensor, pieces: list[torch.Tensor]
) -> None:
    """From the device to CPU memory."""
    before: tuple[torch.Tensor, torch.Tensor, Fence | None] | None = None

    def empty() -> None:
        if before is not None:
            into_part, piece, fence = before
            if fence is not None:
                fence.synchronize()
            into_part.copy_(piece)

    for turn, (into_part, part) in enumerate(_parts(into, source, len(pieces[0]))):
        piece = pieces[turn % 2][: len(part)]
        device.copy(piece, part)
        fence = device.fence(device.stream())
        empty()
        before = into_part, piece, fence
    empty()


def _parts(
    into: torch.Tensor, source: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, len(source), size):
        yield into[start : start + size], source[start : start + size]
