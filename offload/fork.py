"""Forked processes: what was attached stays with the parent, and its child is told so."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class _Locked(Protocol):
    lock: threading.RLock


def forked(what: str, instead: str) -> RuntimeError:
    """What a child is told that asks for `what` its parent has; `instead` it can do this."""
    return RuntimeError(
        f"a forked process touched an offloaded model: {what} with the parent; {instead}, or start "
        "workers with multiprocessing 'spawn'"
    )


_locked: weakref.WeakSet[_Locked] = weakref.WeakSet()


def unlock_in_children(locked: _Locked) -> None:
    """Give an engine another lock wherever this process forks.

    Nobody gives back in a child what a thread of its parent had.
    """
    _locked.add(locked)


def _unlock() -> None:
    for one in _locked:
        one.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)
