"""Tiny models of Hugging Face in folders, made here, for tests of what reads and writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import offload
from tests.small import config

SIZES: Any = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
INPUTS = torch.arange(24).view(2, 12)
MIXED = ("nvme", "cpu", "cpu")


def llama(**options: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    made = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **options})
    return transformers.LlamaForCausalLM(made)


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """The folder in which transformers itself has saved a model."""
    model.save_pretrained(folder, **options)
    return folder


def loaded(kind: Any, folder: Path, drive: Path, placement: Any = MIXED, **options: Any) -> Any:
    """The pair of the engine, with AdamW."""
    placed = config(placement, drive)
    given = {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), **options}
    return offload.from_pretrained(kind, folder, placed, **given)
