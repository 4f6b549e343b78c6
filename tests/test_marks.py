"""Published steps of large models: predicted as near as the table promises."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import marks
from benchmarks.marks import MARKS, Mark, Row, _pipelined, _simulated

TIMED = [mark for mark in MARKS if mark.tflops]
IDS = [f"{mark.what}-{mark.gpus}" for mark in TIMED]


def row_of(mark: Mark) -> Row:
    return _pipelined(mark) if mark.stages > 1 else _simulated(mark)


@pytest.mark.slow
@pytest.mark.parametrize("mark", TIMED, ids=IDS)
def test_each_row_is_as_near_as_it_should_be(mark: Mark) -> None:
    row = row_of(mark)
    assert row.right, (row.ratio, row.bound)


@pytest.mark.parametrize("at", [0, 8, 9, 14, 24])
def test_some_rows_are_as_near_as_they_should_be(at: int) -> None:
    assert row_of(TIMED[at]).right


def test_rows_are_balanced_where_lanes_are() -> None:
    both, one = row_of(TIMED[8]), row_of(TIMED[10])
    assert (both.balanced, both.bound) == (True, "comm + model")
    assert (one.balanced, one.bound) == (False, "comm")


def test_the_table_names_sources_and_constants(capsys: Any, monkeypatch: Any) -> None:
    few = [mark for mark in MARKS if mark.stages > 1]
    monkeypatch.setattr(marks, "MARKS", few)
    assert marks.main() == 0
    shown = capsys.readouterr().out
    assert all(mark.source in shown for mark in few)
    for constant in ("compute_share 0.63, nic_share 0.082", "compute_share 0.575; links 0.7"):
        assert constant in shown
    assert "<-- off" not in shown
    monkeypatch.setattr(marks, "ONE_LANE", (0.99, 1.01))
    assert marks.main() == 1
    assert "<-- off" in capsys.readouterr().out
