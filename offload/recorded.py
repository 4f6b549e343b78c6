"""Makes a `Run` of an engine: what its trace holds, and what the simulator says of it."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from offload.breakdown import ENGINE, MODEL
from offload.engine import Engine
from offload.intervals import Interval, clip, length, overlap, union
from offload.ledger import LaneUse
from offload.machine import Machine
from offload.marks import is_pass
from offload.program import Lane, Op, Verb
from offload.runs import Prediction, Run, Span, Wait
from offload.simulate import Timeline, simulate
from offload.trace import Ran, Trace

WHAT_IF_FACTOR = 2.0
"""By how much a lane is thought faster, to see what would help."""

SIMULATED_STEPS = 3
"""The third is like those after it."""

SIMULATED_OPS_MAX = 400_000
"""In all steps of all that is simulated: about ten seconds. A larger step is not simulated, and of
a large one fewer lanes are thought faster."""

_USER = (Verb.FORWARD, Verb.BACKWARD)


def run_of(engine: Engine, command: Sequence[str] | None = None) -> Run | None:
    """What `engine` did last; None where Config.trace is False.

    `command` is what was typed; without it the program's name, as arguments may be secret.
    """
    trace = engine.executor.lanes.ledger.traced()
    if trace is None:
        return None
    report = engine.report()
    starts = [ran.start for ran in trace.ran] + [one.at for one in trace.stepped]
    starts += [wait.start for wait in trace.waited]  # may begin before the op that it is for
    zero = min(starts, default=0.0)
    since = _since(trace, zero)
    calls = union(call for call in trace.called if call[0] >= max(zero, trace.since))
    names = [_printable(unit.name) for unit in engine.plan.profile.units]
    prediction, unpredicted = _predicted(engine, trace, since)
    return Run(
        made=datetime.now().isoformat(timespec="seconds"),
        command=[_printable(word) for word in (_program() if command is None else command)],
        model=_model(engine),
        device=str(engine.executor.device.torch_device),
        device_is_host=engine.executor.device.is_host,
        versions=_versions(),
        steps=report.steps,
        wall_s=report.wall_s,
        misses=report.misses,
        lanes={name: asdict(use) for name, use in report.lanes.items()},
        homes=[(row.kind, row.tier, row.bytes) for row in engine.plan.rows()],
        tiers={
            use.tier: (use.resident_bytes + use.staging_bytes, use.budget_bytes)
            for use in report.tiers
        },
        spans=[
            *(_span(ran, zero, names) for ran in sorted(trace.ran, key=lambda ran: ran.start)),
            *(Span(ENGINE, "call", "", start - zero, stop - zero, 0) for start, stop in calls),
        ],
        waits=[Wait(w.lane.value, w.start - zero, w.stop - zero) for w in trace.waited],
        stepped=[(one.number, one.at - zero, one.misses) for one in trace.stepped],
        since=since - zero,
        prediction=prediction,
        unpredicted=unpredicted,
    )


def _program() -> list[str]:
    """The name of the program that runs, where it has one."""
    path = Path(sys.argv[0] if sys.argv else "")
    name = path.parent.name if path.name == "__main__.py" else path.name
    return [] if name in ("", "-c", "-m") else [name]


def _printable(text: str) -> str:
    """Without what would move a cursor, or is no character."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _model(engine: Engine) -> str:
    units = engine.plan.profile.units
    inside = [one for unit in units for one in unit.parameters]
    dtypes = ", ".join(dict.fromkeys(one.dtype for one in inside))
    return f"{sum(one.elements for one in inside):,} parameters in {dtypes}, {len(units)} units"


def _versions() -> dict[str, str]:
    try:
        own = version("offload-engine")
    except PackageNotFoundError:  # Run from its sources.
        own = "unknown"
    # Torch's own word: its package's version leaves out what it was built for.
    return {"offload": own, "torch": torch.__version__, "Python": platform.python_version()}


