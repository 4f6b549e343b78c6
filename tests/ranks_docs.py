"""The loop over ranks of the docs, as a job of a `ranks.World`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.ranks import digest, values_of


def loop(rank: int, ranks: int, text: str, folder: str, epochs: int) -> tuple[float, int]:
    """What is left of the loop of `docs/ranks.md`, where there is a group of ranks already."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("LOCAL_RANK", "0")  # They share an accelerator, if there is one.
        patched.setattr(sys, "argv", ["train.py", str(epochs)])
        for name in ("init_process_group", "destroy_process_group"):
            patched.setattr(torch.distributed, name, lambda: None)
        exec(compile(text, "train.py", "exec"), names)
    with names["optimizer"].engine:
        return names["test_loss"], digest(values_of(names["model"], names["optimizer"]))
