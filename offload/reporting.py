"""What an engine did, and where the time of its steps went. Pure: no torch, no engine.

A `Run` is what an engine did last, as plain data that `save` and `load` keep in a JSON file;
`recording.run_of` makes one. `breakdown` divides the time of a step into parts, and `verdict` says
what bounds it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from offload.planning.machine import cache_path, replace_file

FORMAT, VERSION = "offload run", 4

KEPT_MAX = 5
"""Runs that are kept in the user's cache."""

MODEL, ENGINE, OTHER = "model", "engine", "other"
"""Parts of a step beside waiting: the user's forward and backward; the engine's calls in the user's
thread; and what remains (data, loss, Python). Where the engine does not see all forward and
backward (see `Run.sees_model`) the remainder counts as MODEL."""

LANES = (MODEL, ENGINE, "compute", "h2d", "d2h", "cpu", "disk", "comm")
"""Lanes of spans, in the order in which they are shown."""

GAIN_LEAST = 0.02
"""Share of the step that something must save to be worth naming."""

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
    """The simulated step, with the compute and the lane speeds of the run."""

    step_s: float
    exposed_s: float
    """How much of it the user's thread waits."""
    busy: Mapping[str, float]
    """By lane, seconds of a step, without the user's own compute."""
    what_if: Mapping[str, float]
    """By lane, the seconds of a step if the lane were twice as fast; `compute` is the device, with
    the user's own compute."""


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
    """Of offload, torch and Python."""
    steps: int
    """Steps since attach."""
    homes: Sequence[tuple[str, str, int]]
    """(kind, tier, bytes) of what lives where."""
    tiers: Mapping[str, tuple[int, int]]
    """By tier, bytes taken and the budget."""
    spans: Sequence[Span]
    waits: Sequence[Wait]
    stepped: Sequence[tuple[int, float, int]]
    """Number, time and misses so far of each `step()` that was kept."""
    since: float
    """The time after which nothing was dropped."""
    prediction: Prediction | None
    unpredicted: str
    """Why there is no prediction."""

    @property
    def sees_model(self) -> bool:
        """Whether all forward and backward was timed: an accelerator computes beside the host's
        thread, and units that live on the device have no hooks."""
        return self.device_is_host and not self.residents


def folder() -> Path:
    """Where `keep` saves runs. Raises OSError where this user has no cache."""
    return cache_path("runs")


def kept() -> list[Path]:
    """The files of kept runs, the last one first. Raises OSError where there is no cache."""
    found = folder().iterdir() if folder().is_dir() else ()
    runs = (path for path in found if path.suffixes == [".json"])
    return sorted(runs, key=lambda path: path.stem, reverse=True)


def keep(run: Run) -> Path:
    """Saves a run in the user's cache, deletes the oldest ones there, and returns its file. Raises
    OSError where the cache cannot be written."""
    name = run.made.replace("T", "-").replace(":", "")
    same = sum(one.stem.startswith(name) for one in kept())
    path = folder() / f"{name}{f'-{same + 1}' if same else ''}.json"
    save(run, path)
    for old in kept()[KEPT_MAX:]:
        for ending in (".json", ".html"):
            old.with_suffix(ending).unlink(missing_ok=True)
    return path


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Writes a run to a file. Raises OSError where it cannot be written."""
    content = {field.name: getattr(run, field.name) for field in fields(run)}
    content["prediction"] = run.prediction and asdict(run.prediction)
    replace_file(Path(path), json.dumps({"format": FORMAT, "version": VERSION, **content}))


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
            "damaged one, or a run of another release; see offload report --list, or train again"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Means over the steps between two times: seconds and bytes of one step."""

    since: float
    until: float
    steps: int
    step_s: float
    parts: Mapping[str, float]
    """MODEL, each lane that the user's thread waited for, ENGINE, OTHER: together the step."""
    busy: Mapping[str, float]
    """Seconds by lane."""
    bytes: Mapping[str, float]
    """Bytes by lane."""
    misses: int
    """In all of the steps together."""

    @property
    def waited_s(self) -> float:
        """How long the user's thread waited for lanes."""
        return sum(s for name, s in self.parts.items() if name not in (MODEL, ENGINE, OTHER))


