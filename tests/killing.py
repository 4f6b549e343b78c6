"""A run of a trainer on a model from a folder, which may kill itself: `python -m tests.killing`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import offload

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEPS, EVERY, KILLED_AT = 10, 3, 8
BUDGETS: Any = {"device_memory": "3MiB", "cpu_memory": "20MiB"}
SIZE: Any = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
}
"""More weights than both budgets together, in fp32."""


def rows() -> list[torch.Tensor]:
    return list(torch.randint(96, (40, 12), generator=torch.Generator().manual_seed(4)))


def attached(base: Path, drive: Path) -> Any:
    from transformers import AutoModelForCausalLM

    placed = offload.Config(
        params="nvme", gradients="nvme", optimizer="nvme", nvme_path=str(drive), **BUDGETS
    )
    return offload.from_pretrained(
        *(AutoModelForCausalLM, base, placed),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def kill_at(step: int, now: int) -> None:
    if step == now:
        os.kill(os.getpid(), signal.SIGKILL)


def hugging_face(base: Path, out: Path, killed_at: int, resume: str | None) -> Any:
    """Train by the Trainer of Hugging Face; the attached model."""
    import transformers

    class Kill(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
            kill_at(killed_at, state.global_step)

    model, optimizer = attached(base, out)
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=EVERY,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows()]
    options: Any = {"train_dataset": data, "callbacks": [Kill()], "optimizers": (optimizer, None)}
    transformers.Trainer(model, arguments, **options).train(resume_from_checkpoint=resume)
    return model


def lightning(base: Path, out: Path, killed_at: int, resume: str | None) -> Any:
    """Train by Lightning's Trainer; the attached model."""
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = attached(base, out)

        def configure_optimizers(self) -> Any:
            return self.optimizer

        def training_step(self, _: torch.Tensor, __: int) -> torch.Tensor:
            # By the step: Lightning begins an epoch anew, as its loaders do not say where they are.
            batch = torch.stack(rows()[self.global_step * 2 :][:2])
            return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

        def on_train_batch_end(self, *_: Any) -> None:
            kill_at(killed_at, self.global_step)

    saving = pl.pytorch.callbacks.ModelCheckpoint(
        out / "checkpoints", "checkpoint-{step}", every_n_train_steps=EVERY, save_top_k=-1
    )
    trainer = pl.Trainer(
        max_steps=STEPS,
        callbacks=[saving],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(rows(), 2)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    return module.model


TRAINERS = {"hugging_face": hugging_face, "lightning": lightning}

if __name__ == "__main__":
    name, base, out = sys.argv[1:]
    TRAINERS[name](Path(base), Path(out), KILLED_AT, None)
