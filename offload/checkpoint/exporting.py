"""An attached model as a folder of Hugging Face, written through a window."""

from __future__ import annotations

import errno
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from aio.errors import naming
from offload.checkpoint.directory import RUN, whole_directory
from offload.checkpoint.rank_parts import Parts, write_together
from offload.checkpoint.saving import (
    buffer_dicts,
    buffers_in,
    parts_of,
    sets_of,
    write_sets,
)
from offload.checkpoint.shards import SHARD_BYTES, WEIGHTS, Sets
from offload.model.engine import Engine, engine_of
from offload.model.passes import refuse_inside
from offload.planning.tiers import parse_bytes
from offload.runtime.entry import entry, interruptible

STAGED = ".offload-export"
"""In a folder that has other files, where the new ones are until they are whole."""


@entry
def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    shard_bytes: int | str = SHARD_BYTES,
    **options: Any,
) -> None:
    """Write what `from_pretrained` of transformers reads: configs, and weights as safetensors with
    an index, through a window of some hundred MiB, whole or not at all.

    While a model is attached, its `save_pretrained(folder)` is this function. Of one with adapters
    of PEFT these alone are read and written. Into a folder that has files the new ones are moved
    when all are written: a kill or a failing drive in that moment leaves it without weights, never
    with a mixture. Over several ranks all of them call it, and the first one writes.

    Args:
        model: attached, of transformers or PEFT.
        folder: made where it is not there.
        shard_bytes: most bytes of one file, also as a text: "5GB".
        options: of PEFT's `save_pretrained`, for adapters: `selected_adapters`...

    Raises:
        ValueError: the model is not attached.
        TypeError: it is none of Hugging Face, or there are options of what is not written.
        FileExistsError: the folder has a save, whose weights it would replace.
        OSError: a file could not be written; but for what is said above all is as it was.
    """
    refuse_inside("offload.export()")
    engine, where, most = engine_of(model), os.path.expanduser(folder), parse_bytes(shard_bytes)
    engine.require_whole("offload.export")
    if (write_rest := writer_of(model)) is None:
        raise TypeError(
            f"asked to export a {type(model).__name__}; found no save_pretrained of transformers "
            "or PEFT in its class; try offload.save, state_dict(), or what its class has"
        )
    adapters = hasattr(model, "peft_config")
    if options and not adapters:
        raise TypeError(f"export: {', '.join(options)} is of adapters, and the model has none")
    with engine.lock, ExitStack() as opened:
        engine.come_to_rest(f"an export to {where}")
        values = _adapters(engine, model, options) if adapters else {}
        opened.enter_context(interruptible())

        def write(parts: Parts) -> None:
            taken = os.path.isdir(where) and bool(os.listdir(where))
            if taken and os.path.exists(os.path.join(where, RUN)):
                told = "asked to export there; found a save, whose weights it would replace"
                raise FileExistsError(errno.EEXIST, f"{told}; try another folder", where)
            if taken:
                shutil.rmtree(os.path.join(where, STAGED), ignore_errors=True)
            with whole_directory(os.path.join(where, STAGED) if taken else where) as new:
                with naming("write of configs or adapters", new):
                    write_rest(model, new, state_dict=values, **options)
                if not adapters:
                    _write(model, new, sets, parts, f"exporting to {where}", most)
            if taken:
                _move(os.path.join(where, STAGED), where)

        sets = {WEIGHTS: {}} if adapters else sets_of(engine, model, {})
        write_together(engine, parts_of(engine, model, None, sets), sets, write)


def writer_of(model: nn.Module) -> Any:
    """The `save_pretrained` of transformers or PEFT that a model has. Others write other files."""
    has = (one for one in type(model).__mro__ if "save_pretrained" in vars(one))
    owner = next(has, None)
    known = owner is not None and owner.__module__.partition(".")[0] in ("transformers", "peft")
    return vars(owner)["save_pretrained"] if known else None


def _write(
    model: nn.Module, new: str, sets: Sets, all_: Parts, told: str, shard_bytes: int
) -> None:
    """Write the weights, under the names that the files of the model's kind have."""
    names = _names(model)
    tensors = {
        names[name]: one._replace(name=names[name])
        for name, one in sets[WEIGHTS].items()
        if name in names
    }

    def parts() -> Parts:
        for prefix, name, part in all_:
            if name in names:
                yield prefix, names[name], part

    empty = os.path.join(new, f"{WEIGHTS}.safetensors")
    if os.path.exists(empty):
        os.remove(empty)  # Of the weights that transformers was given: none.
    write_sets(new, {WEIGHTS: tensors}, parts(), told, shard_bytes)


