"""The models of `offload plan`: a GPT, or one of Hugging Face as far as sizes and work go.

Of such a one a token meets each element of a weight that is no embedding's, of stacked experts
those that it is sent to. Attention and activations are a GPT's of as many layers and that width.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch

from offload.cli.console import warnings_of
from offload.model.units import UnitModules, partition
from offload.planning.transformer import PARTS, Transformer, UnitWork, gpt
from offload.unit_plan import spec_of


def models_of(name: str, parts: Literal["auto", 1, 2, 4], **how: bool) -> list[Transformer]:
    """The model of a name or of a folder, in each way of cutting it that is allowed."""
    if os.path.exists(name):
        if parts not in ("auto", 1):
            raise ValueError(f"--parts {parts}: a folder's model is cut as its modules are")
        return [_pretrained(name, **how)]
    allowed = PARTS if parts == "auto" else (parts,)
    return [gpt(name, parts=one, **how) for one in allowed]


def _pretrained(path: str, recompute: bool, trains: bool = True) -> Transformer:
    """The model of a folder with a config.json, as `attach` would cut it, all of it in bfloat16.
    Raises ValueError where there is none."""
    file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
    if file.name != "config.json" or not file.exists():
        raise ValueError(f"--model {path}: found no config.json of Hugging Face there")
    try:
        import transformers
    except ImportError:
        raise ValueError(f"--model {path}: it takes pip install 'transformers>=5.14'") from None
    config: Any = transformers.AutoConfig.from_pretrained(file.parent)
    kind = getattr(transformers, next(iter(config.architectures or ["none"])), None)
    if kind is None:
        raise ValueError(f"--model {path}: names no architecture that transformers has")
    with torch.device("meta"):
        model, _ = warnings_of(lambda: kind(config).to(torch.bfloat16))
    text = config.get_text_config()

    def first(*names: str) -> int:
        return next((found for one in names if (found := getattr(text, one, None))), 0)

    layers, groups = first("num_hidden_layers", "num_layers"), partition(model)
    experts = first("num_local_experts", "num_experts", "n_routed_experts")
    chosen = first("num_experts_per_tok") / experts if experts else 1.0
    blocks = sum(bool(group.listed) for group in groups)

    def work(group: UnitModules) -> UnitWork:
        laid = spec_of(group, "param", trains=trains).parameters
        used = sum(one.elements * (chosen if ".experts." in one.name else 1) for one in laid)
        block, met = bool(group.listed), used * group.backward
        return UnitWork(group.name, laid, met, block and layers / blocks, block, group.backward)

    hidden, vocabulary = first("hidden_size", "d_model"), first("vocab_size")
    return Transformer(layers, hidden, vocabulary, [*map(work, groups)], recompute)
