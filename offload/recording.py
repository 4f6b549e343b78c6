"""Make a `Run` of what an engine did last, with the simulator's prediction."""

from __future__ import annotations

import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from offload.model.engine import Engine
from offload.planning.machine import Machine, measured_speeds
from offload.program.compile import compile_program
from offload.program.ops import OF_USER, Lane, Program, Verb
from offload.program.predict import predict
from offload.program.simulate import speed_of
from offload.reporting import ENGINE, MODEL, Prediction, Run, Span, Wait, clip, seconds
from offload.runtime.stats import Ran, Trace

SIMULATED_OPS_MAX = 30_000
"""Ops of a step that is simulated, which with each lane twice as fast takes some ten seconds."""


def program_of(engine: Engine) -> Program:
    """The compiled phases of a step, in the order of use of the last passes."""
    forward, backward = (engine.passes.orders[verb] for verb in (Verb.FORWARD, Verb.BACKWARD))
    profile = replace(engine.plan.profile, forward=forward, backward=backward)
    return compile_program(replace(engine.plan, profile=profile))


def run_of(engine: Engine, command: Sequence[str] | None = None) -> Run:
    """What `engine` did last. `command` is the command line; by default only the program's name is
    kept, as arguments may be secret."""
    trace = engine.runner.stats.traced()
    units, tiers = engine.plan.profile.units, engine.plan.tiers()
    starts = [ran.start for ran in trace.ran] + [wait.start for wait in trace.waited]
    zero = min([*starts, *(one.at for one in trace.stepped)], default=0.0)
    # Even with updates inside backward, those of the first step follow its step(), so the second
    # step has the updates of two.
    began = len(trace.stepped) > 2 and trace.stepped[0].number == 1
    since = max(zero, trace.since, trace.stepped[1].at if began else 0.0)
    prediction, unpredicted = _predicted(engine, trace, since)
    parameters = [one for unit in units for one in unit.parameters]
    dtypes = ", ".join(dict.fromkeys(one.dtype for one in parameters))
    elements = sum(one.elements for one in parameters)
    told = engine.report().ranks
    both = [one.both_bytes_per_s if one else 0.0 for one in measured_speeds(engine.nvme_path)]
    spans = [_span(ran, zero, engine) for ran in sorted(trace.ran, key=lambda ran: ran.start)]
    for start, stop in trace.called:
        if start >= max(zero, trace.since):
            spans.append(Span(ENGINE, "call", "", start - zero, stop - zero, 0))
    return Run(
        made=datetime.now().isoformat(timespec="seconds"),
        command=[Path(one).name for one in sys.argv[:1]] if command is None else list(command),
        model=f"{elements:,} parameters in {dtypes}, {len(units)} units{told and f'; {told}'}",
        device=str(engine.runner.device.torch_device),
        device_is_host=engine.runner.device.is_host,
        residents=len(engine.plan.residents),
        versions={"torch": torch.__version__, "Python": platform.python_version()},
        steps=engine.report().steps,
        homes=[(row.kind, row.tier, row.bytes) for row in engine.plan.rows()],
        tiers={t.tier: (t.resident_bytes + t.staging_bytes, t.budget_bytes) for t in tiers},
        drive_bytes_per_s=sum(both) if all(both) else 0.0,
        spans=spans,
        waits=[Wait(Lane(w.lane).value, w.start - zero, w.stop - zero) for w in trace.waited],
        stepped=[(one.number, one.at - zero, one.misses) for one in trace.stepped],
        since=since - zero,
        prediction=prediction,
        unpredicted=unpredicted,
    )


def _span(ran: Ran, zero: float, engine: Engine) -> Span:
    op, units = ran.op, engine.plan.profile.units
    lane = MODEL if op.verb in OF_USER else op.lane.value
    unit = units[op.value.unit].name if op.value.unit >= 0 else ""
    name = op.verb.value
    if op.verb is Verb.MOVE:
        here, there = op.reads[0].place.tier, op.writes[0].place.tier
        name = f"{op.value.kind} {here} to {there}"
    return Span(lane, name, unit, ran.start - zero, ran.stop - zero, op.bytes)


