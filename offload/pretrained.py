"""Models of Hugging Face from their folders into the tiers, and back, through a window.

[Note: Pretrained models]
transformers itself builds the model on the meta device and maps, checks and reports the names. What
remains is to read: each parameter has a recipe, of one tensor of the files or of a converter and
its operands, and is read when `attach` fills its chunks. What the files lack is made before that,
for real, with the numbers that transformers would draw.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import aio
from offload.attachment import attach, exchange
from offload.checkpoint.directory import RUN
from offload.checkpoint.shards import WEIGHTS, SetsReader, head_of, index_of, joined, read_json
from offload.config import Config, warn_user
from offload.model.checks import check_arguments
from offload.planning.tiers import format_bytes

WINDOW_BYTES = 256 << 20
"""Most memory beside the budgets."""

OURS = """
    device_map max_memory offload_folder state_dict gguf_file quantization_config tp_plan variant
    distributed_config subfolder
"""
"""Options of transformers that say where weights live or come from."""


def from_pretrained(
    kind: Any,
    folder: str | os.PathLike[str],
    config: Config | None = None,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a model of Hugging Face from a folder of safetensors straight into the tiers.

        model, optimizer = offload.from_pretrained(
            AutoModelForCausalLM,
            "folder",
            offload.Config(cpu_memory="16GiB"),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
        )

    Beside the budgets it takes at most 256 MiB. Names, dtypes, ties, first values and the report of
    what is missing, unexpected or mismatched are those of transformers' own `from_pretrained`.
    Checksums are compared where the index has them, as that of `offload.export` does.

    Args:
        kind: the class, or an Auto class: what has `from_pretrained`.
        folder: on this machine, with `config.json` and safetensors, in one file or several.
        config: where things live and how much may be taken; the default finds out.
        optimizer: makes that of the model, whose weights have no values yet; None serves it.
        prepare: what is done to the model before that, such as
            `lambda model: get_peft_model(model, LoraConfig(...))`; it sees weights full of NaN.
        options: what transformers' `from_pretrained` takes besides: `dtype`, `num_labels`...

    Returns:
        The attached model, in training mode where there is an optimizer, else in evaluation mode;
        and the optimizer to step, or None.

    Raises:
        TypeError: an argument is not what it should be, or a function returned None.
        ValueError: the folder has no such model, or what it needs is not offered.
        RuntimeError: shapes in the files are others than the model's, as transformers says.
        BudgetError: the model does not fit the budgets, with a table.
        OSError: a file cannot be read; EIO where a checksum is another.
    """
    _check_arguments(kind, folder, config, optimizer, prepare)
    where = os.path.expanduser(folder)
    _check_folder(where, options)
    with ExitStack() as opened:
        backend = opened.enter_context(closing(aio.open_backend()))
        reader = opened.enter_context(closing(SetsReader(where, [WEIGHTS], backend, links=True)))
        options |= {"device_map": "meta", "output_loading_info": True}
        model, report = kind.from_pretrained(where, **options)
        new = {key for key, *_ in report["mismatched_keys"]}
        source = _Source(reader, model, new, options.get("key_mapping"))
        _tie(model, source)
        _make_the_rest(model, source, new | {*report["missing_keys"]})
        sites = [*_sites(model, source.recipes)]
        model = model if prepare is None else _prepared(model, prepare)
        paths = {module: path for path, module in model.named_modules()}
        for module, at, key in sites:
            source.keys[f"{paths.get(module)}.{at}".lstrip(".")] = key
        made = None if optimizer is None else _returned("optimizer", optimizer(model))
        model.train(made is not None)
        return attach(model, made, config, read=source.values)


