"""The parity suite (tests/parity.py): a sample in the fast tier, all of it in the slow one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.covering import Case
from tests.parity import FACTORS, Outcome, cases, differences, run_case
from tests.parity_table import TABLE, render
from tests.refusals import REFUSED
from tests.structures import STRUCTURES
from tests.training import some_fast

ALL = cases()

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),  # Torch 2.15.
]


def called(case: Case) -> str:
    return ", ".join(value for name, value in case.items() if value != FACTORS[name][0])


def check(case: Case, drive: Path) -> None:
    expected = run_case(case, drive, offloaded=False)
    assert expected.losses
    assert expected.states
    assert differences(run_case(case, drive, offloaded=True), expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=called)
def test_the_bits_of_a_loop_without_an_engine(
    case: Case, tmp_path: Path, record_property: Any
) -> None:
    check(case, tmp_path)
    record_property("parity", ALL.index(case))


SAMPLE = [case for case in ALL if case["model"] in STRUCTURES][::100]


@pytest.mark.parametrize("case", SAMPLE, ids=called)
def test_a_sample_of_structures(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize(
    "model",
    some_fast(["such blocks inside each other", "checkpoints inside blocks", "experts in a list"]),
)
def test_blocks_whose_backward_meets_that_of_others(model: str, tmp_path: Path) -> None:
    """One slot for all of them: who is put at rest too early leaves another's weights behind."""
    default = {factor: values[0] for factor, values in FACTORS.items()}
    case = {**default, "model": model, "placement": "cpu-cpu-cpu", "budgets": "least"}
    check(case, tmp_path)


def test_a_sample_of_real_models(tmp_path: Path) -> None:
    """One, so that one process imports transformers."""
    own = [case for case in ALL if case["model"] == "Qwen3-MoE" and case["trained"] != "LoRA"]
    check(own[2], tmp_path)


def test_every_difference_is_seen() -> None:
    def outcome() -> Outcome:
        one = {"a": torch.zeros(2)}
        return Outcome([1.0, 2.0], {**one, "b": None}, dict(one), dict(one))

    assert differences(outcome(), outcome()) == []
    for kind in ("gradients", "weights", "states"):
        for name, value in (("a", -torch.zeros(2)), ("c", torch.zeros(2))):
            changed = outcome()
            getattr(changed, kind)[name] = value
            assert len(differences(outcome(), changed)) == 1
    changed = outcome()
    changed.losses[1] = 2.5
    changed.gradients["b"] = torch.zeros(2)
    assert len(differences(outcome(), changed)) == 2


SLOW = {"LoRA on parameters (PEFT's `target_parameters`, and `all-linear` on fused experts)"}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[pytest.mark.slow] * (w in SLOW)) for w in REFUSED]
)
def test_refused_by_name(what: str, tmp_path: Path) -> None:
    refusal = REFUSED[what]
    with pytest.raises(ValueError, match=refusal.named):
        offload.attach(refusal.build(), None, offload.Config(nvme_path=(str(tmp_path),)))


def test_the_table_is_of_these_cases() -> None:
    assert TABLE.read_text(encoding="utf-8") == render(ALL), "write it anew with `make parity`"
