"""What a transfer consists of: stretches of memory, and where in the file they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
