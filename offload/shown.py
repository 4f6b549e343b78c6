"""What `p.grad` has returned, and who else holds it.

[Note: Where a gradient is]
What `p.grad` shows of a gradient that is at home:

    HIDDEN     nobody has asked, or nobody holds what was shown any more
    IN PLACE   a view of the home, in memory that the host can read
    IN A COPY  a view of a copy of the unit's gradients, whose home is elsewhere
    APART      memory of its own: the user's (see `assigned`), or what was held when a step took the
               home, or the home itself, or a copy, that has been left to who has views of it

    what happens         HIDDEN        IN PLACE               IN A COPY           APART
    p.grad               IN PLACE or   -                      -                   -
                         IN A COPY
    p.grad = other       APART         lost, APART            lost, APART         APART
    a backward begins    -             HIDDEN if let go of    put home; HIDDEN    put home; HIDDEN
                                                              if let go of        if let go of
    it ends              -             -                      renewed             renewed
    step(), sleep()      -             set apart, or waited   put home            put home
    zero_grad()          -             lost, HIDDEN           lost, HIDDEN        HIDDEN

*Set apart*: a tensor that somebody holds gets memory of its own (it is APART then). Where somebody
has a view it cannot move: it stays, and `step()` waits for the update that reads it. *Lost*: it is
followed no longer; one that somebody holds gets memory of its own, and where somebody has a view
the home, or the copy, of all of the unit's gradients moves instead (`places`), so those that are
shown are APART then. *Let go of*: neither the tensor, in Python or in torch, nor its memory is held
by anybody else. *Put home*: a copy goes whole, edited or not. Memory can be written without a trace
(`.data`, numpy), and what would tell lies beyond the bus; a second copy to compare with would take
the memory twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from offload.exposure import use_count
from offload.extents import ALONE, Named, sharing

_OWN_REFERENCES = 2
"""References to a shown gradient when nobody else holds it: ours, and the one that asks."""


def _storage_references(tensor: torch.Tensor) -> int:
    """References to the storage of a tensor as Python knows it."""
    return sys.getrefcount(tensor.untyped_storage())


_ALONE = torch.empty(1)
_OWN_STORAGE_REFERENCES = _storage_references(_ALONE)
"""References to the storage of a tensor that lives, when nobody else holds it."""


@dataclass(slots=True)
class Shown:
    """What `p.grad` has returned."""

    tensor: torch.Tensor
    apart: bool
    """Whether it has memory of its own."""
    made_at: int
    """Its address in memory of the engine's; 0 where the user made it."""
    shared: bool = False
    """Whether it was assigned with another storage of that memory: who has the first is unknown."""
    version: int = 0
    """Changes of it that torch had counted as a backward began."""

    @classmethod
    def of(cls, tensor: torch.Tensor, *, apart: bool = False) -> Shown:
        """Where a gradient is shown; `apart` in memory of the user's."""
        return cls(tensor, apart, 0 if apart else tensor.data_ptr())

    @property
    def held(self) -> bool:
        """Whether anybody else holds it in Python."""
        return sys.getrefcount(self.tensor) > _OWN_REFERENCES

    @property
    def viewed(self) -> bool:
        """Whether anybody may have a view of it.

        What holds it in torch may be a view that torch did not make (DLPack), or have its address.
        """
        counts: int = self.tensor._use_count()  # type: ignore[attr-defined]
        if self.shared or counts > 1 or use_count(self.tensor) > ALONE:
            return True
        return _storage_references(self.tensor) > _OWN_STORAGE_REFERENCES

    def after(self, before: Shown) -> Shown:
        """This, which was assigned in the place of one in the same memory."""
        mine, other = (one.tensor.untyped_storage()._cdata for one in (self, before))
        self.shared = before.shared or mine != other
        return self

    @property
    def followed(self) -> bool:
        """Whether anybody else holds it, or may have its memory."""
        # That of an array of others, which grows at no time, is counted by nobody.
        ours = not self.apart or self.tensor.data_ptr() == self.made_at
        own = ours or self.tensor.untyped_storage().resizable()
        return self.held or self.viewed or not own

    @property
    def written(self) -> bool:
        """Whether torch has counted a change since, where it counts those of this one only."""
        return self.tensor.data_ptr() == self.made_at and self.tensor._version != self.version

    def set_apart(self) -> None:
        """Get memory of its own."""
        with torch.no_grad():
            self.tensor.data = self.tensor.clone()
        self.apart, self.made_at = True, self.tensor.data_ptr()


@dataclass(slots=True)
class Showing:
    """What is shown of the gradients of one unit."""

    shown: dict[int, Shown] = field(default_factory=dict)
    """By parameter."""
    copied: torch.Tensor | None = None
    """The unit's gradients in CPU memory, where their home is elsewhere."""
    due: bool = False
    """Whether a backward has brought more home than is shown."""


class WrittenInside:
    """Gradients of before that were changed inside a backward, which adds to them elsewhere."""

    def __init__(self) -> None:
        """None yet."""
        self._found: list[str] = []

    def look(self, named: Iterable[tuple[str, Shown]]) -> None:
        """As a backward ends."""
        self._found = [name for name, shown in named if shown.written]

    def refuse(self) -> None:
        """Refuse it once, when all else is done.

        Raises:
            RuntimeError: one was changed.
        """
        found, self._found = self._found, []
        if found:
            raise RuntimeError(
                f"the gradient of {found[0]} was changed inside the backward, likely by a hook "
                "that holds it, or a view of it, from before: what the backward brings is added "
                "elsewhere, so the change may be lost. zero_grad() and take the step anew; change "
                "it after backward, or what comes by p.register_hook()"
            )


class SharingLook:
    """Looks for gradients that share memory, where one has moved since the last look."""

    def __init__(self) -> None:
        """None was looked at."""
        self._looked: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        """Where the gradients lay that were found to share nothing."""

    def refuse(self, ours: Sequence[Named], others: Iterable[Named]) -> None:
        """Refuse one of `ours` that shares memory with another.

        Raises:
            RuntimeError: one does.
        """
        named = [*ours, *others]
        places = [(one.data_ptr(), one.shape, one.stride()) for _, one in named]
        if places == self._looked:
            return
        mine = {id(tensor) for _, tensor in ours}
        for (one, first), (other, second) in sharing(named):
            if id(first) in mine or id(second) in mine:  # Torch adds to its own as it does.
                raise RuntimeError(
                    f"the gradients of {one} and {other} share memory (one was assigned to "
                    "p.grad of both, likely), and a backward would add both sums there, but "
                    "offloaded ones are added apart: assign a clone() to one of them"
                )
        self._looked = places


def is_same(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether these are the very elements of a gradient's home, in their order."""
    return gradient.data_ptr() == window.data_ptr() and gradient.stride() == window.stride()
