"""What cannot be attached, refused by name before anything is touched."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpu_adam import kernel
from offload.config import FIELDS, Config
from offload.model.units import Group, refuse_sparse

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def explain_call(attach: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
    """Let `attach` say how it is called where Python itself would refuse the arguments."""
    signature = inspect.signature(attach)

    @functools.wraps(attach)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(_explanation(str(error), kwargs, signature)) from None
        return attach(*args, **kwargs)

    return call


def _explanation(error: str, named: Mapping[str, Any], signature: inspect.Signature) -> str:
    """What is wrong with the arguments of a call that Python refuses with `error`."""
    if fields := [name for name in named if name in FIELDS]:
        given = ", ".join(f"{name}={reprlib.repr(named[name])}" for name in fields)
        return (
            f"attach() was given {' and '.join(fields)}, of Config, by name: write attach(model, "
            f"optimizer, offload.Config({given}))"
        )
    if error.endswith(": 'optimizer'"):
        return (
            "attach() was given no optimizer: write attach(model, optimizer, config), or "
            "attach(model, None, config) for a model that is not trained"
        )
    return f"attach(): {error}; it takes {', '.join(signature.parameters)}"


def check_arguments(model: Any, optimizer: Any, config: Any) -> None:
    """Refuse arguments of `attach` that are not what they should be.

    Raises:
        TypeError: one is of a kind that cannot serve.
        ValueError: the optimizer is attached, or an option is not offered.
    """
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError(
            f"attach was given the optimizer ({type(model).__name__}) first and the model "
            f"({type(optimizer).__name__}) second: write attach(model, optimizer, config)"
        )
    if not isinstance(model, nn.Module):
        hint = "build it first, with ()" if isinstance(model, type) else "give the whole model"
        raise TypeError(f"attach: model is {_found(model)} and no torch.nn.Module: {hint}")
    if not isinstance(config, Config):
        hint = "(**settings)" if isinstance(config, dict) else "(...)"
        raise TypeError(
            f"attach: config is {_found(config)} and no offload.Config: write attach(model, "
            f"optimizer, offload.Config{hint})"
        )
    _check_parameters(model)
    if optimizer is None:
        return
    if isinstance(optimizer, type) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"attach: optimizer is {_found(optimizer)} and no optimizer: give torch.optim.AdamW("
            "model.parameters()) or Adam, or None for a model that is not trained"
        )


def _check_parameters(model: nn.Module) -> None:
    """Refuse parameters that would not be the same afterwards.

    Raises:
        ValueError: see the message.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"parameter {name} has no shape yet (a Lazy module): run one batch through the "
                "model before attach"
            )
        if parameter.is_inference():
            raise ValueError(
                f"parameter {name} was made under torch.inference_mode() and can be used in it "
                "only: build the model outside it"
            )
        if type(parameter) is not nn.Parameter and not hasattr(parameter, "_offload_access"):
            kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
            raise ValueError(
                f"parameter {name} is of class {kind}, whose ways an offloaded one would lose: "
                "make it a plain torch.nn.Parameter"
            )


def _found(value: object) -> str:
    text = reprlib.repr(value) if type(value) in (str, dict) else ""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"of class {type(value).__name__}" + (f" ({text})" if text else "")


