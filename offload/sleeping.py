"""Sleep and wake: everything an engine holds of the fast tiers goes to a slower one, and back.

[Note: Sleep]
Between two phases of a job that share a device (a policy is trained, then sampled from elsewhere)
an engine gives all its memory of the faster tiers back. What lives there goes to a swap area, byte
for byte: CPU memory beside the cpu tier, or a file of its own on nvme, checked like all that is
stored. Slots hold nothing that the homes do not. Asleep, whatever needs a value is refused: `wake`
takes the memory, at a time of the user's choice. Sleeping and waking change no bit, and either is
done wholly or not at all, on all ranks: a drive that is full leaves the engine awake, memory that
others have taken leaves it asleep. Graphs from before are invalid: torch refuses their backward.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Literal

import torch
from torch import nn

from offload.config import BUDGETS
from offload.model.access import ParameterAccess
from offload.model.engine import Engine, engine_of
from offload.model.units import FlatUnit, count_change
from offload.planning.layout import Plan
from offload.planning.machine import measured_speeds
from offload.planning.planner import BudgetError
from offload.planning.tiers import TIERS, Tier, format_bytes
from offload.program.ops import Value
from offload.runtime.entry import all_or_none, entry
from offload.runtime.memory import host_tensor, typed
from offload.runtime.runner import Runner
from offload.runtime.store import Store


@entry
def sleep(model: nn.Module, tier: Literal["cpu", "nvme"] = "cpu") -> None:
    """Put all values of an attached model into `tier`, and give the memory above it back.

    Returns when it is done. Until `wake` only what is known without values (shapes, names, the
    report) may be asked for. Gradients and optimizer states sleep too. Over ranks all of them call
    it, and `wake`: each puts what it has into its own `tier`, and all do, or none.

    Args:
        model: attached, and awake.
        tier: `cpu` gives device memory back, `nvme` that of the CPU too.

    Raises:
        ValueError: the model is not attached; `tier` is no such tier, or there is no nvme_path.
        RuntimeError: it is asleep already, or an update has begun whose step() is due.
        BudgetError: what is to sleep does not fit the budget of `tier`.
        OSError, MemoryError: the drive or the memory failed; the model is awake as before, also
            where that was another rank's, of which a RuntimeError tells.
    """
    if tier not in ("cpu", "nvme"):
        raise ValueError(f"offload.sleep: tier is {tier!r}, expected 'cpu' or 'nvme'")
    engine = engine_of(model)
    directories = engine.nvme_path if tier == "nvme" else ()
    if tier == "nvme" and not directories:
        raise ValueError(
            "offload.sleep: tier is nvme, but the model was attached without nvme_path: attach it "
            "with Config(nvme_path=...), or let it sleep in cpu memory"
        )
    runner, residents = engine.runner, [engine.units[unit] for unit in engine.plan.residents]
    with engine.lock:  # A step of another thread's comes before, or finds it asleep.
        engine.settle()
        if engine.commits.durable and not engine.commits.amid_step:
            engine.commit()
        gradients = {
            parameter
            for unit in residents
            for index, parameter in enumerate(unit.parameters)
            if engine.residents.has(unit.index, index)
        }
        _let_go_of_all(engine)
        with all_or_none(engine.ranks and engine.ranks.group) as undo:
            area = SwapArea(runner, TIERS[: TIERS.index(tier)], directories, gradients)
            undo.callback(area.close)
            for value in area.values():
                in_arena = engine.plan.in_arena(value.kind, value.unit)
                area.put(value, runner.read_home(value) if in_arena else _gathered(engine, value))
        for unit in residents:
            _rest(engine, unit)
        for given in area.given:
            runner.memory.give_back(given)
        runner.swap_area = area


@entry
def wake(model: nn.Module) -> None:
    """Take the memory of a sleeping model again, and put all its values back.

    Raises:
        ValueError: the model is not attached.
        RuntimeError: it is not asleep.
        MemoryError: others have the memory; the model sleeps on.
        OSError: the drive failed; the model sleeps on.
    """
    engine = engine_of(model)
    runner = engine.runner
    with engine.lock:
        area = runner.swap_area
        if not isinstance(area, SwapArea):
            raise RuntimeError(
                "offload.wake: the model is not asleep: offload.sleep(model) goes first"
            )
        if engine.ranks is not None:
            engine.ranks.meet()
        with all_or_none(engine.ranks and engine.ranks.group) as undo:
            undo.callback(area.sleep_on)
            fresh = _taken_back(engine, area)
        for value, index, found in fresh:  # Of each unit the weights come first.
            parameter = engine.units[value.unit].parameters[index]
            if value.kind == "weight":
                engine.units[value.unit].make_plain(index, found)
            elif parameter in area.gradients:
                parameter.grad = found
        runner.device.drain()  # Before other streams look at them.
        runner.swap_area = None
        area.close()


def _taken_back(engine: Engine, area: SwapArea) -> list[tuple[Value, int, torch.Tensor]]:
    """Take the memory, and put the values of the area there; gives those of resident units."""
    runner, fresh = engine.runner, list[tuple[Value, int, torch.Tensor]]()
    for tier in area.given:
        runner.memory.take(tier)
    for value in area.values():
        content = area.get(value)
        if engine.plan.in_arena(value.kind, value.unit):
            runner.read_home(value).copy_(content)
            continue
        for index, view in _views(engine.units[value.unit], value, content):
            fresh.append((value, index, runner.device.empty(view.shape, view.dtype)))
            fresh[-1][2].copy_(view)
    return fresh


def _let_go_of_all(engine: Engine) -> None:
    engine.end_pass(finished=False)
    engine.snapshots.boundary()
    engine.gradients.let_go()
    # Until here other ranks may be in a forward, which this one serves.
    engine.come_to_rest("offload.sleep")
    engine.gradients.forget_places()
    engine.passes.forget()
    engine.runner.forget()
    for unit in engine.units:
        unit.close()


# -- residents, whose values lie in torch's memory -------------------------------------------------


def _views(unit: FlatUnit, value: Value, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    if value.kind == "weight":
        yield from enumerate(unit.views_of(flat).views)
        return
    for index, one in enumerate(unit.spec.parameters):
        if one.trainable:
            yield index, typed(flat, one.dtype, unit.spec.gradient_offset(index), one.shape)


@torch.no_grad()
def _gathered(engine: Engine, value: Value) -> torch.Tensor:
    """The weights or gradients of a resident unit, laid out as in an arena."""
    unit, flat = engine.units[value.unit], host_tensor(engine.plan.bytes_of(value.kind, value.unit))
    for index, view in _views(unit, value, flat):
        parameter = unit.parameters[index]
        source = parameter if value.kind == "weight" else parameter.grad
        if source is not None and source.dtype != view.dtype:
            raise RuntimeError(
                f"offload.sleep: the gradient of {unit.spec.parameters[index].name} is of "
                f"{source.dtype}, and has no place to sleep: optimizer.zero_grad() goes first"
            )
        if source is not None:
            view.copy_(source)
    return flat


def _rest(engine: Engine, unit: FlatUnit) -> None:
    """Let a resident unit's parameters give up their memory, as those of streamed units."""
    for index, parameter in enumerate(unit.parameters):
        parameter.grad = None
        parameter._offload_access = ParameterAccess(engine, unit.index, index)  # type: ignore
    unit.unbind()
    # Earlier graphs have saved the parameters themselves, which show NaN now: counted as a change,
    # torch refuses them.
    count_change(unit.parameters)


