"""The memory tiers: one flat piece each, allocated and touched before the first step."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from offload.config import Tier, format_bytes
from offload.device import CPU, Device
from offload.driver import Driver, PinError
from offload.layout import Buffer, Place, Plan
from offload.numa import touch
from offload.ops import weight_in_use
from offload.program import WHOLE, Lane, Op, Use, Value
from offload.records import Kind

_TIERS: tuple[Tier, ...] = ("device", "cpu")
PIN_BYTES_MAX = 64 << 30
"""Most bytes registered with the device driver in one call (larger calls fail on some drivers)."""

TOLD_BYTES_LEAST = 1 << 30
"""Smallest registered memory of which it is told how long taking it took, and on what pages."""

_PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_WORKSPACE = Place("device", "workspace")
_SUMS = Place("device", "sums")
_NOTHING = torch.empty(0, dtype=torch.uint8)
"""What a closed arena has; made before, as no error may come then."""


def host_tensor(size: int, *, node: int | None = None) -> torch.Tensor:
    """`size` bytes of page-aligned, zeroed, touched CPU memory that forked children do not get.

    It lies on the NUMA node `node`, where one is given. It is freed when the last view of it dies.

    Raises:
        MemoryError: the system does not give it.
    """
    try:
        area = mmap.mmap(-1, max(size, _PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"{format_bytes(size)} of CPU memory were refused by the system ({error.strerror}): "
            "lower Config.cpu_memory or raise the limit (ulimit -v, cgroup)"
        ) from error
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # A kernel without huge pages knows no such advice.
                area.madvise(getattr(mmap, advice))
    # Touched, the memory is ours now, and not in the middle of a step.
    touch(np.frombuffer(area, dtype=np.uint8), node)
    with torch.inference_mode(False):  # What is made in it can never be written outside it.
        return torch.frombuffer(area, dtype=torch.uint8)[:size]


def pieces(size: int, edges: Iterable[int], most: int) -> list[tuple[int, int]]:
    """Cut `size` bytes at some of `edges`, into (offset, bytes) of at most `most` where that goes.

    A stretch between two neighbouring edges is never cut, so one that is longer than `most` is a
    piece by itself.
    """
    cuts = [0]
    ends = sorted({edge for edge in edges if 0 < edge < size} | {size})
    for edge, following in zip(ends, [*ends[1:], size]):
        if following - cuts[-1] > most or edge == size:
            cuts.append(edge)
    return [(start, stop - start) for start, stop in pairwise(cuts) if stop > start]


def zeros_on(device: Device, size: int) -> torch.Tensor:
    """`size` zero bytes in the memory of the compute device."""
    return host_tensor(size) if device.is_host else device.zeros(size)


class Arena:
    """All the memory that an engine takes of one tier."""

    def __init__(
        self,
        size: int,
        device: Device,
        *,
        driver: Driver | None = None,
        edges: Iterable[int] = (),
    ):
        """Take `size` bytes of `device`.

        Args:
            size: bytes.
            device: whose memory.
            driver: of the accelerator that CPU memory is registered with and lies near to.
            edges: offsets at which a registration may end; no transfer crosses one.

        Raises:
            MemoryError: the memory is not there.
        """
        self.notices: list[str] = []
        """What the user should know of it."""
        self.bytes = size
        self._driver = driver
        self._pinned: list[tuple[int, int]] = []
        if driver is None:
            self.tensor = zeros_on(device, size)
            return
        since = time.perf_counter()
        self.tensor = host_tensor(size, node=driver.numa_node())
        touched = time.perf_counter()
        try:
            if size:
                self._pin(driver, pieces(size, edges, PIN_BYTES_MAX))
        except BaseException:  # Ctrl-C: it takes long, and what is unmapped must not stay pinned.
            self.close()
            raise
        if size >= TOLD_BYTES_LEAST:
            self._tell(touched - since, time.perf_counter() - touched)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered with the driver."""
        return sum(size for _, size in self._pinned)

    def view(self, buffer: Buffer) -> torch.Tensor:
        """The bytes of `buffer`, a flat uint8 tensor."""
        return self.tensor[buffer.offset : buffer.offset + buffer.bytes]

    def _pin(self, driver: Driver, parts: Sequence[tuple[int, int]]) -> None:
        """Register the memory, so that copies run beside compute; what cannot be stays pageable."""
        for start, size in parts:
            address = self.tensor.data_ptr() + start
            self._pinned.append((address, size))  # First: whatever comes meanwhile gives it back.
            try:
                driver.pin(address, size)
            except PinError as error:
                self._pinned.pop()
                left = self.bytes - self.pinned_bytes
                self.notices.append(
                    f"{format_bytes(left)} of {format_bytes(self.bytes)} of CPU memory are not "
                    f"pinned ({error}): copies of it hold up the lanes and are slower"
                    f"{error.likely and f'; likely {error.likely}'}"
                )
                return

    def _tell(self, touch_s: float, pin_s: float) -> None:
        """Let it be known what taking the memory took, and what would make it less."""
        self.notices.append(
            f"taking {format_bytes(self.bytes)} of CPU memory took {touch_s + pin_s:.1f} s, once: "
            f"{touch_s:.1f} s until all of it was there, {pin_s:.1f} s to register it with the "
            "device"
        )
        try:
            never = "[never]" in _HUGE_PAGES.read_text(encoding="utf-8")
        except OSError:
            never = True
        if never:
            self.notices.append(
                f"{format_bytes(self.bytes)} of CPU memory lie in pages of {_PAGE_BYTES >> 10} "
                f"KiB, as {_HUGE_PAGES} offers no huge ones: to register it takes longer, and "
                "copies may be slower; as root: echo madvise > that file"
            )

    def close(self) -> None:
        """Give the registration back; the memory goes when its last view dies.

        What the driver raises is raised when all that can be given back is.
        """
        pinned, self._pinned = self._pinned, []
        with contextlib.ExitStack() as each:
            each.callback(setattr, self, "tensor", _NOTHING)  # The last.
            for address, _ in reversed(pinned):
                assert self._driver is not None
                each.callback(self._driver.unpin, address)


