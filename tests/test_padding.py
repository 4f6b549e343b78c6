"""Elements between parameters: no result depends on them, and no step changes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cpu_adam import views
from offload.planning.layout import Place
from offload.planning.profile import KINDS, Kind
from offload.program.ops import Use, Value
from tests.training import Run, assert_same, attached, result_of

PLACEMENTS = [("cpu", "cpu", "cpu"), ("device", "cpu", "cpu")]


def padding(run: Run, kind: Kind) -> Iterator[torch.Tensor]:
    """What lies between parameters of the values of a kind, of those that have a home in memory."""
    plan, memory = run.engine.plan, run.engine.runner.memory
    for unit, spec in enumerate(plan.profile.units):
        place = Place(plan.placements[unit].of(kind), "home")
        for number, chunk in enumerate(spec.chunks):
            at = memory.at(Use(place, Value(kind, unit, number)))
            fmt = plan.states.format(spec.segments[chunk.segment].dtype)
            slots = {"": at.view(torch.bfloat16)} if kind != "state" else {}
            for slot in (slots or views(at, fmt, chunk.elements)).values():
                pieces = plan.profile.by_chunk(unit)[number]
                for before, after in zip(pieces, [*pieces[1:], None]):
                    stop = chunk.elements if after is None else after.chunk_start
                    yield slot[before.chunk_start + before.elements : stop]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_padding_counts_for_nothing_and_stays(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    found = []
    for poisoned in (False, True):
        with attached(placement, tmp_path, max_grad_norm=0.5) as run:
            for kind in KINDS if poisoned else ():
                gaps = list(padding(run, kind))
                assert sum(gap.numel() for gap in gaps) > 10_000
                for gap in gaps:
                    gap.view(torch.uint8).fill_(255)  # NaN, or -1
            for _ in range(2):
                run.loss().backward()
                run.step()
            run.extra.append(run.optimizer.grad_norm())
            for kind in KINDS if poisoned else ():
                assert all((gap.view(torch.uint8) == 255).all() for gap in padding(run, kind))
            found.append(result_of(run))
    assert found[0].extra[0] > 0
    assert_same(*found)
