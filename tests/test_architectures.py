"""Every text model of Hugging Face that runs when made small has the bits of plain torch."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from cpu_adam import CPUAdam
from tests.training import config_of, same_bits

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
SLICES, RUN_MIN = 8, 20
"""The classes are taken in so many tests; of each so many run at least."""

PLACEMENTS = [("nvme", "cpu", "cpu"), ("cpu", "device", "nvme"), ("nvme", "nvme", "nvme")]
LAYERS, ELEMENTS_MAX = 4, 3_000_000

SIZES = {
    r"token_ids?$|token_index$": 100,
    r"vocab_size$": 128,
    r"first_k_dense_replace$|n_group$|topk_group$": 1,
    r"nextn_predict_layers$|kv_shared_layers$": 0,
    r"(^|_)(layers|n_layers?|depth)$": LAYERS,
    r"experts$": 4,
    r"per_tok$|top_?k$": 2,
    r"(key_value|kv)_heads?$": 2,
    r"heads?$": 4,
    r"head_dim$|rotary_dim$|d_kv$|channels$|lora_rank$": 16,
    r"(intermediate|hidden|embedding|ffn|embed|model|ff|inner|n_embd|dim)(_size|_dim)?$": 64,
    r"position|target_positions$|n_ctx$": 128,
    r"(window|chunk)(_size)?$": 8,
}
"""What a number is at most, by how its name ends: the first that fits."""


def small(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration with small numbers, and layers of each kind."""
    found, layers = {}, given.get("num_hidden_layers")
    for name, value in given.items():
        if isinstance(value, dict):
            value = small(value)
        elif type(value) is int:
            value = min([value, *(n for end, n in SIZES.items() if re.search(end, name))][:2])
        elif isinstance(value, list) and len(value) == layers:
            value = [*dict.fromkeys(value), *value][:LAYERS]
        found[name] = value
    if given.get("num_key_value_heads") == given.get("num_attention_heads", "none"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def trained(make: Any, tokens: torch.Tensor, attach: Any) -> list[torch.Tensor]:
    """Losses, gradients, weights and buffers of two steps."""
    torch.manual_seed(0)
    model = make().train()
    optimizer: Any = CPUAdam(model.parameters(), lr=1e-2)
    if attach is not None:
        model, optimizer = offload.attach(model, optimizer, attach)
    found: list[torch.Tensor] = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [loss.detach(), *gradients]
        optimizer.step()
        optimizer.zero_grad()
    found += [value.clone() for value in (*model.state_dict().values(), *model.buffers())]
    if attach is not None:
        offload.detach(model)
    return found


def made(kind: Any, of: Any, recomputes: bool) -> Any:
    """A small model, whose blocks are recomputed where they can; ValueError where it is large."""
    asked = kind(**small(kind().to_dict()))
    if asked.is_encoder_decoder:
        asked.decoder_start_token_id = 0
    with torch.device("meta"):
        if sum(p.numel() for p in of(asked).parameters()) > ELEMENTS_MAX:
            raise ValueError
    model = of(asked)
    if recomputes and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("at", range(SLICES))
def test_every_text_model_has_the_bits_of_plain_torch(at: int, tmp_path: Path) -> None:
    auto: Any = pytest.importorskip("transformers.models.auto.modeling_auto")
    maps = [getattr(auto, f"MODEL_FOR_{name}_MAPPING") for name in NAMES]
    every = {of: kind for one in maps for kind, of in one.items()}
    tokens = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    wrong, ran = list[str](), 0
    for number, (of, kind) in enumerate([*every.items()][at::SLICES]):
        make = partial(made, kind, of, number % 2 == 1)
        try:
            plain = trained(make, tokens, None)
        except Exception:  # Whatever its library says of such a configuration.
            continue
        places, ran = PLACEMENTS[number % len(PLACEMENTS)], ran + 1
        ours = trained(make, tokens, config_of(places, tmp_path))
        if not all(map(same_bits, plain, ours)) or len(plain) != len(ours):
            wrong.append(of.__name__)
    assert not wrong
    assert ran >= RUN_MIN
