"""Config(durable=DIR): a killed run goes on from its last committed step, to the bit."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.model.engine import NoCommits
from offload.planning import planner
from offload.runtime.store import Store
from tests import training
from tests.command import SHORT
from tests.command import run as run_command
from tests.test_saving import buffered, lion, sgd
from tests.training import RESIDENT, Net, Run, assert_same, attached, frozen, plain, result_of

CPU, NVME = ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")
PLACES = [RESIDENT, CPU, NVME, ("device", "cpu", "nvme"), ("device", "device", "nvme")]


def durable(placement: Any, directory: Path, drive: Path | None = None, **options: Any) -> Any:
    """A run that commits to a directory in this one every step; its records lie on `drive`."""
    if drive is None and "nvme" in placement:
        drive = directory / "drive"
        drive.mkdir(parents=True, exist_ok=True)
    config = {"durable": str(directory / "run"), "commit_every": 1}
    return attached(placement, () if drive is None else drive, **{**config, **options})


def go_on(run: Run) -> None:
    """What a script does with what it kept: where in its data it is, and what it has seen."""
    if run.engine.resumed is not None:
        _, user = run.engine.resumed
        run.generator.set_state(torch.tensor(user["at"], dtype=torch.uint8))
        run.losses[:] = user["losses"]


def steps(run: Run, count: int) -> None:
    """So many more steps."""
    at = run.generator.get_state()
    run.engine.user_state = lambda: {"at": at.tolist(), "losses": run.losses}
    for _ in range(count):
        at = run.generator.get_state()  # Of the batch that is not trained on when it is asked for.
        plain(run, run.engine.steps)
    at = run.generator.get_state()


@pytest.mark.parametrize(("before", "after"), training.round_about(PLACES))
def test_a_run_goes_on_from_what_was_committed(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with durable(before, tmp_path / "a", build=buffered) as run:
        steps(run, 3)
        run.engine.commit()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        steps(run, 3)
        expected = result_of(run)
    for path in [*(tmp_path / "a").glob("*/*")]:
        path.unlink()
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    torch.manual_seed(7)
    if before != after:
        monkeypatch.setattr(planner, "CHUNK_ELEMENTS", 2048)
    with durable(after, tmp_path / "a", build=buffered) as run:
        assert run.engine.resumed[0] == 3
        go_on(run)
        steps(run, 3)
        assert_same(result_of(run), expected)


def test_what_follows_a_commit_is_in_the_next_one(tmp_path: Path) -> None:
    """Though no weight has changed: statistics of norms, a rate, the program's own data."""
    with durable(CPU, tmp_path, build=buffered) as run:
        steps(run, 1)
        run.engine.commit()
        run.model.get_buffer("seen").add_(3)
        run.optimizer.param_groups[0]["lr"] = 0.125
        run.engine.user_state = lambda: "later"
        run.engine.commit()
    with durable(CPU, tmp_path, build=buffered) as run:
        assert run.engine.resumed == (1, "later")
        found = torch.rand(1)
        run.engine.user_state = lambda: "again"
        run.engine.commit()
    with durable(CPU, tmp_path, build=buffered) as run:
        run.engine.commit()
    with durable(CPU, tmp_path, build=buffered) as run:
        assert run.engine.resumed == (1, "again")
        assert torch.equal(torch.rand(1), found)  # The program draws it again.
        assert run.optimizer.param_groups[0]["lr"] == 0.125
        assert run.model.get_buffer("seen")[0] == 3


def test_a_copy_of_the_model_commits_nothing_and_one_that_was_refused_has_no_hooks(
    tmp_path: Path,
) -> None:
    with durable(RESIDENT, tmp_path, build=buffered) as run:
        steps(run, 1)
        copies = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
        steps(run, 1)
        for one in copies:
            one(training.batch(run.generator)[0]).sum().backward()
    built: list[Any] = []
    with (
        pytest.raises(ValueError, match="found other tensors"),
        durable(RESIDENT, tmp_path, build=lambda: built.append(Net(layers=4)) or built[0]),
    ):
        pass
    assert not any(module._forward_pre_hooks for module in built[0].modules())


# -- what a step is --------------------------------------------------------------------------------


