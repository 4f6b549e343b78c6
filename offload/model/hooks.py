"""The hooks on a model: they tell the engine which unit is about to be used, and has been."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.model.engine import Engine
from offload.model.gradients import take_gradient
from offload.model.parameter import ActiveParameter, OffloadedParameter
from offload.model.running import in_backward
from offload.model.saved_tensors import SavingGuard
from offload.model.units import FlatUnit
from offload.planning.machine import host_free_bytes, ranks_on_host
from offload.planning.tiers import format_bytes
from offload.runtime.entry import Hook, entry, refuse_recording
from offload.runtime.torch_internals import data_parallel, no_trap


class _Running(NamedTuple):
    """A module whose forward runs."""

    module: nn.Module
    guard: SavingGuard
    given: tuple[Any, ...]
    """The arguments: an output that the module only forwards (T5's position bias) was made by
    another one, and its gradient comes in the middle of that one's backward."""


class Hooks:
    """All hooks of one engine on one model."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._running: list[_Running] = []
        """The outermost first."""
        self._in_forward = False
        """Whether the model as a whole runs."""
        self._handles: list[Any] = []
        self._prepared: Callable[[], nn.Module | None] = lambda: None
        """The model, where accelerate is told that it is prepared."""
        self._destination: Callable[[], object] = lambda: None
        """What `state_dict()` fills."""
        self._copies: dict[tuple[int, int], Callable[[], torch.Tensor | None]] = {}
        """Of that call: tied parameters share one copy."""

    def put_on(
        self, model: nn.Module, announcers: Mapping[nn.Module, Sequence[int]], *, trains: bool
    ) -> None:
        """Hook `model`; `announcers` maps modules to the units whose use their call announces."""
        engine, keep = self._engine, self._handles.append
        # Of what `entry` leaves to itself torch.export would speak before the engine can.
        disable: Any = torch.compiler.disable
        first = Hook(disable(entry(self._enter_root)))
        keep(model.register_forward_pre_hook(first, prepend=True))
        for module, used in announcers.items():
            units = tuple(engine.units[unit] for unit in used)
            before, after = Hook(self._before_forward, units), Hook(self._after_forward, units)
            keep(module.register_forward_pre_hook(before, with_kwargs=True))
            keep(module.register_forward_hook(after, always_call=True))
        keep(model.register_forward_hook(Hook(self._leave_root), always_call=True))
        for index, unit in engine.residents.in_lanes.items():
            for module in filter(None, (ref() for ref in unit.modules)):
                keep(module.register_forward_pre_hook(Hook(engine.residents.called(index))))
        told = vars(model).get("_is_accelerate_prepared")
        if not told and torch.distributed.is_available() and torch.distributed.is_initialized():
            # Else accelerate wraps it in DistributedDataParallel.
            self._prepared = weakref.ref(model)
            vars(model)["_is_accelerate_prepared"] = True
        self._put_on_state_dict(model)
        for unit in engine.units:
            if unit.index not in engine.residents or not trains:
                self._put_on_gradients(unit, trains=trains)

    def _put_on_state_dict(self, model: nn.Module) -> None:
        engine, keep = self._engine, self._handles.append
        places = {p: at for p, at in engine.places.items() if at[0] not in engine.residents}
        for module in model.modules():
            if own := {n: places[p] for n, p in _own(module) if p in places}:
                register: Any = module.register_state_dict_post_hook
                keep(register(Hook(self._copy_weights, own)))
            if own or module is model:
                saving: Any = module.register_state_dict_pre_hook
                keep(saving(Hook(_before_state_dict, engine, {u for u, _ in own.values()})))
        if engine.ranks is not None:
            loading: Any = model.register_load_state_dict_pre_hook
            keep(loading(Hook(_meet, engine)))

    @entry
    def _copy_weights(
        self,
        own: Mapping[str, tuple[int, int]],
        module: nn.Module,
        state_dict: Any,
        prefix: str,
        metadata: object,
    ) -> None:
        """Put copies in CPU memory in the place of streamed parameters, which are `own`."""
        if self._destination() is not state_dict:
            plain = type(state_dict) is dict  # Which no weak reference can follow.
            self._destination = (lambda: None) if plain else weakref.ref(state_dict)
            self._copies = {}
        for name, place in own.items():
            written = state_dict.get(prefix + name)
            # Else it was asked to keep them, or has no such name (pruned since).
            if written is not None and not isinstance(written, nn.Parameter):
                found = self._copies.get(place, lambda: None)()
                if found is None:
                    found = self._engine.saved(*place)
                    self._copies[place] = weakref.ref(found)
                state_dict[prefix + name] = found

    def _put_on_gradients(self, unit: FlatUnit, *, trains: bool) -> None:
        # Torch hides what such a hook holds from the garbage collector.
        engine = weakref.ref(self._engine)
        for index, parameter in enumerate(unit.parameters):
            if not (unit.spec.parameters[index].trainable or parameter.requires_grad):
                continue
            collect = Hook(_collect, engine, trains, unit.index, index)
            register: Any = torch.Tensor.register_post_accumulate_grad_hook
            with no_trap():
                self._handles.append(register(parameter, collect))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if (model := self._prepared()) is not None:
            vars(model).pop("_is_accelerate_prepared", None)
        self._drop_guards()

    # -- the model as a whole --------------------------------------------------------------------

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        refuse_recording("an offloaded module was called")
        _refuse_data_parallel()
        if self._prepared() is not None:
            _refuse_lost_autocast(module)
        with self._engine.lock:
            self._engine.check()
            if not in_backward():
                self._engine.open_forward()
                self._engine.forward.begin()
                self._drop_guards()
                self._in_forward = True

    @entry
    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        with self._engine.lock:
            # Torch calls this for a thread that was refused, too.
            if self._in_forward and self._engine.owned and not in_backward():
                self._in_forward = False
                raised = output is None and sys.exc_info()[0] is not None
                self._engine.end_pass(finished=not raised)

    def _drop_guards(self) -> None:
        """A forward that Ctrl-C ended, also one inside a backward, has skipped its own hook."""
        while self._running:
            self._running.pop(0).guard.drop()

    # -- one module -------------------------------------------------------------------------------

    @entry
    def _before_forward(
        self, used: tuple[FlatUnit, ...], module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        refuse_recording("an offloaded module was called")
        engine, inside = self._engine, in_backward()
        with engine.lock:
            engine.check()
            if not inside and engine.begin_call():
                self._in_forward = False
                self._drop_guards()
            for unit in used:
                engine.enter(unit)
                unit.bind(unit.part_of(module))
            guard = SavingGuard(engine.active.saved_weight, used, inside)
            self._running.append(_Running(module, guard, (*args, *kwargs.values())))

    @entry
    def _after_forward(
        self, used: tuple[FlatUnit, ...], module: nn.Module, args: Any, output: Any
    ) -> Any:
        engine = self._engine
        with engine.lock:
            mine = engine.owned and self._running and self._running[-1].module is module
            if not mine:
                return None  # The thread was refused, or another hook raised before.
            run = self._running.pop()
            run.guard.close()

            def leaving(tensor: torch.Tensor) -> torch.Tensor:
                tensor = engine.active.outliving(tensor)
                node = tensor.grad_fn if torch.is_grad_enabled() else None
                if node is not None and not any(tensor is one for one in run.given):
                    for unit in (one for one in used if one.spec.backward):
                        part = unit.part_of(module)
                        node.register_prehook(partial(self._before_backward, unit, part))
                return tensor

            output = _changed(output, leaving)
            last = not self._running and not self._in_forward
            if last and not in_backward():  # Nothing else tells of the end of such a call.
                engine.forward.end()
            engine.active.leave(used)
            if last and not in_backward():
                engine.active.release_all(but_used=True)
            return output

    @entry
    def _before_backward(self, unit: FlatUnit, part: Sequence[int], gradients: object) -> None:
        if torch.is_grad_enabled():
            _refuse_create_graph()
        with self._engine.lock:
            self._engine.hold(unit)
            unit.bind(() if unit.touched else part)


def _changed(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What a module returns, with `change` done to its tensors.

    All but tuples stay the objects that others hold. Objects of other classes, such as caches,
    have what other modules put there.
    """
    held: list[tuple[Any, Any]]
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        new = [_changed(one, change) for one in tree]
        if all(a is b for a, b in zip(new, tree)):
            return tree
        return type(tree)(*new) if hasattr(tree, "_fields") else tuple(new)
    if isinstance(tree, (list, MutableMapping)):
        held = list(enumerate(tree) if isinstance(tree, list) else tree.items())
        put = type(tree).__setitem__
    elif is_dataclass(tree) and not isinstance(tree, (type, nn.Module)):
        held = [(one.name, getattr(tree, one.name, None)) for one in fields(tree)]
        put = object.__setattr__  # Also where the dataclass is frozen.
    else:
        return tree
    for name, value in held:
        if (new := _changed(value, change)) is not value:
            put(tree, name, new)
    return tree


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


# -- gradients ---------------------------------------------------------------------------------


@entry
def _collect(
    ref: Callable[[], Engine | None],
    trains: bool,
    unit: int,
    index: int,
    parameter: nn.Parameter,
) -> None:
    engine = ref()
    gradient = None if engine is None else take_gradient(parameter)
    if engine is None or gradient is None:
        return
    if not trains:
        raise RuntimeError(
            "backward() on a model attached without an optimizer: its gradients have no home; "
            "attach it with its optimizer, run it under torch.no_grad(), or, for gradients of its "
            "inputs alone, freeze it: model.requires_grad_(False)"
        )
    if torch.is_grad_enabled():
        _refuse_create_graph()
    with engine.lock:
        engine.collect(unit, index, gradient)


# -- what is refused -----------------------------------------------------------------------------


def _refuse_create_graph() -> None:
    """Torch runs a backward with gradients enabled when, and only when, it builds a graph of it."""
    raise RuntimeError(
        "create_graph=True needs all weights until the second backward, and offloaded ones move: "
        "compute higher derivatives on a model that is not attached"
    )


def _refuse_data_parallel() -> None:
    """Refuse to run inside DistributedDataParallel, to which gradients here never come."""
    if data_parallel() is not None:
        raise RuntimeError(
            "an attached model was called by DistributedDataParallel, which sums gradients over "
            "ranks before the engine sees them: every rank would train alone. Call the model "
            "itself: attach cuts it over all ranks, where torch.distributed is set up before it"
        )


def _refuse_lost_autocast(model: nn.Module) -> None:
    """Refuse a model over ranks without the mixed precision that accelerate would give it."""
    accelerate: Any = sys.modules.get("accelerate.state")
    asked = accelerate and accelerate.AcceleratorState._shared_state.get("_mixed_precision")
    kinds = {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}
    wrapped = "_original_forward" in vars(model) or any(map(torch.is_autocast_enabled, kinds))
    if asked in ("bf16", "fp16") and not wrapped:
        raise RuntimeError(
            f"accelerate was asked for mixed_precision={asked!r}, and a model that is cut over "
            "ranks was called without it: before attach, model = accelerator.prepare_model(model, "
            "evaluation_mode=True); with a Trainer, class Trainer(offload.TrainerMixin, "
            "transformers.Trainer); or train a model in bfloat16 without it"
        )


# -- state_dict ----------------------------------------------------------------------------------


def _meet(engine: Engine, *_: object) -> None:
    """All ranks load together: another may still be in a forward, with the weights of before."""
    engine.ranks.meet()


def _before_state_dict(
    engine: Engine, own: Iterable[int], module: nn.Module, prefix: str, *_: object
) -> None:
    """Take over edits, and refuse copies for which there is no memory."""
    for unit in own if prefix else [None]:
        engine.boundary(unit)
    if prefix:  # Of a submodule, likely inside a call of the user's.
        return
    streamed = ActiveParameter, OffloadedParameter
    needed = sum(one.nbytes for one in module.parameters() if isinstance(one, streamed))
    if (ranks := engine.plan.profile.sharding.ranks) > 1:  # Each copies what it has.
        needed = needed * ranks_on_host() // ranks
    if needed > (free := host_free_bytes()):
        raise MemoryError(
            f"state_dict() copies {format_bytes(needed, up=True)} of offloaded weights to CPU "
            f"memory, and {format_bytes(free)} is free there: go through "
            "optimizer.engine.stream_weights(), which takes one parameter at a time, or attach "
            "with less cpu_memory"
        )