def _since(trace: Trace, zero: float) -> float:
    """The moment from which steps are alike.

    The updates of the first step begin after it, those of others inside their backward, once it
    has shown what is final: from the first `step()` to the second there are two steps' updates.
    """
    first = trace.stepped[1].at if len(trace.stepped) > 2 and trace.stepped[0].number == 1 else 0.0
    return max(first, trace.since, zero)


def _span(ran: Ran, zero: float, names: Sequence[str]) -> Span:
    op = ran.op
    lane = MODEL if op.verb in _USER else ran.lane.value
    unit = names[op.value.unit] if 0 <= op.value.unit < len(names) else ""
    name, tier = op.verb.value, ""
    if op.verb is Verb.MOVE:
        here, there = op.reads[0].place.tier, op.writes[0].place.tier
        name, tier = f"{op.value.kind} {here} to {there}", f"{here} > {there}"
    return Span(lane, name, unit, ran.start - zero, ran.stop - zero, op.bytes, tier)


def _predicted(engine: Engine, trace: Trace, since: float) -> tuple[Prediction | None, str]:
    """The simulator's word on the steps after `since`, at the speeds that were seen in them, or
    why it has none.

    The engine's own work within a unit's stretch of compute is taken for compute, but a faster
    device would not make it faster.
    """
    kept = [one for one in trace.stepped if one.at >= since]
    program = engine.program
    if len(trace.stepped) < 3 or len(kept) < 2:
        return None, "too few whole steps were kept"
    since, until, steps = kept[0].at, kept[-1].at, len(kept) - 1
    ran_units = [ran for ran in trace.ran if not is_pass(ran.op)]
    inside = [ran for ran in ran_units if since <= ran.start and ran.stop <= until]
    trained = _trained(inside)
    if not trained:
        return None, "all units live on the device"
    each = Counter(
        (op.value.unit, op.verb)
        for name in ("forward", "backward_first")
        for op in program.phases[name].ops
        if op.verb in _USER
    )
    used = sum(verb is Verb.BACKWARD for _, verb in each)
    micro_batches = max(1, round(trained / used / steps))
    ops = {name: len(phase.ops) for name, phase in program.phases.items()}
    count = sum(ops.values()) + (micro_batches - 1) * ops["forward"]
    count += (micro_batches - 2) * ops["backward_next"]
    most = SIMULATED_OPS_MAX // (SIMULATED_STEPS * count)
    if not most:
        told = f"a step has {count:,} operations, more than the simulator takes on"
        return None, f"{told} ({SIMULATED_OPS_MAX // SIMULATED_STEPS:,})"

    waits = union(clip([(w.start, w.stop) for w in trace.waited], since, until))
    compute, working = _compute(inside, waits)
    _, own = _compute(inside, union([*waits, *clip(trace.called, since, until)]))
    gained = (1 - 1 / WHAT_IF_FACTOR) * (own / working if working else 0.0)
    seconds = {key: compute.get(key, 0.0) / (n * steps * micro_batches) for key, n in each.items()}
    idle = max(0.0, until - since - length(waits) - working) / steps

    def timeline(machine: Machine, left: float = 1.0) -> Timeline:
        return simulate(
            program,
            machine,
            lambda unit, verb: seconds[unit, verb] * left,
            steps=SIMULATED_STEPS,
            micro_batches=micro_batches,
            host_seconds=idle,
            updates_in_backward=engine.finality.begins_early,
        )

    machine = _machine(inside, device_is_cpu=engine.executor.device.is_host)
    return _asked(timeline, machine, gained, most, engine.report().lanes), ""


