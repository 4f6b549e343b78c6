"""Updates of resident units whose states live elsewhere: lanes do them, and the first use waits.

[Note: Pending updates]
Of a resident whose states are on the device the user's stream takes the step. With its states in
cpu memory or on nvme, lanes do: chunk by chunk the gradient and the weight go to where the record
is updated, and the weight comes back into the memory that is the parameter's. `step()` returns at
once, and the unit is pending: its parameters are of class `PendingParameter`, over the memory that
is being updated. Any touch, and a hook on each module that uses the unit, waits for its weights and
makes the parameters plain again. So the first use after a step pays for the step, and every later
pass is torch's own. An alias of such a weight from before `step()` shows the update when it lands.

The gradient is taken from the parameter at `step()` and given back when the unit was waited for,
unless it was given up meanwhile.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offload.model.early_updates import Step
from offload.model.parameter import TRUE_AT_REST, find
from offload.model.units import FlatUnit
from offload.program.compile import collect
from offload.runtime.entry import entry, uncompiled
from offload.runtime.runner import Runner, Task
from offload.runtime.torch_internals import no_trap
from offload.runtime.works import Flat

_T: Any = torch.Tensor


class Owner(Protocol):
    """Whose residents they are; the engine."""

    lock: threading.RLock

    def check(self) -> None:
        """Raise unless the engine can be used."""


class PendingUpdates:
    """The resident units of an engine that lanes update."""

    def __init__(self, runner: Runner, units: Iterable[FlatUnit], owner: Owner):
        """None is pending; `units` are all residents."""
        self._runner = runner
        self._owner = owner
        home = runner.plan.home
        self.units = {
            unit.index: unit
            for unit in units
            if unit.spec.trainable and home("state", unit.index).tier != "device"
        }
        self._pending: dict[int, PendingUnit] = {}

    def prepare(self, units: Sequence[int], step: Step) -> dict[int, PendingUnit]:
        """Before the updates of `units` are queued: they are waited for where they are pending."""
        self.wait(units)
        return {
            unit: PendingUnit(self, self._runner, self.units[unit], sorted(step[unit]))
            for unit in units
        }

    def hand_over(self, units: Iterable[int], pass_number: int) -> None:
        """Let lanes wait for what the user's stream has still to do with values of `units`."""
        runner = self._runner
        for unit in () if runner.device.is_host else units:
            (task,) = runner.start(runner.moves(collect, unit, -1), pass_number)
            runner.begin(task)
            runner.finish(task)

    def start(self, prepared: Mapping[int, PendingUnit]) -> None:
        """The updates are queued: from here on the units are pending."""
        for unit, one in prepared.items():
            self._pending[unit] = one
            one.start()

    def wait(self, units: Iterable[int] | None = None) -> None:
        """Wait for those of `units`, or of all, that are pending, and let them be plain again.

        Raises:
            EngineError: a lane failed, or the engine was closed.
        """
        if not self._pending:
            return
        with self._owner.lock:
            for unit in list(self._pending) if units is None else units:
                if (one := self._pending.get(unit)) is not None:
                    self._owner.check()
                    one.finish()
                    self._pending.pop(unit, None)

    @entry
    def touched(self, unit: int) -> None:
        """A parameter of a unit is used: wait for it."""
        self.wait([unit])

    def called(self, unit: int) -> Callable[..., None]:
        """The hook of a module that uses a unit: costs little where nothing is pending."""

        def hook(*_: Any) -> None:
            if unit in self._pending:
                self.touched(unit)

        return uncompiled(hook)


class PendingUnit:
    """One unit whose update is under way."""

    def __init__(
        self, updates: PendingUpdates, runner: Runner, unit: FlatUnit, indices: Sequence[int]
    ):
        """With the parameters at `indices`, whose memory is that of now."""
        self.updates, self.index = updates, unit.index
        self._runner = runner
        self._parameters = {index: unit.parameters[index] for index in indices}
        self._owed: dict[int, torch.Tensor] = {}
        """By parameter, the gradient that it gets back."""
        self.task: Task
        """The update, once it is queued."""
        self.flat = in_torch(self._parameters)
        self.addresses = tuple(x.data_ptr() for kind in self.flat.values() for x in kind.values())
        """Where these are: torch may give the same memory in each step."""

    def start(self) -> None:
        """Let the parameters be pending, and the gradients be the lanes'."""
        for index, parameter in self._parameters.items():
            self._owed[index] = _gradient(parameter)
            parameter.grad = None
            parameter._offload_pending = (self, index)  # type: ignore[attr-defined]
            parameter.__class__ = PendingParameter  # type: ignore[assignment]

    def finish(self) -> None:
        """Wait for the weights and let the parameters be plain."""
        self._runner.wait([self.task])
        with no_trap(), torch.no_grad():
            for index, parameter in self._parameters.items():
                if (owed := self._owed.pop(index, None)) is not None:
                    if parameter.grad is not None:  # Of a backward since, over an earlier graph.
                        owed.add_(parameter.grad)
                    parameter.grad = owed
                parameter.__class__ = nn.Parameter
                vars(parameter).pop("_offload_pending", None)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Assign `p.grad` of a pending parameter: what it had is given up, without a wait."""
        with no_trap():
            self._parameters[index].grad = gradient  # Raises where it does not fit.
            self._owed.pop(index, None)


class PendingParameter(nn.Parameter):
    """A parameter whose update is under way: any use of it waits for that."""

    _offload_pending: tuple[PendingUnit, int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what no update changes; else wait, and let torch answer."""
        kwargs = kwargs or {}
        if func in TRUE_AT_REST:
            with no_trap():
                return func(*args, **kwargs)
        if func in (_T.grad.__set__, _T.grad.__delete__) and (place := _place(args[0])):
            place[0].set_gradient(place[1], args[1] if len(args) > 1 else None)
            return None
        for parameter in list(find((args, kwargs), PendingParameter)):
            _wait(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(_wait(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        waited: Any = _wait(self)
        return waited.__reduce_ex__(protocol)


def _place(parameter: nn.Parameter) -> tuple[PendingUnit, int] | None:
    """The unit and index of a pending parameter; None where another thread has waited meanwhile."""
    return vars(parameter).get("_offload_pending")


def _wait(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, once it is plain."""
    if (place := _place(parameter)) is not None:
        place[0].updates.touched(place[0].index)
    return parameter


def in_torch(parameters: Mapping[int, nn.Parameter]) -> Flat:
    """The weights and gradients of parameters, flat, in torch's memory."""
    gradients = {index: _gradient(one) for index, one in parameters.items()}
    return {
        "weight": {index: one.detach().view(-1) for index, one in parameters.items()},
        "gradient": {index: one.detach().contiguous().view(-1) for index, one in gradients.items()},
    }


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient
