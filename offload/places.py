"""Where the homes of gradients lie while others have views of what they were.

A view cannot move: whatever it was made of, it stays in the memory that it was made in. So when a
gradient is given up of which somebody has one, that memory is left to it, and the home of the
unit's gradients moves: to a former place of it, where nobody has views of one any more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np
import torch

from offload.arena import Arena
from offload.executor import Executor
from offload.exposure import use_count
from offload.extents import ALONE
from offload.program import Value


@dataclass(slots=True)
class _Place:
    """Memory that is the home of a unit's gradients, or was."""

    arena: Arena | None
    """What was taken for it; None of the one that the plan has."""
    known: Callable[[], object | None] = lambda: None
    """The array that all who have a view of it hold on to."""


class Places:
    """Moves homes of gradients in memory that the host can read."""

    def __init__(self, executor: Executor, moved: Callable[[int], None]):
        """Each is where the plan has it; `moved` is told of the unit whose home is elsewhere."""
        self._executor, self._moved = executor, moved
        self._of: dict[int, list[_Place]] = {}
        """By unit, those that there are; the first is its home now."""

        self._left: list[torch.Tensor] = []
        """Copies of gradients whose home is elsewhere, of which others have views."""

    @property
    def bytes(self) -> int:
        """Memory taken beyond what the plan has, and that of copies that were left."""
        places = (place for mine in self._of.values() for place in mine)
        taken = sum(place.arena.bytes for place in places if place.arena is not None)
        self._left = [copied for copied in self._left if use_count(copied) > ALONE]
        return taken + sum(copied.nbytes for copied in self._left)

    def leave(self, copied: torch.Tensor) -> None:
        """A copy belongs to who has views of it."""
        self._left.append(copied)

    def array(self, unit: int) -> np.ndarray:
        """A unit's gradients at home, to be seen by others: whatever they make of it is counted."""
        place = self._of.setdefault(unit, [_Place(None)])[0]
        found = place.known()
        if found is None:
            found = self._home(unit).numpy()
            place.known = weakref.ref(found)
        return found  # type: ignore[return-value]

    def viewed(self, unit: int, shown: int) -> bool:
        """Whether anybody has a view of a home, besides those of so many gradients `shown`."""
        known = self._of[unit][0].known if unit in self._of else lambda: None
        return known() is not None and sys.getrefcount(known()) - 1 > shown

    def needs(self, unit: int) -> int:
        """Bytes that `move` will take."""
        free = any(place.known() is None for place in self._of.get(unit, ())[1:])
        return 0 if free else len(self._home(unit))

    def move(self, unit: int) -> None:
        """Let a home be elsewhere, of the same bytes; nothing uses it now.

        Raises:
            MemoryError: the memory is not there.
        """
        mine = self._of.setdefault(unit, [_Place(None)])
        place = next((one for one in mine[1:] if one.known() is None), None)
        if place is None:
            memory, tier = self._executor.memory, self._executor.plan.home("gradient", unit).tier
            place = _Place(memory.more(tier, len(self._home(unit))))
            mine.append(place)
        self._move_to(unit, place)

    def _move_to(self, unit: int, place: _Place) -> None:
        mine, memory = self._of[unit], self._executor.memory
        here = memory.room_of("gradient", unit, place.arena)
        self._executor.copy_now(here, self._home(unit))  # First: a home is never half there.
        mine.remove(place)
        mine.insert(0, place)
        memory.move("gradient", unit, here)
        self._moved(unit)

    def trim(self) -> int:
        """Give back what was taken and that nobody has views of; how many bytes it was."""
        before = self.bytes
        for unit, mine in self._of.items():
            planned = next(place for place in mine if place.arena is None)
            if planned is not mine[0] and planned.known() is None and mine[0].known() is None:
                self._executor.quiesce("gradient", unit)
                self._move_to(unit, planned)
            for place in mine[1:]:
                if place.arena is not None and place.known() is None:
                    mine.remove(place)
                    self._executor.memory.less(place.arena)
        return before - self.bytes

    def forget(self, units: Container[int]) -> None:
        """The tiers of the homes of `units` are given back, and all that was taken there."""
        for unit in [unit for unit in self._of if unit in units]:
            del self._of[unit]

    def _home(self, unit: int) -> torch.Tensor:
        return self._executor.peek(Value("gradient", unit))
