"""Forked processes: what was attached stays with the parent, and its child is told so."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


def forked(what: str, instead: str) -> RuntimeError:
    """What a child is told that asks for `what` its parent has; `instead` it can do this."""
    return RuntimeError(
        f"a forked process touched an offloaded model: {what} with the parent; {instead}, or start "
        "workers with multiprocessing 'spawn'"
    )


engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""All that are in memory. In a child each has another lock: nobody gives back there what a thread
of its parent had."""


def _unlock() -> None:
    for engine in engines:
        engine.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)
