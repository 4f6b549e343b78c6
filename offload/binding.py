"""Units and the modules that use them; a unit's parameters in use."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.arena import typed
from offload.forms import advice, differing
from offload.guard import Handle, Resolver, Saved
from offload.profile import Unit
from offload.resting import RestingParameter
from offload.served import ServedParameter
from offload.task import Task

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Modules whose children are units of their own."""

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are not called: parameters right in them belong to the module around."""


SHOWN_MAX = 32
"""Views of a unit's weights that are kept for the next backward."""


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


def _held(given: tuple[int, torch.Tensor]) -> bool:
    """Whether anybody else holds what was given, in Python."""
    return sys.getrefcount(given[1]) > 2  # The tuple, and who asks.


def _viewed(given: tuple[int, torch.Tensor]) -> bool:
    """Whether torch holds it, as a view of it does."""
    return bool(given[1]._use_count() > 1)  # type: ignore[attr-defined]


_TENSOR: Any = torch.Tensor
_set_data: Callable[[torch.Tensor, torch.Tensor], None] = _TENSOR.data.__set__
"""Torch's own, whatever a class makes of it."""


_version: Callable[[torch.Tensor], int] = _TENSOR._version.__get__

_LOOK = slice(2, Handle._fields.index("version"))
"""Of a handle, what tells its tensor from others of a unit."""

_NOT_TURNED = (False, False)
"""As a parameter is itself: neither conjugated nor negated."""


