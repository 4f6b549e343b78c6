"""`offload plan`: what it shows (a golden table), says to programs, and refuses."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from offload.cli import EXIT_BAD_INPUT
from offload.cli.models import models_of
from offload.model.units import partition
from tests.command import run
from tests.training import some_fast

GOLDEN = Path(__file__).parent / "data/plan"
"""What is shown. To make them anew: `python -m tests.test_cli_plan`."""

NVME = ("--params", "nvme", "--gradients", "nvme", "--optimizer", "nvme")

SHOWN = {
    "workstation": ("--model", "7b"),
    "nodes": ("--model", "70b", "--machine", "dgx-a100", "--nodes", "4", "--micro-batches", "8"),
    "nvme": ("--model", "175b", "--machine", "dgx2-v100", *NVME),
}

# fmt: off
FLAGS = [
    "--json", "--no-json",
    "--model", "--machine", "--nodes", "--gpus", "--batch", "--seq-len", "--recompute",
    "--no-recompute", "--frozen", "--no-frozen", "--parts", "--exchange",
    "--params", "--gradients", "--optimizer",
    "--device-memory", "--cpu-memory", "--nvme-space", "--states", "--gradient-dtype",
    "--max-grad-norm", "--micro-batches", "--shard",
]
# fmt: on


def found(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert run("plan", "--json", *arguments) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_the_surface_grows_on_purpose_only(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("plan", "--help") == 0
    shown = re.findall(r"^ +(--[a-z].*?)(?:  |$)", capsys.readouterr().out, re.M)
    flags = re.findall(r"--[a-z-]+", " ".join(shown))
    assert list(dict.fromkeys(flags)) == FLAGS


@pytest.mark.parametrize("name", some_fast(SHOWN, fast=2))
def test_what_is_shown(name: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("plan", *SHOWN[name]) == 0
    shown = capsys.readouterr().out
    assert shown == (GOLDEN / f"{name}.txt").read_text("utf-8")
    told = [line for line in shown.splitlines() if not line.startswith("note: ")]
    assert max(map(len, told)) <= 80


def test_programs_are_told_the_same(capsys: Any) -> None:
    told = found(capsys, "--model", "7b", "--machine", "dgx-h100", "--micro-batches", "4")
    assert (told["kind"], told["ranks"], told["shard"]) == ("plan", 8, 2)
    assert told["tokens_per_step"] == 8 * 4 * 2048
    assert told["model"]["parameters"] == pytest.approx(6.9e9, rel=0.01)
    flops = told["tflops_per_gpu"] * 1e12 * told["step_seconds"]
    assert flops == pytest.approx(8 * 6.6e9 * 4 * 2048, rel=0.1), "two, four and two a parameter"
    assert told["busy"]["model"] <= told["step_seconds"]
    assert told["bound_by"] == min(told["faster"], key=lambda lane: told["faster"][lane])
    for tier in told["tiers"]:
        values = sum(one["bytes"] for one in told["values"] if one["tier"] == tier["tier"])
        assert values == tier["resident_bytes"]
        assert values + tier["staging_bytes"] <= tier["budget_bytes"]


def test_a_file_that_it_shows_is_a_machine(capsys: Any, tmp_path: Path) -> None:
    one = found(capsys, "--model", "1b", "--machine", "dgx-a100")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(one["machine"]))
    assert found(capsys, "--model", "1b", "--machine", str(file)) == one
    file.write_text(json.dumps({"like": "dgx-a100", "gpus": 2}))
    assert found(capsys, "--model", "1b", "--machine", str(file))["ranks"] == 2


def test_a_folder_of_hugging_face_is_planned_as_attach_would_cut_it(
    capsys: Any, tmp_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 1000}
    sizes |= {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}

    def kept(kind: str, **options: Any) -> Any:
        config = getattr(transformers, f"{kind}Config")(**sizes, **options)
        config.architectures = [f"{kind}ForCausalLM"]
        config.save_pretrained(tmp_path / kind)
        return getattr(transformers, config.architectures[0])(config)

    llama = kept("Llama", tie_word_embeddings=True)
    mixtral = kept("Mixtral", num_local_experts=8, num_experts_per_tok=2)
    for model in (llama, mixtral):
        name = type(model).__name__.removesuffix("ForCausalLM")
        told = found(capsys, "--model", str(tmp_path / name), "--batch", "2", "--no-recompute")
        assert told["model"]["parameters"] == sum(p.numel() for p in model.parameters())
        (one,) = models_of(str(tmp_path / name / "config.json"), "auto", recompute=False)
        groups = partition(model)
        assert [unit.name for unit in one.units] == [group.name for group in groups]
        met = [n for n, p in model.named_parameters() if "embed" not in n and ".experts." not in n]
        dense = sum(model.get_parameter(n).numel() for n in met)
        dense += model.lm_head.weight.numel() * (name == "Llama")  # Tied: the embedding's.
        experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        expected = 3 * 2 * (dense + experts / 4 + 3 * 2 * 64 * 256)
        assert one.flops(1, 64) == pytest.approx(expected)
    told = found(capsys, "--model", str(tmp_path / "Llama"), "--frozen")
    assert {one["kind"] for one in told["values"]} == {"weight"}
    (one,) = models_of(str(tmp_path / "Llama"), "auto", recompute=False, trains=False)
    (whole,) = models_of(str(tmp_path / "Llama"), "auto", recompute=False)
    assert one.flops(1, 64) == pytest.approx(2 / 3 * whole.flops(1, 64))
    assert run("plan", "--model", str(tmp_path)) == EXIT_BAD_INPUT
    assert "found no config.json of Hugging Face" in capsys.readouterr().err
    assert run("plan", "--model", str(tmp_path / "Llama"), "--parts", "2") == EXIT_BAD_INPUT
    assert "--parts 2: a folder's model is cut" in capsys.readouterr().err


def test_more_nodes_and_faster_ones_train_more_tokens(capsys: Any) -> None:
    arguments = ("--model", "7b", "--machine", "dgx-a100", "--batch", "2")
    few, more, clipped, flat = (
        found(capsys, *arguments, *others)
        for others in (
            ("--nodes", "2"),
            ("--nodes", "4"),
            ("--nodes", "2", "--max-grad-norm", "1"),
            ("--nodes", "2", "--exchange", "flat"),
        )
    )
    rate = {id(one): one["tokens_per_step"] / one["step_seconds"] for one in (few, more)}
    assert rate[id(few)] < rate[id(more)] < 2.5 * rate[id(few)]
    assert few["step_seconds"] <= clipped["step_seconds"]
    assert few["step_seconds"] < flat["step_seconds"], "each rank sends its own"


def test_settings_of_the_engine_count(capsys: Any) -> None:
    base = ("--model", "1b", "--machine", "dgx-h100", "--gpus", "1")
    one = found(capsys, *base, "--params", "cpu", "--optimizer", "nvme", "--states", "compact")
    homes = {(value["kind"], value["tier"]) for value in one["values"]}
    assert {("weight", "cpu"), ("state", "nvme")} < homes
    assert one["shard"] is None
    states = sum(value["bytes"] for value in one["values"] if value["kind"] == "state")
    plain = found(capsys, *base)
    assert states < 0.6 * sum(v["bytes"] for v in plain["values"] if v["kind"] == "state")
    assert {value["tier"] for value in plain["values"]} == {"device"}
    wide = found(capsys, *base, "--gradient-dtype", "fp32", "--parts", "4")
    gradients = [value for value in wide["values"] if value["kind"] == "gradient"]
    weights = [value for value in wide["values"] if value["kind"] == "weight"]
    assert sum(g["bytes"] for g in gradients) == 2 * sum(w["bytes"] for w in weights)
    assert found(capsys, *base, "--shard", "2", "--gpus", "2")["shard"] == 2


REFUSED = {
    "--model 7c": "model '7c': expected 1b, 7b",
    "--machine dgx": "machine 'dgx': expected dgx-h100",
    "--machine none.json": "none.json: No such file or directory: likely misspelt",
    "--nodes 0": "--nodes 0: expected 1 or more",
    "--gpus 2": "--gpus 2: workstation has 1",
    "--batch 4096": "activations take about 4.34 TiB of a GPU with 22.35 GiB: give a smaller",
    "--no-recompute --batch 8": "or leave --no-recompute out",
    "--model 1t": "does not fit a GPU of workstation: the slots of whole units take 29.30 GiB",
    "--model 1t --parts 1 --machine dgx-h100": "fewer tokens at once, --parts 4, --shard 3",
    "--model 70b --machine dgx-a100 --shard 2": "--shard 3",
    "--model 175b --machine dgx-h100 --nvme-space 1GiB": "about --nodes 2 would do",
    "--model 13b --nvme-space 1GiB": "give it 63.98 GiB more, or --states compact, which fit",
    "--params cpu --gradients cpu --optimizer cpu": "--cpu-memory 90.28GiB",
    "--durable x --nvme-pth y": "there is no option",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_is_refused_with_what_would_do(arguments: str, capsys: Any) -> None:
    assert run("plan", *arguments.split()) == EXIT_BAD_INPUT
    shown = capsys.readouterr()
    assert REFUSED[arguments] in shown.err
    assert not shown.out


def test_what_a_refusal_says_would_do_does(capsys: Any) -> None:
    arguments = ["--model", "175b", "--machine", "dgx-h100", "--nvme-space", "1GiB"]
    assert run("plan", *arguments, "--nodes", "2") == 0
    capsys.readouterr()


@pytest.mark.slow
def test_a_trillion_parameters_on_1024_gpus_take_seconds(capsys: Any) -> None:
    """Some six of one core; the bound is for a busy machine, and finds what is quadratic."""
    began = time.process_time()
    told = found(capsys, "--model", "1t", "--machine", "dgx-h100", "--nodes", "128")
    assert time.process_time() - began < 30
    assert told["ranks"] == 1024
    assert told["model"]["parts"] == 4
    assert told["bound_by"] == "comm", "of a micro-batch of 2048 tokens"


if __name__ == "__main__":
    import contextlib
    import os

    os.environ["COLUMNS"] = "80"
    GOLDEN.mkdir(exist_ok=True)
    for key, asked in SHOWN.items():
        with open(GOLDEN / f"{key}.txt", "w") as out, contextlib.redirect_stdout(out):
            assert run("plan", *asked) == 0
