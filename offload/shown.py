"""What `p.grad` has returned, and who else holds it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from offload.exposure import use_count
from offload.extents import expanded

_OWN_REFERENCES = 2
"""References to a shown gradient when nobody else holds it: ours, and the one that asks."""

_ALONE = use_count(torch.empty(1))
"""Use count of the memory of a tensor of which there is no other."""


@dataclass(slots=True)
class Shown:
    """What `p.grad` has returned."""

    tensor: torch.Tensor
    apart: bool
    """Whether it has memory of its own."""

    @property
    def held(self) -> bool:
        """Whether anybody else holds it, in Python or as the gradient of another tensor."""
        counts: int = self.tensor._use_count()  # type: ignore[attr-defined]
        return sys.getrefcount(self.tensor) > _OWN_REFERENCES or counts > 1

    @property
    def viewed(self) -> bool:
        """Whether anybody has a view of it."""
        return use_count(self.tensor) > _ALONE

    @property
    def followed(self) -> bool:
        """Whether anybody else holds it, or may have its memory."""
        # That of an array, which grows at no time, is counted by nobody.
        own = not self.apart or self.tensor.untyped_storage().resizable()
        return self.held or self.viewed or not own

    def leave(self) -> None:
        """Get memory of its own."""
        with torch.no_grad():
            self.tensor.data = self.tensor.clone()
        self.apart = True


@dataclass(slots=True)
class Showing:
    """What is shown of the gradients of one unit."""

    shown: dict[int, Shown] = field(default_factory=dict)
    """By parameter."""
    copied: torch.Tensor | None = None
    """The unit's gradients in CPU memory, where their home is elsewhere."""


def is_same(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether these are the very elements of a gradient's home, in their order."""
    return gradient.data_ptr() == window.data_ptr() and gradient.stride() == window.stride()


def lies_in(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether an assigned gradient is a view of its own home."""
    start = window.data_ptr()
    return start <= gradient.data_ptr() < start + max(1, window.nbytes)


def may_be_shown(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether `p.grad` can be what was assigned, and the sum in `window` be written to it."""
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        return False
    apart = gradient.requires_grad or gradient.is_inference() or expanded(gradient)
    return gradient.dtype == window.dtype and not apart
