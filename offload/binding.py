"""Units and the modules that use them; a unit's parameters in use; the guard on saved tensors.

[Note: Saving guard]
Autograd saves views of weights (`weight.t()`) that lie in a slot, and the slot is refilled before
backward. So around each unit's forward a pair of saved-tensor hooks packs every tensor that lies in
a unit's buffer as a `Handle` (unit, offset, shape, strides) and turns it back into a view when the
unit is in use again, or into a private copy when it is not: a stale read is impossible. A handle
also notes the parameter's version, as torch's own check does not look at packed tensors. What is
no weight goes to the hooks that were active before ours (checkpointing's, activation offload's),
so the guard composes with them in whatever order they are entered. Both hold on to the unit's
`Saved` until autograd lets go of them, by which the engine knows that the unit's backward is over.

[Note: Guards left behind]
Ctrl-C in a module skips its hooks, and leaves its guard on torch's stack of hooks. Each `with` of
the user's that it unwinds then takes off the topmost pair, which is not its own: so of what is left
of the stack as it was, one pair for every guard is too many, the topmost ones. What was put on
later lies above and stays. Inside backward torch works on a stack of that backward, which goes
with it: there nothing is left.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from offload.arena import typed
from offload.interrupt import whole
from offload.passes import in_backward
from offload.profile import Unit
from offload.resting import RestingParameter
from offload.served import ServedParameter
from offload.task import Task

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Modules whose children are units of their own."""

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are not called: parameters right in them belong to the module around."""


@dataclass(slots=True)
class Group:
    """The parameters of a unit before they are laid out, and who announces their use."""

    name: str
    modules: list[nn.Module]
    """Modules whose call announces the use."""
    named: dict[str, nn.Parameter] = field(default_factory=dict)
    lasting: bool = False
    backward: bool = True


def partition(model: nn.Module) -> list[Group]:
    """Cut a model into units, in the order of its parameters.

    A child of a `ModuleList` or `Sequential` is a unit with all that is in it; any other module
    that directly owns parameters is one by itself, and so is a module without containers below.
    A child that has a list of alike blocks inside (a layer with experts, a stage of layers) is cut
    further, so that each of these is a unit: which of them is used may depend on the data.
    A parameter shared between units is a unit of its own.
    """
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    names: dict[nn.Parameter, str] = {}
    for unit_name, unit_module, prefix, owner in _walk(model):
        for name, parameter in owner.named_parameters(
            prefix=prefix, recurse=False, remove_duplicate=False
        ):
            names.setdefault(parameter, name)
            entry = (unit_name, unit_module)
            if entry not in owners.setdefault(parameter, []):
                owners[parameter].append(entry)
    groups: dict[str, Group] = {}
    for parameter, users in owners.items():
        if parameter.numel() == 0:
            continue
        shared = len(users) > 1
        key = f"{names[parameter]} (shared)" if shared else users[0][0]
        if key not in groups:
            modules = list(dict.fromkeys(module for _, module in users))
            groups[key] = Group(key, modules, lasting=shared)
        groups[key].named[names[parameter]] = parameter
    announcers = {module for group in groups.values() for module in group.modules}
    for group in groups.values():
        group.lasting = group.lasting or any(
            other in announcers
            for module in group.modules
            for other in module.modules()
            if other is not module
        )
        group.backward = not all(type(module) is nn.Embedding for module in group.modules)
    return list(groups.values())


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(unit's name, announcing module, prefix, owner of parameters) for every module."""

    def visit(
        module: nn.Module, name: str, called: tuple[str, nn.Module]
    ) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
        me = called if isinstance(module, _NEVER_CALLED) else (name or "root", module)
        if not any(isinstance(inner, _CONTAINERS) for inner in module.modules()):
            for inner_name, inner in module.named_modules(prefix=name, remove_duplicate=False):
                yield (*me, inner_name, inner)
            return
        yield (*me, name, module)
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            block = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
            if block and not any(_lists_blocks(inner) for inner in child.modules()):
                for inner_name, inner in child.named_modules(prefix=full, remove_duplicate=False):
                    yield (full, child, inner_name, inner)
            else:
                yield from visit(child, full, me)

    if any(isinstance(inner, _CONTAINERS) for inner in model.modules()):
        yield from visit(model, "", ("root", model))
        return
    yield ("root", model, "", model)
    for name, child in model.named_children():
        for inner_name, inner in child.named_modules(prefix=name, remove_duplicate=False):
            yield (name, child, inner_name, inner)


