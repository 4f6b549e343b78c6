"""What cannot be attached, refused by name before anything is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpu_adam import kernel
from offload.runtime.torch_internals import local_part


def check_arguments(call: str, example: str, **given: tuple[Any, bool]) -> None:
    """Refuse arguments of `call`, each given with whether it is what it should be."""
    for name, (one, right) in given.items():
        if not right:
            found = (
                f"the class {one.__name__} itself"
                if isinstance(one, type)
                else f"a {type(one).__name__}"
            )
            raise TypeError(f"{call}: {name} is {found}: write {example}")


def check_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, initializes: bool
) -> None:
    """Refuse by name what cannot be attached, or would not be the same afterwards. What is on the
    meta device is given its values by the caller, if it `initializes`."""
    kernel()
    named = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in named.items():
        if why := _fault_of(parameter, trains=optimizer is not None):
            raise ValueError(f"parameter {name} {why}")
    if not any(parameter.numel() for parameter in named):
        raise ValueError("the model has no parameters: there is nothing to offload")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on the meta device, and attach does not know its values: build "
                "the model under offload.empty_weights(), which leaves buffers real"
            )
    for name, module in model.named_modules():
        if why := _fault(name, module, initializes=initializes):
            raise ValueError(f"{name or 'the model'} {why}")
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for parameter in group["params"]:
            if parameter not in named and parameter.numel():
                raise ValueError(
                    f"the optimizer's group {number} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the model: build the optimizer from "
                    "model.parameters(); attach a module that holds both, such as "
                    "nn.ModuleList([model, loss]); or give it an optimizer of its own"
                )
    _check_sharing(model)


def _fault_of(parameter: nn.Parameter, *, trains: bool) -> str | None:
    """Why a parameter cannot be offloaded, and what to do; None where it can."""
    kind = type(parameter)
    if isinstance(parameter, nn.UninitializedParameter):
        return "has no shape yet (a Lazy module): run one batch through the model before attach"
    if parameter.is_inference():
        return "was made under torch.inference_mode(): build the model outside it"
    if kind is not nn.Parameter and local_part(parameter) is parameter:
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"is of class {name}, and only torch.nn.Parameter can be offloaded"
    if not parameter.is_meta and parameter.dim() > 1 and not parameter.is_contiguous():
        return (
            f"of shape {tuple(parameter.shape)} lies in memory with strides {parameter.stride()} "
            "(channels_last, transposed, part of another): call "
            "model.to(memory_format=torch.contiguous_format), or give it a contiguous() copy"
        )
    if parameter.grad is not None and parameter.grad.shape != parameter.shape:
        return "has a gradient from before it was resized: call model.zero_grad() before attach"
    if parameter.grad is not None and not (trains and parameter.requires_grad):
        found = "it is frozen" if trains else "the model is attached without an optimizer"
        return (
            f"has a gradient and {found}, so no step would use it: call model.zero_grad() before "
            "attach, or unfreeze it"
        )
    return None


def _fault(name: str, module: nn.Module, *, initializes: bool) -> str | None:
    """Why a module cannot be offloaded, and what to do; None where it can."""
    kind = type(module)
    fresh = any(one.is_meta for one in module.parameters(recurse=False))
    if fresh and not (initializes or hasattr(module, "reset_parameters")):
        return (
            f"({kind.__name__}) has parameters on the meta device, and no reset_parameters() to "
            "give them values: pass initialize= to attach"
        )
    if isinstance(module, DistributedDataParallel):
        return (
            "is a DistributedDataParallel, which sums gradients over ranks before the engine sees "
            "them: attach the model without it, which cuts it over all ranks by itself"
        )
    if hasattr(module, "_hf_hook"):
        return (
            "was dispatched by accelerate (device_map, cpu_offload), which moves weights itself: "
            "load the model without device_map, and let Config say where its weights live"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript module, which takes no hooks: attach the Python module"
    if kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft."):
        return (
            f"adapts {name}.{module.parameter_name} (PEFT's target_parameters, or "
            "all-linear on fused experts), which then gets other storage in every forward: name "
            "target_modules instead"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.sparse:
            return "has sparse gradients, and only dense ones have a place: pass sparse=False"
        if module.max_norm is not None:
            return (
                "changes its weight inside its own forward, where an offloaded one is read-only: "
                "build it without max_norm, and renormalise after step()"
            )
    return None


def _check_sharing(model: nn.Module) -> None:
    """Refuse parameters that share memory with each other, a buffer or an attribute of a module."""
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            # spectral_norm and its like set such an attribute anew in every forward.
            if type(value) is torch.Tensor and not hasattr(module, f"{attribute}_orig"):
                tensors.append((f"{name}.{attribute}".lstrip("."), value))
    every = ((name, local_part(one), isinstance(one, nn.Parameter)) for name, one in tensors)
    extents = sorted(
        (one.data_ptr(), one.data_ptr() + _reach(one), name, is_parameter)
        for name, one, is_parameter in every
        if not one.is_meta and one.layout is torch.strided and one.numel()
    )
    reach, before, of_parameter = 0, "", False
    for start, stop, name, is_parameter in extents:
        if start < reach and (is_parameter or of_parameter):
            raise ValueError(
                f"{before} and {name} share memory, and offloaded they would part: make them one "
                "parameter, take a view from its parameter in forward, or give one a clone()"
            )
        if stop > reach:
            reach, before, of_parameter = stop, name, is_parameter


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride())
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
