"""Ranks in rows: what they train is what one process does that sums groups of micro-batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.config import Config
from offload.model.units import partition
from offload.planning.machine import Machine
from offload.planning.planner import BudgetError
from offload.unit_plan import planned, planned_alike
from tests.covering import Case, pairwise
from tests.ranks import Failed, How, World, assert_as_one, digest, joined, one_process

pytestmark = pytest.mark.slow

FACTORS = {
    "mesh": ("2x2", "1x4", "4x1"),
    "micro": ("1", "3"),
    "shard": ("2", "3", "1"),
    "place": ("cpu", "device", "nvme", "auto"),
    "states": ("exact", "compact", "fp32"),
    "kind": ("plain", "tied", "experts", "frozen", "unused", "twice", "generates"),
    "gradients": ("param", "fp32"),
    "norm": ("0.5", "none"),
    "sleeps": ("never", "cpu"),
}
CASES = pairwise(FACTORS, lambda one, other: False)

Worlds = Callable[[int], World]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made: dict[int, World] = {}

    def of(ranks: int) -> World:
        return made.setdefault(ranks, World(ranks, tmp_path_factory.mktemp(f"of{ranks}")))

    yield of
    for world in made.values():
        world.close()


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case["mesh"]), ids=str)
def test_rows_train_as_one_process_does(worlds: Worlds, case: Case, tmp_path: Path) -> None:
    config: dict[str, Any] = dict.fromkeys(("params", "gradients", "optimizer"), case["place"])
    config |= {"shard": int(case["shard"]), "gradient_dtype": case["gradients"]}
    if case["place"] == "nvme":
        config["nvme_path"] = str(tmp_path)
    if case["norm"] != "none":
        config["max_grad_norm"] = float(case["norm"])
    config["states"] = "compact" if case["states"] == "compact" else "exact"
    mesh = tuple(int(size) for size in case["mesh"].split("x"))
    dtype = torch.float32 if case["states"] == "fp32" else torch.bfloat16
    how = How(case["kind"], dtype, int(case["micro"]), 5, "AdamW", config, mesh, case["sleeps"])
    assert_as_one(worlds(4).run("train", how), how)


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2)])
@pytest.mark.parametrize("kind", ["plain", "experts"])
def test_rows_and_columns_of_other_sizes(worlds: Worlds, mesh: tuple[int, int], kind: str) -> None:
    config = {"reduce": "sum", "max_grad_norm": 0.5, "shard": 3}
    how = How(kind, torch.float32, 2, config=config, mesh=mesh)
    assert_as_one(worlds(6).run("train", how), how)


def test_rows_sum_in_another_order_than_one_row() -> None:
    """Else the tests above would show nothing."""
    how = How(micro=1, mesh=(2, 2))
    one, other = (joined([one_process(one, 4)]) for one in (how, replace(how, mesh=())))
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ours", [False, True])
def test_saved_by_rows_and_continued_by_any(worlds: Worlds, ours: bool, tmp_path: Path) -> None:
    how, folder = How("tied", torch.float32, mesh=(2, 2)), str(tmp_path / "saved")
    went_on = joined(worlds(4).run("save", how, folder, ours=ours))
    again = joined(worlds(4).run("load", how, folder, 1, ours=ours))
    for name, value in went_on.items():
        assert torch.equal(again[name], value), name
    saved = one_process(replace(how, steps=1), 4).values
    for ranks in 4, 2, 1:
        found = joined(worlds(ranks).run("load", replace(how, mesh=()), folder, 0, ours=ours))
        assert found.keys() == saved.keys()
        for name, (_, value) in saved.items():
            assert torch.equal(found[name], value), name
    flat = replace(how, mesh=())
    two, alone = (joined(worlds(n).run("load", flat, folder, 4 // n, ours=ours)) for n in (2, 1))
    for name, value in alone.items():
        assert torch.equal(two[name], value), name


def test_saved_by_one_row_and_continued_by_rows(worlds: Worlds, tmp_path: Path) -> None:
    how, folder = How("frozen", torch.float32, steps=1), str(tmp_path / "saved")
    worlds(2).run("save", replace(how, micro=2), folder, ours=True)
    saved = one_process(replace(how, micro=4), 1).values
    found = joined(worlds(4).run("load", replace(how, mesh=(2, 2)), folder, 0, ours=True))
    for name, (_, value) in saved.items():
        assert torch.equal(found[name], value), name


def test_values_are_found_where_they_are(worlds: Worlds) -> None:
    how = How(dtype=torch.float32, mesh=(2, 2))
    assert all(one is not None for one in worlds(4).run("touch", how))
    every = worlds(4).run("detach", how)
    wanted = one_process(replace(how, steps=2), 4).values
    for found in every:
        for name, value in found.items():
            if name in wanted:
                assert torch.equal(value.view(-1), wanted[name][1]), name
    norms = [norms for norms, _ in worlds(4).run("clip", how)]
    assert all(one == norms[0] for one in norms)


@pytest.mark.parametrize(("job", "seeds"), [("late", 3), ("delayed", 20)])
def test_when_collectives_happen_changes_no_bit(worlds: Worlds, job: str, seeds: int) -> None:
    how = How(micro=2, config={"shard": 3, "max_grad_norm": 0.5}, mesh=(2, 2))
    wanted = [digest(one.values) for one in worlds(4).run("train", how)]
    for rank, found in enumerate(worlds(4).run(job, how, seeds, patience_s=300)):
        assert set(found) == {wanted[rank]}


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2)])
@pytest.mark.parametrize(("shard", "micro"), [(1, 3), (2, 1), (3, 1), (3, 3)])
def test_bytes_sent_over_rows_and_columns_are_those_of_the_formulas(
    worlds: Worlds, mesh: tuple[int, int], shard: int, micro: int
) -> None:
    how = How(micro=micro, config={"shard": shard}, mesh=mesh)
    for rank in worlds(6).run("sent_by_level", how):
        for found, wanted in rank:
            assert found == wanted > 0


def test_what_a_column_has_is_gathered_anew_where_weights_change(worlds: Worlds) -> None:
    kept, whole = (worlds(4).run("edit", How(config={"shard": at}, mesh=(2, 2))) for at in (3, 2))
    assert kept == whole


def test_columns_keep_what_they_have_where_nothing_else_has_to_go() -> None:
    group = SimpleNamespace(position=1, ranks=4, folds=2, all_or_none=nullcontext)
    config, (model, _) = Config(shard=3, cpu_memory="64MiB"), How().build()
    machine, found = Machine(device_bytes=1 << 30, cpu_bytes=1 << 30), list[tuple[int, int]]()
    for size in range(300, 2000, 20):
        sized = replace(config, device_memory=size << 10)
        cut = partial(planned, partition(model), sized, machine, "adam", trains=True)
        with suppress(BudgetError):
            plan = planned_alike(cut, group, sized)[1]
            least = planned_alike(cut, SimpleNamespace(**{**vars(group), "folds": 4}), sized)[1]
            assert plan.placements == least.placements
            found.append((plan.profile.sharding.column, plan.taken_bytes("device") >> 10))
    assert {column for column, _ in found} == {0, 2}
    assert found[-1][0] == 2


FAULTS = {
    "raise": "rank 1 on .* failed after step 1: OSError: the drive is gone",
    "edit": "rank 1 on .* failed after step 1: RuntimeError: blocks.3 was changed inside",
    "kill": "ranks? 1(, 3)? (is gone|did not come .*) after step 1",
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_rank_that_fails_is_named_in_other_rows_and_columns(what: str, tmp_path: Path) -> None:
    world = World(4, tmp_path)
    world.begin("differ", How(config={"shard": 3}, mesh=(2, 2)), what)
    found = world.results(40)
    world.close()
    if what == "edit":
        assert found[1].message.startswith("blocks.3 was changed inside a forward or backward")
    for one in (found[0], *found[2:]):
        assert isinstance(one, Failed), one
        assert one.kind == "EngineError", one.text
        assert re.search(FAULTS[what], one.message), one.message
        assert one.seconds < 15
