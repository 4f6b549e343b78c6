"""A reader of saves that is written from docs/formats.md alone, and shares no code with the writer.

    python tests/save_reader.py DIRECTORY

needs NumPy, and nothing else.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any

import numpy as np

POLYNOMIAL = 0x82F63B78
"""Of CRC32C, with the bits of each byte from the lowest on."""

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
}
"""What NumPy has no type for is its bits."""


def _table() -> list[int]:
    found = []
    for one in range(256):
        for _ in range(8):
            one = one >> 1 ^ (POLYNOMIAL if one & 1 else 0)
        found.append(one)
    return found


TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["__tuple__"]:
        return tuple(decoded(one) for one in value["__tuple__"])
    if list(value) == ["__tensor__"]:
        return value["__tensor__"][1]
    if list(value) == ["__items__"]:
        return {decoded(key): decoded(one) for key, one in value["__items__"]}
    return {key: decoded(one) for key, one in value.items()}


def read_set(directory: str, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a set by name; each checksum is compared."""
    with open(os.path.join(directory, f"{name}.safetensors.index.json"), encoding="utf-8") as file:
        index = json.load(file)
    found = {}
    for shard in sorted(set(index["weight_map"].values())):
        with open(os.path.join(directory, shard), "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            content = file.read()
        header.pop("__metadata__")
        for tensor, one in header.items():
            assert index["weight_map"][tensor] == shard
            start, stop = one["data_offsets"]
            values = content[start:stop]
            assert f"{crc32c(values):08x}" == index["metadata"]["crc32c"][tensor], tensor
            found[tensor] = np.frombuffer(values, DTYPES[one["dtype"]]).reshape(one["shape"])
        assert max(one["data_offsets"][1] for one in header.values()) == len(content)
    assert found.keys() == index["weight_map"].keys()
    assert sum(one.nbytes for one in found.values()) == index["metadata"]["total_size"]
    return found


def read(directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run, and the sets of tensors by their names."""
    with open(os.path.join(directory, "run.json"), encoding="utf-8") as file:
        whole = json.load(file)
    run = whole["run"]
    text = json.dumps(run, sort_keys=True, separators=(",", ":"))
    assert f"{crc32c(text.encode('ascii')):08x}" == whole["crc32c"]
    assert run["format"] == 1
    sets = {"model": read_set(directory, "model")}
    for name, state in run.get("optimizer", {"states": {}})["states"].items():
        for slot in state["slots"]:
            if slot not in sets:
                sets[slot] = read_set(directory, slot)
            groups = slot.endswith("_scale")  # One dimension, whatever the parameter has.
            assert groups or sets[slot][name].shape == sets["model"][name].shape
    return run, sets


def masters(sets: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The fp32 masters of parameters with a residue, which are of bfloat16."""
    found = {}
    for name, residue in sets["residue"].items():
        bits = (sets["model"][name].astype(np.uint32) << 16) + residue.astype(np.int32).astype(
            "<u4"
        )
        found[name] = bits.view(np.float32)
    return found


if __name__ == "__main__":
    for set_name, tensors in read(sys.argv[1])[1].items():
        print(set_name, len(tensors), "tensors")
