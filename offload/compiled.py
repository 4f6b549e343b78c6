"""The books in C++, see [Note: Compiled books] of `books`, and the choice between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from cpu_adam.built import require_version
from offload.books import Books, Known, Spans
from offload.device import Device
from offload.layout import CHUNK_STAGES
from offload.program import Lane, Op, Verb
from offload.task import Key, Passage, Run, Task
from offload.trace import SPANS_MAX, Ran

BOOKS_VARIABLE = "OFFLOAD_BOOKS"
"""Environment variable: `python` keeps the books in Python, the reference, where those in C++ could
serve."""

BOOKS_VERSION = 1
"""Of the compiled books, as `src/module.cpp` has it."""

_LANES = tuple(Lane)
_NUMBER = {lane: number for number, lane in enumerate(_LANES)}

try:
    from offload import _books as _native

    require_version(_native, BOOKS_VERSION)
except ImportError:  # Not compiled: the reference serves.
    _native = None  # type: ignore[assignment]


class CompiledBooks:
    """The books of all lanes; see `Books` for what each call does."""

    copies = True

    def __init__(self, kept: int = SPANS_MAX) -> None:
        """Nothing is queued; of what has run, remember the last so many."""
        self._books = books = _native.Books(len(_LANES), CHUNK_STAGES, kept)
        self._cells: dict[object, int] = {}
        """The number of every place."""
        self.passage = _native.make_passage
        self.seal, self.cancel = books.seal, books.cancel
        self.begin, self.over = books.begin, books.over
        self.finish: Callable[..., None] = books.finish
        self.all = books.all
        self._issue, self._issue_all = books.issue, books.issue_all

    def know(
        self,
        op: Op,
        reads: Iterable[object],
        writes: Iterable[object],
        run: Run | None = None,
        spans: Spans | None = None,
    ) -> Known:
        """Write an op down; what has `spans` its lane copies on its own."""
        cells = self._numbers(reads), self._numbers(writes)
        ready = bool(spans or run) or op.verb is not Verb.MOVE
        booked = _native.make_known(_NUMBER[op.lane], op.deadline, op, spans, *cells)
        return Known(op, None if spans else run, spans is not None, booked, ready)

    def _numbers(self, cells: Iterable[object]) -> list[int]:
        return [self._cells.setdefault(cell, len(self._cells)) for cell in cells]

    def issue(
        self, known: Known, number: int, run: Run | None, passage: Passage | None = None
    ) -> Task:
        """Queue an op of the pass of that number behind those that touched its cells before."""
        return self._issue(known.booked, number, run, passage, None)

    def issue_all(
        self, known: Sequence[Known], number: int, runs: Sequence[Run | None]
    ) -> list[Task]:
        """The same for several, in one call."""
        return self._issue_all([one.booked for one in known], number, list(runs))

    def touching(self, reads: Iterable[object], writes: Iterable[object]) -> list[Task]:
        """Whom an op with these cells would have to wait for."""
        return self._books.touching(self._numbers(reads), self._numbers(writes))

    @property
    def most_kept(self) -> int:
        """How many accesses are kept of the place of which there are most."""
        return self._books.most_kept()

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
        known = self.know(replace(op, deadline=key[1]), (), (), run, spans)
        return self._issue(known.booked, key[0], run, passage, waits)

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
        """The last copies and computes of the user since that was asked."""
        return [Ran(op.lane, op, start, stop) for op, start, stop in self._books.ran()]

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
    lanes: Iterable[Lane], fail: Callable[[BaseException], None], device: Device, kept: int
) -> Books | CompiledBooks:
    """The compiled books where they can serve, else the reference; `kept` as those say."""
    plain = type(device) is Device  # Else it may have fences.
    if plain and _native is not None and os.environ.get(BOOKS_VARIABLE) != "python":
        return CompiledBooks(kept)
    return Books(lanes, fail)