def clipped(run: Run, number: int) -> None:
    """Torch's own clipping, and an edit of the weights after the step that belongs to it."""
    run.loss().backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.step()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.clamp_(-0.5, 0.5)


def accumulated(run: Run, number: int) -> None:
    for _ in range(3):
        run.loss().backward()
    run.step()


def sharpness_aware(run: Run, number: int) -> None:
    """Weights are moved between two backwards of a step, and moved back."""
    run.loss().backward()
    with torch.no_grad():
        moved = [(p, p.grad * 0.1) for p in run.model.parameters() if p.grad is not None]
        for parameter, by in moved:
            parameter.add_(by)
    run.optimizer.zero_grad()
    run.loss().backward()
    with torch.no_grad():
        for parameter, by in moved:
            parameter.sub_(by)
    run.step()


LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clipped": (clipped, {}),
    "accumulated": (accumulated, {"micro_batches": 3}),
    "sharpness aware": (sharpness_aware, {}),
    "clipping as it comes": (plain, {"max_grad_norm": 0.1, "micro_batches": 1}),
    "frozen": (plain, {"build": frozen}),
    "tied, compact": (plain, {"build": lambda: Net(tied=True), "states": "compact"}),
    "momentum": (plain, {"optimizer": sgd}),
    "lion, float32": (plain, {"optimizer": lion, "dtype": torch.float32}),
}


@pytest.mark.parametrize(
    ("name", "placement"),
    training.in_turn(LOOPS, [RESIDENT, CPU, ("device", "device", "nvme"), NVME]),
)
def test_what_a_loop_did_is_committed_when_the_next_forward_begins(
    name: str, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of step 3 begins in the forward of step 4, which goes on beside a slow drive."""
    loop, options = LOOPS[name]
    with durable(placement, tmp_path, **options) as run:
        for number in range(3):
            loop(run, number)
        expected = result_of(run)
        slow_drive(monkeypatch)
        loop(run, 3)
        run.engine.commits.wait()
        monkeypatch.undo()
        killed_now(run)
    with durable(placement, tmp_path, **options) as run:
        at, _ = run.engine.resumed
        if at == 3:
            run.losses[:] = expected.losses
            assert_same(result_of(run), expected)
        else:  # Weights of residents were edited while they were written.
            assert (at, name) == (2, "sharpness aware")


def slow_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a commit writes takes a while."""
    write = Store.write

    def slow(*given: Any) -> None:
        if threading.current_thread().name == "offload-commit":
            time.sleep(0.01)
        write(*given)

    monkeypatch.setattr(Store, "write", slow)


def killed_now(run: Run) -> None:
    """Nothing more is committed."""
    run.engine.commits.close()
    run.engine.commits = NoCommits()


def assert_committed(
    expected: training.Result,
    placement: Any,
    directory: Path,
    at: int | None = None,
    **options: Any,
) -> None:
    """A run that goes on has what was left of the one before, and is at that step."""
    with durable(placement, directory, **options) as run:
        assert at in (None, run.engine.resumed[0])
        run.losses[:] = expected.losses
        assert_same(result_of(run), expected)


def test_evaluation_closes_no_step(tmp_path: Path) -> None:
    """Averaged weights are swapped in for it, and out again."""
    with durable(CPU, tmp_path) as run:
        steps(run, 2)
        expected = result_of(run)
        kept = [p.detach().clone() for p in run.model.parameters()]
        with torch.no_grad():
            for p in run.model.parameters():
                p.zero_()
            run.loss()
            for p, value in zip(run.model.parameters(), kept):
                p.copy_(value)
        run.losses.pop()
        run.engine.commit()
        killed_now(run)
    assert_committed(expected, CPU, tmp_path)


def test_how_often_it_commits(tmp_path: Path) -> None:
    with durable(CPU, tmp_path / "a", commit_every=3) as run:
        steps(run, 8)
        run.engine.commits.wait()
        killed_now(run)
    with durable(CPU, tmp_path / "a") as run:
        assert run.engine.resumed[0] == 6
    with durable(("cpu", "cpu", "nvme"), tmp_path / "b", commit_every=None) as run:
        steps(run, 8)
        run.engine.commits.wait()
        killed_now(run)
    with durable(CPU, tmp_path / "b") as run:
        assert run.engine.resumed[0] == 7


def test_a_scheduler_that_starts_anew_is_told(tmp_path: Path) -> None:
    def scheduler(run: Run) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))

    with durable(CPU, tmp_path) as run:
        once = scheduler(run)
        for number in range(3):
            plain(run, number)
            once.step()
    with durable(CPU, tmp_path) as run:
        assert run.optimizer.param_groups[0]["lr"] == 1e-2 / 4
        scheduler(run)
        with pytest.warns(RuntimeWarning, match=r"group 0 goes on with lr 0.01, committed 0.0025"):
            plain(run, 0)


