"""Two ranks by accelerate and the Trainer of Hugging Face, beside one process that does it all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Failed, How, Trained, World, joined, worlds_of
from tests.ranks_trainers import MICRO, SIZE, STEPS
from tests.training import needs, same_bits

pytestmark = [
    pytest.mark.slow,
    needs("transformers", "accelerate"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


worlds = worlds_of(1, 2, jobs="tests.ranks_trainers")


def every(found: list[Any]) -> dict[str, torch.Tensor]:
    """The values of all ranks."""
    return joined([Trained([], [], one["values"]) for one in found])


def assert_same_values(found: list[Any], wanted: list[Any]) -> None:
    ours, theirs = every(found), every(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert same_bits(ours[name], value), f"{name} differs"


# -- accelerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_as_one_process(worlds: dict[int, World], precision: str) -> None:
    two, one = (worlds[n].run("accelerate_loop", precision=precision) for n in (2, 1))
    for rank, found in enumerate(two):
        assert found["losses"] == one[0]["losses"][rank::2]
    assert_same_values(two, one)


def test_accelerate_clips_by_one_norm(worlds: dict[int, World]) -> None:
    two, one = (worlds[n].run("accelerate_loop", clips=True) for n in (2, 1))
    assert two[0]["norms"] == two[1]["norms"]
    assert two[0]["norms"] == pytest.approx(one[0]["norms"], rel=1e-5)
    for name, value in every(one).items():
        torch.testing.assert_close(every(two)[name], value, rtol=1e-3, atol=1e-5)


def test_accelerate_saves_and_loads_what_is_gathered(
    worlds: dict[int, World], tmp_path: Path
) -> None:
    whole = worlds[2].run("accelerate_loop", save=str(tmp_path))
    for ranks in (2, 1):
        resumed = worlds[ranks].run("accelerate_loop", load=str(tmp_path))
        assert_same_values(resumed, whole)
        for rank, one in enumerate(resumed):
            assert len(one["losses"]) == MICRO // ranks
            assert one["losses"][-1] == whole[rank if ranks == 2 else 1]["losses"][-1]


def test_what_accelerate_cannot_do_over_ranks_is_one_sentence(
    worlds: dict[int, World], tmp_path: Path
) -> None:
    for said in worlds[2].run("accelerate_refusals", str(tmp_path)):
        assert re.match("ShardError: .*with offload.gathered.*offload.save", said["save_state"])
        assert "accelerator.prepare_model(model, evaluation_mode=True)" in said["precision"]


# -- the Trainer of Hugging Face -----------------------------------------------------------------


def logged(found: Any) -> dict[str, list[float]]:
    names = ("loss", "grad_norm", "learning_rate")
    return {name: [one[name] for one in found["log"] if name in one] for name in names}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_trainer_trains_as_one_process_and_exports(
    worlds: dict[int, World], precision: str, tmp_path: Path
) -> None:
    two, one = (
        worlds[n].run("trainer", str(tmp_path / str(n)), precision=precision) for n in (2, 1)
    )
    assert_same_values(two, one)
    for name, values in logged(one[0]).items():
        assert len(values) == STEPS
        assert logged(two[0])[name] == logged(two[1])[name] == pytest.approx(values, rel=1e-5)
    assert two[0]["eval"] == pytest.approx(one[0]["eval"], rel=1e-5)
    from transformers import LlamaForCausalLM

    for folder in ("last", f"checkpoint-{STEPS}"):
        read = LlamaForCausalLM.from_pretrained(tmp_path / "2" / folder)
        wanted = every(one)
        for name, value in read.state_dict().items():
            assert same_bits(value.view(-1), wanted[name]), name
    if precision == "no":
        with torch.no_grad():
            logits = read.eval()(torch.arange(24).view(2, 12)).logits
        torch.testing.assert_close(logits, two[0]["logits"])


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_a_checkpoint_of_the_trainer_is_resumed(
    worlds: dict[int, World], before: int, after: int, tmp_path: Path
) -> None:
    whole = worlds[before].run("trainer", str(tmp_path / "whole"))
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    again = str(tmp_path / "again")
    resumed = worlds[after].run("trainer", again, resume=str(checkpoint))
    assert resumed[0]["steps"] == STEPS
    assert_same_values(resumed, whole)
    if after == 1:
        worlds[1].begin("trainer", again, mixed=False, resume=str(checkpoint))
        (plain,) = worlds[1].results()
        assert "they are in its folder 'offload'" in plain.message


def test_the_trainer_clips_by_one_norm(worlds: dict[int, World], tmp_path: Path) -> None:
    two, one = (
        worlds[n].run("trainer", str(tmp_path), clips=True, save_strategy="no") for n in (2, 1)
    )
    assert logged(two[0])["grad_norm"] == logged(two[1])["grad_norm"]
    for name, values in logged(one[0]).items():
        assert logged(two[0])[name] == pytest.approx(values, rel=1e-4)


def test_a_trainer_without_the_mixin_trains_and_does_not_hang_as_it_saves(tmp_path: Path) -> None:
    world = World(2, tmp_path, "tests.ranks_trainers")
    found = world.run("trainer", str(tmp_path / "none"), mixed=False, save_strategy="no")
    assert [one["steps"] for one in found] == [STEPS, STEPS]
    world.begin("trainer", str(tmp_path / "some"), mixed=False)
    (told,) = world.results(of=1)  # The other one waits for it in a collective of the Trainer's.
    world.close()
    assert isinstance(told, Failed), told
    assert told.kind == "EngineError", told.text
    assert "a Trainer without offload.TrainerMixin" in told.message
    assert told.seconds < 30


@pytest.mark.parametrize("tier", ["auto", "nvme"])
def test_an_adapter_on_a_pretrained_base(
    tier: str, worlds: dict[int, World], tmp_path: Path
) -> None:
    """A rank may have nothing of a small unit, and reads it all the same."""
    peft: Any = pytest.importorskip("peft")
    import transformers

    torch.manual_seed(4)
    base, folder = tmp_path / "base", tmp_path / "adapter"
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE))
    plain.save_pretrained(base)
    first, second = worlds[2].run("adapter", str(base), str(folder), tier)
    assert same_bits(first["logits"], second["logits"])
    assert sum(one.stat().st_size for one in folder.iterdir()) < 20_000
    with torch.no_grad():
        read = peft.PeftModel.from_pretrained(plain, folder).eval()
        found = read(torch.arange(24).view(2, 12)).logits
    torch.testing.assert_close(found, first["logits"])
    saved = sum(one.stat().st_size for one in (tmp_path / "adapter-saved").glob("*.safetensors"))
    assert saved < 20_000


# -- saves of our own ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "states"), [("tied", "compact"), ("scalar", "exact"), ("adapter", "compact")]
)
def test_saved_by_two_and_loaded_by_three(kind: str, states: str, tmp_path: Path) -> None:
    how = How(kind, config={"states": states, "max_grad_norm": 0.5, "reduce": "sum"})
    folder, found = str(tmp_path / "saved"), {}
    for ranks in (2, 3):
        world = World(ranks, tmp_path)
        if ranks == 2:
            world.run("save", how, folder, ours=True)
        found[ranks] = joined(world.run("loaded", how, folder))
        world.close()
    assert found[2].keys() == found[3].keys()
    for name, value in found[2].items():
        assert same_bits(found[3][name], value), name
