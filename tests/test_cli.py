"""The command line: its surface, where settings come from, what is refused, what is shown."""

import io
import itertools
import json
import math
import os
import re
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from offload.cli import EXIT_BAD_INPUT, BadInput, console, data, in_flags, options, train
from offload.cli.flags import flag
from offload.config import Config
from tests.command import SHORT, run

# fmt: off
FLAGS = [
    "--size", "--data", "--steps", "--batch", "--seq-len", "--lr", "--warmup",
    "--weight-decay", "--dtype", "--recompute", "--no-recompute",
    "--seed", "--eval-windows", "--sample", "--deepspeed", "--json", "--no-json",
    "--params", "--gradients", "--optimizer", "--nvme-path",
    "--device-memory", "--cpu-memory", "--nvme-space", "--states", "--gradient-dtype",
    "--max-grad-norm", "--micro-batches", "--exposed-memory",
    "--shard", "--reduce", "--wire", "--comm-timeout",
    "--durable", "--commit-every", "--resume", "--no-resume",
]
# fmt: on


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_the_surface_grows_on_purpose_only(capsys):
    assert run("train", "--help") == 0
    shown = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", capsys.readouterr().out)
    assert [one for one in dict.fromkeys(shown) if one != "--help"] == FLAGS


def test_every_setting_of_the_engine_is_a_flag():
    assert {flag(name) for name in Config.__slots__} <= set(FLAGS)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_alone_it_says_what_there_is(arguments, capsys):
    assert run(*arguments) == 0
    assert "train a small GPT" in capsys.readouterr().out


def test_version(capsys):
    assert run("--version") == 0
    assert re.fullmatch(r"offload \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_of_two_equal_flags_the_last_one_counts():
    typed = ["--steps=9", "--seq_len", "64", "--cpu-memory", "2GiB", "--steps", "7"]
    found = options.parse([*typed, "--nvme-path", "/a", "/b"])
    assert (found.steps, found.seq_len, found.batch) == (7, 64, options.Train().batch)
    assert found.placing.cpu_memory == 2 * 2**30
    assert found.placing.nvme_path == ("/a", "/b")


def test_a_size_is_as_good_in_capitals():
    assert options.parse(["--size", "7B"]).size == options.parse(["--size=7B"]).size == "7b"


def test_nvme_without_a_path_means_the_working_directory():
    assert options.parse(["--optimizer", "nvme"]).placing.nvme_path == (".",)
    assert options.parse(["--optimizer", "cpu"]).placing.nvme_path == ()


TEXT = data.Corpus("a text", np.zeros(5), np.zeros(5))


def test_a_run_goes_on_with_the_flags_that_it_began_with():
    """More steps are fine, and told."""
    engine = SimpleNamespace(resumed=None)
    assert not list(train._go_on(options.Train(lr=0.5), TEXT, engine))
    engine.resumed = 3, engine.user_state()
    assert not list(train._go_on(options.Train(lr=0.5), TEXT, engine))
    with warnings.catch_warnings():
        (told,) = train._go_on(options.Train(lr=0.5, steps=9), TEXT, engine)
    assert "--steps was 120" in told
    with pytest.raises(BadInput, match=r"--lr 0.25: run has a run with 0.5"):
        list(train._go_on(options.parse(["--lr=0.25", "--durable", "run"]), TEXT, engine))
    with pytest.raises(BadInput, match=r"--max-grad-norm 1.0: run has a run with None"):
        asked = ["--lr=0.5", "--max-grad-norm=1", "--durable=run"]
        list(train._go_on(options.parse(asked), TEXT, engine))
    with pytest.raises(BadInput, match="--data 4 bytes: None has a run with 5 bytes"):
        list(train._go_on(options.Train(lr=0.5), replace(TEXT, training=np.zeros(4)), engine))


REFUSED_FLAGS = {
    "trian": "did you mean train?",
    "train --step 3": "--steps",
    "train --nvme-pth /tmp": "--nvme-path",
    "train --params disk": "disk: there is no such choice; it takes auto, device, cpu, nvme",
    "train --resume": "--resume is of a durable run: give its directory, --durable DIR",
    "train --commit-every 4": "--commit-every 4 is of a durable run, and none is asked for",
    "train --size 11m": "--size 11m: there is no such choice (did you mean 10m?); it takes 10m,",
    "train --sample=-1": "--sample -1: expected 0 or more",
    "train --lr nan": "error: --lr nan: expected 0 or more",
    "convert a b": "error: a: No such file",
    "convert": "error: offload convert needs SRC and DST; see offload convert --help",
    "plan --model": "error: offload plan needs a value of --model; see",
    "train --seed=-1": "--seed -1: expected 0 or more, at most",
    "train --steps 0": "--steps 0: expected 1 or more",
    "train --seq-len=-4": "--seq-len -4: expected 1 or more",
    "train --seed 18446744073709551616": "expected 0 or more, at most 2**64 - 1",
    "train --lr fast": "--lr fast: expected a number\n",
    "train --max-grad-norm nan": "--max-grad-norm nan: expected a positive number, finite",
    "train --micro-batches 0": "--micro-batches 0: expected a whole number from 1",
    "train --recompute false": "false belongs to no option",
    "train --data=": "--data : expected the path",
    "train --cpu-memory 8apples": "'8apples' is not a size",
    "train --nvme-path a b a": "--nvme-path ['a', 'b', 'a']: a directory is named twice",
    "train --nvme-path": "--nvme-path: expected the path of a directory",
    "train --nvme-path /nowhere": "error: --nvme-path /nowhere cannot be used: No such file",
    "train --nvme-path /dev/null": "Not a directory; give an existing directory",
    "train --nvme-path /proc": "not a disk",
    "train --data /nowhere": "--data /nowhere: there is no such file or folder",
    "train --data /dev/null": "neither a regular file nor a folder",
}


@pytest.mark.parametrize(("line", "expected"), REFUSED_FLAGS.items())
def test_what_cannot_be_is_refused_in_one_message(line, expected, capsys):
    assert run(*line.split()) == EXIT_BAD_INPUT
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.splitlines()[-1].startswith("offload: error: ")
    assert shown.err.count("offload: error: ") == 1
    assert not shown.out


def test_a_failure_is_one_message_with_its_causes(monkeypatch, capsys):
    def fail(arguments):
        raise RuntimeError("the disk lane failed") from OSError(5, "Input/output error", "/a")

    monkeypatch.setattr(train, "command", fail)
    assert run("train") == 1
    shown = capsys.readouterr().err
    assert "offload: error: RuntimeError: the disk lane failed" in shown
    assert "caused by OSError: [Errno 5] Input/output error: '/a'" in shown
    assert "Traceback" not in shown
    monkeypatch.setenv("OFFLOAD_TRACEBACK", "1")
    assert run("train") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [MemoryError("too much"), RuntimeError("DefaultCPUAllocator: can't allocate")]
)
def test_memory_that_runs_out_names_what_to_lower(monkeypatch, capsys, error):
    def step(*_):
        raise error

    monkeypatch.setattr(train, "train_step", step)
    assert run(*SHORT, "--json") == 1
    assert "MemoryError: no memory is left in step 1: lower --batch" in capsys.readouterr().err


