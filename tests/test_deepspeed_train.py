"""`offload train --deepspeed FILE`: what of a file it takes, what it refuses, what it says."""

import json
import re

import pytest

from offload.cli import BadInput, from_deepspeed, in_flags, settings, train
from tests.command import SHORT, run
from tests.test_deepspeed import NVME, file_of


def test_all_that_it_has_not_is_told_at_once(tmp_path, capsys):
    content = {"fp16": {"enabled": True}, "scheduler": {"type": "OneCycle"}}
    assert run("train", "--deepspeed", file_of(content, tmp_path)) == 2
    shown = capsys.readouterr().err
    assert "fp16.enabled is true" in shown
    assert "scheduler.type is OneCycle" in shown


def test_train_takes_a_file(tmp_path, capsys):
    path = tmp_path / "ds.json"
    content = json.loads(NVME.split("/*")[0].rstrip(", \n") + "}") | {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
    }
    path.write_text(json.dumps(content))
    found = settings.parse(["--deepspeed", str(path)])
    assert (found.batch, found.micro_batches, found.placing.optimizer) == (4, 8, "cpu")
    assert (found.lr, found.beta1, found.beta2, found.warmup) == (3e-4, 0.9, 0.99, 2)
    found = settings.parse(["--deepspeed", str(path), "--batch=2", "--optimizer", "device"])
    assert (found.batch, found.placing.optimizer) == (2, "device")
    told = from_deepspeed.Adopted.of(str(path)).report(found)
    assert any(line.endswith("--batch 2, your own, which counts") for line in told)
    assert run("train", "--deepspeed", str(path), "--lr=1") == 2
    assert "--lr 1.0 contradicts" in capsys.readouterr().err
    assert run(*SHORT, "--deepspeed", str(path), "--micro-batches=1") == 0
    shown = capsys.readouterr().err
    assert f"note: what {path} became:\n" in shown
    assert "    optimizer.params.lr = 0.0003: --lr 0.0003\n" in shown
    assert "note: --steps " not in shown


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is Lamb"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "AdamW alone"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is OneCycle"),
        ({"fp16": {"enabled": True}}, 'write "bf16": {"enabled": true} in'),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"optimizer": {"params": {"betas": 3}}}, "expected two numbers"),
        ({"optimizer": {"params": {"lr": "fast"}}}, '"fast"'),
        (
            {"optimizer": {"params": {"lr": 1}}, "scheduler": {"params": {"warmup_max_lr": 2}}},
            "make them equal",
        ),
    ],
)
def test_train_refuses_what_it_has_not(content, told, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    assert run("train", "--deepspeed", str(path)) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1
    assert run("train", "--deepspeed", str(tmp_path / "gone")) == 2
    assert "gone cannot be read: No such file" in capsys.readouterr().err


def adopted(content, tmp_path, *flags):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    found = settings.parse(["--deepspeed", str(path), *flags])
    return found, "\n".join(from_deepspeed.Adopted.of(str(path)).report(found))


def test_train_says_what_it_does_and_not_what_the_file_has(tmp_path):
    found, told = adopted({"train_batch_size": 64}, tmp_path)
    assert (found.batch, found.micro_batches) == (64, 1)
    assert "train_batch_size = 64: --batch 64 --micro-batches 1" in told
    assert "bf16 and fp16 say nothing: --dtype bfloat16" in told
    open_count = {"train_batch_size": 64, "gradient_accumulation_steps": "auto"}
    assert adopted(open_count, tmp_path)[0].batch == settings.Train().batch
    found, told = adopted({"gradient_clipping": 2}, tmp_path, "--max-grad-norm", "5")
    assert found.placing.max_grad_norm == 5
    assert "gradient_clipping = 2.0: Config.max_grad_norm=5.0, your own, which counts" in told
    params = {"lr": "1e-4", "betas": [0.9, "0.95"], "torch_adam": True}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 1e1, "warmup_min_lr": 0}}
    content = {"optimizer": {"type": "AdamW", "params": params}, "scheduler": schedule}
    found, told = adopted(content, tmp_path)
    assert (found.lr, found.beta2, found.warmup) == (1e-4, 0.95, 10)
    assert re.search(r"^optimizer\.params\.torch_adam = \w+: ignored", told, re.M)
    assert "scheduler.params.warmup_min_lr = 0: so it is here" in told


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"bias_correction": False}, "bias_correction"),
        ({"lr": "fast"}, 'optimizer.params.lr holds "fast": expected a number'),
        ({"betas": [0.9, "x"]}, 'optimizer.params.betas holds "x": expected a number'),
    ],
)
def test_train_refuses_what_it_cannot_be(params, told, tmp_path):
    with pytest.raises(BadInput, match=re.escape(told)):
        adopted({"optimizer": {"type": "AdamW", "params": params}}, tmp_path)


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def test_the_schedule_is_the_file_s(tmp_path):
    rising = schedule("WarmupLR", warmup_num_steps=4, warmup_type="linear")
    found, told = adopted(rising, tmp_path, "--steps=9")
    assert [train.rate(found, step) for step in (0, 3, 8)] == [0.25, 1, 1]
    assert "no fall (--lr-floor 1)" in told
    assert "logarithm" not in told
    falling = schedule("WarmupDecayLR", warmup_num_steps=4, total_num_steps=20)
    found, told = adopted(falling, tmp_path)
    assert (train.rate(found, 3), train.rate(found, 19)) == (1, 0)
    assert "logarithm" in told
    found, told = adopted(falling, tmp_path, "--steps=9")
    assert "total_num_steps = 20: --steps 9, your own, which counts" in told
    with pytest.raises(BadInput, match=r"--lr-floor 0\.5 contradicts"):
        adopted(falling, tmp_path, "--lr-floor=0.5")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (schedule("WarmupLR", warmup_type="log"), 'write "linear"'),
        (schedule("WarmupLR", warmup_min_lr=1e-5), "rises from 0"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode is false"),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": "false"}}}, "has none"),
    ],
)
def test_other_mathematics_are_refused(content, told, tmp_path):
    with pytest.raises(BadInput, match=re.escape(told)):
        adopted(content, tmp_path)


