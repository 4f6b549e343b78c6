"""What `offload train` shows while it runs: curve, loads, drawings on terminals of any size."""

import io
import json
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.cli import gpt, live, sample
from offload.cli.console import Output
from offload.cli.curve import buckets, curve
from offload.cli.live import Load, Shown
from tests.command import SHORT, run
from tests.examples import cheap

FLOATS = st.floats(-1e99, 1e99) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(st.floats(-1e6, 1e6)), st.integers(1, 30))
@cheap(100)
def test_buckets_hold_every_value_once(values, count):
    found = buckets(values, count)
    assert len(found) == min(count, len(values))
    if values and len(values) % len(found) == 0:
        assert math.fsum(found) / len(found) == pytest.approx(math.fsum(values) / len(values))


def points(lines):
    """All (column, row) that are set."""
    bits = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    return {
        (2 * x + bits[bit][0], 4 * y + bits[bit][1])
        for y, line in enumerate(lines)
        for x, one in enumerate(line)
        for bit in range(8)
        if one != " " and (ord(one) - 0x2800) >> bit & 1
    }


@given(st.lists(FLOATS), st.integers(1, 20), st.integers(1, 6))
def test_a_curve_is_whole_and_of_its_size(values, columns, rows):
    lines = curve(values, columns, rows)
    assert len(lines) == rows
    assert {len(line) for line in lines} == {columns}
    found = points(lines)
    finite = [value for value in values if math.isfinite(value)]
    assert {x for x, _ in found} == (set(range(2 * columns)) if finite else set())
    for x in range(1, 2 * columns):  # Neighbours touch.
        before, now = ({y for at, y in found if at == one} for one in (x - 1, x))
        assert not found or min(abs(a - b) for a in before for b in now) <= 1


@given(st.lists(FLOATS), st.integers(1, 20), st.integers(1, 6))
def test_a_curve_can_be_plain_ascii(values, columns, rows):
    lines = curve(values, columns, rows, ascii_only=True)
    assert [len(line) for line in lines] == [columns] * rows
    assert set("".join(lines)) <= set(" '.:")
    if any(map(math.isfinite, values)):
        assert all(any(line[x] != " " for line in lines) for x in range(columns))


def test_a_falling_line_falls_from_corner_to_corner():
    found = points(curve([3.0, 2.0, 1.0, 0.0], 2, 2))
    assert {(0, 0), (3, 7)} <= found
    assert (3, 0) not in found
    assert points(curve([5, 5, 5], 3, 1)) == {(x, 2) for x in range(6)}
    assert curve([3.0, 2.0, 1.0, 0.0], 4, 2, ascii_only=True) == ["':. ", "  ':"]


def test_loads_are_shares_of_the_time_between_two_looks():
    before = (10.0, {"disk": (4.0, 1.0), "cpu": (0.0, 0.0)})
    now = (20.0, {"disk": (9.0, 4.0), "cpu": (0.0, 0.0), "h2d": (1.0, 0.0)})
    model, disk, h2d = live.loads_between(before, now)
    assert (model.name, model.busy) == ("model", pytest.approx(0.7))
    assert (disk.name, disk.busy, disk.exposed) == ("disk", 0.5, pytest.approx(0.3))
    assert (h2d.name, h2d.busy, h2d.exposed) == ("h2d", 0.1, 0.0)


@pytest.mark.parametrize(
    ("disk", "cpu", "told"),
    [
        (0.0, 0.0, "bound by no lane: training waits 0%"),
        (0.3, 0.1, "bound by no lane: training waits 40%, for disk most"),
        (0.5, 0.2, "bound by disk: training waits for it 50%"),
        (0.2, 0.6, "bound by cpu: training waits for it 60%"),
    ],
)
def test_what_bounds_the_step(disk, cpu, told):
    loads = [Load("model", 1 - disk - cpu, 0), Load("disk", 1, disk), Load("cpu", 0.3, cpu)]
    assert live.bounded_by(loads).startswith(told)


def test_nothing_is_known_yet():
    assert live.bounded_by([]) == "bound by no lane: training waits 0%"


