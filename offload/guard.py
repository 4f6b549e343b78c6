"""The guard on tensors that autograd saves of weights in use.

[Note: Saving guard]
Autograd saves views of weights (`weight.t()`) that lie in a slot, and the slot is refilled before
backward. So around each unit's forward a pair of saved-tensor hooks packs every tensor that lies in
a unit's buffer as a `Handle` (unit, offset, shape, strides) and turns it back into a view when the
unit is in use again, or into a private copy when it is not: a stale read is impossible. A handle
also notes the parameter's version, as torch's own check does not look at packed tensors. What is
no weight goes to the hooks that were active before ours (checkpointing's, activation offload's),
so the guard composes with them in whatever order they are entered. Both hold on to the unit's
`Saved` until autograd lets go of them, by which the engine knows that the unit's backward is over.
Where there are no other hooks, what is no weight is `Kept`, as torch keeps it without any: apart
from the graph, since the node that made a tensor may save it, too, and would live as long as
itself; and with its version.

[Note: Guards left behind]
Ctrl-C in a module skips its post-hook, so its guard stays on torch's stack of hooks. Every `with`
of saved-tensor hooks that the exception unwinds pops the topmost pair, ours in place of its own. So
of the pairs that are as they were when the last guard was put on (`_stack`) the topmost ones are
too many, as many as guards were left; what was pushed later lies above them and stays. Inside
backward torch works on a stack of that backward, which goes with it: there nothing is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils import checkpoint

from offload.aside import unseen
from offload.interrupt import whole
from offload.served import ServedParameter

Found = TypeVar("Found")


class Saved:
    """Lives as long as autograd keeps a weight of a unit, or an input of its recompute."""

    __slots__ = ("__weakref__",)


class Handle(NamedTuple):
    """A saved tensor that lies in a unit's weights."""

    engine: Resolver
    """Who can give the tensor back."""
    unit: int
    parameter: int
    offset: int
    """Bytes from the start of the parameter."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool
    """Whether it shows the conjugate of what lies there, as `conj()` leaves it to whoever reads."""
    negated: bool
    """Likewise: the imaginary part of such a view."""
    version: int
    """The parameter's version when it was saved."""
    saved: Saved
    """The unit's, to keep alive."""

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """What it stands for, where `base` has the parameter's values."""
        if base.dtype is not self.dtype:
            base = base.reshape(-1).view(torch.uint8).view(self.dtype)
        start = base.storage_offset() + self.offset // self.dtype.itemsize
        found = torch.as_strided(base, self.shape, self.stride, start)
        if self.negated:
            found = torch._neg_view(found)
        return found.conj() if self.conjugated else found


