"""CRC32C: every implementation against the standard's values and another library's."""

from __future__ import annotations

import threading
import time
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_adam import choice, crc32c

EVERY = choice.available()
COMPILED = [name for name in EVERY if name != "python"]

every_kernel = pytest.mark.parametrize("kernel", EVERY)
needs_kernels = pytest.mark.skipif(not COMPILED, reason="no kernel is compiled")

READ_10_COMMAND = bytes.fromhex(
    "01c00000000000000000000000000000140000000000040000000014000000182800000000000000"
    "0200000000000000"
)
STANDARD = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    READ_10_COMMAND: 0xD9963A56,
    b"123456789": 0xE3069283,
    b"": 0,
}
"""RFC 3720, B.4, and what is usually asked of a CRC."""


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, 5 << 20, dtype=np.uint8)


def of_another_library(data: Any, value: int = 0) -> int:
    return int(google_crc32c.extend(value, bytes(data)))


@every_kernel
def test_the_values_of_the_standard(kernel: str) -> None:
    with choice.forced(kernel):
        for data, want in STANDARD.items():
            assert crc32c(data) == want, data


@every_kernel
def test_every_size_at_several_alignments(kernel: str, noise: np.ndarray) -> None:
    with choice.forced(kernel):
        for size in range(601):
            for start in (0, 1, 7, 64 - size % 9):
                data = noise[start : start + size]
                value = size * 0x9E3779B1 % 2**32
                assert crc32c(data, value) == of_another_library(data, value), (size, start)


@every_kernel
def test_large_buffers(kernel: str, noise: np.ndarray) -> None:
    kib = 1 << 10
    sizes = [767, 768, 3 * 4096, 13 * kib + 5, 64 * kib - 1, 65 * kib, kib * kib, 5 * kib * kib]
    for size, start in zip((*sizes, 3 * kib * kib + 1), (0, 3, 8, 1, 63, 64, 5, 0, 9)):
        data = noise[start : start + size]
        with choice.forced(kernel):
            assert crc32c(data, 5) == of_another_library(data, 5), (size, start)


@every_kernel
@given(data=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 3000), max_size=3))
def test_parts_make_the_whole(kernel: str, data: bytes, cuts: list[int]) -> None:
    ends = sorted([*(min(cut, len(data)) for cut in cuts), len(data)])
    parts = [data[start:end] for start, end in zip([0, *ends], ends)]
    continued = 0
    with choice.forced(kernel):
        for part in parts:
            continued = crc32c(part, continued)
    assert continued == of_another_library(data)


@every_kernel
def test_whatever_holds_bytes(kernel: str) -> None:
    array = np.arange(6000, dtype=np.float32).reshape(60, 100)
    want = of_another_library(array.tobytes())
    tensor = torch.from_numpy(array)
    read_only = array.copy()
    read_only.flags.writeable = False
    parameter = torch.nn.Parameter(tensor.clone())
    words = memoryview(array)
    same = [array, read_only, tensor, parameter, words, array.tobytes(), bytearray(array.tobytes())]
    with choice.forced(kernel):
        for buffer in same:
            assert crc32c(buffer) == want, type(buffer)
        half = tensor.to(torch.bfloat16)
        assert crc32c(half) == of_another_library(half.view(torch.int16).numpy().tobytes())
        assert crc32c(half[30:]) == of_another_library(half[30:].view(torch.int16).numpy())
        for empty in (b"", np.empty(0, "i8"), torch.empty(0, 3), memoryview(bytearray())):
            assert crc32c(empty, 77) == 77
        assert crc32c(np.float64(2.5)) == crc32c(torch.tensor(2.5, dtype=torch.float64))


def test_what_cannot_be_is_refused() -> None:
    array = np.zeros((4, 6))
    strided = [array.T, array[:, ::2], torch.zeros(4, 6).T, memoryview(bytes(9))[::2]]
    for buffer in (*strided, torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match=r"asked for the CRC32C of contiguous bytes.*; try: "):
            crc32c(buffer)
    for value in (-1, 2**32):
        with pytest.raises(ValueError, match=r"asked for .*; found .*; likely cause: .*; try: "):
            crc32c(b"x", value)
    with pytest.raises(TypeError):
        crc32c("text")


@needs_kernels
def test_other_threads_run_meanwhile(noise: np.ndarray) -> None:
    """A thread that needs the GIL all the time gets on while a long call lasts."""
    large = np.resize(noise, 96 << 20)
    turns = 0
    seen = []

    def long_call() -> None:
        with choice.forced("portable"):  # the slowest: some tens of milliseconds
            seen.append(turns)
            crc32c(large)
            seen.append(turns)

    thread = threading.Thread(target=long_call)
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert seen[1] - seen[0] >= 3, seen
