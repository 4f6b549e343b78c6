"""`benchmarks/step.py` at a size that says nothing of speed: every row is measured, and how."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aio
from benchmarks.disk import ENGINES, Disk
from benchmarks.step import AHEAD_BYTES, LONGER, RATIOS, STOCK

ROOT = Path(__file__).parents[1]

FIO = """#!/bin/sh
echo '{"jobs": [{"error": 0, "read": {"runtime": 5}}, {"error": 0, "write": {"runtime": 9}}]}'
"""


@pytest.mark.slow
def test_every_row_has_its_figures_and_no_file_is_left(tmp_path: Path) -> None:
    for name in ("bin", "drive"):
        (tmp_path / name).mkdir()
    fio = tmp_path / "bin" / "fio"
    fio.write_text(FIO)
    fio.chmod(0o755)
    kept = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.step", str(tmp_path / "drive"), "--tiny"]
    path = f"{fio.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "--rounds", "1", "--json", str(kept)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    with contextlib.closing(aio.open_backend()) as opened:
        compared = opened.name in ENGINES
    figures = [json.loads(line) for line in kept.read_text().splitlines()]
    for figure in figures:
        assert all(map(math.isfinite, figure["values"])), figure
        assert figure["what"] in done.stdout
        assert figure["behind"] in done.stdout
    found = {figure["row"] for figure in figures if figure["values"]}
    assert found == {*range(1, 13)} - ({5} if compared else {2, 3, 4, 5, 7})
    assert "no DeepSpeed: give --deepspeed PYTHON" in done.stdout
    assert not list((tmp_path / "drive").iterdir())


def test_a_row_without_fio_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Disk(str(tmp_path), 8 << 20) as disk, pytest.raises(ValueError, match="no fio on PATH"):
        disk.choose()


@pytest.mark.parametrize(
    ("fio", "early", "stock"),
    [
        (0.5, 6 / 5, 6 / 5),  # Torch's step bounds both.
        (6.0, 1.0, 6 / 5),  # Half of the bytes lie outside the forward of 2, and 3 are left.
        (16.0, 6 / 16, 6 / 10),  # The drive does, under the forward.
    ],
)
def test_what_the_least_step_is(fio: float, early: float, stock: float) -> None:
    plain = {"step": 5.0, "forward": 2.0, "backward": 2.0}
    ours = {"step": 6.0, "bytes": 4.0 * AHEAD_BYTES}
    for ratio, expected in ((LONGER, early), (STOCK, stock)):
        assert RATIOS[ratio](ours, plain, {"step": fio}) == pytest.approx(expected)
