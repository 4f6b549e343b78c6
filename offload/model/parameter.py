"""Parameters of an attached model: with a trap at rest, plain views of a slot in use.

[Note: The trap]
A parameter at rest is of class `OffloadedParameter` over a one-element storage full of NaN. Every
torch function that is given one comes to `__torch_function__`. Questions that the stand-in answers
truly (shape, dtype, identity) go through. `.grad` and assignments go to the engine. Any other
function is called while the parameter's data is a snapshot of its true values. The class is swapped
in place, so the object, its hooks and its graph stay.

In use a parameter is an `ActiveParameter`, and nothing stands between it and torch but `.grad`,
which the engine keeps elsewhere.

[Note: Gradients at rest]
Clipping asks for every `p.grad`, and holds all until the last is scaled. Where those on nvme are
more than `exposed_memory`, `p.grad` has the gradient's form and no values. A function that needs
them is called with a snapshot in its place, by torch's own kernel on the whole tensor; one over a
list is called for each. A snapshot that nobody holds goes when another unit's is made, home if it
was edited: a norm reads each chunk once, a scaling reads and writes it once. Edits are seen by the
version counter or the function's name (unscaling counts none). After what is not torch's, or
`all_reduce`, and where somebody has an alias, home and snapshot are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from offload.runtime.entry import uncompiled
from offload.runtime.torch_internals import fits_in_place, introduce, no_trap, version

Found = TypeVar("Found")
_T: Any = torch.Tensor


class AttachedParameter(nn.Parameter):
    """A parameter of an attached model, at rest or in use. Copies and pickles of it are plain."""

    _offload_access: Any  # `access.ParameterAccess`

    def __deepcopy__(self, memo: object) -> nn.Parameter:
        return nn.Parameter(self.data.clone(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (nn.Parameter, (self.data, self.requires_grad))


class ActiveParameter(AttachedParameter):
    """A parameter in use: a view of its unit's slot."""

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient kept for the parameter; None inside a backward."""
        if torch.compiler.is_compiling():  # Dynamo reads every attribute, and uses none.
            return None
        return self._offload_access.gradient()  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self._offload_access.set_gradient(gradient)

    @grad.deleter
    def grad(self) -> None:
        self._offload_access.set_gradient(None)


def trap(cls: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A `__torch_function__`: what is true of the stand-in, too, else the answer of its class."""
    kwargs = kwargs or {}
    if func in TRUE_AT_REST:
        with no_trap():
            return func(*args, **kwargs)
    return cls._answer(func, args, kwargs)


class OffloadedParameter(AttachedParameter):
    """A parameter at rest, see [Note: The trap]."""

    __torch_function__: Any = classmethod(trap)

    def set_(self, source: Any) -> OffloadedParameter:  # type: ignore[override]
        """Take other values, as a parametrization does that is assigned to. Torch asks no trap."""
        self._offload_access.set_data(source)
        return self

    @classmethod
    @uncompiled
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Ask the engine, or lend true values."""
        if func in _BACKWARDS:
            return _differentiate(func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], OffloadedParameter):
            return handler(*args, **kwargs)
        resting = list(dict.fromkeys(find((args, kwargs), OffloadedParameter)))
        return resting[0]._offload_access.lend(func, resting, args, kwargs)


def find(tree: Any, kind: type[Found]) -> Iterable[Found]:
    """All objects of a class in nested tuples, lists, sets and dictionaries."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from find(item, kind)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from find(item, kind)


