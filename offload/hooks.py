"""The hooks on a model: they tell the engine which unit is about to be used, and has been."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, ValuesView
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aside import NO_RECORDING, aside, left_alone, refuse_transforms, traced, usual
from offload.binding import BoundUnit
from offload.collector import Collecting, let_wait, take_gradient
from offload.engine import Engine
from offload.fast_path import encoders
from offload.guard import SavingGuard
from offload.inert import InertInCopies
from offload.interrupt import whole_parts
from offload.marks import Marks
from offload.outputs import replaced, tensors_in
from offload.passes import in_backward
from offload.served import ServedParameter
from offload.structure import Structure


class _Running(NamedTuple):
    """A module whose forward runs."""

    module: nn.Module
    guard: SavingGuard
    began: int
    """The number that autograd gave to the first operation of that forward."""
    given: tuple[Any, ...]
    """In a recompute, what made the arguments: the forward's thread has other numbers."""
    thread: int

    def maker(self, tensor: torch.Tensor) -> Any:
        """What made `tensor`, of the output, if that was in the module's forward, else None.

        What a module only passes on (T5's position bias) is another's, and comes in the middle of
        that one's backward: to bring this one into use then would take its weights from under it.
        """
        maker = tensor.grad_fn
        if maker is None or (self.given and any(maker is one for one in self.given)):
            return None
        return maker if maker._sequence_nr() >= self.began else None


