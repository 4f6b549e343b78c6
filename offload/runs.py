"""A run as plain data: what an engine did last, what it took, what the simulator says. Pure.

`recorded.run_of` makes one of an engine, `save` and `load` keep it in a file, `breakdown` says
where the time went, `offload report` shows it. Times are seconds from the first moment kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.kept import in_cache, write_whole

FORMAT = "offload run"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One op as it ran. The lane of the user's own compute is `model`, that of the calls into the
    engine by the user's thread `engine`."""

    lane: str
    name: str
    """What was done to what: `fetch weight`, `update`, ..."""
    unit: str
    start: float
    stop: float
    bytes: int
    tier: str = ""
    """The tier that the bytes came from, and the one they went to: `cpu > device`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which training waited for a lane."""

    lane: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator makes of the run, with its compute and the speeds that its lanes had."""

    step_s: float
    exposed_s: float
    busy: Mapping[str, float]
    """By lane, seconds of a step; the user's own compute is not among them."""
    what_if: Mapping[str, float]
    """By the lane that is thought twice as fast, the step's seconds then; `compute` is the device,
    the user's own compute included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All of it."""

    made: str
    """When, in ISO 8601."""
    steps: int
    """Steps since attach; those kept are in `stepped`."""
    wall_s: float
    misses: int
    lanes: Mapping[str, Mapping[str, float]]
    """Since attach, by lane: busy_s, exposed_s, bytes, operations."""
    homes: Sequence[tuple[str, str, int]]
    """(kind, tier, bytes) of what lives where."""
    tiers: Mapping[str, tuple[int, int]]
    """By tier, bytes taken and the budget."""
    spans: Sequence[Span]
    waits: Sequence[Wait]
    stepped: Sequence[tuple[int, float, int]]
    """Number, moment and misses so far of each `step()`."""
    since: float
    """From here on nothing is missing."""
    prediction: Prediction | None
    """None where there is too little to go by."""


def last_path() -> Path:
    """Where a run is left that was given no place of its own: in the user's cache."""
    return in_cache("last-run.json")


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Writes a run, in place of what was there, as a whole.

    Raises:
        OSError: it cannot be written.
    """
    content = {"format": FORMAT, "version": VERSION, **asdict(run)}
    content["spans"] = [_row(span) for span in run.spans]
    content["waits"] = [_row(wait) for wait in run.waits]
    write_whole(Path(path), json.dumps(content))


def _row(one: Span | Wait) -> list[Any]:
    values = (getattr(one, name) for name in one.__slots__)
    return [round(value, 6) if isinstance(value, float) else value for value in values]


def load(path: str | os.PathLike[str]) -> Run:
    """Reads a run that `save` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or one of another version.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        kind, version = content.pop("format"), content.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{path} is no run: likely another kind of file") from None
    if (kind, version) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is {kind!r} of version {version!r}, and this is for {FORMAT!r} of version "
            f"{VERSION}: likely another release wrote it; train again"
        )
    try:
        content["spans"] = [Span(*row) for row in content["spans"]]
        content["waits"] = [Wait(*row) for row in content["waits"]]
        content["homes"] = [tuple(row) for row in content["homes"]]
        content["tiers"] = {name: tuple(row) for name, row in content["tiers"].items()}
        content["stepped"] = [tuple(row) for row in content["stepped"]]
        if content["prediction"] is not None:
            content["prediction"] = Prediction(**content["prediction"])
        return Run(**content)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged run ({error}): train again") from None
