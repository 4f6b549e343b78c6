"""Adapters of PEFT on an attached model: saved alone, and nothing of the base is read for it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload.runtime.runner import Runner
from tests.pretrained import INPUTS, llama, loaded, saved
from tests.small import config
from tests.training import needs, same_bits

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers: Any = pytest.importorskip("transformers")
pytestmark = [
    needs("peft"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NVME = ("nvme", "nvme", "nvme")


def with_lora(model: Any, **options: Any) -> Any:
    import peft

    torch.manual_seed(9)
    options = {"target_modules": ["q_proj", "v_proj"], "r": 4, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def streamed(folder: Path, drive: Path, prepare: Callable[[Any], Any] = with_lora) -> Any:
    kind = transformers.AutoModelForCausalLM
    return loaded(kind, folder, drive, NVME, optimizer=adamw, prepare=prepare)


def some_steps(model: Any, optimizer: Any, count: int = 2) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(INPUTS, labels=INPUTS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(INPUTS).logits  # type: ignore[no-any-return]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that are read from homes, by kind of value and whether the weights are frozen."""
    found, read = Counter[str](), Runner.read_home

    def counting(self: Runner, value: Any) -> torch.Tensor:
        content = read(self, value)
        trained = value.chunk < len(self.plan.profile.units[value.unit].chunks)
        found[value.kind if trained else f"frozen {value.kind}"] += content.numel()
        return content

    Runner.read_home = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Runner.read_home = read  # type: ignore[method-assign]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(llama(hidden_size=64), tmp_path / "base")


def test_an_adapter_on_a_streamed_base_is_saved_alone(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    plain = with_lora(transformers.AutoModelForCausalLM.from_pretrained(base)).train()
    losses = some_steps(plain, adamw(plain))
    model, optimizer = streamed(base, tmp_path)
    assert some_steps(model, optimizer) == pytest.approx(losses, rel=1e-5)
    with counted() as read:
        model.save_pretrained(tmp_path / "adapter")
    weights = sum(p.numel() for p in model.parameters() if not p.requires_grad) * 4
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert set(read) == {"weight"}  # None that is frozen, and no state.
    assert sum(one.nbytes for one in adapter.values()) <= read["weight"] < weights / 5
    assert sorted(os.listdir(tmp_path / "adapter")) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors")
    ]
    with counted() as read:
        model.state_dict()
    assert read["frozen weight"] >= weights  # What saving would read else.
    expected = logits(model)
    optimizer.engine.close()
    alone = transformers.AutoModelForCausalLM.from_pretrained(base)
    alone = PeftModel.from_pretrained(alone, tmp_path / "adapter")
    assert same_bits(logits(alone), expected)
    model, optimizer = streamed(  # And on a base that is streamed, too.
        base,
        tmp_path,
        lambda one: PeftModel.from_pretrained(one, tmp_path / "adapter", is_trainable=True),
    )
    assert same_bits(logits(model), expected)
    optimizer.engine.close()


def test_an_adapter_of_transformers_own_and_modules_to_save(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    model, _ = offload.attach(model, None, config(NVME, tmp_path))
    with counted() as read:
        model.save_pretrained(tmp_path / "adapter")
    assert not read["state"]
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(found) == 4
    offload.engine_of(model).close()
    model = with_lora(
        transformers.AutoModelForCausalLM.from_pretrained(base), modules_to_save=["lm_head"]
    )
    model, optimizer = offload.attach(model, adamw(model), config(NVME, tmp_path))
    some_steps(model, optimizer)
    model.save_pretrained(tmp_path / "head")
    found = load_file(tmp_path / "head" / "adapter_model.safetensors")
    head = found["base_model.model.lm_head.weight"]
    assert same_bits(head, model.base_model.model.lm_head.modules_to_save.default.weight.detach())
    optimizer.engine.close()


def test_what_layers_share_is_saved_under_each_name(base: Path, tmp_path: Path) -> None:
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.VeraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "plain")
    model, optimizer = offload.attach(model, adamw(model), config(NVME, tmp_path))
    model.save_pretrained(tmp_path / "ours")
    optimizer.engine.close()
    wanted, found = (
        load_file(tmp_path / one / "adapter_model.safetensors") for one in ("plain", "ours")
    )
    assert wanted.keys() == found.keys()
    assert all(same_bits(one, found[name]) for name, one in wanted.items())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_what_is_made_of_weights_that_are_not_there_is_refused(
    options: Any, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"prepare made .* of weights that have no values yet"):
        streamed(base, tmp_path, lambda model: with_lora(model, **options))


def test_a_save_may_leave_out_what_is_frozen(base: Path, tmp_path: Path) -> None:
    model, optimizer = streamed(base, tmp_path)
    some_steps(model, optimizer)
    with counted() as read:
        offload.save(model, optimizer, tmp_path / "save", frozen=False)
    assert set(read) == {"weight", "state"}
    size = sum(one.stat().st_size for one in (tmp_path / "save").glob("*.safetensors"))
    assert size < (base / "model.safetensors").stat().st_size / 2
    expected, at = some_steps(model, optimizer), logits(model)
    optimizer.engine.close()
    model, optimizer = streamed(base, tmp_path)
    offload.load(model, optimizer, tmp_path / "save")
    assert some_steps(model, optimizer) == expected
    assert same_bits(logits(model), at)
    with pytest.raises(ValueError, match=r"frozen=False.*needs the optimizer"):
        offload.save(model, None, tmp_path / "other", frozen=False)
    optimizer.engine.close()
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain, whole = offload.attach(plain, adamw(plain), config(NVME, tmp_path))
    with pytest.raises(ValueError, match="missing"):
        offload.load(plain, None, tmp_path / "save")
    whole.engine.close()


@pytest.mark.slow
def test_checkpoints_of_the_trainer_never_touch_the_base(base: Path, tmp_path: Path) -> None:
    def train(name: str, resume: Any, steps: int) -> Any:
        model, optimizer = streamed(base, tmp_path)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=3,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
        )
        data = [{"input_ids": row, "labels": row} for row in INPUTS.repeat(8, 1)]
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, None)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    with counted() as read:
        theirs = train("whole", None, 7)
        assert not read["frozen weight"]
    last = tmp_path / "whole" / "checkpoint-6"
    assert (last / "adapter_model.safetensors").exists()
    assert not list(last.glob("model*.safetensors"))
    ours = train("resumed", str(last), 7)
    assert same_bits(logits(ours.model), logits(theirs.model))
    for one in (ours, theirs):
        offload.engine_of(one.model).close()
