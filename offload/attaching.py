"""One attach: take the memory, move unit by unit, hook the model; or leave all as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from aio.system import is_memory
from offload.arena import Memory, zeros_on
from offload.before import Before
from offload.binding import BoundUnit, Group, count_change, make_plain
from offload.config import TIERS, Config
from offload.device import CPU, Device
from offload.engine import Engine
from offload.executor import Executor
from offload.hooks import Hooks
from offload.interrupt import calls, record, whole
from offload.layout import Plan
from offload.machine import host_free_bytes, measured_speeds
from offload.meta import initialize_fresh, reset
from offload.optimizer import Optimizer
from offload.parameter_home import ParameterHome
from offload.profile import Unit, Wanted, lay_out_unit
from offload.program import Op, Value
from offload.resident import give_memory
from offload.shared import Share, SharedBudget
from offload.states import States
from offload.store import Store
from offload.strangers import watch
from offload.trace import Trace
from offload.warned import warn_user

EXPOSED_BYTES_LEAST = 256 << 20
"""Smallest default of Config.exposed_memory."""


class Attached(NamedTuple):
    """What is attached to a model."""

    hooks: Hooks
    engine: Engine
    optimizer: Optimizer | None
    config: Config


attachments: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()
"""What is attached to which model."""


def spec_of(group: Group, config: Config, *, trains: bool) -> Unit:
    """The layout of a unit whose parameters are known."""
    wanted = [
        Wanted(
            name,
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            trains and parameter.requires_grad,
        )
        for name, parameter in group.named.items()
    ]
    return lay_out_unit(
        group.name,
        wanted,
        gradient_dtype={"param": "param", "fp32": "float32"}[config.gradient_dtype],
        lasting=group.lasting,
        backward=group.backward,
    )


class Attaching:
    """One attach under way."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        groups: list[Group],
        placed: Plan,
        device: Device,
        nvme_shares: tuple[float, ...],
        budget: SharedBudget | None,
    ):
        self.model = model
        self.budget = budget
        self.optimizer = optimizer
        self.config = config
        self.groups = groups
        self.plan = placed
        self.device = device
        self.shares = nvme_shares or None
        self._bound: list[BoundUnit] = []
        self._hooks: Hooks | None = None
        self._before = Before(model, optimizer)

    def run(
        self,
        initialize: Callable[[nn.Module], object] | None,
        pace: Callable[[Op], float] | None,
    ) -> tuple[nn.Module, Optimizer | None]:
        """Take the memory and the file, move everything, hook the model."""
        store = None
        if self.plan.file.extents:
            speeds = measured_speeds(self.config.nvme_path)
            store = Store(self.config.nvme_path, self.plan.file, weights=self.shares, speeds=speeds)
        try:
            if store is not None and any(map(is_memory, self.config.nvme_path)):
                # Other notices are good to know; this one says that what was asked is not had.
                warn_user(str(store.notice))
            memory = Memory(self.plan, self.device)
        except BaseException:
            if store is not None:
                store.close()
            raise
        trace = None
        if self.config.trace:
            record()
            trace = Trace(calls, self.plan.profile)
        executor = Executor(self.plan, memory, store, self.device, pace, trace)
        try:
            if self.budget is not None:
                taken = {tier: self.plan.taken_bytes(tier) for tier in TIERS}
                executor.share = Share(self.budget, taken)
            self._fill(executor, initialize or reset)
            attached = self._start(executor, memory)
        except BaseException:
            try:
                self._undo(executor)
            finally:
                executor.close()
            raise
        if self.optimizer is not None:
            self.optimizer.state.clear()  # From here on nothing is undone.
        self._refuse_earlier_graphs()
        return attached

    def _refuse_earlier_graphs(self) -> None:
        """Let torch refuse a backward of what was computed before: it saved the parameters, which
        are at rest now, as they are."""
        for unit in self._bound:
            if unit.index not in self.plan.residents:
                count_change(unit.parameters)

    def _fill(self, executor: Executor, initialize: Callable[[nn.Module], object]) -> None:
        """Move all weights, and put zeros in the place of states that are not yet there."""
        fresh = self._materialise()
        on = self.device.torch_device
        stand_in = {
            name: torch.full((1,), float("nan"), dtype=getattr(torch, name), device=on)
            for name in {p.dtype for unit in self.plan.profile.units for p in unit.parameters}
        }
        self._bound = [
            BoundUnit(u, spec, self.groups[u], stand_in)
            for u, spec in enumerate(self.plan.profile.units)
        ]
        for unit in self._bound:
            self._move(unit, executor, fresh, initialize)
        self.device.trim()  # Of the units on their way.
        States(executor).clear()

    @whole
    def _start(self, executor: Executor, memory: Memory) -> tuple[nn.Module, Optimizer | None]:
        """Build the engine, hook the model, take over the optimizer and the gradients."""
        places = {p: (u.index, i) for u in self._bound for i, p in enumerate(u.parameters)}
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device.torch_device)
        engine = self._build_engine(executor, memory)
        for parameter, (unit, index) in places.items():
            if unit not in engine.residents:
                parameter._offload_home = ParameterHome(engine, unit, index)  # type: ignore
        optimizer = self._take_over(engine, self._put_hooks(engine), places)
        for owner, gradient in self._before.gradients.items():
            if gradient is not None and owner in places:
                stays = places[owner][0] in engine.residents  # Others show it in CPU memory.
                owner.grad = gradient.to(self.device.torch_device if stays else "cpu")
        return self.model, optimizer

    def _build_engine(self, executor: Executor, memory: Memory) -> Engine:
        free = self.device.free_bytes()  # Copies of parameters lie on the device.
        least = max(EXPOSED_BYTES_LEAST, (host_free_bytes() if free is None else free) // 10)
        exposed = self.config.bytes_of("exposed_memory")
        return Engine(
            self._bound,
            executor,
            memory,
            exposed_bytes_max=least if exposed is None else exposed,
            max_grad_norm=self.config.max_grad_norm,
            micro_batches=self.config.micro_batches,
        )

    def _put_hooks(self, engine: Engine) -> Hooks:
        announcers: dict[nn.Module, list[int]] = {}
        for index, group in enumerate(self.groups):
            for module in group.modules if index not in self.plan.residents else ():
                announcers.setdefault(module, []).append(index)
        self._hooks = Hooks(engine, self.model)
        self._hooks.put_on(self.model, announcers, trains=self.optimizer is not None)
        return self._hooks

    def _take_over(
        self, engine: Engine, hooks: Hooks, places: dict[nn.Parameter, tuple[int, int]]
    ) -> Optimizer | None:
        """Take over the user's optimizer with its states; from here on the model is attached."""
        optimizer = None
        if self.optimizer is not None:
            states = States(engine.executor)
            optimizer = Optimizer(self.optimizer, engine, states, places, hooks.structure)
            watch(optimizer)
        attachments[self.model] = Attached(hooks, engine, optimizer, self.config)
        if self.optimizer is not None and optimizer is not None:
            before = self.optimizer.state
            optimizer.import_states([(p, before[p]) for p in places if p in before])
        return optimizer

    @whole
    def _undo(self, executor: Executor) -> None:
        """Leave the model and the optimizer as they were before."""
        attachments.pop(self.model, None)
        if self._hooks is not None:
            self._hooks.remove()
        self._before.restore(self._bound, executor)

    @whole
    def _materialise(self) -> dict[nn.Parameter, nn.Module]:
        """Give the parameters on meta new objects; these, with a module that owns each."""
        renewed: dict[nn.Parameter, nn.Parameter] = {}
        fresh: dict[nn.Parameter, nn.Module] = {}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if parameter not in renewed:
                    empty = torch.zeros(1, dtype=parameter.dtype, device=self.device.torch_device)
                    shaped = empty.expand(parameter.shape) if parameter.shape else empty[0]
                    new = nn.Parameter(shaped, parameter.requires_grad)
                    renewed[parameter], self._before.replaced[new] = new, parameter
                module._parameters[name] = renewed[parameter]
                fresh.setdefault(renewed[parameter], module)
        for group in self.groups:
            group.named = {name: renewed.get(p, p) for name, p in group.named.items()}
        for param_group in self.optimizer.param_groups if self.optimizer is not None else ():
            param_group["params"] = [renewed.get(p, p) for p in param_group["params"]]
        return fresh

    @whole
    def _move(
        self,
        unit: BoundUnit,
        executor: Executor,
        fresh: Mapping[nn.Parameter, nn.Module],
        initialize: Callable[[nn.Module], object],
    ) -> None:
        """Move a unit, or leave it as it was."""
        values = [parameter.data for parameter in unit.parameters]
        try:
            self._gather(unit, values, executor, fresh, initialize)
        except BaseException:
            for parameter, value in zip(unit.parameters, values):
                make_plain(parameter, value)
            raise

    def _gather(
        self,
        unit: BoundUnit,
        values: Sequence[torch.Tensor],
        executor: Executor,
        fresh: Mapping[nn.Parameter, nn.Module],
        initialize: Callable[[nn.Module], object],
    ) -> None:
        """Gather a unit's weights in one buffer, initialised where they had no values; move it.

        That is on the device unless neither are they nor is their home: then nothing crosses it.
        """
        new = {p for p in unit.parameters if p in fresh}
        if unit.index in self.plan.residents:
            start = partial(initialize_fresh, self.model, new, initialize, unit.parameters)
            give_memory(unit, self.device, new, start)
            return
        crosses = self.plan.home("weight", unit.index).tier == "device" or new
        on = self.device if crosses or any(v.device.type != "cpu" for v in values) else CPU
        buffer = zeros_on(on, unit.spec.weight_bytes)
        with torch.no_grad():
            for parameter, view in zip(unit.parameters, unit.views_of(buffer).views):
                parameter.grad = None
                parameter.data = view
            initialize_fresh(self.model, new, initialize, unit.parameters)
            for parameter, value in zip(unit.parameters, values):
                if parameter not in fresh:
                    parameter.data.copy_(value)
        for piece, (offset, size) in enumerate(unit.spec.pieces):
            executor.poke(Value("weight", unit.index, piece), buffer[offset : offset + size])
        unit.rest()
