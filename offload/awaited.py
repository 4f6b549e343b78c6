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

[Note: Gradients meanwhile]
The gradient belongs to the lanes until they have read it. It is taken from the parameter at
`step()` and given back when the unit is met, unless it was given up. `p.grad` asked for before that
is a copy, and stays what is asked for. A backward may come before, of a graph that was there and
needs no weights: the first gradient that it brings meets the unit, and is added as torch does.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from offload.binding import BoundUnit, make_plain
from offload.executor import BytesOf, Executor
from offload.exposure import use_count
from offload.frozen import Frozen
from offload.inert import InertInCopies
from offload.interrupt import whole
from offload.program import Op, Verb
from offload.resting import RestingParameter, find
from offload.task import Fence, Run, Task

_T: Any = torch.Tensor
_convert: Any = torch._dynamo.convert_frame
_compilations: Any = torch._dynamo.callback.callback_handler


class Awaited:
    """The residents of an engine that lanes update."""

    def __init__(self, executor: Executor, units: Iterable[BoundUnit], check: Callable[[], None]):
        """Of all residents; `check` raises unless the engine can be used."""
        self._executor = executor
        home = executor.plan.home
        self._units = {
            bound.index: bound
            for bound in units
            if bound.spec.trainable and home("state", bound.index).tier != "device"
        }
        self._away: dict[int, Away] = {}
        self._check = check
        if self._units:
            _everyone.add(self)

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    def depart(self, units: Sequence[int], frozen: Frozen) -> dict[int, Away]:
        """Before the updates of `units` are queued: what carries their values to the lanes.

        The memory is that which the parameters have now, whatever they are given later.
        """
        device = self._executor.device
        idle, found = holders(idle_parameter()), {}
        for unit in units:
            self.meet([unit])
            found[unit] = Away(self._executor, self._units[unit], sorted(frozen[unit]), idle)
        fence = None if device.is_host else device.fence(device.stream())
        for away in found.values():
            away.carrying.fence = fence
        return found

    def await_(self, departed: Mapping[int, Away]) -> None:
        """Their updates are queued: let them be awaited, or wait here where that is not safe."""
        if departed and _compiling not in _compilations.start_callbacks:
            _compilations.register_start_callback(_compiling)
        for unit, away in departed.items():
            if not away.held and not _convert.FRAME_COUNTER:
                self._away[unit] = away
                away.begin(self)
        for unit, away in departed.items():
            if unit not in self._away:
                self._executor.lanes.wait(away.tasks)

    def meet(self, units: Iterable[int] | None = None) -> None:
        """Wait for those of `units`, or of all, that are awaited, and let them be plain again.

        Raises:
            EngineError: a lane failed, or the engine was closed.
        """
        for unit in list(self._away) if units is None else units:
            away = self._away.get(unit)
            if away is not None:
                self._check()
                away.meet()
                self._away.pop(unit, None)

    def meets(self, unit: int) -> Callable[..., None]:
        """What waits for a unit, called from outside."""
        return whole(lambda: self.meet([unit]))


