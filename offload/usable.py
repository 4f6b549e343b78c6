"""Why an engine cannot be used any more, or not here."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from offload.executor import Executor
from offload.interrupt import torn, torn_times
from offload.lanes import EngineError


def refuse_unusable(executor: Executor, pid: int, torn_before: int) -> None:
    """Refuse to use what belongs to another process, was closed, torn or put to sleep, or failed.

    Args:
        executor: the engine's.
        pid: of the process that the engine was made in.
        torn_before: how often something whole was torn before it was made.

    Raises:
        RuntimeError: it cannot be used; an EngineError where it never can again.
    """
    if os.getpid() != pid:
        raise RuntimeError(
            "a forked process touched an offloaded model: its memory stays with the parent; "
            "move the work there, or start workers with multiprocessing 'spawn'"
        )
    if executor.lanes.closed:
        raise EngineError("the offload engine of this model was closed")
    if torn_times() != torn_before:
        raise EngineError(
            f"{torn()[-1]} while the engine was in the middle of something, which may be half "
            "done now: start again from the last checkpoint"
        )
    executor.check()


_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def unlock_in_children(engine: Any) -> None:
    """Give an engine another lock wherever this process forks.

    Nobody gives back in a child what a thread of its parent had.
    """
    _engines.add(engine)


def _forked() -> None:
    for engine in _engines:
        engine.lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
