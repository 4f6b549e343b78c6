"""Gradients: taken out as they are produced, kept in their tier, shown as `p.grad`.

[Note: Order of summation]
Every time autograd has accumulated into `p.grad` the engine takes the result out. The first is
copied, each later one is added by one rounding, in the order in which they come, on every tier. A
gradient on its way out waits in the unit's device slot until all of the unit's parameters have
theirs; a parameter that comes twice, or another unit that needs the slot, sends it on earlier.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cpu_adam import accumulate
from offload.arena import host_tensor, typed
from offload.config import format_bytes
from offload.executor import Executor
from offload.exposure import use_count
from offload.passes import Passes
from offload.program import Use, Value, Verb
from offload.task import Task


@dataclass(slots=True)
class _Unit:
    """The gradient of one unit."""

    trainable: frozenset[int]
    kept: set[int] = field(default_factory=set)
    """Parameters that have a gradient."""
    arrived: set[int] = field(default_factory=set)
    """Parameters whose gradient is in the place where it is collected."""
    task: Task | None = None
    """The collecting, while it goes on."""
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    """By parameter, the place where its gradient is collected."""
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    """What `p.grad` has returned."""
    apart: set[int] = field(default_factory=set)
    """Those of the shown that have memory of their own: by `Gradients.let_go`, or by the user."""
    copied: torch.Tensor | None = None
    """The unit's gradients in CPU memory, where their home is elsewhere and they were shown."""


_OWN_REFERENCES = 2
"""References to a shown gradient when nobody else holds it: ours, and the one that asks."""


