"""The forward and the backward under way, and how each is known to be over.

[Note: Broken off]
Ctrl-C in a forward skips its hooks, as torch calls even those of `always_call` for an `Exception`
only. So the outermost call of a hooked module is known by the frame that it is made in: once that
has ended, the call is over, whatever hooks it has skipped. Nothing tells that a backward has raised
but that autograd drops the callback that it was to call at the end, of which a weak reference is
kept. On an accelerator a thread of autograd's drops it a moment after `backward()` has raised.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from offload.runtime.torch_internals import call_at_end, graph_task

_BETWEEN = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent / "_dynamo"))
"""Where the frames between a hook and the module's call come from."""

DROPPED_SECONDS = 0.2
"""So long autograd's thread has to drop the callback of a backward that has raised."""


def in_backward() -> bool:
    """Whether autograd is running on this thread."""
    return graph_task() >= 0


class ForwardCall:
    """The outermost call of a hooked module that is under way."""

    _frame: FrameType | None = None

    def begin(self) -> None:
        """A module's hook is called, inside no other module's call."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        self._frame = frame

    def end(self) -> None:
        """The call is over."""
        self._frame = None

    @property
    def running(self) -> bool:
        """Whether the call goes on, on whatever thread."""
        return self._frame is not None and not self.broken_off

    @property
    def broken_off(self) -> bool:
        """Whether the call is over, and nothing has said so."""
        with suppress(RuntimeError):  # A frame that is executing cannot be cleared.
            if self._frame is not None:
                self._frame.clear()
                return True
        return False


class GraphTasks:
    """The backwards under way by autograd's number, the outermost first."""

    current: Callable[[], int] = staticmethod(graph_task)
    """The number of the innermost on this thread; -1 where none runs."""

    def __init__(self) -> None:
        self._ended: dict[int, Callable[[], object | None]] = {}

    def __contains__(self, task: object) -> bool:
        return task in self._ended

    @property
    def running(self) -> bool:
        """Whether any goes on; those that have raised are forgotten."""
        for task in [one for one, ended in self._ended.items() if ended() is None]:
            del self._ended[task]
        return bool(self._ended)

    @property
    def go_on(self) -> bool:
        """Whether any goes on, on another thread: one that has just raised there does not."""
        until = time.monotonic() + DROPPED_SECONDS
        while self.running and time.monotonic() < until:
            time.sleep(1e-3)
        return self.running

    def began(self, task: int, ended: Callable[[], None]) -> None:
        """One has begun on this thread; `ended` is called at its end, unless it raises."""
        self._ended[task] = weakref.ref(ended)
        call_at_end(ended)

    def ended(self, task: int) -> None:
        """One has ended."""
        self._ended.pop(task, None)

    def clear(self) -> None:
        """None is under way."""
        self._ended.clear()
