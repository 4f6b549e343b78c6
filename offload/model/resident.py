"""Resident units: weights and gradients on the device, where torch's own parameters serve.

[Note: Residents]
A unit is resident if its weights and gradients live on the device, or if its weights do and it is
not trained: nothing of it arrives or leaves in a pass. Its parameters are plain ones in memory of
their own, counted in the budget: no hook announces their use, no trap answers for them, and passes
do not know them. The user may do anything with one; at the next step one of another shape, dtype or
device than its states are for is refused. With its states on the device too, `step()` reads
`p.grad` and queues the update on the user's stream, as any optimizer does.

A unit whose gradients are of another dtype than its weights is not resident, as the engine sums
them; nor is one with `micro_batches` and states elsewhere, as its updates begin inside backward.

[Note: Pending updates]
Of a resident whose states live elsewhere lanes do the update, in the memory that is the
parameter's. `step()` returns at once, and the unit is pending: its parameters are of class
`PendingParameter`. Any touch, and a hook on each module that uses the unit, waits for its weights
and makes the parameters plain again. So the first use after a step pays for the step, and every
later pass is torch's own. An alias of such a weight from before `step()` shows the update when it
lands; `p.grad` stays, and is assigned or given up without a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from cpu_adam.checks import GRADIENT_DTYPES
from offload.model.early_updates import Step
from offload.model.parameter import AttachedParameter, find, trap
from offload.model.units import FlatUnit, require_fitting
from offload.program.compile import collect
from offload.runtime.device import Device
from offload.runtime.entry import entry, uncompiled
from offload.runtime.runner import Runner, Task
from offload.runtime.torch_internals import no_trap
from offload.runtime.works import Flat

_T: Any = torch.Tensor


class PendingUnit(NamedTuple):
    """What lanes update of one unit."""

    parameters: list[nn.Parameter]
    flat: Flat
    task: Task


def addresses(flat: Flat) -> tuple[object, ...]:
    """Where weights and gradients are, and what: torch may give the same memory in each step."""
    return tuple((one.data_ptr(), one.dtype) for kind in flat.values() for one in kind.values())


class Residents:
    """The resident units of an engine."""

    def __init__(
        self,
        runner: Runner,
        units: Sequence[FlatUnit],
        lock: AbstractContextManager[object],
        check: Callable[[], None],
    ):
        """Of all `units` of an engine, which `check` says can be used, those that the plan says."""
        self._runner, self._lock, self._check = runner, lock, check
        self._units = {unit: units[unit] for unit in sorted(runner.plan.residents)}
        self.in_lanes = {
            at: unit
            for at, unit in self._units.items()
            if unit.spec.trainable and runner.plan.home("state", at).tier != "device"
        }
        """Those that lanes update."""
        self._pending: dict[int, PendingUnit] = {}

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    # -- gradients, as `Gradients` has them ------------------------------------------------------

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient."""
        self.wait([unit])
        spec, one = self._units[unit].spec.parameters[parameter], self._units[unit].parameters
        if one[parameter].grad is None:
            return False
        if not spec.trainable:
            raise RuntimeError(
                f"{spec.name} has a gradient, but was frozen when the model was attached, so no "
                "state has a place: set its grad to None; or detach(), unfreeze, and attach again"
            )
        return True

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self._units[unit].parameters[parameter].grad = None

    def zero(self, unit: int, parameter: int) -> None:
        """Make a gradient zeros, as torch.optim does."""
        if (gradient := self._units[unit].parameters[parameter].grad) is not None:
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()

    # -- the step ---------------------------------------------------------------------------------

    def check(self, step: Step) -> None:
        """Look whether what is to be updated is still what the states are for."""
        for unit in self._units.keys() & step.keys():
            # Lanes have a place for gradients of the parameter's dtype alone.
            of_any = () if unit in self.in_lanes else GRADIENT_DTYPES
            for at in step[unit]:
                _check_form(self._units[unit], at, self._runner.device, of_any)

    def flat(self, unit: int, step: Step) -> Flat:
        """What the update of a unit works on: weights and gradients, in torch's memory."""
        mine = {index: self._units[unit].parameters[index] for index in step[unit]}
        return {
            "weight": {index: one.detach().view(-1) for index, one in mine.items()},
            "gradient": {i: _gradient(one).contiguous().view(-1) for i, one in mine.items()},
        }

    # -- pending updates -------------------------------------------------------------------------

    def prepare(self, units: Sequence[int], step: Step, pass_number: int) -> dict[int, Flat]:
        """What lanes update of `units`, none of them pending any more, is given to the lanes."""
        self.wait(units)
        runner, found = self._runner, dict[int, Flat]()
        for unit in units:
            found[unit] = self.flat(unit, step)
            if not runner.device.is_host:  # For what the user's stream has still to do with them.
                (task,) = runner.start(runner.moves(collect, unit, -1), pass_number)
                runner.begin(task)
                runner.finish(task)
        return found

    def start(self, prepared: Mapping[int, Flat], step: Step, tasks: Mapping[int, Task]) -> None:
        """The updates are queued as `tasks`: from here on the units are pending."""
        for unit, flat in prepared.items():
            mine = [self._units[unit].parameters[index] for index in step[unit]]
            self._pending[unit] = PendingUnit(mine, flat, tasks[unit])
            for parameter in mine:
                parameter._offload_wait = partial(self._touched, unit)  # type: ignore[attr-defined]
                parameter.__class__ = PendingParameter  # type: ignore[assignment]

    def wait(self, units: Iterable[int] | None = None) -> None:
        """Wait for those of `units`, or of all, that are pending, and let them be plain again."""
        if not self._pending:
            return
        with self._lock:
            for unit in list(self._pending) if units is None else units:
                if (one := self._pending.get(unit)) is None:
                    continue
                self._check()
                self._runner.wait([one.task])
                for parameter in one.parameters:
                    parameter.__class__ = nn.Parameter
                    vars(parameter).pop("_offload_wait", None)
                self._pending.pop(unit, None)

    @entry
    def _touched(self, unit: int) -> None:
        self.wait([unit])

    def called(self, unit: int) -> Callable[..., None]:
        """The hook of a module that uses a unit: costs little where nothing is pending."""

        def hook(*_: Any) -> None:
            if unit in self._pending:
                self._touched(unit)

        return uncompiled(hook)


class PendingParameter(AttachedParameter):
    """A parameter whose update is under way: any use of it waits for that."""

    __torch_function__: Any = classmethod(trap)

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Wait, and let torch answer; but to what does not change with the update at once."""
        if func in (_T.grad.__set__, _T.grad.__delete__):
            with no_trap():
                return func(*args, **kwargs)
        for parameter in list(find((args, kwargs), PendingParameter)):
            # Another thread may have waited meanwhile.
            vars(parameter).get("_offload_wait", lambda: None)()
        return func(*args, **kwargs)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()


def _check_form(
    unit: FlatUnit, index: int, device: Device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse a parameter, or a gradient (of `dtypes`, too), that its states are not for."""
    one, parameter = unit.spec.parameters[index], unit.parameters[index]
    form = (tuple(parameter.shape), parameter.dtype, parameter.device)
    attached = (one.shape, getattr(torch, one.dtype), device.torch_device)
    if form != attached or not parameter.is_contiguous():
        raise RuntimeError(
            f"{one.name} is {form} with strides {parameter.stride()} now, but its states are for "
            f"{attached}, contiguous: resize, convert or move the model before attach"
        )
    require_fitting(one, _gradient(parameter), dtypes)