SHOWN = Shown(
    step=123456,
    steps=1000000,
    losses=[9.5 - k / 100 for k in range(900)],
    tokens_per_s=1234567.8,
    left_s=37000,
    loads=[Load("model", 0.5, 0), Load("disk", 0.9, 0.5), Load("cpu", 0.2, 0.0)],
    memory=[("device", 1 << 30, 80 << 30), ("cpu", 5 << 30, 1 << 40), ("nvme", 0, 0)],
)


@pytest.mark.parametrize("columns", [48, 60, 80, live.WIDE_COLUMNS, 120, 200])
@pytest.mark.parametrize("lines", [10, 24, 50])
def test_a_drawing_fits_its_terminal(columns, lines):
    out = io.StringIO()
    console = Output(file=out, width=columns, height=lines, no_color=True, force_terminal=False)
    console.print(live.screen(SHOWN, columns, lines))
    drawn = out.getvalue().splitlines()
    assert max(map(len, drawn)) <= columns
    assert len(drawn) <= lines
    text = out.getvalue()
    assert "bound by disk" in text
    assert "step 123456/1000000" in text
    if lines > live.SHORT_LINES:
        assert " 9.500" in text
        assert "0.510" in text
        assert "1.00 GiB of 80.00 GiB" in text
    if columns >= 80:
        assert "1,234,568 tokens/s" in text
        assert "10:16:40 left" in text


def test_a_terminal_is_drawn_and_then_left_clean(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    out = io.StringIO()
    terminal = Output(file=out, force_terminal=True, width=100, height=40)
    with live.Progress(terminal, 2) as progress:
        progress.update(1, 3.0, 10)
        progress.update(2, 2.0, 10)
    assert "step 2/2" in out.getvalue()
    assert "bound by" in out.getvalue()


def test_the_smoothed_loss_is_a_mean():
    assert live.smoothed([2.0] * 5) == pytest.approx([2.0] * 5)
    assert live.smoothed([4.0, 0.0])[1] == pytest.approx(4 * 0.9 / 1.9)


def test_a_sample_depends_on_weights_and_seed_alone(capsys):
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(width=64, depth=1))
    first, again, other = (
        sample.generate(model, b"def ", 40, seed=seed, window=8) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == 40
    assert run(*SHORT, "--json", "--sample", "9", "--steps", "1") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 1 <= len(summary["sample"]) <= 9


def test_a_sample_moves_no_cursor():
    assert sample.readable(b"a\x1b[2J\r\nb\tc\xff\x07") == "a\ufffd[2J\nb   c\ufffd\ufffd"


def test_the_loss_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from offload.cli import train_plot

    path = tmp_path / "loss.png"
    assert run(*SHORT, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert run("train", "--plot", str(tmp_path / "loss.pgn")) == 2
    assert "no kind of picture" in capsys.readouterr().err
    train_plot.draw([2.0], [2.0], None, "a run", str(tmp_path / "one.svg"))


def test_speed_and_time_left_are_of_the_last_steps(monkeypatch):
    """A slow first step is forgotten, and both are told of the same steps."""
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with live.Progress(Output(file=out, width=200, force_terminal=False), 1000) as progress:
        for step in range(1, 200):
            now[0] += 300.0 if step == 1 else 1.0
            progress.update(step, 1.0, 50)
    last = out.getvalue().splitlines()[-1]
    step = int(last.split("/")[0].removeprefix("step "))
    left = divmod(1000 - step, 60)
    assert last.endswith(f"  50 tokens/s  {left[0]}:{left[1]:02} left")


@pytest.mark.parametrize("terminal", [False, True])
def test_evaluating_is_told_from_its_first_forward(terminal, monkeypatch):
    """Through nvme it takes minutes, in which nothing else is said."""
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with live.Evaluating(Output(file=out, width=80, force_terminal=terminal)) as progress:
        for number in range(1, 129):
            progress.update(number, 128)
            now[0] += 1.0
    told = [number for number in range(1, 129) if f"evaluating {number}/128" in out.getvalue()]
    assert told == list(range(1, 129, 1 if terminal else 10))
