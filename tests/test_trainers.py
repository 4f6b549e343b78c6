"""Trainers of others on an attached pair, compared with the same run without offload."""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.small import adamw, config, small, tokens
from tests.training import alone, loss_of, same_bits

os.environ.setdefault("HF_HUB_OFFLINE", "1")

EXAMPLES = Path(__file__).parents[1] / "examples"
PLACEMENT = ("nvme", "cpu", "nvme")

pytestmark = [
    pytest.mark.slow,
    # What their own imports and defaults warn of.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_weights(one: Any, other: Any) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


MEASURED = ("loss", "grad_norm", "learning_rate", "eval_loss")


def logged(trainer: Any) -> list[Any]:
    return [[entry.get(name) for name in MEASURED] for entry in trainer.state.log_history]


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    train = example("hf_trainer").train
    placed = config(PLACEMENT, tmp_path)
    with warnings.catch_warnings():  # Of the example's own ways.
        warnings.filterwarnings("error", message=".*is deprecated and will be removed")
        theirs = train(None, str(tmp_path / "theirs"))
    ours = train(placed, str(tmp_path / "ours"))
    assert len(logged(theirs)) > 8
    assert logged(ours) == logged(theirs)
    assert_same_weights(ours.model, theirs.model)
    saved = str(tmp_path / "saved")
    ours.model.save_pretrained(saved)
    assert_same_weights(transformers.LlamaForCausalLM.from_pretrained(saved), theirs.model)
    ours.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)

    last = tmp_path / "ours" / "checkpoint-20"
    resumed = train(placed, str(tmp_path / "resumed"), resume=str(last))
    assert_same_weights(resumed.model, theirs.model)
    for trainer in (ours, resumed):
        offload.engine_of(trainer.model).close()


def test_the_mixin_says_how_it_is_used() -> None:
    other: Any = type("Other", (), {"_wrap_model": None, "create_optimizer": None})
    with pytest.raises(TypeError, match=r"write class Mine\(offload.TrainerMixin, Other\)"):
        type("Mine", (other, offload.TrainerMixin), {})
    own: Any = type("Own", (), {"save_model": None})  # Of the user's, which may call super().
    mine: Any = type("Mine", (own, offload.TrainerMixin, other), {})()
    mine.optimizer, (mine.model, _) = None, offload.attach(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match=r"write Trainer\(..., optimizers=\(optimizer, None\)\)"):
        mine.create_optimizer()
    offload.engine_of(mine.model).close()