def breakdown(run: Run) -> Breakdown:
    """Where the time of the steps of a run went. Raises ValueError where it has no whole step."""
    marks = [mark for mark in run.stepped if mark[1] >= run.since]
    steps = len(marks) - 1
    if steps < 1:
        raise ValueError(
            "the run holds no whole step; likely it was too short, or its steps have more "
            "operations than are kept; train three steps at least, or a smaller model"
        )
    (_, since, misses_before), (_, until, misses) = marks[0], marks[-1]

    def by_lane(found: Iterable[Span | Wait]) -> dict[str, list[Interval]]:
        lanes: dict[str, list[Interval]] = {}
        for one in sorted(found, key=lambda one: LANES.index(one.lane)):
            lanes.setdefault(one.lane, []).extend(clip([(one.start, one.stop)], since, until))
        return {lane: inside for lane, inside in lanes.items() if inside}

    busy, waits = by_lane(run.spans), by_lane(run.waits)
    working, calls = busy.pop(MODEL, []), busy.pop(ENGINE, [])
    waited = [*itertools.chain(*waits.values())]
    parts = {MODEL: seconds(working, calls, waited) - seconds(calls, waited)}
    parts |= {lane: seconds(inside) for lane, inside in waits.items()}
    parts[ENGINE] = seconds(calls, waited) - seconds(waited)
    rest = max(0.0, until - since - sum(parts.values()))
    parts |= {OTHER: rest} if run.sees_model else {MODEL: parts[MODEL] + rest}
    moved = Counter[str]()
    for span in run.spans:
        if span.lane in busy and since <= span.start < until:
            moved[span.lane] += span.bytes
    return Breakdown(
        since=since,
        until=until,
        steps=steps,
        step_s=(until - since) / steps,
        parts={name: spent / steps for name, spent in parts.items() if spent},
        busy={lane: seconds(inside) / steps for lane, inside in busy.items()},
        bytes={lane: count / steps for lane, count in moved.items()},
        misses=misses - misses_before,
    )


def title_of(part: str, run: Run) -> str:
    """The title of a part of a step of `run`, for people."""
    if part == MODEL and not run.sees_model:
        return "forward, backward, data, loss"
    titles = {MODEL: "forward and backward", ENGINE: "engine", OTHER: "data, loss, Python"}
    return titles.get(part, f"waiting for {part}")


def _gains(run: Run) -> dict[str, float]:
    """By lane, the share of the step that would be saved if the lane were twice as fast."""
    if run.prediction is None:
        return {}
    step_s, what_if = run.prediction.step_s, run.prediction.what_if.items()
    return {MODEL if lane == "compute" else lane: 1 - s / step_s for lane, s in what_if}


def bound(run: Run, found: Breakdown) -> str:
    """What bounds the step: the part that would save most if it were twice as fast, by the
    simulator; a part that is not simulated would save half of itself."""
    gains = {name: spent / found.step_s / 2 for name, spent in found.parts.items()}
    gains |= _gains(run)
    return max(gains, key=lambda name: gains[name])


_BOUNDS = {
    MODEL: "{own} bounds the step, as it would without offloading: {part} of it. Waiting for lanes "
    "takes {waits}, the engine itself {engine}.",
    ENGINE: "The engine itself bounds the step: {part} of it is the engine's Python, and updates "
    "of units that live on the device. It takes as long for few tokens as for many: try more "
    "tokens in a step (batch, micro_batches), or larger blocks.",
    OTHER: "Neither compute nor a lane bounds the step: {part} of it is data, the loss and Python. "
    "Try more workers of the DataLoader first, or less work between steps.",
    "compute": "{device} bounds the step: training waits {part} of the time for what was queued "
    "there, forward, backward and updates on it.",
}
_LANE_BOUNDS = (
    "The {name} lane bounds the step: it works {busy} of the time, and training waits {waits} of "
    "the time."
)
_TRY = {
    MODEL: "a faster device, or no recomputing of activations if there is any",
    "disk": "one more drive (nvme_path takes several); or leave more to cpu memory (auto in place "
    "of nvme, and a larger cpu_memory)",
    "cpu": "more cores for the update, or states on the device (auto, and a larger device_memory)",
    "h2d": "more tokens in a step (batch, micro_batches), or a larger device_memory",
    "d2h": "more tokens in a step (batch, micro_batches), or gradients on the device",
}
"""What helps, by what bounds the step, in settings of Config and of `offload train`."""


def verdict(run: Run, found: Breakdown) -> list[str]:
    """What bounds the step, and what would help most, in a sentence each."""
    name, gains = bound(run, found), _gains(run)
    spent = {"part": found.parts.get(name, 0.0), "waits": found.waited_s}
    spent |= {"engine": found.parts.get(ENGINE, 0.0), "busy": found.busy.get(name, 0.0)}
    shares = {key: f"{value / found.step_s:.0%}" for key, value in spent.items()}
    own = "The model's own compute" if run.sees_model else "What is not the engine's"
    text = _BOUNDS.get(name, _LANE_BOUNDS)
    told = [text.format(name=name, own=own, device=run.device, **shares)]
    if gains.get(name, 0.0) >= GAIN_LEAST:
        what = "A device" if name == MODEL else f"The {name} lane"
        told.append(
            f"{what} twice as fast would save {gains[name]:.0%} of the step, says the simulator. "
            f"Try {_TRY[name]}."
        )
    elif not found.busy:
        told.append("Nothing was moved: all that a step needs lives on the device.")
    elif not gains:
        told.append(f"What would help was not simulated: {run.unpredicted}.")
    if not run.device_is_host:
        told.append(
            f"Times are those of the host's thread: {run.device} computes beside it, and forward "
            "and backward, which are queued there, cannot be told from what waits for them."
        )
    return told
