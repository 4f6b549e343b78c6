"""Checkpoints of one kind written as another, part by part.

The fp32 master of a trained parameter is kept to the bit: as the weight of a save in float32, or as
weight and residue of one in bfloat16. Moments are float32. What a kind cannot hold is told.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

import aio
from cpu_adam.reference import join, split
from offload.checkpoint.commit_reader import COMMIT, RANK, CommitReader, read_commit
from offload.checkpoint.commits import last_of_all, made_in, rank_directories
from offload.checkpoint.deepspeed_shards import Checkpoint, is_deepspeed, open_deepspeed
from offload.checkpoint.directory import (
    FORMAT,
    RUN,
    check_fields,
    read_run,
    whole_directory,
    write_run,
)
from offload.checkpoint.saving import states_of, write_sets
from offload.checkpoint.shards import PART_ELEMENTS, SCALE, SHARD_BYTES, WEIGHTS, SetsReader

RESIDUE = "residue"
_NOT_TORCHS = {
    "random": "left out: the random numbers, for which torch has no place",
    RESIDUE: "the fp32 master of a weight in bfloat16 is that and the state `residue`, which torch "
    "does not ask for; --dtype float32 writes the masters as weights",
}
"""What is told where a folder of torch.distributed.checkpoint is written."""


def convert(source: str, target: str, kind: str = "save", dtype: str | None = None) -> list[str]:
    """Write a checkpoint as another one, which is there whole or not at all.

    Args:
        source: a directory of `offload.save`, a durable run, of which the last commit is taken, a
            folder of Hugging Face (safetensors), of torch.distributed.checkpoint, or of DeepSpeed
            (ZeRO 1 to 3).
        target: a new directory; as a save also that of an earlier one, which it replaces.
        kind: `save`; `dcp`, of torch.distributed.checkpoint; or `huggingface`: weights alone.
        dtype: of the parameters, `bfloat16` or `float32`; None: as they are, those of DeepSpeed as
            they were trained.

    Returns:
        What was left out, a sentence each.

    Raises:
        OSError: something cannot be read or written; `target` has files, or is `source`.
        ValueError: `source` is of no kind that is known, or not whole.
    """
    alone, same = kind == "huggingface", os.path.exists(target) and os.path.samefile(source, target)
    if (same or kind != "save") and os.path.isdir(target) and os.listdir(target):
        told = "asked to convert to it; found files; try a new name"
        raise FileExistsError(errno.EEXIST, told, target)
    with ExitStack() as opened:
        backend = opened.enter_context(closing(aio.open_backend()))
        found = _open(source, backend, opened)
        made = _cast(found, dtype or found.dtype, alone)
        new = opened.enter_context(whole_directory(target))
        if kind == "dcp":
            from offload.checkpoint.dcp_folder import write_dcp

            write_dcp(new, made, f"converting to {target}")
            known = {*made.run, *made.sets}
            return found.notices + [told for one, told in _NOT_TORCHS.items() if one in known]
        parts = (
            (prefix, name, made.values(prefix, name, *part))
            for prefix, tensors in made.sets.items()
            for name, one in tensors.items()
            for part in one.parts(PART_ELEMENTS)
        )
        write_sets(new, made.sets, parts, f"converting to {target}", SHARD_BYTES)
        if not alone:
            write_run(new, made.run, made.sets)
    if alone and "optimizer" in found.run:
        found.notices.append("left out: the optimizer's states, as such a folder has weights alone")
    return found.notices


def _open(where: str, backend: aio.Backend, opened: ExitStack) -> Checkpoint:
    names = set(os.listdir(where))
    if names & {RUN, "model.safetensors", "model.safetensors.index.json"}:
        return _open_sets(where, RUN in names, backend, opened)
    if is_deepspeed(where):
        return open_deepspeed(where)
    if ".metadata" in names:
        from offload.checkpoint.dcp_folder import open_dcp

        return open_dcp(where)
    if COMMIT in names or f"{RANK}0" in names:
        return _open_run(where, COMMIT in names, opened)
    raise ValueError(
        f"{where}: asked to convert it; found no {RUN}, no model.safetensors, no .metadata and no "
        "mp_rank_00_model_states.pt: likely another directory, or weights pickled in a .bin file"
    )


def _open_run(where: str, alone: bool, opened: ExitStack) -> Checkpoint:
    """The last commit of a durable run, or of one over ranks the last that all of them have."""
    if alone:
        parts = [(where, *read_commit(where))]
    else:
        made = {rank: made_in(path) for rank, path in rank_directories(where).items()}
        if (last := last_of_all(made, where)) is None:
            raise ValueError(f"{where}: asked to convert it; found no commit of all ranks")
        parts = [made[rank][last] for rank in range(last.ranks)]
    reader = opened.enter_context(closing(CommitReader(parts, where)))
    run, sets = {"format": FORMAT, **reader.commit["run"]}, {WEIGHTS: reader.tensors}
    run.pop("part", None)
    states = states_of(run)
    for name, state in states.items():
        for slot, dtype in state["slots"].items():
            sets.setdefault(slot, {})[name] = reader.tensors[name]._replace(dtype=dtype)
    return Checkpoint(sets, reader.values, run, states or sets[WEIGHTS])


def _open_sets(where: str, whole: bool, backend: aio.Backend, opened: ExitStack) -> Checkpoint:
    """A save, or a folder of Hugging Face."""
    run = read_run(where) if whole else {"format": FORMAT, "step": 0, "user": None}
    states = states_of(run)
    prefixes = dict.fromkeys([WEIGHTS, *(s for one in states.values() for s in one["slots"])])
    reader = opened.enter_context(closing(SetsReader(where, prefixes, backend)))
    sets = reader.tensors
    indices = (one for one in os.listdir(where) if one.endswith(".index.json"))
    others = sorted({one.partition(".")[0] for one in indices} - sets.keys())
    told = [f"left out: {one}, as found no {RUN} that tells of it" for one in others]
    return Checkpoint(sets, reader.values, run, states or sets[WEIGHTS], notices=told)


def _cast(found: Checkpoint, dtype: str | None, alone: bool) -> Checkpoint:
    """A save of `found`, with parameters of `dtype` and the residues that this takes."""
    run = {key: value for key, value in found.run.items() if key != "optimizer" or not alone}
    states, made = states_of(run), Checkpoint({WEIGHTS: {}}, found.values, run, ())
    made.values = partial(_values, found, made)
    for name, one in found.sets[WEIGHTS].items():
        if dtype and name in found.castable and getattr(torch, one.dtype).is_floating_point:
            one = one._replace(dtype=dtype)
        made.sets[WEIGHTS][name] = one
    told: dict[str, Any] = {}
    for name, state in states.items():
        of = made.sets[WEIGHTS][name].dtype if name in made.sets[WEIGHTS] else "missing"
        if of not in ("bfloat16", "float32"):
            raise ValueError(
                f"asked to keep the state of {name}; found that {name} is {of}; likely it was "
                "trained in another dtype than is offered; try --dtype bfloat16, or float32"
            )
        slots = dict.fromkeys(
            (s for s in state["slots"] if s != RESIDUE and not s.endswith(SCALE)), "float32"
        )
        slots |= {RESIDUE: "int16"} if of == "bfloat16" else {}
        told[name] = {"steps": state["steps"], "slots": slots}
    for name, one in made.sets[WEIGHTS].items() if told else ():
        for slot, of in told.get(name, {"slots": {}})["slots"].items():
            made.sets.setdefault(slot, {})[name] = one._replace(dtype=of)
    if told:
        made.run = {**found.run, "optimizer": {**found.run["optimizer"], "states": told}}
    check_fields(made.run, "what was read")
    return made


def _values(
    found: Checkpoint, made: Checkpoint, prefix: str, name: str, start: int, count: int
) -> torch.Tensor:
    """The values of a set of `made`, which come of those of `found`."""
    if prefix not in (WEIGHTS, RESIDUE):
        return found.values(prefix, name, start, count).float()
    dtype = getattr(torch, made.sets[WEIGHTS][name].dtype)
    same = found.sets[WEIGHTS][name].dtype == made.sets[WEIGHTS][name].dtype
    if same and prefix == WEIGHTS:
        return found.values(WEIGHTS, name, start, count)
    residue = torch.zeros(count, dtype=torch.int16)
    there = name in found.sets.get(RESIDUE, {})
    if there:
        residue = found.values(RESIDUE, name, start, count)
    if same:
        return residue
    weight = found.values(WEIGHTS, name, start, count)
    master = join(weight, residue) if there else weight.float()
    weight = master.to(dtype)
    if dtype is torch.bfloat16:
        split(master, weight, residue)
    return weight if prefix == WEIGHTS else residue
