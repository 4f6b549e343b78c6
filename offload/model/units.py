"""Units: the parameters that move together, the modules that use them, and their flat weights.

[Note: Units in use]
A unit's weights are one flat buffer. In use, each parameter's `data` is a view of that buffer in
the unit's slot; at rest it is a stand-in full of NaN, and the trap of `parameter` answers for it. A
parameter in use is read-only: what changes one in place is found by torch's version counters when
the use ends, and raises.

[Note: Fused units]
Small neighbours in a list are one unit, as `Profile.fusions` says. The first call of one of its
modules brings all its weights into the slot, where they stay until another unit comes into use or
the pass ends. Between two calls all its parameters rest. In a call, or its backward, those of other
modules rest that have not come to theirs. So a touch is of a snapshot, as ever, and nothing that
autograd saves outside of a module is a view of the slot. An edit of a snapshot ends the stay.
Parameters of tied units, and of units around others, rest between two calls as well; their slot is
their own, and keeps them to the end of the pass. Where a forward has read a parameter without a
call of its module, all of its unit rest in backward, too (`touched`).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.model.parameter import Binding
from offload.model.saved_tensors import SavedWeight, Saver
from offload.planning.profile import Parameter, Unit
from offload.runtime.memory import typed
from offload.runtime.torch_internals import no_trap, version

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Modules whose children are units of their own."""

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are not called: parameters right in them belong to the module around."""

SAVED_PER_PARAMETER_MAX = 8
"""Views kept of what autograd saves: with sizes that depend on the data there were no end."""


@dataclass(slots=True)
class UnitModules:
    """The parameters of a unit before they are laid out, and the modules that use them."""

    name: str
    modules: list[nn.Module]
    """Modules whose call announces the use."""
    named: dict[str, nn.Parameter] = field(default_factory=dict)
    lasting: bool = False
    backward: bool = True
    listed: str = ""
    """Name of the list around whose modules are likely used one after the other, if any."""


def partition(model: nn.Module) -> list[UnitModules]:
    """Cut a model into units, in the order of its parameters.

    A child of a `ModuleList` or `Sequential` is a unit with all that is in it, and so is a module
    without containers below; any other that directly owns parameters is one by itself.
    A child that has a list of alike blocks inside (a layer with experts, a stage of layers) is cut
    further, so that each of these is a unit: which of them is used may depend on the data.
    A parameter shared between units is a unit of its own.
    """
    owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for unit_name, unit_module, prefix, owner, listed in _walk(model):
        for name, parameter in owner.named_parameters(
            prefix=prefix, recurse=False, remove_duplicate=False
        ):
            names.setdefault(parameter, name)
            entry = (unit_name, unit_module, listed or "")
            if entry not in owners.setdefault(parameter, []):
                owners[parameter].append(entry)
    groups: dict[str, UnitModules] = {}
    for parameter, users in owners.items():
        if parameter.numel() == 0:
            continue
        shared = len(users) > 1
        key = f"{names[parameter]} (shared)" if shared else users[0][0]
        if key not in groups:
            modules = list(dict.fromkeys(module for _, module, _ in users))
            groups[key] = UnitModules(key, modules, lasting=shared, listed=users[0][2])
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


def merged(groups: Sequence[UnitModules], parts: Iterable[Sequence[int]]) -> Iterator[UnitModules]:
    """A group for each of `parts`, which are indices of neighbours, see [Note: Fused units]."""
    for part in parts:
        first, *others = (groups[index] for index in part)
        name = f"{first.name} to {others[-1].name}" if others else first.name
        modules = [module for index in part for module in groups[index].modules]
        named = {n: p for index in part for n, p in groups[index].named.items()}
        yield replace(first, name=name, modules=modules, named=named)


def _walk(
    module: nn.Module,
    name: str = "",
    called: tuple[str, nn.Module] | None = None,
    cuts: Callable[[nn.Module], bool] | None = None,
    listed: str | None = "",
) -> Iterator[tuple[str, nn.Module, str, nn.Module, str | None]]:
    """(unit's name, announcing module, prefix, owner of parameters, list) for every module.

    `called` is the unit around, and `cuts` tells modules for which a unit is cut; None for the
    model itself, which always is. `listed` is the list around, empty where there is none. It is
    None where no `ModuleList` counts as one: inside a block, as which experts are used may depend
    on the data, and beside another list, as both may be used in turns.
    """
    me = called if called and isinstance(module, _NEVER_CALLED) else (name or "root", module)
    if cuts is not None and not any(map(cuts, module.modules())):
        for inner_name, inner in module.named_modules(prefix=name, remove_duplicate=False):
            yield (*me, inner_name, inner, listed)
        return
    yield (*me, name, module, None)
    in_order = nn.Sequential if listed is None else (nn.Sequential, nn.ModuleList)
    if isinstance(module, in_order):
        listed = listed or name or "root"
    elif listed or sum(isinstance(child, nn.ModuleList) for child in module.children()) > 1:
        listed = None
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        block = _is_container(module) and not _is_container(child)
        yield from _walk(child, full, me, _lists_blocks if block else _is_container, listed)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS)


def _lists_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of at least two of one class that have modules inside."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    kinds = [type(child) for child in module.children() if any(child.children())]
    return len(kinds) > len(set(kinds))


def count_change(parameters: Sequence[nn.Parameter]) -> None:
    """Count a change of each: torch then refuses the backward of graphs that have saved them."""
    with no_trap():
        torch.autograd.graph.increment_version(parameters)


def refuse_sparse(what: str) -> None:
    """Refuse gradients that are not dense."""
    raise ValueError(
        f"{what} is sparse, and only dense ones can be offloaded: build the embedding with "
        "sparse=False"
    )


def require_fitting(
    one: Parameter, gradient: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse what cannot be the gradient of a parameter: of another form, or not of `dtypes`."""
    shape, dtype = tuple(gradient.shape), gradient.dtype
    if gradient.layout is not torch.strided:
        refuse_sparse(f"the gradient of {one.name}")
    fits = shape == one.shape and dtype in (getattr(torch, one.dtype), *dtypes)
    if not fits or not one.trainable:
        raise ValueError(
            f"to {one.name}.grad was assigned a tensor of shape {shape} and {dtype}, but one of "
            f"{one.shape} and {one.dtype} is needed"
            f"{'' if one.trainable else ', and it was frozen at attach'}"
        )


Resolve = Callable[[SavedWeight], torch.Tensor]


class Weights(NamedTuple):
    """The weights of a unit in memory where they can be used."""

    views: list[torch.Tensor]
    """By parameter."""
    start: int
    """Address of the first."""
    stop: int
    saved: dict[object, torch.Tensor]
    """What autograd has saved of them, by what it looks like."""


class FlatUnit:
    """A unit and the parameters that stand for it in the model."""

    def __init__(
        self,
        index: int,
        spec: Unit,
        group: UnitModules,
        stand_ins: dict[str, torch.Tensor],
        binding_of: Callable[[nn.Parameter], Binding],
    ):
        """Know the parameters; `unbind` puts them at rest, with `stand_ins`: a one-element tensor
        full of NaN per dtype, on the compute device."""
        self.index = index
        self.spec = spec
        self.parameters = [group.named[p.name] for p in spec.parameters]
        self.bindings = [*map(binding_of, self.parameters)]
        self.modules = [weakref.ref(module) for module in group.modules]
        """Modules whose call announces its use. Weak: a parameter keeps no module alive."""
        self.depth = 0
        """Calls of announcing modules under way."""
        self.between = False
        """At rest between two calls, but in its slot, see [Note: Fused units]."""
        self.stays = False
        """In use beyond those calls: for its backward."""
        self.graph_task = -1
        """The graph task of autograd that holds it, if any."""
        self.unpacking = 0
        """Nodes of autograd under way that may have its weights, and unpack what else was saved."""
        self.touched = False
        """Whether a forward has read a parameter outside of its modules' calls: then all of them
        rest in backward as well, where a recompute is to find them as the forward did."""
        self.around: set[int] = set()
        """Units in whose forward this one was called."""
        self.task: Any = None
        """The compute task that stands for this use, if one does."""
        self.weights: Weights | None = None
        """Those in its slot, also between two calls; None where it has none."""
        self.stand_ins = [
            stand_ins[p.dtype].expand(p.shape) if p.shape else stand_ins[p.dtype][0]
            for p in spec.parameters
        ]
        """What the parameters hold at rest: of the true shapes, full of NaN."""
        self.kept: Weights | None = None
        """The weights in the slot that the unit always uses, once it was used."""
        self._offsets = [spec.weight_offset(i) for i in range(len(self.parameters))]
        self._counters: list[torch.Tensor] = []
        """Aliases that share the version counters of the parameters, and have no trap."""
        self._versions = [0] * len(self.parameters)
        self._bound: list[int] = []
        """Parameters that are views of the weights in use."""
        self.fused = len(group.modules) > 1 and not spec.lasting
        at, owners = {id(p): i for i, p in enumerate(self.parameters)}, group.modules
        self._every = list(at.values())
        self._parts = {
            id(one): [at[id(p)] for p in one.parameters() if id(p) in at]
            for one in (owners if self.fused else ())
        }
        self._saver: Callable[[], Saver | None] = lambda: None

    # -- in use and at rest ----------------------------------------------------------------------

    def views_of(self, buffer: torch.Tensor) -> Weights:
        """The parameters' values in `buffer`, the unit's flat weights."""
        views = [
            typed(buffer, p.dtype, offset, p.shape)
            for p, offset in zip(self.spec.parameters, self._offsets)
        ]
        start = buffer.data_ptr()
        return Weights(views, start, start + self.spec.weight_bytes, {})

    def part_of(self, module: nn.Module) -> Sequence[int]:
        """The parameters that are in use while an announcing module runs."""
        return self._parts.get(id(module), self._every)

    def bind(self, part: Sequence[int]) -> None:
        """Let some parameters be views of the weights in use, if there are any."""
        views = () if self.weights is None else self.weights.views
        for index in part if len(self._bound) < len(views) else ():
            parameter, binding = self.parameters[index], self.bindings[index]
            if type(parameter) is not binding.active:
                parameter.__class__ = binding.active  # Torch sends nothing of it to a trap.
                binding.bind(parameter, views[index])
                self._versions[index] = version(self._counters[index])
                self._bound.append(index)

    def unbind(self, *, between: bool = False) -> None:
        """Let the parameters be at rest; `between` two calls the weights stay in the slot."""
        for index in self._every if self.weights is None else self._bound:
            parameter, binding = self.parameters[index], self.bindings[index]
            parameter.__class__ = binding.active  # As above.
            binding.bind(parameter, self.stand_ins[index])
            if index == len(self._counters):
                with torch.inference_mode(False):
                    self._counters.append(torch.Tensor.detach(parameter))
            parameter.__class__ = binding.resting
        self._bound.clear()
        self.between = between
        if not between:
            self.weights = None

    def make_plain(self, index: int, values: torch.Tensor) -> None:
        """Let a parameter be one of torch's own again, with `values`."""
        parameter, binding = self.parameters[index], self.bindings[index]
        with no_trap():
            binding.bind(parameter, values)  # First: another thread may look at the class.
            parameter.__class__ = binding.plain
        vars(parameter).pop("_offload_access", None)

    def changed(self) -> str | None:
        """Name of a parameter that was changed in place in this use; None where none was."""
        moved = (i for i in self._bound if version(self._counters[i]) != self._versions[i])
        return next((self.spec.parameters[index].name for index in moved), None)

    def note_versions(self) -> None:
        """Take the parameters as they are now for unchanged."""
        self._versions = list(map(version, self._counters))

    def lend(self, parameter: int, tensor: torch.Tensor) -> None:
        """Let one parameter at rest show `tensor`, keeping its class."""
        with no_trap():
            self.parameters[parameter].data = tensor

    def nested_with(self, other: FlatUnit) -> bool:
        """Whether one was called inside the forward of the other, or they are the same."""
        return self is other or self.index in other.around or other.index in self.around

    def close(self) -> None:
        """Let go of all views of the slot."""
        self.kept = self.weights = None

    # -- what autograd saves of the weights ------------------------------------------------------

    @property
    def saved(self) -> bool:
        """Whether autograd keeps anything whose backward may need the weights."""
        return self._saver() is not None

    def saver(self) -> Saver:
        """What every such thing holds on to."""
        saver = self._saver()
        if saver is None:
            saver = Saver()
            self._saver = weakref.ref(saver)
        return saver

    def saved_weight(
        self, resolve: Resolve, parameter: int, offset: int, saved: torch.Tensor
    ) -> SavedWeight:
        """What stands for a tensor that begins `offset` bytes into the weights of a parameter."""
        looks = saved.dtype, saved.shape, saved.stride()
        now, saver = version(self._counters[parameter]), self._saver() or self.saver()
        return SavedWeight(resolve, self.index, parameter, offset, *looks, now, saver)

    def saved_at(self, resolve: Resolve, address: int, saved: torch.Tensor) -> SavedWeight:
        """What stands for a tensor that begins at an address among the weights in use."""
        assert self.weights is not None
        offset = address - self.weights.start
        parameter = bisect_right(self._offsets, offset) - 1
        return self.saved_weight(resolve, parameter, offset - self._offsets[parameter], saved)

    def shown(self, saved: SavedWeight) -> torch.Tensor:
        """The weight in use that autograd has saved: the same tensor in each pass."""
        assert self.weights is not None
        views, known = self.weights.views, self.weights.saved
        found = known.get(saved.looks)
        if found is None:
            if len(known) >= SAVED_PER_PARAMETER_MAX * len(views):
                known.clear()
            found = known[saved.looks] = saved.of(views[saved.parameter])
        return found

    def require_version(self, saved: SavedWeight) -> None:
        """Refuse a weight that is not what was saved."""
        if version(self._counters[saved.parameter]) != saved.version:
            raise RuntimeError(
                f"{self.spec.parameters[saved.parameter].name} was modified between a forward and "
                "its backward (by optimizer.step() or an in-place operation): the gradient would "
                "be wrong. Run backward first, or forward again"
            )
