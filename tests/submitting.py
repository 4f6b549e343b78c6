"""Ops on lanes for tests: queued behind others, not behind who touched their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from offload.program.ops import Op

Step = tuple[Op, Callable[[int], object]]
"""An op of a chunk, and what it does in the staging slot of that number."""


def submit(
    lanes: Any,
    op: Op,
    waits: Iterable[Any],
    key: tuple[int, int],
    run: Any = None,
    work: Any = None,
) -> Any:
    """Queue an op, of lanes or of books, behind `waits`; each has written a place of its own."""
    places = vars(lanes).setdefault("_places_of_tests", {})
    reads = [places[id(one)][0] for one in waits]
    own = ("a test's", len(places))
    if run is not None:
        work = _without_arguments(run)
    known = lanes.know(replace(op, deadline=key[1]), reads, [own], work)
    (task,) = lanes.issue([known], key[0])
    places[id(task)] = own, task  # Held, so that no other gets its number.
    return task


def submit_chunk(
    lanes: Any, steps: Sequence[Step], waits: Iterable[Any], key: tuple[int, int]
) -> list[Any]:
    """Queue the ops of a chunk behind `waits`, each behind the one before it."""
    places = vars(lanes).setdefault("_places_of_tests", {})
    reads, own, known = [places[id(one)][0] for one in waits], list[Any](), list[Any]()
    for op, run in steps:
        own.append(("a test's", len(places) + len(own)))
        work = _with_slot(run)
        made = replace(op, deadline=key[1])
        known.append(lanes.know(made, reads, own[-1:], work, ("a chunk", len(places))))
        reads = own[-1:]
    tasks: list[Any] = lanes.issue(known, key[0])
    places.update({id(task): (place, task) for task, place in zip(tasks, own)})
    return tasks


def _without_arguments(run: Callable[[], object]) -> Callable[[int, object], object]:
    return lambda slot, settings: run()


def _with_slot(run: Callable[[int], object]) -> Callable[[int, object], object]:
    return lambda slot, settings: run(slot)