class Kept(NamedTuple):
    """A saved tensor that is no weight."""

    alias: torch.Tensor
    """In the same memory, and counted as one with it, but of no graph."""
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Kept:
        """To keep `tensor`."""
        return tuple.__new__(Kept, (_detach(tensor), tensor._version))  # As Kept() ends, too.

    def back(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since, in torch's words.
        """
        if self.alias._version == self.version:
            return self.alias
        with torch._C.DisableTorchFunctionSubclass():
            found, shape = self.alias.type(), list(self.alias.shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{found} {shape}] is at version {self.alias._version}; expected version "
            f"{self.version} instead. Hint: enable anomaly detection to find the operation that "
            "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
        )


class Locator(Protocol):
    """Knows the tensors that need a handle."""

    def handle_of(self, tensor: torch.Tensor) -> Handle | None:
        """The handle of a tensor that lies in a unit's weights, else None."""


class Resolver(Protocol):
    """Turns handles back into tensors; the engine."""

    lock: threading.RLock
    """Whoever calls it inside a backward has this."""

    def tensor_of(self, handle: Handle) -> torch.Tensor:
        """The tensor that a handle stands for."""


class Savers(Protocol):
    """A unit, as far as what is saved of it goes."""

    def saving(self) -> Saved:
        """What everything saved holds on to."""


class SavingGuard:
    """The pair of saved-tensor hooks around a unit's forward, see [Note: Saving guard]."""

    __slots__ = ("_in_backward", "_locator", "_outer", "_pair", "_stack", "_units")

    def __init__(self, locator: Locator, units: Sequence[Savers], inside: bool):
        """Guard what is saved from here to `close`, while `units` are used; `inside` a backward."""
        self._locator = locator
        self._units = units
        self._in_backward = inside
        self._outer: Any = _top(False)
        self._pair: _Pair = (self._pack, self._unpack)
        _push(*self._pair)
        self._stack: Sequence[_Pair] = (self._pair,)
        """Torch's stack as it was then."""
        if self._outer is not None:
            self._stack = _take_all()
            _put_back(self._stack)

    def close(self) -> None:
        """Stop guarding."""
        top = _top(False)
        if top is not None and top[0] is self._pair[0]:
            _pop()
        else:
            now = _take_all()
            _put_back([pair for pair in now if pair[0] is not self._pair[0]])
        del self._pair, self._stack  # Which break a circle through our own methods.

    @staticmethod
    def drop_left(guards: Sequence[SavingGuard]) -> None:
        """Stop guards whose modules Ctrl-C has ended, see [Note: Guards left behind]."""
        left = [guard for guard in guards if not guard._in_backward]
        if left:
            now = _take_all()
            known = 0
            for pair, before in zip(now, left[-1]._stack):
                if pair[0] is not before[0] or pair[1] is not before[1]:
                    break
                known += 1
            _put_back(now[: max(0, known - len(left))] + now[known:])
        for guard in guards:
            del guard._pair, guard._stack  # As above.

    def _pack(self, tensor: torch.Tensor) -> Any:
        plain = type(tensor) in _PLAIN and unseen()
        look = self._locator.handle_of
        handle = look(tensor) if plain else _apart(look, tensor)
        if handle is not None:
            return handle
        if self._outer is None:
            return Kept.of(tensor) if plain else _apart(Kept.of, tensor)
        # Hooks around ours may recompute it, and use the weights for that.
        return (self._outer[0](tensor), *(unit.saving() for unit in self._units))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is Handle:
            with packed.engine.lock:
                return packed.engine.tensor_of(packed)
        if type(packed) is Kept:
            return packed.back()
        return self._outer[1](packed[0])  # type: ignore[no-any-return]


@whole
def _apart(look: Callable[[torch.Tensor], Found], tensor: torch.Tensor) -> Found:
    """Whole, as Ctrl-C between the block and its end would leave the trap off for good."""
    with torch._C.DisableTorchFunctionSubclass():
        return look(tensor)


_detach: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
"""Torch's own, whatever a class makes of it."""


class LendingGuard(SavingGuard):
    """The same around a function to which weights at rest are lent.

    A checkpoint that is not reentrant counts what its function saves, and its recompute is to save
    as much. What is lent in one of them may be in use in the other, with no guard right around: so
    it is told of the weights, too, and keeps nothing of them.
    """

    __slots__ = ()

    def _pack(self, tensor: torch.Tensor) -> Any:
        packed = super()._pack(tensor)
        if type(packed) is Handle and self._outer is not None:
            pack, unpack = self._outer
            if unpack.__module__ == checkpoint.__name__:
                pack(tensor)
        return packed


_PLAIN = (torch.Tensor, torch.nn.Parameter, ServedParameter)
"""Classes of which torch sends no question to a trap."""

_Pair = tuple[Any, Any]
"""What packs and what unpacks."""

_hooks: Any = torch._C._autograd
_top, _push = _hooks._top_saved_tensors_default_hooks, _hooks._push_saved_tensors_default_hooks
_pop = _hooks._pop_saved_tensors_default_hooks


def _take_all() -> list[_Pair]:
    """Empty torch's stack of saved-tensor hooks; the lowest pair comes first."""
    found: list[_Pair] = []
    while (top := _top(True)) is not None:
        found.append(top)
        _pop()
    return found[::-1]


def _put_back(pairs: Sequence[_Pair]) -> None:
    for pair in pairs:
        _push(*pair)
