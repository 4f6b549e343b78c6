"""Attach an engine to a model and its optimizer, and take it off again."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from aio.system import is_memory
from offload.checkpoint.commits import RunDirectory, held_bytes, run_directory
from offload.checkpoint.durable import Commits
from offload.checkpoint.exporting import SavePretrained, writer_of
from offload.checkpoint.saving import chunks_of, fill
from offload.checkpoint.shards import Values
from offload.config import Config, warn_user
from offload.model.access import ParameterAccess
from offload.model.checks import check_arguments, check_model
from offload.model.engine import Attached, Engine, NoCommits, attached_to, engine_of, engines
from offload.model.hooks import Hooks
from offload.model.parameter import PLAIN, AttachedParameter, refuse_hook
from offload.model.units import FlatUnit, UnitModules, count_change, partition
from offload.optim.optimizer import Optimizer, give_back
from offload.optim.states import States
from offload.optim.supported_optimizers import check_optimizer, of_no_group, rule_of
from offload.optim.update import Updates
from offload.planning.layout import Plan
from offload.planning.machine import (
    Machine,
    host_free_bytes,
    measured_speeds,
    probe,
    ranks_of_job,
)
from offload.planning.planner import remarks
from offload.program.ops import Value
from offload.runtime.device import CPU, Device, compute_device
from offload.runtime.entry import all_or_none, entry
from offload.runtime.memory import Memory, zeros_on
from offload.runtime.runner import Pace, Runner
from offload.runtime.store import Store
from offload.runtime.torch_internals import gradient_hooks, local_part, no_trap
from offload.unit_plan import planned, planned_alike

EXPOSED_BYTES_LEAST = 256 << 20
"""Smallest default of Config.exposed_memory."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config | None = None,
    *,
    mesh: Any = None,
    initialize: Callable[[nn.Module], object] | None = None,
    read: Values | None = None,
    machine: Machine | None = None,
    pace: Pace | None = None,
) -> tuple[nn.Module, Any]:
    """Spread a model over the tiers and return it with an optimizer that updates it there.

    Args:
        model: stays the same object; its parameters keep their identity, names and shapes.
            Parameters on the meta device get memory here, unit by unit, so that the whole model
            never lies in memory at once; those are new objects, in the optimizer's groups too.
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD`, or `cpu_adam.CPUAdam`, `CPULion` or
            `CPUSGD`, over parameters of the model, with or without states; None serves the model
            forward-only.
        config: where things live and how much may be taken; the default finds out.
        mesh: the ranks that the model is cut over, or its DTensors' parts are: a DeviceMesh of one
            dimension or of two, (replicate, shard), or a process group; by default all there are.
        initialize: called with each module that owns parameters on the meta device, once these
            have memory; default: the module's own `reset_parameters()`.
        read: in its place, at any size of a unit: `read("model", name, start, count)` gives so many
            values of a parameter, 1-D in CPU memory; those of one are asked for in order.
        machine: what there is, in place of what this host has.
        pace: when an op may end, for tests that imitate slower hardware.

    Returns:
        The model and the optimizer to step, None where None was given.

    Raises:
        BudgetError: the model does not fit the budgets, with a table.
        ValueError, TypeError: the model, optimizer or config cannot be attached, and why.
        OSError: nvme_path cannot be used.
        MemoryError: the memory of the plan is not there.
    """
    config = Config() if config is None else config
    _check(model, optimizer, config)
    check_model(model, optimizer, initializes=initialize is not None or read is not None)
    if not all(engine.runner.closed for engine in engines):
        gc.collect()  # One that was dropped, but not closed, has its memory until then.
    device, groups = compute_device(), partition(model)
    group, split = _group_of(mesh, device, config), _split_of(model, mesh, device, config)
    found = machine or _machine(device, config, group)
    _tell_ungrouped(optimizer, groups)
    cut = partial(planned, groups, config, found, rule_of(optimizer), trains=bool(optimizer))
    groups, placed = cut() if group is None else planned_alike(cut, group, config)
    for unit, one in enumerate(groups):
        for p in one.named.values() if unit not in placed.residents else ():
            if gradient_hooks(p):
                refuse_hook(p)
    for remark in remarks(placed, config, found):
        warn_user(remark)
    # What is made in inference mode could not be trained after it.
    with torch.inference_mode(False), ExitStack() as failed:
        directory = None
        if config.durable is not None:
            directory = run_directory(config.durable, group, resume=config.resume)
            failed.enter_context(closing(directory))
        how = initialize or methodcaller("reset_parameters"), read, directory, group, split
        made = _Attaching(model, optimizer, config, groups, placed, device, *how).attach(pace)
        if directory is not None and made[1] is not None:
            _go_on(model, made[1], directory, config)
        failed.pop_all()
    return made


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
    """Refuse arguments that cannot be attached, or are already."""
    check_arguments(
        "attach",
        "attach(model, optimizer, offload.Config(...)), with an optimizer that was made of "
        "model.parameters(), or None for a model that is not trained",
        model=(model, isinstance(model, nn.Module)),
        optimizer=(optimizer, isinstance(optimizer, torch.optim.Optimizer | None)),
        config=(config, isinstance(config, Config)),
    )
    if optimizer is None and config.durable is not None:
        raise ValueError("asked for durable; found no optimizer, so there are no steps to keep")
    inside = any(attached_to(module) is not None for module in model.modules())
    if inside or any(isinstance(one, AttachedParameter) for one in model.parameters()):
        raise ValueError(
            "the model, or a part of it, is attached already: detach it first "
            "(offload.detach(model)), or go on with the optimizer that attach returned"
        )
    if optimizer is not None:
        check_optimizer(optimizer)