def _predicted(engine: Engine, trace: Trace, since: float) -> tuple[Prediction | None, str]:
    """The simulated step, from compute and speeds measured since then; or why there is none."""
    kept = [one for one in trace.stepped if one.at >= since]
    if len(trace.stepped) < 3 or len(kept) < 2:
        return None, "too few whole steps were kept"
    since, until, steps = kept[0].at, kept[-1].at, len(kept) - 1
    ran = [one for one in trace.ran if since <= one.start and one.stop <= until]
    user = [one for one in ran if one.op.verb in (Verb.FORWARD, Verb.BACKWARD)]
    backwards = sum(one.op.verb is Verb.BACKWARD for one in user)
    if not backwards:
        return None, "all units live on the device"
    if (count := len(ran) // steps) > SIMULATED_OPS_MAX:
        told = f"a step has {count:,} operations, more than the simulator's {SIMULATED_OPS_MAX:,}"
        return None, told
    program = program_of(engine)
    ops = [op for name in ("forward", "backward_first") for op in program.phases[name].ops]
    uses = Counter((op.value.unit, op.verb) for op in ops if op.verb in OF_USER)
    expected = engine.passes.orders[Verb.BACKWARD]  # Of an embedding it is not announced.
    announced = sum(engine.plan.profile.units[unit].backward for unit in expected)
    micro_batches = max(1, round(backwards / max(1, announced) / steps))

    spans = [(one.start, one.stop) for one in user]
    waits = clip([(one.start, one.stop) for one in trace.waited], since, until)
    calls = [*waits, *clip(trace.called, since, until)]
    working = max(1e-9, seconds(spans, waits) - seconds(waits))
    own = seconds(spans, calls) - seconds(calls)
    # Units in use at the same time overlap, so all are scaled to the measured sum.
    scale = working / sum(stop - start for start, stop in spans) / steps / micro_batches
    compute = defaultdict[tuple[int, Verb], float](float)
    for one in user:
        compute[one.op.value.unit, one.op.verb] += (one.stop - one.start) * scale
    idle = max(0.0, until - since - seconds(waits) - working) / steps
    machine = _machine(ran, device_is_cpu=engine.runner.device.is_host)

    found = predict(
        program,
        machine,
        lambda unit, verb: compute[unit, verb] / uses[unit, verb],
        micro_batches=micro_batches,
        early=engine.early.begins_early,
        host_seconds=idle,
        # A faster device speeds up the user's own compute, but not the engine's calls in it.
        faster_share=1 - own / working / 2,
    )
    # Of an accelerator the user's own compute is not measured.
    hidden = {"compute"} if engine.runner.device.is_host else {"compute", MODEL}
    faster = {name: s for name, s in found.faster.items() if name not in hidden}
    busy = {**dict.fromkeys(engine.report().lanes, 0.0), **found.busy}
    return replace(found, busy=busy, faster=faster), ""


def _machine(ran: Sequence[Ran], *, device_is_cpu: bool) -> Machine:
    """A machine with the measured lane speeds. Where ops of a lane overlap each has its share."""
    moved, took = Counter[str](), defaultdict[str, float](float)
    spans = defaultdict[Lane, list[tuple[float, float]]](list)
    for one in ran:
        spans[one.op.lane].append((one.start, one.stop))
    alone = {lane: sum(stop - start for start, stop in some) for lane, some in spans.items()}
    share = {lane: seconds(some) / max(1e-9, alone[lane]) for lane, some in spans.items()}
    for one in ran:
        if one.op.verb not in OF_USER:
            speed = speed_of(one.op)
            moved[speed] += one.op.bytes
            took[speed] += (one.stop - one.start) * share[one.op.lane]
    seen: Any = {name: moved[name] / took[name] for name in moved if moved[name] and took[name]}
    machine = Machine(device_bytes=0, cpu_bytes=0, device_is_cpu=device_is_cpu, op_seconds=0.0)
    return replace(machine, **seen)
