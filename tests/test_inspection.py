"""`offload inspect`, and what another reader finds in a save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aio
import offload
from cpu_adam.reference import join
from offload.checkpoint.inspection import inspect
from offload.checkpoint.shards import FILES_MAX
from offload.cli import main
from tests import save_reader
from tests.training import Net, attached, plain


@pytest.fixture
def save(tmp_path: Path) -> Path:
    with attached(("cpu", "cpu", "nvme"), tmp_path, build=lambda: Net(layers=1, tied=True)) as run:
        plain(run, 0)
        plain(run, 1)
        path = tmp_path / "save"
        offload.save(run.model, run.optimizer, path, user={"at": (3, {4: None})}, shard_bytes=9_000)
    return path


def test_another_reader_finds_the_same(save: Path, tmp_path: Path) -> None:
    run, sets = save_reader.read(str(save))
    assert save_reader.decoded(run["user"]) == {"at": (3, {4: None})}
    with attached(("cpu", "cpu", "cpu"), tmp_path, build=lambda: Net(layers=1, tied=True)) as there:
        offload.load(there.model, there.optimizer, save)
        state = there.optimizer.state_dict()["state"]
        masters = save_reader.masters(sets)
        for number, (name, parameter) in enumerate(there.model.named_parameters()):
            slots, weight = state[number], parameter.detach()
            assert np.array_equal(sets["exp_avg_sq"][name], slots["exp_avg_sq"].numpy())
            assert np.array_equal(sets["exp_avg"][name], slots["exp_avg"].numpy())
            assert np.array_equal(masters[name], join(weight, slots["residue"]).numpy()), name
            assert run["optimizer"]["states"][name]["steps"] == slots["step"] == 2
    code = subprocess.run(
        [sys.executable, "-I", save_reader.__file__, str(save)], capture_output=True, check=True
    )
    assert b"residue 9 tensors" in code.stdout


def test_a_whole_save_is_shown(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(save)]) == 0
    told = capsys.readouterr().out
    assert "step             2" in told
    assert "adam, groups: 1" in told
    assert "{'at': (3, {4: None})}" in told
    assert "set residue      9 tensors" in told
    assert told.endswith("whole\n")
    assert main(["inspect", str(save), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["broken"] == []


def flip(save: Path) -> str:
    file = sorted(save.glob("exp_avg-*"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    return f"exp_avg: {file}: "


def cut(save: Path) -> str:
    file = sorted(save.glob("residue-*"))[0]
    file.write_bytes(file.read_bytes()[:-9])
    return f"residue: {file}: no safetensors file"


def remove(save: Path) -> str:
    (save / "exp_avg_sq.safetensors.index.json").unlink()
    return "exp_avg_sq: "


def edit(save: Path) -> str:
    file = save / "run.json"
    file.write_text(file.read_text().replace('"step":2', '"step":3'))
    return f"{file}: checksum mismatch"


def forget(save: Path) -> str:
    (save / "run.json").unlink()
    return f"{save / 'run.json'}: "


@pytest.mark.parametrize("damage", [flip, cut, remove, edit, forget])
def test_what_is_broken_is_named(damage: Any, save: Path, capsys: Any) -> None:
    told = damage(save)
    before = {one: one.read_bytes() for one in save.iterdir()}
    assert main(["inspect", str(save)]) == 1
    shown = capsys.readouterr().out
    assert f"broken: {told}" in shown
    assert shown.endswith("1 broken\n")
    assert "set model" in shown  # The others are looked at all the same.
    assert {one: one.read_bytes() for one in save.iterdir()} == before


def test_a_set_of_another_save_is_no_part_of_it(save: Path) -> None:
    other = save.parent / "other"
    with attached(("cpu", "cpu", "cpu"), save.parent, build=lambda: Net(layers=2)) as run:
        plain(run, 0)
        offload.save(run.model, run.optimizer, other)
    for file in save.glob("exp_avg_sq*"):
        file.unlink()
    for file in other.glob("exp_avg_sq*"):
        (save / file.name).write_bytes(file.read_bytes())
    (told,) = inspect(save).broken
    assert "exp_avg_sq.safetensors.index.json: of another save than the run.json beside" in told


def test_few_files_of_a_set_have_memory(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is read has blocks, and there may be any number of files."""
    assert len(list(save.glob("exp_avg-*"))) > FILES_MAX
    having, most = set[str](), 0

    class Counted(aio.Reader):
        def read(self, *given: Any) -> None:
            nonlocal most
            having.add(self.path)
            super().read(*given)
            most = max(most, len(having) - 1)

        def let_go(self, **given: int) -> None:
            having.discard(self.path)
            super().let_go(**given)

    monkeypatch.setattr(aio, "Reader", Counted)
    assert inspect(save).broken == []
    assert not having
    assert most <= FILES_MAX


def test_weights_alone_have_no_checksums(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 12}, "weight_map": {"a": "model.safetensors"}})
    )
    found = inspect(tmp_path)
    assert (found.unchecked, found.broken) == (1, [])
    assert "no run.json" in found.rows


def test_another_directory_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no run.json" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none")]) == 2
