"""Sleep and wake: everything an engine holds of the fast tiers goes to a slower one, and back.

[Note: Sleep]
Between two phases of a job that share a device (a policy is trained, then sampled from elsewhere)
an engine gives all its memory of the faster tiers back. What lives there goes to a swap area, byte
for byte: CPU memory beside the cpu tier, or a file of its own on nvme, checked like all that is
stored. Slots hold nothing that the homes do not. Asleep, whatever needs a value is refused: `wake`
takes the memory, at a time of the user's choice. Sleeping and waking change no bit, and either is
done wholly or not at all: a drive that is full leaves the engine awake, memory that others have
taken leaves it asleep. Graphs from before are invalid: torch refuses their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from offload.config import BUDGETS
from offload.model.access import ParameterAccess
from offload.model.engine import Engine, engine_of
from offload.model.units import FlatUnit, count_change, make_plain
from offload.planning.layout import Placement, Plan, file_layout
from offload.planning.machine import measured_speeds
from offload.planning.planner import BudgetError
from offload.planning.profile import KINDS
from offload.planning.tiers import TIERS, Tier, format_bytes
from offload.program.ops import Value
from offload.program.schedule import Fence
from offload.runtime.device import CPU, Device
from offload.runtime.entry import entry
from offload.runtime.executor import Executor
from offload.runtime.memory import Arena, host_tensor, typed
from offload.runtime.store import Store

PIECE_BYTES = 32 << 20
"""Of each of the two registered pieces through which bytes go between device and CPU memory."""


def sleep(model: nn.Module, tier: Literal["cpu", "nvme"] = "cpu") -> None:
    """Put all values of an attached model into `tier`, and give the memory above it back.

    Returns when it is done. Until `wake` only what is known without values (shapes, names, the
    report) may be asked for. Gradients and optimizer states sleep too.

    Args:
        model: attached, and awake.
        tier: `cpu` gives device memory back, `nvme` that of the CPU too.

    Raises:
        ValueError: the model is not attached; `tier` is no such tier, or there is no nvme_path.
        RuntimeError: it is asleep already, or an update has begun whose step() is due.
        BudgetError: what is to sleep does not fit the budget of `tier`.
        OSError, MemoryError: the drive or the memory failed; the model is awake as before.
    """
    if tier not in ("cpu", "nvme"):
        raise ValueError(f"offload.sleep: tier is {tier!r}, expected 'cpu' or 'nvme'")
    engine = engine_of(model)
    directories = engine.nvme_path if tier == "nvme" else ()
    if tier == "nvme" and not directories:
        raise ValueError(
            "offload.sleep: tier is nvme, but the model was attached without nvme_path: attach it "
            "with Config(nvme_path=...), which alone puts nothing there that fits elsewhere, or "
            "let it sleep in cpu memory"
        )
    with engine.lock:  # A step of another thread's comes before, or finds it asleep.
        engine.settle()
        _put_to_sleep(engine, TIERS[: TIERS.index(tier)], directories)


def wake(model: nn.Module) -> None:
    """Take the memory of a sleeping model again, and put all its values back.

    Raises:
        ValueError: the model is not attached.
        RuntimeError: it is not asleep.
        BudgetError, MemoryError: others have the memory; the model sleeps on.
        OSError: the drive failed; the model sleeps on.
    """
    engine = engine_of(model)
    with engine.lock:
        area = engine.executor.swap_area
        if not isinstance(area, SwapArea):
            raise RuntimeError(
                "offload.wake: the model is not asleep: offload.sleep(model) goes first"
            )
        _wake_up(engine, area)


@entry
def _put_to_sleep(engine: Engine, given: tuple[Tier, ...], directories: tuple[str, ...]) -> None:
    executor, plan = engine.executor, engine.plan
    _let_go_of_all(engine)
    area = SwapArea(executor, given, directories)
    try:
        with _copying(executor.device, area.largest) as copy:
            for value in area.values():
                if plan.in_arena(value.kind, value.unit):
                    area.put(value, executor.read_home(value), executor.step, copy)
                else:
                    flat = area.room(value)
                    _gather(engine.units[value.unit], value, flat, copy)
                    area.keep(value, flat, executor.step)
    except BaseException:
        area.awake()
        raise
    for index in plan.residents:
        area.gradients[index] = _rest(engine, engine.units[index])
    for tier in given:
        executor.memory.give_back(tier)
    executor.swap_area = area
    area.asleep()


def _let_go_of_all(engine: Engine) -> None:
    """Let nothing be in use, under way, edited, shown, or remembered of the slots."""
    engine.end_pass(finished=False)
    engine.snapshots.boundary()
    engine.gradients.let_go()
    engine.gradients.forget_places()
    engine.passes.forget()
    engine.executor.idle()
    for unit in engine.units:
        unit.close()


@entry
def _wake_up(engine: Engine, area: SwapArea) -> None:
    executor, taken, fresh = engine.executor, list[Tier](), dict[Value, dict[int, torch.Tensor]]()
    area.waking()
    try:
        for tier in area.given:
            executor.memory.take(tier)
            taken.append(tier)
        with _copying(executor.device, area.largest) as copy:
            for value in area.values():
                if engine.plan.in_arena(value.kind, value.unit):
                    area.get(value, executor.read_home(value), copy)
                else:
                    unit, flat = engine.units[value.unit], area.content(value)
                    fresh[value] = _scattered(unit, value, flat, executor.device, copy)
    except BaseException:
        for tier in taken:
            executor.memory.give_back(tier)
        area.asleep()
        raise
    for index in engine.plan.residents:
        _restore(engine.units[index], fresh, area.gradients[index])
    executor.device.drain()  # Before other streams look at them.
    executor.swap_area = None
    area.awake()


# -- residents, whose values lie in torch's memory -------------------------------------------------


def _views(unit: FlatUnit, value: Value, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """By parameter, the view of its weight or gradient in the flat ones of its unit."""
    if value.kind == "weight":
        yield from enumerate(unit.views_of(flat).views)
        return
    for index, one in enumerate(unit.spec.parameters):
        if one.trainable:
            yield index, typed(flat, one.dtype, unit.spec.gradient_offset(index), one.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def _gather(unit: FlatUnit, value: Value, flat: torch.Tensor, copy: Copy) -> None:
    """Copy the weights or gradients of a unit into `flat`, laid out as in an arena."""
    for index, view in _views(unit, value, flat):
        parameter = unit.parameters[index]
        source = parameter if value.kind == "weight" else parameter.grad
        if source is not None and source.dtype == view.dtype:
            copy(_bytes(view), _bytes(source.detach().contiguous()))


def _scattered(
    unit: FlatUnit, value: Value, flat: torch.Tensor, device: Device, copy: Copy
) -> dict[int, torch.Tensor]:
    """By parameter, its value in `flat`, in memory of its own on the device."""
    found = {}
    for index, view in _views(unit, value, flat):
        found[index] = device.empty(view.shape, view.dtype)
        copy(_bytes(found[index]), _bytes(view))
    return found


def _rest(engine: Engine, unit: FlatUnit) -> dict[int, torch.Tensor | None]:
    """Let a unit's parameters give up their memory; their gradients that no swap area has.

    A gradient of another dtype than its parameter's, or of a frozen one, has no place there: it
    stays where it is. None stands for one that is in the swap area.
    """
    gradients: dict[int, torch.Tensor | None] = {}
    for index, (parameter, one) in enumerate(zip(unit.parameters, unit.spec.parameters)):
        if parameter.grad is not None:
            swapped = one.trainable and parameter.grad.dtype == parameter.dtype
            gradients[index] = None if swapped else parameter.grad
        parameter.grad = None
        parameter._offload_access = ParameterAccess(engine, unit.index, index)  # type: ignore
    unit.unbind()
    # Earlier graphs have saved the parameters themselves, which show NaN now: counted as a change,
    # torch refuses them.
    count_change(unit.parameters)
    return gradients


def _restore(
    unit: FlatUnit,
    fresh: Mapping[Value, Mapping[int, torch.Tensor]],
    gradients: Mapping[int, torch.Tensor | None],
) -> None:
    """Let a unit's parameters be plain again, with the values that were read for them."""
    for index, weight in fresh.get(Value("weight", unit.index), {}).items():
        make_plain(unit.parameters[index], weight)
    for index, gradient in fresh.get(Value("gradient", unit.index), {}).items():
        if index in gradients:
            kept = gradients[index]
            unit.parameters[index].grad = gradient if kept is None else kept


