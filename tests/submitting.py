"""Ops on lanes for tests: queued behind others, not behind who touched their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from offload.program.ops import Op


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


def _without_arguments(run: Callable[[], object]) -> Callable[[object], object]:
    return lambda settings: run()
