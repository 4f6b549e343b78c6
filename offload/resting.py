"""Parameters at rest: of the true shape, dtype and device, with their values elsewhere.

[Note: The trap]
A parameter at rest is of class `RestingParameter` over a one-element storage full of NaN. Every
torch function that gets one comes to `__torch_function__`. Questions that the stand-in answers
truly (shape, dtype, identity) go through. Anything else is lent the true values for the length of
the call: the parameter's data is a private copy while the function runs, under the saving guard,
so that autograd sees the parameter itself and what it saves is a handle. `.grad` and `.data` go to
the engine. The class is swapped in place: the object, its hooks and its graph stay.
What torch.compile makes of a function is broken where it touches one: the stand-in tells it nothing
of the values, and the trap itself is not compiled.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from offload.aside import left_alone, refuse_transforms, uncompiled
from offload.interrupt import wholly

Found = TypeVar("Found")


class Home(Protocol):
    """What an offloaded parameter asks of its engine; the parameter's own index is inside."""

    def lend(
        self,
        function: Callable[..., Any],
        resting: list[RestingParameter],
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call `function` while all of `resting` show their true values."""

    def look(self, read: Callable[[Any], torch.Tensor], *, to_write: bool) -> torch.Tensor:
        """What `read` gives of the parameter: of the slot, or of its values where at rest."""

    def gradient(self) -> torch.Tensor | None:
        """The gradient kept for the parameter."""

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Replace the gradient kept for the parameter."""

    def set_data(self, data: torch.Tensor) -> None:
        """Replace the parameter's values."""

    def set_requires_grad(self, parameter: RestingParameter, wanted: bool) -> None:
        """Freeze or unfreeze the parameter."""


_GRAD_DTYPE: Any = getattr(torch.Tensor, "grad_dtype", None)
"""Torch's own; older ones have none."""

NO_OTHER_GRADIENT = (
    "for a parameter that is offloaded: gradients of its unit lie in one buffer, of the dtype that "
    "Config.gradient_dtype names. Leave it alone, or attach with Config(gradient_dtype='fp32')"
)
"""Why a parameter has no gradient of a dtype of its own."""


class OffloadedParameter(nn.Parameter):
    """What parameters of an attached model are, at rest and in use: copies are plain ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the true values, attached to nothing."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        memo[id(self)] = copied = nn.Parameter(self.data.clone(), self.requires_grad)
        return copied

    def set_(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Refused; torch does not send this one to the trap.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "an offloaded parameter cannot be given other storage: copy_() values into it, or "
            "detach() first"
        )

    def _use_count(self) -> int:
        """Refused: asked by torch before it swaps a tensor for another, and by nobody else.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "torch.utils.swap_tensors() of an offloaded parameter would put other values in its "
            "place that the engine does not know: copy_() them into it, or detach() first"
        )

    @property
    def grad_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """As in torch: the parameter's own, where the engine trains it."""
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD_DTYPE.__get__(self)  # type: ignore[no-any-return]

    @grad_dtype.setter
    def grad_dtype(self, wanted: torch.dtype | None) -> None:
        if wanted != self.dtype:
            raise RuntimeError(f"p.grad_dtype = {wanted} {NO_OTHER_GRADIENT}")

    def __copy__(self) -> nn.Parameter:
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter with the true values."""
        hooks: OrderedDict[Any, Any] = OrderedDict()
        return (torch._utils._rebuild_parameter, (self.data, self.requires_grad, hooks))


class RestingParameter(OffloadedParameter):
    """A parameter whose values are elsewhere, see [Note: The trap]."""

    _offload_home: Home

    @classmethod
    @left_alone
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what is true of the stand-in, too, or else as the class has it."""
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            return _differentiate(func, args, kwargs)
        if func in TRUE_AT_REST:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is _T.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return cls._renewed(*args)
        return uncompiled(cls._answer)(func, args, kwargs)

    @classmethod
    def _renewed(cls, parameter: RestingParameter) -> nn.Parameter:
        """What `nn.Parameter(p)` is.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "nn.Parameter(p) of an offloaded parameter, as register_parametrization() and its like "
            "make it, would be one that the engine does not know: change what a model consists of "
            "before attach, or after offload.detach(model); a copy is "
            "nn.Parameter(p.detach().clone())"
        )

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer, or lend the true values for the call."""
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], RestingParameter):
            return wholly(handler, *args, **kwargs)
        refuse_transforms("an offloaded parameter was used")
        resting = list(dict.fromkeys(find((args, kwargs), RestingParameter)))
        return wholly(resting[0]._offload_home.lend, func, resting, args, kwargs)


