"""`offload bench nvme` on small files: what it shows, refuses, and how it stops.

Figures of real drives are not judged: that is what the benchmark is for.
"""

import contextlib
import json
import os
import re
import signal
import stat
import sys
import time
from dataclasses import replace

import pytest

import aio
import offload.cli
from aio import bench, fio
from aio.drives import Direction, Drive, DriveIO
from aio.figures import MODES, Cell, Figure, Found, Sample, quantile
from aio.load import Load
from aio.ratio import Ratio
from aio.sweep import Setting, Spent
from aio.system import is_memory
from cpu_adam import FORMATS
from offload.cli import EXIT_BAD_INPUT, bench_nvme, bench_nvme_report, bench_nvme_saved, measuring
from offload.cli.bench_nvme_verdict import EachWay, Verdict
from offload.machine import DriveSpeed
from tests.command import run
from tests.faults import nothing_leaks

TINY = ["--size", "2MiB", "--seconds", "0.1", "--blocks", "64KiB", "128KiB", "--depths", "1", "4"]
TINY += ["--writes-max", "256MiB"]
FLAGS = [
    "--seconds", "--size", "--writes-max", "--backends", "--blocks", "--depths", "--compare",
    "--model", "--gpu", "--endurance", "--save", "--no-save", "--plot", "--json", "--no-json",
]  # fmt: skip
needs_fio = pytest.mark.skipif(fio.installed() is None, reason="no fio here")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path, request):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OFFLOAD_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setattr(bench_nvme, "SECONDS_MIN", 0.1)
    monkeypatch.setattr(bench_nvme_report, "FIGURE_SECONDS_MIN", 0.0)
    monkeypatch.setattr(bench_nvme, "is_memory", lambda path: path == "/dev/shm")  # /tmp may be
    monkeypatch.setattr(measuring.psutil, "cpu_percent", lambda interval: 0.0)
    monkeypatch.chdir(tmp_path)
    # Fonts that were drawn with stay open.
    with contextlib.nullcontext() if "drawn" in request.node.name else nothing_leaks():
        yield


def command(*arguments):
    return run("bench", "nvme", *map(str, arguments))


def wanted(**options):
    given = {
        "paths": ("/simulated",), "file_bytes": 2 << 20, "written_bytes_max": 1 << 30,
        "seconds": 0.2, "backends": ("python",), "blocks_bytes": (64 << 10, 128 << 10),
        "depths": (1, 4),
    }  # fmt: skip
    return bench.Wanted(**(given | options))


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
    assert [figure["mode"] for figure in found["figures"]] == [*MODES]
    for figure in found["figures"]:
        assert figure["bytes_per_s_min"] <= figure["bytes_per_s"] <= figure["bytes_per_s_max"]
        assert 0 < figure["p50_s"] <= figure["p99_s"]
        assert figure["cpu_s_per_gb"] > 0
    tried = {
        (c["mode"], c["setting"]["block_bytes"], c["setting"]["depth"]) for c in found["cells"]
    }
    assert 3 <= len(tried) <= 12
    assert found["file_bytes"] < found["bytes_written"] <= 256 << 20
    assert [row["name"] for row in result["formats"]] == [*FORMATS]
    assert f"nvme_path={str(tmp_path)!r})" in result["config"]
    assert "at most 256MiB in all; the file is gone however this ends" in shown.err
    way = "at once" if result["each_way"]["at_once"] else "in turns"
    assert f"each second, reading and writing {way}, that of a 7B model" in result["verdict"]
    assert json.loads((tmp_path / "machine.json").read_text())["drives"] or not found["direct"]
    assert set(os.listdir(tmp_path)) <= {"machine.json"}


def test_the_table_is_plain_and_fits_eighty_columns(capsys, tmp_path):
    assert command(tmp_path, *TINY, "--no-save", "--model", "70B", "--gpu", "rtx4090") == 0
    shown = capsys.readouterr()
    # The path may be long, and what is said in sentences is only broken on a terminal.
    tables = shown.out.partition("The optimizer state")[0].splitlines()[1:]
    assert max(map(len, tables)) <= 80
    headings = ("GB/s", "GiB/s", "p99 ms", "CPU s/GB", "tokens/step", " endured\n")
    for expected in (*headings, "70B model", "RTX4090", "Config("):
        assert expected in shown.out
    assert "\x1b" not in shown.out + shown.err
    assert "not saved" in shown.err
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_several_drives_are_measured_together_at_the_end(monkeypatch, capsys, tmp_path):
    paths = [tmp_path / name for name in ("a", "[red]b")]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(bench_nvme, "same_drive", lambda paths: tuple(range(len(paths))))
    assert command(*paths, *TINY, "--json") == 0
    shown = capsys.readouterr()
    assert "[red]b" in "".join(shown.err.split())
    assert "at most 256MiB to each" in shown.err
    result = json.loads(shown.out)
    assert "through these 2 drives each second" in result["verdict"]
    assert [found["path"] for found in result["found"]] == [*map(str, paths)]
    assert [one["mode"] for one in result["together"]] == [*MODES]
    assert result["each_way"]["bytes_per_s"] >= result["together"][-1]["bytes_per_s"] / 2


