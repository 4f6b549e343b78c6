"""`benchmarks/gpu/run.sh` as far as it goes without a GPU."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import sweep, train
from benchmarks.gpu.results import table
from offload import Config
from offload.cli import gpt

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"


def run(*stages: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *stages], capture_output=True, text=True, env=settings
    )


@pytest.mark.slow
def test_a_stage_that_is_not_there_fails_and_the_next_one_runs() -> None:
    done = run("--dry", "nonsense", "table")
    assert done.returncode == 1
    assert "there is no stage nonsense" in done.stdout
    assert "# On a GPU" in done.stdout
    assert done.stdout.rstrip().endswith("failed: nonsense (2)")


def test_the_list_of_what_only_a_gpu_can_show_is_complete() -> None:
    """It names every test that wants one, and every stage that measures."""
    page = (SCRIPT.parent / "README.md").read_text("utf-8")
    tests = [
        node.name
        for file in (ROOT / "tests").glob("test_cuda*.py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sorted(re.findall(r"`(test_\w+)`", page)) == sorted(tests)
    stages = re.findall(r"^#     ([a-z0-9-]+)  ", SCRIPT.read_text("utf-8"), re.MULTILINE)
    assert {"check", "build", "tests", "copies", "update", "train-1b"} <= set(stages)
    assert all(f"`{stage}`" in page for stage in stages if stage != "table")


@pytest.mark.parametrize("size", sweep.CAPS)
def test_placements_and_caps_are_such_as_the_engine_takes(size: str) -> None:
    assert size in train.SHAPES
    for placement, cap in sweep.CAPS[size].items():
        if placement not in ("torch", "auto"):
            params, gradients, states = placement.split("-")
            tiers: Any = {"params": params, "gradients": gradients, "optimizer": states}
            Config(**tiers, nvme_path=("/",), device_memory=cap)
        assert (cap is None) == (placement == "torch")


@pytest.mark.parametrize("size", ["1b", "3b", "7b"])
def test_flops_are_about_six_for_each_parameter_of_a_token(size: str) -> None:
    parameters = float(size[:-1]) * 1e9
    assert train.flops(gpt.SIZES[size], 1024) == pytest.approx(6 * parameters, rel=0.12)


def test_a_table_has_a_line_for_each_row_and_nothing_for_what_is_not_there() -> None:
    found = table([{"a": 1.2345, "b": "x"}, {"a": 1234.5}], ("a", "b"))
    assert found.splitlines() == ["| a    | b |", "| ---- | - |", "| 1.23 | x |", "| 1234 |   |"]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_stage_but_the_build_runs_dry(tmp_path: Path) -> None:
    stages = ("check", "tests", "copies", "update", "train-1b", "train-7b:cpu-cpu-cpu", "table")
    done = run("--dry", *stages, NVME_PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("all stages done")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_trained_is_a_line_that_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "train.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--placement", "cpu-cpu-cpu", "--cpu-memory", "4KiB"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert "BudgetError" in json.loads(done.stdout)["refused"]
