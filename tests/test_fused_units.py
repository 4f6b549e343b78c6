"""Fused units: small neighbours of a list move together, and each is used by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.config import Config
from offload.model.parameter import OffloadedParameter
from offload.model.units import partition
from offload.planning import profile
from offload.planning.machine import Machine
from offload.planning.profile import FUSED_BYTES_MAX, FUSED_PARTS_MIN, profile_of
from offload.planning.tiers import TIERS
from offload.program.ops import Verb
from offload.unit_plan import UNIT_COST_BYTES
from offload.unit_plan import planned as plan_units
from tests import training
from tests.profiles import unit
from tests.structures import STRUCTURES
from tests.training import Net, Run, assert_same, attached, fp32, plain, same_bits, some_fast, train

CPU, NVME, MIXED = ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("cpu", "device", "nvme")
WIDTH, BLOCKS = 8, 16
FOURS = [f"blocks.{n} to blocks.{n + 3}" for n in range(0, BLOCKS, 4)]
"""The names of the units that `BLOCKS` alike are."""

# -- which are fused -----------------------------------------------------------------------------


def test_neighbours_are_fused_in_their_order_as_far_as_the_bounds_go() -> None:
    small, large = (unit("a", n) for n in (3000, FUSED_BYTES_MAX // 4 + 1))
    for counts in product(range(3), [0, 5, 40], range(3)):
        units = [one for one, n in zip((large, small, large), counts) for _ in range(n)]
        total = sum(one.weight_bytes for one in units)
        most, before = min(FUSED_BYTES_MAX, total // FUSED_PARTS_MIN), 0
        for parts in profile_of(units).fusions(["list"] * len(units)):
            assert [at for part in parts for at in part] == list(range(len(units)))
            assert before <= len(parts) < len(units)
            sizes = [sum(units[at].weight_bytes for at in part) for part in parts]
            assert all(len(part) == 1 or size <= most for part, size in zip(parts, sizes))
            assert all(a + b > most for a, b in pairwise(sizes))  # Else they would be one.
            most, before = most // 2, len(parts)
        assert bool(before) == (
            2 * small.weight_bytes <= total // FUSED_PARTS_MIN and counts[1] > 0
        )


@pytest.mark.parametrize(
    ("other", "of", "fused"),
    [
        (unit("b", 3000), "list", True),
        (unit("b", 300, frozen=[2700]), "list", True),
        (unit("b", 3000, dtype="float32"), "list", True),
        (unit("b", 3000), "another", False),
        (unit("b", frozen=[3000]), "list", False),
        (unit("b", 3000, lasting=True), "list", False),
        (unit("b", 3000, backward=False), "list", False),
    ],
)
def test_only_alike_ones_of_one_list_are_fused(
    other: Any, of: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "FUSED_PARTS_MIN", 1)
    found = profile_of([unit("a", 3000), other])
    assert next(found.fusions(["list", of]), None) == ([[0, 1]] if fused else None)
    assert not list(found.fusions(["", ""]))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(training.Block(WIDTH) for _ in range(4))


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def lists_of(model: nn.Module) -> dict[str, str]:
    return {group.name: group.listed for group in partition(model)}


def test_lists_whose_modules_are_used_one_after_the_other() -> None:
    assert lists_of(Net(layers=2, width=WIDTH)) == {
        **dict.fromkeys(("embed", "norm", "head"), ""),
        **dict.fromkeys(("blocks.0", "blocks.1"), "blocks"),
    }
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert lists_of(nested) == dict.fromkeys(("0", "1.0", "1.1"), "root")
    named = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert set(lists_of(named).values()) == {""}
    two = lists_of(TwoLists())
    assert {name.split(".")[0] for name, listed in two.items() if listed} == {"tail"}
    # Which experts are used may depend on the data; a Sequential among them is used as a whole.
    layers = nn.ModuleList(Mixture() for _ in range(2))
    found = lists_of(nn.ModuleDict({"layers": layers}))
    assert not any(listed for name, listed in found.items() if "experts" in name)
    layers[1].experts[0] = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = lists_of(nn.ModuleDict({"layers": layers}))
    assert {name for name, listed in found.items() if "experts" in name and listed} == {
        "layers.1.experts.0.0",
        "layers.1.experts.0.1",
    }


# -- the bits of plain torch ---------------------------------------------------------------------


class Ordered(Net):
    """Blocks in another order in every call, left out, or used twice."""

    def __init__(self) -> None:
        super().__init__(layers=BLOCKS, width=WIDTH)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        every = list(range(BLOCKS))
        orders = [every, every[::-1], every[1::2], sorted(every * 2), every * 2, [5, 0, 9, 4, 5]]
        x = self.embed(tokens)
        for index in orders[self.calls % len(orders)]:
            x = self.blocks[index](x)
        self.calls += 1
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Read(Net):
    """Weights are read, kept and edited by the model around, between two blocks of their unit."""

    def __init__(self) -> None:
        super().__init__(layers=BLOCKS, width=WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        blocks: Any = self.blocks
        x, kept = self.embed(tokens), 0
        for index, block in enumerate(blocks):
            x = block(x)
            x = F.linear(x, blocks[index - 1].norm.weight.diag())
            kept = kept + blocks[(index + 1) % BLOCKS].down.bias.sum()
            if index % 4 == 1:
                seen = blocks[index + 1].up.weight.detach()
                with torch.no_grad():  # Of what is still to run, and of what has run.
                    blocks[index + 1].up.bias.add_(1e-2)
                    blocks[index].down.bias.mul_(0.5)
                kept = kept + (seen.sum() + blocks[index].down.bias.sum()) * x.mean()
        return self.head(self.norm(x)) + kept  # type: ignore[no-any-return]


def adapted() -> nn.Module:
    """A part of each block is frozen, and two blocks as a whole."""
    net: Any = Net(layers=BLOCKS, width=WIDTH)
    frozen = [block.up for block in net.blocks[:8]] + [net.blocks[9], net.blocks[10]]
    for parameter in (p for module in frozen for p in module.parameters()):
        parameter.requires_grad_(False)
    return net


def sharing() -> nn.Module:
    net: Any = Net(layers=BLOCKS, width=WIDTH)
    net.blocks[6].up = net.blocks[1].up
    net.blocks[9] = net.blocks[8]
    return net


deep = partial(Net, layers=BLOCKS, width=WIDTH)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": deep,
    "checkpoints": partial(deep, checkpointed=True),
    "checkpoints, reentrant": partial(deep, checkpointed=True, reentrant=True),
    "orders": Ordered,
    "read": Read,
    "adapted": adapted,
    "sharing": sharing,
}


def accumulated(run: Run, number: int) -> None:
    for _ in range(2):
        run.loss().backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.step()


def of_blocks(run: Run, number: int) -> None:
    """Blocks are called by hand, outside of any call of the model."""
    model: Any = run.model
    x = model.embed(training.batch(run.generator))
    for block in (*model.blocks, model.blocks[0]):
        x = block(x)
    model.head(model.norm(x)).pow(2).mean().backward()
    run.losses.append(x.sum().item())
    accumulated(run, number)


def fused(loop: Callable[[Run, int], None], run: Run, number: int) -> None:
    if hasattr(run.optimizer, "engine"):
        assert any(" to " in one.spec.name for one in run.engine.units)
    loop(run, number)


LOOPS = {"plain": plain, "accumulated": accumulated, "of blocks": of_blocks}
PLACES = {"cpu": CPU, "nvme": NVME, "mixed": MIXED}
WAYS = [
    (loop, [*PLACES][(number + turn) % 3]) for turn in range(3) for number, loop in enumerate(LOOPS)
]


@pytest.mark.parametrize(("model", "way"), training.in_turn(MODELS, WAYS))
def test_the_bits_of_plain_torch(model: str, way: tuple[str, str], tmp_path: Path) -> None:
    loop, place = way
    options = fp32(build=MODELS[model], steps=3)
    training.as_in_plain_torch(partial(fused, LOOPS[loop]), PLACES[place], tmp_path, **options)


@pytest.mark.parametrize(
    ("structure", "placement"),
    [
        pytest.param(
            structure,
            placement,
            marks=() if number % 4 == 3 * at else pytest.mark.slow,  # More of them in `parity`.
            id=f"{structure}-{placement[0]}",
        )
        for number, structure in enumerate(STRUCTURES)
        for at, placement in enumerate([CPU, NVME])
    ],
)
def test_the_bits_where_all_is_fused_that_may_be(
    structure: str, placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = fp32(build=STRUCTURES[structure], steps=2)
    monkeypatch.setattr(profile, "FUSED_PARTS_MIN", 1)
    found = train(placement, tmp_path, accumulated, **options)
    monkeypatch.setattr(profile, "FUSED_BYTES_MAX", 0)
    assert_same(found, train(training.RESIDENT, tmp_path, accumulated, **options))


@pytest.mark.parametrize(
    ("placement", "more"),
    training.some_rows_fast(
        [
            (CPU, {"max_grad_norm": 0.1}),
            (NVME, {"micro_batches": 1}),
            (NVME, {"max_grad_norm": 0.1}),
            (CPU, {"micro_batches": 1}),
        ],
        fast=2,
    ),
)
def test_the_bits_of_units_that_are_not_fused(
    placement: Any, more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"build": partial(deep, checkpointed=True), **more}
    found = train(placement, tmp_path, partial(fused, plain), **options)
    monkeypatch.setattr(profile, "FUSED_BYTES_MAX", 0)
    assert_same(found, train(placement, tmp_path, **options))


# -- how they are used -----------------------------------------------------------------------------


def used(run: Run) -> list[str]:
    names = [one.spec.name for one in run.engine.units]
    return [names[at] for at in run.engine.passes.orders[Verb.FORWARD] if "blocks" in names[at]]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_use_serves_all_of_its_modules(checkpointed: bool, tmp_path: Path) -> None:
    build = partial(deep, checkpointed=checkpointed, reentrant=True)
    with attached(NVME, tmp_path, build=build) as run:
        blocks: Any = run.model.blocks
        for skipped in ([], [0, 5], [1, 2, 3, 15], []):
            handles = [
                blocks[n].register_forward_hook(lambda _, args, __: args[0]) for n in skipped
            ]
            plain(run, 0)
            assert used(run) == FOURS
            assert not run.engine.active.units
            backward = run.engine.passes.orders[Verb.BACKWARD]
            assert len(backward) == len(set(backward))
            for handle in handles:
                handle.remove()
        assert run.engine.report().misses == 0


def test_between_two_calls_its_parameters_rest(tmp_path: Path) -> None:
    with attached(CPU, tmp_path, build=deep) as run:
        blocks: Any = run.model.blocks
        seen: list[tuple[int, list[int]]] = []

        def look(index: int) -> None:
            rest = [type(one.up.weight) is OffloadedParameter for one in blocks]
            seen.append((index, [at for at, one in enumerate(rest) if not one]))

        for at, block in enumerate(blocks):
            block.up.register_forward_hook(lambda *_, at=at: look(at))
            block.up.weight.register_hook(lambda *_, at=at: look(at))
        run.loss().backward()
    assert [index for index, _ in seen] == [*range(BLOCKS), *reversed(range(BLOCKS))]
    assert all(there == [index] for index, there in seen[:BLOCKS])
    # In backward those whose turn came stay: of the same unit, and none that comes later.
    turns = [range(at, at // 4 * 4 + 4) for at, _ in seen[BLOCKS:]]
    assert [there for _, there in seen[BLOCKS:]] == list(map(list, turns))


def test_what_was_read_between_two_calls_stays_as_it_was(tmp_path: Path) -> None:
    with attached(NVME, tmp_path, build=deep) as run:
        blocks: Any = run.model.blocks
        before = [block.up.weight.detach().clone() for block in blocks]
        read: list[torch.Tensor] = []
        for at, block in enumerate(blocks):
            other = blocks[at ^ 1].up  # Of the same unit.
            block.register_forward_hook(lambda *_, other=other: read.append(other.weight.detach()))
        with torch.no_grad():
            run.loss()
        assert all(same_bits(one, before[at ^ 1]) for at, one in enumerate(read))


def test_a_change_in_its_own_forward_is_refused_by_name(tmp_path: Path) -> None:
    with attached(CPU, tmp_path, build=deep) as run:
        block: Any = run.model.blocks[5]

        def change(module: Any, _: Any) -> None:
            with torch.no_grad():
                module.up.bias.add_(1)

        hook = block.register_forward_pre_hook(change)
        with pytest.raises(RuntimeError, match=r"blocks\.5\.up\.bias was changed in place"):
            run.loss()
        hook.remove()
        plain(run, 0)


# -- names, places and budgets ---------------------------------------------------------------------


def test_names_and_places(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = deep().to(torch.bfloat16).state_dict()
    with attached(("nvme", "cpu", "cpu"), tmp_path, build=deep) as run:
        found = run.engine.plan.profile
        assert [one.name for one in found.units] == ["embed", *FOURS, "norm", "head"]
        assert {found.names[unit] for _, unit in run.engine.plan.file} >= set(FOURS)
        state = run.model.state_dict()
        assert list(state) == list(expected)
        streamed = dict(run.engine.stream_weights())
        for name, value in expected.items():
            assert same_bits(state[name], value)
            assert same_bits(streamed[name], value)
            assert sum(piece.elements for piece in found.locate(name)) == value.numel()


def planned(model: nn.Module, **config: Any) -> tuple[list[str], Any]:
    """The units' names and the plan, on a machine with room for all."""
    machine = Machine(
        device_bytes=1 << 40, cpu_bytes=1 << 40, nvme_bytes=1 << 40, device_is_cpu=False
    )
    groups, found = plan_units(partition(model), Config(**config), machine, "adam", trains=True)
    assert [group.name for group in groups] == [one.name for one in found.profile.units]
    return [one.name for one in found.profile.units], found


