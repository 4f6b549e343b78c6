"""Makes a `Run` of an engine: what its trace holds, and what the simulator says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime

from offload.breakdown import ENGINE, MODEL
from offload.engine import Engine
from offload.intervals import Interval, clip, length, overlap, union
from offload.machine import Machine
from offload.marks import is_pass
from offload.program import Lane, Op, Verb
from offload.runs import Prediction, Run, Span, Wait
from offload.simulate import Timeline, simulate
from offload.trace import Ran, Trace

WHAT_IF_FACTOR = 2.0
"""By how much a lane is thought faster, to see what would help."""

SIMULATED_OPS_MAX = 4000
"""Programs with more ops are not simulated: that would take more than some seconds."""

_USER = (Verb.FORWARD, Verb.BACKWARD)


def run_of(engine: Engine) -> Run | None:
    """What `engine` did last; None where Config.trace is False."""
    trace = engine.executor.lanes.traced()
    if trace is None:
        return None
    report = engine.report()
    starts = [ran.start for ran in trace.ran] + [one.at for one in trace.stepped]
    starts += [wait.start for wait in trace.waited]  # may begin before the op that it is for
    zero = min(starts, default=0.0)
    since = _since(trace, zero)
    calls = union(call for call in trace.called if call[0] >= max(zero, trace.since))
    names = [unit.name for unit in engine.plan.profile.units]
    return Run(
        made=datetime.now().isoformat(timespec="seconds"),
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
        prediction=_predicted(engine, trace, since),
    )


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


def _predicted(engine: Engine, trace: Trace, since: float) -> Prediction | None:
    """The simulator's word on the steps after `since`, at the speeds that were seen in them.

    The engine's own work within a unit's stretch of compute is taken for compute, but a faster
    device would not make it faster.
    """
    kept = [one for one in trace.stepped if one.at >= since]
    program = engine.program
    ops = sum(len(phase.ops) for phase in program.phases.values())
    if len(trace.stepped) < 3 or len(kept) < 2 or ops > SIMULATED_OPS_MAX:
        return None
    since, until, steps = kept[0].at, kept[-1].at, len(kept) - 1
    ran_units = [ran for ran in trace.ran if not is_pass(ran.op)]
    inside = [ran for ran in ran_units if since <= ran.start and ran.stop <= until]
    waits = union(clip([(w.start, w.stop) for w in trace.waited], since, until))
    trained = _trained(inside)
    if not trained:
        return None
    each = Counter(
        (op.value.unit, op.verb)
        for name in ("forward", "backward_first")
        for op in program.phases[name].ops
        if op.verb in _USER
    )
    used = sum(verb is Verb.BACKWARD for _, verb in each)
    micro_batches = max(1, round(trained / used / steps))
    compute, working = _compute(inside, waits)
    _, own = _compute(inside, union([*waits, *clip(trace.called, since, until)]))
    gained = (1 - 1 / WHAT_IF_FACTOR) * (own / working if working else 0.0)
    seconds = {key: compute.get(key, 0.0) / (n * steps * micro_batches) for key, n in each.items()}
    idle = max(0.0, until - since - length(waits) - working) / steps
    machine = _machine(inside, device_is_cpu=engine.executor.device.is_host)

    def timeline(machine: Machine, left: float = 1.0) -> Timeline:
        return simulate(
            program,
            machine,
            lambda unit, verb: seconds[unit, verb] * left,
            micro_batches=micro_batches,
            host_seconds=idle,
            updates_in_backward=engine.finality.counts,
        )

    found = timeline(machine)
    what_if = {}
    for lane, fields in _SPEEDS.items():
        faster = {name: getattr(machine, name) * WHAT_IF_FACTOR for name in fields}
        # A faster device computes the user's own faster, and what the engine computes there.
        left = 1 - gained if lane is Lane.COMPUTE else 1.0
        if lane is Lane.COMPUTE or any(span.lane is lane for span in found.spans):
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
