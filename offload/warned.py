"""Warnings that point to the line of the user's that they are about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OTHERS = ("offload", "cpu_adam", "torch")
"""Packages whose lines are not the user's."""


def warn_user(message: str) -> None:
    """Give a RuntimeWarning at the innermost line that is neither of ours nor of torch's."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _is_others(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_others(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OTHERS
