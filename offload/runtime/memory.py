"""The memory tiers: one arena each, allocated and touched before the first step."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

import torch

from offload.planning.layout import FULL, Buffer, Place, Plan
from offload.planning.tiers import Tier, format_bytes
from offload.program.compile import weight_in_use
from offload.program.ops import ALL_CHUNKS, Use, Value
from offload.runtime.device import CPU, Accelerator, Device, PinError

PIN_BYTES_MAX = 64 << 30
"""Most bytes that one call registers with the device driver; larger calls fail on some drivers."""

_TIERS: tuple[Tier, ...] = ("device", "cpu")
_PAGE_BYTES = mmap.PAGESIZE
_WORKSPACE = Place("device", "workspace")
_NOTHING = torch.empty(0, dtype=torch.uint8)
"""The tensor of a closed arena; made at import, as closing must not fail."""


class Memory:
    """The arenas of a plan, and every home and slot as a tensor."""

    def __init__(self, plan: Plan, device: Device):
        """Allocate and touch both arenas, or raise MemoryError."""
        self._plan, self._device = plan, device
        self.arenas: dict[Tier, Arena] = {}
        for tier in _TIERS:
            self.take(tier)

    def take(self, tier: Tier) -> None:
        """Allocate and touch the arena of a tier that has none, or raise MemoryError."""
        plan, device = self._plan, CPU if tier == "cpu" else self._device
        homes = [buffer for key, buffer in plan.homes.items() if plan.in_arena(*key)]
        offsets = [b.offset for b in (*homes, *plan.slots.values()) if b.tier == tier]
        self.arenas[tier] = Arena(
            plan.arena_bytes[tier],
            device,
            driver=self._device.driver if tier == "cpu" else None,
            edges=[offset for offset in offsets if offset % _PAGE_BYTES == 0],
        )

    def give_back(self, tier: Tier) -> None:
        """Free the arena of a tier."""
        if tier == "device":
            self._device.drain_all()
        self.arenas.pop(tier).close()
        if tier == "device":
            self._device.trim()

    @property
    def notices(self) -> tuple[str, ...]:
        """What to tell the user about the memory."""
        return tuple(notice for arena in self.arenas.values() for notice in arena.notices)

    def at(self, use: Use) -> torch.Tensor:
        """The bytes of a value at a place of a memory tier: flat uint8."""
        place, value = use
        start, size = self.extent(value)
        if place.use == "home":
            return self._view(self._plan.homes[value.kind, value.unit])[start : start + size]
        full = place.use in FULL
        size = self._plan.size_at(place, *value[:2]) if full else size
        return self._view(self._plan.slots[place])[:size]

    def _view(self, buffer: Buffer) -> torch.Tensor:
        return self.arenas[buffer.tier].view(buffer)

    def weights(self, unit: int) -> torch.Tensor:
        """The weights of a unit while it computes: its slot, or their home."""
        return self.at(Use(weight_in_use(self._plan, unit), Value("weight", unit)))

    def workspace(self) -> torch.Tensor | None:
        """Scratch memory for updates and sums on the device; None where the plan has none."""
        slot = self._plan.slots.get(_WORKSPACE)
        return None if slot is None else self._view(slot)

    def extent(self, value: Value) -> tuple[int, int]:
        """Offset and bytes, in its unit's buffer, of a value or of one of its chunks."""
        kind, unit, chunk = value
        if chunk == ALL_CHUNKS:
            return 0, self._plan.bytes_of(kind, unit)
        if kind == "weight":
            return self._plan.profile.units[unit].weight_chunks[chunk]
        spec = self._plan.profile.units[unit].chunks[chunk]
        if kind == "gradient":
            return spec.gradient_offset, spec.gradient_bytes
        sizes = self._plan.sizes
        return sizes.record_offsets[unit][chunk], sizes.chunks["state"][unit][chunk]

    def close(self) -> None:
        """Free all arenas."""
        with contextlib.suppress(RuntimeError):  # A failed device has nothing in flight.
            self._device.drain_all()
        for arena in self.arenas.values():
            arena.close()


