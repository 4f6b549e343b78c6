"""The modules and parameters of an attached model stay those that were attached.

[Note: Structure]
Units, hooks, homes and the optimizer's groups are those of the parameters that the modules had at
attach. Another parameter in the place of one of them, a module with parameters of its own, or a
wrapper that takes gradients from where torch puts them would train beside the engine, and wrong
without a word. Torch tells of what is registered, and it is refused there and then; what goes past
that (a write to `module._parameters`, as of `fully_shard`) is found by the next `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload.interrupt import whole

_watched: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()
"""By every module of an attached model, what belongs to it."""


class Structure:
    """The parameters of an attached model, by the modules that own them."""

    def __init__(self, model: nn.Module, engine: Any):
        """Of `model`, which `engine` serves, as it is now."""
        self.engine: Callable[[], Any] = weakref.ref(engine)
        """The engine, for as long as it lives."""
        self._parameters = list(model.parameters())  # Which keeps their ids theirs.
        self._known = {id(parameter) for parameter in self._parameters}
        self._owners = [
            (name, module._parameters)
            for name, module in model.named_modules()
            if module._parameters
        ]
        self._modules = weakref.WeakSet(model.modules())

    def watch(self) -> None:
        """Let the model be changed no more, until `release`."""
        _listen()
        for module in self._modules:
            _watched[module] = self

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._known

    def release(self) -> None:
        """Let the model be changed again."""
        for module in list(self._modules):
            if _watched.get(module) is self:
                del _watched[module]

    @whole
    def check(self) -> None:
        """Look for parameters that have come past torch's registration.

        Raises:
            RuntimeError: there is one.
        """
        for owner, parameters in self._owners:
            for name, parameter in parameters.items():
                if parameter is not None and id(parameter) not in self._known:
                    _refuse(f"{owner}.{name}" if owner else name, "a parameter")


def structure_of(parameters: Iterable[nn.Parameter]) -> Structure | None:
    """An attached model that any of `parameters` belongs to, or None."""
    attached = set(_watched.values())
    found = (one for parameter in parameters for one in attached if parameter in one)
    return next(found, None)


def check_wrapped(module: nn.Module, name: str) -> None:
    """Refuse a wrapper that reduces gradients where an attached parameter never has them.

    Raises:
        ValueError: `module` is one.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"{name or 'the model'} is a DistributedDataParallel, which sums gradients over ranks "
            "before the engine sees them, and offloaded ones would go past it: every rank would "
            "train alone. Attach the model without it, and between backward() and step() average "
            "p.grad over the ranks with torch.distributed.all_reduce"
        )


_listening: list[Any] = []


def _listen() -> None:
    """Ask torch, once, to tell of all that is registered anywhere."""
    if not _listening:
        hooks: Any = nn.modules.module
        _listening.append(hooks.register_module_parameter_registration_hook(_parameter_comes))
        _listening.append(hooks.register_module_module_registration_hook(_module_comes))


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _parameter_comes(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    structure = _watched.get(module)
    if structure is not None and parameter is not None and parameter not in structure:
        _refuse(name, f"a parameter of a {type(module).__name__}")


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _module_comes(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    if isinstance(module, DistributedDataParallel) and any(m in _watched for m in child.modules()):
        check_wrapped(module, "what the attached model is put into")
    structure = _watched.get(module)
    if structure is not None:
        for inner, parameter in child.named_parameters():
            if parameter not in structure:
                _refuse(f"{name}.{inner}", f"in a module of a {type(module).__name__}")


def _refuse(name: str, what: str) -> None:
    """Raise for a parameter that was not there at attach."""
    raise RuntimeError(
        f"{name}, {what} of an attached model, is another than at attach: the engine does not know "
        "it, and it would not be offloaded, trained or given back. Leave out assign=True where it "
        "came by load_state_dict(). Change what a model consists "
        "of (resized embeddings, added adapters, pruned or sharded weights) before attach, or "
        "offload.detach(model), change it, build the optimizer anew and attach again"
    )