def _machine(device: Device, config: Config, group: Any) -> Machine:
    """What there is, on every rank of a group, with what a run that goes on has already."""
    with all_or_none(group):
        made = probe(config.nvme_path, device_free_bytes=device.free_bytes())
        held = config.durable and held_bytes(config.durable, group, config.nvme_path)
        found = replace(made, nvme_bytes=made.nvme_bytes + (held or 0))
    return found if group is None else group.least(found)  # type: ignore[no-any-return]


def _tell_ungrouped(optimizer: torch.optim.Optimizer | None, groups: Sequence[UnitModules]) -> None:
    named = (pair for group in groups for pair in group.named.items())
    if optimizer is not None and (told := of_no_group(optimizer, named)):
        warn_user(told)


def _go_on(model: nn.Module, optimizer: Optimizer, directory: RunDirectory, config: Config) -> None:
    """Take over the commit of a directory, where there is one, and commit to it from now on."""
    engine = optimizer.engine
    try:
        commits = Commits(model, optimizer, directory, config.commit_every)
        commits.resume(model)
    except BaseException:
        with suppress(RuntimeError, ValueError):  # Half of the values are there.
            detach(model)
        engine.close()
        raise
    engine.commit_by(commits)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Let modules that are built inside have their parameters on the meta device, without memory.

    Buffers are real, as models compute some when they are built (rotary positions). `attach` then
    gives each unit its memory, and `initialize` its values:

        with offload.empty_weights():
            model = LlamaForCausalLM(config)
        model, optimizer = offload.attach(model, optimizer, config, initialize=load)

    Each parameter is made for real and then dropped, so the largest one has to fit.
    """

    def let_go(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter  # One that is tied stays the same object.
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    register: Any = register_module_parameter_registration_hook
    handle = register(let_go)
    try:
        yield
    finally:
        handle.remove()


@entry
def detach(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Undo `attach`: all values back in ordinary parameters, all states in the user's optimizer.

    Returns what was given to `attach`. The model, with gradients where
    there are any, must fit the compute device beside what the engine has there until the very end.

    Raises:
        ValueError: the model is not attached.
    """
    engine = engine_of(model)
    with engine.lock, torch.inference_mode(False):  # Steps of other threads come before or after.
        engine.settle()
        engine.snapshots.boundary()
        if engine.commits.durable:
            engine.commit()
            engine.commits.close()
            engine.commit_by(NoCommits())
        values = [
            (unit, at, engine.values_of(unit.index, at), engine.gradient_of(unit.index, at))
            for unit in engine.units
            for at in range(len(unit.parameters))
            if unit.index not in engine.residents
        ]  # From here on nothing large is made.
        found = vars(model).pop(Attached.name)
        original = found.optimizer.give_up() if found.optimizer is not None else None
        found.hooks.remove()
        if isinstance(vars(model).get("save_pretrained"), SavePretrained):
            del model.save_pretrained
        for unit, at, value, gradient in values:
            unit.make_plain(at, value)
            if gradient is not None:
                gradient = engine.wrapped(unit.index, at, gradient.to(value.dtype))
            unit.parameters[at].grad = gradient
        engine.close()
    return model, original


