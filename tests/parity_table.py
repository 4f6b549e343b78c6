"""docs/parity.md: what the parity suite holds, written by the suite once all of it has passed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.covering import Case
from tests.parity import FACTORS, STEPS
from tests.refusals import REFUSED

TABLE = Path(__file__).resolve().parent.parent / "docs" / "parity.md"

_INTRODUCTION = f"""# Parity

Written by `make parity`; do not edit. Each case trains a small model with random weights twice for
{STEPS} steps or more: attached to an engine, and in a plain PyTorch loop stepped by
`cpu_adam.CPUAdam`. All losses, the gradients and their norm in one step, and all weights, buffers
and optimizer states at the end were the same, bit for bit. Dropout draws the same numbers.

The cases are a pairwise covering: any two values of the factors below that can go together do in
some case. In the table are the placements in which a model went through a loop: where weights,
gradients and optimizer states lived, by the first letters of device, cpu and nvme.
"""

_EXPERTS = """## Mixtures of experts

Experts that are modules in a list are units of their own: those chosen in the pass before are
fetched ahead, others when the router chooses them. Hugging Face's transformers fuses the experts of
a layer into one parameter of three dimensions from version 5 on: what torch sees as one parameter
moves as one, so all experts of a layer are fetched with it.
"""


def render(cases: list[Case]) -> str:
    """The whole text, for cases that have passed."""
    lines = [_INTRODUCTION, "| factor | values |", "|---|---|"]
    lines += [
        f"| {factor} | {', '.join(values)} |"
        for factor, values in FACTORS.items()
        if factor != "placement"
    ]
    lines += ["| placement | nine: any two of weights, gradients, states in any two tiers |", ""]
    lines += [f"## {len(cases)} cases", ""]
    placements: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case in cases:
        letters = "".join(tier[0] for tier in case["placement"].split("-"))
        placements[case["model"], case["loop"]].append(letters)
    lines += [
        f"| model | {' | '.join(FACTORS['loop'])} |",
        "|---" * (len(FACTORS["loop"]) + 1) + "|",
    ]
    for model in FACTORS["model"]:
        cells = [" ".join(sorted(set(placements[model, loop]))) for loop in FACTORS["loop"]]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    lines += [
        "",
        _EXPERTS,
        "## Refused by `attach`",
        "",
        "| what | because | instead |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {one.because} | {one.instead} |" for what, one in REFUSED.items()]
    return "\n".join(lines) + "\n"
