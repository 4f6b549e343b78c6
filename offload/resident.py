"""Resident units: weights and gradients on the device, where torch's own ways are enough.

[Note: Residents]
Of a unit whose weights and gradients live on the device (or whose weights do, and that is not
trained) nothing arrives or leaves in a pass. Its parameters are plain ones in memory of their own:
no hook announces their use, no trap answers for them, no pass knows them. Autograd accumulates into
`p.grad` by its own rule, which is the engine's: the first gradient is taken, each later one added
by one rounding. With its states on the device too, `step()` reads `p.grad` and queues the update on
the user's stream, as any optimizer does: nothing on that stream comes before it, and
`Engine.settle` waits for it, as does the next step. Only where a lane uses the same workspace, and
for the norm, must `step()` itself wait for the device, and for the norm once. With its states
elsewhere lanes take the step, see [Note: Awaited] of `awaited`. The tiers hold the states; weights
and gradients are counted in the budget, and lie where torch puts them. Gradients in another dtype
than their weights' are summed by the engine, and updates that begin inside backward have to be told
what comes there, so such a unit is none of these.

Whatever the user makes of such a parameter is what is trained. Only when the next step begins is it
looked at: one of another shape, dtype or device than the states are for is refused.

[Note: Residents asleep]
An engine that sleeps gives their memory back, too: they are at rest then, in the trap, which
refuses. Memory that somebody else has a view of, a graph of autograd among them, would not be given
back by that. It stays as it is, so that the view shows the parameter afterwards as before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cpu_adam import Part, sum_of_squares, update_parts, views
from cpu_adam.checks import GRADIENT_DTYPES
from cpu_adam.reference import cut, put_sum_of_squares
from offload.arena import typed, zeros_on
from offload.awaited import Awaited, holders, idle_parameter
from offload.binding import BoundUnit
from offload.device import Device
from offload.executor import Executor
from offload.extents import require_dense
from offload.frozen import Frozen
from offload.profile import Chunk, Span
from offload.program import Op, Use, Value
from offload.resting import RestingParameter


class Residents:
    """The resident units of an engine."""

    def __init__(self, executor: Executor, units: Sequence[BoundUnit], check: Callable[[], None]):
        """Of all `units`, those that the plan says are; `check` raises if the engine is no more."""
        self._executor = executor
        self._plan = executor.plan
        self._units = {u: units[u] for u in sorted(executor.plan.residents)}
        self.awaited = Awaited(executor, self._units.values(), check)
        self._asleep: dict[nn.Parameter, _Asleep] = {}

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    # -- gradients, as `Gradients` has them ------------------------------------------------------

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient.

        Raises:
            RuntimeError: it was frozen at attach.
        """
        self.awaited.meet([unit])
        if self._units[unit].parameters[parameter].grad is None:
            return False
        self.require_place(unit, parameter)
        return True

    def require_place(self, unit: int, parameter: int) -> None:
        """Refuse a parameter that would be updated, or will be, and has no state.

        Raises:
            RuntimeError: it was frozen at attach, and now it has, or gets, a gradient.
        """
        one, mine = self._units[unit].spec.parameters[parameter], self._units[unit].parameters
        if not one.trainable and (
            mine[parameter].requires_grad or mine[parameter].grad is not None
        ):
            raise RuntimeError(
                f"{one.name} has a gradient, or requires one, but was frozen when the model was "
                "attached, so no state has a place: detach(), unfreeze, and attach again"
            )

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of the parameter, gradient) of those that there are."""
        self.awaited.meet()
        for bound in self._units.values():
            for one, parameter in zip(bound.spec.parameters, bound.parameters):
                if parameter.grad is not None:
                    yield one.name, parameter.grad

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self._units[unit].parameters[parameter].grad = None

    def zero(self, unit: int, parameters: Iterable[int]) -> None:
        """Make gradients zeros."""
        mine = self._units[unit].parameters
        for gradient in (mine[parameter].grad for parameter in parameters):
            if gradient is None:
                continue
            if gradient.grad_fn is not None:  # As torch.optim has it: a view cannot be detached.
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()

    # -- weights ---------------------------------------------------------------------------------

    def value(self, unit: int, parameter: int) -> torch.Tensor:
        """The values of a parameter in memory of their own."""
        return self._units[unit].parameters[parameter].detach().clone()

    # -- the step --------------------------------------------------------------------------------

    def check(self, frozen: Frozen) -> None:
        """Look whether what is to be updated is still what the states are for.

        Raises:
            RuntimeError: a parameter is not.
            ValueError: a gradient is sparse.
        """
        for unit in self._units.keys() & frozen.keys():
            for index in frozen[unit]:
                _check(self._units[unit], index, self._executor.device.torch_device)
                if unit in self.awaited:
                    _check_dtype(self._units[unit], index)

    def squares(self, ops: Sequence[Op], frozen: Frozen) -> list[float]:
        """The sum of the squares of the chunk of each op; the device is waited for once."""
        device, memory = self._executor.device, self._executor.memory
        sums, filled, stops = memory.sums(), 0, []
        for op in ops:
            for span in self._due(op, frozen):
                gradient, into = self._gradient(op.value.unit, span), sums[filled]
                if device.is_host:
                    into.fill_(sum_of_squares(gradient))
                else:
                    put_sum_of_squares(gradient, into, memory.workspace(op))
                filled += 1
            stops.append(filled)
        there = torch.empty(filled, dtype=sums.dtype, device="cpu")
        self._executor.copy_now(there, sums[:filled])
        found = there.tolist()
        return [in_order(found[start:stop]) for start, stop in pairwise([0, *stops])]

    @torch.no_grad()
    def update(self, op: Op, frozen: Frozen, scale: float) -> None:
        """Take the step of the chunk of an op."""
        _, unit, chunk = op.value
        spec, memory, turns = self._units[unit].spec, self._executor.memory, frozen[unit]
        piece = spec.chunks[chunk]
        fmt = self._plan.states.format(spec.segments[piece.segment].dtype)
        home = self._plan.home("state", unit)
        record = views(memory.at(Use(home, Value("state", unit, chunk))), fmt, piece.elements)
        for span in self._due(op, frozen):
            parameter, turn = self._units[unit].parameters[span.parameter], turns[span.parameter]
            here = slice(span.parameter_start, span.parameter_start + span.elements)
            ends = here.stop == spec.parameters[span.parameter].elements
            update_parts(
                parameter.detach().view(-1)[here],
                self._gradient(unit, span),
                cut(record, fmt, span.chunk_start, span.elements),
                [Part(0, span.elements, span.parameter_start, 0, is_last=ends)],
                [(turn.hyper, turn.step)],
                gradient_scale=scale,
                format=fmt,
                workspace=memory.workspace(op),
            )

    def _due(self, op: Op, frozen: Frozen) -> Iterator[Span]:
        _, unit, chunk = op.value
        spec: Chunk = self._units[unit].spec.chunks[chunk]
        return (span for span in spec.spans if span.parameter in frozen[unit])

    def _gradient(self, unit: int, span: Span) -> torch.Tensor:
        gradient = self._units[unit].parameters[span.parameter].grad
        assert gradient is not None
        flat = gradient.detach().reshape(-1)
        return flat[span.parameter_start : span.parameter_start + span.elements]

    # -- sleep, see [Note: Residents asleep] -----------------------------------------------------

    def _room(self, value: Value) -> torch.Tensor:
        return zeros_on(self._executor.device, self._plan.bytes_of(value.kind, value.unit))

    def flat(self, value: Value) -> torch.Tensor:
        """The weights or gradients of a unit as they would lie in an arena, copied together."""
        bound, flat = self._units[value.unit], self._room(value)
        for index in range(len(bound.parameters)):
            _check_values(bound, index, self._executor.device.torch_device)
        for parameter, view in self._within(value, flat):
            source = parameter if value.kind == "weight" else parameter.grad
            if source is not None:
                view.copy_(source.detach())
        return flat

    def fill(self, value: Value, read: Callable[[torch.Tensor], None]) -> None:
        """Put back what `flat` gave, and `read` reads, where nobody has kept it."""
        flat = self._room(value)
        read(flat)
        for parameter, view in self._within(value, flat):
            kept = self._asleep[parameter]
            into = kept.weight if value.kind == "weight" else kept.gradient
            if into is not None and not kept.held(value):
                into.copy_(view)

    def _within(
        self, value: Value, flat: torch.Tensor
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter, and the view of its values in the flat ones of its unit."""
        bound = self._units[value.unit]
        if value.kind == "weight":
            yield from zip(bound.parameters, bound.views_of(flat).views)
            return
        for index, (parameter, one) in enumerate(zip(bound.parameters, bound.spec.parameters)):
            if one.trainable:
                offset = bound.spec.gradient_offset(index)
                yield parameter, typed(flat, one.dtype, offset, one.shape)

    def rest(
        self, home_of: Callable[[int, int], Any], refuse: Callable[[nn.Parameter], None]
    ) -> None:
        """Give the memory back that only the parameters hold; any use is refused from here on.

        Args:
            home_of: the home of a parameter, by unit and index.
            refuse: raises; called where a backward brings a gradient. What it holds torch hides
                from the garbage collector.
        """
        for bound in self._units.values():  # All look first: some may hold what others have.
            for parameter, one in zip(bound.parameters, bound.spec.parameters):
                self._asleep[parameter] = _Asleep.of(parameter, one.trainable)
        for unit, bound in self._units.items():
            for index, parameter in enumerate(bound.parameters):
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._asleep[parameter].guard = register(refuse)
                parameter.grad = None
                parameter._offload_home = home_of(unit, index)  # type: ignore[attr-defined]
            bound.rest()
            # Earlier graphs have saved the parameters themselves, which show NaN now: counted as a
            # change, torch refuses them until `wake`.
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(bound.parameters)

    def take_room(self) -> None:
        """Take memory again for what `rest` has given back.

        Raises:
            MemoryError: it is not there.
        """
        with torch.inference_mode(False):
            for parameter, kept in self._asleep.items():
                kept.take_room(parameter, self._executor.device)

    def give_room(self) -> None:
        """Take back what `take_room` did."""
        for kept in self._asleep.values():
            kept.give_room()

    def wake(self) -> None:
        """Let the parameters be plain again."""
        for parameter, kept in self._asleep.items():
            assert kept.weight is not None
            if kept.guard is not None:
                kept.guard.remove()
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data = kept.weight
                parameter.__class__ = nn.Parameter
                parameter.grad = kept.gradient
                now = parameter._version
                _autograd._unsafe_set_version_counter([parameter], [now - 1])  # One is of `rest`.
            del parameter._offload_home  # type: ignore[attr-defined]
        self._asleep.clear()


