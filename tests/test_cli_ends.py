"""How the command line ends before its time: signals, readers that leave, a full disk."""

import json
import os
import re
import signal
import sys
import threading
from functools import partial

import pytest

import offload
from offload import reporting
from offload.cli import Signals, Stopped, bench_nvme, train
from offload.program.ops import Lane
from tests.command import SHORT, run
from tests.forked import Forked


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_ends_the_run_quietly(monkeypatch, capsys, number, name):
    def wait(arguments):
        with Signals() as signals:
            signals.where = "after step 2 of 3"
            signal.raise_signal(number)

    monkeypatch.setattr(train, "command", wait)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run("train") == 128 + number
    assert capsys.readouterr().err == f"offload: stopped by {name} after step 2 of 3\n"
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_held_step_is_finished_first_but_a_second_signal_does_not_wait():
    done = []
    with Signals() as signals, pytest.raises(Stopped), signals.hold():
        signal.raise_signal(signal.SIGINT)
        done.append("finished")
    with Signals() as signals, pytest.raises(Stopped), signals.hold():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        done.append("not reached")
    assert done == ["finished"]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_in_the_middle_leaves_nothing(tmp_path, number):
    arguments = [*SHORT, "--json", "--steps", "10000", "--optimizer", "nvme"]
    process = Forked(lambda: run(*arguments, "--nvme-path", str(tmp_path)))
    assert json.loads(process.stdout.readline())["step"] == 1
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    told = re.search(r"offload: stopped by (\S+) after step (\d+) of 10000", errors)
    assert not list(tmp_path.iterdir())
    *steps, summary = [json.loads(line) for line in output.splitlines()]
    numbers = [record["step"] for record in steps]
    assert numbers == list(range(2, summary["steps"] + 1))
    assert (summary["stopped_by"], str(summary["steps"])) == told.groups()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_run_stopped_in_a_step_ends_with_what_it_has_reached(monkeypatch, capsys, options):
    step = train.train_step

    def pressed(*arguments):
        if arguments[-1] == 2:
            signal.raise_signal(signal.SIGINT)
        return step(*arguments)

    monkeypatch.setattr(train, "train_step", pressed)
    assert run(*SHORT, *options) == 128 + signal.SIGINT
    shown = capsys.readouterr()
    assert shown.err.endswith("offload: stopped by Ctrl-C after step 2 of 3\n")
    assert "peak memory" in shown.err + shown.out
    assert "held-out loss" not in shown.err + shown.out
    assert options or re.search(r"^loss \d\.\d{4} nats per byte in step 2$", shown.out, re.M)
    if options:
        *steps, summary = [json.loads(line) for line in shown.out.splitlines()]
        assert [record["step"] for record in steps] == [1, 2]
        assert (summary["kind"], summary["steps"]) == ("summary", 2)
        assert (summary["stopped_by"], summary["held_out_loss"]) == ("Ctrl-C", None)


def test_a_run_stopped_while_it_is_judged_has_made_its_steps(monkeypatch, capsys):
    monkeypatch.setattr(train, "evaluate", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert run(*SHORT, "--json") == 128 + signal.SIGTERM
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["steps"], summary["stopped_by"]) == (3, "SIGTERM")


def test_a_reader_that_leaves_is_no_error(monkeypatch, capsys):
    reading, writing = os.pipe()

    def read_one_line():
        with open(reading) as lines:
            assert json.loads(lines.readline())["step"] == 1

    reader = threading.Thread(target=read_one_line)
    reader.start()
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert run(*SHORT, "--json", "--steps", "10000") == 128 + signal.SIGPIPE
    reader.join()
    assert "Error" not in capsys.readouterr().err


def test_a_run_whose_output_cannot_be_written(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(*SHORT, "--json") == 1
    errors = capsys.readouterr().err
    assert "offload: error: OSError: [Errno 28] No space left on device" in errors
    assert "Traceback" not in errors


def test_a_run_that_fails_tells_how_far_it_came(monkeypatch, capsys, tmp_path):
    step = train.train_step
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def failing(*arguments):
        if arguments[-1] == 3:
            raise OSError(28, "No space left on device", "/mnt/drive")
        return step(*arguments)

    monkeypatch.setattr(train, "train_step", failing)
    options = ("--optimizer", "cpu")
    assert run(*SHORT, *options, "--json") == 1
    shown = capsys.readouterr()
    *steps, summary = [json.loads(line) for line in shown.out.splitlines()]
    assert [record["step"] for record in steps] == [1, 2]
    assert (summary["steps"], summary["stopped_by"]) == (2, "OSError")
    assert "offload: error: OSError: [Errno 28] No space left on device: '/mnt/drive'" in shown.err
    trace = reporting.last()
    assert len(json.loads(trace.read_text())["stepped"]) == 2
    monkeypatch.setattr(train, "_conclude", lambda *_: 1 / 0)
    assert run(*SHORT, *options) == 1
    assert "offload: error: OSError: [Errno 28]" in capsys.readouterr().err


def test_ctrl_c_twice_within_the_engine_ends_a_run_as_once(monkeypatch, capsys):
    step = train.train_step

    def pressed(*arguments):
        if arguments[-1] == 2:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(train, "train_step", pressed)
    assert run(*SHORT, "--json") == 128 + signal.SIGINT
    shown = capsys.readouterr()
    summary = json.loads(shown.out.splitlines()[-1])
    assert (summary["steps"], summary["stopped_by"]) == (1, "Ctrl-C")
    assert shown.err.endswith("offload: stopped by Ctrl-C after step 1 of 3\n")


def test_what_a_stopped_run_tells_has_the_updates_of_its_last_step(monkeypatch, capsys):
    """On a slow lane they are under way when it is stopped. Who presses twice does not wait."""
    attach, step = offload.attach, train.train_step
    slow = partial(attach, pace=lambda op, since: since + 0.02 * (op.lane is Lane.CPU))

    def pressed(presses, *arguments):
        loss = step(*arguments)
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return loss

    monkeypatch.setattr(offload, "attach", slow)
    updates = {}
    for presses in (0, 1, 2):
        monkeypatch.setattr(train, "train_step", partial(pressed, presses))
        run(*SHORT, "--steps", "1", "--optimizer", "cpu", "--json")
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        updates[presses] = summary["lanes"]["cpu"]["operations"]
    assert updates[0] == updates[1] > updates[2]


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.slow)])
def test_a_name_that_the_output_cannot_encode_loses_no_figures(tmp_path, encoding, monkeypatch):
    """A folder whose name is not UTF-8, as old archives leave them."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9\xc3\xa9"
    os.mkdir(folder)
    arguments = ["bench", "nvme", "--size", "2MiB", "--seconds", "0.1", "--no-save"]
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(bench_nvme, "SECONDS_MIN", 0.1)
    monkeypatch.setattr(bench_nvme, "is_memory", lambda path: False)  # /tmp may be.
    process = Forked(lambda: run(*arguments, os.fsdecode(folder)), encoding=encoding)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    shown = "caf\\udce9" + ("\\xe9" if encoding == "ascii" else "\u00e9")
    assert f"{shown}(" in "".join(output.split())  # Long names are broken before what they are.
    assert f"measuring reading in {tmp_path}/{shown}" in errors