def _lists_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of at least two of one class that have modules inside."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    kinds = [type(child) for child in module.children() if any(child.children())]
    return len(kinds) > len(set(kinds))


class Saved:
    """Lives as long as autograd keeps a weight of a unit, or an input of its recompute."""

    __slots__ = ("__weakref__",)


class BoundUnit:
    """A unit and the parameters that stand for it in the model."""

    def __init__(
        self,
        index: int,
        spec: Unit,
        parameters: list[nn.Parameter],
        resting_storage: dict[str, torch.Tensor],
    ):
        """Bind; the parameters are put at rest by `rest`.

        Args:
            index: of the unit in the profile.
            spec: its layout; `parameters` in the same order.
            resting_storage: a one-element tensor per dtype, on the compute device.
        """
        self.index = index
        self.spec = spec
        self.parameters = parameters
        self.depth = 0
        """Calls of announcing modules under way."""
        self.held = False
        """In use beyond those calls: by backward, or lasting to the end of the pass."""
        self.around: set[int] = set()
        """Units in whose forward this one was called."""
        self.buffer: torch.Tensor | None = None
        """The flat weights in use, or None at rest."""
        self.task: Task | None = None
        """The compute task that stands for this use."""
        self.looked = False
        """Whether somebody was given a view in this use by which changes are not counted."""
        self._dummies = [
            resting_storage[p.dtype].expand(p.shape) if p.shape else resting_storage[p.dtype][0]
            for p in spec.parameters
        ]
        self._offsets = [spec.weight_offset(i) for i in range(len(parameters))]
        self._views: dict[int, list[torch.Tensor]] = {}
        self._versions: list[int] = []
        self._saved: Callable[[], Saved | None] = lambda: None

    @property
    def saved(self) -> bool:
        """Whether autograd keeps anything whose backward may need the weights."""
        return self._saved() is not None

    def saving(self) -> Saved:
        """What every such thing holds on to."""
        saved = self._saved()
        if saved is None:
            saved = Saved()
            self._saved = weakref.ref(saved)
        return saved

    def serve(self, buffer: torch.Tensor, *, keep_views: bool) -> None:
        """Let the parameters be views of `buffer`, the unit's flat weights."""
        views = self._views.get(buffer.data_ptr()) if keep_views else None
        if views is None:
            views = [
                typed(buffer, p.dtype, offset, p.shape)
                for p, offset in zip(self.spec.parameters, self._offsets)
            ]
            if keep_views:
                self._views[buffer.data_ptr()] = views
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, view in zip(self.parameters, views):
                parameter.data = view
                parameter.__class__ = ServedParameter
        self.buffer, self.looked = buffer, False
        self.note_versions()

    def note_versions(self) -> None:
        """Take the parameters as they are now for unedited."""
        self._versions = [version_of(parameter) for parameter in self.parameters]

    @property
    def changed(self) -> bool:
        """Whether a parameter may have been changed in place in this use."""
        return self.looked or [version_of(one) for one in self.parameters] != self._versions

    def moved(self) -> str | None:
        """Name of a parameter that was given other storage in this use; None when none was."""
        assert self.buffer is not None
        base = self.buffer.data_ptr()
        for parameter, one, offset in zip(self.parameters, self.spec.parameters, self._offsets):
            if one.elements and parameter.data_ptr() != base + offset:
                return one.name
        return None

    def rest(self) -> None:
        """Let the parameters be at rest."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, dummy in zip(self.parameters, self._dummies):
                parameter.__class__ = RestingParameter
                parameter.data = dummy
        self.buffer = None

    def lend(self, parameter: int, tensor: torch.Tensor) -> None:
        """Let one parameter show `tensor`, keeping its class."""
        with torch._C.DisableTorchFunctionSubclass():
            self.parameters[parameter].data = tensor

    def unlend(self, parameter: int) -> None:
        """Take back what `lend` gave."""
        self.lend(parameter, self._dummies[parameter])

    def handle(self, engine: Resolver, parameter: int, offset: int, saved: torch.Tensor) -> Handle:
        """What stands for a tensor that begins `offset` bytes into the weights of a parameter."""
        shape, stride = tuple(saved.shape), tuple(saved.stride())
        version = version_of(self.parameters[parameter])
        place = (self.index, parameter, offset)
        return Handle(engine, *place, saved.dtype, shape, stride, version, self.saving())

    def parameter_at(self, offset: int) -> int:
        """Index of the parameter that holds the byte at `offset` of the weight buffer."""
        return bisect_right(self._offsets, offset) - 1

    def close(self) -> None:
        """Let go of all views."""
        self._views.clear()


def version_of(parameter: torch.Tensor) -> int:
    """Autograd's count of a parameter's in-place changes, at rest or in use."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(parameter._version)


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
    version: int
    """The parameter's version when it was saved."""
    saved: Saved
    """The unit's, to keep alive."""


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


