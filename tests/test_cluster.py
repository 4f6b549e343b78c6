"""Models and machines that need not be there: sizes, work, and what a rank sees."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from offload.planning.cluster import KNOWN, LINK_SHARE, Cluster, cluster_of
from offload.planning.planner import Grain
from offload.planning.profile import ALONE, Sharding
from offload.planning.transformer import PARTS, SHAPES, gpt

A100 = cluster_of("dgx-a100")


# -- machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", json.loads(KNOWN.read_text("utf-8")))
def test_each_known_machine_says_where_it_is_from(name: str) -> None:
    found = cluster_of(name)
    assert len(found.source) > 40
    assert 0 < found.nic_share <= 1 > found.compute_share > 0
    machine = found.machine(2)
    assert machine.h2d_bytes_per_s <= machine.pcie_bytes_per_s
    assert machine.nic_bytes_per_s < machine.link_bytes_per_s < machine.compute_bytes_per_s


def test_a_rank_sees_its_part_of_a_node() -> None:
    eight, four, one = (A100.machine(nodes=4, ranks=count) for count in (8, 4, 1))
    assert eight == A100.machine(4)
    assert eight.device_bytes == one.device_bytes == 80e9
    assert eight.cpu_bytes * 8 == four.cpu_bytes * 4 == one.cpu_bytes == 2e12
    assert eight.nvme_bytes * 8 == one.nvme_bytes == 30e12
    assert [eight.h2d_bytes_per_s, four.h2d_bytes_per_s, one.h2d_bytes_per_s] == [
        100e9 / 8,
        25e9,
        25e9,
    ], "a way that they share, and each its own"
    assert eight.nic_bytes_per_s == 200e9 * A100.nic_share / 8
    assert eight.link_bytes_per_s == LINK_SHARE * 300e9
    assert replace(A100, link_bytes_per_s=0.0).machine().link_bytes_per_s == LINK_SHARE * 100e9 / 8
    assert eight.disk_read_bytes_per_s * 8 == 48e9


def _write(path: Path, told: Any) -> str:
    file = path / "mine.json"
    file.write_text(told if isinstance(told, str) else json.dumps(told))
    return str(file)


def test_a_file_has_all_fields_or_is_like_a_known_machine(tmp_path: Path) -> None:
    assert cluster_of(_write(tmp_path, asdict(A100))) == A100
    found = cluster_of(_write(tmp_path, {"like": "dgx-a100", "gpus": 4, "nic_share": 0.5}))
    assert found == replace(A100, gpus=4, nic_share=0.5, source="The file, and dgx-a100.")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("{", "is no machine"),
        ([], "is no machine"),
        ({}, "gpus"),
        ({"like": "dgx"}, "'dgx'"),
        ({"like": "dgx-a100", "gpu": 1}, "gpu"),
        ({"like": "dgx-a100", "gpus": 0}, "gpus=0: expected a number above 0"),
        ({"like": "dgx-a100", "gpus": 1.5}, "gpus=1.5: expected a whole number"),
        ({"like": "dgx-a100", "nic_share": True}, "nic_share=True: expected a number"),
        ({"like": "dgx-a100", "nic_share": "half"}, "nic_share='half': expected a number"),
        ({"like": "dgx-a100", "source": 1}, "source=1: expected a text"),
    ],
)
def test_what_is_no_machine_is_told(tmp_path: Path, told: Any, expected: str) -> None:
    with pytest.raises(ValueError, match="no machine") as caught:
        cluster_of(_write(tmp_path, told))
    assert expected in str(caught.value)


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="machine 'dgx': expected dgx-h100"):
        cluster_of("dgx")
    with pytest.raises(FileNotFoundError):
        cluster_of(str(tmp_path / "none.json"))
    assert isinstance(A100, Cluster)


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_models_have_about_as_many_parameters_as_their_names_say(name: str) -> None:
    size = float(name[:-1]) * {"b": 1e9, "t": 1e12}[name[-1]]
    assert gpt(name).parameters == pytest.approx(size, rel=0.1)
    assert gpt(name.upper()) == gpt(name)


def test_layers_and_width_are_a_model_too() -> None:
    found = gpt("3x64")
    assert (found.layers, found.hidden) == (3, 64)
    for wrong in ("7c", "3x", "0x64", "3x064x", "12345x1"):
        with pytest.raises(ValueError, match="layers x width such as 96x12288"):
            gpt(wrong)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_work_is_that_of_the_published_formula(parts: int, recompute: bool) -> None:
    """96 b s l h^2 (1 + s / 6h + V / 16 l h), with blocks recomputed."""
    model = gpt("175b", parts=parts, recompute=recompute)
    tokens, s, h, layers = 3 * 2048, 2048, 12288, 96
    head = 51200 / (16 * layers * h)
    published = 96 * tokens * layers * h**2 * (1 + s / 6 / h + head)
    without = 96 * tokens * layers * h**2 * ((1 + s / 6 / h) * 3 / 4 + head)
    assert model.flops(tokens, s) == pytest.approx(published if recompute else without)


@pytest.mark.parametrize("parts", PARTS)
def test_units_are_named_apart_and_cut_over_ranks(parts: int) -> None:
    model = gpt("5x64", parts=parts)
    alone = model.profile(Grain(), ALONE)
    assert sum(p.elements for u in alone.units for p in u.parameters) == model.parameters
    assert len({unit.name for unit in alone.units}) == len(alone.units) == 5 * parts + 2
    assert alone.backward == alone.forward[:0:-1], "but for the embedding"
    for sharding in (Sharding(0, 4), Sharding(3, 4, keeps=True)):
        cut = model.profile(Grain(2048, 6), sharding, gradient_dtype="fp32")
        assert (cut.sharding, cut.chunk_stages) == (sharding, 6)
        for unit, full in zip(cut.units, cut.full):
            assert full.gradient_bytes == 2 * full.weight_bytes == 2 * 4 * unit.weight_bytes


def test_activations_fall_where_blocks_are_recomputed() -> None:
    model = gpt("7b")
    kept = replace(model, recompute=False)
    assert model.activation_bytes(2048) < kept.activation_bytes(2048) / 8
    assert model.activation_bytes(4096) == 2 * model.activation_bytes(2048)