def _asked_alone(name: str) -> property:
    """An attribute of torch's where torch.compile breaks its graph: it takes what the trap answers
    for the stand-in's own, and what it holds that against is not asked of the trap."""
    own = getattr(torch.Tensor, name)
    return property(
        left_alone(lambda parameter: own.__get__(parameter)),
        left_alone(lambda parameter, value: own.__set__(parameter, value)),
        left_alone(lambda parameter: own.__delete__(parameter)),
    )


for _name in ("grad", "data", "T", "mT", "H", "mH", "real", "imag"):
    setattr(RestingParameter, _name, _asked_alone(_name))
torch._dynamo.config.nontraceable_tensor_subclasses.add(RestingParameter)

_SIGNATURES = {one: signature(one) for one in (torch.autograd.grad, torch.autograd.backward)}
"""What runs a backward, and how it is called."""


def _differentiate(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a backward for parameters at rest, given as edges of the graph, which have no class.

    So the trap is on for all that the backward calls: recomputes, and hooks of the user's.
    """
    given = _SIGNATURES[function].bind(*args, **kwargs).arguments
    outputs, inputs = next(iter(given)), given["inputs"]
    resting = list(find((given[outputs], inputs), RestingParameter))
    with torch._C.DisableTorchFunctionSubclass():
        if not all(one.requires_grad for one in resting):
            return function(**given)  # Which refuses it.
        edge = {id(one): get_gradient_edge(one) for one in resting}
    for name in (outputs, "inputs"):
        if given[name] is not None:
            given[name] = tuple(edge.get(id(one), one) for one in given[name])
    zeros = given.pop("materialize_grads", False)
    found = function(**given)
    if not zeros or all(one is not None for one in found):
        return found
    if not all(isinstance(one, torch.Tensor) for one in inputs):
        raise RuntimeError(
            "materialize_grads cannot be used when the given input is a GradientEdge"
        )
    alike = (torch.zeros(one.shape, dtype=one.dtype, device=one.device) for one in inputs)
    return tuple(zero if one is None else one for one, zero in zip(found, alike))


def find(tree: Any, kind: type[Found]) -> Iterable[Found]:
    """All that is of a kind in nested tuples, lists and dictionaries."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from find(item, kind)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from find(item, kind)


NO_WHOLE_GRADIENT = (
    "when it has accumulated a gradient, but that of an offloaded parameter is accumulated where "
    "it lives and p.grad never shows it inside backward: p.register_hook() changes each gradient "
    "as it comes, and after backward p.grad may be changed"
)
"""Why what torch calls after accumulating cannot be."""


def _refuse_hook(parameter: RestingParameter, hook: object) -> None:
    raise RuntimeError(f"register_post_accumulate_grad_hook: torch calls it {NO_WHOLE_GRADIENT}")


def _refuse_sharing(parameter: RestingParameter) -> None:
    raise RuntimeError(
        "share_memory_() on an offloaded parameter: its values lie in memory of this process and "
        "move; share a copy (p.detach().clone()), or detach() first"
    )


def _compatible(parameter: RestingParameter, other: torch.Tensor) -> bool:
    """Whether a conversion can be set as `.data`; where not, torch would put another parameter.

    Raises:
        RuntimeError: it cannot.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if torch._has_compatible_shallow_copy_type(parameter, other):
            return True
        found = f"{other.dtype} on {other.device}"
        kept = f"{parameter.dtype} on {parameter.device}"
    raise RuntimeError(
        f"the model was asked for parameters of {found}, but it is offloaded with {kept}: leave "
        "out that .to(), or detach() before it"
    )


def _requires_grad_(parameter: RestingParameter, requires_grad: bool = True) -> Any:
    parameter._offload_home.set_requires_grad(parameter, requires_grad)
    return parameter


def _as_contiguous(question: Any) -> Any:
    """The answer to `question` for a contiguous tensor of the parameter's shape."""

    def answer(parameter: RestingParameter, *args: Any, **kwargs: Any) -> Any:
        alike = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return question(alike, *args, **kwargs)

    return answer


def _converted(convert: Any) -> Any:
    """A conversion that changes nothing returns the parameter, as torch has it."""

    def answer(parameter: RestingParameter, *args: Any, **kwargs: Any) -> Any:
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if kwargs.get("memory_format") is None and convert(probe, *args, **kwargs) is probe:
            return parameter
        resting = [parameter]
        return parameter._offload_home.lend(convert, resting, (parameter, *args), kwargs)

    return answer


_T: Any = torch.Tensor

_HANDLERS: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: lambda parameter, *_: parameter._offload_home.gradient(),
    _T.grad.__set__: lambda parameter, value: parameter._offload_home.set_gradient(value),
    _T.grad.__delete__: lambda parameter: parameter._offload_home.set_gradient(None),
    _T.data.__set__: lambda parameter, value: parameter._offload_home.set_data(value),
    _T.requires_grad.__set__: lambda p, wanted: p._offload_home.set_requires_grad(p, wanted),
    _T.requires_grad_: _requires_grad_,
    _T.register_post_accumulate_grad_hook: _refuse_hook,
    _T.share_memory_: _refuse_sharing,
    torch._has_compatible_shallow_copy_type: _compatible,
    **{
        question: _as_contiguous(question)
        for question in (_T.stride, _T.is_contiguous, _T.storage_offset, _T.dim_order)
    },
    **{
        convert: _converted(convert)
        for convert in (_T.to, _T.cpu, _T.cuda, _T.float, _T.bfloat16, _T.contiguous)
    },
}
"""Functions that the engine answers itself, by what they are given as first argument."""