class SavingGuard:
    """The pair of saved-tensor hooks around a unit's forward, see [Note: Saving guard]."""

    def __init__(self, locator: Locator, units: Sequence[BoundUnit]):
        """Guard what is saved from here to `close`, while `units` are used."""
        self._locator = locator
        self._units = units
        self._in_backward = in_backward()
        self._outer: Any = _hooks._top_saved_tensors_default_hooks(False)
        self._pair: _Pair = (self._pack, self._unpack)
        _hooks._push_saved_tensors_default_hooks(*self._pair)
        self._stack = [self._pair]
        """Torch's stack as it was then."""
        if self._outer is not None:
            self._stack = _take_all()
            _put_back(self._stack)

    def close(self) -> None:
        """Stop guarding."""
        now = _take_all()
        _put_back([pair for pair in now if pair[0] is not self._pair[0]])
        self._let_go()

    @staticmethod
    def leave(guards: Sequence[SavingGuard]) -> None:
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
            guard._let_go()

    def _let_go(self) -> None:
        """Break the circle through our own methods."""
        del self._pair, self._stack

    @whole
    def _locate(self, tensor: torch.Tensor) -> Handle | None:
        with torch._C.DisableTorchFunctionSubclass():
            return self._locator.handle_of(tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        handle = self._locate(tensor)
        if handle is not None:
            return handle
        if self._outer is None:
            return tensor
        # Hooks around ours may recompute it, and use the weights for that.
        return (self._outer[0](tensor), *(unit.saving() for unit in self._units))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Handle):
            with packed.engine.lock:
                return packed.engine.tensor_of(packed)
        if self._outer is None:
            return packed  # type: ignore[no-any-return]
        return self._outer[1](packed[0])  # type: ignore[no-any-return]


_Pair = tuple[Any, Any]
"""What packs and what unpacks."""

_hooks: Any = torch._C._autograd


def _take_all() -> list[_Pair]:
    """Empty torch's stack of saved-tensor hooks; the lowest pair comes first."""
    found: list[_Pair] = []
    while (top := _hooks._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        _hooks._pop_saved_tensors_default_hooks()
    return found[::-1]


def _put_back(pairs: Sequence[_Pair]) -> None:
    for pair in pairs:
        _hooks._push_saved_tensors_default_hooks(*pair)