class Gradients:
    """The gradients of an engine's parameters, by unit and parameter."""

    def __init__(self, executor: Executor, passes: Passes, limit_bytes: int):
        """No gradient yet; at most `limit_bytes` of copies for `p.grad` at once."""
        self._limit_bytes = limit_bytes
        self._idle_count = 0
        """Use count of the storage of a gradient that is shown when nobody has a view of it."""
        self._told = False
        """Whether the user was told of views that somebody has."""
        self._executor = executor
        self._plan = executor.plan
        self._passes = passes
        self._under_way: set[int] = set()
        """Units whose gradient is being collected."""
        self._units = [
            _Unit(frozenset(i for i, p in enumerate(unit.parameters) if p.trainable))
            for unit in self._plan.profile.units
        ]

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient."""
        return parameter in self._units[unit].kept

    # -- backward --------------------------------------------------------------------------------

    def collect(self, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Take over a gradient that autograd has just produced.

        Raises:
            ValueError: a sparse gradient.
        """
        if gradient.layout is not torch.strided:
            name = self._plan.profile.units[unit].parameters[parameter].name
            raise ValueError(
                f"the gradient of {name} is {gradient.layout}, and only dense gradients can be "
                "offloaded: build the embedding with sparse=False"
            )
        now = self._units[unit]
        at_home = self._plan.gradient_slot[unit] is None
        if parameter in now.arrived and not at_home:
            self.send(unit)
        if now.task is None:
            self._acquire(unit)
        else:
            self._executor.lanes.join(now.task)
        view = now.views.get(parameter)
        if view is None:
            view = now.views[parameter] = self._view(
                self._passes.known.collecting(unit), unit, parameter
            )
        if at_home and parameter in now.kept:
            accumulate(view, gradient)
        else:
            view.copy_(gradient)
        if at_home:
            now.kept.add(parameter)
        now.arrived.add(parameter)
        if now.arrived == now.trainable:
            self.send(unit)

    def send(self, unit: int) -> None:
        """Send what has arrived on to the unit's home; nothing to do when nothing has."""
        now = self._units[unit]
        if now.task is None:
            return
        self._executor.lanes.finish(now.task)
        now.task = None
        self._under_way.discard(unit)
        arrived, now.arrived = now.arrived, set()
        if self._plan.gradient_slot[unit] is None:
            return
        for known in self._passes.known.carry_out(
            unit, self._passes.position + 1, first=not now.kept
        ):
            run = None
            if known.op.verb is Verb.ADD:
                reads = known.op.reads
                run = self._adder(unit, reads[0], reads[1], arrived, set(now.kept))
            self._executor.issue_known(known, self._passes.number, run)
        now.kept |= arrived

    def send_all(self) -> None:
        """Send on everything that has arrived anywhere."""
        for unit in sorted(self._under_way):
            self.send(unit)

    def forget_places(self) -> None:
        """The memory of the tiers is given back: keep no views of it."""
        for now in self._units:
            now.views.clear()

    def _acquire(self, unit: int) -> None:
        """Wait until the collecting place of a unit is free, and begin to collect."""
        slot = self._plan.gradient_slot[unit]
        for other in sorted(self._under_way) if slot is not None else ():
            if self._plan.gradient_slot[other] == slot:
                self.send(other)
        known = self._passes.known.collect(unit, self._passes.position)
        task = self._executor.reserve(known, self._passes.number)
        try:
            self._executor.lanes.begin(task)
        except BaseException:
            self._executor.lanes.cancel([task])
            raise
        now = self._units[unit]
        now.task = task
        self._under_way.add(unit)
        for parameter in list(now.shown):
            if not self._held(unit, parameter) and not self._viewed(unit, parameter):
                del now.shown[parameter]
                now.apart.discard(parameter)
        if not now.shown:
            now.copied = None

    def _view(self, use: Use, unit: int, parameter: int) -> torch.Tensor:
        """A gradient in the shape of its parameter, in a place of a memory tier."""
        return self._shaped(self._executor.memory.at(use), unit, parameter)

    def _shaped(self, flat: torch.Tensor, unit: int, parameter: int) -> torch.Tensor:
        spec = self._plan.profile.units[unit]
        one = spec.parameters[parameter]
        dtype = spec.segments[one.segment].gradient_dtype
        return typed(flat, dtype, spec.gradient_offset(parameter), one.shape)

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

    # -- p.grad ----------------------------------------------------------------------------------

    def show(self, unit: int, parameter: int) -> torch.Tensor | None:
        """The gradient as a contiguous CPU tensor in the parameter's shape; edits count.

        Raises:
            MemoryError: the gradient is not in CPU memory, and a copy has no room.
        """
        now = self._units[unit]
        if parameter not in now.kept:
            return None
        self._executor.quiesce("gradient", unit)
        if parameter not in now.shown:
            now.shown[parameter] = self._seen(unit, parameter)
        return now.shown[parameter]

    def read(self, unit: int, parameter: int) -> torch.Tensor | None:
        """The gradient in memory of its own, whatever the limit; None where there is none."""
        if parameter not in self._units[unit].kept:
            return None
        self._executor.quiesce("gradient", unit)
        self.settle_shown()
        flat = self._executor.peek(Value("gradient", unit))
        return self._shaped(flat, unit, parameter).clone()

    def _seen(self, unit: int, parameter: int) -> torch.Tensor:
        """A gradient as `p.grad` shows it: by a storage of its own, so that views are counted."""
        with torch.inference_mode(False):
            own = torch.from_numpy(self._window(unit).numpy())
            seen = self._shaped(own, unit, parameter)
        self._idle_count = use_count(seen) - 1  # Less `own`.
        return seen

    def _window(self, unit: int) -> torch.Tensor:
        """A unit's gradients in CPU memory: the home itself, or a copy that is put home later."""
        now, value = self._units[unit], Value("gradient", unit)
        home = self._plan.home("gradient", unit)
        if home.tier == "cpu" or (home.tier == "device" and self._executor.device.is_host):
            return self._executor.peek(value)
        if now.copied is None:
            size = self._plan.bytes_of("gradient", unit)
            held = sum(one.copied.nbytes for one in self._units if one.copied is not None)
            if held + size > self._limit_bytes:
                raise MemoryError(
                    f"showing the gradients of {self._plan.profile.units[unit].name} needs a copy "
                    f"of {format_bytes(size)} from {home.tier}; copies of {format_bytes(held)} are "
                    f"held and exposed_memory is {format_bytes(self._limit_bytes)}. Clip with "
                    "Config(max_grad_norm=...) instead of clip_grad_norm_, keep gradients in cpu "
                    "memory (--gradients cpu), or raise Config.exposed_memory"
                )
            now.copied = host_tensor(size)
            if now.kept:
                now.copied.copy_(self._executor.peek(value))
        return now.copied

    def replace(self, unit: int, parameter: int, gradient: torch.Tensor | None) -> None:
        """Assign `p.grad`.

        Raises:
            ValueError: of another shape than the parameter, or of a frozen one.
        """
        if gradient is None:
            self.give_up(unit, parameter)
            return
        now = self._units[unit]
        one = self._plan.profile.units[unit].parameters[parameter]
        if tuple(gradient.shape) != one.shape or parameter not in now.trainable:
            raise ValueError(
                f"a gradient of shape {tuple(gradient.shape)} was assigned to {one.name} of shape "
                f"{one.shape}{'' if one.trainable else ', which was frozen at attach'}"
            )
        self._executor.quiesce("gradient", unit)
        if now.shown.get(parameter) is not gradient:
            self._give_up(unit, parameter)
        now.apart.discard(parameter)
        window = self._seen(unit, parameter)
        if window.data_ptr() != gradient.data_ptr():
            window.copy_(gradient)
        now.shown[parameter] = window
        now.kept.add(parameter)

    def settle_shown(self) -> None:
        """Put home what `p.grad` has shown from elsewhere, edited or not."""
        for unit, now in enumerate(self._units):
            if not now.shown:
                continue
            self._executor.quiesce("gradient", unit)
            for parameter, shown in now.shown.items():
                here = self._shaped(self._window(unit), unit, parameter)
                if shown.data_ptr() != here.data_ptr():
                    here.copy_(shown)
                    now.apart.add(parameter)  # By `p.grad.data = ...`, where it was not yet.
            if now.copied is not None:
                self._executor.poke(Value("gradient", unit), now.copied)

    def renew_shown(self) -> None:
        """After a backward: gradients that are still held show what was added to them."""
        for unit, now in enumerate(self._units):
            if not now.shown:
                continue
            self._executor.quiesce("gradient", unit)
            if now.copied is not None:
                now.copied.copy_(self._executor.peek(Value("gradient", unit)))
            for parameter in now.apart:
                home = self._shaped(self._window(unit), unit, parameter)
                now.shown[parameter].copy_(home)

    def _held(self, unit: int, parameter: int) -> bool:
        """Whether somebody else holds a gradient that was shown."""
        return sys.getrefcount(self._units[unit].shown[parameter]) > _OWN_REFERENCES

    def let_go(self) -> None:
        """From here on the homes belong to the update: whoever holds a gradient gets its bytes.

        What is done to those counts for the next backward, as it does with torch's own.
        """
        for unit, now in enumerate(self._units):
            for parameter in list(now.shown) if now.copied is None else ():
                self._let_go(unit, parameter)

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        now = self._units[unit]
        now.kept.discard(parameter)
        self._give_up(unit, parameter)
        now.shown.pop(parameter, None)
        now.apart.discard(parameter)
        if not now.kept:
            now.copied = None

    def _give_up(self, unit: int, parameter: int) -> None:
        """What was shown of one gradient will never count again."""
        now = self._units[unit]
        if now.copied is None and self._viewed(unit, parameter) and not self._told:
            self._told = True
            name = self._plan.profile.units[unit].parameters[parameter].name
            warnings.warn(
                f"a view of the gradient of {name} is held (p.grad.detach(), .data, .view(), "
                "p.grad[0]) while zero_grad() or an assignment gives the gradient up: it lies "
                "where the next one will come, and will show that. Likely it was kept for "
                "later, or is a variable of a loop; keep p.grad itself, or a clone()",
                RuntimeWarning,
                stacklevel=4,
            )
        self._let_go(unit, parameter)

    def _viewed(self, unit: int, parameter: int) -> bool:
        """Whether somebody holds a view of a gradient that was shown where it lives."""
        now = self._units[unit]
        if parameter not in now.shown or parameter in now.apart:
            return False
        return use_count(now.shown[parameter]) > self._idle_count

    def _let_go(self, unit: int, parameter: int) -> None:
        """What was shown of one gradient is its holder's, if there is one."""
        now = self._units[unit]
        if parameter not in now.shown or parameter in now.apart:
            return
        if self._held(unit, parameter):
            with torch.no_grad():
                now.shown[parameter].data = now.shown[parameter].clone()
            now.apart.add(parameter)
        elif not self._viewed(unit, parameter):
            del now.shown[parameter]

    def zero(self, unit: int, parameter: int) -> None:
        """Make a gradient zeros, as `zero_grad(set_to_none=False)` does."""
        shown = self.show(unit, parameter)
        if shown is not None:
            shown.zero_()


def take_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Take the gradient that autograd has put on a parameter, leaving None."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _GRAD.__get__(parameter)
        _GRAD.__set__(parameter, None)
    return gradient


_GRAD: Any = torch.Tensor.grad
"""Torch's own, whatever a class makes of it."""
