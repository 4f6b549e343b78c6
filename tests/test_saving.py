"""offload.save and offload.load: the run goes on with the same bits, wherever things live."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import aio
import offload
from cpu_adam import CPULion
from offload.checkpoint import directory, saving
from offload.planning import planner
from tests import training
from tests.forked import Forked
from tests.training import RESIDENT, Net, Run, assert_same, attached, plain, result_of, some_fast

EVERYWHERE = [RESIDENT, ("cpu", "cpu", "cpu"), ("nvme", "cpu", "nvme"), ("device", "cpu", "cpu")]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def lion(model: nn.Module) -> torch.optim.Optimizer:
    return CPULion(model.parameters(), lr=1e-3)


def scheduled(run: Run) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [1, 4], gamma=0.5)


def some_steps(run: Run, scheduler: Any, count: int) -> None:
    for number in range(count):
        plain(run, number)
        scheduler.step()


def buffered() -> Net:
    net = Net(dropout=0.1)
    net.register_buffer("seen", torch.arange(5), persistent=True)
    net.register_buffer("scratch", torch.ones(3), persistent=False)
    return net


def test_a_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    def adam(model: Net) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)

    with attached(("cpu", "cpu", "cpu"), (), optimizer=adam) as run:
        run.optimizer.param_groups[0]["lr"] *= 0.7
        offload.save(run.model, run.optimizer, tmp_path / "saved")
    with attached(("cpu", "cpu", "cpu"), (), optimizer=adam) as run:
        offload.load(run.model, run.optimizer, tmp_path / "saved")
        assert torch.equal(run.optimizer.param_groups[0]["lr"], torch.tensor(0.01) * 0.7)


@pytest.mark.parametrize(("before", "after"), training.round_about(EVERYWHERE))
def test_a_run_goes_on_with_the_same_bits(
    before: Any, after: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    there.mkdir()
    with attached(before, here, build=buffered) as run:
        scheduler = scheduled(run)
        some_steps(run, scheduler, 2)
        at = run.generator.get_state()
        offload.save(
            run.model, run.optimizer, tmp_path / "save", user=(2, {1: "x"}), scheduler=scheduler
        )
        run.losses.clear()
        some_steps(run, scheduler, 3)
        expected = result_of(run)
    torch.manual_seed(5)
    monkeypatch.setattr(planner, "CHUNK_ELEMENTS", 2048)
    monkeypatch.setattr(saving, "PART_ELEMENTS", 512)
    with attached(after, there, build=buffered) as run:
        plain(run, 0)  # What is there before does not matter.
        run.model.seen.zero_()
        scheduler = scheduled(run)
        another = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(Net().parameters()))
        for move in (offload.save, offload.load):
            with pytest.raises(ValueError, match="a scheduler and no optimizer"):
                move(run.model, None, tmp_path / "save", scheduler=scheduler)
            with pytest.raises(TypeError, match="asked for scheduler=5; found no scheduler"):
                move(run.model, run.optimizer, tmp_path / "save", scheduler=5)
            with pytest.raises(ValueError, match="found that it is of another optimizer"):
                move(run.model, run.optimizer, tmp_path / "save", scheduler=another)
        user = offload.load(run.model, run.optimizer, tmp_path / "save", scheduler=scheduler)
        assert user == (2, {1: "x"})
        assert run.engine.steps == 2
        run.generator.set_state(at)
        run.losses.clear()
        some_steps(run, scheduler, 3)
        assert_same(result_of(run), expected)


WHOLE: list[dict[str, Any]] = [
    {"build": build, "optimizer": optimizer}
    for build in (training.frozen, lambda: Net(tied=True))
    for optimizer in (sgd, lion)
]


@pytest.mark.parametrize("options", [*WHOLE, {"states": "compact"}])
def test_every_rule_and_model_is_saved_whole(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PART_ELEMENTS", 1024 if "states" in options else 256)
    with attached(("nvme", "cpu", "nvme"), tmp_path, **options) as run:
        plain(run, 0)
        offload.save(run.model, run.optimizer, tmp_path / "save")
        expected = result_of(run)
    with attached(("cpu", "cpu", "cpu"), tmp_path, **options) as run:
        offload.load(run.model, run.optimizer, tmp_path / "save")
        run.losses[:] = expected.losses
        assert_same(result_of(run), expected)


def test_moments_that_lose_bits_on_their_way_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for before, after in (("exact", "compact"), ("compact", "exact")):
        with attached(("cpu", "cpu", "cpu"), tmp_path, states=before) as run:
            plain(run, 0)
            offload.save(run.model, run.optimizer, f"~/{before}")
            expected = list(run.model.state_dict().values())
        with attached(("cpu", "cpu", "cpu"), tmp_path, states=after) as run:
            loses = pytest.warns(RuntimeWarning, match="keeps a byte each from now on")
            with loses if before == "exact" else nullcontext():
                offload.load(run.model, run.optimizer, f"~/{before}")
            assert all(map(torch.equal, run.model.state_dict().values(), expected))
    assert (tmp_path / "exact").is_dir()


def test_the_library_of_the_format_reads_every_shard(tmp_path: Path) -> None:
    with attached(("nvme", "cpu", "cpu"), tmp_path, build=buffered) as run:
        plain(run, 0)
        offload.save(run.model, run.optimizer, tmp_path / "save", shard_bytes="20kB")
        expected = dict(run.model.state_dict())
    files = sorted((tmp_path / "save").glob("model-*.safetensors"))
    assert len(files) > 3
    found: dict[str, torch.Tensor] = {}
    for path in files:
        found |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value.cpu()) for name, value in expected.items())


def test_random_numbers_go_on(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        offload.save(run.model, run.optimizer, tmp_path / "save")
        expected = torch.rand(3), np.random.rand(3), random.random()
        offload.load(run.model, run.optimizer, tmp_path / "save")
        found = torch.rand(3), np.random.rand(3), random.random()
        assert all(np.array_equal(a, b) for a, b in zip(found, expected))


# -- whole, or not at all --------------------------------------------------------------------------


def saved(tmp_path: Path) -> Path:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        plain(run, 0)
        offload.save(run.model, run.optimizer, tmp_path / "save", user=1)
    return tmp_path / "save"


def contents(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(tmp_path)
    before = contents(path)
    flush, calls = os.fsync, 0

    def fails(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        flush(fd)

    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        plain(run, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            with pytest.raises(OSError, match="No space"):
                offload.save(run.model, run.optimizer, path, user=2)
        assert contents(path) == before
        assert [one.name for one in tmp_path.iterdir()] == ["save"]
        plain(run, 1)  # The engine goes on.
        offload.save(run.model, run.optimizer, path, user=2)
        assert offload.load(run.model, run.optimizer, path) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["save"]


def test_what_is_no_save_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_text("mine")
    (tmp_path / "link").symlink_to("notes")
    with attached(RESIDENT, tmp_path) as run:
        for name in ("notes", "link", "notes/a"):
            with pytest.raises(FileExistsError):
                offload.save(run.model, run.optimizer, tmp_path / name)
        with pytest.raises(TypeError, match=r"user\['x'\] is a set"):
            offload.save(run.model, run.optimizer, tmp_path / "new", user={"x": set()})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "notes"]


def test_what_lies_in_a_save_is_not_lost_with_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with attached(RESIDENT, tmp_path) as run:
        for make in ("best", "notes.txt"):
            (path / make).mkdir()
            with pytest.raises(FileExistsError, match=f"found {make}, of no save"):
                offload.save(run.model, run.optimizer, path)
            (path / make).rmdir()
        offload.save(run.model, run.optimizer, path)


def test_a_set_of_another_save_is_not_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with attached(RESIDENT, tmp_path) as run:
        offload.save(run.model, run.optimizer, tmp_path / "other")
        before, (weights,) = result_of(run), path.glob("model*.safetensors")
        shutil.copy(weights, path / "model.safetensors")
        with pytest.raises(ValueError, match="of another save than"):
            offload.load(run.model, run.optimizer, path)
        (path / "model.safetensors").unlink()
        for file in (tmp_path / "other").glob("model*"):
            file.replace(path / file.name)
        with pytest.raises(ValueError, match="of another save than"):
            offload.load(run.model, run.optimizer, path)
        assert_same(before, result_of(run))


def test_a_scheduler_that_takes_nothing_leaves_all_as_it_was(tmp_path: Path) -> None:
    class Other(torch.optim.lr_scheduler.LambdaLR):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("of another kind")

    with attached(RESIDENT, tmp_path) as run:
        scheduler: Any = Other(run.optimizer, lambda step: 1.0)
        offload.save(run.model, run.optimizer, tmp_path / "save", scheduler=scheduler)
        plain(run, 0)
        before = result_of(run)
        with pytest.raises(KeyError, match="of another kind"):
            offload.load(run.model, run.optimizer, tmp_path / "save", scheduler=scheduler)
        assert_same(before, result_of(run))


@pytest.mark.parametrize("build", [lambda: Net(layers=4), lambda: Net(width=16)])
def test_another_model_is_refused_and_unchanged(build: Any, tmp_path: Path) -> None:
    path = saved(tmp_path)
    with attached(("cpu", "cpu", "cpu"), tmp_path, build=build) as run:
        before = result_of(run)
        with pytest.raises(ValueError, match=r"missing|unexpected|dtype or shape|groups"):
            offload.load(run.model, run.optimizer, path)
        with pytest.raises(ValueError, match=r"missing|unexpected|dtype or shape"):
            offload.load(run.model, None, path)
        assert_same(result_of(run), before)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        with pytest.raises(ValueError, match="no scheduler in the save"):
            offload.load(run.model, run.optimizer, path, scheduler=scheduled(run))
        offload.save(run.model, None, tmp_path / "weights")
        with pytest.raises(ValueError, match="weights alone"):
            offload.load(run.model, run.optimizer, tmp_path / "weights")
        offload.load(run.model, None, tmp_path / "weights")
        with pytest.raises(FileNotFoundError, match="found none"):
            offload.load(run.model, run.optimizer, tmp_path / "none")
    with (
        attached(("cpu", "cpu", "cpu"), tmp_path, optimizer=sgd) as run,
        pytest.raises(ValueError, match="states of adam"),
    ):
        offload.load(run.model, run.optimizer, path)


def saves(drive: Path, path: Path) -> None:
    """Save again and again, and tell each."""
    with attached(("cpu", "cpu", "nvme"), drive) as run:
        for number in itertools.count():
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.fill_(number % 64)
            offload.save(run.model, run.optimizer, path, user=number)
            print(number, flush=True)


@pytest.mark.parametrize("seed", some_fast(range(10)))
def test_a_save_that_is_killed_leaves_the_one_before(seed: int, tmp_path: Path) -> None:
    path, draw = tmp_path / "save", random.Random(seed)
    saving = Forked(partial(saves, tmp_path, path))
    told = [saving.stdout.readline() for _ in range(draw.randrange(1, 4))][-1]
    time.sleep(draw.random() * 0.05)
    saving.send_signal(signal.SIGKILL)
    later, errors = saving.communicate()
    assert not errors
    told = later.splitlines()[-1:] or [told]
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        user = offload.load(run.model, run.optimizer, path)
        assert user - int(told[-1]) in (0, 1)
        assert all((one == user % 64).all() for one in run.model.state_dict().values())
        offload.save(run.model, run.optimizer, path)
    assert [one.name for one in tmp_path.iterdir()] == ["save"]


def _fail(*_: Any) -> None:
    raise OSError("on purpose")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_where_directories_cannot_change_names_at_once_an_earlier_save_stays(
    at: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Also after Ctrl-C between the names, and a kill there."""
    path, rename, calls = saved(tmp_path), os.rename, itertools.count(1)

    def pressed(*names: Any) -> None:
        rename(*names)
        if next(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(directory.ctypes, "CDLL", lambda *_, **__: None)
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", pressed)
            with pytest.raises(KeyboardInterrupt):
                offload.save(run.model, run.optimizer, path, user=2)
        plain(run, 0)
        assert offload.load(run.model, run.optimizer, path) == (1 if at == 1 else 2)
        path.rename(tmp_path / ".save.new.99999999.old")
        with monkeypatch.context() as patch:
            patch.setattr(aio.Writer, "write", _fail)
            with pytest.raises(OSError, match="on purpose"):
                offload.save(run.model, run.optimizer, path, user=3)
        assert offload.load(run.model, run.optimizer, path) == (1 if at == 1 else 2)
        monkeypatch.setattr(os.path, "ismount", lambda _: True)
        with pytest.raises(FileExistsError, match="a mount point"):
            offload.save(run.model, run.optimizer, path)
    assert [one.name for one in tmp_path.iterdir()] == ["save"]


def test_ctrl_c_in_a_save_leaves_a_usable_engine(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(tmp_path)

    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    with attached(("cpu", "cpu", "nvme"), tmp_path) as run:
        with monkeypatch.context() as patch:
            patch.setattr(aio.Writer, "write", pressed)
            with pytest.raises(KeyboardInterrupt):
                offload.save(run.model, run.optimizer, path, user=2)
        assert [one.name for one in tmp_path.iterdir()] == ["save"]
        plain(run, 0)
        assert offload.load(run.model, run.optimizer, path) == 1


def test_extra_state_is_refused(tmp_path: Path) -> None:
    class Extra(Net):
        def get_extra_state(self) -> Any:
            return object()

    with attached(RESIDENT, tmp_path, build=Extra) as run:
        with pytest.raises(ValueError, match="extra state"):
            offload.save(run.model, run.optimizer, tmp_path / "save")
        assert not list(tmp_path.iterdir())


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some_fast(range(40), fast=12))
def test_a_flipped_bit_is_found(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In the file and at the place that the seed says; the engine of a load that failed is over."""
    tmp_path = tmp_path_factory.mktemp("bits")
    path, draw = saved(tmp_path), random.Random(seed)
    file = draw.choice(
        sorted(one for one in path.iterdir() if one.suffix == ".safetensors" or seed % 4 == 0)
    )
    content = bytearray(file.read_bytes())
    content[draw.randrange(min(len(content), 400 if seed % 3 else len(content)))] ^= (
        1 << draw.randrange(8)
    )
    file.write_bytes(content)
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        expected = None
        try:
            offload.load(run.model, run.optimizer, path)
        except (OSError, ValueError):
            return
        expected = result_of(run)  # The bit is in nothing that counts.
    before = saved(tmp_path_factory.mktemp("again"))
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        offload.load(run.model, run.optimizer, before)
        assert_same(result_of(run), expected)


@pytest.mark.parametrize("damage", ["cut", "gone", "header", "run"])
def test_damage_is_one_sentence(damage: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = path / "model-00001-of-00001.safetensors"
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-5])
    elif damage == "gone":
        file.unlink()
    elif damage == "header":
        file.write_bytes((1 << 40).to_bytes(8, "little") + content[8:])
    else:
        run_file = path / "run.json"
        found = json.loads(run_file.read_text())
        found["run"]["step"] = 7
        run_file.write_text(json.dumps(found))
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        before = result_of(run)
        with pytest.raises((OSError, ValueError)) as told:
            offload.load(run.model, run.optimizer, path)
        assert "\n" not in str(told.value)
        assert_same(result_of(run), before)
