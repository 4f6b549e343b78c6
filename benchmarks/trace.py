"""What the trace of a run costs, and whether what it measures adds up to a step: two tables.

    PYTHONPATH=. python benchmarks/trace.py [--placement nvme] [--pairs 8] [--runs 8]

On the paced device of tests/test_overlap.py, whose compute sleeps for a known time. The cost is
that of pairs of stretches, with and without, in turns (who goes first alternates), of two engines
that are both attached all along. As the processor time of a step varies by more than that, it is
counted, too: what is recorded in a step times what a record takes. The sum is that of all measured
parts of `offload report` (all but what is left) over the step by the loop's own clock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from offload import recording
from offload.cli.breakdown import breakdown
from offload.config import Config
from offload.reporting import OTHER
from offload.runtime.stats import LaneStats, Ran
from tests import test_overlap as paced

STEPS = 2
"""Of a stretch."""


def attached(case: paced.Case, compute_s: float, *, trace: bool) -> tuple[Callable[[], float], Any]:
    """(a step, which returns when it was over; the engine)."""
    made = partial(Config, trace=trace)
    paced.offload.Config, before = made, paced.offload.Config  # type: ignore[misc, assignment]
    try:
        model, optimizer = paced.attached(case, compute_s, pace=paced.Pace())
    finally:
        paced.offload.Config = before  # type: ignore[misc]
    x = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)

    def step() -> float:
        model(x).sum().backward()
        optimizer.step()
        at = time.perf_counter()
        optimizer.zero_grad()
        return at

    return step, optimizer.engine


def cost(case: paced.Case, compute_s: float, pairs: int) -> list[tuple[float, float]]:
    """With over without, of each pair: wall clock and processor time."""
    sides = [attached(case, compute_s, trace=trace) for trace in (True, False)]

    def stretch(step: Callable[[], float], engine: Any) -> tuple[float, float]:
        since, spent = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        engine.settle()
        return time.perf_counter() - since, time.process_time() - spent

    for side in sides:
        stretch(*side)
    found = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        took = {which: stretch(*sides[which]) for which in order}
        found.append((took[0][0] / took[1][0], took[0][1] / took[1][1]))
    for _, engine in sides:
        engine.close()
    return found


def recorded(stats: LaneStats) -> int:
    """How many ops, waits and calls are kept."""
    trace = stats.traced()
    assert trace is not None
    return len(trace.ran) + len(trace.waited) + len(trace.called)


def by_count(case: paced.Case, compute_s: float) -> tuple[int, float, float]:
    """Records of a step, seconds of one, and their share of a step's processor time."""
    step, engine = attached(case, compute_s, trace=True)
    step()
    before = recorded(engine.runner.stats)
    since = time.process_time()
    for _ in range(4):
        step()
    engine.settle()
    spent = (time.process_time() - since) / 4
    records = round((recorded(engine.runner.stats) - before) / 4)
    trace = engine.runner.stats.traced()
    one = trace.ran[-1]
    engine.close()
    since = time.process_time()
    for _ in range(100_000):
        start = time.perf_counter()
        trace.ran.append(Ran(one.op, start, time.perf_counter()))
    each = (time.process_time() - since) / 100_000
    return records, each, records * each / spent


def parts(case: paced.Case, compute_s: float) -> dict[str, float]:
    """Shares of a step by the loop's clock: each part that is measured, and their sum."""
    step, engine = attached(case, compute_s, trace=True)
    ends = [step() for _ in range(6)]
    run = recording.run_of(engine)
    engine.close()
    assert run is not None
    found = breakdown(run)
    step_s = (ends[-1] - ends[-1 - found.steps]) / found.steps  # The first is not like the others.
    measured = {name: spent / step_s for name, spent in found.parts.items() if name != OTHER}
    return {"step": step_s, **measured, "sum": sum(measured.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--placement", default="nvme", choices=("device", "cpu", "nvme"))
    parser.add_argument("--compute-ms", type=float, default=4.0)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--runs", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        case = (asked.placement,) * 3, Path(directory), paced.SMALL
        table = Table(title=f"with the trace / without, {asked.placement}, {asked.pairs} pairs")
        for column in ("", "median", "quartiles"):
            table.add_column(column)
        if asked.pairs:
            pairs = cost(case, asked.compute_ms / 1e3, asked.pairs)
            for name, found in zip(("wall clock", "processor"), zip(*pairs)):
                low, middle, high = quantiles(found)
                table.add_row(name, f"{middle:.4f}", f"{low:.4f} to {high:.4f}")
            console.print(table)
            records, each, share = by_count(case, asked.compute_ms / 1e3)
            console.print(f"{records} records a step, {each * 1e6:.2f} us each: {share:.2%}")
        for _ in range(asked.runs):
            console.print(*(f"{k} {v:.4f}" for k, v in parts(case, asked.compute_ms / 1e3).items()))


if __name__ == "__main__":
    main()
