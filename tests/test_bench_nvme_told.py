"""What `offload bench nvme` says of drives that are made up: doubts, what is kept, the verdict."""

import json
import weakref
from dataclasses import replace

import pytest

from aio import backends, bench, load
from offload.cli import bench_nvme, measuring
from tests.command import run
from tests.test_bench_nvme import FOUND, found


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


def flat(text):
    """As if no line were broken."""
    return " ".join(text.split())


def test_speeds_of_a_busy_machine_are_kept_with_that_doubt(told, monkeypatch, tmp_path):
    shown = told().err
    assert f"saved to {tmp_path}/machine.json" in shown
    assert shown.endswith("; remove it to forget it\n")
    monkeypatch.setattr(measuring.psutil, "cpu_percent", lambda interval: 97.6)
    shown = told()
    doubt = "But other programs keep 98% of the processors busy: all figures suffer"
    assert doubt in flat(shown.out)
    assert "remove it to forget it; measure again where others take less than 98%" in shown.err
    (speed,) = json.loads((tmp_path / "machine.json").read_text())["drives"].values()
    assert speed["others_percent"] == 98


def test_the_verdict_says_whether_the_states_fit_and_what_is_assumed(told, monkeypatch):
    free = [66_700_000_000]
    monkeypatch.setattr(bench_nvme, "nvme_free_bytes", lambda *_, **__: free[0])
    shown = flat(told().out)
    assert "of a 7B model takes 70 GB; 66.7 GB are free: it does not fit, fp32 would." in shown
    assert "H100 (assumed, as none is given: --gpu) is what bounds it" in shown
    sheet = "(--endurance: the data sheet says what it endures)"
    assert f"steps use up 600 TB, assumed {sheet}. " in shown
    shown = told("--gpu", "a100", "--endurance", "1PB", "--model", "1B").out
    assert all(len(line) <= 80 for line in shown.splitlines() if line.startswith("The opt"))
    shown = flat(shown)
    assert "of a 1B model takes 10 GB; 66.7 GB are free: it fits." in shown
    assert "A100 (--gpu) is what bounds it" in shown
    assert "steps use up the 1000 TB that it endures (--endurance). " in shown
    assert "assumed" not in shown
    free[0] = 5 << 30
    assert "it does not fit." in flat(told().out)


def test_drives_that_write_faster_than_they_read_are_doubted(told):
    doubt = "writing was 3.4 times as fast as reading: likely a cache took the bytes"
    assert doubt in told(found=found(read=1.5e9, write=5.1e9, both=2e9)).out
    assert "a cache" not in told(found=found(read=1.5e9, write=2e9, both=2e9)).out


def test_what_is_probed_for_is_what_backends_hold_at_once(monkeypatch, tmp_path, capsys):
    """Requests of Linux AIO are counted by the kernel, those of all backends together."""
    held, most, asked = {}, [], []
    inner_open, inner_compared = load.open_backend, backends.compared
    inner_run = load.Load.run

    def opened(name, *, depth, **limits):
        backend = inner_open(name, depth=depth, **limits)
        held[id(backend)] = depth + 1
        most.append(sum(held.values()))
        weakref.finalize(backend, held.pop, id(backend))
        return backend

    def compared(depth):
        asked.append(depth + 1)
        return inner_compared(depth)

    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(bench_nvme, "SECONDS_MIN", 0.1)
    monkeypatch.setattr(bench_nvme, "same_drive", lambda paths: tuple(range(len(paths))))
    monkeypatch.setattr(load, "open_backend", opened)
    monkeypatch.setattr(load.Load, "run", lambda *of, seconds=0.02: inner_run(*of[:3], seconds))
    monkeypatch.setattr(measuring.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.setattr(backends, "compared", compared)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    few = ["--size", "2MiB", "--seconds", "0.5", "--blocks", "64KiB", "--depths", "3"]
    assert run("bench", "nvme", *map(str, paths), *few, "--backends", "python") == 0
    capsys.readouterr()
    assert 2 * (2 * 3 + 1) < max(most) <= asked[0]
