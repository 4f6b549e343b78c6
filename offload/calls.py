"""The call of the model that is under way, known by the frame it is made in.

Ctrl-C in a forward skips all of its post-hooks: torch calls even those of `always_call` only when
an `Exception` was raised. So nothing tells that the call is over but that its frame is no longer
among those that run.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch

_Foreign: type = threading._DummyThread  # type: ignore[attr-defined]
"""What Python makes of a thread that it did not start, once it is asked for its name."""

_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_dynamo"))
"""Where the frames between a hook and the module's call come from."""


def refuse_intruder(verb: str) -> None:
    """Refuse a thread of Python's what would end the forward or backward of another one.

    Those that autograd made work for whoever is inside.

    Raises:
        RuntimeError: this is one of Python's.
    """
    mine = next((one for one in threading.enumerate() if one.ident == threading.get_ident()), None)
    if mine is None or type(mine) is _Foreign:
        return
    raise RuntimeError(
        f"thread {mine.name!r} asked for weights, gradients or states of an "
        f"offloaded model while another one was inside its {verb}: they are on their way then, and "
        "one thread at a time uses a model. Let the other thread take what is needed between two "
        "steps (p.detach().clone(), model.state_dict()); a forward that hands modules to other "
        "threads cannot be offloaded"
    )


class Calls:
    """The outermost call under way of a module that is hooked."""

    def __init__(self) -> None:
        """No call is under way."""
        self._frame: FrameType | None = None
        self._thread = 0
        self._depth = 0
        """How far up it was found the last time."""

    def begin(self) -> None:
        """A hook is called before a module; nothing new inside another's call."""
        if self._frame is not None:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        self._frame, self._thread = frame, threading.get_ident()

    def end(self) -> None:
        """The call is over."""
        self._frame = None

    @property
    def under_way(self) -> bool:
        """Whether a call is seen at first sight; one that is not may be, too."""
        try:
            return sys._getframe(self._depth) is self._frame
        except ValueError:  # So deep nothing is.
            return False

    @property
    def elsewhere(self) -> bool:
        """Whether a call runs on another thread."""
        if self._frame is None or self._thread == threading.get_ident():
            return False
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    @property
    def broken_off(self) -> bool:
        """Whether a call began that does not run any more, and nobody said that it was over."""
        if self._frame is None or self._thread != threading.get_ident():
            return False
        depth = 1
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            depth, frame = depth + 1, frame.f_back
        self._depth = depth
        return frame is None