_GETTERS = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "is_cuda",
    "is_cpu",
    "is_xpu",
    "is_meta",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "is_mps",
    "is_xla",
    "is_vulkan",
    "is_maia",
    "is_ipu",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "output_nr",
    "_version",
    "retains_grad",
    "name",
    "names",
    "itemsize",
    "nbytes",
)

_METHODS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_same_size",
    "register_hook",
    "retain_grad",
    "get_device",
    "__hash__",
    "__len__",
    "has_names",
    "_is_view",
)

_FUNCTIONS = (
    "is_floating_point",
    "is_complex",
    "is_tensor",
    "numel",
    "is_same_size",
    "is_inference",
    "is_nonzero_static",
    "get_device",
    "is_storage",
)


def _true_at_rest() -> frozenset[Any]:
    """Functions whose answer at rest is the true one. Names that this torch lacks are left out."""
    found: list[Any] = [_T._backward_hooks.__set__]
    for name in _GETTERS:
        if hasattr(torch.Tensor, name):
            found.append(getattr(torch.Tensor, name).__get__)
    for name in _METHODS:
        if hasattr(torch.Tensor, name):
            found.append(getattr(torch.Tensor, name))
    for name in _FUNCTIONS:
        if hasattr(torch, name):
            found.append(getattr(torch, name))
    return frozenset(found)


TRUE_AT_REST = _true_at_rest()