def test_paths_on_one_drive_are_measured_once(monkeypatch, capsys, tmp_path):
    paths = [tmp_path / name for name in ("a", "[red]b")]
    for path in paths:
        path.mkdir()
    wanted = []
    monkeypatch.setattr(bench, "measure", lambda asked, _: wanted.append(asked) or [FOUND])
    assert command(*paths, paths[0], "--json") == 0
    shown = capsys.readouterr()
    assert [asked.paths for asked in wanted] == [(str(paths[0]),)]
    assert f"note: {paths[1]} is on the drive of {paths[0]} (" in shown.err
    assert shown.err.count("measured once, there") == 1
    result = json.loads(shown.out)
    assert "through this drive each second" in result["verdict"]
    assert f"--nvme-path {paths[0]}\n" in result["config"]
    assert f"nvme_path={str(paths[0])!r})" in result["config"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm here")
def test_memory_is_no_drive(monkeypatch, capsys):
    assert is_memory("/dev/shm")
    monkeypatch.setattr(bench_nvme_report, "FIGURE_SECONDS_MIN", 100.0)  # Not the reason to tell.
    monkeypatch.setattr(bench, "measure", lambda *_: [replace(FOUND, direct=False)])
    assert command("/dev/shm", "--json") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert "note: /dev/shm is memory and no drive" in shown.err
    assert "not saved: no drive has all three figures" in shown.err
    assert "/dev/shm is memory and no drive" in result["verdict"]
    assert (result["formats"], result["config"]) == ([], "")


@pytest.mark.parametrize("typed", ["here/bin/offload", "on_path/offload", "pytest", "__main__.py"])
def test_what_is_to_be_pasted_can_be_run(typed, monkeypatch, tmp_path):
    script = tmp_path / "on_path" / "offload"
    script.parent.mkdir()
    script.touch(0o700)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / typed)])
    line = bench_nvme_report.config(["/a b"], bench_nvme_report.Report([FOUND]), ["python"])
    expected = {"here/bin/offload": str(tmp_path / typed)}
    expected["__main__.py"] = f"{sys.executable} -m offload"
    start = f"{expected.get(typed, 'offload')} train --optimizer nvme --nvme-path '/a b'\n"
    assert line.startswith(start)


REFUSED = {
    "": "found no path",
    "/nonexistent/drive": "/nonexistent/drive: it cannot be used: No such file",
    ". --size many": "--size many: expected bytes, such as 4GiB",
    ". --size 8MiB --writes-max 4MiB": "found that 4MiB may be written (--writes-max), and to make",
    ". --blocks 1000": "--blocks 1000: expected multiples of 4 KiB",
    ". --depths 0": "--depths 0: expected numbers from 1 to 256",
    ". --seconds nan": "--seconds nan: expected 0.1 to 3600\n",
    ". --seconds 0": "--seconds 0.0: expected 0.1 to 3600, as less measures nothing\n",
    ". --size 1MiB --blocks 1MiB": "found no setting whose bytes under way fit",
    ". --gpu h1000": "--gpu h1000: expected dense bf16 TFLOP/s, or one of b200",
    ". --model big": "--model big: expected a number of parameters",
    ". --backends uring": "--backends uring: cannot be used here: there is none of that name",
    ". --compare dd": "--compare dd: it cannot be that; it takes fio\n",
    ". --siz 4GiB": "there is no option --siz (did you mean --size?)",
    ". --size 900TiB": "free; likely cause: the drive is too full, or too small; try: ",
}


