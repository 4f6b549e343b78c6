"""Runs of trainers that are killed, resumed and exported, beside those that never were."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.killing import BUDGETS, SIZE, STEPS, TRAINERS
from tests.training import needs, same_bits

pytestmark = [
    pytest.mark.slow,
    needs("transformers", "lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LAST = {"hugging_face": "checkpoint-6", "lightning": "checkpoint-step=6.ckpt"}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12)).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_that_was_killed_goes_on_and_its_export_has_its_logits(
    name: str, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(2)
    base, out, whole = tmp_path / "base", tmp_path / "killed", tmp_path / "whole"
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))
    budgets = sum(int(one[:-3]) << 20 for one in BUDGETS.values())
    assert sum(one.nbytes for one in plain.parameters()) > budgets
    plain.save_pretrained(base)
    out.mkdir()
    whole.mkdir()
    command = [sys.executable, "-m", "tests.killing", name, str(base), str(out)]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:].decode()
    checkpoints = sorted(one.name for one in (out / "checkpoints").iterdir())
    assert checkpoints[-1] == LAST[name]
    assert not (out / "checkpoints" / checkpoints[-1].replace("6", "9")).exists()
    model = TRAINERS[name](base, out, -1, str(out / "checkpoints" / checkpoints[-1]))
    never = TRAINERS[name](base, whole, -1, None)
    found, expected = logits(model), logits(never)
    assert same_bits(found, expected)
    assert offload.engine_of(never).steps == STEPS
    model.save_pretrained(tmp_path / "export")
    for one in (model, never):
        offload.engine_of(one).close()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same_bits(logits(exported), expected)