def test_user_data_that_cannot_be_kept_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    with durable(CPU, tmp_path) as run:
        plain(run, 0)
        run.engine.user_state = lambda: {"tensor": torch.ones(3)}
        with pytest.raises(TypeError, match=r"user_state\(\)\['tensor'\] is a Tensor"):
            plain(run, 1)
        run.engine.user_state = lambda: 7
        plain(run, 1)
    with durable(CPU, tmp_path) as run:
        assert run.engine.resumed == (2, 7)


def test_a_model_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found no optimizer"):
        offload.attach(Net(), None, offload.Config(durable=str(tmp_path)))
    with attached(CPU, ()) as run, pytest.raises(ValueError, match=r"found no Config\(durable"):
        run.engine.commit()


def test_the_command_goes_on_with_the_losses_of_a_run_that_was_not_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(*flags: str) -> list[float]:
        assert run_command(*SHORT, "--json", *flags) == 0
        rows = map(json.loads, capsys.readouterr().out.splitlines())
        return [row["loss"] for row in rows if row["kind"] == "step"]

    there = "--durable", str(tmp_path / "run")
    parts = [losses("--steps", steps, *there) for steps in ("2", "5", "5")]
    assert [*map(len, parts)] == [2, 3, 0]
    assert parts[0] + parts[1] == losses("--steps", "5")


@pytest.mark.parametrize("placement", [RESIDENT, CPU])
def test_a_load_is_committed_with_its_own_random_numbers(placement: Any, tmp_path: Path) -> None:
    with durable(placement, tmp_path, build=buffered) as run:
        steps(run, 2)
        offload.save(run.model, run.optimizer, tmp_path / "save")
        expected = result_of(run)
        steps(run, 3)
        random_numbers = torch.get_rng_state()
        offload.load(run.model, run.optimizer, tmp_path / "save")
        assert not torch.equal(torch.get_rng_state(), random_numbers)
        run.loss()
        run.engine.commits.wait()
        killed_now(run)
    assert_committed(expected, placement, tmp_path, at=2, build=buffered)


@pytest.mark.parametrize("placement", [RESIDENT, CPU])
def test_edits_after_the_last_step_are_committed_at_the_end(placement: Any, tmp_path: Path) -> None:
    with durable(placement, tmp_path) as run:
        steps(run, 2)
        run.engine.commit()
        with torch.no_grad():
            run.model.head.weight.mul_(2)  # type: ignore[operator,union-attr]
        run.engine.commit()
        expected = result_of(run)
        killed_now(run)
    assert_committed(expected, placement, tmp_path)


@pytest.mark.parametrize("placement", [RESIDENT, CPU])
def test_a_loop_that_calls_parts_of_a_model_commits(placement: Any, tmp_path: Path) -> None:
    def parts(run: Run) -> None:
        net: Any = run.model
        with torch.no_grad():
            x = net.embed(training.batch(run.generator))
        for block in net.blocks:
            x = block(x)
        net.head(net.norm(x)).float().square().mean().backward()
        run.step()

    with durable(placement, tmp_path) as run:
        for _ in range(4):
            parts(run)
        run.engine.commits.wait()
        killed_now(run)
    with durable(placement, tmp_path) as run:
        assert run.engine.resumed[0] == 3


def test_a_momentum_encoder_is_committed(tmp_path: Path) -> None:
    """Weights on the device that no step updates, and the loop edits."""
    with durable(RESIDENT, tmp_path, build=frozen) as run:
        for number in range(3):
            plain(run, number)
            with torch.no_grad():
                for p in run.model.parameters():
                    p.mul_(1.0 if p.requires_grad else 0.99)
        expected = result_of(run)
        run.loss()
        run.engine.commits.wait()
        killed_now(run)
    assert_committed(expected, RESIDENT, tmp_path, build=frozen)