def make_plain(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Let an offloaded parameter be one of torch's own again, with `data`."""
    with torch._C.DisableTorchFunctionSubclass():
        _set_data(parameter, data)  # First: another thread may look at the class.
        parameter.__class__ = nn.Parameter
    vars(parameter).pop("_offload_home", None)


def count_change(parameters: Sequence[nn.Parameter]) -> None:
    """Let torch count a change of each: it refuses the backward of graphs that have saved them."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(parameters)


class Weights(NamedTuple):
    """The weights of a unit in memory where they can be used."""

    buffer: torch.Tensor
    """All of them, flat."""
    views: list[torch.Tensor]
    """By parameter."""
    address: int


class BoundUnit:
    """A unit and the parameters that stand for it in the model."""

    def __init__(
        self,
        index: int,
        spec: Unit,
        group: Group,
        resting_storage: dict[str, torch.Tensor],
    ):
        """Bind; the parameters are put at rest by `rest`.

        Args:
            index: of the unit in the profile.
            spec: its layout.
            group: its parameters and modules.
            resting_storage: a one-element tensor per dtype, on the compute device.
        """
        self.index = index
        self.spec = spec
        self.parameters = parameters = [group.named[p.name] for p in spec.parameters]
        self.modules = [weakref.ref(module) for module in group.modules]
        """Those whose call announces its use; whoever knows a parameter keeps no module alive."""
        self.depth = 0
        """Calls of announcing modules under way."""
        self.held = False
        """In use beyond those calls: by backward, or lasting to the end of the pass."""
        self.held_by, self.began = -1, 0
        """The backward that holds it, by autograd's number, -1 if it needs it no more; the first
        number that autograd gave in the forward whose backward that is."""
        self.around: set[int] = set()
        """Units in whose forward this one was called."""
        self.buffer: torch.Tensor | None = None
        """The flat weights in use, or None at rest."""
        self.task: Task | None = None
        """The compute task that stands for this use."""
        self.looked = False
        """Whether somebody was given a view in this use by which changes are not counted."""
        self.dummies = [
            resting_storage[p.dtype].expand(p.shape) if p.shape else resting_storage[p.dtype][0]
            for p in spec.parameters
        ]
        """What the parameters show at rest: of the true shapes, full of NaN."""
        self._offsets = [spec.weight_offset(i) for i in range(len(parameters))]
        self._filled = [at for at, one in enumerate(spec.parameters) if one.elements]
        """Parameters that lie anywhere."""
        self.kept: Weights | None = None
        """In the slot that the unit is always used in, once it was."""
        self._shown: dict[object, torch.Tensor] = {}
        """Views of it that handles stood for: of what was saved, see `Handle`."""
        self.views: list[torch.Tensor] = []
        """While in use, what the parameters were given."""
        self.address = self.end = 0
        """Of the weights in use."""
        self._counted: list[torch.Tensor] = []
        """Of the parameters at rest: they count changes together, and are of no class of ours, of
        which torch would have to ask whether there is a trap."""
        self._versions: list[int] = []
        self._given: list[tuple[int, torch.Tensor]] = []
        """Views of the weights that somebody was given in this use, with their parameters; held, as
        torch before 2.11 counts itself only among those who hold what Python holds, too."""
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

    def views_of(self, buffer: torch.Tensor) -> Weights:
        """The parameters' values in `buffer`, the unit's flat weights."""
        views = [
            typed(buffer, p.dtype, offset, p.shape)
            for p, offset in zip(self.spec.parameters, self._offsets)
        ]
        return Weights(buffer, views, buffer.data_ptr())

    def serve(self, weights: Weights) -> None:
        """Let the parameters be these views."""
        buffer, views, address = weights
        for parameter, view in zip(self.parameters, views):
            parameter.__class__ = ServedParameter  # Of which torch sends nothing to a trap.
            _set_data(parameter, view)
        self._versions = list(map(_version, self._counted))
        self.buffer, self.views, self.looked = buffer, views, False
        self.address, self.end = address, address + self.spec.weight_bytes

    def give(self, parameter: int, view: torch.Tensor) -> None:
        """Somebody gets a view of a parameter in use."""
        self._given = [one for one in self._given if _held(one) or _viewed(one)]
        self._given.append((parameter, view))

    def set_apart(self, parameter: int) -> bool:
        """Let what was given of a parameter be its holder's, in memory of its own.

        False where it cannot be: views of it, which would stay, are held.
        """
        mine = [one for one in self._given if one[0] == parameter]
        if any(_viewed(one) for one in mine):
            return False
        for one in mine:
            if _held(one):
                with torch.no_grad():
                    one[1].data = one[1].clone()
        self._given = [one for one in self._given if one[0] != parameter]
        return True

    def hold(self, graph: int, began: int, others: Container[int]) -> None:
        """A backward holds it, unless one of `others`, around that one, does already."""
        if not (self.held and self.held_by in others):
            again = self.held and self.held_by == graph
            self.held_by, self.began = graph, min(self.began, began) if again else began
        self.held = True

    def note_versions(self) -> None:
        """Take the parameters as they are now for unedited."""
        self._versions = list(map(_version, self._counted))

    @property
    def changed(self) -> bool:
        """Whether a parameter may have been changed in place in this use."""
        return self.looked or list(map(_version, self._counted)) != self._versions

    def moved(self) -> str | None:
        """Name of a parameter that was given other storage in this use; None when none was."""
        assert self.buffer is not None
        for at in self._filled:
            if self.parameters[at].data_ptr() != self.address + self._offsets[at]:
                return self.spec.parameters[at].name
        return None

    def rest(self) -> None:
        """Let the parameters be at rest."""
        for parameter, dummy in zip(self.parameters, self.dummies):
            if type(parameter) is not ServedParameter:
                parameter.__class__ = ServedParameter  # As above.
            _set_data(parameter, dummy)
            parameter.__class__ = RestingParameter
        self.buffer, self.views = None, []
        if self._given:
            self._given.clear()
        if not self._counted:
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
                self._counted = [torch.Tensor.detach(one) for one in self.parameters]

    def lend(self, parameter: int, tensor: torch.Tensor) -> None:
        """Let one parameter show `tensor`, keeping its class."""
        with torch._C.DisableTorchFunctionSubclass():
            self.parameters[parameter].data = tensor

    def unlend(self, parameter: int) -> None:
        """Take back what `lend` gave."""
        self.lend(parameter, self.dummies[parameter])

    def handle(self, engine: Resolver, parameter: int, offset: int, saved: torch.Tensor) -> Handle:
        """What stands for a tensor that begins `offset` bytes into the weights of a parameter."""
        version, held = self._counted[parameter]._version, self._saved() or self.saving()
        looks = saved.dtype, saved.shape, saved.stride()
        turned = (saved.is_conj(), saved.is_neg()) if type(saved) is torch.Tensor else _NOT_TURNED
        place = engine, self.index, parameter, offset
        # As Handle() ends, too.
        return tuple.__new__(Handle, (*place, *looks, *turned, version, held))

    def handle_at(self, engine: Resolver, address: int, saved: torch.Tensor) -> Handle:
        """What stands for a tensor that begins at an address among the weights in use."""
        offset = address - self.address
        parameter = bisect_right(self._offsets, offset) - 1
        return self.handle(engine, parameter, offset - self._offsets[parameter], saved)

    def require_version(self, handle: Handle) -> None:
        """Refuse what was saved of values that are no more.

        Raises:
            RuntimeError: the parameter was modified after the forward that saved it.
        """
        if self._counted[handle.parameter]._version != handle.version:
            raise RuntimeError(
                f"{self.spec.parameters[handle.parameter].name} was modified between a forward and "
                "its backward (by optimizer.step() or an in-place operation): the gradient would "
                "be wrong. Run backward first, or forward again"
            )

    def shown(self, handle: Handle) -> torch.Tensor:
        """What a handle stands for, in the weights in use."""
        found = handle.of(self.views[handle.parameter])
        in_slot = self.kept is not None and self.buffer is self.kept.buffer
        if in_slot and len(self._shown) < SHOWN_MAX:
            self._shown[handle[_LOOK]] = found
        return found

    def shown_again(self, handle: Handle) -> torch.Tensor | None:
        """The same as the last time, if all is as it was; None where it may not be."""
        if self.kept is None or self.buffer is not self.kept.buffer:
            return None
        same = self._counted[handle.parameter]._version == handle.version
        return self._shown.get(handle[_LOOK]) if same else None

    def require_form(self, parameter: int, device: torch.device) -> None:
        """Refuse a plain parameter that is not what its states are for.

        Raises:
            RuntimeError: it has another shape, dtype, device or order of its elements.
        """
        one, mine = self.spec.parameters[parameter], self.parameters[parameter]
        found = (tuple(mine.shape), mine.dtype, str(mine.device))
        wanted = (one.shape, getattr(torch, one.dtype), str(device))
        if found != wanted or not mine.is_contiguous():
            theirs, ours = differing(found, wanted)
            raise RuntimeError(
                f"{one.name} has {theirs} now, but its states are for {ours}; "
                + advice(found, wanted, trained=one.trainable)
            )

    def close(self) -> None:
        """Let go of all views."""
        self.kept = None
        self._shown.clear()
