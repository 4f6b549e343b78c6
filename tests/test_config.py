"""Config: sizes as people write them, refusals that name the field, and nothing can be changed."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.config import Config
from offload.planning.tiers import format_bytes, parse_bytes
from tests.examples import cheap


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (4096, 4096),
        (2**61 + 1, 2**61 + 1),
        (4096.0, 4096),
        ("0", 0),
        ("512", 512),
        ("512b", 512),
        ("8GiB", 8 << 30),
        (" 8 gib ", 8 << 30),
        ("8gi", 8 << 30),
        ("500 MB", 500_000_000),
        ("1.5g", 1_500_000_000),
        (".5KiB", 512),
        ("2TiB", 2 << 40),
        ("3t", 3 * 10**12),
    ],
)
def test_sizes(text: str | int | float, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", "b", "8X", "eight", "8ib", "-1", "1e9", "8GiBB", "9999999999TiB", "1,5GiB"),
        *(-1, 2**62, float("nan"), float("inf"), 1.5, "1.5", True, None),
    ],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_what_is_no_size_is_told_which_units_there_are_and_what_they_mean() -> None:
    with pytest.raises(ValueError, match="expected a number with an optional unit") as caught:
        parse_bytes("16x")
    told = re.search(r"unit: (.*) \(powers of 1024\), or (.*) \(of 1000\)", str(caught.value))
    assert told
    for units, base in ((told[1], 1024), (told[2], 1000)):
        for unit in units.split(", "):
            assert parse_bytes(f"2{unit}") == 2 * base ** ("kmgt".index(unit[0].lower()) + 1), unit
    assert {"G", "GB", "GiB"} <= {*told[1].split(", "), *told[2].split(", ")}


@given(st.integers(0, 2**61))
@cheap(100)
def test_numbers_are_taken_as_they_are(count: int) -> None:
    assert parse_bytes(count) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_every_default_works() -> None:
    config = Config()
    assert (config.params, config.gradients, config.optimizer) == ("auto",) * 3
    assert config.bytes_of("cpu_memory") is None


def test_sizes_become_bytes() -> None:
    assert Config(cpu_memory="auto", exposed_memory="auto") == Config()
    config = Config(device_memory="1GiB", cpu_memory=5, nvme_space="1kB", exposed_memory="2MiB")
    sizes = [
        config.bytes_of(name) for name in Config.__slots__ if name.endswith(("memory", "space"))
    ]
    assert sizes == [1 << 30, 5, 1000, 2 << 20]


def test_frozen_and_keyword_only() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.params = "cpu"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("cpu")  # type: ignore[misc]
    assert Config() == config
    assert hash(Config()) == hash(config)
    changed = dataclasses.replace(config, cpu_memory="1KiB")
    assert changed.bytes_of("cpu_memory") == 1024


@pytest.mark.parametrize("given", ["/a", Path("/a"), ["/a"], (Path("/a"),)])
def test_one_path_in_any_form(given: object) -> None:
    assert Config(nvme_path=given).nvme_path == ("/a",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"params": "gpu"}, "Config.params='gpu': expected one of auto, device, cpu, nvme"),
        ({"gradients": None}, "Config.gradients=None"),
        ({"optimizer": "disk"}, "Config.optimizer='disk'"),
        ({"states": "tiny"}, "Config.states='tiny': expected one of exact, compact"),
        ({"gradient_dtype": "fp64"}, "Config.gradient_dtype='fp64'"),
        ({"cpu_memory": "lots"}, "Config.cpu_memory: 'lots' is not a size"),
        ({"device_memory": -1}, "Config.device_memory: -1 is not a size"),
        ({"nvme_space": "1X"}, "Config.nvme_space: '1X'"),
        ({"exposed_memory": "x"}, "Config.exposed_memory: 'x'"),
        ({"max_grad_norm": 0.0}, "Config.max_grad_norm=0.0: expected a positive number"),
        ({"max_grad_norm": float("nan")}, "Config.max_grad_norm=nan"),
        ({"params": 3}, "Config.params=3: expected one of auto"),
        ({"gradient_dtype": torch.float32}, "Config.gradient_dtype=torch.float32: expected"),
        ({"cpu_memory": True}, "Config.cpu_memory: True is not a size"),
        ({"cpu_memory": math.nan}, "nan is not a size in bytes: it must be from 0"),
        ({"cpu_memory": -1.5}, "-1.5 is not a size in bytes: it must be from 0"),
        ({"max_grad_norm": "1"}, "Config.max_grad_norm='1': expected a positive number"),
        ({"max_grad_norm": True}, "Config.max_grad_norm=True: expected a positive number"),
        ({"max_grad_norm": -1}, "Config.max_grad_norm=-1"),
        ({"max_grad_norm": math.inf}, "Config.max_grad_norm=inf: expected a positive number, fin"),
        ({"micro_batches": 1.5}, "Config.micro_batches=1.5: expected a whole number from 1"),
        ({"micro_batches": True}, "Config.micro_batches=True: expected a whole number"),
        ({"micro_batches": "2"}, "Config.micro_batches='2': expected a whole number"),
        ({"micro_batches": 0}, "Config.micro_batches=0"),
        ({"nvme_path": None}, "Config.nvme_path=None: expected the path of a directory"),
        ({"nvme_path": 3}, "Config.nvme_path=3: expected the path of a directory"),
        ({"nvme_path": ("/a", 3)}, "Config.nvme_path=3: expected the path"),
        ({"nvme_path": b"/a"}, "Config.nvme_path=b'/a': expected the path"),
        ({"nvme_path": ""}, "Config.nvme_path='': expected the path"),
        ({"params": "nvme"}, "nvme_path is empty"),
        (
            {"nvme_path": ("/a", "/b", "/b/.")},
            "nvme_path=['/a', '/b', '/b/.']: a directory is named",
        ),
    ],
)
def test_refusals_name_the_field(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config(**wrong)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("param", "'param'; likely meant: params$"),
        ("nvme_dir", "nvme_path$"),
        ("zzz", "params, gr"),
    ],
)
def test_an_unknown_field_is_refused_and_likely_ones_are_named(name: str, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Config(**{name: 1})
    with pytest.raises(TypeError, match=f"Config.'{name}'.: fields go by name"):
        Config(name)  # type: ignore[misc]


def test_a_home_directory_in_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/me")
    assert Config(nvme_path=("~/scratch", "/b")).nvme_path == ("/of/me/scratch", "/b")


def test_a_config_can_be_copied_and_pickled() -> None:
    assert copy.copy(Config(cpu_memory=5)) == pickle.loads(pickle.dumps(Config(cpu_memory=5)))


def test_numbers_of_other_kinds_become_plain_ones() -> None:
    config = Config(max_grad_norm=np.float32(1.5), micro_batches=np.int64(3), cpu_memory="7")
    assert type(config.max_grad_norm) is float
    assert type(config.micro_batches) is int
    assert config == Config(max_grad_norm=1.5, micro_batches=3, cpu_memory=7)
