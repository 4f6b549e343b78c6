"""`offload bench nvme` on small files: what it shows, refuses, keeps, and how it stops.

Figures of real drives are not judged: that is what the benchmark is for.
"""

import json
import os
import re
import signal

import pytest

from offload.cli import bench_nvme, console
from offload.cli.bench_nvme import Found, Nvme, measure
from offload.cli.drive_load import TURNS, Load
from offload.planning.machine import save_speed, saved_speeds
from tests.command import assert_refused, run
from tests.drives import DriveIO
from tests.faults import nothing_leaks
from tests.profiles import SPEED
from tests.simulated import SimulatedIO

TINY = ["--size", "2MiB", "--seconds", "0.3"]
FLAGS = ["--seconds", "--size", "--save", "--no-save", "--json", "--no-json"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(bench_nvme, "SECONDS_MIN", 0.1)
    monkeypatch.setattr(bench_nvme, "is_memory", lambda path: path == "/dev/shm")  # /tmp may be.
    monkeypatch.setattr(console.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.chdir(tmp_path)
    with nothing_leaks():
        yield


def command(*arguments):
    return run("bench", "nvme", *map(str, arguments))


def test_help_says_what_there_is(capsys):
    assert run("bench", "--help") == 0
    assert "nvme   " in capsys.readouterr().out
    assert command("--help") == 0
    shown = re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)
    assert set(shown) - {"--help"} == set(FLAGS)


def test_json_has_every_figure_and_nothing_else(capsys, tmp_path):
    assert command(tmp_path, *TINY, "--json") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["kind"] == "bench nvme"
    (found,) = result["found"]
    assert found["path"] == str(tmp_path)
    assert list(found["rates"]) == [*TURNS]
    assert all(min(rates) > 0 for rates in found["rates"].values())
    assert found["bytes_written"] > 2 << 20
    assert "the file is gone however this ends" in shown.err
    assert "that of a 7B model in" in found["verdict"]
    assert list(saved_speeds()[0]) or not found["direct"]
    assert set(os.listdir(tmp_path)) <= {"machine.json"}


def test_several_drives_have_each_a_verdict_and_figures_fit_eighty_columns(
    monkeypatch, capsys, tmp_path
):
    paths = [tmp_path / name for name in ("a", "[red]b")]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(bench_nvme, "mount_point", lambda path: path)
    assert command(*paths, *TINY, "--no-save") == 0
    shown = capsys.readouterr()
    for path in paths:
        assert f"{path}: the optimizer state (exact bf16) of" in shown.out
    figures = [line for line in shown.out.splitlines() if line.startswith(tuple(TURNS))]
    assert len(figures) == 6
    assert max(map(len, figures)) <= 80
    assert not list(paths[0].iterdir())
    monkeypatch.setattr(bench_nvme, "mount_point", lambda path: "/")
    assert command(*paths, *TINY, "--no-save", "--json") == 0
    shown = capsys.readouterr()
    assert f"{paths[1]} is on the file system of another path: left out" in shown.err
    assert len(json.loads(shown.out)["found"]) == 1


REFUSED = {
    "": "found no path",
    "/nonexistent/drive": "/nonexistent/drive: it cannot be used: No such file",
    ". --size many": "'many' is not a size in bytes",
    "/dev/shm": "found /dev/shm, which is memory",
    ". --seconds nan": "--seconds nan: expected 0.1 to 3600\n",
    ". --siz 4GiB": "there is no option --siz (did you mean --size?)",
}


@pytest.mark.parametrize(("line", "expected"), REFUSED.items())
def test_what_cannot_be_is_refused_in_one_message(line, expected, monkeypatch, capsys):
    monkeypatch.setattr(bench_nvme, "measure", lambda *_: pytest.fail("measured"))
    assert_refused(capsys, expected, command(*line.split()))


def test_ctrl_c_is_one_line_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    inner = Load.run

    def stopped(self, mode, *most):
        if mode == "both":
            signal.raise_signal(signal.SIGINT)
        return inner(self, mode, *most)

    monkeypatch.setattr(Load, "run", stopped)
    assert command(tmp_path, *TINY) == 130
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("offload: stopped by Ctrl-C while measuring reading and ")
    assert told[-1].endswith("; nothing is left on disk")
    assert os.listdir(tmp_path) == []


def found(direct=True, **rates):
    return Found("/", direct, rates={mode: [rate] for mode, rate in rates.items()})


def test_the_verdict_is_arithmetic_and_has_its_doubts():
    assert found(read=4e9, write=4e9, both=3e9).each_way_bytes_per_s == pytest.approx(2e9)
    assert found(read=4e9, write=4e9, both=6e9).each_way_bytes_per_s == pytest.approx(3e9)
    told = found(read=2e9, write=2e9, both=2e9).verdict
    assert "of 100 M parameters is read and written back each second" in told
    assert "of a 7B model in 70 s" in told
    assert told.endswith("Each step writes 70 GB.")
    assert "a cache took the writes" in found(read=1e9, write=5e9, both=1e9).verdict


def test_speeds_are_kept_with_their_doubts(monkeypatch, capsys, tmp_path):
    one = found(read=3e9, write=2e9, both=4e9)
    monkeypatch.setattr(bench_nvme, "measure", lambda *_: one)
    monkeypatch.setattr(console.psutil, "cpu_percent", lambda interval: 97.6)
    assert command(tmp_path) == 0
    assert f"saved to {tmp_path}/machine.json" in capsys.readouterr().err
    (speed,) = saved_speeds()[0].values()
    figures = (speed.read_bytes_per_s, speed.write_bytes_per_s, speed.both_bytes_per_s)
    assert figures == (3e9, 2e9, 4e9)
    assert speed.others_percent == 98
    one.direct = False
    assert command(tmp_path) == 0
    assert "not saved: without O_DIRECT" in capsys.readouterr().err
    one.direct = True
    (tmp_path / "machine.json").write_text("my notes")
    assert command(tmp_path) == 0
    assert "note: the speeds could not be saved to" in capsys.readouterr().err
    assert (tmp_path / "machine.json").read_text() == "my notes"
    with pytest.raises(OSError, match="something else"):
        save_speed(str(tmp_path), SPEED)


def load(directory="/simulated", io=None):
    return Load(directory, 2 << 20, "python", io)


def test_load_on_a_simulated_drive_finds_its_speed():
    with load(io=DriveIO(8e6, 4e6, latency_s=6e-3)) as made:
        assert made.bytes_written == 2 << 20
        for mode, rate in (("read", 8e6), ("write", 4e6)):
            # A processor that is busy elsewhere makes it slower; nothing makes it faster.
            tries = (made.run(mode, 0.1) for _ in range(20))
            assert any(one == pytest.approx(rate, rel=0.3) for one in tries)
        written = made.bytes_written
        assert made.run("both", 0.1) > 0
        assert made.bytes_written > written


def test_a_failing_drive_is_an_error_with_nothing_left():
    io = SimulatedIO(0, errors={40: 5})
    with pytest.raises(OSError, match="bytes at offset"):
        measure(Nvme(size="2MiB", seconds=0.2), "/x", "python", io=io)
    assert not io.inner.files
