"""One to four ranks, every two settings together: what they train is what one process trains."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import Case, Setting, pairwise
from tests.ranks import KINDS, How, World, assert_as_one, worlds_of

pytestmark = pytest.mark.slow

PLACEMENTS = (
    "auto auto auto",
    "cpu cpu cpu",
    "cpu device device",
    "device cpu cpu",
    "device device cpu",
    "nvme cpu cpu",
    "cpu nvme nvme",
    "device device nvme",
    "nvme nvme nvme",
)
"""Homes of weights, gradients and states."""

FACTORS = {
    "ranks": ("2", "3", "4", "1"),
    "micro": ("1", "3"),
    "shard": ("2", "3", "1"),
    "placement": PLACEMENTS,
    "states": ("exact", "fp32", "compact"),
    "kind": KINDS,
    "gradients": ("param", "fp32"),
    "norm": ("0.5", "none"),
    "last": ("said", "unsaid"),
    "optimizer": ("AdamW", "SGD"),
    "sleeps": ("never", "cpu", "nvme"),
}


def _excluded(one: Setting, other: Setting) -> bool:
    return (one, other) == (("states", "compact"), ("optimizer", "SGD"))


def every(seed: str) -> list[Case]:
    """All that the first five factors come to, half an hour of it; the others are drawn by lot."""
    draw, found = random.Random(seed), list[Case]()
    for values in product(*[*FACTORS.values()][:5]):
        case = {name: draw.choice(FACTORS[name]) for name in FACTORS} | dict(zip(FACTORS, values))
        found.append(case | {"optimizer": "AdamW"} if case["states"] == "compact" else case)
    return found


ALL = os.environ.get("OFFLOAD_RANKS_ALL")
CASES = every(ALL) if ALL else pairwise(FACTORS, _excluded)


worlds = worlds_of(1, 2, 3, 4)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case["ranks"]), ids=str)
def test_ranks_train_as_one_process_does(
    worlds: dict[int, World], case: Case, tmp_path: Path
) -> None:
    ranks, fp32 = int(case["ranks"]), case["states"] == "fp32"
    homes = dict(zip(("params", "gradients", "optimizer"), case["placement"].split()))
    config: dict[str, Any] = {**homes, "shard": int(case["shard"])}
    if "nvme" in (*homes.values(), case["sleeps"]):
        config["nvme_path"] = str(tmp_path)
    if case["norm"] != "none":
        config["max_grad_norm"] = float(case["norm"])
    if case["last"] == "said":
        config["micro_batches"] = int(case["micro"])
    config["states"] = "compact" if case["states"] == "compact" else "exact"
    config["gradient_dtype"] = case["gradients"]
    config["reduce"] = "sum" if ranks == 3 else "mean"
    how = How(
        case["kind"],
        torch.float32 if fp32 else torch.bfloat16,
        int(case["micro"]),
        5,
        case["optimizer"],
        config,
        sleeps=case["sleeps"],
    )
    assert_as_one(worlds[ranks].run("train", how), how)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_stages_of_a_pipeline_are_attached_one_by_one(
    worlds: dict[int, World], schedule: str
) -> None:
    """Alone, and cut over two rows of ranks: the bits of torch's own pipeline."""
    plain = worlds[2].run("pipeline", schedule, False, 8)
    alone = worlds[2].run("pipeline", schedule, True, 8)
    rows = worlds[4].run("pipeline", schedule, True, 4)
    for rank, found in enumerate([*alone, *rows]):
        for one, wanted in zip(found, plain[rank % 2], strict=True):
            assert torch.equal(one, wanted)
