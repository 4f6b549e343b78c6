"""Two ranks train as one process does, to the bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.parallel.collectives import differences
from offload.parallel.flat_shard import boxes
from offload.parallel.group import Group
from offload.runtime.entry import EngineError
from offload.runtime.native import native_runner
from tests import command, ranks_jobs
from tests import ranks as jobs
from tests.forked import Forked, anew
from tests.ranks import KINDS, MEMORY, Failed, How, World, assert_as_one, digest, joined, same
from tests.ranks_durable import Life
from tests.test_docs import blocks
from tests.training import some_fast, some_rows_fast

ROOT = Path(__file__).resolve().parent.parent
FAST = ("plain", "experts")
PLACES = {"params": "cpu", "gradients": "cpu", "optimizer": "cpu"}


two = jobs.world_of(2)


@pytest.mark.parametrize(
    "kind", some_fast([*FAST, *(one for one in KINDS if one not in FAST)], fast=2)
)
def test_every_kind_of_model(two: World, kind: str) -> None:
    how = How(kind, micro=2, config={**PLACES, "max_grad_norm": 0.5})
    assert_as_one(two.run("train", how), how)


STATES = [("compact", 2), ("exact", 1), ("exact", 3), ("compact", 3), ("exact", 2)]


@pytest.mark.parametrize(("states", "shard"), some_rows_fast(STATES))
def test_states(two: World, shard: int, states: str) -> None:
    how = How(micro=3, config={"shard": shard, "states": states})
    assert_as_one(two.run("train", how), how)


def test_all_on_nvme(two: World, tmp_path: Path) -> None:
    places: dict[str, Any] = dict.fromkeys(PLACES, "nvme")
    how = How(micro=2, config={**places, "nvme_path": str(tmp_path), "max_grad_norm": 0.5})
    assert_as_one(two.run("train", how), how)


@pytest.mark.parametrize("shard", some_fast([3, 2]))
def test_ranks_that_need_different_units_wait_for_each_other(two: World, shard: int) -> None:
    how = How("unused", config={"shard": shard})
    one, other = (two.run("diverge", how) for _ in range(2))
    for mine, again in zip(one, other):
        for name, (start, value) in mine.items():
            assert again[name][0] == start
            assert torch.equal(again[name][1], value), name


def test_clipping_by_torch_gives_one_norm(two: World) -> None:
    how = How(dtype=torch.float32)
    (norms, values), (others, _) = two.run("clip", how)
    assert norms == others
    assert all(torch.isfinite(value).all() for _, value in values.values())


def test_a_touch_says_what_to_do(two: World) -> None:
    _, said = two.run("touch", How())
    assert said.keys() == {"add", "cpu", "print", "grad", "save", "item"}
    for text in said.values():
        assert "of 1739 are on this rank" in text
        assert "offload.gathered" in text


@pytest.mark.parametrize("ours", some_fast([True, False]))
def test_saved_by_two_and_continued_by_one_and_by_two(
    two: World, ours: bool, tmp_path: Path
) -> None:
    how, folder = How("frozen", micro=1, dtype=torch.float32), str(tmp_path / "saved")
    went_on = joined(two.run("save", how, folder, ours=ours))
    again = joined(two.run("load", how, folder, 1, ours=ours))
    with warnings.catch_warnings():  # That there is no process group.
        warnings.simplefilter("ignore")
        alone = joined([ranks_jobs.load(0, 1, replace(how, micro=2), folder, 2, ours=ours)])
    assert went_on.keys() == again.keys() == alone.keys()
    for name, value in went_on.items():
        assert torch.equal(again[name], value), name
        assert torch.equal(alone[name], value), name


def test_a_save_that_one_rank_cannot_write_fails_on_all(two: World, tmp_path: Path) -> None:
    first, second = two.run("tests.ranks_refused.save_in_vain", How(), str(tmp_path / "saved"))
    assert first == "OSError: [Errno 28] No space left on device"
    assert second == f"RuntimeError: rank 0 could not do its part of what all do: {first}"
    assert [*tmp_path.iterdir()] == [tmp_path / "saved"], "that of afterwards"


def test_a_bit_that_changed_is_found_by_ranks_that_read_parts(two: World, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    two.run("save", How(), str(folder), ours=True)
    for file in sorted(folder.glob("exp_avg-*"))[:1]:
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    two.begin("load", How(), str(folder), 1, ours=True)
    for one in two.results():
        assert isinstance(one, Failed), one
        assert one.kind == "OSError", one.text
        assert "checksum mismatch" in one.message


@pytest.mark.parametrize("what", some_fast(["budget", "model", "seed", "config"]))
def test_ranks_that_attach_different_things(two: World, what: str) -> None:
    two.begin("differ", How(), what)
    for one in two.results():
        assert isinstance(one, Failed), one
        assert one.kind in ("ValueError", "BudgetError", "RuntimeError"), one.text


AT_ONCE = {
    "lr": "after step 1: rank 0: lr=0.01; rank 1: lr=0.5. Let",
    "batches": "after step 1: rank 0: backwards=1; rank 1: backwards=2. Let",
    "skipped": "the ranks take different steps after step 1",
    "values": "rank 0 asked for values",
    "save": "rank 0 saves.*; rank 1 called step.* take the call out of `if rank == 0`",
}


@pytest.mark.parametrize("what", some_fast(AT_ONCE))
def test_ranks_that_take_different_steps(two: World, what: str) -> None:
    two.begin("differ", How(), what)
    for one in two.results():
        assert isinstance(one, Failed), one
        assert one.kind == "EngineError", one.text
        assert re.search(AT_ONCE[what], one.message), one.message


def test_ranks_that_say_the_same_are_told_together() -> None:
    one, other = {"parameters": "4", "lr": "0.1 and 0.2"}, {"parameters": "4", "lr": "0.1"}
    assert differences([one, other, one, one]) == "ranks 0, 2, 3: lr=0.1 and 0.2; rank 1: lr=0.1"
    idle = {"parameters": "0"}
    assert differences([one, idle]) == "rank 0: parameters=4; rank 1: parameters=0"
    assert differences([one, one]) == "ranks 0, 1: the same values for other parameters"


def test_that_a_rank_is_gone_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """To those that wait for the one that found it, and would else wait for `comm_timeout`."""
    group, told = Group.__new__(Group), list[BaseException]()
    group._met, group._over = True, None
    monkeypatch.setattr(Group, "_blame", lambda *_: EngineError("rank 3 is gone"))
    monkeypatch.setattr(Group, "fail", lambda _, error: told.append(error))
    with pytest.raises(EngineError, match="rank 3 is gone") as found, group._failing():
        raise RuntimeError("Connection closed by peer")
    assert told == [found.value]


FAULTS = {
    "raise": "rank 1 on .* failed after step 1: OSError: the drive is gone",
    "edit": "rank 1 on .* failed after step 1: RuntimeError: blocks.3 was changed inside",
    "kill": "rank 1 is gone after step 1",
    "stop": "rank 1 did not come .* after step 1: likely it is stopped",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "ranks"), [*((one, 2) for one in FAULTS), ("kill", 4), ("stop", 4)]
)
def test_a_rank_that_fails_is_named(what: str, ranks: int, tmp_path: Path) -> None:
    world = World(ranks, tmp_path)
    world.begin("differ", How(), what)
    (one, *_) = world.results(60, of=1)
    world.close()
    assert isinstance(one, Failed), one
    assert one.kind == "EngineError", one.text
    assert re.search(FAULTS[what], one.message), one.message
    assert one.seconds < 15


class Kept(dict[str, str]):
    """A store of torch.distributed, and which keys were looked for."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self.set = self.__setitem__

    def check(self, keys: list[str]) -> bool:
        self.looked += keys
        return set(keys) <= self.keys()


