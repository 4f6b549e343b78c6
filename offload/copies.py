"""A copy between memories in pieces, between which its lane may do what is more urgent.

[Note: Pieces]
A device moves bytes in each direction one copy after the other, in the order in which it was given
them: a unit of 400 MB holds up whatever comes behind it, however urgent, for 8 ms at 50 GB/s. So a
long copy is queued piece by piece. Two are under way at once, the one that moves and the one that
follows it, so that nothing stands still between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from offload.device import Device
from offload.records import BLOCK_BYTES
from offload.task import Fence

PIECE_BYTES_MAX = 64 << 20
"""Most bytes of a piece: a millisecond or two, and long enough to reach the full speed. The pieces
of a copy are of one size, so more than half of it."""

UNDER_WAY_MAX = 2
"""Pieces that are queued and not done."""


def in_pieces(device: Device, into: torch.Tensor, source: torch.Tensor) -> Iterator[None]:
    """Queue a copy of flat bytes on the current stream; yields between two pieces.

    When it ends, all is queued, and of the pieces the last `UNDER_WAY_MAX` may not be done.
    """
    size = into.numel()
    count = max(1, -(-size // PIECE_BYTES_MAX))
    step = -(-size // (count * BLOCK_BYTES)) * BLOCK_BYTES or BLOCK_BYTES
    under_way: deque[Fence | None] = deque()
    for start in range(0, size, step):
        if start:
            under_way.append(device.fence(device.stream()))
            if len(under_way) == UNDER_WAY_MAX:
                fence = under_way.popleft()
                if fence is not None:
                    fence.synchronize()
            yield
        device.copy(into[start : start + step], source[start : start + step])
