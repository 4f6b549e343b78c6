"""Memory of a device that is full for the moment: asked for again, before anything is changed.

[Note: Patience]
An update on a device that fails half way leaves its states half written, which ends training; the
same lack of memory in the user's own code is an error that can be caught, and soon over. Nearly all
that an update needs lies in its workspace. The rest (the scalars of a step) is asked for before the
first element is changed, and again for a while where it is refused: what the user's thread holds,
activations most of all, goes as its backward goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

PATIENCE_S = 10.0
"""How long memory is asked for."""

PAUSE_S = 0.02

Made = TypeVar("Made")


def patiently(make: Callable[[], Made]) -> Made:
    """What `make` gives, which has changed nothing where it raises.

    Raises:
        torch.OutOfMemoryError: there is no memory, and was none all the time.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return make()
        except torch.OutOfMemoryError:
            if time.monotonic() > until:
                raise
        time.sleep(PAUSE_S)