@pytest.mark.parametrize(("line", "expected"), REFUSED.items())
def test_what_cannot_be_is_refused_in_one_message(line, expected, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    assert command(*line.split()) == EXIT_BAD_INPUT
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.startswith("offload: error: ")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_without_fio_a_comparison_is_refused_with_the_remedy(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command(tmp_path, "--compare", "fio") == EXIT_BAD_INPUT
    assert "try: apt install fio" in capsys.readouterr().err


@needs_fio
def test_fio_runs_beside_in_the_same_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "COMPARE_ROUNDS", 1)
    monkeypatch.setattr(bench, "COMPARE_SECONDS", 0.1)
    assert command(tmp_path, *TINY, "--no-save", "--compare", "fio") == 0
    told = capsys.readouterr().out
    assert "beside fio, in turns" in told
    assert any(engine in told for engine in fio.ENGINES.values())
    assert os.listdir(tmp_path) == []


@needs_fio
def test_what_may_be_written_lasts_for_all_rounds_beside_fio(tmp_path):
    setting = Setting("python", 64 << 10, 4)
    with load(str(tmp_path), written_bytes_max=18 << 20) as made:
        for sample in made.fill():
            assert sample.bytes
        (one,) = fio.compare(made, [("write", setting, setting)], rounds=2, seconds=5.0)
        assert len(one.ratios) == 2
        assert made.written_bytes_max - (1 << 20) <= made.bytes_written <= made.written_bytes_max


@needs_fio
def test_what_fio_refuses_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(fio.ENGINES, "python", "nonesuch")
    with load(str(tmp_path)) as made, pytest.raises(RuntimeError, match="asked fio for read by"):
        fio.run_fio(made, "read", Setting("python", 64 << 10, 1), 0.01)


def test_an_fio_that_hangs_or_moves_nothing_is_told(monkeypatch, tmp_path):
    script = tmp_path / "fio"
    monkeypatch.setattr(fio, "installed", lambda: str(script))
    monkeypatch.setattr(fio, "TIMEOUT_S", 0.2)
    ways = {way: {"io_bytes": 0, "runtime": 0} for way in ("read", "write")}
    answer = {"jobs": [{"error": 0, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 1} | ways]}
    with load(str(tmp_path)) as made:
        for body, told in (
            ("exec sleep 60", "not ended after 0.2"),
            (f"echo '{json.dumps(answer)}'", "no transfer ended"),
        ):
            script.write_text(f"#!/bin/sh\n{body}\n")
            script.chmod(0o700)
            with pytest.raises(RuntimeError, match=told):
                fio.run_fio(made, "read", Setting("python", 64 << 10, 1), 0.0)


def test_ctrl_c_is_one_line_and_leaves_nothing(monkeypatch, capsys, tmp_path):
    inner = Load.run

    def stopped(self, mode, setting, seconds):
        if mode == "write":
            signal.raise_signal(signal.SIGINT)
        return inner(self, mode, setting, seconds)

    monkeypatch.setattr(Load, "run", stopped)
    assert command(tmp_path, *TINY) == 130
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("offload: stopped by Ctrl-C while measuring writing in ")
    assert told[-1].endswith("; 0 of 1 drives measured; the file is gone, nothing is left on disk")
    assert os.listdir(tmp_path) == []


def test_ctrl_c_before_the_first_note_says_that_nothing_was_done(monkeypatch, capsys):
    monkeypatch.setattr(bench_nvme.FLAGS.__class__, "parse", lambda *_: signal.raise_signal(2))
    assert command(".") == 130
    told = "offload: stopped by Ctrl-C before anything was measured; nothing was written\n"
    assert capsys.readouterr().err == told


def test_heat_maps_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    assert command(tmp_path, *TINY, "--plot", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert command(tmp_path, "--plot", tmp_path / "map.pgn") == EXIT_BAD_INPUT
    assert "no kind of picture" in capsys.readouterr().err


def test_a_map_is_drawn_of_the_backend_that_was_chosen(tmp_path):
    """It may have been tried in few settings, with a block size that no other was tried with."""
    drawing = pytest.importorskip("offload.cli.bench_nvme_plot")
    tried = [Setting("io_uring", block << 10, 4) for block in (64, 128)]
    chosen = Setting("threads", 256 << 10, 8)
    cells = tuple(Cell("read", setting, 1e9, 1) for setting in (*tried, chosen))
    counted = Sample(1.0, 1 << 30, 0, 0.1, (4096,))
    found = Found(
        path="/a", file_bytes=1 << 30, file_system="ext4", direct=True, notice=None,
        fill_bytes_per_s=1e9, bytes_written=1 << 30, cells=cells,
        figures=(Figure.of("read", chosen, [counted]),),
    )  # fmt: skip
    drawing.draw([found], str(tmp_path / "map.svg"))
    assert "read, threads, /a" in (tmp_path / "map.svg").read_text("utf-8")


def test_without_matplotlib_a_map_is_refused_with_the_remedy(monkeypatch, capsys, tmp_path):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "offload.cli.bench_nvme_plot", raising=False)
    monkeypatch.delattr(offload.cli, "bench_nvme_plot", raising=False)
    assert command(tmp_path, "--plot", "map.png") == EXIT_BAD_INPUT
    assert "-m pip install 'offload-engine[plot]'" in capsys.readouterr().err


def test_what_was_measured_too_briefly_is_not_saved(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_nvme_report, "FIGURE_SECONDS_MIN", 10.0)
    assert command(tmp_path, *TINY, "--json") == 0
    shown, told = capsys.readouterr(), r"(read|writ)ing.* in .* was measured for \d.* s only, too "
    assert re.search(f"not saved: {told}", shown.err)
    assert re.search(f"But {told}.*; try: more --seconds", json.loads(shown.out)["verdict"])
    assert not (tmp_path / "machine.json").exists()


def test_what_was_kept_and_is_no_speed_is_left_and_told(monkeypatch, capsys, tmp_path):
    kept = tmp_path / "machine.json"
    kept.write_text("my notes")
    monkeypatch.setattr(bench, "measure", lambda *_: [FOUND])
    assert command(tmp_path) == 0
    told = capsys.readouterr().err
    assert f"note: asked {kept} for the measured speeds of drives; found none that can be" in told
    assert f"could not be saved to {kept}: it holds something else; likely it was cut" in told
    assert kept.read_text() == "my notes"


def test_speeds_that_cannot_be_saved_are_a_note(monkeypatch, capsys, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("OFFLOAD_MACHINE", str(file / "machine.json"))
    found = [(str(tmp_path), bench_nvme_speed())]
    monkeypatch.setattr(bench_nvme_saved, "_speeds", lambda *_: found)
    assert command(tmp_path, *TINY) == 0
    assert "note: the speeds could not be saved to" in capsys.readouterr().err


def bench_nvme_speed():
    return DriveSpeed(
        read_bytes_per_s=1.0, write_bytes_per_s=1.0, both_bytes_per_s=1.0, backend="python",
        block_bytes=4096, depth=1, measured="now",
    )  # fmt: skip


def load(directory="/simulated", io=None, written_bytes_max=1 << 30):
    limits = {"block_bytes_max": 128 << 10}
    limits |= {"under_way_bytes_max": 2 << 20, "written_bytes_max": written_bytes_max}
    return Load(directory, 2 << 20, "python", io=io, **limits)


def test_load_on_a_simulated_drive_finds_its_speed():
    """The same seam as a real one: preadv and pwritev."""
    read, write = Direction(bytes_per_s=8e6, latency_s=6e-3), Direction(bytes_per_s=4e6)
    io = DriveIO(Drive(read=read, write=write))
    with load(io=io) as made:
        assert sum(sample.bytes for sample in made.fill()) == made.bytes_written == 2 << 20
        for mode, depth, rate in (("read", 1, 8e6), ("read", 4, 8e6), ("write", 2, 4e6)):
            setting = Setting("python", 64 << 10, depth)
            # A processor that is busy elsewhere makes it slower; nothing makes it faster.
            tries = (made.run(mode, setting, 0.1).bytes_per_s for _ in range(20))
            assert any(one == pytest.approx(rate, rel=0.3) for one in tries)
        sample = made.run("both", Setting("python", 64 << 10, 2), 0.1)
        assert sample.bytes_read == sample.bytes_written > 0
        assert sum(sample.latencies) > 0


def test_a_limit_of_writes_holds_and_is_told():
    io = DriveIO(Drive(read=Direction(bytes_per_s=1e9), write=Direction(bytes_per_s=1e9)))
    (found,) = bench.measure(wanted(written_bytes_max=4 << 20, io=io))
    assert found.bytes_written <= 4 << 20
    (found,) = bench.measure(wanted(written_bytes_max=2 << 20, io=io))
    assert found.bytes_written == 2 << 20
    assert [mode for mode, _ in found.left_out] == ["write", "both"]
    assert [figure.mode for figure in found.figures] == ["read"]
    assert bench_nvme_report.Report([found]).each_way().bytes_per_s > 0
    with load(io=io, written_bytes_max=1 << 20) as made, pytest.raises(Spent):
        made.run("write", Setting("python", 128 << 10, 16), 0.1)


def test_a_backend_that_is_preferred_need_not_be_the_fastest(monkeypatch):
    """But nearly."""
    speeds = {"io_uring": 0.98e9, "threads": 1e9, "libaio": 0.5e9}
    asked = wanted(backends=tuple(speeds), seconds=0.01)

    class Fast:
        def run(self, mode, setting, seconds):
            return Sample(1.0, int(speeds[setting.backend]), 0, 0.1, (1,))

    path = bench._Path(asked, "/", Fast(), lambda share, what: None)
    for fastest, chosen in ((1e9, "io_uring"), (2e9, "threads")):
        speeds["threads"] = fastest
        assert path._search("read", 0.05, 0.0, 1.0).backend == chosen


def test_a_load_is_driven_by_one_thread_at_a_time():
    """Also where another drive may write no more: its mode is left out, the next one waits."""

    class Fake:
        def __init__(self, spent):
            self.spent, self.running, self.seen = spent, 0, []

        def allow(self, share):
            pass

        def run(self, mode, setting, seconds):
            self.running += 1
            self.seen.append(self.running)
            if mode == "write" and self.spent:
                self.running -= 1
                raise Spent
            time.sleep(0.05)
            self.running -= 1
            return Sample(1.0, 1, 1, 0.1, (1,))

    loads = [Fake(True), Fake(False)]
    finds = [found(read=1e9, write=1e9, both=1e9)] * 2
    together = list(bench._together(loads, finds, lambda share, what: None))
    assert [one.mode for one in together] == ["read", "both"]
    assert [load.seen for load in loads] == [[1, 1, 1]] * 2


def test_the_file_has_no_name_and_is_its_owners(tmp_path):
    with load(str(tmp_path)) as made:
        assert os.listdir(tmp_path) == []
        found = os.stat(made.fio_path)
        assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (0, 0o600)
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path / "missing"))


