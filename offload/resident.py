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
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn

from cpu_adam import Part, sum_of_squares, update_parts, views
from cpu_adam.checks import GRADIENT_DTYPES
from cpu_adam.reference import cut, put_sum_of_squares
from offload.asleep import ResidentsAsleep
from offload.awaited import Awaited, Owner
from offload.binding import BoundUnit
from offload.device import Device
from offload.executor import Executor
from offload.extents import require_apart, require_values, zero
from offload.frozen import Frozen
from offload.profile import Chunk, Span
from offload.program import Op, Use, Value


class Residents:
    """The resident units of an engine."""

    def __init__(self, executor: Executor, units: Sequence[BoundUnit], owner: Owner):
        """Of all `units` of an engine, those that the plan says are."""
        self._executor = executor
        self._plan = executor.plan
        self._units = {u: units[u] for u in sorted(executor.plan.residents)}
        self.awaited = Awaited(executor, self._units.values(), owner)
        self.asleep = ResidentsAsleep(executor, self._units)

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
            if gradient is not None:
                zero(gradient)

    # -- weights ---------------------------------------------------------------------------------

    def value(self, unit: int, parameter: int) -> torch.Tensor:
        """The values of a parameter in memory of their own."""
        return self._units[unit].parameters[parameter].detach().clone()

    # -- the step --------------------------------------------------------------------------------

    def check(self, frozen: Frozen) -> None:
        """Look whether what is to be updated is still what the states are for.

        Raises:
            RuntimeError: a parameter is not, or lies where another one does.
            ValueError: a gradient is sparse, or has no values.
        """
        updated = list[tuple[str, nn.Parameter, bool]]()
        for unit in self._units.keys() & frozen.keys():
            bound, by_lanes = self._units[unit], unit in self.awaited
            for at in frozen[unit]:
                _check(bound, at, self._executor.device.torch_device, by_lanes=by_lanes)
                updated.append((bound.spec.parameters[at].name, bound.parameters[at], by_lanes))
        require_apart(updated)

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
        spec, memory, steps = self._units[unit].spec, self._executor.memory, frozen[unit]
        piece = spec.chunks[chunk]
        fmt = self._plan.states.format(spec.segments[piece.segment].dtype)
        home = self._plan.home("state", unit)
        record = views(memory.at(Use(home, Value("state", unit, chunk))), fmt, piece.elements)
        for span in self._due(op, frozen):
            parameter, step = self._units[unit].parameters[span.parameter], steps[span.parameter]
            here = slice(span.parameter_start, span.parameter_start + span.elements)
            ends = here.stop == spec.parameters[span.parameter].elements
            update_parts(
                parameter.detach().view(-1)[here],
                self._gradient(unit, span),
                cut(record, fmt, span.chunk_start, span.elements),
                [Part(0, span.elements, span.parameter_start, 0, is_last=ends)],
                [(step.hyper, step.number)],
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


@torch.no_grad()
def give_memory(
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


def in_order(numbers: Iterable[float]) -> float:
    """Their sum, one rounded addition after the other (`sum` makes up for what is rounded off)."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def _check(bound: BoundUnit, index: int, device: torch.device, *, by_lanes: bool) -> None:
    """Raise where a parameter, or its gradient, is not what its states are for.

    One that lanes take is of the dtype of its place there.
    """
    bound.require_form(index, device)
    one, parameter = bound.spec.parameters[index], bound.parameters[index]
    assert parameter.grad is not None
    require_values(one.name, parameter.grad)
    if parameter.grad.numel() != one.elements or parameter.grad.dtype not in GRADIENT_DTYPES:
        raise ValueError(
            f"the gradient of {one.name} is {tuple(parameter.grad.shape)} of "
            f"{parameter.grad.dtype}, and its states are for {one.shape}: likely something was "
            "written to its data; assign a gradient of the parameter's shape"
        )
    if by_lanes and parameter.grad.dtype != parameter.dtype:
        raise ValueError(
            f"the gradient of {one.name} is of {parameter.grad.dtype}, the parameter of "
            f"{one.dtype}: likely p.grad_dtype was set; leave it alone, or keep its states on the "
            "device, Config(optimizer='device'), where such a gradient is used as it is"
        )
