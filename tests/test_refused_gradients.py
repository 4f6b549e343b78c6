"""Gradients that are none, or do not fit, are refused where they come, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.small import tokens
from tests.training import (
    Run,
    assert_same,
    loss_of,
    plain,
    train,
    train_alone,
    without_idle_states,
)

PLACEMENTS = [("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("device", "device", "cpu")]
each_placement = pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@each_placement
def test_a_backward_that_is_only_imitated_brings_no_gradient(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Where torch has no memory either its class says what `copy_` does: nothing."""

    def imitated(run: Run, number: int) -> None:
        given = tokens()
        if hasattr(run.optimizer, "engine"):
            with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError) as told:
                loss_of(run.model, given).backward()
                run.optimizer.step()
            assert "is a FakeTensor, with no values in memory" in str(told.value)
            run.optimizer.zero_grad()
        plain(run, number)

    ours, alone = train(placement, tmp_path, imitated, steps=2), train_alone(imitated, steps=2)
    assert_same(without_idle_states(ours), without_idle_states(alone))
