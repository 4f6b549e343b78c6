"""Memory tiers: aligned, touched, kept from children, pinned where there is a driver."""

from __future__ import annotations

import gc
import itertools
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.layout import Buffer, Placement, Plan, lay_out
from offload.planning.profile import Parameter, StateChoice, lay_out_unit, profile_of
from offload.program.ops import Use, Value
from offload.runtime import memory as arena
from offload.runtime.device import CPU, Accelerator, Device, PinError
from offload.runtime.memory import Arena, Memory, host_tensor, pin_ranges, typed
from tests.examples import cheap
from tests.training import RESIDENT, attached

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
    with pytest.raises(MemoryError, match=r"TiB of CPU memory.*Config.cpu_memory"):
        host_tensor(1 << 60)


class FakeDriver(Accelerator):
    """Registers memory, or refuses it at a certain call."""

    def __init__(self, fail_at: int = 0):
        super().__init__(CPU.torch_device)
        self.fail_at = fail_at
        self.calls: list[tuple[int, int]] = []
        self.released: list[int] = []

    def pin(self, address: int, size: int) -> None:
        self.calls.append((address, size))
        if len(self.calls) == self.fail_at:
            raise PinError("the driver said no; likely it had no room; make some")

    def unpin(self, address: int) -> None:
        self.released.append(address)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "PIN_BYTES_MAX", 1 << 20)


EDGES = range(0, 3 << 20, 1 << 18)


@pytest.mark.usefixtures("small_pieces")
def test_pinning_in_pieces_and_giving_all_of_them_back() -> None:
    driver, size = FakeDriver(), (5 << 19) + 4096
    made = Arena(size, CPU, driver=driver, edges=EDGES)
    start = made.tensor.data_ptr()
    assert made.pinned_bytes == sum(count for _, count in driver.calls) == size
    assert [address - start for address, _ in driver.calls] == [0, 1 << 20, 2 << 20]
    assert made.notices == []
    made.close()
    assert driver.released == [address for address, _ in driver.calls]
    assert made.tensor.numel() == 0
    made.close()
    assert len(driver.released) == 3


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_notice(fail_at: int) -> None:
    driver = FakeDriver(fail_at=fail_at)
    made = Arena(3 << 20, CPU, driver=driver, edges=EDGES)
    (notice,) = made.notices
    assert f"{4 - fail_at}.00 MiB of 3.00 MiB" in notice
    assert notice.endswith("slower: the driver said no; likely it had no room; make some")
    assert len(driver.calls) == fail_at
    assert made.pinned_bytes == (fail_at - 1) << 20
    made.tensor.fill_(1)
    made.close()
    assert driver.released == [address for address, _ in driver.calls[: fail_at - 1]]


def test_nothing_is_pinned_for_a_cpu_or_of_no_size() -> None:
    driver = FakeDriver()
    Arena(1 << 20, CPU).close()
    Arena(0, CPU, driver=driver).close()
    assert driver.calls == []


@given(
    st.lists(st.integers(1, 50), max_size=40).map(lambda sizes: [*itertools.accumulate(sizes)]),
    st.integers(1, 100),
)
@cheap(100)
def test_pieces_end_at_edges_and_are_as_few_as_they_can_be(ends: list[int], most: int) -> None:
    size = ends[-1] if ends else 0
    cut = pin_ranges(size, ends, most)
    assert [start for start, _ in cut] == [0, *itertools.accumulate(n for _, n in cut)][:-1]
    assert sum(count for _, count in cut) == size
    assert {start + count for start, count in cut} <= set(ends)
    widths = {end: end - start for start, end in itertools.pairwise([0, *ends])}
    for start, count in cut:
        assert count <= most or widths[start + count] == count
    for (_, one), (start, _) in itertools.pairwise(cut):
        first = next(end - start for end in ends if end > start)
        assert one + first > most


def test_homes_and_slots_are_never_cut_by_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "PIN_BYTES_MAX", 3 * 4096)
    driver = FakeDriver()
    plan, device = small_plan(), Device(CPU.torch_device)
    device.driver = driver
    memory = Memory(plan, device)
    start = memory.arenas["cpu"].tensor.data_ptr()
    ranges = [(address - start, address - start + size) for address, size in driver.calls]
    assert len(ranges) > 3
    for buffer in [*plan.homes.values(), *plan.slots.values()]:
        if buffer.tier == "cpu":
            within = [a <= buffer.offset and buffer.offset + buffer.bytes <= b for a, b in ranges]
            assert sum(within) == 1


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


def small_plan() -> Plan:
    units = [
        lay_out_unit(
            f"u{i}",
            [
                Parameter("a", (70, 31), "bfloat16", True),
                Parameter("b", (9,), "float32", i % 2 == 0),
            ],
        )
        for i in range(3)
    ]
    placements = [
        Placement("cpu", "cpu", "nvme"),
        Placement("device", "device", "cpu"),
        Placement("nvme", "nvme", "device"),
    ]
    budgets: Any = {"device": 1 << 30, "cpu": 1 << 30, "nvme": 1 << 30}
    return lay_out(
        profile_of(units),
        placements,
        budgets=budgets,
        clips=False,
        states=StateChoice(),
        early=True,  # Else the second is a resident, whose memory is torch's.
    )


def test_every_home_and_slot_is_its_own_stretch_of_aligned_memory() -> None:
    plan = small_plan()
    units = plan.profile.units
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


class Watched(Device):
    """Says when it was waited for."""

    def __init__(self, free: int = 0, fails: bool = False):
        super().__init__(CPU.torch_device)
        self.free, self.fails, self.drained = free, fails, 0

    def free_bytes(self) -> int:
        return self.free

    def drain_all(self) -> None:
        self.drained += 1
        if self.fails:
            raise RuntimeError("a sticky error")


@pytest.mark.parametrize("fails", [False, True])
def test_memory_goes_when_the_device_is_through_or_has_failed(fails: bool) -> None:
    device = Watched(fails=fails)
    memory = Memory(small_plan(), device)
    memory.close()
    assert device.drained == 1
    assert memory.arenas["device"].tensor.numel() == 0


def test_the_memory_of_a_tier_goes_when_the_device_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Watched()
    memory = Memory(small_plan(), device)
    close = Arena.close
    seen = []
    monkeypatch.setattr(Arena, "close", lambda self: (seen.append(device.drained), close(self)))
    memory.give_back("device")
    assert seen == [1]


def test_copies_of_parameters_take_a_tenth_of_the_device_they_lie_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.attachment.compute_device", lambda: Watched(free=50 << 30))
    with attached(RESIDENT, tmp_path) as run:
        assert run.engine.snapshots._limit_bytes == 5 << 30
