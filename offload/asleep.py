"""Residents whose engine sleeps: their memory is given back, and taken again.

[Note: Residents asleep]
An engine that sleeps gives back the memory of its residents, too: they are at rest then, in the
trap, which refuses. Memory that somebody else has a view of, a graph of autograd among them, would
not be given back by that. It stays as it is, so that the view shows the parameter afterwards as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.arena import typed, zeros_on
from offload.binding import BoundUnit, count_change, make_plain
from offload.device import Device
from offload.executor import Executor
from offload.holders import holders, idle_parameter
from offload.program import Value
from offload.resting import RestingParameter

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


class ResidentsAsleep:
    """The residents of an engine, while it sleeps."""

    def __init__(self, executor: Executor, units: Mapping[int, BoundUnit]):
        """Of `units`, by their index."""
        self._executor = executor
        self._units = units
        self._kept: dict[nn.Parameter, _Kept] = {}
        """Empty while they are awake."""

    def _room(self, value: Value) -> torch.Tensor:
        return zeros_on(self._executor.device, self._executor.plan.bytes_of(value.kind, value.unit))

    def gathered(self, value: Value) -> torch.Tensor:
        """The weights or gradients of a unit as they would lie in an arena, copied together."""
        bound, flat = self._units[value.unit], self._room(value)
        for index in range(len(bound.parameters)):
            bound.require_form(index, self._executor.device.torch_device)
        for parameter, view in self._within(value, flat):
            source = parameter if value.kind == "weight" else parameter.grad
            if source is not None:
                view.copy_(source.detach())
        return flat

    def scatter(self, value: Value, read: Callable[[torch.Tensor], None]) -> None:
        """Put back what `gathered` gave, and `read` reads, where nobody has kept it."""
        flat = self._room(value)
        read(flat)
        for parameter, view in self._within(value, flat):
            kept = self._kept[parameter]
            into = kept.weight if value.kind == "weight" else kept.gradient
            if into is not None and not kept.held(value):
                into.copy_(view)

    def _within(
        self, value: Value, flat: torch.Tensor
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter, and the view of its values in the flat ones of its unit."""
        bound = self._units[value.unit]
        if value.kind == "weight":
            yield from zip(bound.parameters, bound.views_of(flat).views)
            return
        for index, (parameter, one) in enumerate(zip(bound.parameters, bound.spec.parameters)):
            if one.trainable:
                offset = bound.spec.gradient_offset(index)
                yield parameter, typed(flat, one.dtype, offset, one.shape)

    def rest(
        self, home_of: Callable[[int, int], Any], refuse: Callable[[nn.Parameter], None]
    ) -> None:
        """Give the memory back that only the parameters hold; any use is refused from here on.

        Args:
            home_of: the home of a parameter, by unit and index.
            refuse: raises; called where a backward brings a gradient. What it holds torch hides
                from the garbage collector.
        """
        for bound in self._units.values():  # All look first: some may hold what others have.
            for parameter, one in zip(bound.parameters, bound.spec.parameters):
                self._kept[parameter] = _Kept.of(parameter, one.trainable)
        for unit, bound in self._units.items():
            for index, parameter in enumerate(bound.parameters):
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._kept[parameter].guard = register(refuse)
                parameter.grad = None
                parameter._offload_home = home_of(unit, index)  # type: ignore[attr-defined]
            bound.rest()
            # Earlier graphs have saved the parameters themselves, which show NaN now: counted as a
            # change, torch refuses them until `wake`.
            count_change(bound.parameters)

    def take_room(self) -> None:
        """Take memory again for what `rest` has given back.

        Raises:
            MemoryError: it is not there.
        """
        with torch.inference_mode(False):
            for parameter, kept in self._kept.items():
                kept.take_room(parameter, self._executor.device)

    def give_room(self) -> None:
        """Take back what `take_room` did."""
        for kept in self._kept.values():
            kept.give_room()

    def wake(self) -> None:
        """Let the parameters be plain again."""
        for parameter, kept in self._kept.items():
            assert kept.weight is not None
            if kept.guard is not None:
                kept.guard.remove()
            make_plain(parameter, kept.weight)
            parameter.grad = kept.gradient
            now = parameter._version
            _autograd._unsafe_set_version_counter([parameter], [now - 1])  # One is of `rest`.
        self._kept.clear()


class _Kept:
    """What is kept of a parameter whose engine sleeps."""

    def __init__(
        self,
        weight: torch.Tensor | None,
        gradient: torch.Tensor | None,
        *,
        has_gradient: bool,
    ):
        """Weight and gradient where somebody else has them, too; else None."""
        self.weight, self.gradient = weight, gradient
        self.guard: Any = None
        """The hook that refuses a gradient."""
        self._has_gradient = has_gradient
        self._held = (weight is not None, gradient is not None)

    @classmethod
    def of(cls, parameter: nn.Parameter, trainable: bool) -> _Kept:
        """Before the parameter lets go of both. What the plan has no such gradient of stays."""
        mine, idle = holders(parameter), holders(idle_parameter())
        other = not trainable or getattr(parameter.grad, "dtype", None) != parameter.dtype
        gradient = parameter.grad if mine[1:] != idle[1:] or other else None
        weight = parameter.data if mine[0] != idle[0] else None
        has_gradient = parameter.grad is not None
        return cls(weight, gradient, has_gradient=has_gradient)

    def held(self, value: Value) -> bool:
        """Whether somebody has kept the weight, or the gradient, where it is."""
        return self._held[value.kind == "gradient"]

    def take_room(self, parameter: RestingParameter | nn.Parameter, device: Device) -> None:
        """Memory of the device for what nobody has kept."""
        shape, dtype = parameter.shape, parameter.dtype
        try:
            if not self._held[0]:
                self.weight = device.empty(shape, dtype)
            if self._has_gradient and not self._held[1]:
                self.gradient = device.empty(shape, dtype)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"of a sleeping parameter: {error}") from error

    def give_room(self) -> None:
        """Let go of it again."""
        if not self._held[0]:
            self.weight = None
        if not self._held[1]:
            self.gradient = None