def _asked(
    timeline: Callable[..., Timeline],
    machine: Machine,
    gained: float,
    most: int,
    uses: Mapping[str, LaneUse],
) -> Prediction:
    """The step on `machine`, and on those where a lane is faster, at `most` so many in all.

    The device goes first, then what training waited for. It computes the user's own faster, so that
    `gained` of it is gone, and what the engine computes there; of an accelerator, whose time is not
    known, nothing is said.
    """
    found = timeline(machine)
    moved = {span.lane for span in found.spans}
    lanes = [lane for lane in _SPEEDS if lane in moved and lane is not Lane.COMPUTE]
    lanes.sort(key=lambda lane: (-uses[lane.value].exposed_s, -uses[lane.value].busy_s))
    what_if = {}
    for lane in [*[Lane.COMPUTE] * machine.device_is_cpu, *lanes][: most - 1]:
        faster = {name: getattr(machine, name) * WHAT_IF_FACTOR for name in _SPEEDS[lane]}
        left = 1 - gained if lane is Lane.COMPUTE else 1.0
        what_if[lane.value] = timeline(replace(machine, **faster), left).step_seconds
    busy = dict.fromkeys((lane.value for lane in _SPEEDS), 0.0)
    for span in found.spans:
        if span.op.verb not in _USER:
            busy[span.lane.value] += (span.stop - span.start) / len(found.steps)
    return Prediction(found.step_seconds, found.exposed, busy, what_if)


def _trained(inside: Sequence[Ran]) -> int:
    """How often a backward of a unit followed its forward: an evaluation has none."""
    count, last = 0, dict[int, Verb]()
    for ran in sorted(inside, key=lambda ran: ran.start):
        if ran.op.verb in _USER:
            unit = ran.op.value.unit
            count += ran.op.verb is Verb.BACKWARD and last.get(unit) is Verb.FORWARD
            last[unit] = ran.op.verb
    return count


def _compute(
    inside: Sequence[Ran], out: Sequence[Interval]
) -> tuple[dict[tuple[int, Verb], float], float]:
    """Seconds of the user's compute by unit and verb, and of all together, less what is in `out`.

    Units in use together share their time: what each has is scaled so that the sum is that of all.
    """
    spans: dict[tuple[int, Verb], list[Interval]] = {}
    for ran in inside:
        if ran.op.verb in _USER:
            spans.setdefault((ran.op.value.unit, ran.op.verb), []).append((ran.start, ran.stop))

    def net(found: Iterable[Interval]) -> float:
        joined = union(found)
        return length(joined) - overlap(joined, out)

    whole = net(one for found in spans.values() for one in found)
    each = {key: net(found) for key, found in spans.items()}
    total = sum(each.values())
    scale = whole / total if total else 0.0
    return {key: seconds * scale for key, seconds in each.items()}, whole


_SPEEDS = {
    Lane.COMPUTE: ("compute_bytes_per_s",),
    Lane.H2D: ("h2d_bytes_per_s",),
    Lane.D2H: ("d2h_bytes_per_s",),
    Lane.CPU: ("cpu_bytes_per_s",),
    Lane.DISK: ("disk_read_bytes_per_s", "disk_write_bytes_per_s"),
}


def _machine(inside: Sequence[Ran], *, device_is_cpu: bool) -> Machine:
    """A machine whose lanes have the speeds that were seen."""
    sums: dict[str, list[float]] = {}
    for ran in inside:
        if ran.op.verb not in _USER:
            total = sums.setdefault(_speed_of(ran.op), [0.0, 0.0])
            total[0] += ran.op.bytes
            total[1] += ran.stop - ran.start
    seen = {name: moved / took for name, (moved, took) in sums.items() if moved and took}
    machine = Machine(device_bytes=0, cpu_bytes=0, device_is_cpu=device_is_cpu, op_seconds=0.0)
    return replace(machine, **seen)  # type: ignore[arg-type]


def _speed_of(op: Op) -> str:
    """The field of Machine with the speed of an op."""
    writes = op.lane is Lane.DISK and op.writes[0].place.tier == "nvme"
    return _SPEEDS[op.lane][-1 if writes else 0]