def test_a_failing_drive_is_an_error_with_nothing_left():
    io = aio.SimulatedIO(0, errors={40: 5})
    with pytest.raises(OSError, match="bytes at offset"):
        list(bench.measure(wanted(io=io)))
    assert not io.inner.files


def test_ratios_have_an_interval():
    found = Ratio.of([0.9, 1.0, 1.1, 1.0])
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(0.9975, abs=1e-3)
    # By hand: t(3) = 3.182, standard deviation of the logarithms 0.0819.
    assert found.high / found.mean == pytest.approx(1.139, abs=2e-3)
    assert Ratio.of([2.0]).low == 0.0
    assert quantile((0, 0, 4), 0.5) == pytest.approx(2**2.5 * 1e-6)
    assert quantile((), 0.5) == 0.0


def test_the_verdict_is_arithmetic():
    verdict = Verdict(
        parameters=1e9, model="1B", gpu="G", gpu_flops=1e15, endurance_bytes=1e14,
        each_way=EachWay(1e9, True),
    )  # fmt: skip
    exact = verdict.formats[0]
    assert (exact.name, exact.bytes_per_parameter) == ("exact", 10)
    assert exact.parameters_per_s == 1e8
    assert exact.step_seconds == 10
    assert exact.tokens_per_step == pytest.approx(10 * 0.4e15 / 6e9)
    assert (exact.written_bytes_per_step, exact.steps_endured) == (1e10, 1e4)


