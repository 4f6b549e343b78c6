"""The copies of weights that autocast makes, which lie on the device beside every budget.

[Note: Autocast]
Under autocast torch casts fp32 weights to the lower dtype as they are used. It keeps each cast to
the end of the region, so that uses of one weight share it (with it their gradients are summed in
that dtype: to let it go earlier would change bits), and autograd keeps it to backward. These copies
are made by torch and belong to the graph, as activations do. They are counted here, at most: every
trainable fp32 weight of a unit that was used under autocast, once for each forward.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from offload.binding import BoundUnit
from offload.config import format_bytes


class Casts:
    """Bytes of the weights of one forward in the dtype of autocast."""

    def __init__(
        self, units: Sequence[BoundUnit], device: torch.device, always: Container[int] = ()
    ):
        """Nothing is cast yet. Units in `always` are used in every forward, unannounced."""
        self._always = [unit.index for unit in units if unit.index in always]
        self._device_type = device.type
        self._elements = [
            sum(p.elements for p in unit.spec.parameters if p.trainable and p.dtype == "float32")
            for unit in units
        ]
        self._used: dict[int, int] = {}
        self.bytes_max = 0
        """Of the forward with the most, at most."""

    def begin(self) -> None:
        """A forward begins."""
        self._used.clear()
        if torch.is_autocast_enabled(self._device_type):
            for unit in self._always:
                self.use(unit)

    def use(self, unit: int) -> None:
        """A unit is used in a forward."""
        if torch.is_autocast_enabled(self._device_type):
            dtype = torch.get_autocast_dtype(self._device_type)
            self._used[unit] = self._elements[unit] * dtype.itemsize
            self.bytes_max = max(self.bytes_max, sum(self._used.values()))

    @property
    def notice(self) -> str | None:
        """A sentence for a person where there were any, else None."""
        if not self.bytes_max:
            return None
        return (
            f"autocast keeps copies of the weights on the device from forward to backward, up to "
            f"{format_bytes(self.bytes_max, up=True)} that no budget counts: a model converted to "
            "bfloat16 before attach has none, and its exact states hold fp32 masters"
        )
