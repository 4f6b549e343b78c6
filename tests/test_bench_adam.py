"""`offload bench adam` on a few thousand parameters: what it shows, refuses, and how it stops.

Figures are not judged: that is what the benchmark is for, on a machine at rest.
"""

import json
import re
import signal

import pytest
import torch

import cpu_adam
from cpu_adam import FORMATS
from offload.cli import EXIT_BAD_INPUT, bench_adam, console
from offload.cli.bench_adam import Adam
from tests.command import assert_refused, run

TINY = ["bench", "adam", "--elements", "8Ki", "--seconds", "0"]
FLAGS = ["--json", "--no-json", "--elements", "--formats", "--seconds"]


@pytest.fixture(autouse=True)
def at_rest(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.psutil, "cpu_percent", lambda interval: 0.0)


def test_help_says_what_there_is(capsys):
    for arguments in (["bench"], ["bench", "--help"]):
        assert run(*arguments) == 0
        assert "adam   " in capsys.readouterr().out
    assert run("bench", "adam", "--help") == 0
    shown = re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)
    assert [flag for flag in dict.fromkeys(shown) if flag != "--help"] == FLAGS


def test_json_has_every_figure_and_nothing_else(capsys):
    assert run(*TINY, "--json") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["kind"], found["elements"]) == ("bench adam", 8192)
    assert found["threads"] == cpu_adam.threads()
    assert found["kernel"] == cpu_adam.kernel().name
    assert [one["format"] for one in found["figures"]] == [*FORMATS]
    for one in found["figures"]:
        assert bool(one["of_torch"]) == (FORMATS[one["format"]].rule == "adam")
        assert min(one["of_stream"]) > 0
    assert found["figures"][0]["bytes_per_element"] == 26


def test_the_figures_are_plain_and_fit_eighty_columns(capsys):
    assert run(*TINY, "--formats", "exact", "lion_fp32") == 0
    shown = capsys.readouterr()
    figures = [line for line in shown.out.splitlines() if " M/s, " in line]
    assert [" of torch" in line for line in figures] == [True, False]
    assert max(map(len, figures)) <= 80
    assert "\x1b" not in shown.out + shown.err
    assert "measuring exact" in shown.err


def test_a_busy_machine_and_a_missing_kernel_are_told(monkeypatch, capsys):
    monkeypatch.setenv("CPU_ADAM_KERNEL", "python")
    monkeypatch.setattr("cpu_adam.choice._kernel", None)
    monkeypatch.setattr(console.psutil, "cpu_percent", lambda interval: 60.0)
    assert run(*TINY, "--formats", "exact") == 0
    shown = capsys.readouterr()
    assert "note: other programs keep 60% of the processors busy" in shown.err
    assert "note: the Python reference serves" in shown.err
    assert "kernel python" in shown.out


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_leaves_the_update_s_bytes_and_torch_does_the_same_job(name):
    format, elements = FORMATS[name], 8192 + 77
    size = bench_adam.needed_bytes(Adam(elements=str(elements)))
    memory = torch.empty(size, dtype=torch.uint8)
    figure = bench_adam._figure(format, elements, memory, 0.0)
    slots = sum(slot.items(elements) * getattr(torch, slot.dtype).itemsize for slot in format.slots)
    weight = getattr(torch, format.weight_dtype).itemsize * elements
    assert figure.bytes_per_element * elements == 2 * elements + 2 * (weight + slots)
    if format.rule != "adam":
        return
    gradient, given = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    names = ("master", "gradient", "exp_avg", "exp_avg_sq")
    theirs, ours = given.clone(), given.clone()
    tensors = {f"torch {one}": torch.zeros(256) for one in names}
    bench_adam._torch_job({"gradient": gradient, "weight": theirs, **tensors})()
    exact = FORMATS["exact"]
    slots = {one.name: torch.zeros(256, dtype=getattr(torch, one.dtype)) for one in exact.slots}
    hyper, step = bench_adam.HYPERS["adam"], bench_adam.STEPS_DONE + 1
    cpu_adam.update(ours, gradient, slots, hyper, step=step, format=exact)
    torch.testing.assert_close(theirs, ours)


REFUSED = {
    "bench adm": "there is no benchmark 'adm' (did you mean adam?)",
    "bench adam --elements many": "--elements many: expected a number of parameters, such as 64Mi",
    "bench adam --elements 0": "--elements 0: expected a number of parameters",
    "bench adam --formats exat": "--formats exat: expected some of exact",
    "bench adam --seconds nan": "--seconds nan: expected 0 to 3600",
    "bench adam 64Mi": "64Mi belongs to no option",
    "bench adam --elements 1Ti": "of memory; found",
}


@pytest.mark.parametrize(("line", "expected"), REFUSED.items())
def test_what_cannot_be_is_refused_in_one_message(line, expected, monkeypatch, capsys):
    monkeypatch.setattr(bench_adam, "measure", lambda *_: pytest.fail("measured"))
    assert_refused(capsys, expected, run(*line.split()))


def test_memory_is_asked_for_before_it_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(bench_adam, "host_free_bytes", lambda: 512 << 20)
    assert run("bench", "adam", "--formats", "exact") == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    for part in ("asked for updates of 64Mi parameters", "found 512.00 MiB free", "try: --elem"):
        assert part in told


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cpu_adam, "update", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    threads = cpu_adam.threads()
    assert run(*TINY, "--formats", "exact") == 130
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "offload: stopped by Ctrl-C while measuring exact"
    assert cpu_adam.threads() == threads
