"""The one file that knows CUDA by name, on a runtime of our own; and that it is the only one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offload import driver, numa
from offload.driver import Driver, PinError, driver_of

ROOT = Path(__file__).parents[1]
CUDA = torch.device("cuda", 1)
REFUSED = 2  # cudaErrorMemoryAllocation


@dataclass
class FakeRuntime:
    """A CUDA runtime whose calls return errors and leave them pending, as the real one's do."""

    fails: bool = False
    pending: int = 0
    calls: list[tuple[str, int, int, int]] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self._returned()

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0, 0))
        return self._returned()

    def cudaGetErrorString(self, code: int) -> str:
        return {REFUSED: "out of memory"}[code]

    def get_last_error(self) -> int:
        last, self.pending = self.pending, 0
        return last

    def _returned(self) -> int:
        code = REFUSED if self.fails else 0
        self.pending = code or self.pending
        return code


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(driver, "_runtime", lambda: fake)
    monkeypatch.setattr(driver, "_last_error", lambda: fake.get_last_error)
    return fake


def test_memory_is_registered_and_given_back(runtime: FakeRuntime) -> None:
    driver_of(CUDA).pin(4096, 1 << 20)
    driver_of(CUDA).unpin(4096)
    assert runtime.calls == [("register", 4096, 1 << 20, 0), ("unregister", 4096, 0, 0)]


def test_a_refused_registration_says_why_and_leaves_nothing_pending(runtime: FakeRuntime) -> None:
    runtime.fails = True
    with pytest.raises(PinError, match=r"cudaHostRegister of 1.00 MiB returned 2, out of memory"):
        driver_of(CUDA).pin(4096, 1 << 20)
    assert runtime.pending == 0


def test_a_failure_to_give_back_is_taken_out_too(runtime: FakeRuntime) -> None:
    runtime.fails = True
    driver_of(CUDA).unpin(4096)
    assert runtime.pending == 0


def test_without_a_library_a_kernel_finds_the_error_and_is_thrown_away(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.fails = True
    monkeypatch.setattr(driver, "_last_error", lambda: None)

    def launched(*_: object, **__: object) -> None:
        if runtime.get_last_error():
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", launched)
    with pytest.raises(PinError):
        driver_of(CUDA).pin(4096, 1 << 20)
    assert runtime.pending == 0


def test_the_error_is_asked_of_the_library_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, opened = tmp_path / "maps", []
    monkeypatch.setattr(driver, "_MAPS", maps)

    def load(path: str) -> Any:
        opened.append(path)
        return SimpleNamespace(cudaGetLastError=lambda: 7, hipGetLastError=lambda: 8)

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    line = "7f00-7f01 r-xp 00000000 08:01 42    {}\n"
    assert driver._last_error() is None
    maps.write_text(line.format("/usr/lib/libc.so.6"))
    assert driver._last_error() is None
    for path, code in (("/opt/x/libcudart.so.12", 7), ("/opt/rocm/lib/libamdhip64.so.6", 8)):
        maps.write_text(line.format("/usr/lib/libc.so.6") + line.format(path))
        found = driver._last_error()
        assert found is not None
        assert found() == code
    assert opened == ["/opt/x/libcudart.so.12", "/opt/rocm/lib/libamdhip64.so.6"]


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_device_is_that_of_its_slot(
    told: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = tmp_path / "0001:0a:00.0"
    slot.mkdir()
    if told is not None:
        (slot / "numa_node").write_text(told)
    monkeypatch.setattr(driver, "_PCI_DEVICES", tmp_path)
    found = SimpleNamespace(pci_domain_id=1, pci_bus_id=10, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert driver_of(CUDA).numa_node() == node
    del found.pci_domain_id  # As in versions of torch that do not tell it.
    assert driver_of(CUDA).numa_node() is None


class FakeEvent:
    """Keeps what it was asked for; without a stream it would take another device's."""

    def __init__(self, *, blocking: bool) -> None:
        self.blocking = blocking
        self.asked: list[tuple[str, Any]] = []

    def record(self, stream: Any) -> None:
        self.asked.append(("record", stream))

    def wait(self, stream: Any) -> None:
        self.asked.append(("wait", stream))

    def synchronize(self) -> None:
        self.asked.append(("synchronize", None))

    def query(self) -> bool:
        return True


def test_fences_block_without_spinning_on_streams_of_their_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeEvent] = []

    def make(**options: Any) -> FakeEvent:
        made.append(FakeEvent(**options))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    one = driver_of(CUDA)
    fence = one.fence(one.stream())
    fence.wait()
    fence.synchronize()
    assert fence.query()
    assert made[0].blocking
    ours = "current of cuda:1"
    assert made[0].asked == [("record", ours), ("wait", ours), ("synchronize", None)]


def test_other_accelerators_do_without() -> None:
    other = driver_of(torch.device("xpu", 0))
    assert type(other) is Driver
    assert other.numa_node() is None
    with pytest.raises(PinError, match="xpu"):
        other.pin(4096, 4096)


# -- the node's memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "numbers"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set())],
)
def test_lists_of_processors(listed: str, numbers: set[int]) -> None:
    assert numa._numbers(listed) == numbers


def test_a_node_gives_its_processors_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    mine = numa.processors(None)
    one = min(mine)
    for node, listed in enumerate((f"{one}\n", "100000-100007\n", "nonsense\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(listed)
    assert numa.processors(0) == {one}
    assert all(numa.processors(node) == mine for node in (1, 2, 3))


@pytest.mark.parametrize("node", [None, 0, 7])
@pytest.mark.parametrize("size", [1, 4096, 4097, (3 << 20) + 5])
def test_every_page_is_touched_and_nothing_else(
    size: int, node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "PART_BYTES_LEAST", 1 << 20)
    monkeypatch.setattr(numa, "processors", lambda node: frozenset({0, 1}))
    before = numa.os.sched_getaffinity(0)
    memory = np.ones(size, np.uint8)
    numa.touch(memory, node)
    assert (np.flatnonzero(memory == 0) == np.arange(0, size, 4096)).all()
    assert numa.os.sched_getaffinity(0) == before


# -- names ------------------------------------------------------------------------------------

NAMED = re.compile(r"cuda|nvidia|nccl|\bhip|rocm", re.IGNORECASE)
TRAPPED = {"is_cuda", "cuda"}
"""Of torch's tensors, whose every name the trap answers to."""


def named(source: str) -> Iterator[str]:
    """Names, attributes and texts of a program that name the platform; prose does not count."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute):
            found = node.attr
        elif isinstance(node, ast.Name):
            found = node.id
        elif isinstance(node, ast.alias):
            found = node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = "" if id(node) in prose else node.value
        if NAMED.search(found):
            yield found


def test_no_other_file_of_the_engine_names_a_platform() -> None:
    files = [
        file
        for package in ("offload", "cpu_adam", "aio")
        for file in ROOT.glob(f"{package}/**/*.py")
    ]
    found = {str(file.relative_to(ROOT)): {*named(file.read_text())} for file in files}
    assert found.pop("offload/driver.py")
    assert found.pop("offload/cli/findings.py")  # What a person reads.
    assert found.pop("offload/resting.py") == TRAPPED
    assert {file: names for file, names in found.items() if names} == {}


def test_names_are_found_where_they_are() -> None:
    source = '"""cuda"""\nimport torch.cuda\ntorch.cuda.Event\nx = "cuda:0"\ndef f():\n    "CUDA"\n'
    assert sorted(named(source)) == ["cuda", "cuda:0", "torch.cuda"]
