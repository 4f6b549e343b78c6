"""Durable runs that are killed at random moments: as they resume, train, commit, save and end.

`python -m tests.test_durable_kills 1000` kills as often, and says what was under way.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.durable_runs import LOOPS, Loop, Told, from_save, lines, program, started, told_by, whole
from tests.test_durable import PLACES
from tests.training import some_fast

WITHIN_S = {"attaches": 0.15, "begins": 0.02, "saves": 0.02, "ends": 0.03, "": 0.5}
"""What is to be under way, and the longest time after it has begun; anything, from the start."""


def killed(
    placement: Any, path: Path, loop: Loop, told: Told, draw: random.Random, *, spared: bool
) -> Told:
    """Run a child and kill it at some moment, unless it is `spared`: what is known then."""
    what = draw.choice([*WITHIN_S])
    stop = (
        draw.randrange(min(told.committed, loop.steps - 1), loop.steps)
        if what in ("begins", "saves")
        else 0
    )
    child = started(partial(program, placement, path, loop))
    alive = not spared
    for line in lines(child):
        told = told.after(line)
        if alive and line[0] == (what or "attaches") and int(line[1]) >= stop:
            time.sleep(draw.random() * WITHIN_S[what])
            child.send_signal(9)
            alive = False
    _, errors = child.communicate()
    assert errors == "", errors
    return told.checked(path, loop)


def run_of_kills(seed: int, path: Path, steps: int = 16, most: int = 100) -> Counter[str]:
    """A run that is killed until it comes to its end: how often, by what it had told last.

    Not more than so often: on a busy machine most die before they have begun.
    """
    draw, told, kills = random.Random(seed), Told(), Counter[str]()
    loop = draw.choice(LOOPS)._replace(steps=steps)
    while not told.digest:
        spared = kills.total() >= most
        told = killed(draw.choice(PLACES), path, loop, told, draw, spared=spared)
        kills[told.now] += not told.digest
    assert told.digest == whole(loop).digest
    assert told_by(partial(from_save, draw.choice(PLACES[:2]), path, loop))[-1][1] == told.digest
    assert not [*path.glob(".save.new.*")], "what a killed save has left"
    return kills


RUNS = int(os.environ.get("DURABLE_RUNS", "30"))
"""How many runs are killed, each some seven times."""


@pytest.mark.parametrize("seed", some_fast(range(RUNS)))
def test_a_killed_run_ends_as_one_that_was_never_killed(seed: int, tmp_path: Path) -> None:
    assert run_of_kills(seed, tmp_path, *((16,) if seed else (4, 4))).total() >= 0


def main(wanted: int, seed: int) -> None:
    """Kill so often, and say what was under way."""
    torch.set_num_threads(1)
    kills, runs, since = Counter[str](), 0, time.monotonic()
    while kills.total() < wanted:
        with tempfile.TemporaryDirectory() as path:
            kills += run_of_kills(seed + runs, Path(path))
        runs += 1
        told = f"{kills.total()} kills, {runs} runs, {time.monotonic() - since:.0f} s: "
        print(told + ", ".join(f"{n} after '{what}'" for what, n in kills.items()), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
