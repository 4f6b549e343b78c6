"""A run as plain data: what an engine did last, what it took, what the simulator says. Pure.

`recorded.run_of` makes one of an engine, `save` and `load` keep it in a file, `keep` among the last
ones in the user's cache; `breakdown` says where the time went, `offload report` shows it. Times are
seconds from the first moment kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from offload.kept import in_cache, write_whole
from offload.shapes import Misfit, maker

FORMAT = "offload run"
VERSION = 2

RUN_BYTES_MAX = 1 << 29
"""Of a file that is read: that of a model of 70 B parameters, all on nvme, has half of it."""

KEPT_MAX = 10
KEPT_BYTES_MAX = 1 << 28
"""Runs that are kept in the cache, and bytes of them in all; but the last one always."""

LANES = ("model", "engine", "compute", "h2d", "d2h", "cpu", "disk", "comm")
"""What a span may be on, in the order in which they are told."""


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
    """When, in ISO 8601, by the clock of that machine."""
    command: Sequence[str]
    """What was typed; of a loop of the user's own, the name of its program alone."""
    model: str
    """Parameters, type and units, in words."""
    device: str
    """The compute device, as torch names it."""
    device_is_host: bool
    """Whether the host computes itself. Else forward and backward are queued, and the time of the
    user's thread in them is not that of the device."""
    versions: Mapping[str, str]
    """Of this package and of what it stands on."""
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
    unpredicted: str
    """Why there is none."""


def folder() -> Path:
    """Where runs are left that were given no place of their own: in the user's cache.

    Raises:
        OSError: the user has none.
    """
    return in_cache("runs")


def kept() -> list[Path]:
    """The runs in the cache, the last one first; their names tell when they were left.

    Raises:
        OSError: the user has no cache, or it cannot be looked into.
    """
    where = folder()
    found = where.iterdir() if where.is_dir() else ()
    return sorted((one for one in found if one.suffixes == [".json"]), key=_order, reverse=True)


def _order(path: Path) -> tuple[str, int]:
    """Of runs of the same second, the second one is called -2."""
    return path.stem[:17], int(path.stem[18:]) if path.stem[18:].isdigit() else 1


def keep(run: Run) -> Path:
    """Leaves a run in the cache, and lets go of the oldest there; where it is.

    Raises:
        OSError: the user has no cache, or it cannot be written.
    """
    stem = run.made.replace("T", "-").replace(":", "")
    number = max((_order(one)[1] for one in kept() if one.stem.startswith(stem)), default=0)
    path = folder() / f"{stem}{f'-{number + 1}' * (number > 0)}.json"
    save(run, path)
    total = 0
    with contextlib.suppress(OSError):  # Another process lets go of them too.
        for number, old in enumerate(kept()):
            total += old.stat().st_size
            if old != path and (number >= KEPT_MAX or total > KEPT_BYTES_MAX):
                for ending in (".json", ".html", ".trace.json"):
                    old.with_suffix(ending).unlink(missing_ok=True)
    return path


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
        ValueError: it is no such file, one of another version, or damaged.
    """
    with open(path, "rb") as file:
        text = file.read(RUN_BYTES_MAX + 1)
    try:
        if len(text) > RUN_BYTES_MAX:
            raise ValueError("too large")
        content = json.loads(text.decode("utf-8"))
        kind, version = content.pop("format"), content.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} is no run: likely another kind of file, or only a part of one; runs are what "
            "offload train leaves (offload report --list)"
        ) from None
    if kind != FORMAT or type(version) is not int or version != VERSION:
        later = type(version) is int and version > VERSION
        raise ValueError(
            f"{path} is {str(kind)[:40]!r} of version {str(version)[:40]}, and this is for "
            f"{FORMAT!r} of version {VERSION}: likely {'a later' if later else 'another'} release "
            f"wrote it; {'show it with that one, or ' if later else ''}train again"
        )
    try:
        run: Run = maker(Run)(content)
        for wrong in _contradictions(run):
            raise Misfit(*wrong)
    except Misfit as error:
        raise ValueError(
            f"{path} is a damaged run: {error}; likely it was edited, or its drive failed; "
            "train again"
        ) from None
    return run


def _contradictions(run: Run) -> Iterator[tuple[Any, str]]:
    """What cannot be in a run although its types are right: what there is, and what is due."""
    try:
        datetime.fromisoformat(run.made)
    except ValueError:
        yield run.made, "a time in ISO 8601"
    spans: list[Span | Wait] = [*run.spans, *run.waits]
    if unknown := {span.lane for span in spans} - set(LANES):
        yield min(unknown), f"one of the lanes {', '.join(LANES)}"
    if unknown := {*run.tiers, *(at for _, at, _ in run.homes)} - {"device", "cpu", "nvme"}:
        yield min(unknown), "one of the tiers device, cpu, nvme"
    if back := [span for span in spans if not 0 <= span.start <= span.stop]:
        yield (back[0].start, back[0].stop), "a start and a stop after it"
    for one, other in pairwise(run.stepped):
        if one[0] >= other[0] or one[1] >= other[1]:
            yield other, f"a step after {one}"
    told = run.prediction
    if told and not (told.step_s > 0 and min([0, *told.what_if.values()]) >= 0):
        yield told, "times of steps that take some"
