"""What a transfer consists of: stretches of memory, and where in the file they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aio.system import ALIGN_BYTES

PIECE_BYTES_MAX = 1 << 30
"""One call of the system moves at most about 2 GiB on Linux."""


class Part(NamedTuple):
    """A stretch of memory, not empty, and where in the file it belongs."""

    view: memoryview
    offset: int


def verb(writing: bool) -> str:
    """What is done with the file, for messages."""
    return "write" if writing else "read"


def asked(writing: bool, parts: Sequence[Part]) -> str:
    """A transfer in words, for messages that name the path elsewhere."""
    if len(parts) == 1:
        return f"{verb(writing)} of {parts[0].view.nbytes} bytes at offset {parts[0].offset}"
    count = sum(part.view.nbytes for part in parts)
    pieces = f" in {len(parts)} stretches" if parts else ""
    offset = min((part.offset for part in parts), default=0)
    return f"{verb(writing)} of {count} bytes{pieces} at offset {offset}"


def described(writing: bool, parts: Sequence[Part], path: str) -> str:
    """A transfer in words, for messages."""
    return f"{asked(writing, parts)} of {path}"


def check_limits(piece_bytes: int, inflight_bytes_max: int) -> None:
    """Raises ValueError where a backend cannot have these."""
    if piece_bytes % ALIGN_BYTES or not 0 < piece_bytes <= PIECE_BYTES_MAX:
        raise ValueError(
            f"piece_bytes={piece_bytes}: expected a multiple of {ALIGN_BYTES} up to "
            f"{PIECE_BYTES_MAX}, as O_DIRECT and preadv ask; try {4 << 20}"
        )
    if inflight_bytes_max < piece_bytes:
        raise ValueError(
            f"inflight_bytes_max={inflight_bytes_max} is less than one piece of {piece_bytes} "
            "bytes, so that nothing could ever start; raise it"
        )
