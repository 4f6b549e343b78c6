"""`benchmarks/gpu/run.sh` as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import gaps, results, rows, train
from offload import Config
from offload.model.units import partition
from offload.planning.machine import Machine
from offload.planning.planner import plan
from offload.planning.profile import profile_of
from offload.unit_plan import spec_of
from tests.training import some_fast

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
    *"-m pytest"*) exit 1 ;;
    -) cat >/dev/null ;;
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
    return run(*stages, **{**settings, "WHEELS": "", **environment})


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
    assert (tmp_path / "found" / "gpu.log").read_text() == "begun\n# On a GPU\n"


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
    told = ["== update", "no time left for update: call again", "== table", "# On a GPU"]
    assert done.stdout.splitlines() == [*told, "failed: update (no time)"]


def test_the_hour_goes_on_where_the_last_call_was_cut(tmp_path: Path) -> None:
    """What is done is not done again, but for what each machine needs; failed tests are done."""
    (tmp_path / "found").mkdir()
    lines = [{"stage": "done", "row": one} for one in ("3b-first", "7b-first", "3b", "7b", "nvme")]
    kept = tmp_path / "found" / "gpu.jsonl"
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {
        "update": ["facts", "tests", "update", "copies", "table"],
        "copies": ["facts", "copies", "table"],
    }
    for update, stages in (("exit 0", told["update"]), ("exit 1", told["copies"])):
        done = run_fake(tmp_path, "first-hour", update=update, GPU_SECONDS="60")
        found = [line[3:] for line in done.stdout.splitlines() if line.startswith("== ")]
        assert found == stages
        assert done.stdout.rstrip().endswith("copies (3)")  # As ever, so it is tried again.
    assert (tmp_path / "found" / "gpu.log").read_text().count("# On a GPU") == 2


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are kept."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path / "gpu.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- what is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("placement", some_fast(["cpu-cpu-cpu", "torch-fp32"]))
def test_lines_of_training_are_as_their_schema_says(placement: str, there: Path) -> None:
    """Two for each point, so that what was timed is kept though the profiler breaks."""
    train.run(["--dry", "--placement", placement, "--points", "4k", "16kx4"])
    found = lines(there)
    names = [f"dry {placement} {point}" for point in ("4k", "4k", "16kx4", "16kx4")]
    assert [row["row"] for row in found] == names
    for row in found:
        wrong = [key for key, value in row.items() if not isinstance(value, results.SCHEMA[key])]
        assert not wrong
    first, second = found[0], found[1]
    assert second.items() >= {k: v for k, v in first.items() if k != "at"}.items()
    assert 0 < second["kernel_busy"] <= second["busy"] <= 1
    assert len(second["gaps"]) == gaps.GAPS
    assert second["tokens_per_s"] * second["step_s"] == pytest.approx(4096 / train.DRY_LESS)
    if placement == "cpu-cpu-cpu":  # Five units, each updated.
        assert (second["ops"], second["misses"]) == (5, 0)
        assert second["host_us"] > 0
    assert set(results.COLUMNS) <= {*results.SCHEMA, *results.DERIVED}


def test_masters_take_the_steps_of_adamw_in_fp32() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    exact = [parameter.detach().float() for parameter in model.parameters()]
    adam, masters = torch.optim.AdamW(exact, **train.OPTIMIZER), train.Masters(model, fused=False)
    for _ in range(3):
        for parameter, master in zip(model.parameters(), exact):
            parameter.grad = torch.randn_like(parameter)
            master.grad = parameter.grad.float()
        adam.step()
        masters.step()
    for parameter, master in zip(model.parameters(), exact):
        torch.testing.assert_close(parameter.detach(), master.bfloat16(), rtol=0, atol=0)


# -- gaps --------------------------------------------------------------------------------------


def test_the_longest_gap_names_what_the_host_did() -> None:
    def dawdle() -> None:
        time.sleep(0.3)

    def work() -> None:
        for _ in range(2):
            torch.randn(256, 256).mm(torch.randn(256, 256))
            dawdle()

    found = gaps.watched(work)
    host = "test_gpu_benchmark.py:dawdle < gaps.py:watched"
    assert [one["host"] for one in found["gaps"][:2]] == [host] * 2
    assert found["gaps"][0]["ms"] >= 290
    assert found["busy"] < 0.8


# -- rows --------------------------------------------------------------------------------------

EVERY = [run for runs in rows.HOUR.values() for run in runs]


def test_each_row_has_a_name_of_its_own_and_what_to_expect() -> None:
    names = [row for run in EVERY for row in run.rows]
    assert len(set(names)) == len(names)
    expected = results.expected()
    assert set(expected) == set(names)
    for row in names:  # The table in the order of the rows, with shares that are those of steps.
        shares = dict(re.findall(r"^\| (\w+ .+?) \| [\d.]+ \| ([\d.]+) ", PAGE, re.M))
        size, _, *_, point = row.split()
        base = expected[f"{size} torch-fp32 {point.removesuffix('-unsaid')}"]
        assert float(shares[row]) == pytest.approx(base / expected[row], abs=0.015), row
    assert list(expected) == names


PAGE = results.EXPECTED.read_text("utf-8")


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_every_placement_fits_the_machine_that_is_expected(size: str) -> None:
    machine = Machine(device_bytes=139 << 30, cpu_bytes=120 << 30, nvme_bytes=60 * 10**9)
    groups = partition(train.built(train.SHAPES[size], recompute=True))
    profile = profile_of([spec_of(group, "param", trains=True) for group in groups])
    runs = [run for run in EVERY if run.size == size]
    assert {run.placement for run in runs} > {"device-cpu-cpu", "cpu-cpu-cpu", "torch-fp32"}
    for run in (one for one in runs if one.placement.split("-")[0] not in train.PEERS):
        tiers = ["auto"] * 3 if run.placement == "auto" else run.placement.split("-")
        kinds: Any = dict(zip(("params", "gradients", "optimizer"), tiers))
        config = Config(
            **kinds,
            nvme_path=("/",) if "nvme" in tiers else (),
            device_memory=rows.CAPS[f"{size} {run.placement}"],
            cpu_memory=int(machine.cpu_bytes * train.HOST_SHARE),
            max_grad_norm=train.CLIP if run.clip else None,
        )
        plan(profile, config, machine)  # Else it raises a BudgetError.


def run_rows(
    monkeypatch: pytest.MonkeyPatch, stage: str, outcomes: dict[str, Any], seconds: str = "999"
) -> tuple[int, list[str]]:
    """`rows.main` with processes that do as `outcomes` says by name; its status, who was begun."""
    begun = []

    def fake(command: list[str], timeout: float, **_: Any) -> Any:
        name = command[command.index("--name") + 1]
        points = command[command.index("--points") + 1 : command.index("--nvme-path")]
        begun.append(f"{name} {' '.join(points)}")
        outcome = outcomes.get(name, 0)
        if outcome == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        for point in points if outcome == 0 else ():
            row = {"row": f"{name} {point}", "size": name.split()[0], "point": point}
            results.keep("train", {**row, "step_s": 1.0})
        return subprocess.CompletedProcess(command, outcome, "", "the last words")

    given = SimpleNamespace(
        run=fake, TimeoutExpired=subprocess.TimeoutExpired, PIPE=subprocess.PIPE
    )
    monkeypatch.setattr(rows, "subprocess", given)
    monkeypatch.setattr(sys, "argv", ["rows.py", stage, "--seconds", seconds])
    return rows.main(), begun


def test_a_later_call_trains_what_is_not_there(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [run.name for run in rows.HOUR["3b-first"]]
    assert run_rows(monkeypatch, "3b-first", {}, seconds="10") == (4, [])
    assert f"no time left, so call again, for: {', '.join(names)}" in capsys.readouterr().out
    # What is cut by the end of the call comes again; what breaks, or takes too long, does not.
    slow = {names[1]: "hangs"}
    assert run_rows(monkeypatch, "3b-first", slow, seconds="100")[0] == 4
    broken = {names[1]: 1}
    assert run_rows(monkeypatch, "3b-first", broken) == (1, [f"{names[1]} 16k"])
    assert run_rows(monkeypatch, "3b-first", {}) == (0, [])
    assert results.kept()["train"][f"{names[1]} 16k"]["refused"].endswith("the last words")
    again = run_rows(monkeypatch, names[1] + " 16k$", {})[1]
    assert again == [f"{names[1]} 16k"]
    assert results.kept()["train"][f"{names[1]} 16k"]["step_s"] == 1.0


def test_a_run_that_hangs_is_a_line(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = rows.HOUR["nvme"]
    assert run_rows(monkeypatch, "nvme", {run.name: "hangs"}) == (1, [f"{run.name} 32k"])
    assert results.kept()["train"][f"{run.name} 32k"]["refused"] == "it took more than 240 s"


# -- pages -------------------------------------------------------------------------------------


def test_the_page_has_the_last_of_all_that_was_kept(
    there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gap = {"ms": 2.5, "at_ms": 1.0, "host": "lanes.py:_block", "op": "", "copies": ""}
    one = {"size": "3b", "point": "16k", "lanes": {"h2d": {"busy_s": 1.0}}, "gaps": [gap]}
    results.keep("train", {"row": "3b torch-fp32 16k", **one, "step_s": 9.0})
    results.keep("train", {"row": "3b torch-fp32 16k", **one, "step_s": 1.0})
    more = {"notices": ["not pinned"], "point": "16k-unsaid"}
    results.keep("train", {"row": "3b cpu-cpu-cpu 16k-unsaid", **one, **more, "step_s": 2.0})
    results.keep("copies", {"row": "pageable", "h2d_gb_s": 5.0})
    with there.open("a") as file:
        file.write('{"stage": "copies", "row": "regis')  # Cut by the end of a call.
    results.main()
    page = there.with_name("gpu.md").read_text()
    assert page == capsys.readouterr().out[:-1]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    head = next(line for line in cells if line[:2] == ["row", "step_s"])
    found = {line[0]: dict(zip(head, line)) for line in cells if len(line) == len(head)}
    unsaid = found["3b cpu-cpu-cpu 16k-unsaid"]
    assert found["3b torch-fp32 16k"]["step_s"] == "1"
    assert (unsaid["share"], unsaid["step_s"], "light" in unsaid) == ("0.5", "2", False)
    predicted = results.expected()["3b cpu-cpu-cpu 16k-unsaid"]
    assert float(unsaid["off"]) == pytest.approx(2.0 / predicted, rel=0.01)
    assert "* 3b cpu-cpu-cpu 16k-unsaid: not pinned" in page
    assert "| 2.5 | 1     | lanes.py:_block |" in page
    assert "busy_s" not in page


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_stage_but_the_build_runs_dry(tmp_path: Path) -> None:
    stages = ("facts", "tests", "update", "copies", *rows.HOUR, "rows:7b auto", "table")
    done = run("--dry", *stages, NVME_PATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("all stages done")
    (found,) = tmp_path.glob("*/gpu.jsonl")
    trained = {line["row"] for line in lines(found) if "busy" in line}
    peer = find_spec("deepspeed") is not None
    there = [run for run in EVERY if peer or not run.placement.startswith("deepspeed")]
    assert trained == {row for run in there for row in run.rows}
