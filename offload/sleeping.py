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

from collections.abc import Iterator, Mapping
from typing import Literal

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
from offload.runtime.entry import entry
from offload.runtime.executor import Executor
from offload.runtime.memory import host_tensor, typed
from offload.runtime.store import Store


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
        for value in area.values():
            if plan.in_arena(value.kind, value.unit):
                area.put(value, executor.read_home(value))
            else:
                area.put(value, _gathered(engine.units[value.unit], value, area.room(value)))
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
        for value in area.values():
            if engine.plan.in_arena(value.kind, value.unit):
                area.get(value, executor.read_home(value))
            else:
                flat = area.get(value, area.room(value))
                fresh[value] = {
                    index: executor.device.empty(view.shape, view.dtype).copy_(view)
                    for index, view in _views(engine.units[value.unit], value, flat)
                }
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


@torch.no_grad()
def _gathered(unit: FlatUnit, value: Value, flat: torch.Tensor) -> torch.Tensor:
    """`flat`, with the weights or gradients of a unit laid out as in an arena."""
    for index, view in _views(unit, value, flat):
        parameter = unit.parameters[index]
        source = parameter if value.kind == "weight" else parameter.grad
        if source is not None and source.dtype == view.dtype:
            view.copy_(source)
    return flat


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
        self._executor, self._share = executor, executor.share
        self._tier: Tier = "nvme" if directories else "cpu"
        self._memory: dict[Value, torch.Tensor] = {}
        self._store: Store | None = None
        sizes = {one: self._plan.bytes_of(one.kind, one.unit) for one in self.values()}
        self.bytes = sum(sizes.values())
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
        """CPU memory for the bytes of a value."""
        if self._store is None:
            return self._memory[value]
        return host_tensor(self._plan.bytes_of(value.kind, value.unit))

    def put(self, value: Value, content: torch.Tensor) -> None:
        """Keep the bytes of a value; those in its room are there already."""
        if self._store is None or self._executor.device.holds(content):
            flat = self.room(value)
            if flat.data_ptr() != content.data_ptr():
                flat.copy_(content)
            content = flat
        if self._store is not None:
            name = self._plan.profile.units[value.unit].name
            self._store.write(value.kind, name, content, int(self._executor.step[0]))

    def get(self, value: Value, into: torch.Tensor) -> torch.Tensor:
        """`into`, with the bytes of a value."""
        if self._store is None:
            return into if into is self._memory[value] else into.copy_(self._memory[value])
        flat = self.room(value) if self._executor.device.holds(into) else into
        self._store.read(value.kind, self._plan.profile.units[value.unit].name, flat)
        return into if flat is into else into.copy_(flat)

    def close(self) -> None:
        """Let go of what it holds, which nobody needs any more."""
        self._memory = {}
        if self._store is not None:
            self._store.close()