def check_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, groups: list[Group]
) -> None:
    """Refuse by name what cannot be attached.

    Raises:
        ValueError: see the message.
    """
    named = {p: name for group in groups for name, p in group.named.items()}
    if not named:
        raise ValueError("the model has no parameters: there is nothing to offload")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on the meta device and attach does not know its values: build "
                "the model under offload.empty_weights(), which leaves buffers real, in place of "
                "torch.device('meta')"
            )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is a DistributedDataParallel, which sums gradients over "
                "ranks before the engine sees them: every rank would train alone. Attach the model "
                "without it, and between backward() and step() average p.grad over the ranks with "
                "torch.distributed.all_reduce"
            )
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"{name or 'the model'} was dispatched by accelerate (device_map, cpu_offload), "
                "which moves weights in its own hooks and leaves empty ones on the meta device: "
                "load the model without device_map, and let Config say where its weights live"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the model'} is a TorchScript module, which takes no hooks: attach the "
                "Python module that it was made from"
            )
        forward = getattr(vars(module).get("forward"), "__qualname__", "")
        if forward.startswith("make_graphed_callables."):
            raise ValueError(
                f"{name or 'the model'} was captured by make_graphed_callables, and a replay reads "
                "its weights where they lay then, wherever they are now: attach the model without "
                "that"
            )
        kind = type(module)
        if kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft."):
            raise ValueError(
                f"parameter {name}.{module.parameter_name} has an adapter of its own (PEFT's "
                "target_parameters; all-linear takes fused experts for such), and PEFT gives it "
                "its storage anew in every forward, where an offloaded one cannot change: name "
                "target_modules instead, those of attention for example"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            refuse_sparse(f"{name or 'the model'} has sparse gradients")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} changes its weight inside its own forward (max_norm="
                f"{module.max_norm}), and an offloaded one can change between forwards only: build "
                f"the {type(module).__name__} without max_norm and renormalise after step()"
            )
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for parameter in group["params"]:
            if parameter not in named and parameter.numel():
                raise ValueError(
                    f"the optimizer's group {number} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the model: build the optimizer from "
                    "model.parameters()"
                )
    _check_memory(model, trains=optimizer is not None)


def _check_memory(model: nn.Module, *, trains: bool) -> None:
    """Refuse parameters whose memory, gradients or hooks offloaded ones could not have.

    Raises:
        ValueError: see the message; `CPU_ADAM_KERNEL` names no kernel that runs here.
    """
    kernel()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.dim() > 1 and not parameter.is_contiguous():
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} lies in memory with strides "
                f"{parameter.stride()} (channels_last, transposed, part of another), and offloaded "
                "ones are contiguous, with which torch computes other bits: call "
                "model.to(memory_format=torch.contiguous_format), or give it a contiguous() copy"
            )
        if parameter.grad is not None and not (trains and parameter.requires_grad):
            found = "it is frozen" if trains else "the model is attached without an optimizer"
            raise ValueError(
                f"parameter {name} has a gradient and {found}, so no step would use it and no "
                "place is for it: set its grad to None (model.zero_grad()) before attach, or "
                "unfreeze it"
            )
    _check_sharing(model)
    _check_stored_views(model)


def _check_sharing(model: nn.Module) -> None:
    """Refuse parameters that share memory with each other or with a buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    extents = sorted(
        (one.data_ptr(), one.data_ptr() + one.nbytes, name, isinstance(one, nn.Parameter))
        for name, one in tensors
        if not one.is_meta and one.layout is torch.strided and one.numel()
    )
    reach, before, of_parameter = 0, "", False
    for start, stop, name, is_parameter in extents:
        if start < reach and (is_parameter or of_parameter):
            raise ValueError(
                f"{before} and {name} share memory but are two, and offloaded they would part: "
                "make them one parameter, take a buffer from its parameter in forward, or give one "
                "of them a clone()"
            )
        if stop > reach:
            reach, before, of_parameter = stop, name, is_parameter


def _check_stored_views(model: nn.Module) -> None:
    """Refuse views of parameters that modules keep as plain attributes."""
    homes = {
        parameter.untyped_storage().data_ptr(): name
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and parameter.numel()
    }
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            # spectral_norm and its like set such an attribute anew in every forward.
            if type(value) is not torch.Tensor or hasattr(module, f"{attribute}_orig"):
                continue
            if value.is_meta or value.layout is not torch.strided or not value.numel():
                continue
            if of := homes.get(value.untyped_storage().data_ptr()):
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"attribute {where} is a view of parameter {of}, and once that is offloaded it "
                    "would keep the old values: take it from the parameter in forward, or give it "
                    "a clone()"
                )