# -- the swap area ---------------------------------------------------------------------------------


class SwapArea:
    """Where the values of a sleeping engine lie: in CPU memory, or in a file of their own."""

    def __init__(
        self,
        runner: Runner,
        given: tuple[Tier, ...],
        directories: tuple[str, ...],
        gradients: Container[nn.Parameter],
    ):
        """Of what lives in the tiers `given`: in `directories`, or in CPU memory. `gradients` are
        the parameters of resident units that have one. Raises as `sleep`."""
        self.given, self.gradients = given, gradients
        self._plan: Plan = runner.plan
        self._runner = runner
        self._tier: Tier = "nvme" if directories else "cpu"
        self._memory: dict[Value, torch.Tensor] = {}
        self._store: Store | None = None
        self.bytes = sum(self._plan.bytes_of(one.kind, one.unit) for one in self.values())
        kept, budget = self._plan.taken_bytes(self._tier), self._plan.budgets[self._tier]
        if kept + self.bytes > budget:
            field, needed = BUDGETS[self._tier], format_bytes(kept + self.bytes, up=True)
            raise BudgetError(
                f"sleeping in the {self._tier} tier takes {format_bytes(self.bytes, up=True)} of "
                f"it beside the {format_bytes(kept)} that are taken, and {field} is "
                f"{format_bytes(budget)}: attach with {field} of {needed} or more, or sleep in the "
                "other tier"
            )
        if directories and self.bytes:
            names, speeds = self._plan.profile.names, measured_speeds(directories)
            layout = {(k, u): self._plan.sizes.chunks[k][u] for k, u, _ in self.values()}
            self._store = Store(directories, layout, names, speeds=speeds)

    def values(self) -> Iterator[Value]:
        """The values whose home is in a tier that is given back."""
        for kind, unit in self._plan.homes:
            if self._plan.home(kind, unit).tier in self.given and self._plan.bytes_of(kind, unit):
                yield Value(kind, unit)

    def sleep_on(self) -> None:
        """Give back what was taken to wake."""
        for tier in self.given:
            if tier in self._runner.memory.arenas:
                self._runner.memory.give_back(tier)

    def put(self, value: Value, content: torch.Tensor) -> None:
        """Keep the bytes of a value."""
        if self._store is None or self._runner.device.holds(content):
            content = host_tensor(content.numel()).copy_(content)
        if self._store is None:
            self._memory[value] = content
        else:
            self._store.write(value, content, int(self._runner.step[0]))

    def get(self, value: Value) -> torch.Tensor:
        """The bytes of a value, in CPU memory."""
        if self._store is None:
            return self._memory[value]
        found = host_tensor(self._plan.bytes_of(value.kind, value.unit))
        self._store.read(value, found)
        return found

    def close(self) -> None:
        """Let go of what it holds."""
        self._memory, self.bytes = {}, 0
        if self._store is not None:
            self._store.close()
