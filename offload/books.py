"""The lock of the lanes, and what is done when it is let go.

[Note: Books]
Tasks are queued, begun and ended under one lock. When it is let go, lanes that have something to
do are woken: each once, however much was queued for it, as a lane that wakes takes the GIL from who
queues. What is raised under the lock leaves the books half written, and ends everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from offload.program import Lane
from offload.task import Task


class Books:
    """A context, to be entered with the lock held: `with lock, books`.

    The lock's own context is not Python's: no Ctrl-C can come between taking it and having to let
    it go.
    """

    def __init__(self, lanes: Iterable[Lane], fail: Callable[[BaseException], None]):
        """Of these lanes; `fail` ends everything with an error."""
        self.lock = threading.RLock()
        self._fail = fail
        self._depth = 0
        self._wake = {lane: threading.Condition(self.lock) for lane in lanes}
        self._woken: set[Lane] = set()
        """Lanes that are to be told that they have something to do."""

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._fail(error)
            elif self._depth == 1 and self._woken:
                for lane in self._woken:
                    self._wake[lane].notify()
                self._woken.clear()
        finally:
            self._depth -= 1

    def ready(self, task: Task) -> None:
        """A task of a lane is ready."""
        self._woken.add(task.op.lane)

    def sleep(self, lane: Lane) -> None:
        """Let the thread of a lane, which holds the lock, wait until it has something to do."""
        self._wake[lane].wait()

    def wake_all(self) -> None:
        """Wake every lane; the lock is held."""
        for wake in self._wake.values():
            wake.notify_all()
