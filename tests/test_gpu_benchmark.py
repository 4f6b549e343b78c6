"""`benchmarks/gpu/run.sh` as far as it goes without a GPU."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import results, sweep, train
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


FAKE = """#!/bin/bash
case "$*" in
    *update.py*) {update} ;;
    *copies.py*) exit 3 ;;
    *results.py*) echo "# On a GPU" ;;
    *"import cpu_adam"*) exit {not_built} ;;
    *sysconfig*) dirname "$0" ;;
    *pip*) echo "a build" && exit {not_built} ;;
    *) exec {python} "$@" ;;
esac
"""
"""An interpreter some of whose programs do what a stage may; no cmake beside it builds anything."""


def run_fake(
    directory: Path, *stages: str, update: str, not_built: int = 0, **environment: str
) -> Any:
    fake = directory / "python"
    fake.write_text(FAKE.format(update=update, not_built=not_built, python=sys.executable))
    fake.chmod(0o755)
    if not (cmake := directory / "cmake").is_symlink():
        cmake.symlink_to("/bin/false")
    settings = {"PYTHON": str(fake), "GPU_SECONDS": "1", "GPU_RESULTS": str(directory / "found")}
    return run(*stages, **settings, WHEELS="", **environment)


@pytest.mark.parametrize(
    ("hangs", "status"),
    [
        ("exec sleep 600", 124),
        pytest.param("trap '' INT TERM; sleep 600; sleep 600", 137, marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_hangs_is_ended_and_one_that_fails_told(
    hangs: str, status: int, tmp_path: Path
) -> None:
    done = run_fake(tmp_path, "update", "copies", "table", update=f"echo begun; {hangs}")
    assert done.returncode == 1
    told = ["== update", "begun", "update took more than 1 s", "== copies", "== table"]
    told += ["# On a GPU", f"failed: update ({status}) copies (3)"]
    assert done.stdout.splitlines() == told
    logs = {file.name: file.read_text() for file in (tmp_path / "found").iterdir()}
    assert logs["gpu-update.log"] == "begun\n"
    assert logs["gpu-table.log"] == "# On a GPU\n"


def test_what_needs_the_native_modules_builds_them_once(tmp_path: Path) -> None:
    done = run_fake(tmp_path, "update", "copies", update="exit 0", not_built=1)
    stages = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert stages == ["== build", "== update", "== copies"]
    done = run_fake(tmp_path, "update", "table", update="exit 0")
    assert "== build" not in done.stdout
    assert done.returncode == 0


def test_a_stage_that_the_call_has_no_time_for_is_named(tmp_path: Path) -> None:
    done = run_fake(tmp_path, "update", "table", update="exit 0", GPU_CALL_SECONDS="600")
    assert done.stdout.splitlines() == ["== update", "== table", "# On a GPU", "all stages done"]
    done = run_fake(tmp_path, "update", "table", update="exit 0", GPU_CALL_SECONDS="40")
    assert done.returncode == 1
    assert done.stdout.count("no time left for ") == 2
    assert done.stdout.rstrip().endswith("failed: update (no time) table (no time)")


def test_a_run_takes_as_many_steps_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, steps in (("0", 1), ("600", 3)):
        asked = ["train.py", "--placement", "torch", "--batch", "1", "--length", "4"]
        monkeypatch.setattr(sys, "argv", [*asked, "--steps", "3", "--seconds", seconds])
        assert train.measured(train.asked())["steps"] == steps


def test_a_run_that_breaks_is_a_line_and_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is refused is a line only."""
    ran = iter([(0, '{"placement": "torch", "step_s": 2.0}'), (0, ""), (1, ""), (0, REFUSED)])

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        code, told = next(ran)
        return subprocess.CompletedProcess(command, code, told, "the last words")

    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(run=fake, TimeoutExpired=OSError))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "dry"])
    assert sweep.main() == 1
    assert capsys.readouterr().out.endswith("broken: auto, cpu-cpu-cpu\n")
    ran = iter([(0, '{"placement": "auto", "step_s": 4.0}')])
    monkeypatch.setattr(sys, "argv", ["sweep.py", "dry", "auto"])
    assert sweep.main() == 0
    rows = json.loads((tmp_path / "gpu-train-dry.json").read_text())["rows"]
    assert {row["placement"]: row.get("of_torch") for row in rows} == {
        "torch": 1.0,
        "auto": 2.0,
        "cpu-cpu-cpu": None,
        "nvme-cpu-nvme": None,
    }


REFUSED = '{"placement": "nvme-cpu-nvme", "refused": "BudgetError: too little"}'


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


def test_the_page_has_all_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    lanes = {"h2d": {"busy_s": 1.0}}
    results.save("train-dry", [{"placement": "auto", "notices": ["not pinned"], "lanes": lanes}])
    results.save("copies", [{"memory": "pageable"}], forks=[{"fork_s": 0.5}], waits=[])
    results.main()
    page = (tmp_path / "gpu.md").read_text()
    assert page == capsys.readouterr().out[:-1]
    told = ["| memory   |", "| fork_s |", "| 0.5    |", "| placement |", "* auto: not pinned"]
    assert [line for line in page.splitlines() if line in told] == told
    assert "busy_s" not in page


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
