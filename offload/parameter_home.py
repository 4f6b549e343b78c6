"""Touches: what happens when a parameter at rest is read, edited, or asked for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from offload.aside import users_modes
from offload.binding import BoundUnit
from offload.engine import Engine
from offload.extents import lies_otherwise
from offload.forms import advice, differing
from offload.guard import Handle, LendingGuard
from offload.passes import in_backward, refuse_inside
from offload.resting import RestingParameter


class ParameterHome:
    """The home of one parameter, as the trap sees it (`resting.Home`)."""

    def __init__(self, engine: Engine, unit: int, index: int):
        """Of parameter `index` of `unit`."""
        self.engine = engine
        self.unit = unit
        self.index = index

    def __reduce__(self) -> Any:
        return (_no_home, ())

    def lend(
        self,
        function: Callable[..., Any],
        resting: list[RestingParameter],
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call `function` while all of `resting` show their true values."""
        homes: list[ParameterHome] = [p._offload_home for p in resting]  # type: ignore[misc]
        engines = {id(home.engine): home.engine for home in homes}
        with ExitStack() as stack:
            for _, engine in sorted(engines.items()):
                stack.enter_context(engine.lock)
            for home in homes:
                stack.enter_context(home.lent())
            if torch.is_grad_enabled():
                # What autograd saves of the lent parameters is kept as handles.
                units = [home.engine.units[home.unit] for home in homes]
                stack.callback(LendingGuard(_Lent(homes), units, in_backward()).close)
            with torch._C.DisableTorchFunctionSubclass(), users_modes():
                return function(*args, **kwargs)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The parameter shows its private copy, or its weights where it is in use already.

        Raises:
            RuntimeError: it was given other storage, shape or dtype.
        """
        engine = self.engine
        engine.end_abandoned()
        bound = engine.units[self.unit]
        if bound.buffer is not None:
            yield
            return
        if in_backward():
            engine.finality.require_open(self.unit, "a touch")
            engine.finality.recomputed(self.unit)  # What no hook announces may be one.
        else:
            engine.finality.require_step("a touch of a parameter")
            engine.finality.called(self.unit)
        copy = engine.exposures.tensor(self.unit, self.index)
        bound.lend(self.index, copy)
        try:
            yield
        finally:
            kept = _same_place(bound.parameters[self.index], copy)
            bound.unlend(self.index)
            if not kept:
                raise RuntimeError(
                    f"{bound.spec.parameters[self.index].name} was given other storage, shape or "
                    "dtype, but it is offloaded and only its values can change: detach() first"
                )

    def look(self, read: Callable[[Any], torch.Tensor], *, to_write: bool) -> torch.Tensor:
        """What `read` gives of the parameter, which is put at rest if its use was broken off."""
        with self.engine.lock:
            self.engine.end_abandoned()
            bound = self.engine.units[self.unit]
            parameter: Any = bound.parameters[self.index]
            if bound.buffer is None:
                return self.lend(read, [parameter], (parameter,), {})  # type: ignore[no-any-return]
            bound.looked = bound.looked or to_write
            with torch._C.DisableTorchFunctionSubclass(), users_modes():
                view = read(parameter)
            bound.give(self.index, view)
            return view

    def gradient(self) -> torch.Tensor | None:
        """The gradient kept for the parameter; None inside backward."""
        if in_backward():
            return None
        with self.engine.lock:
            self.engine.end_abandoned()
            self.engine.finality.require_step("p.grad")
            self.engine.finality.discarded()
            return self.engine.gradients.show(self.unit, self.index)

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Replace the gradient kept for the parameter.

        Raises:
            RuntimeError: inside a backward.
            TypeError, ValueError: it does not fit, or is the parameter itself.
        """
        refuse_inside("p.grad = ...")
        if gradient is self.engine.units[self.unit].parameters[self.index]:
            raise ValueError("a parameter was assigned as its own gradient: assign its clone()")
        with self.engine.lock:
            self.engine.end_abandoned()
            self.engine.finality.require_step("p.grad = ...")
            self.engine.finality.discarded()
            with torch.no_grad():
                self.engine.gradients.replace(self.unit, self.index, gradient)

    def set_data(self, data: torch.Tensor) -> None:
        """Replace the parameter's values.

        Raises:
            ValueError: of another shape, dtype or device.
        """
        bound = self.engine.units[self.unit]
        if data is bound.parameters[self.index]:
            return  # What model.to() does when there is nothing to convert.
        one = bound.spec.parameters[self.index]
        found = (tuple(data.shape), data.dtype, data.device.type)
        place = self.engine.executor.device.torch_device.type
        wanted = (one.shape, getattr(torch, one.dtype), place)
        if found != wanted:
            theirs, ours = differing(found, wanted)
            running = bound.buffer is not None and not in_backward()
            raise ValueError(
                f"{one.name}.data was set to a tensor of {theirs}, but the parameter is offloaded "
                f"with {ours}, and only its values can be replaced; "
                + advice(found, wanted, trained=one.trainable, own_forward=running)
            )
        if lies_otherwise(data):
            raise ValueError(
                f"{one.name}.data was set to values that lie in memory with strides "
                f"{data.stride()} (channels_last, transposed, part of another), but offloaded "
                "parameters are contiguous, with which torch computes other bits: leave the model "
                "in torch.contiguous_format, give it a contiguous() copy, or detach() first"
            )
        with self.engine.lock, ExitStack() as stack:
            if bound.buffer is None:
                self.engine.end_abandoned()
                self.engine.exposures.put_home(self.unit)
                stack.enter_context(self.engine.exposures.disowned(self.unit, self.index, data))
            elif not (data.is_contiguous() and _same_place(bound.parameters[self.index], data)):
                self._set_apart(bound)
            stack.enter_context(self.lent())
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                torch.Tensor.detach(bound.parameters[self.index]).copy_(data)

    def _set_apart(self, bound: BoundUnit) -> None:
        """Other values come to a parameter in use: who was given those there keeps them.

        Raises:
            RuntimeError: that cannot be.
        """
        if not bound.set_apart(self.index):
            one = bound.spec.parameters[self.index]
            raise RuntimeError(
                f"{one.name}.data was set, in the module's own forward, while a view of what it "
                "was is held (p.data.view(), p.data[0]): that lies where the new values come, and "
                "would show them. Take a clone() of what is to be kept, or copy_() the new values"
            )

    def set_requires_grad(self, parameter: RestingParameter, wanted: bool) -> None:
        """Freeze or unfreeze the parameter.

        Raises:
            RuntimeError: it was frozen at attach and has no place for a gradient.
        """
        one = self.engine.units[self.unit].spec.parameters[self.index]
        if wanted and not one.trainable:
            raise RuntimeError(
                f"{one.name} was frozen when the model was attached, so no gradient or state has "
                "a place: detach(), unfreeze, and attach again"
            )
        with torch._C.DisableTorchFunctionSubclass():
            parameter.requires_grad = wanted


class _Lent:
    """Handles for what autograd saves of parameters that are lent (`guard.Locator`)."""

    def __init__(self, homes: Sequence[ParameterHome]):
        self._homes = homes

    def handle_of(self, tensor: torch.Tensor) -> Handle | None:
        """The handle of a tensor that lies in a lent copy, else None."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        for home in self._homes:
            bound = home.engine.units[home.unit]
            copy = bound.parameters[home.index]
            offset = tensor.data_ptr() - copy.data_ptr()
            if 0 <= offset < copy.nbytes:
                return bound.handle(home.engine, home.index, offset, tensor)
        return None


def _same_place(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return (
            parameter.data_ptr() == copy.data_ptr()
            and parameter.shape == copy.shape
            and parameter.dtype == copy.dtype
        )


def _no_home() -> None:
    """What a home is after pickling."""