def few(run: Run, number: int) -> None:
    """Groups of moments of which few are not zero have several codes for the same numbers."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
    run.model(x.bfloat16()).square().mean().backward()
    run.step()


@pytest.mark.parametrize(
    ("durably", "after"),
    training.some_rows_fast(
        [
            (True, CPU),
            (False, ("nvme", "cpu", "nvme")),
            (True, ("nvme", "cpu", "nvme")),
            (False, CPU),
        ],
        fast=2,
    ),
)
def test_compact_states_are_the_very_records(durably: bool, after: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"build": lambda: torch.nn.Linear(16, 1), "states": "compact"}
    kept = tmp_path / "kept"
    with durable(CPU, tmp_path, **options) as run:
        for number in range(3):
            few(run, number)
        run.engine.commit()
        offload.save(run.model, run.optimizer, tmp_path / "save")
        shutil.copytree(tmp_path / "run", kept)
        for number in range(3, 63):
            few(run, number)
        expected = result_of(run)
        killed_now(run)
    shutil.copytree(kept, tmp_path / "run", dirs_exist_ok=True)
    with durable(after, tmp_path, **options) as run:
        if not durably:
            few(run, 3)
            offload.load(run.model, run.optimizer, tmp_path / "save")
        assert run.engine.steps == 3
        for number in range(3, 63):
            few(run, number)
        assert_same(result_of(run), expected)


@pytest.mark.parametrize("case", training.some_fast([(0, 1), (0, 0), (1, 0)]))
def test_a_program_that_comes_to_its_end_commits_its_last_step(
    case: tuple[int, int], tmp_path: Path
) -> None:
    """Also where something wrong was typed after its steps."""
    fails, typed = case
    program = f"""
import code, gc, sys
gc.disable()  # What is imported is no garbage.
import torch
from pathlib import Path
from tests.test_durable import CPU, durable, plain
opened = durable(CPU, Path({str(tmp_path)!r}), commit_every=100)
run = opened.__enter__()
if {typed}:
    sys.ps1 = "> "
for number in range(3):
    plain(run, number)
if {typed}:
    code.InteractiveInterpreter().runsource("wrong")
assert not {fails}
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == fails, done.stderr
    assert (b"the last step is not committed: AssertionError ended" in done.stderr) == fails
    with durable(CPU, tmp_path) as run:
        assert run.engine.resumed == (None if fails else (3, None))
        assert fails == (not any("user_state" in one for one in run.engine.notices))


def trained(directory: Path) -> tuple[Any, Any]:
    """A step of a program that closes nothing."""
    model = Net().bfloat16()
    config = training.config_of(CPU, (), durable=str(directory / "run"), commit_every=1)
    made = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
    run = Run(*made, torch.Generator())
    plain(run, 0)
    return weakref.ref(model), weakref.ref(run.engine)


def test_a_last_commit_that_fails_is_told(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(**_: Any) -> None:
        raise offload.EngineError("a lane failed") from OSError("full")

    with durable(CPU, tmp_path) as run:
        plain(run, 0)
        with monkeypatch.context() as patch:
            patch.setattr(run.engine, "commit", failing)
            run.engine.commits._at_exit()
        assert "the last step is not committed: a lane failed" in capsys.readouterr().err


def test_a_run_that_its_group_may_write_to_is_its_owners_again(tmp_path: Path) -> None:
    """As after Kubernetes has mounted a volume."""
    with durable(CPU, tmp_path) as run:
        plain(run, 0)
    (tmp_path / "run").chmod(0o2770)
    told = pytest.warns(RuntimeWarning, match="its group could write to it")
    with told, durable(CPU, tmp_path) as run:
        assert run.engine.resumed[0] == 1
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_model_that_is_dropped_commits_and_lets_its_run_go(tmp_path: Path) -> None:
    model, engine = trained(tmp_path)
    gc.collect()
    assert model() is engine() is None
    with durable(CPU, tmp_path) as run:
        assert run.engine.resumed[0] == 1