@torch.no_grad()
def settle(
    unit: BoundUnit, device: Device, fresh: Container[nn.Parameter], start: Callable[[], None]
) -> None:
    """Give the parameters of a unit memory of their own on the device; `start` those `fresh`."""
    values = [parameter.data for parameter in unit.parameters]
    for parameter, value in zip(unit.parameters, values):
        parameter.grad = None
        parameter.data = device.empty(value.shape, value.dtype).copy_(value)
    start()
    for parameter, value in zip(unit.parameters, values):
        if parameter not in fresh:  # Whose module may have started it, too.
            parameter.data.copy_(value)
    device.drain()


class _Asleep:
    """What is kept of a parameter whose engine sleeps."""

    def __init__(
        self,
        weight: torch.Tensor | None,
        gradient: torch.Tensor | None,
        *,
        has_gradient: bool,
    ):
        """Weight and gradient where somebody else has them, too; else None."""
        self.weight, self.gradient = weight, gradient
        """Changes of the parameter that torch has counted."""
        self.guard: Any = None
        """The hook that refuses a gradient."""
        self._has_gradient = has_gradient
        self._held = (weight is not None, gradient is not None)

    @classmethod
    def of(cls, parameter: nn.Parameter, trainable: bool) -> _Asleep:
        """Before the parameter lets go of both. What the plan has no such gradient of stays."""
        mine, idle = holders(parameter), holders(idle_parameter())
        other = not trainable or getattr(parameter.grad, "dtype", None) != parameter.dtype
        gradient = parameter.grad if mine[1:] != idle[1:] or other else None
        weight = parameter.data if mine[0] != idle[0] else None
        has_gradient = parameter.grad is not None
        return cls(weight, gradient, has_gradient=has_gradient)

    def held(self, value: Value) -> bool:
        """Whether somebody has kept the weight, or the gradient, where it is."""
        return self._held[value.kind == "gradient"]

    def take_room(self, parameter: RestingParameter | nn.Parameter, device: Device) -> None:
        """Memory of the device for what nobody has kept."""
        shape, dtype = parameter.shape, parameter.dtype
        try:
            if not self._held[0]:
                self.weight = device.empty(shape, dtype)
            if self._has_gradient and not self._held[1]:
                self.gradient = device.empty(shape, dtype)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"of a sleeping parameter: {error}") from error

    def give_room(self) -> None:
        """Let go of it again."""
        if not self._held[0]:
            self.weight = None
        if not self._held[1]:
            self.gradient = None