class Away:
    """A unit whose update is under way."""

    def __init__(
        self,
        executor: Executor,
        bound: BoundUnit,
        indices: Sequence[int],
        idle: tuple[int, int, int, int],
    ):
        """With the parameters at `indices`; `idle` says how often nobody else holds one."""
        self._executor = executor
        self._bound = bound
        self._lock = threading.RLock()
        self._parameters = {index: bound.parameters[index] for index in indices}
        self.held = any(
            type(p) is not nn.Parameter or holders(p) != idle or not _is_torchs(p)
            for p in self._parameters.values()
        )
        """Whether somebody else has memory of a weight or gradient, or could not be told apart."""
        self._weights = {index: p.data for index, p in self._parameters.items()}
        self.carrying = _Carrier(
            executor,
            weight={i: p.detach().view(-1) for i, p in self._parameters.items()},
            gradient={i: _gradient(p).reshape(-1) for i, p in self._parameters.items()},
        )
        self._owed: dict[int, torch.Tensor] = {}
        """By parameter, the gradient that it gets back."""
        self._hooks: list[Any] = []
        self._over = False
        self.tasks: list[Task] = []
        """What brings the weights back."""

    def queued(self, tasks: Sequence[Task]) -> None:
        """Tasks of a chunk were issued: who meets the unit waits for those that bring weights."""
        place = self._executor.plan.home("weight", self._bound.index)
        self.tasks += [t for t in tasks if any(use.place == place for use in t.op.writes)]

    def begin(self, awaited: Awaited) -> None:
        """Let the parameters be awaited."""
        with self._lock:  # Who meets it on another thread waits.
            self._begin(awaited)

    def _begin(self, awaited: Awaited) -> None:
        unit = self._bound.index
        self.arrive = awaited.meets(unit)
        for index, parameter in self._parameters.items():
            gradient = parameter.grad
            assert gradient is not None
            self._owed[index] = gradient
            parameter.grad = None
            parameter._offload_home = Seat(self, index)  # type: ignore[attr-defined]
            with torch._C.DisableTorchFunctionSubclass():
                parameter.__class__ = AwaitedParameter  # First: another thread may look.
                parameter.data = self._bound.dummies[index]
            if parameter.requires_grad:
                self._hooks.append(_T.register_hook(parameter, _comes(weakref.ref(self))))
        for ref in self._bound.modules:
            module = ref()
            if module is not None:
                self._hooks.append(module.register_forward_pre_hook(_Announced(self)))

    def meet(self) -> None:
        """Wait for the weights and let the parameters be plain."""
        with self._lock:
            if self._over:
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
            self._over = True
            self._weights.clear()

    def gradient(self, index: int) -> torch.Tensor | None:
        """What `p.grad` is, before the unit is met."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            parameter, owed = self._parameters[index], self._owed.pop(index, None)
            if owed is not None:
                with torch.no_grad(), torch.inference_mode(False):
                    parameter.grad = owed.clone()
            return parameter.grad

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Assign `p.grad`, before the unit is met."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            self._parameters[index].grad = gradient  # Which raises where it does not fit.
            self._owed.pop(index, None)


class _Carrier:
    """Moves the values of a unit between torch's memory and the lanes; it knows no parameter.

    So nobody holds a model by what lanes have still to do for it.
    """

    def __init__(self, executor: Executor, **flat: dict[int, torch.Tensor]):
        """Of the weights and gradients in `flat`, by kind and parameter."""
        self._executor, self._flat = executor, flat
        self.fence: Fence | None = None
        """What the user's stream had still to do at `step()`."""

    def __call__(self, op: Op, bytes_of: BytesOf) -> Run | None:
        """What an op of a chunk does that moves a value from or to torch's memory; None of others.

        Of the parameters that do not take part, and between parameters, nothing is moved.
        """
        (kind, unit, chunk), plan = op.value, self._executor.plan
        if op.verb is not Verb.MOVE or plan.in_arena(kind, unit):
            return None
        home = plan.home(kind, unit)
        leaves = op.reads[0].place == home
        if not leaves and op.writes[0].place != home:
            return None
        flat, spec = self._flat[kind], plan.profile.units[unit]
        stage = op.writes[0] if leaves else op.reads[0]

        def run() -> Iterator[Fence | None]:
            yield self.fence
            inside = bytes_of(stage)
            for span in spec.chunks[chunk].spans:
                if span.parameter in flat:
                    lies = flat[span.parameter]
                    mine = lies[span.parameter_start : span.parameter_start + span.elements]
                    start = span.chunk_start * mine.itemsize
                    staged = inside[start : start + mine.nbytes].view(mine.dtype)
                    into, source = (staged, mine) if leaves else (mine, staged)
                    self._executor.device.copy(into, source)

        return run


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
        if handler is not None and isinstance(args[0], AwaitedParameter):
            return whole(handler)(args[0]._offload_home, *args[1:], **kwargs)
        for parameter in list(find((args, kwargs), AwaitedParameter)):
            _meet(parameter)
        if func is _T.detach and sys._getframe(2).f_code is nn.Parameter.__new__.__code__:
            return _T._make_subclass(nn.Parameter, args[0])  # As it is of a parameter of torch's.
        return func(*args, **kwargs)

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


def _meet(parameter: AwaitedParameter) -> nn.Parameter:
    """The parameter, once it is plain."""
    if type(parameter) is AwaitedParameter:
        parameter._offload_home.away.arrive()
    return parameter


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
            whole(awaited.meet)()


def holders(parameter: nn.Parameter) -> tuple[int, int, int, int]:
    """How many hold a parameter's memory, that of its gradient, and the gradient itself.

    That one in Python and, as another parameter may, in torch.
    """
    gradient: Any = parameter.grad
    if gradient is None:
        return use_count(parameter), 0, 0, 0
    held = sys.getrefcount(gradient), gradient._use_count()
    return use_count(parameter), use_count(gradient), *held


def _is_torchs(parameter: nn.Parameter) -> bool:
    """Whether torch made the memory of a parameter and its gradient, and no array of NumPy's."""
    both = [one for one in (parameter, parameter.grad) if one is not None]
    return all(one.untyped_storage().resizable() for one in both)


def idle_parameter() -> nn.Parameter:
    """One that nobody else has anything of."""
    with torch.inference_mode(False):
        made = nn.Parameter(torch.empty(1))
        made.grad = torch.empty(1)
    return made


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach()
