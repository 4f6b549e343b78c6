"""What code of the user's may bring inside a backward, of which autograd knows nothing before.

[Note: Reruns]
A reentrant checkpoint is an `autograd.Function` that runs modules without a graph, and runs them
again in its backward, inside a backward of its own. So the frames are searched for the function
that a module is called in, and only while forward-mode gradients are off: torch switches them off
in a function's forward, and `no_grad` leaves them on. Autograd tells whether the backward under way
will execute a function's node, and a hook on the node that it has. What is never backpropagated (an
evaluation, a loss thrown away) is in no backward, so it makes no difference.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge


class Reruns:
    """The functions in which units were called, which may call them again in backward."""

    def __init__(self) -> None:
        """Empty: `called` adds what it finds."""
        self.ended: Callable[[], object] = lambda: None
        """Called inside backward whenever one of them is over; set by the engine."""
        self._by_unit: dict[int, weakref.WeakSet[Any]] = {}
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        """In the backward under way."""
        self._over: weakref.WeakSet[Any] = weakref.WeakSet()
        """Functions of `_begun` that have ended."""

    def called(self, unit: int) -> None:
        """A unit is called in a forward."""
        if _forward_gradients():
            return
        for function in _in_forward():
            if function not in self._all:
                self._all.add(function)
                mine = weakref.ref(self), weakref.ref(function)
                function.register_prehook(partial(_begins, *mine))
                function.register_hook(partial(_is_over, *mine))
            self._by_unit.setdefault(unit, weakref.WeakSet()).add(function)

    def backward_began(self) -> None:
        """An outermost backward begins."""
        self._begun.clear()
        self._over.clear()

    def running(self, unit: int) -> bool:
        """Whether one of them runs."""
        functions = self._by_unit.get(unit, ())
        return any(one in self._begun and one not in self._over for one in functions)

    def pending(self, unit: int) -> bool:
        """Whether one of them has yet to run in the backward that asks, or runs."""
        functions = self._by_unit.get(unit, ())
        return any(one not in self._over and _will_execute(one) for one in functions)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward that asks has executed, or will, what puts a gradient on a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.requires_grad and _will_execute(get_gradient_edge(parameter).node)


def retains() -> bool:
    """Whether the backward that asks keeps its graph, for another one to follow."""
    return bool(_keeps_graph())


def may_be_recomputed() -> bool:
    """Whether what is saved now goes to hooks, which may run the forward again to have it."""
    return torch.is_grad_enabled() and _top_hooks(False) is not None


def _will_execute(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # A leaf that autograd.grad() asks for, of which it does not tell.
        return True


def _begins(ref: Callable[[], Reruns | None], function: Callable[[], object], *_: object) -> None:
    reruns, one = ref(), function()
    if reruns is not None and one is not None:
        reruns._begun.add(one)


def _is_over(ref: Callable[[], Reruns | None], function: Callable[[], object], *_: object) -> None:
    reruns, one = ref(), function()
    if reruns is not None and one is not None:
        reruns._over.add(one)
        reruns.ended()


def runs_inside() -> bool:
    """Whether the backward that asks was called inside another one, of which this thread knows."""
    return sum(frame.f_code is _RUN for frame in _frames()) > 1


def _in_forward() -> Iterator[Any]:
    """The functions whose forward runs on this thread, but of those written with `setup_context`,
    whose forward is not given its node."""
    forwards = _forwards.codes()
    for frame in _frames():
        if frame.f_code in forwards:  # Before Python 3.13 f_locals keeps all in it to the end.
            yield from (one for one in _given(frame) if isinstance(one, torch._C._FunctionBase))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Forwards:
    """The code of the forwards of all kinds of functions, as torch finds it."""

    def __init__(self) -> None:
        """Of none yet."""
        self._count = 0
        self._last: Callable[[], object] = lambda: None
        self._codes: frozenset[CodeType] = frozenset()

    def codes(self) -> frozenset[CodeType]:
        """All of it; looked at anew once there is another kind of function.

        Torch makes a class of each kind's nodes as it is defined; it is the last then.
        """
        nodes = BackwardCFunction.__subclasses__()
        if len(nodes) != self._count or nodes[-1] is not self._last():
            found = (_code(getattr(one, "_forward_cls", None)) for one in nodes)
            self._codes = frozenset(code for code in found if code is not None)
            self._count, self._last = len(nodes), weakref.ref(nodes[-1])
        return self._codes


def _code(kind: object) -> CodeType | None:
    forward: Any = getattr(kind, "forward", None)
    while isinstance(forward, partial):
        forward = forward.func
    return getattr(forward, "__code__", None)


def _given(frame: FrameType) -> Iterator[object]:
    """What a call was given by place; among that of a function's forward is its node, where it is
    given that."""
    code, found = frame.f_code, frame.f_locals
    names = code.co_varnames
    yield from (found.get(name) for name in names[: code.co_argcount])
    if code.co_flags & inspect.CO_VARARGS:
        yield from found.get(names[code.co_argcount + code.co_kwonlyargcount], ())


_forwards = _Forwards()
_RUN = torch.autograd.graph._engine_run_backward.__code__  # type: ignore[attr-defined]
"""In whose frame a backward runs."""
_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
_forward_gradients: Callable[[], bool] = torch._C._is_fwd_grad_enabled
_top_hooks: Callable[[bool], object] = _autograd._top_saved_tensors_default_hooks
