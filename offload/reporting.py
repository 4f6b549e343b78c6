"""What an engine did, and where the time of its steps went. Pure: no torch, no engine.

A `Run` is what an engine did last, as plain data that `save` and `load` keep in a JSON file;
`recording.run_of` makes one, and `offload report` shows it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from offload.planning.machine import cache_path, replace_file

FORMAT, VERSION = "offload run", 6

MODEL, ENGINE, OTHER = "model", "engine", "other"
"""Parts of a step beside waiting: the user's forward and backward; the engine's calls in the user's
thread; and what remains (data, loss, Python). Where the engine does not see all forward and
backward (see `Run.sees_model`) the remainder counts as MODEL."""

LANES = (MODEL, ENGINE, "compute", "comm", "h2d", "d2h", "cpu", "disk")
"""Lanes of spans, in the order in which they are shown."""

Interval = tuple[float, float]


class Span(NamedTuple):
    """One op as it ran."""

    lane: str
    name: str
    unit: str
    start: float
    stop: float
    bytes: int


class Wait(NamedTuple):
    """A time in which the user's thread waited for a lane."""

    lane: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step in its steady state."""

    step_seconds: float
    exposed_seconds: float
    """In which the user's thread is blocked."""
    busy: Mapping[str, float]
    """Seconds of work by lane; `MODEL` is the user's."""
    moved: Mapping[str, int]
    """Bytes by lane; on cpu and compute, of operands."""
    faster: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by the lane that is twice as fast."""

    @property
    def bound_by(self) -> str:
        """The lane that saves most where it is twice as fast, if that is known; or the busiest."""
        if self.faster:
            return min(self.faster, key=lambda lane: self.faster[lane])
        return max(self.busy, key=lambda lane: self.busy[lane])


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What an engine did last. Times are seconds from the first moment that was kept."""

    made: str
    """When, in ISO 8601, local time."""
    command: Sequence[str]
    """The command line of `offload train`, or the name of the user's program."""
    model: str
    """Parameters, types and units, in words."""
    device: str
    device_is_host: bool
    """Whether the CPU is the compute device."""
    residents: int
    """Units that live on the device."""
    versions: Mapping[str, str]
    """Of torch and Python."""
    steps: int
    """Taken in all, those before a resume too."""
    homes: Sequence[tuple[str, str, int]]
    """(kind, tier, bytes) of what lives where."""
    tiers: Mapping[str, tuple[int, int]]
    """By tier, bytes taken and the budget."""
    drive_bytes_per_s: float
    """Of the nvme tier as measured, reading and writing at once; 0 where it was not."""
    spans: Sequence[Span]
    waits: Sequence[Wait]
    stepped: Sequence[tuple[int, float, int]]
    """Number, time and misses so far of each `step()` that was kept."""
    since: float
    """The time after which nothing was dropped."""
    prediction: Prediction | None
    """With the compute and the lane speeds of the run."""
    unpredicted: str
    """Why there is no prediction."""

    @property
    def sees_model(self) -> bool:
        """Whether all forward and backward was timed: an accelerator computes beside the host's
        thread, and units that live on the device have no hooks."""
        return self.device_is_host and not self.residents


def last() -> Path:
    """The file in which `offload train` leaves its last run, in the user's cache. Raises OSError
    where there is none."""
    return cache_path("run.json")


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Writes a run to a file. Raises OSError where it cannot be written."""
    replace_file(Path(path), json.dumps({"format": FORMAT, "version": VERSION, **asdict(run)}))


def load(path: str | os.PathLike[str]) -> Run:
    """Reads a run that `save` wrote. Raises OSError where the file cannot be read, ValueError where
    it is something else."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
            raise ValueError
        content["spans"] = [Span(*row) for row in content["spans"]]
        content["waits"] = [Wait(*row) for row in content["waits"]]
        content["prediction"] = content["prediction"] and Prediction(**content["prediction"])
        return Run(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(
            f"{path} is not a run that this release can show: likely another kind of file, a "
            "damaged one, or a run of another release: train again"
        ) from None


def seconds(*found: Iterable[Interval]) -> float:
    """Seconds that lie in at least one of some intervals, none of which starts before 0."""
    total = begin = end = 0.0
    for start, stop in sorted(itertools.chain(*found)):
        if start > end:
            total, begin, end = total + (end - begin), start, start
        end = max(end, stop)
    return total + (end - begin)


def clip(found: Iterable[Interval], since: float, until: float) -> list[Interval]:
    """The parts of some intervals between two times."""
    cut = ((max(start, since), min(stop, until)) for start, stop in found)
    return [(start, stop) for start, stop in cut if start < stop]