def test_a_look_for_failures_asks_for_one_key_and_a_long_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, (first, *_, last) = Kept(), [object.__new__(Group) for _ in range(64)]
    monkeypatch.setattr("offload.parallel.group.group_store", lambda _: store)
    monkeypatch.setattr("offload.parallel.group._numbers", {None: 2})
    for rank, one in ((0, first), (63, last)):
        one.rank, one.ranks, one.step, one._talk, one._number = rank, 64, 7, None, 1
    first._raise_failed()
    assert len(store.looked) == 1
    last.fail(OSError("the drive is gone"))
    with pytest.raises(
        EngineError, match=r"rank 63 on .* after step 7: OSError: the drive is gone"
    ):
        first._raise_failed()
    last._raise_failed()
    first._number = 3
    first._raise_failed()  # It was another model that failed, before this one was attached.
    monkeypatch.setattr("offload.parallel.group.PATIENCE_S", 0.1)
    first._told, first._timeout_s = False, 300.0
    with pytest.warns(
        RuntimeWarning, match=r"waiting for ranks 1, 2, .*comm_timeout=300 s: likely"
    ):
        first._look(61.0)
    first._look(62.0)  # Told once.


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [(1,), (5, 3), (3, 4, 5), (2, 1, 7, 2), ()])
def test_boxes_are_the_elements_of_a_range(sizes: tuple[int, ...], ranks: int) -> None:
    every = torch.arange(prod(sizes)).view(sizes)
    for first in range(prod(sizes) + 1):
        for stop in range(first, prod(sizes) + 1, ranks):
            found = list(boxes(sizes, first, stop))
            assert len(found) <= max(1, 2 * len(sizes) - 1)
            parts = [
                every[tuple(slice(a, a + n) for a, n in zip(offsets, counts))].reshape(-1)
                for _, offsets, counts in found
            ]
            there = torch.cat(parts) if parts else every.view(-1)[:0]
            assert there.tolist() == list(range(first, stop))
            assert [begin for begin, _, _ in found] == [int(one[0]) for one in parts]