def test_a_type_of_weights_of_your_own_wins(tmp_path):
    content = {"fp16": {"enabled": True, "loss_scale": 0}}
    found, told = adopted(content, tmp_path, "--dtype", "float32")
    assert found.dtype == "float32"
    assert "fp16.enabled = true: --dtype float32, your own, which counts" in told
    assert "GradScaler" not in told
    found, told = adopted({"fp16": {"enabled": False, "loss_scale": 0}}, tmp_path)
    assert "fp16.enabled = false: nothing is to be done for it" in told
    params = {"adam_w_mode": True, "bias_correction": True, "amsgrad": "false"}
    _, told = adopted({"optimizer": {"type": "Adam", "params": params}}, tmp_path)
    assert told.count(": so it is here") == 2


def test_a_path_is_no_flag(tmp_path):
    section = {"device": "nvme", "nvme_path": "--trace-file=/x"}
    found, _ = adopted({"zero_optimization": {"offload_optimizer": section}}, tmp_path)
    assert found.trace_file is None
    assert found.placing.nvme_path == ("./--trace-file=/x",)


def test_a_path_is_told_as_a_flag(tmp_path, capsys):
    """And not as Python writes a tuple."""
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    path = file_of({"zero_optimization": {"offload_optimizer": section}}, tmp_path)
    assert run(*SHORT, "--deepspeed", path) == 0
    shown = capsys.readouterr().err
    assert f": --nvme-path {tmp_path}\n" in shown
    assert ": --optimizer nvme, --gradients cpu\n" in shown
    assert in_flags("Config.nvme_path=('/a', '/b')") == "--nvme-path /a /b"


def test_steps_that_end_before_the_peak_are_told(capsys):
    assert run(*SHORT, "--warmup", "4") == 0
    told = "note: --steps 3 end before --warmup 4: the learning rate rises to 0.0015 only"
    assert told in " ".join(capsys.readouterr().err.split())
    assert run(*SHORT, "--warmup", "3") == 0
    assert "note: --steps" not in capsys.readouterr().err


def test_a_working_directory_that_cannot_be_used_is_called_that(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    assert run(*SHORT, "--optimizer", "nvme") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "the working directory, which is --nvme-path where no other is given, cannot be used"
        in told
    )
