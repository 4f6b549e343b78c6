"""Saved-tensor hooks around the use of weights that move.

[Note: Saved weights]
Autograd saves views of weights (`weight.t()`) that lie in a slot, and the slot is refilled before
backward. So around each unit's forward a pair of saved-tensor hooks packs every tensor that lies in
a unit's weights as a `SavedWeight` (unit, offset, shape, strides). It is turned back into a view
when the unit is in use again, or into one of a snapshot when it is not: a stale read is impossible.
A saved weight also notes the parameter's version, which torch does not check for packed tensors.
Autograd unpacks what a node has saved one by one. Without a bias the weight comes first; unpacking
the input may then run all of a checkpoint, which would refill the slot. So a unit stays in its slot
while a node that may have its weights unpacks the rest (`unpacking`).

A checkpoint around is told of the weights, too, as its recompute ends by the number of what was
saved. It keeps nothing of them.

Any other tensor goes to the hooks that were active before (of a checkpoint, of `save_on_cpu`), or
is kept as torch keeps it: apart from its graph, as a node that saves its own output would keep
itself alive, and with its version. All that is packed holds on to the unit's `Saver` until autograd
lets go of it, which tells that the backward of the unit is over.

[Note: Hooks left behind]
Ctrl-C in a module skips its forward hook, so its pair stays on torch's stack. Every `with` of
saved-tensor hooks that the exception unwinds pops the topmost pair, ours in place of its own.
Either way there is one pair too many for each forward that was cut off, right above those that
were there before the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.model.parameter import ActiveParameter, OffloadedParameter
from offload.runtime.entry import entry
from offload.runtime.torch_internals import (
    in_dispatch_mode,
    local_part,
    no_trap,
    saving_hooks,
    version,
    with_local_part,
)


class Saver:
    """Lives as long as autograd keeps a weight of a unit, or an input of its recompute."""

    __slots__ = ("__weakref__",)


class SavedWeight(NamedTuple):
    """A saved tensor that lies in a unit's weights."""

    resolve: Callable[[SavedWeight], torch.Tensor]
    """Gives the tensor back."""
    unit: int
    parameter: int
    offset: int
    """Bytes from the start of the parameter."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    version: int
    """The parameter's version when it was saved."""
    saver: Saver
    """The unit's, to keep alive."""
    like: torch.Tensor | None = None
    """Without values the DTensor that was saved, where this is its local tensor."""

    @property
    def looks(self) -> tuple[object, ...]:
        """What tells it from others of its unit."""
        return self[2:7]

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """What it stands for, where `base` has the parameter's values."""
        if base.dtype is not self.dtype:
            flat = base.reshape(-1).view(torch.uint8)
            flat = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize]
            base = flat.view(self.dtype)
        start = base.storage_offset() + self.offset // self.dtype.itemsize
        return torch.as_strided(base, self.shape, self.stride, start)


class SavedTensor(NamedTuple):
    """A saved tensor that is no weight."""

    alias: torch.Tensor
    """In the same memory, with the same version counter, but of no graph. A leaf stays itself."""
    version: int

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        if (now := version(self.alias)) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self.alias.type()} {list(self.alias.shape)}] is at version "
                f"{now}; expected version {self.version} instead"
            )
        return self.alias


class SavingGuard:
    """The pair of saved-tensor hooks around a unit's forward, see [Note: Saved weights]."""

    __slots__ = ("_in_backward", "_locate", "_outer", "_pair", "_units")

    def __init__(
        self,
        locate: Callable[[torch.Tensor], SavedWeight | None],
        units: Sequence[Any],
        in_backward: bool,
    ):
        """Guard what is saved from here to `close`, while `units`, of `units.FlatUnit`, are used;
        `locate` tells what stands for a tensor that lies in a unit's weights."""
        self._locate = locate
        self._units = units
        self._in_backward = in_backward
        self._outer: Any = saving_hooks()
        self._pair = saved_tensors_hooks(self._pack, self._unpack)
        self._pair.__enter__()

    def close(self) -> None:
        """Stop guarding."""
        self._pair.__exit__()
        del self._pair  # It would keep this object alive.

    def drop(self) -> None:
        """Stop guarding a forward that Ctrl-C has cut off, see [Note: Hooks left behind]. Inside a
        backward torch works on a stack of that backward, which goes with it."""
        if not self._in_backward:
            self._pair.__exit__()
        del self._pair  # As above.

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in _PLAIN and not in_dispatch_mode():
            packed = self._packed(tensor)
        else:
            packed = _pack_apart(self, tensor)
        if packed is not None:
            if self._outer is not None:
                self._count(tensor)
            return packed
        # The hooks around these may recompute it, and use the weights for that.
        return (self._outer[0](tensor), *(unit.saver() for unit in self._units))

    def _count(self, tensor: torch.Tensor) -> None:
        """Let a checkpoint count a weight, of which it keeps nothing: its recompute ends at the
        same place, and saves as much, whether it finds the weights in use or at rest."""
        pack = self._outer[0]
        if isinstance(guard := getattr(pack, "__self__", None), SavingGuard):
            if guard._outer is not None:
                guard._count(tensor)
        elif getattr(pack, "__module__", "") == "torch.utils.checkpoint":
            with no_trap():
                pack(torch.Tensor.detach(tensor))

    def _packed(self, tensor: torch.Tensor) -> SavedWeight | SavedTensor | None:
        """What stands for `tensor`; None where the hooks around these are to keep it."""
        tensor = tensor.resolve_neg().resolve_conj()  # A copy where it is lazily either.
        local = local_part(tensor)
        saved = self._locate(local)
        if saved is not None and local is not tensor:
            return saved._replace(like=with_local_part(type(tensor), tensor, local.new_empty(())))
        if saved is None and self._outer is None:
            return SavedTensor(
                tensor if tensor.is_leaf else torch.Tensor.detach(tensor), version(tensor)
            )
        return saved

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is SavedWeight:
            found, like = packed.resolve(packed), packed.like
            if like is not None:
                found = with_local_part(type(like), like, found)
            return found
        if type(packed) is SavedTensor:
            return packed.unpack()
        for unit in self._units:
            unit.unpacking += 1
        try:
            return self._outer[1](packed[0])  # type: ignore[no-any-return]
        finally:
            for unit in self._units:
                unit.unpacking = max(0, unit.unpacking - 1)


@entry
def _pack_apart(guard: SavingGuard, tensor: torch.Tensor) -> SavedWeight | SavedTensor | None:
    with no_trap():
        if isinstance(tensor, OffloadedParameter):
            return tensor._offload_access.saved()  # type: ignore[no-any-return]
        return guard._packed(tensor)


_PLAIN = (torch.Tensor, nn.Parameter, ActiveParameter)
"""Classes of which torch sends nothing to a trap."""
