"""torch.distributed.checkpoint of an attached model and optimizer, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.training import Net, Run, assert_same, attached, plain, result_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)

BEFORE, AFTER = ("nvme", "cpu", "nvme"), ("device", "cpu", "cpu")


def stepped(run: Run, count: int) -> Any:
    for number in range(count):
        plain(run, number)
    return result_of(run)


def by_number(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}


def by_name(run: Run) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(run.model, run.optimizer)))


def take_by_number(run: Run, state: dict[str, Any]) -> None:
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optim"])


def take_by_name(run: Run, state: dict[str, Any]) -> None:
    set_state_dict(
        run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


@pytest.mark.parametrize(
    ("give", "take", "steps", "states"),
    [
        # It loads into what is there, as with any optimizer.
        (by_number, take_by_number, 1, "exact"),
        (by_number, take_by_number, 1, "compact"),
        (by_name, take_by_name, 1, "exact"),
        (by_name, take_by_name, 0, "exact"),
    ],
)
def test_a_run_goes_on_with_the_same_bits(
    give: Any, take: Any, steps: int, states: str, tmp_path: Path
) -> None:
    options: Any = {"build": lambda: Net(tied=True), "states": states}
    with attached(BEFORE, tmp_path, **options) as run:
        stepped(run, 2)
        dcp.save(give(run), checkpoint_id=tmp_path / "saved")
        at = run.generator.get_state()
        run.losses.clear()
        expected = stepped(run, 2)
    with attached(AFTER, tmp_path, **options) as run:
        stepped(run, steps)
        state = give(run)
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        take(run, state)
        run.generator.set_state(at)
        run.losses.clear()
        assert_same(stepped(run, 2), expected)


def test_plain_torch_reads_it_and_the_other_way(tmp_path: Path) -> None:
    """In float32, in which both have the same states; plain torch rounds an update otherwise."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = Run(model, optimizer, torch.Generator().manual_seed(7))
    with attached(BEFORE, tmp_path, dtype=torch.float32) as run:
        for one, other, name in ((run, alone, "ours"), (alone, run, "theirs")):
            stepped(one, 2)
            dcp.save(by_name(one), checkpoint_id=tmp_path / name)
            state = by_name(other)
            dcp.load(state, checkpoint_id=tmp_path / name)
            take_by_name(other, state)
            one.losses.clear()
            other.losses.clear()
            assert_same(result_of(one), result_of(other))


def test_weights_in_bfloat16_are_read_by_plain_torch(tmp_path: Path) -> None:
    with attached(BEFORE, tmp_path) as run:
        stepped(run, 2)
        dcp.save({"model": run.model.state_dict()}, checkpoint_id=tmp_path / "saved")
        expected = run.model.state_dict()
    state = {"model": Net().bfloat16().state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert all(torch.equal(state["model"][name], one.cpu()) for name, one in expected.items())
