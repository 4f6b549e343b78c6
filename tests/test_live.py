"""What `offload train` shows while it runs, on terminals of any size and without one."""

import io
import json
import sys
from datetime import timedelta

import pytest
import torch

from offload.cli import display, gpt
from offload.cli.console import Output
from tests.command import SHORT, run


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_drawing_fits_its_terminal_and_leaves_it_clean(columns, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    terminal = Output(file=out, force_terminal=True, width=columns, height=40, color_system=None)
    with display.TrainingProgress(terminal, 20000) as progress:
        now[0] += 1.0
        progress.update(12345, 9.5, 1234568)
    text = out.getvalue().replace("\r", "\n")
    lines = [line.partition("\x1b[")[0] for line in text.splitlines()]
    assert max(map(len, lines)) <= columns
    assert "12345" in text
    if columns >= 80:
        assert "smoothed loss 9.500  1,234,568 tokens/s" in text


def test_a_sample_depends_on_weights_and_seed_alone(capsys):
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(width=64, depth=1))
    first, again, other = (
        gpt.generate(model, b"def ", 40, seed=seed, window=8) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == 40
    assert run(*SHORT, "--json", "--sample", "9", "--steps", "1") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 1 <= len(summary["sample"]) <= 9


def test_a_sample_moves_no_cursor():
    assert gpt.readable(b"a\x1b[2J\r\nb\tc\xff\x07") == "a\ufffd[2J\nb   c\ufffd\ufffd"


def test_speed_and_time_left_are_of_the_last_steps(monkeypatch):
    """A slow first step is forgotten, and both are told of the same steps."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with display.TrainingProgress(
        Output(file=out, width=200, force_terminal=False), 1000
    ) as progress:
        for step in range(1, 200):
            now[0] += 300.0 if step == 1 else 1.0
            progress.update(step, 1.0, 50)
    last = out.getvalue().splitlines()[-1]
    step = int(last.split("/")[0].removeprefix("step "))
    assert last.endswith(f"  50 tokens/s  {timedelta(seconds=1000 - step)} left")


@pytest.mark.parametrize("terminal", [False, True])
def test_evaluating_is_told_from_its_first_forward(terminal, monkeypatch):
    """Through nvme it takes minutes, in which nothing else is said."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with display.TrainingProgress(
        Output(file=out, width=80, force_terminal=terminal), 1
    ) as progress:
        for number in range(1, 129):
            progress.evaluating(number, 128)
            now[0] += 1.0
    told = [number for number in range(1, 129) if f"evaluating {number}/128" in out.getvalue()]
    assert told == list(range(1, 129, 1 if terminal else 10))