class Memory:
    """The arenas of a plan, and every home and slot as a tensor."""

    def __init__(self, plan: Plan, device: Device):
        """Allocate and touch both arenas.

        Raises:
            MemoryError: the memory is not there.
        """
        self._plan = plan
        self._device = device
        self.arenas: dict[Tier, Arena] = {}
        self._homes: dict[tuple[Kind, int], torch.Tensor] = {}
        self._slots: dict[Place, torch.Tensor] = {}
        self._whole: dict[Use, torch.Tensor] = {}
        """Values at the places where they were asked for, each from its first byte to its last."""
        self._more: list[tuple[Tier, Arena]] = []
        """Taken beyond the plan."""
        for tier in _TIERS:
            self.take(tier)

    def take(self, tier: Tier) -> None:
        """Allocate and touch the arena of a tier that has none.

        Raises:
            MemoryError: the memory is not there.
        """
        homes = {
            key: b
            for key, b in self._plan.homes.items()
            if b.tier == tier and self._plan.in_arena(*key)
        }
        slots = {place: b for place, b in self._plan.slots.items() if b.tier == tier}
        if tier == "cpu":
            edges = [b.offset for b in (*homes.values(), *slots.values())]
            edges = [edge for edge in edges if edge % _PAGE_BYTES == 0]
            driver = self._device.driver
            arena = Arena(self._plan.arena_bytes(tier), CPU, driver=driver, edges=edges)
        else:
            arena = Arena(self._plan.arena_bytes(tier), self._device)
        self.arenas[tier] = arena
        self._homes |= {key: arena.view(home) for key, home in homes.items()}
        self._slots |= {place: arena.view(slot) for place, slot in slots.items()}

    def give_back(self, tier: Tier) -> None:
        """Let go of the arena of a tier; what lies there is gone."""
        self._whole.clear()
        for key in [key for key in self._homes if self._plan.homes[key].tier == tier]:
            del self._homes[key]
        for place in [place for place in self._slots if place.tier == tier]:
            del self._slots[place]
        if tier == "device":
            self._device.drain_all()
        for arena in [arena for its, arena in self._more if its == tier]:
            self.less(arena)
        self.arenas.pop(tier).close()
        if tier == "device":
            self._device.trim()

    def more(self, tier: Tier, size: int) -> Arena:
        """Take memory of a tier beyond what the plan has.

        Raises:
            MemoryError: it is not there.
        """
        if tier == "cpu":
            arena = Arena(size, CPU, driver=self._device.driver)
        else:
            arena = Arena(size, self._device)
        self._more.append((tier, arena))
        return arena

    def less(self, arena: Arena) -> None:
        """Give back what `more` has given."""
        self._more = [one for one in self._more if one[1] is not arena]
        arena.close()

    def room_of(self, kind: Kind, unit: int, more: Arena | None) -> torch.Tensor:
        """Where a home could be: in what `more` has given, or where the plan has it."""
        home = self._plan.homes[kind, unit]
        return self.arenas[home.tier].view(home) if more is None else more.tensor

    def move(self, kind: Kind, unit: int, here: torch.Tensor) -> None:
        """Let a home be elsewhere."""
        self._homes[kind, unit] = here
        self._whole.pop(Use(self._plan.home(kind, unit), Value(kind, unit)), None)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know about the memory."""
        return tuple(notice for arena in self.arenas.values() for notice in arena.notices)

    def at(self, use: Use) -> torch.Tensor:
        """The bytes of a value at a place of a memory tier: flat uint8."""
        found = self._whole.get(use)
        if found is not None:
            return found
        place, value = use
        start, size = self.extent(value)
        if place.use == "home":
            found = self._homes[value.kind, value.unit][start : start + size]
        else:
            found = self._slots[place][:size]
        if value.chunk == WHOLE and not torch.is_inference_mode_enabled():
            self._whole[use] = found
        return found

    def weights(self, unit: int) -> torch.Tensor:
        """Where the weights of a unit are in use: its slot, or its home on the device."""
        return self.at(Use(weight_in_use(self._plan, unit), Value("weight", unit)))

    def workspace(self, op: Op) -> torch.Tensor | None:
        """For the temporaries of an update on the device; None where it needs none."""
        return self._slots.get(_WORKSPACE) if op.lane is Lane.COMPUTE else None

    def sums(self) -> torch.Tensor:
        """For the sums of squares of residents: float64, one for each span of a gradient."""
        return self._slots[_SUMS].view(torch.float64)

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
        """Let go of the memory: of all of it, also where an error comes with some."""
        with contextlib.suppress(RuntimeError):  # Of a device that has failed nothing is under way.
            self._device.drain_all()
        self._homes, self._slots, self._whole = {}, {}, {}
        with contextlib.ExitStack() as each:
            for arena in (*self.arenas.values(), *(arena for _, arena in self._more)):
                each.callback(arena.close)


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
