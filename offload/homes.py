"""The homes of values as one goes through them, one parameter after the other.

[Note: Looks]
A chunk on nvme is read and checked as a whole, and many small parameters lie in one. Who goes
through parameters asks for the same chunk again and again: so the one that was read last is kept
until the last parameter that has a part in it was asked for, and while nothing else has been
written in its place. Going through them in the order in which they lie reads every chunk once, and
leaves nothing behind.

[Note: Writes that fail]
A chunk on nvme whose write fails is nowhere: what was there is half overwritten. Who changes some
parameters of one has just read all of it, so that is kept until a write succeeds, and looks find
it: what has failed can be asked for again. Lanes do not, and end the engine.
"""

from __future__ import annotations

import torch

from offload.executor import Executor
from offload.program import WHOLE, Value
from offload.records import ChunkEntry


class Homes:
    """What `Executor.peek` gives, and who changes it; of nvme at most one value read is kept."""

    def __init__(self, executor: Executor):
        """Of the values that `executor` has at home."""
        self._executor = executor
        self._kept: tuple[Value, ChunkEntry, torch.Tensor] | None = None
        self._unwritten: dict[Value, torch.Tensor] = {}
        """What could not be written, see [Note: Writes that fail]."""

    def look(self, value: Value, *, last: bool) -> torch.Tensor:
        """The bytes of a chunk at home, as it is now; they are not kept after the `last` look.

        To be read only, but by who writes all of them after it.
        """
        entry = self._entry(value)
        if value in self._unwritten:
            if entry is None:
                return self._unwritten[value]
            del self._unwritten[value]  # Somebody else has written it.
        kept, self._kept = self._kept, None
        if kept is None or entry is None or kept[0] != value or kept[1] is not entry:
            kept = None  # Let go of before the next one is read.
            found = self._executor.peek(value)
        else:
            found = kept[2]
        if entry is not None and not last:
            self._kept = value, entry, found
        return found

    def write(self, value: Value, content: torch.Tensor) -> None:
        """Put the bytes of a chunk home, see [Note: Writes that fail]."""
        self._kept = None
        if self._on_nvme(value):
            self._unwritten[value] = content
        self._executor.poke(value, content)
        self._unwritten.pop(value, None)

    def unwritten(self, unit: int) -> list[Value]:
        """The chunks of a unit that are still to be written."""
        return [one for one in self._unwritten if one.unit == unit and self._entry(one) is None]

    def forget(self) -> None:
        """Let go of what is kept."""
        self._kept = None

    def _entry(self, value: Value) -> ChunkEntry | None:
        """What says that a chunk on nvme is the same: every write makes another one."""
        plan, store = self._executor.plan, self._executor.store
        if store is None or not self._on_nvme(value):
            return None
        return store.entry(value.kind, plan.profile.units[value.unit].name, value.chunk)

    def _on_nvme(self, value: Value) -> bool:
        home = self._executor.plan.home(value.kind, value.unit)
        return home.tier == "nvme" and value.chunk != WHOLE