def _check_arguments(kind: Any, folder: Any, config: Any, optimizer: Any, prepare: Any) -> None:
    check_arguments(
        "from_pretrained",
        'from_pretrained(AutoModelForCausalLM, "folder", offload.Config(...), '
        "optimizer=lambda model: torch.optim.AdamW(model.parameters()))",
        kind=(kind, hasattr(kind, "from_pretrained")),
        folder=(folder, isinstance(folder, (str, os.PathLike))),
        config=(config, isinstance(config, Config | None)),
        optimizer=(optimizer, not isinstance(optimizer, type) and _may_be_called(optimizer)),
        prepare=(prepare, _may_be_called(prepare)),
    )


def _may_be_called(given: Any) -> bool:
    return given is None or callable(given)


def _returned(name: str, found: Any) -> Any:
    """What a function of the user's has returned."""
    if found is None:
        raise TypeError(f"from_pretrained: {name}= returned None: likely its `return` is missing")
    return found


def _check_folder(where: str, options: Mapping[str, Any]) -> None:
    """Refuse what cannot be streamed, before anything is built."""
    if tuple(map(int, (found := version("transformers")).split(".")[:2])) < (5, 14):
        raise ValueError(
            f"from_pretrained: found transformers {found}, before 5.14: what the files lack would "
            "get other first values; pip install -U transformers, or load by it, and attach"
        )
    if given := [name for name in OURS.split() if options.get(name)]:
        raise ValueError(
            f"from_pretrained: {given[0]} is not offered: the folder itself has the weights, as "
            "safetensors, and offload.Config says where they live"
        )
    found = os.path.join(where, "config.json")
    if not os.path.isfile(found):
        if os.path.exists(os.path.join(where, RUN)):
            raise ValueError(f"{where} is of offload.save: attach a model, and offload.load it")
        there = "config.json" if os.path.isdir(where) else "such folder"
        raise ValueError(
            f"asked to load {where}; found no {there}: likely misspelt, or a name on the hub; try "
            "what huggingface_hub.snapshot_download gives; of an adapter, its base and prepare="
        )
    if not os.path.exists(head_of(where, WEIGHTS)):
        raise ValueError(
            f"asked to load {where}; found neither {WEIGHTS}.safetensors nor {index_of(WEIGHTS)}: "
            "likely the weights were not downloaded, or are pickled in .bin files; try "
            "save_pretrained of transformers"
        )
    if read_json(found).get("quantization_config") is not None:
        raise ValueError(
            f"{found} is of a quantized model, which cannot be streamed: take it in bfloat16"
        )


# -- what the files have ---------------------------------------------------------------------------


@dataclass
class _Recipe:
    """What parameters are made of: one tensor as it is, or by a converter of transformers."""

    key: str
    """The first of the parameters."""
    converter: Any
    operands: list[tuple[str, str]] = field(default_factory=list)
    """Of the files: the name, and the converter's pattern that it matched."""
    parts: int = 1
    """So many equal parts along the first dimension that are made one after the other."""


