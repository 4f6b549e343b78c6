"""Gradients, as backward brings them: taken out as they are produced, and kept in their tier.

[Note: Order of summation]
Every time autograd has accumulated into `p.grad` the engine takes the result out. The first is
copied, each later one is added by one rounding, in the order in which they come, on every tier. A
gradient on its way out waits in the unit's device slot (small ones before it, see below) until all
of the unit's parameters have theirs; a parameter that comes twice, or another unit that needs the
slot, sends it on earlier.

[Note: Gradients that wait]
Small ones wait where autograd has made them for the last of their unit: a place is taken, and sent
on, once for all of them. The hook that lets a gradient wait is not `whole`: a signal handler that
raises there cuts the backward off before this gradient or after it; none is half taken.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cpu_adam import accumulate
from offload.arena import typed
from offload.executor import Executor
from offload.extents import require_values
from offload.passes import Passes
from offload.program import Use, Value, Verb
from offload.served import ServedParameter
from offload.task import Task

WAITING_BYTES_MAX = 128 << 10
"""Gradients of a unit that wait for its last, if together they are no larger."""

WAITING_BYTES_OF_ALL_MAX = 8 << 20
"""Of so many units: where a unit's last does not come, others wait, in no budget."""


@dataclass(slots=True)
class Collecting:
    """The gradient of one unit, as far as it has come."""

    trainable: frozenset[int]
    waits: int
    """How many of its gradients may wait: all but the last; 0 where they are too large."""
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)
    """By parameter, what has come and is still where autograd has made it."""
    kept: set[int] = field(default_factory=set)
    """Parameters that have a gradient."""
    arrived: set[int] = field(default_factory=set)
    """Parameters whose gradient is in the place where it is collected, not yet sent on."""
    task: Task | None = None
    """The collecting, while it goes on."""
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    """By parameter, the place where its gradient is collected."""


