"""The books in C++, see [Note: Compiled books] of `books`, and the choice between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from offload.books import Books, Spans
from offload.device import Device
from offload.layout import CHUNK_STAGES
from offload.program import Lane, Op
from offload.task import Fence, Key, Passage, Run, Task
from offload.trace import SPANS_MAX, Ran

BOOKS_VARIABLE = "OFFLOAD_BOOKS"
"""Environment variable: `python` keeps the books in Python, the reference, where those in C++ could
serve."""

_LANES = tuple(Lane)
_NUMBER = {lane: number for number, lane in enumerate(_LANES)}

try:
    from offload import _books as _native
except ImportError:  # Not compiled: the reference serves.
    _native = None  # type: ignore[assignment]


class CompiledBooks:
    """The books of all lanes; see `Books` for what each call does."""

    copies = True

    def __init__(self) -> None:
        """Nothing is queued."""
        self._books = books = _native.Books(len(_LANES), CHUNK_STAGES, SPANS_MAX)
        self._copies: list[Op | None] = [None] * SPANS_MAX
        """The last copies queued, each at its number in turn."""
        self._number = -1
        self.passage = _native.make_passage
        self.seal, self.cancel = books.seal, books.cancel
        self.begin, self.over = books.begin, books.over
        self._make, self._add = _native.make_task, books.add

    def submit(
        self,
        op: Op,
        waits: Iterable[Task],
        key: Key,
        run: Run | None,
        passage: Passage | None,
        spans: Spans | None,
    ) -> Task:
        """Queue an op behind `waits`; what has `spans` its lane copies on its own."""
        if spans is not None:
            self._number += 1
            self._copies[self._number % SPANS_MAX] = op
            task = self._make(_NUMBER[op.lane], key, False, passage, spans, self._number)
        else:
            task = self._make(_NUMBER[op.lane], key, run is None, passage, None, 0)
            task.op, task.run = op, run
        self._add(task, waits)
        return task

    def finish(self, task: Task, fences: Sequence[Fence] = ()) -> None:
        """`task` is done."""
        assert not fences, "a device with fences has its books in Python"
        self._books.finish(task)

    def path(self, task: Task) -> list[tuple[Lane, float]]:
        """The lanes that led to `task`, latest first."""
        _, _, path = self._books.look(task)
        return [(_LANES[number], since) for number, since in path]

    def look(self, task: Task) -> tuple[Key, list[int]]:
        """Its urgency, and the serial numbers of those that it waits for."""
        return self._books.look(task)[:2]

    def take(self, lane: Lane, *, wait: bool = True) -> Task | None:
        """Begin the most urgent task of `lane`; without `wait` only if there is one now."""
        return self._books.take(_NUMBER[lane], wait)

    def overtaking(self, lane: Lane, task: Task) -> Task | None:
        """Begin what is more urgent than `task`, if there is any."""
        return self._books.overtaking(_NUMBER[lane], task)

    def copied(self, lane: Lane) -> tuple[float, int, int]:
        """What a lane has copied on its own."""
        return self._books.copied(_NUMBER[lane])

    def ran(self) -> list[Ran]:
        """The last copies since that was asked."""
        kept = self._number - SPANS_MAX  # Of older ones the place is another's.
        return [
            Ran(op.lane, op, start, stop)
            for number, start, stop in self._books.ran()
            if number > kept and (op := self._copies[number % SPANS_MAX]) is not None
        ]

    def stop(self, *, closing: bool) -> None:
        """Start nothing more."""
        self._books.stop(closing)

    def forget(self) -> None:
        """Let go of all tasks, which Python's garbage collector does not see; no lane runs."""
        self._books.forget()

    def together(self) -> AbstractContextManager[None]:
        """Lanes begin at once: those that copy disturb nobody."""
        return nullcontext()


def books_of(
    lanes: Iterable[Lane], fail: Callable[[BaseException], None], device: Device
) -> Books | CompiledBooks:
    """The compiled books where they can serve, else the reference."""
    plain = type(device) is Device  # Else it may have fences.
    if plain and _native is not None and os.environ.get(BOOKS_VARIABLE) != "python":
        return CompiledBooks()
    return Books(lanes, fail)
