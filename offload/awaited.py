"""Residents whose states live elsewhere: lanes update them, and who uses them first waits.

[Note: Awaited]
Of a resident whose states are on the device the user's stream takes the step. With its states in
cpu memory or on nvme, lanes do: chunk by chunk the gradient and the weight go to where the record
is updated, and the weight comes back into the memory that is the parameter's. Its states are:

    PLAIN --step() has queued its update--> AWAITED --met--> PLAIN

It is met where its modules are called, a parameter is touched, the next step or a look at all
states begins. Whoever meets it waits for its weights. Awaited, its parameters are of class
`AwaitedParameter` over the stand-in that parameters at rest show, so that nothing sees an old
value, and a hook on each of its modules meets it before code that no trap reaches reads the weights
(kernels of other extensions). Met, all that is taken off again: so the first use after a step pays
for the step, and every pass beyond it is torch's own.

`step()` itself waits instead where that is not safe:
* Somebody has a view of the weight or of the gradient, or holds the gradient itself: it would
  change, or could be changed, under the lanes.
* `torch.compile` has compiled anything: what it makes looks neither at hooks nor, for long, at the
  class of what it has seen once. Where it begins to, all that is awaited is met before.
* Another thread may be inside a function of torch's, see `bystanders`: come there while the class
  was torch's, it would read the stand-in. So first the class is changed, then it is asked who holds
  what and who is where, and only then the memory is taken away.

Whoever meets a unit has the engine's lock, as `step()` has.

[Note: Gradients meanwhile]
The gradient belongs to the lanes until they have read it. It is taken from the parameter at
`step()` and given back when the unit is met, unless it was given up. `p.grad` asked for before that
is a copy, and stays what is asked for. A backward may come before, of a graph that was there and
needs no weights: the first gradient that it brings meets the unit, and is added as torch does.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from offload.binding import BoundUnit, make_plain
from offload.bystanders import any_in_torch
from offload.carrier import Carrier
from offload.executor import Executor
from offload.frozen import Frozen
from offload.holders import holders, idle_parameter, is_torchs
from offload.inert import InertInCopies
from offload.interrupt import whole, wholly
from offload.resting import RestingParameter, find
from offload.task import Task

_T: Any = torch.Tensor
_convert: Any = torch._dynamo.convert_frame
_compilations: Any = torch._dynamo.callback.callback_handler


class Owner(Protocol):
    """Whose residents they are; the engine."""

    lock: threading.RLock
    """Another one in a forked child."""

    def check(self) -> None:
        """Raise unless the engine can be used."""


class Awaited:
    """The residents of an engine that lanes update."""

    def __init__(self, executor: Executor, units: Iterable[BoundUnit], owner: Owner):
        """Of all residents of `owner`."""
        self._executor = executor
        home = executor.plan.home
        self._units = {
            bound.index: bound
            for bound in units
            if bound.spec.trainable and home("state", bound.index).tier != "device"
        }
        self._away: dict[int, Away] = {}
        self.owner = owner
        if self._units:
            _everyone.add(self)

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    def depart(self, units: Sequence[int], frozen: Frozen) -> dict[int, Away]:
        """Before the updates of `units` are queued: what carries their values to the lanes.

        The memory is that which the parameters have now, whatever they are given later.
        """
        device = self._executor.device
        if units and _compiling not in _compilations.start_callbacks:
            _compilations.register_start_callback(_compiling)
        idle, found = holders(idle_parameter()), dict[int, Away]()
        for unit in units:
            self.meet([unit])
            found[unit] = Away(self, self._executor, self._units[unit], sorted(frozen[unit]))
            self._away[unit] = found[unit]
        safe = not _convert.FRAME_COUNTER and not any_in_torch()
        for away in found.values():
            away.carry(idle, safe)
        fence = None if device.is_host else device.fence(device.stream())
        for away in found.values():
            away.carrying.fence = fence
        return found

    def await_(self, departed: Mapping[int, Away]) -> None:
        """Their updates are queued: let them be awaited, or wait here where that is not safe."""
        for away in departed.values():
            if not away.held:
                away.begin()
        for unit, away in departed.items():
            if away.held:
                self._away.pop(unit, None)
                self._executor.lanes.wait(away.tasks)

    def stay(self, departed: Iterable[int]) -> None:
        """Their updates could not be queued: let those that nobody awaits yet be plain."""
        for unit in departed:
            if unit in self._away and not self._away[unit].begun:
                self._away.pop(unit).stay()

    def meet(self, units: Iterable[int] | None = None) -> None:
        """Wait for those of `units`, or of all, that are awaited, and let them be plain again.

        Raises:
            EngineError: a lane failed, or the engine was closed.
        """
        if not self._units:
            return
        with self.owner.lock:
            for unit in list(self._away) if units is None else units:
                away = self._away.get(unit)
                if away is not None:
                    self.owner.check()
                    away.meet()
                    self._away.pop(unit, None)

    def meets(self, unit: int) -> Callable[..., None]:
        """What waits for a unit, called from outside."""
        return whole(lambda: self.meet([unit]))


class Away:
    """A unit whose update is under way."""

    def __init__(
        self, awaited: Awaited, executor: Executor, bound: BoundUnit, indices: Sequence[int]
    ):
        """With the parameters at `indices`, of which torch tells the trap from here on."""
        self._executor = executor
        self._bound = bound
        self.owner, self.arrive = awaited.owner, awaited.meets(bound.index)
        self._parameters = {index: bound.parameters[index] for index in indices}
        self._owed: dict[int, torch.Tensor] = {}
        """By parameter, the gradient that it gets back."""
        self._weights: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self.begun = self.over = False
        self.tasks: list[Task] = []
        """What brings the weights back."""
        self.held = any(type(p) is not nn.Parameter for p in self._parameters.values())
        """Whether `step()` waits: somebody else has, or could have, memory of a weight or gradient,
        or could not be told apart."""
        if not self.held:
            for index, parameter in self._parameters.items():
                parameter._offload_home = Seat(self, index)  # type: ignore[attr-defined]
                parameter.__class__ = AwaitedParameter

    def carry(self, idle: tuple[int, int, int, int], safe: bool) -> None:
        """Look who has what, and let the values be carried.

        Args:
            idle: how often nobody else holds one.
            safe: whether nobody else can be about to.
        """
        with torch._C.DisableTorchFunctionSubclass():
            mine = self._parameters
            if not safe or any(holders(p) != idle or not is_torchs(p) for p in mine.values()):
                self.stay()
            self._weights = {index: p.data for index, p in mine.items()}
            self.carrying = Carrier(
                self._executor,
                weight={i: p.detach().view(-1) for i, p in mine.items()},
                gradient={i: _gradient(p).reshape(-1) for i, p in mine.items()},
            )

    def stay(self) -> None:
        """Let the parameters be torch's own, as they are, and `step()` wait."""
        for parameter in self._parameters.values():
            if type(parameter) is AwaitedParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
                vars(parameter).pop("_offload_home", None)
        self.held = self.over = True

    def queued(self, tasks: Sequence[Task]) -> None:
        """Tasks of a chunk were issued: who meets the unit waits for those that bring weights."""
        place = self._executor.plan.home("weight", self._bound.index)
        self.tasks += [t for t in tasks if any(use.place == place for use in t.op.writes)]

    def begin(self) -> None:
        """Let the parameters be awaited, and the gradients be the lanes'."""
        self.begun = True
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in self._parameters.items():
                gradient = parameter.grad
                assert gradient is not None
                self._owed[index] = gradient
                parameter.grad = None
                parameter.data = self._bound.dummies[index]
                if parameter.requires_grad:
                    self._hooks.append(_T.register_hook(parameter, _comes(weakref.ref(self))))
        for ref in self._bound.modules:
            module = ref()
            if module is not None:
                self._hooks.append(module.register_forward_pre_hook(_Announced(self)))

    def meet(self) -> None:
        """Wait for the weights and let the parameters be plain."""
        if not self.begun:  # A finalizer, in the middle of the step.
            self.stay()
            return
        self._executor.lanes.wait(self.tasks)
        for hook in self._hooks:
            hook.remove()
        for index, parameter in self._parameters.items():
            make_plain(parameter, self._weights[index])
            if not parameter._backward_hooks:  # An empty one is asked in every backward.
                parameter._backward_hooks = None
            if index in self._owed:
                parameter.grad = self._owed.pop(index)
        self.over = True
        self._weights.clear()

    def gradient(self, index: int) -> torch.Tensor | None:
        """What `p.grad` is, before the unit is met."""
        with torch._C.DisableTorchFunctionSubclass():
            parameter, owed = self._parameters[index], self._owed.get(index)
            if owed is not None:
                with torch.no_grad(), torch.inference_mode(False):
                    parameter.grad = owed.clone()
                del self._owed[index]  # Last: where there is no memory, it is still owed.
            return parameter.grad

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Assign `p.grad`, before the unit is met."""
        with torch._C.DisableTorchFunctionSubclass():
            self._parameters[index].grad = gradient  # Which raises where it does not fit.
            self._owed.pop(index, None)


class Seat:
    """The place of one parameter of a unit that is awaited."""

    def __init__(self, away: Away, index: int):
        """Of the parameter at `index` of its unit."""
        self.away, self.index = away, index


class AwaitedParameter(RestingParameter):
    """A parameter whose update is under way, see [Note: Awaited]. Any use of it waits for that."""

    _offload_home: Seat  # type: ignore[assignment]

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer, or wait and let torch answer."""
        handler = _HANDLERS.get(func)
        if handler is not None and (seat := _seat(args[0])) is not None:
            return wholly(_asked, seat, func, handler, args, kwargs)
        for parameter in list(find((args, kwargs), AwaitedParameter)):
            _meet(parameter)
        return func(*args, **kwargs)

    @classmethod
    def _renewed(cls, parameter: RestingParameter) -> nn.Parameter:
        """As it is of a parameter of torch's."""
        assert isinstance(parameter, AwaitedParameter)
        return _T._make_subclass(nn.Parameter, _meet(parameter))  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return copy.deepcopy(_meet(self), memo)

    def __copy__(self) -> nn.Parameter:
        return copy.copy(_meet(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        met: Any = _meet(self)
        return met.__reduce_ex__(protocol)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Torch's own, which it does not send to the trap."""
        return _meet(self).set_(*args, **kwargs)

    def _use_count(self) -> int:
        """Torch's own, likewise."""
        return _meet(self)._use_count()  # type: ignore[attr-defined,no-any-return]

    @property
    def grad_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Torch's own, likewise."""
        return _meet(self).grad_dtype  # type: ignore[attr-defined,no-any-return]

    @grad_dtype.setter
    def grad_dtype(self, wanted: torch.dtype | None) -> None:
        _meet(self).grad_dtype = wanted  # type: ignore[attr-defined]


def _seat(parameter: nn.Parameter) -> Seat | None:
    """The place of a parameter; None where another thread has met it meanwhile."""
    home = vars(parameter).get("_offload_home")
    return home if isinstance(home, Seat) else None


def _meet(parameter: AwaitedParameter) -> nn.Parameter:
    """The parameter, once it is plain."""
    seat = _seat(parameter)
    if seat is not None:
        seat.away.arrive()
    return parameter


def _asked(
    seat: Seat, func: Callable[..., Any], handler: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What `handler` has to say; or `func`, where another thread has met the parameter."""
    with seat.away.owner.lock:
        if seat.away.begun and not seat.away.over:
            return handler(seat, *args[1:], **kwargs)
        seat.away.arrive()
        return func(*args, **kwargs)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: lambda seat, *_: seat.away.gradient(seat.index),
    _T.grad.__set__: lambda seat, value: seat.away.set_gradient(seat.index, value),
    _T.grad.__delete__: lambda seat: seat.away.set_gradient(seat.index, None),
}
"""What needs no wait, by the place of the parameter."""


class _Announced(InertInCopies):
    """The hook of a module that uses a unit that is awaited."""

    def __init__(self, away: Away):
        self._away = away

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        self._away.arrive()


def _comes(ref: Callable[[], Away | None]) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter that is awaited; torch hides what it holds from the collector."""

    def meet(_: torch.Tensor) -> None:
        away = ref()
        if away is not None:
            away.arrive()

    return meet


_everyone: weakref.WeakSet[Awaited] = weakref.WeakSet()
"""Of all engines."""


def _compiling(_: object) -> None:
    """Torch is about to compile something: what it looks at is plain."""
    for awaited in list(_everyone):
        with suppress(Exception):  # One that failed, or was closed, may have nothing to do with it.
            wholly(awaited.meet)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()
