"""What cannot be attached, refused by name before anything is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpu_adam import kernel
from offload.config import Config
from offload.model.units import Group, refuse_sparse


def check_arguments(model: Any, optimizer: Any, config: Any) -> None:
    """Refuse arguments of `attach` that are not what they should be.

    Raises:
        TypeError: one is of a kind that cannot serve.
    """
    kinds: dict[str, tuple[Any, Any]] = {
        "model": (model, nn.Module),
        "optimizer": (optimizer, torch.optim.Optimizer | None),
        "config": (config, Config),
    }
    for name, (given, kind) in kinds.items():
        if not isinstance(given, kind):
            itself = isinstance(given, type)
            found = f"the class {given.__name__} itself" if itself else f"a {type(given).__name__}"
            raise TypeError(
                f"attach: {name} is {found}: write attach(model, optimizer, offload.Config(...)), "
                "with None for the optimizer of a model that is not trained"
            )


def check_parameters(model: nn.Module) -> None:
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
        if type(parameter) is not nn.Parameter:
            kind = f"{type(parameter).__module__}.{type(parameter).__qualname__}"
            raise ValueError(
                f"parameter {name} is of class {kind}, whose ways an offloaded one would lose: "
                "make it a plain torch.nn.Parameter"
            )


def check_initialised(model: nn.Module) -> None:
    """Refuse parameters on the meta device whose module has no way to give them values.

    Raises:
        ValueError: there are such.
    """
    for module in model.modules():
        fresh = any(one.is_meta for one in module.parameters(recurse=False))
        if fresh and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"{type(module).__name__} has parameters on the meta device, and no "
                "reset_parameters() to give them values: pass initialize= to attach"
            )


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


def _check_sharing(model: nn.Module) -> None:
    """Refuse parameters that share memory with each other, a buffer or an attribute of a module."""
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            # spectral_norm and its like set such an attribute anew in every forward.
            if type(value) is torch.Tensor and not hasattr(module, f"{attribute}_orig"):
                tensors.append((f"{name}.{attribute}".lstrip("."), value))
    extents = sorted(
        (one.data_ptr(), one.data_ptr() + _reach(one), name, isinstance(one, nn.Parameter))
        for name, one in tensors
        if not one.is_meta and one.layout is torch.strided and one.numel()
    )
    reach, before, of_parameter = 0, "", False
    for start, stop, name, is_parameter in extents:
        if start < reach and (is_parameter or of_parameter):
            raise ValueError(
                f"{before} and {name} share memory but are two, and offloaded they would part: "
                "make them one parameter, take a buffer or a view from its parameter in forward, "
                "or give one of them a clone()"
            )
        if stop > reach:
            reach, before, of_parameter = stop, name, is_parameter


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride())
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
