"""What the engine does in a call from outside is no business of the user's modes and compilers.

A `TorchFunctionMode` (`with torch.device(...)` is one) or `TorchDispatchMode` sees every operation
of the thread: it would count the engine's copies as the model's, put its tensors elsewhere, or, as
selective checkpointing does in a recompute, look for them among what the forward did. So the modes
that are active where the engine is called are off while it works, and on again for what it calls of
the user's. A transform of `torch.func` takes all tensors for its own: it is off, too, and what is
offloaded is refused to it by name. And `torch.compile`, which compiles what is called by what it
compiles, leaves the engine alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch as _dispatch

from cpu_adam.built import require_version

WHOLE_VERSION = 4
"""Of the compiled module for calls from outside, as `src/whole/module.cpp` has it."""

try:
    from offload import _whole as _native

    require_version(_native, WHOLE_VERSION)
except ImportError:  # Not compiled: the reference serves.
    _native = None  # type: ignore[assignment]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_functions: Any = torch._C
_dynamo: Any = torch._dynamo
_functions_active: Callable[[], int] = _functions._len_torch_function_stack
_dispatchers_active: Callable[[], int] = _functions._len_torch_dispatch_stack


_transform: Callable[[], object] = _functions._functorch.peek_interpreter_stack


def transforms() -> bool:
    """Whether the thread is in a transform of `torch.func`."""
    return _transform() is not None


NO_RECORDING = (
    "which records where values lie now, but offloaded ones move: offload.detach(model) before it, "
    "or do it with a model that is not attached"
)
"""Why a model is not traced."""

traced: Callable[[], object] = _functions._get_tracing_state
"""What `torch.jit.trace` writes to, None where it does not; asked apart, as it takes long."""


def refuse_transforms(what: str) -> None:
    """Refuse `what` of an offloaded model to `torch.func`, and to what records it.

    Raises:
        RuntimeError: a transform is active, or the model is being traced or exported.
    """
    if traced() is not None or (_dispatchers_active() and _recorded()):
        raise RuntimeError(
            f"{what} while it was traced (torch.jit.trace, torch.export, torch.onnx.export, "
            f"make_fx), {NO_RECORDING}"
        )
    if transforms():
        raise RuntimeError(
            f"{what} under a transform of torch.func (grad, vjp, jvp, vmap, ...), which takes "
            "tensors for its own, but offloaded ones move and are written to: use backward() or "
            "torch.autograd.grad(), or a model that is not attached"
        )


def _recorded() -> bool:
    """Whether one of the modes that are active records what is done."""
    return torch.compiler.is_exporting() or proxy_tensor.get_proxy_mode() is not None


def left_alone(function: Any) -> Any:
    """Let torch.compile not look into it; where it would have to, torch gives the reason."""
    alone = _dynamo.decorators.skip(function)
    alone._torchdynamo_disable_msg = f"torch.export() of an attached model, {NO_RECORDING}"
    return alone


class _Taken(threading.local):
    """By thread, the modes that the innermost call of the engine has taken off, topmost first."""

    functions: tuple[Any, ...] = ()
    dispatchers: tuple[Any, ...] = ()


_taken = _Taken()
_taking: list[None] = []
"""One for each call of the engine, on any thread, that has taken modes off."""


def _quiet_in_python(*questions: Callable[[], object]) -> Callable[[], bool]:
    @left_alone
    def ask() -> bool:
        for question in questions:  # noqa: SIM110 (torch.compile complains of generators)
            if question():
                return False
        return True

    return ask  # type: ignore[no-any-return]


quiet = _quiet_in_python if _native is None else _native.quiet
"""What asks whether the answers to all of these are false, zero or None."""

_modes = (_functions_active, _dispatchers_active)

unseen = quiet(*_modes)
"""Whether no mode of the user's sees what is asked of a tensor here: no transform sees such."""

nothing_to_take = quiet(*_modes, _transform, _taking.__len__)
"""Whether `aside` would have nothing to do."""

compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What of torch.compile looks at the frames of this thread; None where nothing does. (To have
`disable` ask takes as long as much of what is called.)"""

QUESTIONS = (*_modes, _transform, _taking.__len__, compiler)
"""What is asked at the begin of each call of the engine, for `quiet`."""

usual = quiet(*QUESTIONS)
"""Whether, besides, nothing compiles what this thread calls."""


@left_alone
def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function`, such that torch.compile, where it looks at this thread, sees nothing of it."""
    alone: Callable[Parameters, Result] = _dynamo.disable(function) if compiler() else function
    return alone


def aside(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let `function` work without the modes that are active where it is called, and uncompiled."""

    def work(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with temporarily_clear_interpreter_stack() if transforms() else nullcontext():
            if nothing_to_take():
                return function(*args, **kwargs)
            with _off():
                return function(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        now: Callable[Parameters, Result] = uncompiled(work)
        return now(*args, **kwargs)

    return left_alone(run)  # type: ignore[no-any-return]


@contextmanager
def _off() -> Iterator[None]:
    before = _taken.functions, _taken.dispatchers
    _taken.functions, _taken.dispatchers = _pop()
    _taking.append(None)
    try:
        yield
    finally:
        _taking.pop()
        _push(_taken.functions, _taken.dispatchers)
        _taken.functions, _taken.dispatchers = before


@contextmanager
def users_modes() -> Iterator[None]:
    """Inside `aside`: what is called of the user's has the modes that it would have had."""
    _push(_taken.functions, _taken.dispatchers)
    try:
        yield
    finally:
        _pop()


def _pop() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Take all modes off, but those that imitate a device (`is_device`), as no user has them."""
    pop: Callable[[], Any] = _functions._pop_torch_function_stack
    functions = tuple(pop() for _ in range(_functions_active()))
    held = _dispatch._get_current_dispatch_mode_stack()
    # Before 2.11 what only torch holds is gone as it is popped.
    found = [_dispatch._pop_mode() for _ in held]
    for mode in reversed(found):
        if getattr(mode, "is_device", False):
            _dispatch._push_mode(mode)
    return functions, tuple(mode for mode in found if not getattr(mode, "is_device", False))


def _push(functions: tuple[Any, ...], dispatchers: tuple[Any, ...]) -> None:
    """Put back what `_pop` has taken off."""
    for mode in reversed(functions):
        _functions._push_on_torch_function_stack(mode)
    for mode in reversed(dispatchers):
        _dispatch._push_mode(mode)
