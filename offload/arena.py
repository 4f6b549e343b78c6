"""The memory tiers: one flat piece each, allocated and touched before the first step."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from offload.config import Tier, format_bytes
from offload.layout import Buffer, Kind, Place, Plan
from offload.program import WHOLE, Use, Value, weight_in_use

PIN_BYTES_MAX = 64 << 30
"""Most bytes registered with the device driver in one call (larger calls fail on some drivers)."""

_PAGE_BYTES = mmap.PAGESIZE


def compute_device() -> torch.device:
    """The accelerator that torch finds, else the CPU."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def device_free_bytes(device: torch.device) -> int | None:
    """Free memory of an accelerator in bytes, or None where the compute device is the CPU."""
    if device.type == "cpu":
        return None
    free, _ = getattr(torch, device.type).mem_get_info(device)
    return int(free)


def host_tensor(size: int) -> torch.Tensor:
    """`size` bytes of page-aligned, zeroed, touched CPU memory that forked children do not get.

    The memory is freed when the last view of it dies.

    Raises:
        MemoryError: the system does not give it.
    """
    try:
        area = mmap.mmap(-1, max(size, _PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{format_bytes(size)} of CPU memory were refused by the system ({error.strerror}): "
            "lower --cpu-memory or raise the limit (ulimit -v, cgroup)"
        ) from error
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            area.madvise(getattr(mmap, advice))
    # One write a page makes the memory ours now, not in the middle of a step.
    np.frombuffer(area, dtype=np.uint8)[::_PAGE_BYTES] = 0
    with torch.inference_mode(False):  # What is made in it can never be written outside it.
        return torch.frombuffer(area, dtype=torch.uint8)[:size]


def _cuda_runtime() -> Any:
    cudart: Any = torch.cuda.cudart
    return cudart()


class Arena:
    """All the memory that an engine takes of one tier."""

    def __init__(self, size: int, device: torch.device, *, pin_for: torch.device | None = None):
        """Take `size` bytes of `device`; CPU memory is registered with the driver of `pin_for`.

        Raises:
            MemoryError: the memory is not there.
        """
        self.notice: str | None = None
        self.bytes = size
        if device.type == "cpu":
            self.tensor = host_tensor(size)
        else:
            self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        self._pinned: list[int] = []
        if pin_for is not None and pin_for.type == "cuda":
            self._pin()

    def view(self, buffer: Buffer) -> torch.Tensor:
        """The bytes of `buffer`, a flat uint8 tensor."""
        return self.tensor[buffer.offset : buffer.offset + buffer.bytes]

    def _pin(self) -> None:
        """Register the memory, so that copies run beside compute; on failure go on pageable."""
        runtime = _cuda_runtime()
        for start in range(0, self.bytes, PIN_BYTES_MAX):
            address = self.tensor.data_ptr() + start
            code = runtime.cudaHostRegister(address, min(PIN_BYTES_MAX, self.bytes - start), 0)
            if int(code) != 0:
                self.notice = (
                    f"CPU memory could not be pinned (cudaHostRegister returned {int(code)}): "
                    "copies will be slower; raise the memlock limit (ulimit -l)"
                )
                return
            self._pinned.append(address)

    def close(self) -> None:
        """Give the registration back; the memory goes when its last view dies."""
        for address in self._pinned:
            _cuda_runtime().cudaHostUnregister(address)
        self._pinned = []
        self.tensor = torch.empty(0, dtype=torch.uint8)


class Memory:
    """The arenas of a plan, and every home and slot as a tensor."""

    def __init__(self, plan: Plan, device: torch.device):
        """Allocate and touch both arenas.

        Raises:
            MemoryError: the memory is not there.
        """
        self._plan = plan
        self._devices: dict[Tier, torch.device] = {"device": device, "cpu": torch.device("cpu")}
        self.arenas: dict[Tier, Arena] = {}
        self._homes: dict[tuple[Kind, int], torch.Tensor] = {}
        self._slots: dict[Place, torch.Tensor] = {}
        for tier in self._devices:
            self.take(tier)

    def take(self, tier: Tier) -> None:
        """Allocate and touch the arena of a tier that has none.

        Raises:
            MemoryError: the memory is not there.
        """
        device = self._devices["device"]
        pin_for = device if tier == "cpu" and device.type != "cpu" else None
        arena = Arena(self._plan.arena_bytes(tier), self._devices[tier], pin_for=pin_for)
        self.arenas[tier] = arena
        for key, home in self._plan.homes.items():
            if home.tier == tier:
                self._homes[key] = arena.view(home)
        for place, slot in self._plan.slots.items():
            if slot.tier == tier:
                self._slots[place] = arena.view(slot)

    def give_back(self, tier: Tier) -> None:
        """Let go of the arena of a tier; what lies there is gone."""
        for key in [key for key, home in self._plan.homes.items() if home.tier == tier]:
            del self._homes[key]
        for place in [place for place in self._slots if place.tier == tier]:
            del self._slots[place]
        self.arenas.pop(tier).close()
        if self._devices[tier].type != "cpu":
            torch.accelerator.empty_cache()  # Else torch keeps it for itself.

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know about the memory."""
        return tuple(arena.notice for arena in self.arenas.values() if arena.notice)

    def at(self, use: Use) -> torch.Tensor:
        """The bytes of a value at a place of a memory tier: flat uint8."""
        place, value = use
        start, size = self.extent(value)
        if place.use == "home":
            return self._homes[value.kind, value.unit][start : start + size]
        return self._slots[place][:size]

    def weights(self, unit: int) -> torch.Tensor:
        """Where the weights of a unit are in use: its slot, or its home on the device."""
        return self.at(Use(weight_in_use(self._plan, unit), Value("weight", unit)))

    def extent(self, value: Value) -> tuple[int, int]:
        """Offset and size in bytes of a value, or of one of its chunks, in its unit's buffer."""
        kind, unit, chunk = value
        if chunk == WHOLE:
            return 0, self._plan.bytes_of(kind, unit)
        if kind == "weight":
            return self._plan.profile.units[unit].pieces[chunk]
        piece = self._plan.profile.units[unit].chunks[chunk]
        if kind == "gradient":
            return piece.gradient_offset, piece.gradient_bytes
        return self._plan.record_offset(unit, chunk), self._plan.record_bytes(unit, chunk)

    def close(self) -> None:
        """Let go of the memory."""
        self._homes, self._slots = {}, {}
        for arena in self.arenas.values():
            arena.close()


def typed(flat: torch.Tensor, dtype: str, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous view of `shape` into flat bytes at `offset`."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # Autograd would never save a view made in it.
            return typed(flat, dtype, offset, shape)
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    piece = flat[offset : offset + count * kind.itemsize]
    return piece.view(kind).view(tuple(shape))