def test_ranks_sleep_and_wake_together_or_not_at_all(two: World) -> None:
    how = How(steps=2, config={"optimizer": "device", "shard": 2})
    (first, *found), (second, *others) = two.run("tests.ranks_refused.restless", how)
    assert ["rank 1 could not" in first[0], "broken" in second[0]] == [True, True]
    assert ["rank 0 could not" in second[1], "others have" in first[1]] == [True, True]
    assert same([*found, *others], [one.values for one in two.run("train", how)])


def test_meshes_of_other_forms_are_refused(two: World) -> None:
    two.begin("tests.ranks_refused.refused", How())
    for one in two.results():
        assert isinstance(one, list), one.text
        three, descending, *outside = one
        assert "pass such a slice of it, mesh['pp'] or mesh['pp', 'dp']" in three
        assert "[[1], [0]]; found that they descend" in descending
        assert all("this rank is not part of the mesh" in text for text in outside)
    assert len(outside) == 3


def test_what_sums_over_ranks_itself_is_named(two: World) -> None:
    for *wrapped, absent in two.run("tests.ranks_refused.wrapped", How()):
        told = "DistributedDataParallel and fully_shard: leave them out"
        assert [told in one for one in wrapped] == [True] * 3
        assert "does not have no.bias, a Tensor: give parameters" in absent


def test_one_rank_imports_nothing_of_it() -> None:
    script = (
        "import sys, torch, offload; m = torch.nn.Linear(4, 4); "
        "o = torch.optim.AdamW(m.parameters()); m, o = offload.attach(m, o); "
        "m(torch.ones(1, 4)).sum().backward(); o.step(); "
        "assert not [name for name in sys.modules if name.startswith('offload.parallel')]; "
        "assert not torch.distributed.is_initialized()"
    )
    alone = Forked(lambda: anew(script))
    assert alone.communicate() == ("", "")
    assert alone.returncode == 0


@pytest.mark.parametrize(
    ("job", "seeds"), some_rows_fast([("late", 2), ("late", 10), ("delayed", 100)])
)
@pytest.mark.parametrize("shard", some_fast([3, 2, 1]))
def test_when_collectives_happen_changes_no_bit(
    two: World, job: str, seeds: int, shard: int
) -> None:
    said = {"micro_batches": 2} if shard == 1 else {}
    how = How(micro=2, config={"shard": shard, "max_grad_norm": 0.5, **said})
    wanted = [digest(one.values) for one in two.run("train", how)]
    for rank, found in enumerate(two.run(job, how, seeds, patience_s=300)):
        assert set(found) == {wanted[rank]}
        assert len(found) == seeds


def test_a_durable_run_goes_on(two: World, tmp_path: Path) -> None:
    places = dict.fromkeys(("params", "gradients", "optimizer"), "nvme")
    how = How("tied", config={**places, "nvme_path": str(tmp_path), "commit_every": 1})
    live, found = "tests.ranks_durable.live", []
    for folder, until in (("run", 2), ("run", 4), ("whole", 4)):
        other = replace(how, config={**how.config, "durable": str(tmp_path / folder)})
        found.append(two.run(live, other, Life(until)))
    for first, second, whole in zip(*found):
        assert (first[0], second[0]) == (0, 2)
        assert second[1] == whole[1]
        assert first[2] + second[2] == whole[2]


def test_detach_gives_each_rank_all_of_it(two: World) -> None:
    one, other = two.run("detach", How(dtype=torch.float32))
    assert len(one) > 60
    for name, value in one.items():
        assert torch.equal(value, other[name])
        assert torch.isfinite(value).all()


def test_a_job_without_a_process_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model, optimizer = How().build()
    with pytest.warns(RuntimeWarning, match=r"one of 4 processes.*init_process_group"):
        offload.attach(model, optimizer, offload.Config(**MEMORY))
    offload.engine_of(model).close()
    with pytest.raises(ValueError, match=r"asked for a mesh; found no process group"):
        offload.attach(*How().build(), offload.Config(**MEMORY), mesh=object())