def _names(model: Any) -> dict[str, str]:
    """By the name that a tensor has with us, the one in the files: of those that are tied the one
    that transformers keeps, and as its mapping of this model has it, if that only renames."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    tied, ignored = model.all_tied_weights_keys, set(model._keys_to_ignore_on_save or ())
    aliases: dict[int, list[str]] = {}
    for name, one in _tensors(model):
        aliases.setdefault(id(one), []).append(name)
    chosen = {
        each[0]: next((name for name in each if name not in tied), each[0])
        for each in aliases.values()
    }
    alike = {name: torch.empty(0, device="meta") for name in chosen.values() if name not in ignored}
    used = vars(model).get("_weight_conversions")
    used = get_model_conversion_mapping(model, add_legacy=False) if used is None else used
    if any(isinstance(one, WeightConverter) for one in used):  # transformers reads these, too.
        return {ours: name for ours, name in chosen.items() if name in alike}
    renamed = {id(one): name for name, one in revert_weight_conversion(model, alike).items()}
    return {ours: renamed[id(alike[name])] for ours, name in chosen.items() if name in alike}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a state dict of the model has, each under all of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from buffers_in(buffer_dicts(model), once=False)


def _adapters(
    engine: Engine, model: nn.Module, options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """A state dict with the values of adapters, and without those of all else."""
    from peft import get_peft_model_state_dict

    tensors = dict(_tensors(model))
    found = {name: torch.empty(one.shape, device="meta") for name, one in tensors.items()}
    asked = {k: v for k, v in options.items() if k == "save_embedding_layers"}
    wanted: set[int] = set()
    config: Any = model.peft_config
    for adapter in options.get("selected_adapters") or config:
        kept = get_peft_model_state_dict(model, dict(found), adapter_name=adapter, **asked)
        wanted |= set(map(id, kept.values()))
    for name, one in tensors.items():
        if id(found[name]) in wanted:
            at = engine.places.get(one) if isinstance(one, nn.Parameter) else None
            found[name] = (one.detach() if at is None else engine.values_of(*at)).cpu()
    return found


def _move(new: str, folder: str) -> None:
    """Put new files where those of their names are: old weights go first, the index comes last."""
    index = f"{WEIGHTS}.safetensors.index.json"
    files = sorted(os.listdir(new), key=lambda name: name.endswith(".index.json"))
    for old in os.listdir(folder) if index in files else ():
        if re.fullmatch(rf"{WEIGHTS}(-\d+-of-\d+)?\.safetensors(\.index\.json)?", old):
            os.remove(os.path.join(folder, old))
    for name in files:
        at = os.path.join(folder, name)
        if os.path.isdir(at):
            shutil.rmtree(at)  # Of an adapter that has a name.
        os.replace(os.path.join(new, name), at)
    os.rmdir(new)


_OF_ONE_RANK = ("is_main_process", "save_function", "state_dict")
"""What recipes give to let one rank write, which has all values."""


class SavePretrained:
    """`save_pretrained` of an attached model. Copies and pickles of it are the class's own."""

    def __init__(self, model: nn.Module):
        self._model = weakref.ref(model)

    def __reduce__(self) -> Any:
        return getattr, (self._model(), "save_pretrained")

    def __call__(self, save_directory: Any, **options: Any) -> Any:
        """`offload.export`. What that does not offer is done by the class's own, in memory."""
        default = {"state_dict": None, "is_main_process": True, "safe_serialization": True}
        model: Any = self._model()
        ranks = engine_of(model).ranks is not None
        if ranks:  # All of them call it: which one writes is known, and where values are.
            options = {k: v for k, v in options.items() if k not in _OF_ONE_RANK}
        asked = {k: v for k, v in options.items() if k not in default or v != default[k]}
        if "max_shard_size" in asked:
            asked["shard_bytes"] = asked.pop("max_shard_size")
        if asked.keys() <= {"shard_bytes", "selected_adapters", "save_embedding_layers"}:
            return export(model, save_directory, **asked)
        if ranks:
            raise TypeError(
                f"save_pretrained of a model that is cut over ranks: {', '.join(asked)} is not "
                "offered: call offload.export(model, folder) on all ranks, and push or convert the "
                "folder on one"
            )
        return type(model).save_pretrained(model, save_directory, **options)
