"""Where an optimizer or a model is not what a file of DeepSpeed's asks for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from offload.deepspeed_values import hashable, plain, shown


def conflicts(expects: Mapping[str, Any], optimizer: Any) -> Iterator[str]:
    """Where an optimizer is not what a file asks for (`Translation.expects`), in sentences."""
    groups = optimizer.param_groups
    if "scheduler.type" in expects and any("initial_lr" in group for group in groups):
        kind = expects["scheduler.type"]
        yield (
            f"scheduler.type is {kind}, and a scheduler has been made for the optimizer already "
            "(make it after attach)"
        )
    if "optimizer.type" not in expects:
        return
    asked, mine = str(expects["optimizer.type"]), type(optimizer).__name__
    params = {
        name.rpartition(".")[2]: value
        for name, value in expects.items()
        if name.startswith("optimizer.params.")
    }
    if mine.lower().removeprefix("cpu") not in _SAME.get(asked.lower(), (asked.lower(),)):
        absent = "" if asked.lower() in _OFFERED else _ABSENT
        yield f"optimizer.type is {asked}, {absent}and yours is {mine}"
        return
    for name in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad"):
        there = [hashable(_plain(_value_in(group, name))) for group in groups if name in group]
        if name in params and there and plain(params[name]) not in there:
            yield f"optimizer.params.{name} is {shown(params[name])}, and yours is {there[0]}"
    if not plain(params.get("bias_correction", True)):
        yield "optimizer.params.bias_correction is false, and yours corrects"
    decoupled = asked.lower() == "adamw" or plain(params.get("adam_w_mode", True))
    for group in groups if asked.lower() in ("adam", "adamw") else ():
        if group["weight_decay"] and bool(group.get("decoupled_weight_decay")) != decoupled:
            way = "decoupled (AdamW)" if decoupled else "within the gradient (Adam)"
            yield f"optimizer {asked} has its weight decay {way}, and yours has not"
            return


_SAME = {"adam": ("adam", "adamw"), "adamw": ("adam", "adamw")}
"""Kinds of one family: how they decay weights is looked at by itself."""

_OFFERED = ("adam", "adamw", "sgd", "lion")
_ABSENT = "which is not done here (AdamW, Adam, SGD and Lion are), "


def remarks(expects: Mapping[str, Any], dtypes: Collection[str]) -> Iterator[str]:
    """What a file asks of a model whose parameters are of `dtypes`, and the model has not."""
    if expects.get("bf16.enabled") and "float32" in dtypes and "bfloat16" not in dtypes:
        yield (
            "the file of DeepSpeed has bf16.enabled true, and no parameter of the model is "
            "bfloat16: weights and gradients stay float32, of twice the bytes; likely DeepSpeed "
            "cast the model by itself; try model.to(torch.bfloat16) before the optimizer is made "
            "(fp32 masters are kept)"
        )


def _value_in(group: Mapping[str, Any], name: str) -> Any:
    # A scheduler may have moved the learning rate already.
    return group.get("initial_lr", group["lr"]) if name == "lr" else group[name]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
