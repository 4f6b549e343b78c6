"""Memory tiers: aligned, touched, kept from children, pinned where there is a driver."""

from __future__ import annotations

import gc
import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from offload import arena
from offload.arena import Arena, Memory, host_tensor, typed
from offload.device import CPU
from offload.layout import Buffer, Placement, lay_out
from offload.profile import StateChoice, Wanted, lay_out_unit, profile_of
from offload.program import Use, Value

CUDA = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE


def mapping_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that holds an address: /proc/self/smaps."""
    fields: dict[str, str] = {}
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if not first.endswith(":"):
                start, stop = (int(part, 16) for part in first.split("-"))
                inside = start <= address < stop
            elif inside:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
    return fields


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, (4 << 20) + 17])
def test_host_memory_is_aligned_zeroed_and_of_the_size_asked(size: int) -> None:
    memory = host_tensor(size)
    assert (memory.dtype, memory.shape) == (torch.uint8, (size,))
    assert memory.is_contiguous()
    assert not memory.any()
    if size:
        assert memory.data_ptr() % 4096 == 0


def test_host_memory_is_ours_from_the_start_and_not_of_children() -> None:
    size = 8 << 20
    memory = host_tensor(size)
    found = mapping_of(memory.data_ptr())
    assert int(found["Rss"].split()[0]) * 1024 >= size
    assert "dc" in found["VmFlags"].split()  # do not copy on fork


def test_host_memory_goes_with_its_last_view() -> None:
    memory = host_tensor(64 << 20)
    address = memory.data_ptr()
    view = memory[PAGE : 2 * PAGE].view(torch.int16)
    del memory
    gc.collect()
    assert mapping_of(address)
    view.fill_(3)
    del view
    gc.collect()
    resident = int(mapping_of(address).get("Rss", "0 kB").split()[0]) * 1024
    assert resident < 64 << 20


def test_memory_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(MemoryError, match=r"TiB of CPU memory.*--cpu-memory"):
        host_tensor(1 << 60)


@dataclass
class FakeRuntime:
    """A CUDA runtime that registers host memory, or fails at a certain call."""

    fail_at: int = 0
    calls: list[tuple[int, int]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.calls.append((address, size))
        return 2 if len(self.calls) == self.fail_at else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.released.append(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    def make(**options: Any) -> FakeRuntime:
        fake = FakeRuntime(**options)
        monkeypatch.setattr(arena, "_cuda_runtime", lambda: fake)
        monkeypatch.setattr(arena, "PIN_BYTES_MAX", 1 << 20)
        return fake

    return make


def test_pinning_in_pieces_and_giving_all_of_them_back(
    runtime: Callable[..., FakeRuntime],
) -> None:
    fake, size = runtime(), (5 << 19) + 4096
    made = Arena(size, CPU, pin_for=CUDA)
    start = made.tensor.data_ptr()
    assert sum(count for _, count in fake.calls) == size
    assert [address - start for address, _ in fake.calls] == [0, 1 << 20, 2 << 20]
    assert max(count for _, count in fake.calls) <= 1 << 20
    assert made.notice is None
    made.close()
    assert fake.released == [address for address, _ in fake.calls]
    made.close()
    assert len(fake.released) == 3


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_notice(
    fail_at: int, runtime: Callable[..., FakeRuntime]
) -> None:
    fake = runtime(fail_at=fail_at)
    made = Arena(3 << 20, CPU, pin_for=CUDA)
    assert made.notice is not None
    assert "cudaHostRegister returned 2" in made.notice
    assert "ulimit -l" in made.notice
    made.tensor.fill_(1)
    made.close()
    assert fake.released == [address for address, _ in fake.calls[: fail_at - 1]]


def test_nothing_is_pinned_for_a_cpu_or_of_no_size(runtime: Callable[..., FakeRuntime]) -> None:
    fake = runtime()
    Arena(1 << 20, CPU).close()
    Arena(1 << 20, CPU, pin_for=CPU.torch_device).close()
    Arena(0, CPU, pin_for=CUDA).close()
    assert fake.calls == []


def test_typed_views_share_memory() -> None:
    flat = host_tensor(4096)
    one = typed(flat, "bfloat16", 256, (3, 5))
    one.fill_(1)
    scalar = typed(flat, "float32", 512, ())
    scalar.fill_(2)
    assert (one.shape, scalar.shape) == ((3, 5), ())
    assert flat[256:286].view(torch.bfloat16).eq(1).all()
    assert not flat[286:512].any()
    assert flat[512:516].view(torch.float32).item() == 2


def test_every_home_and_slot_is_its_own_stretch_of_aligned_memory() -> None:
    units = [
        lay_out_unit(
            f"u{i}",
            [Wanted("a", (70, 31), "bfloat16", True), Wanted("b", (9,), "float32", i % 2 == 0)],
        )
        for i in range(3)
    ]
    placements = [
        Placement("cpu", "cpu", "nvme"),
        Placement("device", "device", "cpu"),
        Placement("nvme", "nvme", "device"),
    ]
    budgets: Any = {"device": 1 << 30, "cpu": 1 << 30, "nvme": 1 << 30}
    plan = lay_out(
        profile_of(units), placements, budgets=budgets, clips=False, states=StateChoice()
    )
    memory = Memory(plan, CPU)
    buffers: list[Buffer] = [*plan.homes.values(), *plan.slots.values()]
    spans = []
    for buffer in buffers:
        view = memory.arenas[buffer.tier].view(buffer)
        assert view.data_ptr() % 4096 == 0
        assert view.numel() == buffer.bytes
        spans.append((view.data_ptr(), view.data_ptr() + view.numel()))
    spans.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    for unit, spec in enumerate(units):
        for kind in ("weight", "gradient", "state"):
            if plan.home(kind, unit).tier == "nvme":
                continue
            home = plan.home(kind, unit)
            whole = memory.at(Use(home, Value(kind, unit)))
            parts = [memory.at(Use(home, Value(kind, unit, c))) for c in range(len(spec.chunks))]
            assert all(part.data_ptr() % 4096 == 0 for part in parts)
            trained = sum(part.numel() for part in parts)
            assert trained == whole.numel() or kind == "weight"
            assert parts[0].data_ptr() == whole.data_ptr()
    assert (
        memory.weights(1).data_ptr()
        == memory.at(Use(plan.home("weight", 1), Value("weight", 1))).data_ptr()
    )
    assert (
        memory.weights(0).data_ptr()
        != memory.at(Use(plan.home("weight", 0), Value("weight", 0))).data_ptr()
    )
    assert memory.notices == ()
    memory.close()
    memory.close()
