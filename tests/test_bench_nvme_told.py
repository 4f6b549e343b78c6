"""What `offload bench nvme` says of drives that are made up: doubts, what is kept, the verdict."""

import json
import re
import weakref
from dataclasses import replace

import pytest

import offload
from aio import backends, bench, load
from cpu_adam.formats import FORMATS, format_for
from offload.cli import EXIT_BAD_INPUT, bench_nvme, bench_nvme_report, measuring
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
    assert "of a 7B model takes 70 GB; 66.7 GB are free: it does not fit, with " in shown
    assert "it does not fit, with states='compact' it would. All this is of the drive" in shown
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
    shown = flat(told().out)
    assert "it does not fit. All this is of the drive alone: whether weights, " in shown
    assert "fit the memory of the GPU and of this machine was not looked at." in shown


def test_drives_that_write_faster_than_they_read_are_doubted(told):
    doubt = "writing was 3.4 times as fast as reading: likely a cache took the bytes"
    assert doubt in flat(told(found=found(read=1.5e9, write=5.1e9, both=2e9)).out)
    assert "a cache" not in flat(told(found=found(read=1.5e9, write=2e9, both=2e9)).out)


def test_doubts_of_the_cache_and_of_the_time_do_not_advise_against_each_other(told, monkeypatch):
    monkeypatch.setattr(bench_nvme_report, "FIGURE_SECONDS_MIN", 10.0)
    shown = flat(told(found=found(read=1.5e9, write=5.1e9, both=2e9)).out)
    assert "a larger --size and more --seconds tell." in shown
    assert "too little to plan by; try: more --seconds." in shown
    shown = flat(told(found=found(read=1.5e9, write=2e9, both=2e9)).out)
    assert "try: more --seconds, or a smaller --size" in shown


SPELT = {
    "rtx3060": ("RTX3060", 25), "RTX 3070": ("RTX3070", 41), "rtx-4060": ("RTX4060", 30),
    "NVIDIA GeForce RTX 4070": ("RTX4070", 58), "4080": ("RTX4080", 97), "Tesla T4": ("T4", 65),
    "NVIDIA A10": ("A10", 125), "l4": ("L4", 121), "NVIDIA RTX A6000": ("A6000", 155),
    "38.5": ("a GPU of 38.5 TFLOP/s", 38.5), "40 TFLOPS": ("a GPU of 40 TFLOP/s", 40),
}  # fmt: skip


@pytest.mark.parametrize(("typed", "expected"), SPELT.items())
def test_a_gpu_may_be_spelt_as_people_spell_it(told, typed, expected):
    name, tflops = expected
    shown = told("--gpu", typed, "--json").out
    result = json.loads(shown)
    assert f"{name} (--gpu) is what bounds it" in result["verdict"]
    one = result["formats"][0]
    tokens = one["step_seconds"] * tflops * 1e12 * 0.4 / (6 * 7e9)
    assert one["tokens_per_step"] == pytest.approx(tokens)


@pytest.mark.parametrize("typed", ["", "0", "nan", "-40", "4e13", "7B", "9999999", "rtx", "big"])
def test_what_is_no_gpu_is_refused_before_anything_is_measured(typed, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(measuring, "others_percent", lambda: pytest.fail("measured"))
    assert run("bench", "nvme", ".", f"--gpu={typed}") == EXIT_BAD_INPUT
    assert f"--gpu {typed}: expected dense bf16 TFLOP/s, or one of " in capsys.readouterr().err


def test_a_gpu_that_is_nearly_one_is_guessed(capsys):
    assert run("bench", "nvme", ".", "--gpu", "rtx 3070 ti") == EXIT_BAD_INPUT
    assert "rtx3060 (did you mean rtx3070?)" in capsys.readouterr().err


def test_states_are_told_as_a_user_asks_for_them(told):
    """The names of the rows of formats are not all values of Config."""
    labels = {}
    for one in json.loads(told("--json").out)["formats"]:
        row = FORMATS[one["name"]]
        assert offload.Config(states=one["states"])
        assert format_for(one["weights"], one["states"], one["rule"]) is row
        dtype = {"bfloat16": "bf16", "float32": "fp32"}[row.weight_dtype]
        labels[row.name] = " ".join([row.serves[0], dtype, *[row.rule] * (row.rule != "adam")])
    assert labels["compact"] == "compact bf16"
    table = told().out
    for label in labels.values():
        assert re.search(rf"^ *{label}  +\d", table, re.M), label
    assert "lion_" not in table


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
