"""The Hugging Face Trainer on an offloaded model; only the line with `offload.attach` is ours.

It needs `pip install -e 'CLONE[models]'`, and trains a small Llama on Python's own source.
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import offload
from cpu_adam import CPUAdam

STEPS, LENGTH = 30, 128

# Older versions of transformers 5 call it gradient_checkpointing; newer ones warn of that name.
NEWER = hasattr(TrainingArguments, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if NEWER else "gradient_checkpointing"

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def windows(name):
    text = (Path(sysconfig.get_path("stdlib")) / name).read_bytes()
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(LENGTH)[:-1]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train(config, directory, *, steps=STEPS, resume=False):
    """Train with `config`, or without offload where it is None; the Trainer, when it is done."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL)
    # torch.optim.AdamW would do as well; this one has the same bits with and without offload.
    optimizer = CPUAdam(model.parameters(), lr=2e-3, weight_decay=0.1)
    if config is not None:
        model, optimizer = offload.attach(model, optimizer, config)
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to=[],
        **{CHECKPOINTING: True},
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=windows("argparse.py"),
        eval_dataset=windows("bisect.py"),
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    placed = offload.Config(params="cpu", gradients="cpu", optimizer="nvme", nvme_path=".")
    with tempfile.TemporaryDirectory() as directory:
        train(placed, directory)
