"""Updates on an accelerator: their temporaries lie in the workspace, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cpu_adam import FORMATS, choice, native, reference
from cpu_adam.formats import scratch_bytes, squares_bytes
from offload.planning.machine import Machine
from tests.adam_states import State, assert_same_state, hyper_of
from tests.training import RESIDENT, assert_same, attached, train, trained

SMALL_BYTES = 256
"""Scalars of a step are no temporaries of its elements."""

ACCELERATOR = Machine(device_bytes=1 << 30, cpu_bytes=1 << 30, nvme_bytes=1 << 30)
"""What a plan is made for; what runs it is the CPU."""


class Made(TorchDispatchMode):
    """The sizes of all tensors that ops make in memory that none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr()
            for x in (*args, *(kwargs or {}).values())
            if isinstance(x, torch.Tensor)
        }
        for x in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.sizes.append((str(func), x.untyped_storage().nbytes()))
        return found


def bytes_for(name: str, elements: int) -> int:
    return scratch_bytes(elements, coded=FORMATS[name].coded)


@pytest.fixture
def as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a CPU: there nobody looks whether there is a NaN."""
    monkeypatch.setattr(reference, "_may_hold_nan", lambda x: True)


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("elements", [1, 127, 128, 1000, 70_001])
@pytest.mark.parametrize("name", FORMATS)
def test_a_workspace_changes_no_bit_whatever_lies_in_it(name: str, elements: int) -> None:
    here = State(name, elements, torch.bfloat16)
    there = here.clone()
    workspace = torch.full((bytes_for(name, elements),), 255, dtype=torch.uint8)
    for step in (1, 2):
        here.update(reference, hyper_of(name), step=step, gradient_scale=0.3)
        there.update(reference, hyper_of(name), step=step, gradient_scale=0.3, workspace=workspace)
    assert_same_state(there, here)


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_else_is_taken_for_temporaries(name: str, dtype: torch.dtype) -> None:
    state = State(name, 5000, dtype)
    workspace = torch.empty(bytes_for(name, 5000), dtype=torch.uint8)
    with Made() as made:
        state.update(reference, hyper_of(name), step=2, gradient_scale=0.3, workspace=workspace)
    assert {size for _, size in made.sizes if size > SMALL_BYTES} == set(), made.sizes
    with Made() as made:
        state.update(reference, hyper_of(name), step=3)
    assert [size for _, size in made.sizes if size > SMALL_BYTES] == [bytes_for(name, 5000)]


@pytest.mark.parametrize("elements", [1, 2, 3, 127, 513, 1000, 1024, 1025, 70_001])
def test_squares_are_summed_in_a_workspace_no_larger_than_that_of_the_update(elements: int) -> None:
    x = torch.randn(elements).bfloat16()
    size = squares_bytes(elements)
    assert size <= scratch_bytes(elements)
    workspace = torch.full((scratch_bytes(elements),), 255, dtype=torch.uint8)
    with Made() as made:
        found = reference.total(reference.square_sums(x, 0, workspace))
    assert {size for _, size in made.sizes if size > SMALL_BYTES} == set(), made.sizes
    assert found == reference.total(reference.square_sums(x)) == native.sum_of_squares(x)
    assert workspace[size:].eq(255).all()


@pytest.mark.usefixtures("as_elsewhere")
@pytest.mark.parametrize("states", ["exact", "compact"])
def test_the_engine_gives_updates_on_the_device_the_workspace_of_its_plan(
    states: str, tmp_path: Path
) -> None:
    expected = train(RESIDENT, tmp_path, states=states)
    options: Any = {"machine": ACCELERATOR, "states": states}
    with choice.forced("python"), attached(RESIDENT, tmp_path, **options) as run:
        (room,) = (b for place, b in run.engine.plan.slots.items() if place.use == "workspace")
        memory = run.engine.runner.memory.arenas["device"].view(room)
        memory.fill_(1)
        assert_same(trained(run), expected)
        assert not memory.eq(1).all()
        run.loss().backward()
        with Made() as made:
            run.optimizer.step()
        assert {size for _, size in made.sizes if size > SMALL_BYTES} == set(), made.sizes
    with attached(RESIDENT, tmp_path) as run:
        assert not any(place.use == "workspace" for place in run.engine.plan.slots)


def test_norms_of_gradients_on_the_device_have_a_workspace_of_their_own(tmp_path: Path) -> None:
    on_device = ("cpu", "device", "cpu")
    with attached(on_device, tmp_path, machine=ACCELERATOR, max_grad_norm=0.1) as run:
        plan = run.engine.plan
        (room,) = (b for place, b in plan.slots.items() if place.use == "workspace")
        chunks = [chunk.elements for unit in plan.profile.units for chunk in unit.chunks]
        assert room.bytes >= squares_bytes(max(chunks)) > room.bytes - 4096
    for placement, most in ((("cpu", "cpu", "cpu"), 0.1), (on_device, None)):
        with attached(placement, tmp_path, machine=ACCELERATOR, max_grad_norm=most) as run:
            assert not any(place.use == "workspace" for place in run.engine.plan.slots)
