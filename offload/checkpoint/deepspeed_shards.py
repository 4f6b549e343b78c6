"""What DeepSpeed's ZeRO (1 to 3) has saved, read without it: fp32 masters, moments, steps.

[Note: ZeRO's shards]
Each rank has left a flat fp32 tensor of masters for each group of parameters, and one for each slot
of their states; `param_shapes` names the parameters of a group in their order. In stages 1 and 2
the tensors of all ranks one after the other are the group's parameters, with paddings between them.
In stage 3 each rank has its part of every parameter, the last part filled up. Files are mapped, not
read, and nothing in them is run: classes of DeepSpeed become objects without a meaning.

Source: deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py and stage3.py, of 0.19.8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from offload.checkpoint.directory import FORMAT, encoded
from offload.checkpoint.schema import told
from offload.checkpoint.shards import WEIGHTS, Sets, Tensor, Values, joined, name_of

_RULES = {("exp_avg",): "lion", ("exp_avg", "exp_avg_sq"): "adam", ("momentum_buffer",): "sgd"}
"""The update's rule by the slots of its states, but for the residue."""

_FILE = re.compile(r"(?:\w+_)??(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_THEIRS = re.compile(
    r"module|buffer_names|optimizer|\w+_shapes|shared_params|\w+_fragments|\w+_world_size|ds_\w+|"
    r"data_sampler|random_ltd|skipped_steps|global_samples|checkpoint_parallel_dimensions"
)
"""Keys that are not handed on; others are: of the scheduler, and what the user had it keep."""


@dataclass
class Checkpoint:
    """A checkpoint that can be read part by part."""

    sets: Sets
    """The weights, and each slot of the states."""
    values: Values
    run: dict[str, Any]
    """As `run.json` of a save has it."""
    castable: Collection[str]
    """Names of parameters; the other weights keep their dtype."""
    dtype: str | None = None
    """Of its parameters in a save where no other is asked for; None: as they are."""
    notices: list[str] = field(default_factory=list)
    """What is left out of it."""


def rule_of(slots: Collection[str]) -> str:
    """The update's rule of an optimizer whose states have such slots, if it is offered."""
    kinds = tuple(sorted(slots))
    if kinds not in _RULES:
        raise ValueError(f"states of {', '.join(kinds)}: an optimizer that is not offered")
    return _RULES[kinds]


class _Stub:
    """An object of a class of DeepSpeed's."""

    def __init__(self, *_: object) -> None:
        pass


def is_deepspeed(where: str) -> bool:
    """Whether there is a checkpoint of DeepSpeed, or a folder of them that names the latest."""
    return any(map(_FILE.fullmatch, os.listdir(_tagged(where))))


def _tagged(where: str) -> str:
    latest = os.path.join(where, "latest")
    if not os.path.isfile(latest):
        return where
    with open(latest, encoding="utf-8") as file:
        tag = os.path.join(where, os.path.basename(file.read(1000).strip()))
    return tag if os.path.isdir(tag) else where


def open_deepspeed(where: str) -> Checkpoint:
    """Map a checkpoint; refused where it is none of ZeRO, not whole, or more than a save holds."""
    where = _tagged(where)
    cause = "a file is missing, or it is of another release, or without ZeRO"
    with told(where, "what ZeRO of DeepSpeed 0.19 writes", cause):
        return _checkpoint(*_load(where))


def _load(where: str) -> tuple[list[Any], list[Any]]:
    """The model states and the optimizer states, by rank."""
    found: dict[str, list[Any]] = {"model": [], "optim": []}
    matches = [match for name in os.listdir(where) if (match := _FILE.fullmatch(name))]
    for match in sorted(matches, key=lambda match: int(match[1] or 0)):
        if int(match[2]):
            raise ValueError(f"{match[0]}: a part of a model that was cut by tensor parallelism")
        path = os.path.join(where, match[0])
        named = get_unsafe_globals_in_checkpoint(path)
        if other := [one for one in named if not one.startswith("deepspeed.")]:
            raise ValueError(f"{match[0]} with a {other[0]}, which could run code")
        stubs: list[Any] = [(int if one.endswith("Enum") else _Stub, one) for one in named]
        with safe_globals(stubs):
            one = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        found[match[3]].append(one)
    shards = [one["optimizer_state_dict"] for one in found["optim"]]
    count = shards[0]["partition_count"]
    if {len(shards)} != set(count if isinstance(count, list) else [count]):  # Experts have fewer.
        raise ValueError(f"optimizer states of {len(shards)} ranks, not of {count}")
    return found["model"], shards