# -- the swap area ---------------------------------------------------------------------------------

Copy = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies flat bytes into the first from the second, and returns when they are there."""


class SwapArea:
    """Where the values of a sleeping engine lie: in CPU memory, or in a file of their own."""

    def __init__(self, executor: Executor, given: tuple[Tier, ...], directories: tuple[str, ...]):
        """Make room for what lives in the tiers `given`: in `directories`, or in CPU memory.

        Raises:
            BudgetError: there is no budget for it, of the plan or of those that share one.
            OSError, MemoryError: there is no room for it.
        """
        self.given = given
        self.gradients: dict[int, dict[int, torch.Tensor | None]] = {}
        """By resident unit and parameter, the gradients that there are, see `_rest`."""
        self._plan: Plan = executor.plan
        self._share, self._device = executor.share, executor.device
        self._tier: Tier = "nvme" if directories else "cpu"
        self._memory: dict[Value, torch.Tensor] = {}
        self._store: Store | None = None
        sizes = {one: self._plan.bytes_of(one.kind, one.unit) for one in self.values()}
        self.bytes = sum(sizes.values())
        self.largest = max(sizes.values(), default=0)
        """Bytes of the largest value."""
        layout = file_layout(self._plan.profile, self._placements(), self._plan.states)
        if directories and sizes:
            self.bytes = layout.bytes
        self._check()
        self.waking()
        try:
            if directories and sizes:
                self._store = Store(directories, layout, speeds=measured_speeds(directories))
            else:
                self._memory = {value: host_tensor(size) for value, size in sizes.items()}
        except BaseException:
            self._hold(self._taken())
            raise

    def values(self) -> Iterator[Value]:
        """The values whose home is in a tier that is given back."""
        for kind, unit in self._plan.homes:
            if self._plan.home(kind, unit).tier in self.given and self._plan.bytes_of(kind, unit):
                yield Value(kind, unit)

    def _placements(self) -> list[Placement]:
        """All that sleeps on nvme, and nothing else there."""
        asleep = set(self.values())
        return [
            Placement(*("nvme" if Value(kind, unit) in asleep else "device" for kind in KINDS))
            for unit in range(len(self._plan.placements))
        ]

    def _check(self) -> None:
        """Whether the plan's own budget has room.

        Raises:
            BudgetError: it has none.
        """
        kept, budget = self._plan.taken_bytes(self._tier), self._plan.budgets[self._tier]
        if kept + self.bytes > budget:
            field = BUDGETS[self._tier]
            other = ", or let it sleep on nvme" if self._tier == "cpu" else ""
            raise BudgetError(
                f"sleeping in the {self._tier} tier takes {format_bytes(self.bytes, up=True)} of "
                f"it beside the {format_bytes(kept)} that are taken, and {field} is "
                f"{format_bytes(budget)}: attach with {field} of "
                f"{format_bytes(kept + self.bytes, up=True)} or more{other}"
            )

    # -- what the engine holds of a shared budget ----------------------------------------------

    def _taken(self) -> dict[Tier, int]:
        return {tier: self._plan.taken_bytes(tier) for tier in TIERS}

    def _hold(self, wanted: Mapping[Tier, int]) -> None:
        if self._share is not None:
            self._share.change(wanted)

    def waking(self) -> None:
        """Hold the memory of the tiers and that of the swap area, too.

        Raises:
            BudgetError: others have it.
        """
        self._hold({**self._taken(), self._tier: self._plan.taken_bytes(self._tier) + self.bytes})

    def asleep(self) -> None:
        """The memory of the tiers is given back: hold that of the swap area."""
        held = {tier: 0 if tier in self.given else size for tier, size in self._taken().items()}
        self._hold({**held, self._tier: held[self._tier] + self.bytes})

    def awake(self) -> None:
        """The engine is awake: it holds what its plan says, and nothing here."""
        self.close()
        self._hold(self._taken())

    # -- the values ----------------------------------------------------------------------------

    def room(self, value: Value) -> torch.Tensor:
        """CPU memory for the bytes of a value, to be filled and then kept."""
        if self._store is None:
            return self._memory[value]
        return host_tensor(self._plan.bytes_of(value.kind, value.unit))

    def keep(self, value: Value, flat: torch.Tensor, step: int) -> None:
        """Keep the bytes of a value, which lie in its room or elsewhere in CPU memory."""
        if self._store is not None:
            self._store.write(value.kind, self._plan.profile.units[value.unit].name, flat, step)

    def content(self, value: Value) -> torch.Tensor:
        """The bytes of a value, in CPU memory."""
        flat = self.room(value)
        if self._store is not None:
            self._store.read(value.kind, self._plan.profile.units[value.unit].name, flat)
        return flat

    def put(self, value: Value, content: torch.Tensor, step: int, copy: Copy) -> None:
        """Keep the bytes of a value; `copy` brings them from where they are."""
        direct = self._store is not None and not self._device.holds(content)
        flat = content if direct else self.room(value)
        if not direct:
            copy(flat, content)
        self.keep(value, flat, step)

    def get(self, value: Value, into: torch.Tensor, copy: Copy) -> None:
        """Fill `into` with the bytes of a value."""
        if self._store is not None and not self._device.holds(into):
            self._store.read(value.kind, self._plan.profile.units[value.unit].name, into)
        else:
            copy(into, self.content(value))

    def close(self) -> None:
        """Let go of what it holds, which nobody needs any more."""
        self._memory = {}
        if self._store is not None:
            self._store.close()


# -- copies between the device and memory that is not registered -----------------------------------


@contextmanager
def _copying(device: Device, most: int) -> Iterator[Copy]:
    """What copies up to `most` bytes at a time; any kinds of memory.

    A driver copies memory that is not registered through a small buffer of its own, at a fraction
    of the bus, and to register it for one copy takes longer than the copy. So bytes go through two
    registered pieces in turn: while the device moves one, the host copies the other.

    Raises:
        MemoryError: there is no memory for the pieces.
    """
    if device.is_host:
        yield lambda into, source: into.copy_(source)
        return
    size = min(PIECE_BYTES, most)
    arena = Arena(2 * size, CPU, driver=device.driver, edges=(size,))
    pieces = [arena.tensor[:size], arena.tensor[size:]]

    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        if device.holds(into) == device.holds(source):
            into.copy_(source)
        elif device.holds(into):
            _send(device, into, source, pieces)
        else:
            _fetch(device, into, source, pieces)
        device.drain()

    try:
        yield copy
    finally:
        device.drain()  # After an error a copy may be under way.
        arena.close()


def _send(
    device: Device, into: torch.Tensor, source: torch.Tensor, pieces: list[torch.Tensor]
) -> None:
    """From CPU memory to the device."""
    left: list[Fence | None] = [None, None]
    """By piece, the copy out of it."""
    for turn, (into_part, part) in enumerate(_parts(into, source, len(pieces[0]))):
        piece, before = pieces[turn % 2][: len(part)], left[turn % 2]
        if before is not None:
            before.synchronize()
        piece.copy_(part)
        device.copy(into_part, piece)
        left[turn % 2] = device.fence(device.stream())


def _fetch(
    device: Device, into: torch.Tensor, source: torch.Tensor, pieces: list[torch.Tensor]
) -> None:
    """From the device to CPU memory."""
    arriving: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    for turn, (into_part, part) in enumerate(_parts(into, source, len(pieces[0]))):
        piece = pieces[turn % 2][: len(part)]
        device.copy(piece, part)
        arriving.append((into_part, piece, device.fence(device.stream())))
        if len(arriving) == 2:
            _empty(*arriving.pop(0))
    for one in arriving:
        _empty(*one)


def _empty(into: torch.Tensor, piece: torch.Tensor, fence: Fence | None) -> None:
    if fence is not None:
        fence.synchronize()
    into.copy_(piece)


def _parts(
    into: torch.Tensor, source: torch.Tensor, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, len(source), size):
        yield into[start : start + size], source[start : start + size]
