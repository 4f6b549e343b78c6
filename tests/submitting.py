"""The ops of phases as tests see them, whichever runner has written them down, and taking back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offload.program.ops import Op
from offload.program.schedule import Schedule, State, Task
from offload.runtime.native import Native

_phase: Any = Native.phase


def _noted(native: Native, ops: Iterable[tuple[Op, Any]]) -> Any:
    phase = _phase(native, ops := list(ops))
    phase.ops = [op for op, _ in ops]
    return phase


setattr(Native, "phase", _noted)  # noqa: B010


def ops_of(phase: Any) -> list[Op]:
    """The ops of a phase, in order."""
    return [op for op, _ in phase] if isinstance(phase, list) else list(phase.ops)


def cancel(schedule: Schedule, task: Task) -> None:
    """Take `task` back: whoever waited for it waits for what it was waiting for."""
    task.go(State.CANCELLED)
    for other in task.waits:
        for follower in task.followers if not other.over else ():
            if other not in follower.waits:
                schedule._link(other, follower)
    schedule._release(task)
