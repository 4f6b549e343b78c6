"""Small models of Hugging Face's transformers with random weights, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 50
ROWS, TOKENS = 2, 12

Batch = dict[str, torch.Tensor]


def build(
    name: str, *, attention: str = "eager", embeddings: str = "untied", dropout: float = 0.1
) -> nn.Module:
    """A model of two to three layers in float32, in training mode, by its name in `MODELS`."""
    import transformers

    config_class, auto_class, sizes, _ = MODELS[name]
    settings = {key: dropout if value == "dropout" else value for key, value in sizes.items()}
    config = getattr(transformers, config_class)(**settings)
    if name in TIES:
        config.tie_word_embeddings = embeddings == "tied"
    auto = getattr(transformers, auto_class)
    model: nn.Module = auto.from_config(config, attn_implementation=attention)
    return model.train()


def batch_for(name: str, generator: torch.Generator) -> Batch:
    """Inputs and labels for one forward of a model."""
    return MODELS[name][3](generator)


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)


def _causal(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _masked(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    padding = torch.ones_like(tokens)
    padding[0, -3:] = 0
    hidden = torch.rand(tokens.shape, generator=generator) < 0.3
    hidden[:, 0] = True
    return {
        "input_ids": tokens.masked_fill(hidden, 1),
        "attention_mask": padding,
        "labels": tokens.masked_fill(~hidden, -100),
    }


def _translated(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)[:, :7].contiguous()}


def _images(generator: torch.Generator) -> Batch:
    pixels = torch.rand(ROWS, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (ROWS,), generator=generator)}


def _speech(generator: torch.Generator) -> Batch:
    sound = torch.rand(ROWS, 8, 24, generator=generator)
    return {"input_features": sound, "labels": _tokens(generator)[:, :7].contiguous()}


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "attention_dropout": "dropout",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 1, "output_router_logits": True}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "dropout",
}
_SPEECH = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 12,
    "max_target_positions": 16,
    "dropout": "dropout",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_TRANSLATOR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": "dropout",
    "decoder_start_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "resid_pdrop": "dropout",
    "embd_pdrop": "dropout",
    "attn_pdrop": "dropout",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VIT = {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5}
_BERT = {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 32}

_LM, _SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"

MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[torch.Generator], Batch]]] = {
    "Llama": ("LlamaConfig", _LM, _DECODER, _causal),
    "Qwen3": ("Qwen3Config", _LM, _DECODER, _causal),
    "GPT-2": ("GPT2Config", _LM, _GPT2, _causal),
    "Mistral": ("MistralConfig", _LM, {**_DECODER, "sliding_window": 6}, _causal),
    "Gemma": ("GemmaConfig", _LM, _DECODER, _causal),
    "Gemma 2": ("Gemma2Config", _LM, {**_DECODER, "sliding_window": 6}, _causal),
    "Mixtral": ("MixtralConfig", _LM, {**_DECODER, **_EXPERTS, "num_local_experts": 4}, _causal),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        _LM,
        {**_DECODER, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
        _causal,
    ),
    "T5": ("T5Config", _SEQ2SEQ, _TRANSLATOR, _translated),
    "BERT": ("BertConfig", "AutoModelForMaskedLM", _BERT, _masked),
    "ViT": ("ViTConfig", "AutoModelForImageClassification", _VIT, _images),
    "Whisper": ("WhisperConfig", "AutoModelForSpeechSeq2Seq", _SPEECH, _speech),
}
"""By name: class of the config, class of the model, what the config is given, the batch."""

TIES = frozenset(MODELS) - {"ViT"}
"""Models whose input and output embeddings may be tied."""

FUSES = frozenset(MODELS) - {"Gemma 2"}
"""Models that take torch's own fused attention (sdpa)."""


def with_lora(model: nn.Module) -> nn.Module:
    """The model, all of it frozen, with trained low-rank adapters on its linear layers (PEFT)."""
    import peft

    fused = any(p.dim() == 3 and p.shape[0] > 1 for p in model.parameters())
    # Of experts fused in one parameter, attention is what adapters are put on.
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"] if fused else "all-linear"
    wanted: Any = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=modules)
    inputs: Any = getattr(model, "enable_input_require_grads", None)
    if inputs is not None:
        inputs()  # A reentrant checkpoint gives gradients only where its inputs ask for them.
    return peft.get_peft_model(model, wanted).train()  # type: ignore[arg-type, no-any-return]
