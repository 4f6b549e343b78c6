"""`offload train --deepspeed FILE`: what of a file it takes, what it says of the rest."""

import json
from dataclasses import replace

from offload.cli import in_flags, options
from tests.command import SHORT, run
from tests.test_deepspeed import file_of


def test_placement_clipping_and_accumulation_are_flags_and_the_rest_is_yours(tmp_path, capsys):
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.99]}},
        "scheduler": {"type": "OneCycle"},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 4,
    }
    path = file_of(content, tmp_path)
    found = options.parse(["--deepspeed", path])
    assert (found.placing.optimizer, found.placing.gradients) == ("cpu", "cpu")
    assert (found.placing.max_grad_norm, found.micro_batches) == (0.5, 2)
    assert (found.lr, found.batch) == (options.Train().lr, options.Train().batch)
    found = options.parse(["--deepspeed", path, "--optimizer", "device", "--max-grad-norm", "5"])
    assert (found.placing.optimizer, found.placing.max_grad_norm) == ("device", 5)
    assert run(*SHORT, "--deepspeed", path, "--max-grad-norm", "5") == 0
    shown = capsys.readouterr().err
    assert f"note: what {path} became, where no flag says otherwise:\n" in shown
    assert "optimizer.params.lr = 0.0003: yours: " in shown
    assert "train_micro_batch_size_per_gpu = 4: yours: " in shown
    assert "gradient_clipping = 0.5: --max-grad-norm 0.5\n" in shown


def test_what_a_file_leaves_open_is_as_without_it(tmp_path):
    """So that updates begin inside backward, for one micro-batch as for those of a flag."""
    path = file_of({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, tmp_path)
    found = options.parse(["--deepspeed", path]).placing
    assert found.micro_batches == options.Train().placing.micro_batches == 1
    assert replace(found, gradients="auto", optimizer="auto", max_grad_norm=None) == (
        options.Train().placing
    )
    assert options.parse(["--deepspeed", path, "--micro-batches", "3"]).micro_batches == 3


def test_a_file_that_cannot_be_is_refused_in_one_message(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimisation": {}}))
    for file, told in ((path, "did you mean 'zero_optimization'?"), ("gone", "cannot be read")):
        assert run("train", "--deepspeed", str(file)) == 2
        shown = capsys.readouterr().err
        assert told in shown
        assert shown.count("\n") == 1


def test_a_path_is_no_flag_and_is_told_as_one(tmp_path, capsys):
    section = {"device": "nvme", "nvme_path": "--seed=5"}
    path = file_of({"zero_optimization": {"offload_optimizer": section}}, tmp_path)
    found = options.parse(["--deepspeed", path])
    assert found.seed == 0
    assert found.placing.nvme_path == ("--seed=5",)
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    path = file_of({"zero_optimization": {"offload_optimizer": section}}, tmp_path)
    assert run(*SHORT, "--deepspeed", path) == 0
    shown = capsys.readouterr().err
    assert f": --nvme-path {tmp_path}\n" in shown
    assert in_flags("Config.nvme_path=('/a', '/b')") == "--nvme-path /a /b"
