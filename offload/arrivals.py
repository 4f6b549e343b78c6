"""Gradients that have come and are still to be taken over.

[Note: Arrivals]
To take a gradient over costs several times what it costs to note it: signals are held off, places
are waited for, books are kept. So what comes of a unit waits until all of it has come, until more
of the same parameter or anything of another unit does, or until the engine looks. What waits is
memory of autograd's, of one unit at most. On an accelerator nothing waits: a gradient is ready on
the stream that is current when it comes, and there it is taken.
"""

from __future__ import annotations

import torch

from offload.executor import Executor
from offload.finality import Finality
from offload.gradients import Gradients
from offload.interrupt import whole


class Arrivals:
    """What has come of one unit."""

    def __init__(self, executor: Executor, gradients: Gradients, finality: Finality):
        """Nothing has come."""
        self._gradients = gradients
        self._finality = finality
        self._due = [
            sum(p.trainable for p in unit.parameters) for unit in executor.plan.profile.units
        ]
        """By unit, how many make all of it."""
        self._waits = executor.device.is_host
        self._unit = -1
        self._came: dict[int, torch.Tensor] = {}

    def note(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Autograd has produced a gradient.

        Raises:
            RuntimeError: the unit's update has begun without it.
            ValueError: it is sparse.
        """
        if self._came and (unit != self._unit or parameter in self._came):
            self.take()
        self._unit = unit
        self._came[parameter] = gradient
        if len(self._came) == self._due[unit] or not self._waits or unit in self._finality.begun:
            self.take()

    def take(self) -> None:
        """Take over what waits.

        Raises:
            RuntimeError, ValueError: as of `note`.
        """
        if self._came:
            self._take()

    @whole
    def _take(self) -> None:
        came, self._came = self._came, {}
        for parameter, gradient in came.items():
            self._finality.gradient_came(self._unit, parameter)
            self._gradients.collect(self._unit, parameter, gradient)
