"""What ranks do with trainers of others in tests: each function runs on every rank of a `World`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

import offload
from tests.ranks import MEMORY, values_of
from tests.small import adamw, small, tokens
from tests.training import loss_of

Found = dict[str, Any]
"""What a rank has seen, and under `values` all that is left of its model and optimizer."""

SIZE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH, MICRO, STEPS = 2, 4, 6
"""Micro-batches are those of a step over all ranks."""


@contextmanager
def launched(rank: int, ranks: int) -> Iterator[None]:
    """The environment that torchrun gives a rank, and no Accelerator of before."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    # Accelerate gives a rank its part of the cores, and sums depend on the threads.
    os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    from accelerate.state import AcceleratorState, GradientState

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def job(function: Any) -> Any:
    """Run a function as if torchrun had started it; its engine is closed at its end."""

    @wraps(function)
    def run(rank: int, ranks: int, *args: Any, **options: Any) -> Any:
        with launched(rank, ranks):
            try:
                return function(rank, ranks, *args, **options)
            finally:
                for engine in list(offload.model.engine.engines):
                    engine.close()

    return run


# -- accelerate ----------------------------------------------------------------------------------


@job
def accelerate_loop(
    rank: int,
    ranks: int,
    *,
    precision: str = "no",
    clips: bool = False,
    save: str = "",
    load: str = "",
) -> Found:
    """Three steps by accelerate, saved after the second, or the third alone after a load."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=MICRO // ranks,
        step_scheduler_with_optimizer=False,  # Else it steps once for each rank.
    )
    model: Any = small()
    if precision != "no":
        model = accelerator.prepare_model(model, evaluation_mode=True)
    norm = None if clips else 0.5
    model, optimizer = offload.attach(
        model, adamw(model), offload.Config(**MEMORY, max_grad_norm=norm)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    numbers: Any = torch.utils.data.DataLoader(torch.arange(3 * MICRO), batch_size=1)
    prepared, wrapped, numbers, scheduler = accelerator.prepare(
        model, optimizer, numbers, scheduler
    )
    assert prepared is model
    assert wrapped.optimizer is optimizer
    if load:
        with offload.gathered(model):
            accelerator.load_state(load)
        numbers = accelerator.skip_first_batches(numbers, 2 * MICRO // ranks)
    losses, norms = [], []
    for number in numbers:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens(int(number)))
            accelerator.backward(loss)
            if accelerator.sync_gradients and clips:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            wrapped.step()
            if accelerator.sync_gradients:
                scheduler.step()
            wrapped.zero_grad()
            losses.append(loss.item())
        if accelerator.sync_gradients and optimizer.engine.steps == 2 and save:
            with offload.gathered(model):
                accelerator.save_state(save)
    return {"losses": losses, "norms": norms, "values": values_of(model, optimizer)}


@job
def accelerate_refusals(rank: int, ranks: int, folder: str) -> dict[str, str]:
    """What accelerate says of a model that is cut, where that cannot be right."""
    from accelerate import Accelerator

    accelerator, said = Accelerator(cpu=True), {}
    model: Any = small()
    model, optimizer = offload.attach(model, adamw(model), offload.Config(**MEMORY))
    model, wrapped = accelerator.prepare(model, optimizer)
    accelerator.backward(loss_of(model, tokens(rank)))
    wrapped.step()
    try:
        accelerator.save_state(folder)  # Which writes on the first rank alone.
    except Exception as error:
        said["save_state"] = f"{type(error).__name__}: {error}"
    accelerator.state._reset_state(True)
    Accelerator(cpu=True, mixed_precision="bf16")
    try:
        loss_of(model, tokens(rank))
    except RuntimeError as error:
        said["precision"] = str(error)
    return said


# -- the Trainer of Hugging Face -----------------------------------------------------------------


@job
def trainer(
    rank: int,
    ranks: int,
    directory: str,
    *,
    mixed: bool = True,
    precision: str = "no",
    clips: bool = False,
    **more: Any,
) -> Found:
    """Train a small Llama by the Trainer, in micro-batches of the step over all ranks."""
    import transformers

    bases = (offload.TrainerMixin, transformers.Trainer) if mixed else (transformers.Trainer,)
    kind: Any = type("Trainer", bases, {})
    resume = more.pop("resume", False)
    options = {"max_steps": STEPS, "save_steps": 4, "logging_steps": 1, **more}
    arguments = transformers.TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=MICRO // ranks,
        max_grad_norm=0.5 if clips else 0,
        learning_rate=1e-2,
        warmup_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=precision == "bf16",
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))
    placed = offload.Config(**MEMORY, max_grad_norm=None if clips else 0.5, comm_timeout=8.0)
    model, optimizer = offload.attach(model, adamw(model), placed)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, SIZE["vocab_size"], (64, 12), generator=generator)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    one = kind(
        model, arguments, train_dataset=data, eval_dataset=data[:16], optimizers=(optimizer, None)
    )
    one.train(resume_from_checkpoint=resume)
    found = {"steps": optimizer.engine.steps, "log": one.state.log_history}
    found["eval"] = one.evaluate()["eval_loss"]
    if more.get("save_strategy") != "no":
        one.save_model(os.path.join(directory, "last"))
    with torch.no_grad():
        found["logits"] = model.eval()(torch.arange(24).view(2, 12)).logits
    assert not isinstance(one.model_wrapped, nn.parallel.DistributedDataParallel)
    return {**found, "values": values_of(model, optimizer)}


@job
def adapter(rank: int, ranks: int, base: str, folder: str, params: str) -> Found:
    """Stream a pretrained base, train an adapter on it and export that."""
    import peft
    import transformers

    def prepared(model: Any) -> Any:
        torch.manual_seed(1)
        options = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, r=2)
        return peft.get_peft_model(model, options)

    model, optimizer = offload.from_pretrained(
        transformers.LlamaForCausalLM,
        base,
        offload.Config(**MEMORY, params=params, nvme_path=os.path.dirname(base)),
        optimizer=lambda model: adamw_of(model),
        prepare=prepared,
    )
    for step in range(2):
        rows = torch.arange(24).view(2, 12) + rank * ranks + step
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder, is_main_process=rank == 0)
    offload.save(model, optimizer, f"{folder}-saved", frozen=False)
    with torch.no_grad():
        return {"logits": model.eval()(torch.arange(24).view(2, 12)).logits}


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    """Over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