def _split_of(model: nn.Module, mesh: Any, device: Device, config: Config) -> Any:
    """The ranks that have parts of the same parameters; None where these are no DTensors."""
    named: Any = {n: p for n, p in model.named_parameters() if local_part(p) is not p}
    if not named:
        return None
    from offload.parallel.dtensor import tensor_group

    return tensor_group(named, mesh, device, config)


def _group_of(mesh: Any, device: Device, config: Config) -> Any:
    """The ranks of a mesh, by default of the world; None where there is one."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ready and mesh is not None:
        raise ValueError(
            "attach: asked for a mesh; found no process group: start the program with torchrun, "
            "and call torch.distributed.init_process_group() before attach"
        )
    if not ready or (mesh is None and torch.distributed.get_world_size() == 1):
        if not ready and ranks_of_job() > 1:
            warn_user(
                f"attach: this is one of {ranks_of_job()} processes (WORLD_SIZE, as torchrun sets "
                "it), and each trains a model of its own: to train one, call "
                "torch.distributed.init_process_group() before attach"
            )
        return None
    from offload.parallel import join  # Nothing of it where there is one rank.

    return join(mesh, device, config)


def _same_parameters(model: nn.Module) -> Callable[[], None]:
    """What raises once a model has other parameters than now."""
    ref, known = weakref.ref(model), list(map(id, model.parameters()))

    def check() -> None:
        model = ref()
        if model is not None and list(map(id, model.parameters())) != known:
            new = [name for name, one in model.named_parameters() if id(one) not in set(known)]
            told = ", ".join(new[:3]) or "fewer, or in another order"
            raise RuntimeError(
                f"the model has other parameters than at attach ({told}): "
                "embeddings, adapters or shards were changed, likely. Do that before attach, or "
                "offload.detach(model), change it, build the optimizer anew and attach again"
            )

    return check


@dataclass
class _Attaching:
    """One attach under way, or undone."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    config: Config
    groups: list[UnitModules]
    plan: Plan
    device: Device
    initialize: Callable[[nn.Module], object]
    read: Values | None
    directory: RunDirectory | None
    """Of a durable run."""
    group: Any
    """The ranks that share the model (`parallel`); None with one."""
    split: Any
    """Those that have other parts of its DTensors; None where it has none."""

    def __post_init__(self) -> None:
        self._units: list[FlatUnit] = []
        # As it was, to be that again where the attach fails.
        self._devices = {x: x.device for x in (*self.model.parameters(), *self.model.buffers())}
        self._gradients = {p: p.grad for p in self.model.parameters()}
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        """By the new parameter, the one on the meta device in whose place it is."""

    def attach(self, pace: Pace | None) -> tuple[nn.Module, Optimizer | None]:
        if self.group is not None:
            self.group.require_alike_model(self.model, self.plan)
        runner = self._take(pace)
        try:
            self._fill(runner)
            made = self._start(runner)
        except BaseException as error:
            if self.group is not None:
                self.group.fail(error)
            try:
                self._undo(runner)
            finally:
                runner.close()
            raise
        if self.optimizer is not None:
            self.optimizer.state.clear()  # From here on nothing is undone.
        for unit in self._units:
            if unit.index not in self.plan.residents:
                # Torch refuses a backward of graphs that have saved what rests now.
                count_change(unit.parameters)
        return made

    def _take(self, pace: Pace | None) -> Runner:
        store, paths = None, self.config.nvme_path
        with all_or_none(self.group) as undo:
            if self.directory is not None:
                store = self.directory.store(self.plan, paths)
            elif self.plan.file:
                names, speeds = self.plan.profile.names, measured_speeds(paths)
                store = Store(paths, self.plan.file, names, speeds=speeds)
            if store is not None:
                undo.callback(store.close)
            files = store.volume.files if store is not None else ()
            if any(is_memory(os.path.dirname(one.path)) for one in files):
                # Other notices are good to know; this one says that what was asked is not had.
                warn_user(" ".join(str(one.notice) for one in files))
            memory = Memory(self.plan, self.device)
            runner = Runner(self.plan, memory, store, self.device, pace)
            undo.callback(runner.close)
        return runner

    # -- moving the values -------------------------------------------------------------------------

    def _fill(self, runner: Runner) -> None:
        self._materialise()
        on = self.device.torch_device
        stand_ins = {
            name: torch.full((1,), float("nan"), dtype=getattr(torch, name), device=on)
            for name in {p.dtype for unit in self.plan.profile.units for p in unit.parameters}
        }
        binding_of = (lambda _: PLAIN) if self.split is None else self.split.binding_of
        self._units = [
            FlatUnit(u, spec, self.groups[u], stand_ins, binding_of)
            for u, spec in enumerate(self.plan.profile.full)
        ]
        if self.read is None:
            for unit in self._units:
                self._move(unit, runner)
        else:
            self._stream(runner)
        self.device.trim()  # Of the units on their way.
        States(runner).clear()

    def _materialise(self) -> None:
        """Put new objects in the place of the parameters on the meta device."""
        for parameter in self.model.parameters():
            if parameter.is_meta:
                empty = torch.zeros(1, dtype=parameter.dtype, device=self.device.torch_device)
                shaped = empty.expand(parameter.shape) if parameter.shape else empty[0]
                self._replaced[nn.Parameter(shaped, parameter.requires_grad)] = parameter
        self._exchange({old: new for new, old in self._replaced.items()})

    def _exchange(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put other parameters where the model and its optimizer have these."""
        exchange(self.model, others)
        for group in self.groups:
            group.named = {name: others.get(p, p) for name, p in group.named.items()}
        for param_group in self.optimizer.param_groups if self.optimizer is not None else ():
            param_group["params"] = [others.get(p, p) for p in param_group["params"]]

    def _move(self, unit: FlatUnit, runner: Runner) -> None:
        """Gather a unit's weights in one buffer, initialised where they had no values; move it.

        That is on the device unless neither are they nor is their home: then nothing crosses it.
        Those of a resident unit stay there. Parameters change last: what fails loses no value.
        """
        new = {p for p in unit.parameters if p in self._replaced}
        values = [local_part(parameter.data) for parameter in unit.parameters]
        resident = unit.index in self.plan.residents
        if resident:  # In memory of their own, as torch has it.
            views = [self.device.empty(v.shape, v.dtype).zero_() for v in values]
        else:
            crosses = self.plan.home("weight", unit.index).tier == "device" or new
            apart = not crosses and all(v.device.type == "cpu" for v in values)
            buffer = zeros_on(CPU if apart else self.device, unit.spec.weight_bytes)
            views = unit.views_of(buffer).views
        with torch.no_grad():
            for parameter, value, view in zip(unit.parameters, values, views):
                if parameter in new:
                    parameter.data = view
                else:
                    view.copy_(value)
        for module in self.model.modules() if new else ():
            if not new.isdisjoint(module.parameters(recurse=False)):
                _initialize(module, self.initialize, new)
        for parameter, view in zip(unit.parameters, views):
            parameter.grad = None
            if resident:
                parameter.data = view
        if resident:
            self.device.drain()
            return
        if self.group is not None and new:
            self.group.add_to_checksum(buffer)
        for chunk, own in enumerate(self.plan.profile.own_weights(unit.index)):
            runner.write_home(Value("weight", unit.index, chunk), buffer[own])
        unit.unbind()

    def _stream(self, runner: Runner) -> None:
        """Move all weights chunk by chunk; those that have no values yet are read."""
        there = {
            spec.name: parameter
            for unit in self._units
            for spec, parameter in zip(unit.spec.parameters, unit.parameters)
            if parameter not in self._replaced
        }

        def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
            if name in there:
                part: torch.Tensor = local_part(there[name].data).reshape(-1)[start:][:count]
                return part
            assert self.read is not None
            return self.read(prefix, name, start, count)

        made: list[Sequence[torch.Tensor]] = [unit.parameters for unit in self._units]
        for index in self.plan.residents:
            made[index] = [self.device.empty(p.shape, p.dtype).zero_() for p in made[index]]
        chunks, name_of = chunks_of(self.plan), self.plan.profile.name_of
        if self.directory is not None and self.directory.commit is not None:  # It has the others.
            chunks = (one for one in chunks if any(name_of(x) in there for x in one.pieces))
        fill(runner, (one._replace(state=None) for one in chunks), made, values)
        self.device.drain()
        for unit in self._units:  # Last: what fails loses no value.
            for parameter, value in zip(unit.parameters, made[unit.index]):
                parameter.grad = None
                if unit.index in self.plan.residents:
                    parameter.data = value
            if unit.index not in self.plan.residents:
                unit.unbind()

    # -- hooking the model -------------------------------------------------------------------------

    def _start(self, runner: Runner) -> tuple[nn.Module, Optimizer | None]:
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device.torch_device)
        engine = self._build_engine(runner)
        places = engine.places
        for parameter, (unit, index) in places.items():
            if unit not in engine.residents:
                parameter._offload_access = ParameterAccess(engine, unit, index)  # type: ignore
        optimizer = None
        engine.updates.shares += [one.share_squares for one in (self.group, self.split) if one]
        if self.optimizer is not None:
            states, check = States(runner), _same_parameters(self.model)
            optimizer = Optimizer(self.optimizer, engine, states, check)
            before = self.optimizer.state
            optimizer.import_states([(p, before[p]) for p in places if p in before])
        for owner, gradient in self._gradients.items():
            if gradient is not None and owner in places:
                owner.grad = gradient.to(self.device.torch_device)
        announcers: dict[nn.Module, list[int]] = {}
        for index, group in enumerate(self.groups):
            for module in group.modules if index not in self.plan.residents else ():
                announcers.setdefault(module, []).append(index)
        hooks = Hooks(engine)
        hooks.put_on(self.model, announcers, trains=self.optimizer is not None)
        vars(self.model)[Attached.name] = Attached(self.model, engine, hooks, optimizer)
        if writer_of(self.model) is not None:
            vars(self.model).setdefault("save_pretrained", SavePretrained(self.model))
        return self.model, optimizer

    def _build_engine(self, runner: Runner) -> Engine:
        free = self.device.free_bytes()  # Snapshots of parameters lie on the device.
        least = max(EXPOSED_BYTES_LEAST, (host_free_bytes() if free is None else free) // 10)
        exposed = self.config.bytes_of("exposed_memory")
        engine = Engine(
            self._units,
            runner,
            nvme_path=self.config.nvme_path,
            exposed_bytes_max=least if exposed is None else exposed,
            micro_batches=self.config.micro_batches,
        )
        engine.updates = Updates(runner, self.config.max_grad_norm, engine.residents)
        if self.group is not None:
            from offload.parallel import together

            engine.ranks, engine.gradients = together(self.group, engine, self.config)
        return engine

    # -- undoing it --------------------------------------------------------------------------------

    def _undo(self, runner: Runner) -> None:
        for unit in self._units:
            moved = isinstance(unit.parameters[0], AttachedParameter)
            if moved and not all(p in self._replaced for p in unit.parameters):
                self._restore(unit, runner)
        for tensor, device in self._devices.items():
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._exchange(self._replaced)
        if self.optimizer is not None:
            give_back(self.optimizer)

    def _restore(self, unit: FlatUnit, runner: Runner) -> None:
        """Give the parameters of a unit their values back, on the device that they came from."""
        on = self._devices.get(unit.parameters[0], runner.device.torch_device)
        buffer = torch.full((unit.spec.weight_bytes,), 0xFF, dtype=torch.uint8, device=on)
        if self.group is None:  # Else the values are on all ranks, and what is here is NaN.
            runner.read_weights(unit.index, buffer)
        for index, view in enumerate(unit.views_of(buffer).views):
            unit.make_plain(index, view)


def exchange(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put other parameters where a model has these."""
    for module in model.modules() if others else ():
        found = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(found):
            if parameter in others:
                setattr(module, name, others[parameter])


# -- parameters that were on the meta device -------------------------------------------------------


def _initialize(
    module: nn.Module, initialize: Callable[[nn.Module], object], new: Collection[nn.Parameter]
) -> None:
    """Initialise the `new` parameters of a module; its others are scratch meanwhile."""
    others = [parameter for parameter in module.parameters(recurse=False) if parameter not in new]
    with no_trap():
        before = [(p, p.data, p.__class__) for p in others]
        for parameter, data, _ in before:
            parameter.data = torch.zeros(data.shape, dtype=data.dtype, device=data.device)
            parameter.__class__ = nn.Parameter
    try:
        initialize(module)
    finally:
        with no_trap():
            for parameter, data, kind in before:
                parameter.data = data
                parameter.__class__ = kind