@pytest.fixture
def without_fast_path() -> Iterator[None]:
    """Torch's own path for encoders in evaluation rounds otherwise; offloaded ones take none."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("without_fast_path")
def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    train = example("lightning_trainer").train
    placed, quiet = (
        config(PLACEMENT, tmp_path),
        {"enable_progress_bar": False, "accelerator": "cpu"},
    )
    theirs, ours = train(None, **quiet), train(placed, **quiet)
    assert ours.global_step == theirs.global_step == 30
    assert {k: v.item() for k, v in ours.callback_metrics.items()} == {
        k: v.item() for k, v in theirs.callback_metrics.items()
    }
    assert_same_weights(ours.lightning_module, theirs.lightning_module)
    averaged = copy.deepcopy(ours.lightning_module)  # As its weight averaging does.
    assert_same_weights(averaged, theirs.lightning_module)

    half = train(placed, **quiet, limit_train_batches=30, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    resumed = train(placed, **quiet, resume=str(tmp_path / "half.ckpt"))
    assert resumed.global_step == 30
    plain = train(None, **quiet, limit_train_batches=30, max_epochs=1)
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    again = train(None, **quiet, resume=str(tmp_path / "plain.ckpt"))
    assert_same_weights(resumed.lightning_module, again.lightning_module)
    for trainer in (ours, half, resumed):
        offload.engine_of(trainer.lightning_module.model).close()


BEYOND = ("cpu", "nvme", "cpu")
"""With gradients on nvme that are more than the exposed memory of the tests below."""


def test_the_trainer_of_hugging_face_clips_at_any_size(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train = example("hf_trainer").train
    placed = config(BEYOND, tmp_path, exposed_memory="1MiB")
    theirs = train(None, str(tmp_path / "theirs"), steps=5)
    ours = train(placed, str(tmp_path / "ours"), steps=5)
    assert max(norm for _, norm, *_ in logged(ours) if norm is not None) > 1.0  # It clips.
    assert logged(ours) == logged(theirs)
    assert_same_weights(ours.model, theirs.model)
    offload.engine_of(ours.model).close()


def test_with_the_mixin_updates_begin_inside_the_backward_and_the_engine_clips(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    told, module = {"max_grad_norm": 0.0}, example("hf_trainer")
    made = module.TrainingArguments
    module.Trainer = type("Trainer", (offload.TrainerMixin, transformers.Trainer), {})
    module.TrainingArguments = lambda **given: made(**{**given, **told})

    def run(name: str, **fields: Any) -> Any:
        placed = config(PLACEMENT, tmp_path, **fields) if fields else None
        return module.train(placed, str(tmp_path / name), steps=10)

    plain, early = run("plain"), run("early", micro_batches=2)
    assert not early._optimizer().engine.notices
    assert_same_weights(early.model, plain.model)
    assert [[row[0], *row[2:]] for row in logged(early)] == [
        [row[0], *row[2:]] for row in logged(plain)
    ], "but for the norm"
    told.clear()
    ours, theirs = run("ours", max_grad_norm=1.0), run("theirs")
    (one, two), (first, second) = (
        [row[1] for row in logged(trainer) if row[0] is not None] for trainer in (ours, theirs)
    )
    assert (one, two) == pytest.approx((first, second), rel=1e-3)
    for trainer in (early, ours):
        offload.engine_of(trainer.model).close()


@pytest.mark.usefixtures("without_fast_path")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_trainer_of_lightning_clips_at_any_size(algorithm: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    trainer = example("lightning_trainer")
    most = {"norm": 0.1, "value": 1e-3}[algorithm]

    def weights(placed: offload.Config | None) -> Any:
        lightning.seed_everything(0)
        module = trainer.Lit(placed)
        lightning.Trainer(
            max_steps=4,
            accumulate_grad_batches=2,
            gradient_clip_val=most,
            gradient_clip_algorithm=algorithm,
            enable_checkpointing=False,
            enable_progress_bar=False,
            accelerator="cpu",
            logger=False,
        ).fit(module, trainer.batches("argparse.py"))
        return module

    ours, theirs = weights(config(BEYOND, tmp_path, exposed_memory="1MiB")), weights(None)
    assert_same_weights(ours, theirs)
    offload.engine_of(ours.model).close()


def test_what_accelerate_has_dispatched_is_refused(tmp_path: Path) -> None:
    """Its weights on the meta device would be initialised anew."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(small(), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"dispatched by accelerate.*without device_map"):
        offload.attach(model, None, config(PLACEMENT, tmp_path))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("placement", [PLACEMENT, BEYOND])
def test_accelerate_leaves_an_attached_pair_as_it_is(
    placement: tuple[str, str, str], mixed_precision: str, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    placed = config(placement, tmp_path, exposed_memory="40KiB" if placement is BEYOND else None)

    def losses(attached: bool) -> list[float]:
        model: Any = small()
        optimizer: Any = alone(adamw(model))
        if attached:
            model, optimizer = offload.attach(model, optimizer, placed)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        prepared, wrapped, scheduler = accelerator.prepare(model, optimizer, scheduler)
        assert prepared is model
        assert wrapped.optimizer is optimizer
        found = []
        for seed in range(6):
            with accelerator.accumulate(prepared):
                loss = loss_of(prepared, tokens(seed))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.5).item())
                wrapped.step()
                scheduler.step()
                wrapped.zero_grad()
                found.append(loss.item())
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(True)
        if attached:
            optimizer.engine.close()
        return found

    assert losses(True) == losses(False)
