"""Where the time of a step went, in shares that add up, and what would help most. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.intervals import Interval, clip, length, overlap, union
from offload.runs import Run

MODEL, ENGINE, OTHER = "model", "engine", "other"
"""The user's forward and backward; what the engine does in the user's thread meanwhile; and what
is neither of them nor a wait: data, loss, Python. The last alone is not measured but what is left.
"""

HELP = {
    "compute": "a faster device, or no recomputing of activations if there is any; offloading "
    "costs little here",
    "disk": "one more drive (--nvme-path A B), or more --cpu-memory, so that less lives on nvme",
    "cpu": "more cores for the update, or states on the device as far as they fit "
    "(--device-memory)",
    "h2d": "more tokens in a step (--batch, --micro-batches), or more --device-memory",
    "d2h": "more tokens in a step (--batch, --micro-batches), or gradients on the device",
}
"""What can be done about each, by name of a lane; `compute` is the user's own."""

_TITLES = {MODEL: "forward and backward", ENGINE: "engine", OTHER: "data, loss, Python"}

GAIN_LEAST = 0.02
"""Share of the step that something must save to be worth naming."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Means over whole steps, in seconds and bytes of one."""

    since: float
    until: float
    """The stretch that was looked at: from one `step()` to another."""
    steps: int
    step_s: float
    parts: Mapping[str, float]
    """`model`, each lane that training waited for, `engine`, `other`: together the step."""
    busy: Mapping[str, float]
    """By lane, how long it worked."""
    bytes: Mapping[str, float]
    """By lane."""
    ways: Mapping[str, float]
    """Bytes by the tiers that they left and reached: `nvme > cpu`."""
    misses: int
    """In all the steps together."""


def title_of(part: str) -> str:
    """A part of a step, for people."""
    return _TITLES.get(part, f"waiting for {part}")


def breakdown(run: Run) -> Breakdown:
    """Where the time of the steps that a run has kept went.

    Raises:
        ValueError: it has kept no whole step.
    """
    marks = [mark for mark in run.stepped if mark[1] >= run.since]
    if len(marks) < 2:
        raise ValueError(
            f"the run holds {max(0, len(marks) - 1)} whole steps; likely it was too short, or its "
            "steps have more operations than are kept; train three steps at least, or a smaller "
            "model"
        )
    (_, since, misses_before), (_, until, misses) = marks[0], marks[-1]
    steps = len(marks) - 1

    def within(found: list[Interval]) -> list[Interval]:
        return union(clip(found, since, until))

    lanes = list(dict.fromkeys(span.lane for span in run.spans))
    busy = {
        lane: within([(s.start, s.stop) for s in run.spans if s.lane == lane]) for lane in lanes
    }
    waits = {
        lane: within([(w.start, w.stop) for w in run.waits if w.lane == lane])
        for lane in dict.fromkeys(wait.lane for wait in run.waits)
    }
    waited = union([one for found in waits.values() for one in found])
    calls = busy.pop(ENGINE, [])
    blocked = union([*calls, *waited])
    working = busy.pop(MODEL, [])
    parts = {
        MODEL: length(working) - overlap(working, blocked),
        **{lane: length(found) for lane, found in waits.items()},
        ENGINE: length(blocked) - length(waited),
    }
    parts[OTHER] = max(0.0, until - since - sum(parts.values()))
    moved: dict[str, float] = {}
    ways: dict[str, float] = {}
    for span in run.spans:
        if span.lane in busy and since <= span.start < until:
            moved[span.lane] = moved.get(span.lane, 0.0) + span.bytes
            if span.tier:
                ways[span.tier] = ways.get(span.tier, 0.0) + span.bytes
    return Breakdown(
        since=since,
        until=until,
        steps=steps,
        step_s=(until - since) / steps,
        parts={name: seconds / steps for name, seconds in parts.items() if seconds},
        busy={lane: length(found) / steps for lane, found in busy.items()},
        bytes={lane: count / steps for lane, count in moved.items()},
        ways={way: count / steps for way, count in ways.items()},
        misses=misses - misses_before,
    )


def bound(run: Run, found: Breakdown) -> str:
    """What bounds the step: a lane, `model` or `other`.

    It is what would make the step fastest if it were twice as fast, by the simulator, which sees
    past the lane that training happens to wait for; where nothing would, what takes most of it.
    The engine's own work and what is outside of all lanes would save half of themselves.
    """
    if run.prediction is not None and run.prediction.what_if:
        what_if = run.prediction.what_if
        best = min(what_if, key=lambda name: what_if[name])
        saved = run.prediction.step_s - what_if[best]
        rest = max((ENGINE, OTHER), key=lambda name: found.parts.get(name, 0.0))
        if saved < found.parts.get(rest, 0.0) / 2:
            return rest
        if saved >= GAIN_LEAST * run.prediction.step_s:
            return MODEL if best == "compute" else best
    return max(found.parts, key=lambda name: found.parts[name])


def verdict(run: Run, found: Breakdown) -> list[str]:
    """What bounds the step, and what would help most, in a sentence each."""
    name = bound(run, found)
    share = found.parts.get(name, 0.0) / found.step_s
    waits = sum(s for part, s in found.parts.items() if part not in (MODEL, ENGINE, OTHER))
    busy = found.busy.get(name, 0.0) / found.step_s
    if name == MODEL:
        told = [f"The model's own compute bounds the step: {share:.0%} of it."]
    elif name == ENGINE:
        told = [
            f"The engine's own Python bounds the step: {share:.0%} of it. It takes as long for a "
            "small unit as for a large one. Try more tokens in a step (--batch), or larger blocks."
        ]
    elif name == OTHER:
        told = [
            f"Neither compute nor a lane bounds the step: {share:.0%} of it is data, the loss and "
            "Python. Try more workers of the DataLoader first, or less work between steps."
        ]
    else:
        told = [
            f"The {name} lane bounds the step: it works {busy:.0%} "
            f"of the time, and training waits {waits / found.step_s:.0%} of the time."
        ]
    if run.prediction is None:
        return [*told, "Too few steps were kept to say what would help."]
    key = "compute" if name == MODEL else name
    faster = run.prediction.what_if.get(key, run.prediction.step_s)
    gain = 1 - faster / run.prediction.step_s if run.prediction.step_s else 0.0
    if gain < GAIN_LEAST:
        return [*told, "No lane alone would make it faster by much."]
    told.append(
        f"Twice as fast it would save {gain:.0%} of the step, says the simulator. Try {HELP[key]}."
    )
    return told
