"""Why an engine cannot be used any more, or not here, where it cannot be closed either."""

from __future__ import annotations

import os

from offload.executor import Executor
from offload.fork import forked
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
        raise forked("its memory stays", "move the work there")
    if executor.lanes.closed:
        raise EngineError(
            "the offload engine of this model was closed: after offload.detach() go on with the "
            "optimizer that it returned; after close() attach the model anew"
        )
    if torn_times() != torn_before:
        raise EngineError(
            f"{torn()[-1]} while the engine was in the middle of something, which may be half "
            "done now: start again from the last checkpoint"
        )
    executor.check()


def close_here(executor: Executor, pid: int) -> None:
    """Close an executor, in the process that made it only."""
    if os.getpid() == pid:
        executor.close()