class Hooks:
    """All hooks of one engine on one model."""

    def __init__(self, engine: Engine, model: nn.Module):
        """Of `engine`, for `model`; `put_on` puts them there."""
        self._engine = engine
        self._running: list[_Running] = []
        """The outermost first."""
        self._announces = self._in_forward = False
        self._handles: list[Any] = []
        call, *first = whole_parts(self._before_backward)
        self._announce = [
            partial(call, *first, unit) if unit.spec.backward else None for unit in engine.units
        ]
        """By unit, what a gradient that reaches its output calls, if its backward needs weights."""
        self.structure = Structure(model, engine)
        lanes = engine.executor.lanes
        self._marks = Marks(lanes.note) if lanes.ledger.trace and engine.plan.residents else None

    def put_on(
        self, model: nn.Module, announcers: Mapping[nn.Module, Sequence[int]], *, trains: bool
    ) -> None:
        """Hook `model`; `announcers` maps modules to the units whose use their call announces."""
        engine, keep = self._engine, self._handles.append
        self._announces = bool(announcers)
        self.structure.watch()
        enter = _hook(self._enter_root, refuses=self._announces)
        keep(model.register_forward_pre_hook(enter, prepend=True))
        for module, used in announcers.items():
            units = tuple(engine.units[unit] for unit in used)
            before = _hook(self._before_forward, units, refuses=True)
            after = _hook(self._after_forward, units, [0, 0])
            keep(module.register_forward_pre_hook(before, with_kwargs=True))
            keep(module.register_forward_hook(after, always_call=True))
        keep(model.register_forward_hook(_hook(self._leave_root), always_call=True))
        if any(unit.index in engine.residents.awaited for unit in engine.units):
            for encoder in encoders(model):
                keep(encoder.register_forward_pre_hook(_hook(self._meet)))
        streamed = {
            p for u in engine.units if u.index not in engine.residents for p in u.parameters
        }
        for module in model.modules():
            if module is model or any(p in streamed for p in module._parameters.values()):
                before_load: Any = module.register_load_state_dict_pre_hook
                keep(before_load(_refuse_assign))
        lets_wait = left_alone(_gradient_made)
        for unit in engine.units:
            if trains and unit.index in engine.residents:
                continue
            collecting = engine.collector.units[unit.index]
            waits = trains and collecting.waits and not engine.finality.begins_early
            for index, parameter in enumerate(unit.parameters):
                if unit.spec.parameters[index].trainable or (
                    parameter.requires_grad and not trains
                ):
                    # Torch hides what such a hook holds from the garbage collector.
                    ref = weakref.ref(engine)
                    place = (ref, trains, unit.index, index)
                    collect = _hook(_collect, *place)
                    if waits:
                        collect = Hook(lets_wait, collect, engine.backwards, collecting, index)
                    register: Any = parameter.register_post_accumulate_grad_hook
                    with torch._C.DisableTorchFunctionSubclass():
                        keep(register(collect))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.structure.release()
        self._drop_guards()

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        if self._announces and traced() is not None:
            refuse_transforms(_CALLED)
        with self._engine.lock:
            self._engine.check()
            if not in_backward():
                self._begin_forward()

    def _meet(self, module: nn.Module, args: Any) -> None:
        """See [Note: Fast path]."""
        self._engine.residents.awaited.meet()

    def _begin_forward(self) -> None:
        self._engine.refuse_elsewhere()
        self._drop_guards()
        self._in_forward = True
        self._engine.open_forward()
        self._engine.calls.begin()
        self._engine.casts.begin()
        if self._marks is not None:
            self._marks.forward_begins()

    def _drop_guards(self) -> None:
        """A forward that Ctrl-C ended, also one inside backward, has skipped its post-hooks."""
        left, self._running = self._running, []
        SavingGuard.drop_left([one.guard for one in left])

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        with self._engine.lock:
            if self._in_forward and not in_backward() and not self._engine.calls.elsewhere:
                self._in_forward = False
                # Torch calls this for an exception, too, while it handles it.
                self._engine.end_pass(finished=output is not None or sys.exc_info()[0] is None)
                if self._marks is not None and output is not None:
                    self._marks.forward_ends(output)

    def _before_forward(
        self, used: tuple[BoundUnit, ...], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        if traced() is not None:
            refuse_transforms(_CALLED)
        engine, inside = self._engine, _graph() >= 0
        with engine.lock:
            engine.check()
            if not (inside or engine.calls.under_way):
                engine.refuse_elsewhere()
                if engine.calls.broken_off:
                    self._in_forward = False
                    self._drop_guards()
                    engine.end_abandoned()
                engine.calls.begin()
            for bound in used:
                engine.enter(bound, inside=inside)
                if _autocasts():
                    engine.casts.use(bound.index)
            guard = SavingGuard(engine.in_use, used, inside)
            given = _makers((args, kwargs)) if inside else ()
            run = module, guard, _sequence_number(), given, get_ident()
            self._running.append(tuple.__new__(_Running, run))  # As _Running() ends, too.

    def _after_forward(
        self,
        used: tuple[BoundUnit, ...],
        looks: list[int],
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> Any:
        """`looks` counts in how many forwards, in evaluation and training, it was looked at."""
        engine = self._engine
        with engine.lock:
            if not self._running or self._running[-1].module is not module:
                return None  # Its pre-hook was not reached: another hook raised before.
            if output is None and self._running[-1].thread != get_ident():
                return None  # Refused to this thread, and under way in another one.
            run = self._running.pop()
            run.guard.close()  # First, as what comes then may raise, and nobody else would.
            # An output that is a view of a weight must outlive the slot.
            single = type(output) is torch.Tensor
            keep = engine.outliving
            output = keep(output) if single else replaced(output, keep)
            if looks[module.training] < _LOOKS_MAX:
                looks[module.training] += 1
                _check_stashed(module, engine)
            if torch.is_grad_enabled():
                self._announce_backward((output,) if single else tensors_in(output), run, used)
            last = not self._running and not self._in_forward
            if last:
                engine.calls.end()
            engine.in_use.leave(used)
            if last and _graph() < 0:  # Nothing tells of the end of such a pass.
                engine.in_use.release_lasting()
            return output

    def _announce_backward(
        self, output: Iterable[torch.Tensor], run: _Running, used: tuple[BoundUnit, ...]
    ) -> None:
        """Let gradients that reach the output of a module tell that its units' backward is next."""
        for tensor in output:
            if (maker := run.maker(tensor)) is not None:
                for bound in used:
                    if (backward := self._announce[bound.index]) is not None:
                        _announce(tensor, maker, _Announcement(backward, run.began))

    def _before_backward(self, bound: BoundUnit, began: int, gradient: torch.Tensor) -> None:
        """A gradient has reached the output of a unit: its backward is next."""
        if torch.is_grad_enabled():
            _refuse_create_graph()
        with self._engine.lock:
            self._engine.hold(bound, began)


_CALLED = "an offloaded module was called"

_autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]


_LOOKS_MAX = 2
"""Forwards of a module, in either mode, that are followed by a look for stashed views: what a
module stashes, it stashes in its first ones. Looking takes as long as a pass may cost in all."""


def _check_stashed(module: nn.Module, engine: Engine) -> None:
    """Refuse views of weights in use that `module` has put away for later.

    Raises:
        RuntimeError: there is one.
    """
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            held = value.values() if type(value) is dict else value
            for one in held if isinstance(held, (list, tuple, ValuesView)) else (value,):
                if type(one) is torch.Tensor and engine.in_use.handle_of(one) is not None:
                    where = f"{type(module).__name__}.{path}.{name}".replace("..", ".")
                    raise RuntimeError(
                        f"{where} was set, in the module's own forward, to a view of an offloaded "
                        "weight, which would show the values of another one later: keep it in a "
                        "local variable, take it from the parameter where it is used, or clone() it"
                    )


def _makers(arguments: Any) -> tuple[Any, ...]:
    return tuple(one.grad_fn for one in tensors_in(arguments))


class _Announcement(partial[Any]):
    """What a gradient calls that reaches an output; no loss for who saves that to a file."""

    __torch_unserializable__ = True  # Asked by torch, which else warns.


def _announce(made: Any, maker: Any, backward: Callable[..., Any]) -> None:
    """What `register_hook` does, which makes a handle besides, where the tensor has no hook yet."""
    if made._backward_hooks is not None:
        made.register_hook(backward)
        return
    made._backward_hooks = hooks = OrderedDict()
    maker._register_hook_dict(made)
    hooks[_announce] = backward  # The keys of others are numbers.


_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that autograd gives to the next operation of this thread."""


@left_alone
def _called(*_: object) -> None:
    """What torch.compile takes a hook to call: what it does call is no function of Python's."""


class Hook(InertInCopies, partial[Any]):
    """A hook that torch.compile leaves alone.

    It is called without a frame of its own.
    """

    func = staticmethod(_called)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Functions have a name, and torch.jit.script asks for it."""
        raise AttributeError(
            f"a hook of offload has no {name}: likely torch.jit.script() was called on an attached "
            f"model, {NO_RECORDING}"
        )


def _hook(function: Callable[..., Any], *args: Any, refuses: bool = False) -> Hook:
    """Call `function` with these and what it is called with, whole; it `refuses` `torch.func`."""

    @left_alone
    def otherwise(*args: Any) -> Any:
        if refuses:
            refuse_transforms(_CALLED)
        return apart(*args)

    apart = aside(function)
    return Hook(*whole_parts(function, otherwise), *args)


def _gradient_made(
    collect: Hook,
    backwards: Container[int],
    collecting: Collecting,
    index: int,
    parameter: nn.Parameter,
) -> None:
    """See [Note: Gradients that wait]; `backwards` are those that the engine knows of."""
    plain = type(parameter) is ServedParameter and usual() and not torch.is_grad_enabled()
    if not (plain and _graph() in backwards and let_wait(collecting, index, parameter)):
        collect(parameter)


_graph: Callable[[], int] = torch._C._current_graph_task_id


def _collect(
    ref: Callable[[], Engine | None],
    trains: bool,
    unit: int,
    index: int,
    parameter: nn.Parameter,
) -> None:
    engine = ref()
    gradient = None if engine is None else take_gradient(parameter)
    if engine is None or gradient is None:
        return
    if not trains:
        raise RuntimeError(
            "backward() on a model attached without an optimizer: its gradients have no home; "
            "attach it with its optimizer, or run it under torch.no_grad()"
        )
    if torch.is_grad_enabled():
        _refuse_create_graph()
    with engine.lock:
        engine.collect(unit, index, gradient)


def _refuse_create_graph() -> None:
    """Torch runs a backward with gradients enabled when, and only when, it builds a graph of it.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "create_graph=True needs all weights until the second backward, and offloaded ones move: "
        "compute higher derivatives on a model that is not attached"
    )


def _refuse_assign(
    module: nn.Module, state_dict: object, prefix: str, metadata: Mapping[str, Any], *_: object
) -> None:
    """Before a module loads: assigned parameters would be others than those attached.

    Raises:
        ValueError: it was asked to assign.
    """
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would put other parameters in the place of the offloaded "
            "ones: load with assign=False, which copies the values"
        )