def test_train_is_one_process(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.run("train", "--steps", "1") == 2
    assert "examples/ranks.py" in capsys.readouterr().err


@pytest.mark.parametrize("shard", some_fast([2, 3]))
def test_bytes_sent_are_those_of_the_formula(two: World, shard: int) -> None:
    for found, planned, formula in two.run("sent", How(config={"shard": shard})):
        assert found == planned == formula > 0


@pytest.mark.slow
def test_the_example_runs_and_its_save_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[1] / "examples/ranks.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, script, tmp_path / "saved"], check=True, env=environment)
    assert command.run("inspect", str(tmp_path / "saved")) == 0
    assert "whole" in capsys.readouterr().out


def test_a_refused_attach_leaves_the_model_as_it_was(two: World) -> None:
    for text in two.run("tests.ranks_refused.kept", How()):
        assert text.startswith("the ranks attach different models")


def test_units_of_which_parts_are_frozen_on_a_drive(two: World, tmp_path: Path) -> None:
    how = replace(jobs.way_of(("nvme", "nvme", "nvme"), 3, tmp_path), kind="frozen")
    assert_as_one(two.run("train", how), how)


def test_ranks_on_a_host_share_it_whoever_launches_them(two: World) -> None:
    assert two.run("tests.ranks_refused.unset", How()) == ["2", "2"]


def test_a_value_of_another_parameter_is_refused(two: World) -> None:
    for said in two.run("tests.ranks_refused.misfit", How()):
        assert "was given a value of (3,)" in said[0]
        assert "of this parameter" in said[1]


@pytest.mark.parametrize("shard", some_fast([3, 2, 1]))
def test_updates_begin_inside_the_last_backward(two: World, shard: int) -> None:
    how = How(micro=2, steps=3, config={**PLACES, "shard": shard, "micro_batches": 2})
    for found in two.run("early", how):
        # In the second backward the order of the first is known, but where that exchanges nothing.
        # A sum is there a unit later.
        assert found == [(0, 0), (3 * (shard > 1), 6), (0, 0), (3, 6), (0, 0), (3, 6)]
    assert_as_one(two.run("train", how), how)


def test_parts_of_a_model_train_as_by_torch(two: World) -> None:
    """More of them in `test_ranks_tensor.py`."""
    how = How("sequence", torch.float32, config={"params": "cpu", "max_grad_norm": 0.5})
    ours = two.run("tests.ranks_tensor.train", how)
    plain = two.run("tests.ranks_tensor.train_by_torch", how, 1)
    for (losses, norms, values), wanted in zip(ours, plain, strict=True):
        assert losses == wanted[0]
        assert norms == pytest.approx(wanted[1], rel=1e-12)
        assert all(torch.equal(value, wanted[2][name]) for name, value in values.items())


@pytest.mark.parametrize("shard", some_fast([2, 3]))
def test_what_changes_on_one_rank_is_gathered_anew_by_all(two: World, shard: int) -> None:
    how = How(dtype=torch.float32, config={**PLACES, "shard": shard})
    for found in two.run("tests.ranks_refused.edited", how):
        assert all(ours == plain for ours, plain in found)


def test_an_edit_of_a_copy_is_refused(two: World) -> None:
    two.run("tests.ranks_refused.copies", How())


def test_layers_outside_a_forward_and_values(two: World) -> None:
    two.run("tests.ranks_refused.outside", How(config={**PLACES, "shard": 3}))


@pytest.mark.parametrize("on", some_fast([1, 0]))
def test_a_part_that_cannot_be_read_is_told_on_all(two: World, on: int, tmp_path: Path) -> None:
    args = How(config=PLACES), str(tmp_path / "saved"), on
    for text, _ in two.run("tests.ranks_refused.unreadable", *args):
        assert "Input/output error" in text
    assert not (tmp_path / "saved").exists()


@pytest.mark.skipif(native_runner() is None, reason="the runner is not compiled")
def test_on_an_accelerator_with_streams(two: World) -> None:
    """More of it in `test_ranks_paced.py`."""
    how = How("tied", micro=2, config={"params": "cpu", "max_grad_norm": 0.5})
    assert_as_one(two.run("paced", 3, "train", how), how)


def test_the_loop_of_the_docs_goes_on_with_the_same_bits(two: World, tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs/ranks.md", "python")
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    job = "tests.ranks_docs.loop", text
    whole = two.run(*job, str(folders[0]), 2)
    two.run(*job, str(folders[1]), 1)
    assert two.run(*job, str(folders[1]), 2) == whole
    assert whole[0][0] == whole[1][0] < 0.05, "one loss, which has fallen"


def test_ranks_at_two_models_are_told(two: World) -> None:
    for text in two.run("tests.ranks_refused.two_models", How()):
        assert "use different models at one time" in text
    two.close()  # Nobody has closed those engines, and whoever comes next starts ranks anew.