def _checkpoint(models: list[Any], shards: list[Any]) -> Checkpoint:
    model, last = models[0], int(shards[0]["zero_stage"]) == 3
    masters = [
        one["fp32_flat_groups" if last else "single_partition_of_fp32_groups"] for one in shards
    ]
    bases = [one["optimizer_state_dict" if last else "base_optimizer_state"] for one in shards]
    shapes: list[dict[str, torch.Size]] = model["param_shapes"]
    slots = [k for k, v in bases[0]["state"][0].items() if isinstance(v, torch.Tensor) and v.ndim]
    flats = {WEIGHTS: masters}
    for slot in slots:
        flats[slot] = [[one["state"][at][slot] for at in range(len(shapes))] for one in bases]
    sets: Sets = {prefix: {} for prefix in flats}
    pieces: dict[str, list[Any]] = {}
    paddings = shards[0].get("param_alignment_paddings") or [[0] * len(one) for one in shapes]
    for group, named in enumerate(shapes):
        sizes = [rank[group].numel() for rank in masters]
        least = [min(x[rank][group].numel() for x in flats.values()) for rank in range(len(sizes))]
        at = 0
        for (name, shape), padding in zip(named.items(), paddings[group]):
            places = _in_ranks(at, shape.numel(), sizes, last)
            whole = all(stop <= least[rank] for rank, _, stop in places)
            if not whole or sum(stop - start for _, start, stop in places) != shape.numel():
                raise ValueError(f"{name} of shape {tuple(shape)}, of which a part is missing")
            pieces[name] = [(rank, group, slice(*span)) for rank, *span in places]
            at += -(-shape.numel() // len(sizes)) if last else shape.numel() + padding
            for prefix in sets:
                sets[prefix][name] = Tensor(name, "float32", tuple(shape))
    others = _not_trained(models, sets[WEIGHTS])
    sets[WEIGHTS] |= {name: one for name, (one, _) in others.items()}

    def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        if name in others:
            return others[name][1][start : start + count]
        parts = [flats[prefix][rank][group][there] for rank, group, there in pieces[name]]
        return joined([(len(one), partial(one.view, -1)) for one in parts], start, count).float()

    half = any(
        one.dtype != torch.bfloat16 for name, one in model["module"].items() if name in pieces
    )
    castable = sets[WEIGHTS].keys() - set(model["buffer_names"])
    found = Checkpoint(sets, values, {}, castable, "float32" if half else "bfloat16")
    step = model["global_steps"] - model["skipped_steps"]
    found.run = {"format": FORMAT, "step": step, "user": _of_users(model, found.notices)}
    found.run["optimizer"] = _optimizer(bases[0], shapes, slots)
    return found


def _in_ranks(at: int, count: int, sizes: list[int], cut: bool) -> list[tuple[int, int, int]]:
    """Of `count` elements from `at` on, the ranks that have any, and where; see [Note: ZeRO's
    shards]. `cut`: each rank has its part of them at its own `at`."""
    if cut:
        part = -(-count // len(sizes))
        ends = [(at, at + min(part, count - rank * part)) for rank in range(len(sizes))]
    else:
        begun = [sum(sizes[:rank]) for rank in range(len(sizes))]
        ends = [(max(at - one, 0), at + count - one) for one in begun]
    found = [(rank, start, min(stop, sizes[rank])) for rank, (start, stop) in enumerate(ends)]
    return [one for one in found if one[1] < one[2]]


def _not_trained(models: list[Any], trained: Any) -> dict[str, tuple[Tensor, torch.Tensor]]:
    """Frozen parameters and buffers, each with its values, 1-D."""
    model, found = models[0], dict[str, tuple[Tensor, torch.Tensor]]()
    for name, values in model["module"].items():
        shape, frozen = values.shape, model["frozen_param_shapes"] or {}
        if name in trained or name in model["shared_params"]:
            continue
        if name in frozen and values.shape != frozen[name]:  # Cut over ranks.
            shape = frozen[name]
            values = torch.cat([one["frozen_param_fragments"][name] for one in models])
        values = values.reshape(-1)[: shape.numel()]
        found[name] = Tensor(name, name_of(values.dtype), tuple(shape)), values
    return found


def _of_users(model: Any, notices: list[str]) -> dict[str, Any]:
    found = {}
    for name in (key for key in model if not _THEIRS.fullmatch(key)):
        try:
            found[name] = encoded(model[name], name)
        except TypeError as error:
            notices.append(f"left out: {error}")
    return found


def _optimizer(base: Any, shapes: list[Any], slots: list[str]) -> dict[str, Any]:
    """What a run has of the optimizer."""
    groups, states = [], {}
    for group in base["param_groups"]:
        if not group.get("bias_correction", True):
            raise ValueError("an Adam that corrects no bias, which is not offered")
        options = {k: v for k, v in group.items() if k not in ("params", "step")}
        names = [name for at in group["params"] for name in shapes[at]]
        groups.append({"parameters": names, "options": encoded(options, "options")})
        for at in group["params"]:
            steps = int(base["state"][at].get("step", group.get("step", 0)))
            states.update({name: {"steps": steps, "slots": slots} for name in shapes[at]})
    return {"rule": rule_of(slots), "groups": groups, "states": states}
