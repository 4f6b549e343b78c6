"""What `offload bench nvme` says of drives that are made up: doubts, what is kept, the verdict."""

import json
from dataclasses import replace

import pytest

from aio import bench
from offload.cli import bench_nvme, measuring
from tests.command import run
from tests.test_bench_nvme import FOUND


@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    """Runs the command on drives that were found like that; both outputs."""
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(measuring.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(bench_nvme, "is_memory", lambda path: False)

    def given(*arguments, found=FOUND):
        one = replace(found, path=str(tmp_path))
        monkeypatch.setattr(bench, "measure", lambda *_: [one])
        assert run("bench", "nvme", str(tmp_path), *arguments) == 0
        return capsys.readouterr()

    return given


def test_speeds_of_a_busy_machine_are_kept_with_that_doubt(told, monkeypatch, tmp_path):
    shown = told().err
    assert f"saved to {tmp_path}/machine.json" in shown
    assert shown.endswith("; remove it to forget it\n")
    monkeypatch.setattr(measuring.psutil, "cpu_percent", lambda interval: 97.6)
    shown = told()
    assert "But other programs keep 98% of the processors busy: all figures suffer" in shown.out
    assert "remove it to forget it; measure again where others take less than 98%" in shown.err
    (speed,) = json.loads((tmp_path / "machine.json").read_text())["drives"].values()
    assert speed["others_percent"] == 98
