"""The homes of values as one looks at them, one parameter after the other.

[Note: Looks]
A chunk on nvme is read and checked as a whole, and many small parameters lie in one. Who goes
through parameters asks for the same chunk again and again: so the one that was read last is kept
until the last parameter that has a part in it was asked for, and while nothing else has been
written in its place. Going through them in the order in which they lie reads every chunk once, and
leaves nothing behind.
"""

from __future__ import annotations

import torch

from offload.executor import Executor
from offload.program import WHOLE, Value
from offload.records import ChunkEntry


class HomeReader:
    """What `Executor.peek` gives, to be read only; of nvme at most one value is kept."""

    def __init__(self, executor: Executor):
        """Of the values that `executor` has at home."""
        self._executor = executor
        self._kept: tuple[Value, ChunkEntry, torch.Tensor] | None = None

    def look(self, value: Value, *, last: bool) -> torch.Tensor:
        """The bytes of a chunk at home, as it is now; they are not kept after the `last` look."""
        entry = self._entry(value)
        kept, self._kept = self._kept, None
        if kept is None or entry is None or kept[0] != value or kept[1] is not entry:
            kept = None  # Let go of before the next one is read.
            found = self._executor.peek(value)
        else:
            found = kept[2]
        if entry is not None and not last:
            self._kept = value, entry, found
        return found

    def forget(self) -> None:
        """Let go of what is kept."""
        self._kept = None

    def _entry(self, value: Value) -> ChunkEntry | None:
        """What says that a chunk on nvme is the same: every write makes another one."""
        plan, store = self._executor.plan, self._executor.store
        if store is None or value.chunk == WHOLE:
            return None
        if plan.home(value.kind, value.unit).tier != "nvme":
            return None
        return store.entry(value.kind, plan.profile.units[value.unit].name, value.chunk)
