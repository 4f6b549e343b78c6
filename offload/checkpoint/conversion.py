"""Checkpoints of one kind written as another, part by part.

The fp32 master of a trained parameter is kept to the bit: as the weight of a save in float32, or as
weight and residue of one in bfloat16. Moments are float32. What a kind cannot hold is told.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import repeat
from typing import Any

import torch

import aio
from cpu_adam.reference import join, split
from offload.checkpoint.commit_reader import COMMIT
from offload.checkpoint.deepspeed_shards import (
    PART_ELEMENTS,
    Source,
    is_deepspeed,
    open_deepspeed,
)
from offload.checkpoint.directory import (
    FORMAT,
    RUN,
    check_fields,
    read_run,
    whole_directory,
    write_run,
)
from offload.checkpoint.shards import SCALE, SHARD_BYTES, WEIGHTS, SetReader, SetWriter

RESIDUE = "residue"


def convert(source: str, target: str, kind: str = "save", dtype: str | None = None) -> list[str]:
    """Write a checkpoint as another one, which is there whole or not at all.

    Args:
        source: a directory of `offload.save`, a folder of Hugging Face (safetensors), or of
            DeepSpeed (ZeRO 1 to 3).
        target: a new directory; as a save also that of an earlier one, which it replaces.
        kind: `save`, or `huggingface`: weights alone.
        dtype: of the parameters, `bfloat16` or `float32`; None: as they are, those of DeepSpeed as
            they were trained.

    Returns:
        What was left out, a sentence each.

    Raises:
        OSError: something cannot be read or written; `target` has files, or is `source`.
        ValueError: `source` is of no kind that is known, or not whole.
    """
    alone, same = kind != "save", os.path.exists(target) and os.path.samefile(source, target)
    if (same or alone) and os.path.isdir(target) and os.listdir(target):
        told = "asked to convert to it; found files; try a new name"
        raise FileExistsError(errno.EEXIST, told, target)
    with ExitStack() as opened:
        backend = opened.enter_context(closing(aio.open_backend()))
        found = _open(source, backend, opened)
        made = _cast(found, dtype or found.dtype, alone)
        new = opened.enter_context(whole_directory(target))
        for prefix, tensors in made.sets.items():
            with SetWriter(new, prefix, tensors, backend, SHARD_BYTES) as writer:
                for name in tensors:
                    for part in filter(torch.Tensor.numel, made.parts(prefix, name)):
                        writer.write(name, part.contiguous().view(torch.uint8).numpy())
                writer.finish()
        if not alone:
            write_run(new, made.run)
    if alone and "optimizer" in found.run:
        found.notices.append("left out: the optimizer's states, as such a folder has weights alone")
    return found.notices


def _open(where: str, backend: aio.Backend, opened: ExitStack) -> Source:
    names = set(os.listdir(where))
    if names & {RUN, "model.safetensors", "model.safetensors.index.json"}:
        return _open_sets(where, RUN in names, backend, opened)
    if is_deepspeed(where):
        return open_deepspeed(where)
    if COMMIT in names:
        raise ValueError(
            f"{where}: asked to convert it; found a durable run; try attach(..., "
            "Config(durable=...)), which goes on from it, and offload.save"
        )
    raise ValueError(
        f"{where}: asked to convert it; found no {RUN}, no model.safetensors and no "
        "mp_rank_00_model_states.pt: likely another directory, or weights pickled in a .bin file"
    )


def _open_sets(where: str, whole: bool, backend: aio.Backend, opened: ExitStack) -> Source:
    """A save, or a folder of Hugging Face."""
    run = read_run(where) if whole else {"format": FORMAT, "step": 0, "user": None}
    states = _states(run)
    readers = {}
    for prefix in dict.fromkeys([WEIGHTS, *(s for one in states.values() for s in one["slots"])]):
        readers[prefix] = opened.enter_context(closing(SetReader(where, prefix, backend)))

    def parts(prefix: str, name: str) -> Iterator[torch.Tensor]:
        one, at = readers[prefix].places[name].tensor, 0
        while at < one.bytes:
            dtype = getattr(torch, one.dtype)
            values = torch.empty(
                min(PART_ELEMENTS, (one.bytes - at) // dtype.itemsize), dtype=dtype
            )
            readers[prefix].read(name, at, values.view(torch.uint8).numpy())
            at += values.nbytes
            yield values

    sets = {k: {name: at.tensor for name, at in v.places.items()} for k, v in readers.items()}
    return Source(sets, parts, run, states or sets[WEIGHTS])


def _states(run: dict[str, Any]) -> dict[str, Any]:
    return run.get("optimizer", {"states": {}})["states"]  # type: ignore[no-any-return]


def _cast(found: Source, dtype: str | None, alone: bool) -> Source:
    """The sets of a save of `found`, with parameters of `dtype` and the residues that this takes.

    Raises:
        ValueError: a state is of no parameter, or of one in a dtype that is not trained.
    """
    states = {} if alone else _states(found.run)
    made = Source(
        {WEIGHTS: {}}, lambda prefix, name: _parts(found, made, prefix, name), found.run, ()
    )
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


def _parts(found: Source, made: Source, prefix: str, name: str) -> Iterator[torch.Tensor]:
    """The values of a set of `made`, part by part."""
    if prefix not in (WEIGHTS, RESIDUE):
        yield from (part.float() for part in found.parts(prefix, name))
        return
    dtype = getattr(torch, made.sets[WEIGHTS][name].dtype)
    same = found.sets[WEIGHTS][name].dtype == made.sets[WEIGHTS][name].dtype
    there = name in found.sets.get(RESIDUE, {}) and (prefix == RESIDUE or not same)
    residues = found.parts(RESIDUE, name) if there else repeat(None)
    for weight, residue in zip(found.parts(WEIGHTS, name), residues):
        given = weight, torch.zeros_like(weight, dtype=torch.int16) if residue is None else residue
        if not same:
            master = weight.float() if residue is None else join(weight, residue)
            given = master.to(dtype), given[1]
            if dtype is torch.bfloat16:
                split(master, *given)
        yield given[prefix == RESIDUE]
