"""Copies of values that are touched: when they go home, and what is read and written for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.planning.profile import CHUNK_ELEMENTS
from offload.program.ops import Op, Value, Verb
from offload.runtime.store import Store
from tests import training
from tests.training import RESIDENT, Net, Run, assert_same, attached, plain, result_of, same_bits

NVME = ("nvme", "nvme", "nvme")


def test_edits_put_home_to_make_room_are_what_the_next_forward_uses(tmp_path: Path) -> None:
    """The slot of a unit that is alone in it holds what was there before the edit."""
    outputs = []
    for placement in (RESIDENT, ("cpu", "cpu", "cpu"), ("nvme", "cpu", "cpu")):
        with (
            attached(placement, tmp_path, **training.fp32(exposed_memory=20_000)) as run,
            torch.no_grad(),
        ):
            tokens = training.batch(run.generator)
            run.model(tokens)
            for parameter in run.model.parameters():
                parameter.data.mul_(2)
            outputs.append(run.model(tokens))
    assert all(same_bits(one, outputs[0]) for one in outputs)


def test_zeros_assigned_where_no_gradient_was_are_one() -> None:
    """On nvme nothing is there to be equal to them."""
    found = []
    for home in ("cpu", "nvme"):
        with TemporaryDirectory() as folder, attached(("cpu", home, "cpu"), Path(folder)) as run:
            for parameter in run.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            run.loss().backward()
            run.step()
            plain(run, 1)
            found.append(result_of(run))
    assert_same(*found)


def test_a_gradient_edited_after_a_step_is_not_what_its_update_takes() -> None:
    """However late the update is."""

    def late(op: Op, since: float) -> float:
        return since + 0.05 * (op.verb is Verb.UPDATE)

    found = []
    for waits in (True, False):
        with attached(("cpu", "cpu", "cpu"), (), pace=late) as run:
            run.loss().backward()
            run.optimizer.step()
            if waits:
                run.engine.settle()
            for parameter in run.model.parameters():
                parameter.grad.fill_(7.0)
            run.engine.snapshots.boundary()
            found.append(result_of(run))
    assert_same(*found)


def test_snapshots_that_are_held_make_no_use_a_miss(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        plain(run, 0)
        kept = [p.data for p in run.model.parameters()]
        assert run.engine.snapshots.bytes == sum(one.nbytes for one in kept)
        plain(run, 1)
        misses = run.engine.passes.misses
        plain(run, 2)
        assert run.engine.passes.misses == misses
        assert run.engine.snapshots.bytes == sum(one.nbytes for one in kept)
        del kept
        assert run.engine.snapshots.bytes == 0


# -- a pass over all parameters reads every chunk on nvme once, and always as it is now ------------


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Decay for matrices only, so that groups take turns within every chunk."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    wide = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": wide}], lr=1e-2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Everything on nvme, after a step."""
    build = lambda: Net(layers=2)  # noqa: E731
    with attached(NVME, tmp_path, build=build, optimizer=two_groups) as made:
        plain(made, 0)
        made.engine.settle()
        yield made


def stored_bytes(run: Run, kind: str) -> int:
    """Of all values of a kind."""
    return sum(sum(sizes) for (of, _), sizes in run.engine.plan.file.items() if of == kind)