class Binding:
    """How a parameter has the values that its unit gives it: one of torch's own in its `data`.

    One whose values are part of a tensor on several ranks is of other classes, and has them
    elsewhere: `parallel.dtensor`.
    """

    plain: Any = nn.Parameter
    active: Any = ActiveParameter
    resting: Any = OffloadedParameter

    def bind(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Let a parameter that is not at rest have other values."""
        _T.data.__set__(parameter, values)  # Torch's own, whatever a class makes of it.

    def local(self, value: Any) -> Any:
        """What units have of a value of the parameter (a gradient, a state) as a user has it."""
        return value

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        """A value as a user has it."""
        return local


PLAIN = Binding()

# -- torch.compile -------------------------------------------------------------------------------


def _breaks_the_graph(name: str) -> property:
    """An attribute at which torch.compile breaks its graph: it would trace the stand-in's own."""
    own = getattr(torch.Tensor, name)
    return property(
        uncompiled(lambda parameter: own.__get__(parameter)),
        uncompiled(lambda parameter, value: own.__set__(parameter, value)),
        uncompiled(lambda parameter: own.__delete__(parameter)),
    )


for _name in ("grad", "data", "T", "mT", "H", "mH", "real", "imag"):
    setattr(OffloadedParameter, _name, _breaks_the_graph(_name))
introduce(OffloadedParameter)

# -- backwards for some parameters -----------------------------------------------------------------

_BACKWARDS = {one: signature(one) for one in (torch.autograd.grad, torch.autograd.backward)}


def _differentiate(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a backward for parameters at rest, given as edges of the graph, so that the trap stays
    on for all that it calls: recomputes, and the user's hooks."""
    given = _BACKWARDS[function].bind(*args, **kwargs).arguments
    outputs, inputs = next(iter(given)), given["inputs"]
    resting = list(find((given[outputs], inputs), OffloadedParameter))
    with no_trap():
        if not all(one.requires_grad for one in resting):
            return function(**given)  # Which refuses it.
        edge = {id(one): get_gradient_edge(one) for one in resting}
    for name in (outputs, "inputs"):
        if given[name] is not None:
            given[name] = tuple(edge.get(id(one), one) for one in given[name])
    return function(**given)


# -- what the engine answers -----------------------------------------------------------------------


def refuse_hook(parameter: torch.Tensor, *_: object) -> None:
    """Refuse a hook that would find no gradient."""
    raise RuntimeError(
        "register_post_accumulate_grad_hook of an offloaded parameter, whose gradient is "
        "accumulated where it lives: use p.register_hook(), or p.grad after backward"
    )


def _compatible(parameter: OffloadedParameter, other: torch.Tensor) -> bool:
    """Whether a conversion can be set as `.data`; else torch would register another parameter."""
    with no_trap():
        if fits_in_place(parameter, other):
            return True
        found = f"{other.dtype} on {other.device}"
        kept = f"{parameter.dtype} on {parameter.device}"
    raise RuntimeError(
        f"the model was asked for parameters of {found}, but it is offloaded with {kept}: leave "
        "out that .to(), or detach() before it"
    )


def _requires_grad_(parameter: OffloadedParameter, requires_grad: bool = True) -> Any:
    parameter._offload_access.set_requires_grad(parameter, requires_grad)
    return parameter


def _as_contiguous(question: Any) -> Any:
    """The answer to `question` for a contiguous tensor of the parameter's shape."""

    def answer(parameter: OffloadedParameter, *args: Any, **kwargs: Any) -> Any:
        alike = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return question(alike, *args, **kwargs)

    return answer


def _converted(convert: Any) -> Any:
    """A conversion that changes nothing returns the parameter, as torch has it."""

    def answer(parameter: OffloadedParameter, *args: Any, **kwargs: Any) -> Any:
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        # Accelerate numbers the CPUs of ranks, and torch would copy from one to the other.
        args = tuple(_unnumbered(one) for one in args)
        if kwargs.get("memory_format") is None and convert(probe, *args, **kwargs) is probe:
            return parameter
        return parameter._offload_access.lend(convert, [parameter], (parameter, *args), kwargs)

    return answer


def _unnumbered(given: Any) -> Any:
    cpu = isinstance(given, torch.device) and given.type == "cpu"
    return torch.device("cpu") if cpu else given


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: lambda parameter, *_: parameter._offload_access.gradient(),
    _T.grad.__set__: lambda parameter, value: parameter._offload_access.set_gradient(value),
    _T.grad.__delete__: lambda parameter: parameter._offload_access.set_gradient(None),
    _T.data.__set__: lambda parameter, value: parameter._offload_access.set_data(value),
    _T.requires_grad.__set__: lambda p, wanted: p._offload_access.set_requires_grad(p, wanted),
    _T.requires_grad_: _requires_grad_,
    _T.register_post_accumulate_grad_hook: refuse_hook,
    fits_in_place: _compatible,
    **{one: _as_contiguous(one) for one in (_T.stride, _T.is_contiguous, _T.storage_offset)},
    **{
        one: _converted(one)
        for one in (_T.to, _T.cpu, _T.cuda, _T.float, _T.bfloat16, _T.contiguous)
    },
}
"""Functions that the engine answers itself, by what they are given as first argument."""


_GETTERS = """
    shape ndim dtype device layout requires_grad is_leaf grad_fn is_cuda is_cpu is_xpu is_meta
    is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps is_xla is_vulkan is_maia is_ipu
    output_nr retains_grad name names itemsize nbytes
"""

_METHODS = """
    size dim ndimension numel nelement element_size is_floating_point is_complex is_signed
    is_inference is_same_size register_hook retain_grad get_device __hash__ __len__ has_names
"""

_FUNCTIONS = """
    is_floating_point is_complex is_tensor numel is_same_size is_inference get_device is_storage
"""

TRUE_AT_REST = frozenset(
    [
        *(getattr(_T, name).__get__ for name in _GETTERS.split() if hasattr(_T, name)),
        *(getattr(_T, name) for name in _METHODS.split() if hasattr(_T, name)),
        *(getattr(torch, name) for name in _FUNCTIONS.split() if hasattr(torch, name)),
    ]
)
"""Functions whose answer at rest is the true one. Names that this torch lacks are left out."""

# -- gradients at rest -----------------------------------------------------------------------------


class RestingGradient(torch.Tensor):
    """A gradient at rest, see [Note: Gradients at rest]. Copies and pickles of it are plain."""

    _offload_lend: Callable[[], Any]  # Gives the snapshot that a function is called with.
    _offload_kept: torch.Tensor  # Its values, once they must stay where they are.

    __torch_function__: Any = classmethod(uncompiled(trap))
    __torch_dispatch__: Any = __torch_function__  # For C++, and while parameters are lent.

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call `func` with the values."""
        if func in _AS_IT_IS:
            return _AS_IT_IS[func](*args, **kwargs)
        if "_foreach_" in func.__name__ and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        resting = {id(one): one for one in find((args, kwargs), RestingGradient)}
        lent, values, versions = {}, {}, {}
        for at, one in resting.items():
            lent[at] = one._offload_lend()
            values[at] = lent[at].tensor()
            versions[at] = version(values[at])
        try:
            found = func(*swapped(args, values), **swapped(kwargs, values))
            if func is _T.data_ptr:  # Somebody works at the address.
                args[0]._offload_kept = values[id(args[0])]
            return swapped(found, {id(values[at]): one for at, one in resting.items()})
        finally:
            found, named = None, _edits(func)
            edited = {at: version(values[at]) != versions[at] or named for at in lent}
            values.clear()
            for at, snapshot in lent.items():
                snapshot.take_back(edited[at])


introduce(RestingGradient, in_lists=True)

_AS_IT_IS: dict[Any, Callable[..., Any]] = {
    **{one: _as_contiguous(one) for one in (_T.stride, _T.is_contiguous, _T.storage_offset)},
    **dict.fromkeys((_T.data.__get__, _T.detach, _T.detach_), lambda gradient, *_: gradient),
    _T.__deepcopy__: lambda gradient, memo: gradient.clone(),
}


def _one_by_one(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a function over lists does: the same to each of their elements."""
    found, given = [], (*args, *kwargs.values())
    for at in range(len(args[0])):
        one = [value[at : at + 1] if isinstance(value, (list, tuple)) else value for value in given]
        found.append(func(*one[: len(args)], **dict(zip(kwargs, one[len(args) :]))))
    return None if found[0] is None else type(found[0])(one for part in found for one in part)


def _edits(func: Callable[..., Any]) -> bool | None:
    """Whether a function edits, by its name; False where the version counter tells, else None."""
    name, *_ = func.__name__.split(".")
    if name.endswith("_") and not name.endswith("__"):
        return True
    root, *inner = (getattr(func, "__module__", None) or "torch").split(".")
    return False if root == "torch" and inner[:1] not in (["distributed"], ["_ops"]) else None


def swapped(tree: Any, by: Mapping[int, torch.Tensor]) -> Any:
    """Lists, tuples and dictionaries with other tensors in place of some."""
    if isinstance(tree, torch.Tensor):
        return by.get(id(tree), tree)
    if type(tree) in (list, tuple):
        return type(tree)(swapped(item, by) for item in tree)
    return {name: swapped(one, by) for name, one in tree.items()} if type(tree) is dict else tree