def found(**rates):
    samples = {mode: Sample(1.0, int(rate), 0, 0.1, (1,)) for mode, rate in rates.items()}
    figures = [Figure.of(m, Setting("python", 4096, 1), [s]) for m, s in samples.items()]
    return Found(
        path="/", file_bytes=1, file_system="ext4", direct=True, notice=None,
        fill_bytes_per_s=1e9, bytes_written=0, cells=(), figures=tuple(figures),
    )  # fmt: skip


FOUND = found(read=1e9, write=1e9, both=1e9)


def test_each_way_is_at_once_or_in_turns():
    def of(*finds, **together):
        report = bench_nvme_report.Report([*finds])
        for mode, rate in together.items():
            report.add(bench.Together(mode=mode, bytes_per_s=rate, of_sum=1.0))
        return report.each_way()

    slow, fast = found(read=4e9, write=4e9, both=3e9), found(read=4e9, write=4e9, both=6e9)
    assert of(slow) == EachWay(pytest.approx(2e9), False)
    assert of(fast) == EachWay(pytest.approx(3e9), True)
    assert of(found(read=1e9)) == EachWay(pytest.approx(5e8), False)  # by its first write
    assert of(slow, fast) == EachWay(pytest.approx(4.5e9), True)
    assert of(slow, found(read=4e9)) == EachWay(pytest.approx(1 / (1 / 8e9 + 1 / 5e9)), False)
    assert of(fast, fast, read=5e9, write=5e9, both=4e9) == EachWay(pytest.approx(2.5e9), False)