def moved(run: Run, work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `work` reads and writes."""
    store = run.engine.runner.store
    assert store is not None
    read, written = store.chunks.bytes_read, store.chunks.bytes_written
    work()
    return store.chunks.bytes_read - read, store.chunks.bytes_written - written


LOOKS: dict[str, tuple[str, Callable[[Run], object]]] = {
    "state_dict": ("state", lambda run: run.optimizer.state_dict()),
    "items": ("state", lambda run: [sorted(one) for _, one in run.optimizer.state.items()]),
    "stream": ("weight", lambda run: list(run.engine.stream_weights())),
    "model": ("weight", lambda run: run.model.state_dict()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_pass_reads_every_chunk_once(look: str, run: Run) -> None:
    kind, work = LOOKS[look]
    assert moved(run, lambda: work(run)) == (stored_bytes(run, kind), 0)


def test_a_state_dict_reads_a_parameter_of_several_chunks_once(tmp_path: Path) -> None:
    """And has what a user has written to a copy, however that was told."""
    layer = nn.Linear(1024, 3 * CHUNK_ELEMENTS // 1024, bias=False)
    build = partial(nn.Sequential, layer)
    with attached(NVME, tmp_path, build=build, cpu_memory="96MiB") as run:
        assert moved(run, run.model.state_dict) == (stored_bytes(run, "weight"), 0)
        run.model[0].weight.data.view(torch.int16).view(-1).numpy()[:2] = 0x3F80
        found = run.model.state_dict(prefix="a.")["a.0.weight"]
        assert found.view(-1)[:2].tolist() == [1, 1]
        assert run.model.state_dict()["0.weight"].view(-1)[:2].tolist() == [1, 1]


def test_states_are_loaded_by_one_write_a_chunk_and_no_read(run: Run) -> None:
    saved = run.optimizer.state_dict()
    work = lambda: run.optimizer.load_state_dict(saved)  # noqa: E731
    assert moved(run, work) == (0, stored_bytes(run, "state"))
    again = run.optimizer.state_dict()
    assert again["state"].keys() == saved["state"].keys()
    for number, state in saved["state"].items():
        assert all(same_bits(state[name], again["state"][number][name]) for name in state)


def test_edits_of_weights_are_put_home_by_one_write_a_chunk(run: Run) -> None:
    other = {name: torch.full_like(one, 0.5) for name, one in run.model.state_dict().items()}
    run.model.load_state_dict(other)
    read, written = moved(run, run.engine.snapshots.boundary)
    weights = stored_bytes(run, "weight")
    assert (read, written) == (2 * weights, weights)  # Compared, and read where they are put.
    assert all((value == 0.5).all() for _, value in run.engine.stream_weights())


def test_what_is_cached_for_the_next_read_is_never_old(run: Run) -> None:
    """Between two looks at one chunk: an assigned state, a step, an edit of a weight."""
    one, other = list[Any](run.model.parameters())[1:3]
    state = run.optimizer.state[one]
    run.optimizer.state[other] = {**state, "exp_avg": torch.full(other.shape, 3.0)} | {
        "exp_avg_sq": torch.ones(other.shape),
        "residue": torch.zeros(other.shape, dtype=torch.int16),
    }
    assert (run.optimizer.state[other]["exp_avg"] == 3.0).all()
    assert run.optimizer.state[one]["step"] == 1
    plain(run, 1)
    assert run.optimizer.state[other]["step"] == 2
    assert not (run.optimizer.state[other]["exp_avg"] == 3.0).any()
    first = one.detach().clone()
    plain(run, 2)
    assert not same_bits(other.detach().clone(), torch.zeros_like(other))
    assert not same_bits(one.detach(), first)


def test_a_part_of_a_chunk_leaves_the_rest_as_it_is(run: Run) -> None:
    before = run.optimizer.state_dict()["state"]
    del run.optimizer.state[list(run.model.parameters())[1]]
    after = run.optimizer.state_dict()["state"]
    assert len(after) == len(before) - 1
    for number, state in after.items():
        assert all(same_bits(state[name], before[number][name]) for name in state)


def test_states_that_an_optimizer_brings_are_written_once(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net(layers=2).bfloat16()
    mine = two_groups(model)
    model(torch.arange(8).view(1, 8)).float().sum().backward()
    mine.step()
    written: list[Value] = []
    write = Store.write

    def noted(self: Store, value: Value, *given: Any) -> None:
        written.append(value)
        write(self, value, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "write", noted)
        _, optimizer = offload.attach(model, mine, training.config_of(NVME, tmp_path))
    with optimizer.engine:
        states = [one for one in written if one.kind == "state"]
        assert len(states) == 2 * len(set(states))  # Zeros first, then what came along.