class _Source:
    """Reads parameters of a model from files, as `attach` asks for them."""

    def __init__(self, reader: SetsReader, model: Any, mismatched: set[str], renamed: Any):
        """Find the recipe of all that the model and the files have, as transformers maps them."""
        from transformers import core_model_loading as core
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._read, self._tensors, self._model = reader.values, reader.tensors[WEIGHTS], model
        state = model.state_dict()
        self.shapes = {key: (one.shape, one.dtype) for key, one in state.items()}
        mapping = get_model_conversion_mapping(model, renamed)
        renamings = [one for one in mapping if isinstance(one, core.WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, core.WeightConverter)]
        by_pattern = {part: one for one in converters for part in one.source_patterns}
        prefix = model.base_model_prefix
        groups: dict[str, _Recipe] = {}
        for name in sorted(self._tensors, key=core.dot_natural_key):
            key, pattern = core.rename_source_key(name, renamings, converters, prefix, state)
            if key not in state and name in state:
                key, pattern = core.rename_source_key(name, [], [], prefix, state)
            if key in state and key not in mismatched:
                one = groups.setdefault(key, _Recipe(key, by_pattern.get(pattern or "")))
                one.operands.append((name, pattern or name))
        self.recipes: dict[str, _Recipe] = {}
        """By the name in the model's state dict."""
        for key, one in groups.items():
            self.recipes |= dict.fromkeys([key] if one.converter is None else self._plan(one), one)
        self.keys: dict[str, str] = {}
        """That name, by the one after `prepare`."""
        self._made: tuple[Any, dict[str, torch.Tensor]] = None, {}
        """What the last converter has made, and of what."""

    def values(self, prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        """See `Values`; in the dtype of the files."""
        one = self.recipes[key := self.keys.get(name, name)]
        if one.converter is None:
            return self._read(prefix, one.operands[0][0], start, count)
        size = self.shapes[key][0].numel() // one.parts
        parts = ((size, partial(self._part, one, key, number)) for number in range(one.parts))
        return joined(parts, start, count)

    def _part(self, recipe: _Recipe, key: str, part: int) -> torch.Tensor:
        """One of the equal parts of what a converter makes."""
        if self._made[0] != (recipe.key, part):
            self._made = None, {}  # First, so that there is never more than one.
            self._made = (recipe.key, part), self._convert(recipe, "cpu", part)
        return self._made[1][key].reshape(-1)

    def _convert(
        self, recipe: _Recipe, device: str = "meta", part: int = 0
    ) -> dict[str, torch.Tensor]:
        """What the converter makes of its operands, or of those of one part of its result."""
        one, dtype = copy.deepcopy(recipe.converter), self.shapes[recipe.key][1]
        operands = recipe.operands
        if recipe.parts > 1:
            operands = [
                [each for each in operands if each[1] == pattern][part]
                for pattern in dict.fromkeys(pattern for _, pattern in operands)
            ]
        for name, pattern in operands:
            tensor = self._tensors[name]
            found = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            if device != "meta":
                found = self._read(WEIGHTS, name, 0, found.numel()).view(tensor.shape)
            one.add_tensor(recipe.key, name, pattern, found.to(dtype))
        made = one.convert(recipe.key, model=self._model, config=self._model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def _plan(self, recipe: _Recipe) -> Iterable[str]:
        """What a converter makes; where it stacks experts, that is done one after the other. It is
        refused where it would take more than the window."""
        operations = recipe.converter.operations
        made = self._convert(recipe)
        first, *others = [(type(one).__name__, getattr(one, "dim", -1)) for one in operations]
        patterns = [pattern for _, pattern in recipe.operands]
        count = next(iter(made.values())).shape[0]
        if (
            first == ("MergeModulelist", 0)
            and all(kind == "Concatenate" and dim > 0 for kind, dim in others)
            and all(patterns.count(one) == count for one in patterns)
        ):
            recipe.parts = count
        operands = sum(self._tensors[name].bytes for name, _ in recipe.operands)
        results = sum(each.nbytes for each in made.values())
        if (taken := (operands + 2 * results) // recipe.parts) > WINDOW_BYTES:
            raise ValueError(
                f"{recipe.key} is converted by {operations} of transformers from "
                f"{recipe.operands[0][0]} and others, which takes {format_bytes(taken)}; at most "
                f"{format_bytes(WINDOW_BYTES)} are taken beside the budgets; try files in the "
                "names of the model: save_pretrained(..., save_original_format=False)"
            )
        return made


# -- what they lack --------------------------------------------------------------------------------


def _sites(model: nn.Module, keys: Mapping[str, Any]) -> Iterator[tuple[nn.Module, str, str]]:
    """Where parameters and buffers are: the module, the name there, and the name of the tensor of
    `keys`, which is another for one that is tied."""
    state, known = model.state_dict(keep_vars=True), dict[int, str]()
    for key in keys:
        known.setdefault(id(state[key]), key)
    for module in model.modules():
        for at, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if id(tensor) in known:
                yield module, at, known[id(tensor)]


def _tie(model: Any, source: _Source) -> None:
    """Tie what the files have twice where both are equal, and say it where they are not, as
    transformers does with weights that have values."""
    for target, origin in list(model.all_tied_weights_keys.items()):
        here, there = model.get_parameter(target), model.get_parameter(origin)
        if here is there or not {target, origin} <= source.recipes.keys():
            continue
        same, total, most = here.shape == there.shape, here.numel(), 4 << 20
        for start in range(0, total, most):  # To the end, for the checksums.
            count = min(most, total - start)
            ours, theirs = (source.values(WEIGHTS, one, start, count) for one in (target, origin))
            same = same and torch.equal(ours.to(here.dtype), theirs.to(here.dtype))
        if same:
            path, _, at = target.rpartition(".")
            setattr(model.get_submodule(path), at, there)
            del source.recipes[target]
        else:
            del model.all_tied_weights_keys[target]
            warn_user(f"{target} is not tied to {origin}: the files have both, with other values")


def _make_the_rest(model: Any, source: _Source, new: set[str]) -> None:
    """Let all buffers, and the parameters that the files lack, be real, with their first values;
    `new` is what transformers says of the latter, which are refused beyond the window."""
    filled = {(module, at): key for module, at, key in _sites(model, source.recipes)}
    lacking = [
        (owner, at, tensor, filled.get((module, at)))
        for module in model.modules()
        for owner in (module._parameters, module._buffers)
        for at, tensor in owner.items()
        if tensor is not None and tensor.is_meta
        if owner is module._buffers or (module, at) not in filled
    ]
    parameters = {one for _, _, one, _ in lacking if isinstance(one, nn.Parameter)}
    names = [name for name, one in model.named_parameters() if one in parameters]
    for name in names:  # Such as one of another file that a class knows of.
        if getattr(model.get_parameter(name), "_is_hf_initialized", False) and name not in new:
            raise ValueError(
                f"transformers has {name} of what is not known here, likely as its release is a "
                "newer one: load the model by it, and attach"
            )
    if (total := sum(one.nbytes for one in parameters)) > WINDOW_BYTES:
        raise ValueError(
            f"the files lack {', '.join(names[:3])} and others, {format_bytes(total)}, and at most "
            f"{format_bytes(WINDOW_BYTES)} are made beside the budgets: likely they are of another "
            "model; try offload.empty_weights() and attach(..., initialize=...)"
        )
    made: dict[torch.Tensor, torch.Tensor] = {}
    for owner, at, tensor, key in lacking:
        if tensor not in made:
            real = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                real = nn.Parameter(real, tensor.requires_grad)
            elif key is not None:
                real.copy_(source.values(WEIGHTS, key, 0, real.numel()).view(real.shape))
                real._is_hf_initialized = True  # type: ignore[attr-defined]
            made[tensor] = real
        owner[at] = made[tensor]
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)  # It was said of what is on meta.
    model.initialize_weights()


def _prepared(model: nn.Module, prepare: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """What `prepare` makes of a model, whose weights are NaN meanwhile: use of them is refused."""
    shown: dict[nn.Parameter, nn.Parameter] = {}
    for one in [one for one in model.parameters() if one.is_meta]:
        nan = torch.full((1,), float("nan"), dtype=one.dtype)
        values = nan.expand(one.shape) if one.dim() else nan[0]
        shown[one] = nn.Parameter(values, one.requires_grad)
    exchange(model, shown)
    model = _returned("prepare", prepare(model))
    again = {
        one: nn.Parameter(one.to("meta"), one.requires_grad)  # Which `prepare` may have changed.
        for one in shown.values()
    }
    for name, one in model.named_parameters():
        if one not in again and (one.is_meta or one.isnan().any()):
            raise ValueError(
                f"prepare made {name} of weights that have no values yet: let it need none "
                "(init_lora_weights=True, no modules_to_save), or load the model by transformers, "
                "prepare and attach"
            )
    exchange(model, again)
    return model