_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


def in_order(numbers: Iterable[float]) -> float:
    """Their sum, one rounded addition after the other (`sum` makes up for what is rounded off)."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _check(bound: BoundUnit, index: int, device: torch.device) -> None:
    """Raise where a parameter, or its gradient, is not what its states are for."""
    _check_values(bound, index, device)
    one, parameter = bound.spec.parameters[index], bound.parameters[index]
    assert parameter.grad is not None
    require_dense(one.name, parameter.grad)
    if parameter.grad.numel() != one.elements or parameter.grad.dtype not in GRADIENT_DTYPES:
        raise ValueError(
            f"the gradient of {one.name} is {tuple(parameter.grad.shape)} of "
            f"{parameter.grad.dtype}, and its states are for {one.shape}: likely something was "
            "written to its data; assign a gradient of the parameter's shape"
        )


def _check_values(bound: BoundUnit, index: int, device: torch.device) -> None:
    """Raise where a parameter is not what its states are for."""
    one, parameter = bound.spec.parameters[index], bound.parameters[index]
    found = (tuple(parameter.shape), parameter.dtype, parameter.device)
    wanted = (one.shape, getattr(torch, one.dtype), device)
    if found != wanted or not parameter.is_contiguous():
        raise RuntimeError(
            f"{one.name} is {found} with strides {parameter.stride()} now, but its states are for "
            f"a contiguous {wanted}: likely the model was converted after attach; leave that out, "
            "or detach() before it"
        )


def _check_dtype(bound: BoundUnit, index: int) -> None:
    """Raise where a gradient that a lane takes is of another dtype than its place there."""
    one, gradient = bound.spec.parameters[index], bound.parameters[index].grad
    if gradient is not None and gradient.dtype != getattr(torch, one.dtype):
        raise ValueError(
            f"the gradient of {one.name} is of {gradient.dtype}, and the parameter of {one.dtype}: "
            "likely p.grad_dtype was set; leave it alone, or keep the optimizer's states on the "
            "device, Config(optimizer='device'), where such a gradient is used as it is"
        )
