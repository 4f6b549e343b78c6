"""Gradients, as the user meets them: shown as `p.grad`, edited, assigned, given up.

[Note: Assigned gradients]
What is assigned to `p.grad` becomes what `p.grad` shows, with memory of its own, which may be part
of a buffer of the user's: changes of it count, and sums are written to it, as torch's own are. What
cannot be written to, or is of another dtype than the sums, is copied. Torch would add two gradients
that share memory in one place; here that is refused when a backward begins.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

import torch

from offload.arena import host_tensor
from offload.collected import Collected
from offload.config import format_bytes
from offload.executor import Executor
from offload.exposure import use_count
from offload.extents import expanded, sharing
from offload.passes import Passes
from offload.program import Value

_OWN_REFERENCES = 2
"""References to a shown gradient when nobody else holds it: ours, and the one that asks."""


class Gradients(Collected):
    """The gradients of an engine's parameters, and what `p.grad` shows of them."""

    def __init__(self, executor: Executor, passes: Passes, limit_bytes: int):
        """No gradient yet; at most `limit_bytes` of copies for `p.grad` at once."""
        super().__init__(executor, passes)
        self._limit_bytes = limit_bytes
        self._idle_count = 0
        """Use count of the storage of a gradient that is shown when nobody has a view of it."""
        self._told = False
        """Whether the user was told of views that somebody has."""

    def _forget(self, unit: int) -> None:
        now = self._units[unit]
        for parameter in list(now.shown):
            if not self._followed(unit, parameter):
                del now.shown[parameter]
                now.apart.discard(parameter)
        if not now.shown:
            now.copied = None

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
        """Assign `p.grad`, see [Note: Assigned gradients].

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
        if now.shown.get(parameter) is gradient:
            return  # As `p.grad *= 2` ends.
        self._executor.quiesce("gradient", unit)
        window = self._seen(unit, parameter)
        same = _is_same(gradient, window)  # `p.grad = p.grad.detach()`
        if same:
            self._let_go(unit, parameter)
        else:
            if _lies_in(gradient, window):  # `p.grad = p.grad.t()`
                with torch.no_grad():
                    gradient.data = gradient.clone()
            self._give_up(unit, parameter)
        now.apart.discard(parameter)
        now.kept.add(parameter)
        shows = _may_be_shown(gradient, window)
        now.shown[parameter] = gradient if shows else window
        if not same and shows:
            now.apart.add(parameter)
        elif not same:
            window.copy_(gradient)

    def begin_backward(self, others: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put home what was shown, before more is added; `others` are gradients not kept here.

        Raises:
            RuntimeError: a gradient that was assigned shares memory with another.
        """
        if any(now.apart for now in self._units):
            shown = [
                (self._plan.profile.units[unit].parameters[parameter].name, tensor)
                for unit, now in enumerate(self._units)
                for parameter, tensor in now.shown.items()
            ]
            for (one, _), (other, _) in sharing([*shown, *others]):
                raise RuntimeError(
                    f"the gradients of {one} and {other} share memory (one was assigned to "
                    "p.grad of both, likely), and a backward would add both sums there, but "
                    "offloaded ones are added apart: assign a clone() to one of them"
                )
        self.settle_shown()

    def settle_shown(self) -> None:
        """Put home what `p.grad` has shown from elsewhere, edited or not."""
        for unit, now in enumerate(self._units):
            if not now.shown:
                continue
            self._executor.quiesce("gradient", unit)
            for parameter, shown in now.shown.items():
                here = self._shaped(self._window(unit), unit, parameter)
                if shown.shape != here.shape:
                    name = self._plan.profile.units[unit].parameters[parameter].name
                    raise ValueError(
                        f"the gradient of {name} is of shape {tuple(shown.shape)} now, the "
                        f"parameter of {tuple(here.shape)}: likely its data was set; assign a "
                        "gradient of the parameter's shape"
                    )
                if not _is_same(shown, here):
                    if _lies_in(shown, here):  # `p.grad.t_()`
                        with torch.no_grad():
                            shown.data = shown.clone()
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

    def _followed(self, unit: int, parameter: int) -> bool:
        """Whether somebody else holds a gradient that was shown, or memory of it."""
        now = self._units[unit]
        if parameter not in now.apart:
            return self._held(unit, parameter) or self._viewed(unit, parameter)
        alone = use_count(torch.empty(1))
        storage = now.shown[parameter].untyped_storage()  # That of an array grows at no time.
        return (
            self._held(unit, parameter)
            or not storage.resizable()
            or (use_count(now.shown[parameter]) > alone)
        )

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

    def hand_over(self, unit: int, parameter: int) -> torch.Tensor | None:
        """The gradient in memory of its own: what somebody holds where there is such a one."""
        gradient = self.read(unit, parameter)
        now = self._units[unit]
        if gradient is not None:
            self._let_go(unit, parameter)
        return now.shown[parameter] if parameter in now.apart else gradient

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


def _is_same(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether these are the very elements of a gradient's home, in their order."""
    return gradient.data_ptr() == window.data_ptr() and gradient.stride() == window.stride()


def _lies_in(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether an assigned gradient is a view of its own home."""
    start = window.data_ptr()
    return start <= gradient.data_ptr() < start + max(1, window.nbytes)


def _may_be_shown(gradient: torch.Tensor, window: torch.Tensor) -> bool:
    """Whether `p.grad` can be what was assigned, and the sum in `window` be written to it."""
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        return False
    apart = gradient.requires_grad or gradient.is_inference() or expanded(gradient)
    return gradient.dtype == window.dtype and not apart
