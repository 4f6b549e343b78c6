"""Predict a step in its steady state: how long, what each lane does, and what bounds it. Pure.

[Note: Alike micro-batches]
From the second on, micro-batches are alike. So at most a few are simulated, and what one more takes
is added for each of the rest: a step of a thousand micro-batches costs no more than one of three.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.planning.machine import Machine
from offload.program.ops import Lane, Program, Verb
from offload.program.simulate import ComputeSeconds, Timeline, simulate, speeds_of
from offload.reporting import MODEL, Prediction

STEPS = 2
"""That are simulated: the second is as all that follow, since each waits for the one before."""

MICRO_BATCHES = 3
"""That are simulated at most, see [Note: Alike micro-batches]."""


def predict(
    program: Program,
    machine: Machine,
    compute_seconds: ComputeSeconds,
    *,
    micro_batches: int = 1,
    early: bool = True,
    host_seconds: float = 0.0,
    tries: bool = True,
    faster_share: float = 0.5,
) -> Prediction:
    """Arguments as of `simulate`, of which `early` is `updates_in_backward`; with `tries` each lane
    that matters is tried twice as fast, too, and the user's own compute in a share of its time."""

    def found(machine: Machine, share: float = 1.0) -> Prediction:
        how: Any = {"steps": STEPS, "host_seconds": host_seconds, "updates_in_backward": early}

        def compute(unit: int, verb: Verb) -> float:
            return share * compute_seconds(unit, verb)

        few = min(micro_batches, MICRO_BATCHES)
        counts = (few,) if few == micro_batches else (few - 1, few)
        made = [_step(simulate(program, machine, compute, micro_batches=n, **how)) for n in counts]
        return _extended(made, micro_batches - few)

    plain = found(machine)
    if not tries:
        return plain
    faster = dict[str, float]()
    for name, busy in plain.busy.items():
        if busy < plain.step_seconds / 10:
            continue  # It would save less.
        names = () if name == MODEL else speeds_of(Lane(name))
        speeds: Any = {one: 2 * getattr(machine, one) for one in names}
        speeds |= {"pcie_bytes_per_s": 2 * machine.pcie_bytes_per_s} if name == "comm" else {}
        other = found(replace(machine, **speeds), faster_share if name == MODEL else 1.0)
        faster[name] = other.step_seconds
    return replace(plain, faster=faster)


def _step(timeline: Timeline) -> Prediction:
    """The last of a few simulated steps."""
    since, until = timeline.steps[-2:]
    busy, moved = dict[str, float](), dict[str, int]()
    for span in timeline.spans:
        user = span.op.verb in (Verb.FORWARD, Verb.BACKWARD)
        name = MODEL if user else span.lane.value
        inside = min(span.stop, until) - max(span.start, since)
        busy[name] = busy.get(name, 0.0) + max(0.0, inside)
        if span.step == STEPS - 2:
            moved[name] = moved.get(name, 0) + span.op.bytes
    return Prediction(timeline.step_seconds, timeline.exposed, busy, moved)


def _extended(made: list[Prediction], more: int) -> Prediction:
    """The last, with so many more micro-batches, each of which is what it has before the first."""
    last, first = made[-1], made[0]
    return Prediction(
        last.step_seconds + more * (last.step_seconds - first.step_seconds),
        last.exposed_seconds + more * (last.exposed_seconds - first.exposed_seconds),
        {n: v + more * (v - first.busy.get(n, 0.0)) for n, v in last.busy.items()},
        {n: v + more * (v - first.moved.get(n, 0)) for n, v in last.moved.items()},
    )
