"""Touches of an offloaded parameter: it is read, edited, assigned, or asked for its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.model.engine import Engine
from offload.model.parameter import OffloadedParameter
from offload.model.passes import refuse_inside
from offload.model.running import in_backward
from offload.model.saved_tensors import SavedWeight, SavingGuard
from offload.model.snapshots import Key
from offload.model.units import FlatUnit
from offload.planning.profile import Parameter
from offload.program.ops import Verb
from offload.runtime.entry import entry, interruptible, refuse_recording
from offload.runtime.torch_internals import no_trap


class ParameterAccess:
    """What the trap asks of the engine for one parameter."""

    def __init__(self, engine: Engine, unit: int, index: int):
        self.engine = engine
        self.unit = unit
        self.index = index
        self._ref = weakref.ref(self._flat.parameters[index])
        """Torch swaps no objects that have weak references."""

    @property
    def _flat(self) -> FlatUnit:
        return self.engine.units[self.unit]

    @property
    def _spec(self) -> Parameter:
        return self._flat.spec.parameters[self.index]

    # -- values ----------------------------------------------------------------------------------

    def lend(
        self,
        function: Callable[..., Any],
        resting: list[OffloadedParameter],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call `function` while all of `resting` show their true values."""
        refuse_recording("an offloaded parameter was used")
        touched: list[ParameterAccess] = [one._offload_access for one in resting]
        if (ranks := touched[0].engine.ranks) is not None:
            at = touched[0].unit, touched[0].index
            if (call := ranks.without_others(*at, function, args, kwargs)) is not None:
                return touched[0]._alone(call)
        with ExitStack() as stack:
            for one in touched:
                stack.enter_context(one.engine.lock)
                stack.enter_context(one._lent())
            if torch.is_grad_enabled():
                units = [one._flat for one in touched]
                guard = SavingGuard(partial(_saved_of, touched), units, in_backward())
                stack.callback(guard.close)
            with interruptible(), no_trap():
                return function(*args, **kwargs)

    @entry
    def _alone(self, call: Callable[[], Any]) -> Any:
        """Do what needs no value that other ranks have."""
        with self.engine.call():
            self.engine.snapshots.boundary(self.unit)
            return call()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """The parameter shows a snapshot, or its weights where it is in use already."""
        snapshot = self._snapshot()
        if snapshot is None:
            yield
            return
        flat = self._flat
        flat.lend(self.index, snapshot)
        try:
            yield
        finally:
            flat.lend(self.index, flat.stand_ins[self.index])

    @entry
    def _snapshot(self) -> torch.Tensor | None:
        """A snapshot of the parameter; None while it is in use, and shows its weights."""
        engine = self.engine
        engine.end_broken_pass()
        if type(self._flat.parameters[self.index]) is not self._flat.bindings[self.index].resting:
            return None
        if in_backward():
            if not engine.forward.running:
                engine.enter_backward()  # A recompute may be the first that is seen of it.
            engine.early.require_open(self.unit, "a touch")
        else:
            engine.early.require_step("a touch of a parameter")
            self._flat.touched |= engine.passes.verb is Verb.FORWARD
        if engine.ranks is not None:
            return engine.ranks.shown(self.unit, self.index)  # type: ignore[no-any-return]
        return engine.snapshots.tensor(Key("weight", self.unit, self.index))

    def local(self) -> torch.Tensor | None:
        """What is here of a DTensor at rest: a snapshot, over ranks a shard of one."""
        refuse_recording("an offloaded parameter was used")
        with self.engine.lock:
            return self._snapshot()

    def saved(self) -> SavedWeight:
        """What stands for the parameter at rest, where a function of the user's saves it itself."""
        form = torch.empty(
            self._spec.shape, dtype=self._flat.parameters[self.index].dtype, device="meta"
        )
        return self._flat.saved_weight(self.engine.active.tensor_of, self.index, 0, form)

    @entry
    def set_data(self, data: torch.Tensor) -> None:
        """Copy other values in. An alias of the values before keeps what it shows."""
        parameter = self._flat.parameters[self.index]
        if data is parameter:  # As model.to() assigns what it keeps.
            return
        data = data.detach()
        with self.engine.call("p.data = ..."), no_trap(), torch.no_grad():
            require_form(self._spec.name, parameter, data)
            mine = self.engine.part(self.unit, self.index, data)
            self.engine.snapshots.put(Key("weight", self.unit, self.index), mine)

    def set_requires_grad(self, parameter: nn.Parameter, wanted: bool) -> None:
        """Freeze or unfreeze the parameter."""
        if wanted and not self._spec.trainable:
            raise RuntimeError(
                f"{self._spec.name} was frozen when the model was attached, so no gradient has a "
                "place: detach(), unfreeze, and attach again"
            )
        with no_trap():
            torch.Tensor.requires_grad.__set__(parameter, wanted)  # type: ignore[attr-defined]

    # -- the gradient ------------------------------------------------------------------------------

    @entry
    def gradient(self) -> torch.Tensor | None:
        """The gradient kept for the parameter; None inside a backward."""
        if in_backward():
            return None
        with self.engine.call("p.grad"):
            found = self.engine.gradients.show(self.unit, self.index)
            at = self.unit, self.index
            return None if found is None else self.engine.shown("gradient", *at, found)

    @entry
    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Copy another gradient in, or give it up."""
        refuse_inside("p.grad = ...")
        with self.engine.call("p.grad = ..."):
            if gradient is not None:
                gradient = self.engine.part(self.unit, self.index, gradient)
            self.engine.gradients.assign(self.unit, self.index, gradient)


def require_form(name: str, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse a tensor that is not of the form that a parameter had at attach."""
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    there = found.device.type == wanted.device.type
    if not (same and there and (found.dim() < 2 or found.is_contiguous())):
        form, kept = (f"{tuple(x.shape)} of {x.dtype} on {x.device}" for x in (found, wanted))
        raise ValueError(
            f"{name} was given values of shape {form}, strides {found.stride()}, but was attached "
            f"as {kept}, contiguous; likely the model was resized or converted (.half(), .to()): "
            "do that before attach, or after offload.detach(model)"
        )


def _saved_of(touched: Sequence[ParameterAccess], tensor: torch.Tensor) -> SavedWeight | None:
    """What stands for a tensor that lies in a snapshot lent to one of `touched`, else None."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    for one in touched:
        lent = one._flat.parameters[one.index]
        offset = tensor.data_ptr() - lent.data_ptr()
        if 0 <= offset < lent.nbytes:
            resolve = one.engine.active.tensor_of
            return one._flat.saved_weight(resolve, one.index, offset, tensor)
    return None
