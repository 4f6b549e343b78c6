"""Resident units: weights and gradients on the device, where torch's own parameters serve.

[Note: Residents]
A unit is resident if its weights and gradients live on the device, or if its weights do and it is
not trained: nothing of it arrives or leaves in a pass. Its parameters are plain ones in memory of
their own, counted in the budget: no hook announces their use, no trap answers for them, and passes
do not know them. Autograd accumulates into `p.grad` by the engine's own rule: the first gradient is
taken, each later one is added by one rounding.

With its states on the device too, `step()` reads `p.grad` and queues the update on the user's
stream, as any optimizer does. `step()` waits for the device only for the norm, once, and where a
lane uses the same workspace. With its states elsewhere lanes do the update, see [Note: Pending
updates] of `pending`.

A unit whose gradients are of another dtype than its weights is not resident, as the engine sums
them; nor is one with `micro_batches` and states elsewhere, as its updates begin inside backward.
The user may do anything with a resident parameter. At the next step one of another shape, dtype or
device than its states are for is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch
from torch import nn

from cpu_adam.checks import GRADIENT_DTYPES
from offload.model.early_updates import Step
from offload.model.pending import Owner, PendingUpdates, in_torch
from offload.model.units import FlatUnit, refuse_sparse, zero_all
from offload.runtime.device import Device
from offload.runtime.runner import Runner
from offload.runtime.works import Flat


class Residents:
    """The resident units of an engine."""

    def __init__(self, runner: Runner, units: Sequence[FlatUnit], owner: Owner):
        """Of all `units` of an engine, those that the plan says are."""
        self._runner = runner
        self._plan = runner.plan
        self._units = {u: units[u] for u in sorted(runner.plan.residents)}
        self.pending = PendingUpdates(runner, self._units.values(), owner)

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    # -- gradients, as `Gradients` has them ------------------------------------------------------

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient.

        Raises:
            RuntimeError: it was frozen at attach.
        """
        self.pending.wait([unit])
        if self._units[unit].parameters[parameter].grad is None:
            return False
        self.require_place(unit, parameter)
        return True

    def require_place(self, unit: int, parameter: int) -> None:
        """Refuse a parameter that would be updated, or will be, and has no state.

        Raises:
            RuntimeError: it was frozen at attach, and now it has, or gets, a gradient.
        """
        one, mine = self._units[unit].spec.parameters[parameter], self._units[unit].parameters
        if not one.trainable and (
            mine[parameter].requires_grad or mine[parameter].grad is not None
        ):
            raise RuntimeError(
                f"{one.name} has a gradient, or requires one, but was frozen when the model was "
                "attached, so no state has a place: detach(), unfreeze, and attach again"
            )

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self._units[unit].parameters[parameter].grad = None

    def zero(self, unit: int, parameters: Iterable[int]) -> None:
        """Make gradients zeros."""
        mine = self._units[unit].parameters
        zero_all(mine[parameter].grad for parameter in parameters)

    # -- weights ---------------------------------------------------------------------------------

    def value(self, unit: int, parameter: int) -> torch.Tensor:
        """The values of a parameter in memory of their own."""
        return self._units[unit].parameters[parameter].detach().clone()

    # -- the step --------------------------------------------------------------------------------

    def check(self, step: Step) -> None:
        """Look whether what is to be updated is still what the states are for.

        Raises:
            RuntimeError: a parameter is not.
            ValueError: a gradient is not, or is sparse.
        """
        for unit in self._units.keys() & step.keys():
            for at in step[unit]:
                in_lanes = unit in self.pending.units
                _check(self._units[unit], at, self._runner.device, in_lanes=in_lanes)

    def flat(self, unit: int, step: Step) -> Flat:
        """What the update of a unit works on."""
        return in_torch({index: self._units[unit].parameters[index] for index in step[unit]})


@torch.no_grad()
def give_memory(
    unit: FlatUnit, device: Device, fresh: Container[nn.Parameter], start: Callable[[], None]
) -> None:
    """Give the parameters of a unit memory of their own on the device; `start` those `fresh`."""
    values = [parameter.data for parameter in unit.parameters]
    for parameter, value in zip(unit.parameters, values):
        parameter.grad = None
        parameter.data = device.empty(value.shape, value.dtype).copy_(value)
    start()
    for parameter, value in zip(unit.parameters, values):
        if parameter not in fresh:  # Whose module may have started it, too.
            parameter.data.copy_(value)
    device.drain()


def _check(unit: FlatUnit, index: int, device: Device, *, in_lanes: bool) -> None:
    """Raise where a parameter, or its gradient, is not what its states are for.

    Lanes have a place for gradients of the parameter's dtype alone.
    """
    one, parameter = unit.spec.parameters[index], unit.parameters[index]
    form = (tuple(parameter.shape), parameter.dtype, parameter.device)
    attached = (one.shape, getattr(torch, one.dtype), device.torch_device)
    if form != attached or not parameter.is_contiguous():
        raise RuntimeError(
            f"{one.name} is {form} with strides {parameter.stride()} now, but its states are for "
            f"{attached}, contiguous: likely the model was resized, converted or moved after "
            "attach: do that before attach, or after detach(), and attach it again"
        )
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        refuse_sparse(f"the gradient of {one.name}")
    dtypes = (parameter.dtype,) if in_lanes else GRADIENT_DTYPES
    if gradient.shape != parameter.shape or gradient.dtype not in dtypes:
        raise ValueError(
            f"the gradient of {one.name} is {tuple(gradient.shape)} of {gradient.dtype}, and its "
            f"states are for {one.shape} of {one.dtype}: likely its data or p.grad_dtype was set; "
            "assign a gradient of the parameter's form"
        )
