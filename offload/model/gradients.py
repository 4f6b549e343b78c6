"""Gradients: taken over as backward makes them, kept in their tier, shown as `p.grad`.

[Note: Order of summation]
Every time autograd has accumulated into `p.grad` the engine takes the result out. The first is
copied, each later one is added by one rounding, in the order in which they come, on every tier. A
gradient on its way waits in the unit's device slot until all of the unit's parameters have theirs.
A parameter that comes twice, or another unit that needs the slot, sends it on earlier.

[Note: p.grad]
A gradient at home in a memory tier is shown in place: `p.grad` is that home, and a later backward
adds to it. One on nvme is a snapshot, or at rest. What is assigned is copied in. At `step()`,
`zero_grad()` and `p.grad = None` the engine lets go: a tensor that somebody holds gets memory of
its own first, so it keeps what it showed; a view of it does not, and shows later gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cpu_adam import accumulate
from offload.model.passes import Passes
from offload.model.snapshots import Key, Snapshots, share
from offload.model.units import refuse_sparse, require_fitting
from offload.planning.layout import FULL
from offload.planning.profile import Parameter, Unit
from offload.program.compile import add_gradient, collect, collected, offload_gradient, passing
from offload.program.ops import Op, Use, Value, Verb
from offload.runtime.memory import typed
from offload.runtime.runner import Runner, Task
from offload.runtime.torch_internals import no_trap
from offload.runtime.works import Work


@dataclass(slots=True)
class UnitGradient:
    """The gradient of one unit, as far as it has come."""

    trainable: frozenset[int]
    kept: set[int] = field(default_factory=set)
    """Parameters that have a gradient."""
    arrived: set[int] = field(default_factory=set)
    """Parameters whose gradient is in the place where it is collected, not yet sent on."""
    task: Task | None = None
    """The collecting, while it goes on."""
    summed: frozenset[int] = frozenset()
    """Parameters of which the squares are summed, or will be when what is queued has run."""
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    """By parameter, the place where its gradient is collected."""


class Gradients:
    """The gradients of an engine's streamed parameters."""

    def __init__(self, runner: Runner, passes: Passes, snapshots: Snapshots):
        self._runner = runner
        self._plan = runner.plan
        self._passes = passes
        self._snapshots = snapshots
        self._slots = [a or b for a, b in zip(self._plan.full_gradient, self._plan.gradient_slot)]
        """By unit, the slot in which its gradient is collected; None where that is at home."""
        self._collecting: set[int] = set()
        """Units whose gradient is being collected."""
        self._shown: dict[tuple[int, int], Callable[[], torch.Tensor | None]] = {}
        """By unit and parameter, what shows a gradient in place."""
        self.units = [
            UnitGradient(frozenset(i for i, p in enumerate(unit.parameters) if p.trainable))
            for unit in self._plan.profile.units
        ]

    # -- in backward -----------------------------------------------------------------------------

    def collect(self, unit: int, parameter: int, gradient: torch.Tensor) -> Use | None:
        """Take over a gradient; where it is `passing` with its unit, if it completes that."""
        if gradient.layout is not torch.strided:
            refuse_sparse(f"the gradient of {self._parameter(unit, parameter).name}")
        one = self.units[unit]
        if parameter in one.arrived and self._slots[unit] is not None:
            self.send(unit)
        self._put(one, unit, parameter, gradient)
        again = bool(one.kept)
        if len(one.arrived) < len(one.trainable):
            return None
        self.send(unit)
        return passing(self._plan, unit, again=again)

    def _put(self, one: UnitGradient, unit: int, parameter: int, gradient: torch.Tensor) -> None:
        """Put a gradient where those of its unit are collected."""
        if one.task is None:
            self._acquire(unit)
        else:
            self._runner.join(one.task)
        if (view := one.views.get(parameter)) is None:
            there = collected(self._plan, unit)
            view = one.views[parameter] = self._view(there, unit, parameter)
        if gradient.dtype is not view.dtype and view.dtype is not torch.float32:
            raise ValueError(
                f"the gradient of {self._parameter(unit, parameter).name} is {gradient.dtype}, and "
                f"{view.dtype} is kept: likely its module casts it in forward, as Switch "
                "Transformers' routers: cast it before attach; or p.grad_dtype was set, in place "
                "of Config(gradient_dtype='fp32')"
            )
        if parameter in self._present(unit):
            accumulate(view, gradient.to(view.dtype))
        else:
            view.copy_(gradient)
        if self._slots[unit] is None:
            one.kept.add(parameter)
        one.arrived.add(parameter)

    def _present(self, unit: int) -> Collection[int]:
        """The parameters of which there is a gradient where those of a unit are collected."""
        return self.units[unit].kept if self._slots[unit] is None else ()

    def send(self, unit: int) -> None:
        """Send what has arrived on to the unit's home; nothing to do when nothing has."""
        one = self.units[unit]
        if one.task is None:
            return
        arrived = self._end_collecting(unit, one.task)
        if self._slots[unit] is not None:
            self._move_home(unit, arrived, frozenset(one.kept))
            one.kept |= arrived

    def _end_collecting(self, unit: int, task: Task) -> frozenset[int]:
        """End the collecting of a unit; the parameters that have arrived in it."""
        one = self.units[unit]
        self._runner.finish(task)
        self._collecting.discard(unit)
        arrived, one.task, one.arrived = frozenset(one.arrived), None, set()
        return arrived

    def _move_home(self, unit: int, new: frozenset[int], kept: frozenset[int]) -> None:
        """Move what is new of a gradient from its slot home, and add it to what is kept there."""
        make, works = add_gradient if kept else offload_gradient, self._runner.works
        position = self._passes.position + 1

        def way() -> Iterator[tuple[Op, Work | None]]:
            for op in make(self._plan, unit, position):
                added = op.verb is Verb.ADD and bool(kept)
                yield op, works.add(op, new, kept) if added else works.of(op)

        key = make, unit, position, kept and (new, kept)
        phase = self._runner.phase(key, way)
        self._runner.start(phase, self._passes.number)

    def is_sum(self, unit: int) -> bool:
        """Whether what has come of a unit, often enough here, is all that this backward brings."""
        return True

    def send_all(self) -> None:
        """Send on everything that has come anywhere."""
        for unit in sorted(self._collecting):
            self.send(unit)

    def forget_places(self) -> None:
        """The memory of the tiers is given back: keep no views of it."""
        for one in self.units:
            one.views.clear()

    def _acquire(self, unit: int) -> None:
        """Wait until the collecting place of a unit is free, and begin to collect."""
        self._free_slot(unit)
        phase = self._runner.moves(collect, unit, self._passes.position)
        (task,) = self._runner.start(phase, self._passes.number)
        try:
            self._runner.begin(task)
        except BaseException:
            if task.begun:
                self._runner.finish(task)
            self._runner.cancel([task])
            raise
        self.units[unit].task, self.units[unit].summed = task, frozenset()
        self._collecting.add(unit)

    def _free_slot(self, unit: int) -> None:
        """Send on what another unit has in the slot in which a unit is collected."""
        slot = self._slots[unit]
        for other in sorted(self._collecting) if slot is not None else ():
            if self._slots[other] == slot:
                self.send(other)

    # -- what `p.grad` does ----------------------------------------------------------------------

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient."""
        return parameter in self.units[unit].kept

    def _require_sum(self, unit: int) -> None:
        """Refuse a look at what is still to be summed over ranks."""

    def shows(self, unit: int) -> bool:
        """Whether somebody may edit gradients of a unit before the next boundary."""
        return unit in self._snapshots or any(key[0] == unit for key in self._shown)

    def show(self, unit: int, parameter: int) -> torch.Tensor | None:
        """The gradient in the parameter's shape, None where there is none; edits count."""
        self._require_sum(unit)
        if not self.has(unit, parameter):
            return None
        self.units[unit].summed = frozenset()
        if self._on_nvme(unit):
            return self._snapshots.tensor(Key("gradient", unit, parameter))
        self._runner.quiesce("gradient", unit)
        found = self._shown.get((unit, parameter), lambda: None)()
        if found is None:
            found = share(self._at_home(unit, parameter))
            self._shown[unit, parameter] = weakref.ref(found)
        return found

    @torch.no_grad()
    def assign(self, unit: int, parameter: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient in, in place of the one that there is, if any."""
        if gradient is None:
            self.give_up(unit, parameter)
            return
        self._require_sum(unit)
        kept = self._plan.profile.units[unit].gradient_dtype(parameter)
        require_fitting(self._parameter(unit, parameter), gradient, (getattr(torch, kept),))
        self.units[unit].summed = frozenset()
        if self._shown.get((unit, parameter), lambda: None)() is gradient:
            return  # As `p.grad *= 2` ends.
        if self._on_nvme(unit):
            self._snapshots.put(Key("gradient", unit, parameter), gradient)
        else:
            self._let_go(unit, parameter)
            self._runner.quiesce("gradient", unit)
            self._runner.copy_now(self._at_home(unit, parameter), gradient)
            self._shown[unit, parameter] = lambda: None  # The user's stream may still copy it.
        self.units[unit].kept.add(parameter)

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self._snapshots.drop(Key("gradient", unit, parameter))
        self._let_go(unit, parameter)
        self.units[unit].kept.discard(parameter)
        self.units[unit].summed = frozenset()

    @torch.no_grad()
    def zero(self, unit: int, parameter: int) -> None:
        """Make a gradient zeros, as `zero_grad(set_to_none=False)` does."""
        if (gradient := self.show(unit, parameter)) is not None:
            gradient.zero_()

    def read(self, unit: int, parameter: int) -> torch.Tensor | None:
        """A gradient in memory of its own; None where there is none."""
        self._require_sum(unit)
        found = self.has(unit, parameter)
        return self._snapshots.read(Key("gradient", unit, parameter)) if found else None

    def let_go(self) -> None:
        """An update will read the homes, or their memory is given back: show none any more."""
        if self._shown and not self._runner.device.is_host:
            self._runner.drain()  # The user's stream may still edit them.
        for place in list(self._shown):
            self._let_go(*place)

    def _let_go(self, unit: int, parameter: int) -> None:
        if (held := self._shown.pop((unit, parameter), lambda: None)()) is not None:
            self._runner.quiesce("gradient", unit, to_write=False)
            held.data = held.detach().clone()

    # -- places ----------------------------------------------------------------------------------

    def _parameter(self, unit: int, parameter: int) -> Parameter:
        return self._plan.profile.units[unit].parameters[parameter]

    def _on_nvme(self, unit: int) -> bool:
        return self._plan.home("gradient", unit).tier == "nvme"

    def _at_home(self, unit: int, parameter: int) -> torch.Tensor:
        return self._view(
            Use(self._plan.home("gradient", unit), Value("gradient", unit)), unit, parameter
        )

    def _view(self, use: Use, unit: int, parameter: int) -> torch.Tensor:
        """A gradient in the shape of its parameter, in a place of a memory tier."""
        spec = self._layout_at(use)
        dtype, shape = spec.gradient_dtype(parameter), spec.parameters[parameter].shape
        flat = self._runner.memory.at(use)
        return typed(flat, dtype, spec.gradient_offset(parameter), shape)

    def _layout_at(self, use: Use) -> Unit:
        """How a unit lies in a place: in full, or as far as it is here."""
        profile = self._plan.profile
        return (profile.full if use.place.use in FULL else profile.units)[use.value.unit]


def take_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Take the gradient that autograd has put on a parameter, leaving None."""
    torchs_own: Any = torch.Tensor.grad
    with no_trap():
        gradient: torch.Tensor | None = torchs_own.__get__(parameter)
        torchs_own.__set__(parameter, None)
    return gradient