class Collector:
    """Brings the gradients of an engine's parameters home, and knows which there are."""

    def __init__(self, executor: Executor, passes: Passes):
        """Of all units of the plan; `passes` says where each op stands."""
        self._executor = executor
        self._plan = executor.plan
        self._passes = passes
        self._under_way: set[int] = set()
        """Units whose gradient is being collected."""
        self.units: list[Collecting] = []
        here = executor.device.is_host  # Elsewhere each comes on a stream of its own.
        left = WAITING_BYTES_OF_ALL_MAX if here else 0
        for index, unit in enumerate(self._plan.profile.units):
            trainable = frozenset(i for i, p in enumerate(unit.parameters) if p.trainable)
            size = self._plan.bytes_of("gradient", index)
            waits = len(trainable) - 1 if size <= min(left, WAITING_BYTES_MAX) else 0
            left -= size if waits else 0
            self.units.append(Collecting(trainable, waits))

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient."""
        return parameter in self.units[unit].kept

    def has_any(self, unit: int) -> bool:
        """Whether any parameter of a unit has a gradient."""
        return bool(self.units[unit].kept)

    def assigned(self, unit: int, parameter: int) -> None:
        """A parameter has a gradient now that no backward brought."""
        self.units[unit].kept.add(parameter)

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self.units[unit].kept.discard(parameter)

    def zero(self, unit: int, parameters: Container[int], *, elsewhere: Container[int]) -> None:
        """Make gradients zeros at home; of those `elsewhere` nobody needs what is there."""
        collecting, value = self.units[unit], Value("gradient", unit)
        on_nvme = self._plan.home("gradient", unit).tier == "nvme"
        self._executor.quiesce("gradient", unit)
        if on_nvme and all(one in parameters or one in elsewhere for one in collecting.kept):
            self._executor.clear(value)  # Where that fails it can be asked for again.
            return
        flat = self._executor.peek(value)
        for parameter in collecting.kept:
            if parameter in parameters:
                self.shaped(flat, unit, parameter).zero_()
        with self._executor.lanes.once() if on_nvme else nullcontext():
            self._executor.poke(value, flat)  # On a drive it takes along what is not zeros.

    # -- backward --------------------------------------------------------------------------------

    def collect(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Take over a gradient that autograd has just produced.

        Raises:
            ValueError: a sparse gradient, or one without values.
        """
        if gradient.layout is not torch.strided or type(gradient) is not torch.Tensor:
            require_values(self._plan.profile.units[unit].parameters[parameter].name, gradient)
        collecting = self.units[unit]
        if parameter in collecting.waiting:
            self._put(collecting, unit)
        if parameter in collecting.arrived and self._plan.gradient_slot[unit] is not None:
            self.send(unit)
        collecting.waiting[parameter] = gradient
        self._put(collecting, unit)
        if len(collecting.arrived) == len(collecting.trainable):
            self.send(unit)

    def _put(self, collecting: Collecting, unit: int) -> None:
        """Put what waits to what has arrived."""
        if collecting.task is None:
            self._acquire(unit)
        else:
            self._executor.lanes.join(collecting.task)
        at_home = self._plan.gradient_slot[unit] is None
        while collecting.waiting:
            parameter, gradient = collecting.waiting.popitem()
            view = collecting.views.get(parameter)
            if view is None:
                view = collecting.views[parameter] = self._view(
                    self._passes.known.collecting_place(unit), unit, parameter
                )
            if at_home and parameter in collecting.kept:
                accumulate(view, gradient)
            else:
                view.copy_(gradient)
            if at_home:
                collecting.kept.add(parameter)
            collecting.arrived.add(parameter)

    def send(self, unit: int) -> None:
        """Send what has arrived on to the unit's home; nothing to do when nothing has."""
        collecting = self.units[unit]
        if collecting.waiting:
            self._put(collecting, unit)
        if collecting.task is None:
            return
        self._executor.lanes.finish(collecting.task)
        collecting.task = None
        self._under_way.discard(unit)
        arrived, collecting.arrived = collecting.arrived, set()
        if self._plan.gradient_slot[unit] is None:
            return
        for known in self._passes.known.carry_out(
            unit, self._passes.position + 1, first=not collecting.kept
        ):
            run = None
            if known.op.verb is Verb.ADD:
                reads = known.op.reads
                run = self._adder(unit, reads[0], reads[1], arrived, set(collecting.kept))
            self._executor.issue_known(known, self._passes.number, run)
        collecting.kept |= arrived

    def send_all(self) -> bool:
        """Send on everything that has come anywhere; whether anything had."""
        came = [
            at
            for at, collecting in enumerate(self.units)
            if collecting.waiting or collecting.task is not None
        ]
        for unit in came:
            self.send(unit)
        return bool(came)

    def forget_places(self) -> None:
        """The memory of the tiers is given back: keep no views of it."""
        for collecting in self.units:
            collecting.views.clear()

    def home_moved(self, unit: int) -> None:
        """The home of a unit's gradients is not where it was."""
        self.units[unit].views.clear()
        self._passes.known.home_moved(unit)

    def _acquire(self, unit: int) -> None:
        """Wait until the collecting place of a unit is free, and begin to collect."""
        slot = self._plan.gradient_slot[unit]
        for other in sorted(self._under_way) if self._under_way and slot is not None else ():
            if self._plan.gradient_slot[other] == slot:
                self.send(other)
        known = self._passes.known.collect(unit, self._passes.position)
        task = self._executor.lanes.issue(known, self._passes.number, None)
        try:
            self._executor.lanes.begin(task)
        except BaseException:
            if task.begun:
                self._executor.lanes.finish(task)
            self._executor.lanes.cancel([task])
            raise
        self.units[unit].task = task
        self._under_way.add(unit)

    def _view(self, use: Use, unit: int, parameter: int) -> torch.Tensor:
        """A gradient in the shape of its parameter, in a place of a memory tier."""
        return self.shaped(self._executor.memory.at(use), unit, parameter)

    def shaped(self, flat: torch.Tensor, unit: int, parameter: int) -> torch.Tensor:
        """A gradient in the shape of its parameter, in the flat bytes of all of the unit's."""
        spec = self._plan.profile.units[unit]
        dtype, shape = self.dtype_of(unit, parameter), spec.parameters[parameter].shape
        return typed(flat, dtype, spec.gradient_offset(parameter), shape)

    def dtype_of(self, unit: int, parameter: int) -> str:
        """In which gradients of a parameter are summed."""
        spec = self._plan.profile.units[unit]
        return spec.segments[spec.parameters[parameter].segment].gradient_dtype

    def _adder(
        self, unit: int, stage: Use, deposit: Use, arrived: set[int], kept: set[int]
    ) -> Callable[[], None]:
        """The op that adds the staged gradients to those kept; what is new is copied."""

        def run() -> None:
            for parameter in sorted(arrived):
                into = self._view(deposit, unit, parameter)
                gradient = self._view(stage, unit, parameter)
                if parameter in kept:
                    accumulate(into, gradient)
                else:
                    into.copy_(gradient)

        return run


def let_wait(collecting: Collecting, parameter: int, holder: nn.Parameter) -> bool:
    """Let a gradient wait that is not the last of its unit, see [Note: Gradients that wait].

    A parameter's second gradient does not wait: the first has to be sent on, or added to, before.
    """
    if len(collecting.waiting) + len(collecting.arrived) >= collecting.waits:
        return False
    if parameter in collecting.waiting or parameter in collecting.arrived:
        return False
    gradient = _GRAD.__get__(holder)
    if gradient is None or gradient.layout is not torch.strided:
        return False
    if type(gradient) is not torch.Tensor:
        return False
    _GRAD.__set__(holder, None)
    collecting.waiting[parameter] = gradient
    return True


def take_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Take the gradient that autograd has put on a parameter, leaving None."""
    gradient: torch.Tensor | None
    if type(parameter) is ServedParameter:  # It has no trap.
        gradient = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
    return gradient


_GRAD: Any = torch.Tensor.grad
"""Torch's own, whatever a class makes of it."""
