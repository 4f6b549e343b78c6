"""What loops do with models of Hugging Face: the bits of the same without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from tests.small import adamw, config
from tests.training import alone, same_bits

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PLACEMENTS = [("nvme", "cpu", "nvme"), ("cpu", "device", "cpu"), ("device", "nvme", "device")]


def hugging_face() -> Any:
    """Its transformers: imported here, as each process of the fast tier collects this file."""
    return pytest.importorskip("transformers")


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    transformers = hugging_face()
    made = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(made).to(torch.bfloat16)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: Any, seed: int) -> float:
    loss = model(tokens(seed), labels=tokens(seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def plain(model: Any, optimizer: Any, directory: Path) -> list[Any]:
    return [step(model, optimizer, seed) for seed in range(5)]


def generated(model: Any, optimizer: Any, directory: Path) -> list[Any]:
    """Sampled, searched and greedy in the middle of training, also between forward and backward."""
    found: list[Any] = []
    ways: list[dict[str, Any]] = [
        {"do_sample": True},
        {"num_beams": 2, "do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "cache_implementation": "static"},
    ]
    torch.manual_seed(5)
    for seed, how in enumerate(ways):
        found.append(step(model, optimizer, seed))
        loss = model(tokens(seed), labels=tokens(seed)).loss
        out = model.generate(tokens(seed)[:, :4], max_new_tokens=5, **how)
        found.append(out.tolist())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def checkpointed(model: Any, optimizer: Any, directory: Path) -> list[Any]:
    found = []
    for seed, reentrant in enumerate((False, True)):
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if reentrant:
            model.enable_input_require_grads()
        found += [step(model, optimizer, seed) for seed in range(3)]
        model.gradient_checkpointing_disable()
    return found


def saved(model: Any, optimizer: Any, directory: Path) -> list[Any]:
    found = []
    for number in range(2):
        found.append(step(model, optimizer, number))
        model.save_pretrained(directory)
        again = hugging_face().LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        safetensors.torch.save_model(model, str(directory / "model.st"))
        other = llama(model.config.tie_word_embeddings)
        safetensors.torch.load_model(other, str(directory / "model.st"))
        for name, value in model.state_dict().items():
            assert same_bits(again.state_dict()[name], value), name
            assert same_bits(other.state_dict()[name], value), name
        found.append(model.num_parameters())
    return found


LOOPS: list[Callable[[Any, Any, Path], list[Any]]] = [plain, generated, checkpointed, saved]


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_bits_of_a_loop(loop: Any, tied: bool, placement: Any, tmp_path: Path) -> None:
    theirs = llama(tied)
    wanted = loop(theirs, alone(adamw(theirs)), tmp_path)
    ours = llama(tied)
    _, optimizer = offload.attach(ours, adamw(ours), config(placement, tmp_path))
    with optimizer.engine:
        assert loop(ours, optimizer, tmp_path) == wanted
        for name, value in theirs.state_dict().items():
            assert same_bits(ours.state_dict()[name], value), name


def test_resized_embeddings_are_refused_and_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = llama()
    _, optimizer = offload.attach(model, adamw(model), config(PLACEMENTS[0], tmp_path))
    with optimizer.engine:
        step(model, optimizer, 0)
        with pytest.raises((RuntimeError, ValueError), match=r"the model was resized.*detach"):
            model.resize_token_embeddings(80)
        assert model.get_input_embeddings().weight.shape == (64, 32)
        step(model, optimizer, 1)
    again = llama()
    offload.attach(again, adamw(again), config(PLACEMENTS[0], tmp_path))
    offload.detach(again)
    again.resize_token_embeddings(80)
    _, optimizer = offload.attach(again, adamw(again), config(PLACEMENTS[0], tmp_path))
    with optimizer.engine:
        step(again, optimizer, 0)
