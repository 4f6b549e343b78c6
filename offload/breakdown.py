"""Where the time of a step went, in shares that add up, and what would help most. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.intervals import Interval, clip, length, overlap, union
from offload.runs import LANES, Run

MODEL, ENGINE, OTHER = "model", "engine", "other"
"""The user's forward and backward; what the engine does in the user's thread meanwhile; and what
is neither of them nor a wait: data, loss, Python. The last alone is not measured but what is left.
Where an accelerator computes, the user's thread only queues the first, and waits for it in the last
(the loss is read): so both are told as the first.
"""

HELP = {
    "compute": "a faster device, or no recomputing of activations if there is any",
    "disk": "one more drive ({drives}), or more {cpu}, so that less lives on nvme",
    "cpu": "more cores for the update, or states on the device as far as they fit ({device})",
    "h2d": "more tokens in a step ({tokens}), or more {device}",
    "d2h": "more tokens in a step ({tokens}), or gradients on the device",
}
"""What can be done about each, by name of a lane; `compute` is the device: the user's own forward
and backward, and what the engine computes on it."""

_FLAGS = {
    "drives": "--nvme-path A B",
    "cpu": "--cpu-memory",
    "device": "--device-memory",
    "tokens": "--batch, --micro-batches",
    "batch": "--batch",
}
_FIELDS = {
    "drives": "Config.nvme_path of two directories",
    "cpu": "Config.cpu_memory",
    "device": "Config.device_memory",
    "tokens": "larger batches, or more of them before step()",
    "batch": "larger batches",
}
"""How `HELP` is followed in `offload train`, and in a loop of the user's own."""

_TITLES = {MODEL: "forward and backward", ENGINE: "engine", OTHER: "data, loss, Python"}
_QUEUED = "forward, backward, data, loss"

MEASURED = (
    "Times are those of the host's thread: {device} computes beside it, and forward and backward, "
    "which are queued there, cannot be told from what waits for them."
)
"""What is to be said of a run on an accelerator."""

GAIN_LEAST = 0.02
"""Share of the step that something must save to be worth naming."""

ENGINE_LEAST = 0.1
"""Share of the step from which the engine is worth a word where something else bounds it."""


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

    @property
    def waited_s(self) -> float:
        """How long training waited for lanes."""
        own = (MODEL, ENGINE, OTHER)
        return sum(seconds for name, seconds in self.parts.items() if name not in own)


def title_of(part: str, run: Run) -> str:
    """A part of a step of `run`, for people."""
    if part == MODEL and not run.device_is_host:
        return _QUEUED
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

    lanes = sorted({span.lane for span in run.spans}, key=LANES.index)
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
        **{lane: length(waits[lane]) for lane in LANES if lane in waits},
        ENGINE: length(blocked) - length(waited),
    }
    parts[OTHER] = max(0.0, until - since - sum(parts.values()))
    if not run.device_is_host:
        parts[MODEL] += parts.pop(OTHER)
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
    """What bounds the step: a lane, `model`, `engine` or `other`.

    It is what would make the step fastest if it were twice as fast, by the simulator, which sees
    past the lane that training happens to wait for; where nothing would, what takes most of it.
    The engine's own work and what is outside of all lanes would save half of themselves, but bound
    a step only where nothing else takes more of it.
    """
    shares = {name: found.parts.get(name, 0.0) for name in (MODEL, ENGINE, OTHER)}
    shares["waits"] = found.waited_s
    most = max(shares, key=lambda name: shares[name])
    gains = _gains(run)
    best = max(gains, key=lambda name: gains[name], default=None)
    gain = gains[best] if best else 0.0
    if most in (ENGINE, OTHER) and gain < shares[most] / found.step_s / 2:
        return most
    if best and gain >= GAIN_LEAST:
        return MODEL if best == "compute" else best
    lanes = [name for name in found.parts if name not in shares]
    return max(lanes, key=lambda name: found.parts[name]) if most == "waits" else most


def _gains(run: Run) -> dict[str, float]:
    """By what is thought twice as fast, the share of the step that it would save."""
    if run.prediction is None or not run.prediction.step_s:
        return {}
    step_s = run.prediction.step_s
    return {name: 1 - seconds / step_s for name, seconds in run.prediction.what_if.items()}


def verdict(run: Run, found: Breakdown) -> list[str]:
    """What bounds the step, and what would help most, in a sentence each."""
    name = bound(run, found)
    told = [_bounding(name, run, found)]
    gains = _gains(run)
    gain = gains.get("compute" if name == MODEL else name, 0.0)
    if gain >= GAIN_LEAST:
        help_ = _said(HELP["compute" if name == MODEL else name], run)
        told.append(
            f"{'A device' if name == MODEL else f'The {name} lane'} twice as fast would save "
            f"{gain:.0%} of the step, says the simulator. Try {help_}."
        )
    elif gains:
        left = [lane for lane in found.busy if found.busy[lane] and lane not in gains]
        beside = f" ({', '.join(left)} not tried: a step has many operations)" if left else ""
        told.append(f"No lane alone would make it faster by much{beside}.")
    elif not found.busy:
        told.append("Nothing had to be moved: all that it needs lives on the device.")
    else:
        told.append(f"What would help was not simulated: {run.unpredicted}.")
    if not run.device_is_host:
        told.append(MEASURED.format(device=run.device))
    return told


_MORE_TOKENS = "The engine takes as long for few tokens as for many: try more in a step ({batch})"


def _said(advice: str, run: Run) -> str:
    """Advice in the words of what was run."""
    own = list(run.command[:2]) != ["offload", "train"]
    return advice.format(**(_FIELDS if own else _FLAGS))


def _bounding(name: str, run: Run, found: Breakdown) -> str:
    """What it means for the step that `name` bounds it, in numbers."""

    def share(seconds: float) -> str:
        return f"{seconds / found.step_s:.0%}"

    part, waits = found.parts.get(name, 0.0), found.waited_s
    if name == MODEL:
        engine = found.parts.get(ENGINE, 0.0)
        own = "The model's own compute" if run.device_is_host else "What is not the engine's"
        told = (
            f"{own} bounds the step, as it would without offloading: {share(part)} of it. "
            f"Waiting for lanes takes {share(waits)}, the engine itself {share(engine)}."
        )
        worth = engine > max(waits, ENGINE_LEAST * found.step_s)
        return f"{told} {_said(_MORE_TOKENS, run)}." if worth else told
    if name == ENGINE:
        told = (
            f"The engine itself bounds the step: {share(part)} of it is its Python, and updates of "
            "units that live on the device."
        )
        return f"{told} {_said(_MORE_TOKENS, run)}, or larger blocks."
    if name == OTHER:
        return (
            f"Neither compute nor a lane bounds the step: {share(part)} of it is data, the loss, "
            "Python, and other models if there are any. Try more workers of the DataLoader first, "
            "or less work between steps."
        )
    if name == "compute" and not run.device_is_host:
        return (
            f"{run.device} bounds the step: training waits {share(part)} of the time until it is "
            "through with what was queued there, forward, backward and updates on it."
        )
    return (
        f"The {name} lane bounds the step: it works {share(found.busy.get(name, 0.0))} of the "
        f"time, and training waits {share(waits)} of the time."
    )