class Arena:
    """All the memory that an engine takes of one tier."""

    def __init__(
        self,
        size: int,
        device: Device,
        *,
        driver: Accelerator | None = None,
        edges: Iterable[int] = (),
    ):
        """Take `size` bytes of `device`, or raise MemoryError.

        Args:
            driver: of the accelerator with which CPU memory is registered.
            edges: offsets at which a registration may end, as no transfer crosses them.
        """
        self.notices: list[str] = []
        self.bytes = size
        self._driver = driver
        self._pinned: list[tuple[int, int]] = []
        if driver is None:
            self.tensor = zeros_on(device, size)
            return
        self.tensor = host_tensor(size)
        try:
            if size:
                self._pin(driver, pin_ranges(size, edges, PIN_BYTES_MAX))
        except BaseException:  # Also Ctrl-C: memory must not be unmapped while it is pinned.
            self.close()
            raise

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered with the driver."""
        return sum(size for _, size in self._pinned)

    def view(self, buffer: Buffer) -> torch.Tensor:
        """The bytes of `buffer`, flat uint8."""
        return self.tensor[buffer.offset : buffer.offset + buffer.bytes]

    def _pin(self, driver: Accelerator, ranges: Sequence[tuple[int, int]]) -> None:
        """Register the memory, so that copies overlap compute; after a failure the rest is not."""
        for start, size in ranges:
            address = self.tensor.data_ptr() + start
            self._pinned.append((address, size))  # Before the call, so that Ctrl-C in it unpins.
            try:
                driver.pin(address, size)
            except PinError as error:
                self._pinned.pop()
                left = self.bytes - self.pinned_bytes
                self.notices.append(
                    f"{format_bytes(left)} of {format_bytes(self.bytes)} of CPU memory are not "
                    f"pinned, so copies of it block the lanes and are slower: {error}"
                )
                return

    def close(self) -> None:
        """Unpin everything. The memory is freed when its last view dies."""
        pinned, self._pinned = self._pinned, []
        for address, _ in pinned:
            assert self._driver is not None
            self._driver.unpin(address)
        self.tensor = _NOTHING


def host_tensor(size: int) -> torch.Tensor:
    """`size` zero bytes of page-aligned, touched CPU memory, which forked children do not inherit.

    It is freed when its last view dies. Raises MemoryError if the system refuses it.
    """
    try:
        area = mmap.mmap(-1, max(size, _PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{format_bytes(size)} of CPU memory were refused by the system ({error.strerror}): "
            "lower Config.cpu_memory or raise the limit (ulimit -v, cgroup)"
        ) from error
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):  # A kernel without huge pages refuses.
            area.madvise(advice)
    with torch.inference_mode(False):  # An inference tensor could not be written outside of it.
        memory = torch.frombuffer(area, dtype=torch.uint8)
        # Page faults, and a lack of memory, come now, on torch's threads, and not in a step.
        memory[::_PAGE_BYTES].zero_()
        return memory[:size]


def mapped(size: int, directory: str | None = None) -> torch.Tensor:
    """Memory, or that of a file without a name, that the system has back with its last view."""
    if directory is None:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            area = mmap.mmap(file.fileno(), size)
    with torch.inference_mode(False):
        return torch.frombuffer(area, dtype=torch.uint8)


def zeros_on(device: Device, size: int) -> torch.Tensor:
    """`size` zero bytes of the compute device's memory."""
    return host_tensor(size) if device.is_host else device.zeros(size)


def pin_ranges(size: int, edges: Iterable[int], most: int) -> list[tuple[int, int]]:
    """Cut `size` bytes at some of `edges`, as (offset, bytes) of at most `most` bytes each.

    Bytes between neighbouring edges stay together, even if they are more than `most`.
    """
    cuts = [0]
    ends = sorted({edge for edge in edges if 0 < edge < size} | {size})
    for edge, following in zip(ends, [*ends[1:], size]):
        if following - cuts[-1] > most or edge == size:
            cuts.append(edge)
    return [(start, stop - start) for start, stop in pairwise(cuts) if stop > start]


def typed(flat: torch.Tensor, dtype: str, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous view of `shape` into flat bytes at `offset`."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # Autograd refuses to save inference tensors.
            return typed(flat, dtype, offset, shape)
    kind: torch.dtype = getattr(torch, dtype)
    return flat[offset : offset + prod(shape) * kind.itemsize].view(kind).view(tuple(shape))
