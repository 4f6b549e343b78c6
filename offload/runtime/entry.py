"""Calls from the user's code into the engine.

[Note: Entry]
Every hook, touch and public method that does the engine's work is an `entry`. Inside one

* the user's dispatch modes are off. A FLOP counter, or selective checkpointing in a recompute,
  would take the engine's copies for operations of the model;
* torch.compile looks at nothing;
* an exception that is no `Exception` (Ctrl-C, `SystemExit`) and cuts through the engine's own
  Python is noted, as it may have left state half changed: every later call is refused. Where the
  engine waits for a lane, or calls code of the user's, its state is whole; these places are
  `interruptible`, and what is raised there harms nothing.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from offload.runtime.torch_internals import (
    compiler,
    in_dispatch_mode,
    innermost_transform,
    without_dispatch_modes,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function`, such that torch.compile looks neither into it nor into what it calls.

    Only where something of torch.compile looks it goes by `torch.compiler.disable`, which takes a
    microsecond.
    """
    disable: Any = torch.compiler.disable
    alone: Callable[Parameters, Result] = disable(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return (function if compiler() is None else alone)(*args, **kwargs)

    skipped: Callable[Parameters, Result] = disable(call, recursive=False)
    return skipped


@contextmanager
def all_or_none(group: Any) -> Iterator[ExitStack]:
    """A context of what all ranks of a group (None: this one is alone) do, without a collective of
    its own. Where one raises, all do, and what is on the stack is called to undo it."""
    with ExitStack() as undo:
        with nullcontext() if group is None else group.all_or_none():
            yield undo
        undo.pop_all()


def ended_by() -> BaseException | None:
    """The exception that has ended the program; None where there was none, or somebody types it,
    whom no exception ends."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    found: BaseException | None = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    return found


_now = time.perf_counter
_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
interruptions: list[str] = []
"""Names of the exceptions that have cut through the engine's Python so far."""
_WHOLE = "_offload_state_is_whole"

NOWHERE: deque[tuple[float, float]] = deque(maxlen=0)
calls = NOWHERE
"""Begin and end, by `time.perf_counter`, of the last calls into the engine whose call is under way;
set by the engine."""


class EngineError(RuntimeError):
    """The engine cannot go on: a lane failed (`__cause__` is what it met), an interrupt cut through
    the engine, or it was closed."""


@contextmanager
def interruptible() -> Iterator[None]:
    """A context in which the engine's state is whole: what is raised inside harms nothing."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            setattr(error, _WHOLE, True)
        raise


def entry(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make `function` a call from the user's code into the engine, see [Note: Entry]."""

    @uncompiled
    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        since = _now()
        try:
            if in_dispatch_mode():
                if get_proxy_mode() is not None:
                    _refuse_tracing("an offloaded model was used")
                with without_dispatch_modes():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception) and not getattr(error, _WHOLE, False):
                interruptions.append(type(error).__name__)
                setattr(error, _WHOLE, True)  # Noted once, through however many entries it goes.
            raise
        finally:
            calls.append((since, _now()))

    return call


def refuse_recording(what: str) -> None:
    """Raise RuntimeError where the model is traced or exported, or `torch.func` transforms it."""
    if _tracing() or torch.compiler.is_exporting():
        _refuse_tracing(what)
    if innermost_transform() is not None:
        raise RuntimeError(
            f"{what} under a transform of torch.func (grad, vjp, vmap, ...), which takes tensors "
            "for its own, but offloaded ones move: use backward() or torch.autograd.grad(), or a "
            "model that is not attached"
        )


def _refuse_tracing(what: str) -> None:
    raise RuntimeError(
        f"{what} while it was traced (torch.jit.trace, torch.export, make_fx), which records "
        "where values lie now, but offloaded ones move: offload.detach(model) before it"
    )


class Hook(functools.partial[Any]):
    """A hook of which copies and pickles of the module, which are attached to nothing, do none."""

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # Read without this package, too.
