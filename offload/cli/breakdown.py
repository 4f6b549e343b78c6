"""Where the time of a run's steps went, and what bounds them: what `offload report` says. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from offload.reporting import ENGINE, LANES, MODEL, OTHER, Interval, Run, Span, Wait, clip, seconds

SLOW = 0.9
"""Share of a drive's measured speed below which a cause is named."""

GAIN_LEAST = 0.02
"""Share of the step that something must save to be worth naming."""


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
    faster, step_s = run.prediction.faster.items(), run.prediction.step_seconds
    return {lane: 1 - s / step_s for lane, s in faster}


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
    "comm": "more tokens in a step (batch, micro_batches), or shard=2, which keeps whole weights",
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
    own = "The model's own compute" if run.sees_model else "Your own code (model, data, loss)"
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
    elif run.prediction is None:
        told.append(f"What would help was not simulated: {run.unpredicted}.")
    told += _drive(run, found)
    if not run.device_is_host:
        told.append(
            f"Times are those of the host's thread: {run.device} computes beside it, and forward "
            "and backward, which are queued there, cannot be told from what waits for them."
        )
    return told


def _drive(run: Run, found: Breakdown) -> Iterator[str]:
    """The speed of the disk lane beside that of the drive, and why it is less."""
    moved, busy, drive = found.bytes.get("disk", 0), found.busy.get("disk"), run.drive_bytes_per_s
    if not (busy and drive):
        return
    cause = "other programs use the drive, or it is slower than it was: offload bench nvme again"
    if run.device_is_host:
        cause = "the model and the updates take the processors and the memory that it needs"
    yield (
        f"The disk lane moved {moved / busy / 1e9:.2f} GB/s while it worked; bench nvme measured "
        f"{drive / 1e9:.2f} for reading and writing at once"
        + (f". Likely {cause}." if moved / busy < SLOW * drive else ".")
    )