def cost(units: list[str], found: Any) -> int:
    away = sum(row.bytes * TIERS.index(row.tier) for row in found.rows())
    return away + UNIT_COST_BYTES * len(units)


@pytest.mark.parametrize(
    "forced", some_fast([{}, {"params": "cpu", "gradients": "cpu", "optimizer": "nvme"}])
)
def test_units_are_fused_as_far_as_the_budgets_allow(
    forced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And more memory never makes it cost more."""
    given: dict[str, Any] = {"nvme_path": "unused", "cpu_memory": "1GiB", **forced}
    counts, costs = [], []
    for kib in range(0, 2048, 128):
        budget = {**given, "device_memory": kib << 10}
        with monkeypatch.context() as patched:
            patched.setattr(profile, "FUSED_BYTES_MAX", 0)
            try:
                alone = planned(deep(), **budget)
            except offload.BudgetError:
                continue
        units, found = planned(deep(), **budget)
        assert found.taken_bytes("device") <= kib << 10
        counts.append(len(units))
        costs.append(cost(units, found))
        assert len(alone[0]) == BLOCKS + 3
        assert costs[-1] <= cost(*alone)
    assert len(counts) > 10
    assert costs == sorted(costs, reverse=True)
    assert counts[0] > counts[-1] == len(FOURS) + 3


@pytest.mark.parametrize("placement", some_fast([NVME, CPU]))
def test_in_the_smallest_budgets_of_fused_units(placement: Any, tmp_path: Path) -> None:
    """Which those of units that are not fused may exceed, by padding."""
    least: Any = training.smallest_budgets(placement, tmp_path, build=deep)
    found = train(placement, tmp_path, partial(fused, plain), build=deep, **least)
    assert_same(found, train(placement, tmp_path, build=deep))
