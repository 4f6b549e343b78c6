"""Config(durable=DIR): a killed run goes on from its last committed step, to the bit."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.planning import planner
from tests.test_saving import buffered
from tests.training import RESIDENT, Run, assert_same, attached, plain, result_of, some_fast

CPU, NVME = ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")
PLACES = [RESIDENT, CPU, NVME, ("device", "cpu", "nvme"), ("device", "device", "nvme")]


def where(placement: Any, directory: Path) -> Path:
    """A directory for the drive of a placement, beside that of the run."""
    drive = directory / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    return drive


def durable(placement: Any, directory: Path, **options: Any) -> Any:
    config = {"durable": str(directory / "run"), "commit_every": 1}
    return attached(placement, where(placement, directory), **{**config, **options})


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


@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("after", PLACES)
def test_a_run_goes_on_from_what_was_committed(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with durable(before, tmp_path / "a", build=buffered) as run:
        steps(run, 3)
        run.engine.commit()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        steps(run, 3)
        expected = result_of(run)
    move(tmp_path / "b")
    torch.manual_seed(7)
    if before != after:
        monkeypatch.setattr(planner, "CHUNK_ELEMENTS", 2048)
    with durable(after, tmp_path / "b", build=buffered) as run:
        assert run.engine.resumed[0] == 3
        go_on(run)
        steps(run, 3)
        assert_same(result_of(run), expected)


TOTAL = 12
"""Steps of the runs that are killed."""


def ends(placement: Any, directory: Path, options: dict[str, Any]) -> str:
    """Train from wherever the directory is to the end; a hash of what came out."""
    with durable(placement, directory, build=buffered, **options) as run:
        if run.engine.resumed is None:
            torch.manual_seed(2)
        go_on(run)
        print("at", run.engine.steps, flush=True)
        while run.engine.steps < TOTAL:
            steps(run, 1)
            print("stepped", run.engine.steps, flush=True)
        found = result_of(run)
    every = [
        *found.weights.values(),
        *(x for state in found.states.values() for x in state.values()),
    ]
    digest = hashlib.sha256(str(found.losses).encode())
    for one in every:
        digest.update(one.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_CHILD = """
import sys
import torch
from pathlib import Path
from tests.test_durable import PLACES, ends
torch.set_num_threads(1)  # As in the tests.
print("hash", ends(eval(sys.argv[2]), Path(sys.argv[1]), eval(sys.argv[3])), flush=True)
"""


@cache
def never_killed(options: str, directory: Path) -> str:
    return ends(CPU, directory, eval(options))


@pytest.mark.parametrize("seed", some_fast(range(10), fast=3))
def test_a_killed_run_ends_as_one_that_was_never_killed(
    seed: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(seed)
    options = repr(draw.choice([{}, {"micro_batches": 1}, {"max_grad_norm": 0.1}]))
    stood, hashes = 0, []
    while not hashes:
        placement = draw.choice(PLACES)
        command = [sys.executable, "-c", _CHILD, str(tmp_path), repr(placement), options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            at = int(child.stdout.readline().split()[1])
            assert at >= stood - 1, "more than the last step was lost"
            stop, stood = at + draw.randrange(1, 6), at
            for line in child.stdout:
                what, found = line.split()
                if what == "hash":
                    hashes.append(found)
                else:
                    stood = int(found)
                if stood >= stop:
                    time.sleep(draw.random() * 0.03)
                    child.kill()
                    break
            for line in child.stdout:
                what, found = line.split()
                stood = int(found) if what == "stepped" else stood
                hashes += [found] if what == "hash" else []
        assert child.returncode in (0, -9)
    assert hashes == [never_killed(options, tmp_path_factory.mktemp("whole"))]


def move(directory: Path) -> None:
    """Let a copy of a run find its own files."""
    from offload.checkpoint.directory import read_checked, write_checked

    for path in (directory / "run").glob("layout-*.json"):
        layout = read_checked(str(path))
        layout["folders"] = [one.replace("/a/", "/b/") for one in layout["folders"]]
        path.unlink()
        write_checked(str(path), layout)
