"""Does training come as far with `compact` states as with `exact` ones? Curves over several seeds.

    python benchmarks/compact.py [--seeds 0 1 2] [--steps 120] [--plot docs/compact.png]

Each seed trains the default model of `offload train` with both formats, in turns; any further
option goes to `offload train`. Prints the held-out losses and their ratio, writes the curves as a
picture. The first step of a seed is the same in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FORMATS = ("exact", "compact")


def train(states: str, seed: int, steps: int, more: list[str]) -> tuple[list[float], float]:
    """The loss of each step, and the held-out loss."""
    command = [sys.executable, "-m", "offload", "train", "--json", "--states", states]
    command += ["--seed", str(seed), "--steps", str(steps), *more]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    records = [json.loads(line) for line in out.splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    (held_out,) = [r["held_out_loss"] for r in records if r["kind"] == "summary"]
    return losses, held_out


def plot(curves: dict[tuple[str, int], list[float]], path: Path) -> None:
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for index, seed in enumerate(sorted({seed for _, seed in curves})):
        exact, compact = (curves[states, seed] for states in FORMATS)
        steps, color = range(1, 1 + len(exact)), f"C{index}"
        above.plot(steps, exact, color=color, alpha=0.35, linewidth=4, label=f"exact, seed {seed}")
        above.plot(steps, compact, color=color, linewidth=1, label=f"compact, seed {seed}")
        below.plot(steps, [b - a for a, b in zip(exact, compact)], color=color, linewidth=1)
    above.set(ylabel="training loss, nats per byte", ylim=(None, 4))
    below.set(xlabel="step", ylabel="compact - exact")
    above.legend(ncols=3, fontsize="small")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", type=Path)
    asked, more = parser.parse_known_args()
    if asked.plot is not None:  # Now, not after minutes: it may not be installed.
        import matplotlib

        matplotlib.use("Agg")
    curves: dict[tuple[str, int], list[float]] = {}
    table = Table("seed", *FORMATS, "compact / exact", title="held-out loss, nats per byte")
    ratios: list[float] = []
    for seed in asked.seeds:
        held_out: dict[str, Any] = {}
        for states in FORMATS:
            curves[states, seed], held_out[states] = train(states, seed, asked.steps, more)
        ratios.append(held_out["compact"] / held_out["exact"])
        figures = (f"{held_out[states]:.4f}" for states in FORMATS)
        table.add_row(str(seed), *figures, f"{ratios[-1]:.4f}")
    table.add_row("mean", "", "", f"{statistics.mean(ratios):.4f}")
    Console().print(table)
    if asked.plot is not None:
        plot(curves, asked.plot)


if __name__ == "__main__":
    main()
