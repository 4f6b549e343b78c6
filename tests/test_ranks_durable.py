"""Durable runs over ranks: killed anywhere, they go on from one step, with the same bits."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint.commits import Made, RunDirectory, last_of_all
from offload.checkpoint.conversion import convert
from offload.checkpoint.inspection import inspect
from tests import save_reader
from tests.ranks import Failed, How, World, worlds_of
from tests.ranks_durable import Life
from tests.training import some_fast

JOB = "tests.ranks_durable."
STEPS = 6

PLACES: dict[str, dict[str, Any]] = {
    "cpu": dict.fromkeys(("params", "gradients", "optimizer"), "cpu"),
    "nvme": dict.fromkeys(("params", "gradients", "optimizer"), "nvme"),
    "device": dict.fromkeys(("params", "gradients", "optimizer"), "device"),
    "mixed": {"params": "device", "gradients": "cpu", "optimizer": "nvme"},
}


def of(kind: str, place: str, folder: Path, **config: Any) -> How:
    drive = {"nvme_path": str(folder.parent)} if "nvme" in PLACES[place].values() else {}
    kept = {"durable": str(folder), "commit_every": 1}
    return How(kind, micro=2, steps=STEPS, config={**PLACES[place], **drive, **kept, **config})


worlds = worlds_of(1, 2, 3)


def whole(world: World, how: How, folder: Path) -> list[Any]:
    """A run that is never killed, in a folder of its own."""
    other = replace(how, config={**how.config, "durable": str(folder)})
    return world.run(JOB + "live", other, Life(STEPS))


@pytest.mark.parametrize(
    ("kind", "before", "after", "config"),
    [
        pytest.param("tied", "nvme", "nvme", {}, marks=pytest.mark.slow),
        pytest.param("plain", "cpu", "nvme", {}, marks=pytest.mark.slow),
        pytest.param("experts", "mixed", "cpu", {"states": "compact"}, marks=pytest.mark.slow),
        pytest.param("adapter", "nvme", "device", {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("scalar", "device", "mixed", {"shard": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_other_places(
    worlds: dict[int, World], kind: str, before: str, after: str, config: Any, tmp_path: Path
) -> None:
    one, other = (of(kind, place, tmp_path / "run", **config) for place in (before, after))
    wanted = whole(worlds[2], one, tmp_path / "whole")
    first = worlds[2].run(JOB + "live", one, Life(3))
    second = worlds[2].run(JOB + "live", other, Life(5, ends="commit"))
    third = worlds[2].run(JOB + "live", one, Life(STEPS))
    assert [[found[rank][0] for rank in (0, 1)] for found in (first, second, third)] == [
        [0, 0],
        [3, 3],
        [5, 5],
    ]
    inspected = inspect(tmp_path / "run")
    assert not inspected.broken
    assert inspected.rows["rank-1: step"] == str(STEPS)
    assert inspected.rows["goes on from"].startswith(f"step {STEPS}, the last that ")
    (run, sets), (_, same) = (
        save_reader.read(convert(str(tmp_path / name), str(made)) or str(made))
        for name, made in (("run", tmp_path / "saved"), ("whole", tmp_path / "other"))
    )
    assert run["step"] == STEPS
    assert {k: {n: x.tobytes() for n, x in v.items()} for k, v in sets.items()} == {
        k: {n: x.tobytes() for n, x in v.items()} for k, v in same.items()
    }
    for rank in (0, 1):
        assert third[rank][1] == wanted[rank][1]
        losses = first[rank][2] + second[rank][2] + third[rank][2]
        assert losses == wanted[rank][2]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "others"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_other_ranks_go_on(
    worlds: dict[int, World], ranks: int, others: int, place: str, tmp_path: Path
) -> None:
    """The values are those that they had, on any number of ranks, there and back."""
    how, folder = of("tied", place, tmp_path / "run", reduce="sum"), tmp_path / "run"
    left = worlds[ranks].run(JOB + "live", how, Life(3))
    for again in (others, ranks, ranks, ranks):
        found = worlds[again].run(JOB + "live", how, Life(3, new=ranks))
        assert [one[0] for one in found] == [3] * again
        if again == ranks:
            assert [one[1] for one in found] == [one[1] for one in left]
    there = worlds[others].run(JOB + "live", how, Life(4, new=ranks))
    assert {one[0] for one in there} == {3}
    for step in (5, 6, 7):
        worlds[others].run(JOB + "live", how, Life(step))
    assert sorted(one.name for one in folder.iterdir()) == [f"rank-{r}" for r in range(others)]


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_nothing_is_written_over_before_all_have_committed(
    worlds: dict[int, World], place: str, early: bool, tmp_path: Path
) -> None:
    config = {"micro_batches": 2} if early else {}
    found = worlds[2].run(JOB + "order", of("tied", place, tmp_path / "run", **config))
    for updates, _ in found:
        assert sorted(updates) == [*range(1, STEPS + 1)]
        for _, commits in found:
            assert sorted(commits) == [*range(1, STEPS + 1)]
            assert all(commits[step - 1] < updates[step] for step in range(2, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("DURABLE_RUNS", "1"))))
def test_a_killed_run_ends_as_one_that_was_never_killed(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    ranks, places = chance.choice([2, 3]), [*PLACES]
    config = {"micro_batches": 2} if seed % 2 else {}
    how = of("tied", places[seed % len(places)], tmp_path / "run", **config)
    world = World(ranks, tmp_path)
    try:
        wanted = whole(world, how, tmp_path / "whole")
        begun = 0
        for _ in range(4):
            dies = chance.randrange(ranks)
            life = Life(
                STEPS, dies=dies, after_s=chance.uniform(0.0, 0.6), slow=chance.randrange(ranks)
            )
            world.begin(JOB + "live", how, life)
            found = world.results(60)
            world.close()
            starts = {one[0] for one in found if isinstance(one, tuple)}
            assert len(starts) <= 1
            begun = max([begun, *starts])
        last = world.run(JOB + "live", how, Life(STEPS))
        assert len({one[0] for one in last}) == 1
        assert last[0][0] >= begun
        assert [one[1] for one in last] == [one[1] for one in wanted]
    finally:
        world.close()


@pytest.mark.slow
def test_machines_that_share_no_directory(worlds: dict[int, World], tmp_path: Path) -> None:
    how = of("tied", "cpu", tmp_path / "run")
    wanted = whole(worlds[2], how, tmp_path / "whole")
    worlds[2].run(JOB + "live", how, Life(3, apart=True))
    found = worlds[2].run(JOB + "live", how, Life(STEPS, apart=True))
    assert [one[:2] for one in found] == [(3, one[1]) for one in wanted]
    world = World(3, tmp_path)
    world.begin(JOB + "live", how, Life(STEPS, apart=True))
    messages = [one.message for one in world.results()]
    world.close()
    assert all("directories of other ranks are on other machines" in one for one in messages)


@pytest.mark.slow
def test_an_edit_is_committed_by_all(worlds: dict[int, World], tmp_path: Path) -> None:
    found = worlds[2].run(JOB + "edit_and_commit", of("plain", "cpu", tmp_path / "run"))
    assert found == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("shard", some_fast([3, 2]))
def test_a_rank_that_evaluates_more_sees_the_weights_of_all(
    worlds: dict[int, World], shard: int, tmp_path: Path
) -> None:
    """Others load, and commit, when it has come as far."""
    found = [
        worlds[2].run(JOB + "uneven", of("plain", "cpu", tmp_path / str(more), shard=shard), more)
        for more in (0, 2)
    ]
    assert found[0] == found[1]


def test_nobody_leaves_a_commit_before_all_know_that_it_is_made(
    worlds: dict[int, World], tmp_path: Path
) -> None:
    """The store that tells may be in the process that leaves."""
    found = worlds[2].run(JOB + "commit_and_leave", of("plain", "cpu", tmp_path / "run"))
    assert max(looked for looked, _ in found) < min(left for _, left in found)


@pytest.mark.slow
def test_over_two_levels(tmp_path: Path) -> None:
    how = replace(of("tied", "cpu", tmp_path / "run"), mesh=(2, 2))
    world = World(4, tmp_path)
    try:
        wanted = whole(world, how, tmp_path / "whole")
        world.run(JOB + "live", how, Life(2))
        found = world.run(JOB + "live", how, Life(STEPS))
        assert [one[:2] for one in found] == [(2, one[1]) for one in wanted]
    finally:
        world.close()


PROGRAM = r"""
import sys, torch, offload
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = offload.attach(model, optimizer, offload.Config(durable=sys.argv[1]))
sys.stdout.write(f"from {(offload.engine_of(model).resumed or [0])[0]}\n")
offload.engine_of(model).user_state = dict
for step in range(3):
    model(torch.ones(2, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_comes_to_its_end_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for begun in (0, 3):
        done = subprocess.run(
            [*launch, "program.py", "run"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"from {begun}"] * 2
        assert "Error" not in done.stderr


@pytest.mark.slow
def test_a_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    how, folder = of("plain", "cpu", tmp_path / "run"), tmp_path / "run"
    world = World(2, tmp_path)
    try:
        world.run(JOB + "live", how, Life(3))
        shutil.rmtree(folder / "rank-1")
        world.begin(JOB + "live", how, Life(4))
        for one in world.results():
            assert isinstance(one, Failed)
            assert one.kind == "FileNotFoundError"
            assert "of rank 1: likely its directory rank-1 is on another machine" in one.message
    finally:
        world.close()


@pytest.mark.slow
def test_runs_of_one_process_and_of_ranks_are_kept_apart(
    worlds: dict[int, World], tmp_path: Path
) -> None:
    RunDirectory(str(tmp_path / "run")).close()
    (tmp_path / "run" / "commit.json").write_text("{}")
    worlds[2].begin(JOB + "attach_alone", of("plain", "cpu", tmp_path / "run"))
    messages = [one.message for one in worlds[2].results()]
    assert all("a durable run over ranks; found one of one process" in one for one in messages)
    worlds[2].run(JOB + "live", of("plain", "cpu", tmp_path / "other"), Life(1))
    with pytest.raises(FileExistsError, match="found a part of one over ranks; give another name"):
        RunDirectory(str(tmp_path / "other" / "rank-0"))


def test_which_commit_all_have() -> None:
    def made(*numbers: int, ranks: int = 2, run: str = "a") -> list[Made]:
        return [Made(number, run, ranks) for number in numbers]

    assert last_of_all({0: made(7, 6), 1: made(6, 5)}, "") == Made(6, "a", 2)
    assert last_of_all({0: made(7, 6), 1: made(7, 6)}, "") == Made(7, "a", 2)
    assert last_of_all({0: made(1), 1: []}, "") is None
    assert last_of_all({0: [], 1: []}, "") is None
    more = {0: made(8, ranks=3) + made(7), 1: made(7, 6), 2: []}
    assert last_of_all(more, "") == Made(7, "a", 2)
    fewer = {0: made(7, 6, ranks=3), 1: made(7, 6, ranks=3), 2: made(6, ranks=3)}
    assert last_of_all(fewer, "") == Made(6, "a", 3)
    for other in ([], made(7, 6, run="b"), made(5, 4)):
        with pytest.raises(FileNotFoundError, match=r"likely its directory rank-[01] is"):
            last_of_all({0: made(7, 6), 1: other}, "run")
