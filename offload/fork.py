"""Forked processes: what was attached stays with the parent, and its child is told so."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class _Lanes(Protocol):
    ended: bool


class _Executor(Protocol):
    @property
    def lanes(self) -> _Lanes: ...


class _Engine(Protocol):
    lock: threading.RLock

    @property
    def executor(self) -> _Executor: ...


def forked(what: str, instead: str) -> RuntimeError:
    """What a child is told that asks for `what` its parent has; `instead` it can do this."""
    return RuntimeError(
        f"a forked process touched an offloaded model: {what} with the parent; {instead}, or start "
        "workers with multiprocessing 'spawn'"
    )


_engines: weakref.WeakSet[_Engine] = weakref.WeakSet()


def end_in_children(engine: _Engine) -> None:
    """Let an engine be of no use wherever this process forks, where it has no lanes.

    Its lock is another one there: nobody gives back in a child what a thread of its parent had.
    """
    _engines.add(engine)


def _end() -> None:
    for one in _engines:
        one.lock = threading.RLock()
        one.executor.lanes.ended = True


os.register_at_fork(after_in_child=_end)