def test_the_learning_rate_rises_then_falls():
    found = options.Train(steps=100, warmup=10)
    rates = [train.rate(found, step) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == rates[9] == 1
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert rates[99] == train.rate(found, 100) == pytest.approx(train.LR_FLOOR)
    for warmup in (0, 1):
        short = [train.rate(options.Train(steps=5, warmup=warmup), step) for step in range(5)]
        assert (short[0], short[4]) == (1, pytest.approx(train.LR_FLOOR))
        assert short.count(1) == 1
    peaks = [train.peak_lr(one) for one in (found, options.Train(size="7b"), options.Train(lr=1))]
    assert peaks == [2e-3, pytest.approx(1.9e-4, rel=0.02), 1]


def test_json_is_one_object_per_step_and_nothing_else(capsys):
    assert run(*SHORT, "--json", "--max-grad-norm", "1", "--micro-batches", "2") == 0
    shown = capsys.readouterr()
    *steps, summary = [json.loads(line) for line in shown.out.splitlines()]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["kind"] == "step"
        assert 0 < record["loss"] < 10
        assert record["tokens_per_s"] == pytest.approx(2 * 2 * 32 / record["step_s"])
        assert record["lr"] > 0
        assert record["grad_norm"] > 0
    assert (summary["kind"], summary["steps"], summary["stopped_by"]) == ("summary", 3, None)
    assert summary["held_out_bytes"] == 4 * 32
    assert math.isfinite(summary["held_out_loss"])
    assert set(summary["tiers"]) == {"device", "cpu", "nvme"}
    assert summary["lanes"]["compute"]["busy_s"] > 0
    assert summary["peak_rss_bytes"] > 10 << 20
    for tier in summary["tiers"].values():
        assert tier["peak_bytes"] <= tier["budget_bytes"]
    assert "What lives where" in shown.err
    assert "step 3/3" in shown.err


def test_a_bar_on_the_terminal_leaves_standard_output_alone(monkeypatch):
    """`offload train --json > file`, started from a terminal."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    terminal = console.Output(file=io.StringIO(), force_terminal=True)
    with console.Progress(terminal):
        sys.stdout.write("a record\n")
    assert sys.stdout.getvalue() == "a record\n"


def test_for_people_there_are_tables_and_a_loss(capsys, tmp_path):
    assert run(*SHORT, "--optimizer", "nvme", "--nvme-path", str(tmp_path)) == 0
    shown = capsys.readouterr()
    for expected in ("What lives where", "Lanes", "peak memory", "held-out loss", "budget"):
        assert expected in shown.out
    assert "activations and Python included" in shown.out
    assert "exposed: training had to wait for it" in shown.out
    assert ("device (CPU)" in shown.out) == (not torch.cuda.is_available())
    assert "everything fits on the device" not in shown.out
    assert "tokens/s" in shown.err
    assert "evaluating 1/" in shown.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
@pytest.mark.filterwarnings("error:the scratch file in")
def test_a_path_in_memory_is_one_note(capsys):
    placed = ("--optimizer", "nvme", "--nvme-path", "/dev/shm")
    assert run(*SHORT, "--json", "--steps", "1", *placed) == 0
    told = capsys.readouterr().err
    assert told.count("/dev/shm is on tmpfs, which is memory and not a disk") == 1
    assert "note: the scratch file in /dev/shm" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU that computes")
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cpu_that_is_slow_in_bfloat16_is_a_note(capsys, monkeypatch, dtype, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert run(*SHORT, "--steps", "1", "--dtype", dtype) == 0
    told = "note: this CPU is slow in bfloat16: --dtype float32" in capsys.readouterr().out
    assert told == (capability == "AVX2" and dtype == "bfloat16")


def test_where_nothing_moves_a_hint_says_how_it_would(capsys):
    assert run(*SHORT, "--device-memory", "1GiB", "--steps", "1") == 0
    shown = capsys.readouterr().out
    assert "everything fits on the device; to see it move, try\n--params cpu" in shown
    assert not re.search("disk_read|disk_write", shown)


def test_a_loss_that_is_no_number_ends_the_run(monkeypatch, capsys):
    step = train.train_step
    monkeypatch.setattr(train, "train_step", lambda *settings: step(*settings) * math.nan)
    assert run(*SHORT, "--json") == 1
    shown = capsys.readouterr()
    assert "training has diverged" in shown.err
    assert not shown.out


def test_a_held_out_loss_that_is_no_number_is_no_result(monkeypatch, capsys):
    monkeypatch.setattr(train, "evaluate", lambda *_: (math.nan, 32))
    assert run(*SHORT, "--json") == 1
    shown = capsys.readouterr()
    assert "the held-out loss is nan after the last step: training has diverged" in shown.err
    assert "NaN" not in shown.out


def test_what_people_read_fits_eighty_columns(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    for placed in (("--optimizer", "nvme", "--nvme-path", str(tmp_path)), ()):
        assert run(*SHORT, "--device-memory", "1GiB", *placed) == 0
        assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.slow
def test_without_a_flag_it_learns(capsys):
    assert run("train", "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["held_out_loss"] < 2.4
    assert summary["held_out_bytes"] >= 10_000


def test_nothing_is_built_where_the_data_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "build", lambda _: pytest.fail("built"))
    (tmp_path / "few").write_bytes(b"few")
    assert run("train", "--data", str(tmp_path / "few")) == EXIT_BAD_INPUT
    assert data.HELD_OUT_SHARE < 0.5


def test_on_a_terminal_sentences_are_broken_between_words():
    for terminal, lines in ((True, 3), (False, 1)):
        out = io.StringIO()
        shown = console.Output(file=out, force_terminal=terminal, width=40, color_system=None)
        shown.sentence("words " * 16)
        assert len(out.getvalue().splitlines()) == lines
        assert out.getvalue().split() == ["words"] * 16


def test_a_refused_budget_is_told_in_flags_that_do(capsys):
    arguments = [*SHORT, "--optimizer", "cpu", "--cpu-memory", "1MiB"]
    assert run(*arguments) == EXIT_BAD_INPUT
    out, told = capsys.readouterr()
    assert not out
    assert "Config" not in told
    assert re.search(r"^cpu .* --cpu-memory  <-- too small$", told, re.M)
    _, ways = told.split("try one of these")
    way = re.findall(r"^  --cpu-memory (\S+)$", ways, re.M)
    assert run(*arguments[:-1], *way, "--steps", "1") == 0


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("Config.steps=2 declares", "--steps 2 declares"),
        ("x: Config.optimizer='cpu', yours", "x: --optimizer cpu, yours"),
        ("leave Config.micro_batches out; Config.", "leave --micro-batches out; Config."),
        (
            '  Config(params="auto", cpu_memory="2GiB"), then',
            "  --params auto --cpu-memory 2GiB, then",
        ),
        ("with Config(max_grad_norm=...) and", "with --max-grad-norm ... and"),
        ("Config.from_deepspeed(path) of a Config", "Config.from_deepspeed(path) of a Config"),
    ],
)
def test_fields_of_config_are_flags_on_the_command_line(told, shown):
    assert in_flags(told) == shown


def test_help_shows_what_a_number_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert run("train", "--help") == 0
    told = capsys.readouterr().out
    assert "half of what device_memory leaves" in told
    assert "are read as flags; flags win over it." in told  # A line of the docstring ends at "as".
    assert "--micro-batches INT" in told
    assert "--max-grad-norm FLOAT" in told
    assert "{None}" not in told
    assert run("convert", "--help") == 0
    assert "[--dtype {bfloat16,float32}]" in capsys.readouterr().out
