"""What docs/contract.md promises, sentence by sentence, by scripts that use the public API alone.

Bits over placements and loops stand in test_exact, test_loops, test_hf_loops and test_parity,
budgets in test_budgets, the last backward of a step in test_early_updates: the rest is here.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import offload
from offload.model.passes import Passes
from tests import training
from tests.faults import in_child
from tests.small import adamw, config, small, tokens
from tests.training import Net, Run, as_in_plain_torch, attached, fp32, plain, same_bits, some_fast

CPU = ("cpu", "cpu", "cpu")
NVME = ("nvme", "nvme", "nvme")
MIXED = ("nvme", "cpu", "device")
STREAMED = [CPU, NVME, MIXED]

placements = pytest.mark.parametrize("placement", some_fast(STREAMED, fast=2), ids="-".join)


@pytest.fixture(params=some_fast(STREAMED, fast=2), ids="-".join)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A float32 run of one step."""
    with attached(request.param, tmp_path, dtype=torch.float32) as made:
        plain(made, 0)
        yield made


def elsewhere(work: Callable[[], object]) -> list[BaseException]:
    """Run `work` on another thread to its end; what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised


# -- touching parameters and gradients -----------------------------------------------------------


def test_a_touch_gives_the_true_value(run: Run) -> None:
    """By a function of torch's, by `data`, `detach()`, in a container, and in inference mode."""
    true = {name: value.clone() for name, value in run.engine.stream_weights()}
    for name, parameter in run.model.named_parameters():
        assert same_bits(parameter.data, true[name])
        assert same_bits(torch.stack([parameter, parameter])[1].detach(), true[name])
        with torch.inference_mode():
            assert parameter.norm().item() == true[name].norm().item()


def test_an_edit_before_the_next_boundary_counts_and_is_shown(run: Run) -> None:
    weight: Any = run.model.head.weight  # type: ignore[union-attr]
    for edit in (
        lambda: weight.data.mul_(0.5),
        lambda: weight.detach().add_(1),
        lambda: weight.data.view(-1)[3:5].fill_(7),
        lambda: weight.data.numpy().__setitem__((0, 0), 3.0),
    ):
        before = weight.detach().clone()
        edit()
        shown = weight.detach().clone()
        assert not torch.equal(shown, before)
        run.loss()  # A boundary.
        assert same_bits(weight.detach(), shown)


def test_over_a_boundary_a_snapshot_keeps_what_it_showed(run: Run) -> None:
    """And is no longer the model's: neither follows it nor changes it."""
    weight: Any = run.model.head.weight  # type: ignore[union-attr]
    for held in (weight.data, weight.detach(), weight.data.view(-1)[5:]):
        shown = held.clone()
        plain(run, 1)
        assert same_bits(held, shown)
        before = weight.detach().clone()
        held.zero_()
        run.loss()
        assert same_bits(weight.detach(), before)


def averaged_weights_swapped_by_reference(run: Run, number: int) -> None:
    """As published classes for averages do it: by `p.data`, and what it was is kept aside."""
    shadow = vars(run).setdefault("shadow", {})
    plain(run, number)
    for name, parameter in run.model.named_parameters():
        shadow[name] = parameter.data * 0.1 + shadow.get(name, parameter.data) * 0.9
    backup = {}
    for name, parameter in run.model.named_parameters():
        backup[name] = parameter.data
        parameter.data = shadow[name]
    with torch.no_grad():
        run.loss()
    for name, parameter in run.model.named_parameters():
        parameter.data = backup[name]


@pytest.mark.parametrize(
    "placement", some_fast([MIXED, *STREAMED[:2], training.RESIDENT]), ids="-".join
)
def test_averaged_weights_may_be_swapped_in_and_out(placement: Any, tmp_path: Path) -> None:
    as_in_plain_torch(averaged_weights_swapped_by_reference, placement, tmp_path, **fp32())


def test_snapshots_are_bounded_and_go_with_their_last_alias(tmp_path: Path) -> None:
    with attached(MIXED, tmp_path, **fp32(exposed_memory="20KiB")) as run:
        model: Any = run.model
        array = model.blocks[0].up.weight.data.view(-1).numpy()  # 16 KiB.
        assert model.norm.weight.sum().isfinite()
        with pytest.raises(MemoryError, match=r"exposed_memory is 20\.00 KiB"):
            model.blocks[1].up.weight.sum()
        plain(run, 0)
        with pytest.raises(MemoryError, match="exposed_memory"):
            model.blocks[1].up.weight.sum()
        del array
        for parameter in model.parameters():
            assert parameter.sum().isfinite()
        plain(run, 1)


def test_a_state_dict_is_of_copies_beyond_that_and_tied_names_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = fp32(build=partial(Net, tied=True), exposed_memory="20KiB")
    with attached(NVME, tmp_path, **options) as run:
        plain(run, 0)
        state = run.model.state_dict()
        assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        for name, value in run.engine.stream_weights():
            assert same_bits(state[name], value)
        before = state["norm.weight"].clone()
        plain(run, 1)
        assert same_bits(state["norm.weight"], before)
        monkeypatch.setattr("offload.model.hooks.host_free_bytes", lambda: 1000)
        with pytest.raises(MemoryError, match=r"1000 B is free there: .*stream_weights"):
            run.model.state_dict()


def test_gradients_are_there_after_backward_and_edits_of_them_count(run: Run) -> None:
    weight: Any = run.model.blocks[1].up.weight  # type: ignore[index,union-attr]
    assert weight.grad is None
    run.loss().backward()
    first = weight.grad.clone()
    weight.grad.mul_(0.5)
    assert same_bits(weight.grad, first * 0.5)
    weight.grad = torch.ones_like(weight)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    before = run.loss()
    run.optimizer.zero_grad()
    assert weight.grad is None
    before.backward()
    assert weight.grad is not None


def test_a_gradient_in_memory_is_shown_in_place(tmp_path: Path) -> None:
    """And follows a second backward, until the step."""
    with attached(CPU, tmp_path, **fp32()) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        loss = run.loss()
        loss.backward(retain_graph=True)
        shown = weight.grad
        first = shown.clone()
        loss.backward()
        assert weight.grad is shown
        assert same_bits(shown, first + first)
        run.step()
        plain(run, 1)
        assert same_bits(shown, first + first)


# -- in use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_in_its_own_forward_and_backward_a_weight_is_read_only(verb: str, run: Run) -> None:
    block: Any = run.model.blocks[2]  # type: ignore[index,union-attr]
    before = block.up.weight.detach().clone()

    @torch.no_grad()
    def edit(*_: Any) -> None:
        block.up.weight.mul_(0.5)

    register = block.register_forward_pre_hook if verb == "forward" else block.up.bias.register_hook
    handle = register(edit)
    with pytest.raises(
        RuntimeError, match=rf"blocks\.2\.up\.weight was changed in place in the {verb}"
    ):
        run.loss().backward()
    handle.remove()
    run.optimizer.zero_grad()
    with torch.no_grad():
        block.up.weight.copy_(before)  # What became of the change is not said.
    plain(run, 1)


# -- threads, processes, exceptions --------------------------------------------------------------


@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_during_a_pass_another_thread_is_refused(verb: str, run: Run) -> None:
    model: Any = run.model
    spare, told = run.loss(), list[BaseException]()
    calls: list[Callable[[], object]] = [
        spare.backward,
        lambda: model.head.weight.detach(),
        lambda: model.head.weight.grad,
        lambda: model(tokens()),
        lambda: model.blocks[0](torch.ones(1, 32)),
        run.optimizer.step,
        run.optimizer.zero_grad,
        model.state_dict,
    ]

    def intrude(*_: Any) -> None:
        for call in calls:
            told.extend(elsewhere(call))

    if verb == "forward":
        handle = model.blocks[1].register_forward_hook(intrude)
        loss = run.loss()
    else:
        loss = run.loss()
        handle = model.blocks[1].up.weight.register_hook(intrude)
    loss.backward()
    handle.remove()
    assert len(told) == len(calls)
    for error in told:
        assert isinstance(error, RuntimeError)
        assert "another thread was inside its forward or backward" in str(error)
    run.step()
    plain(run, 1)


def beside(run: Run, number: int) -> None:
    """A step, on another thread the second time; then one that generates and reads."""
    if number == 1:
        assert not elsewhere(lambda: plain(run, number))
    else:
        plain(run, number)

    def generate() -> None:
        with torch.no_grad():
            run.extra.append(run.model(tokens()).sum().item())
            run.extra.append(run.model.head.weight.sum().item())  # type: ignore

    assert not elsewhere(generate)


def test_between_passes_another_thread_may_read_generate_and_train(tmp_path: Path) -> None:
    as_in_plain_torch(beside, NVME, tmp_path, **fp32())


class Tokens(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return tokens(index)[0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_workers_of_a_loader_that_fork_change_no_bit(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        torch.manual_seed(3)
        with attached(MIXED, tmp_path) as run:
            context = "fork" if workers else None
            for batch in DataLoader(
                Tokens(), 2, num_workers=workers, multiprocessing_context=context
            ):
                loss = training.loss_of(run.model, batch)
                loss.backward()
                run.step()
                run.losses.append(loss.item())
            found.append((run.losses, copy.deepcopy(run.model.state_dict())))
    assert found[0][0] == found[1][0]
    assert all(same_bits(value, found[1][1][name]) for name, value in found[0][1].items())


def test_a_forked_process_that_touches_the_model_is_told(tmp_path: Path) -> None:
    """And takes nothing along when it ends."""
    with attached(MIXED, tmp_path) as run:
        plain(run, 0)
        weight: Any = run.model.head.weight  # type: ignore[union-attr]

        def touch() -> None:
            for work in (weight.sum, lambda: weight.grad, run.loss, run.optimizer.step):
                with pytest.raises(RuntimeError, match="forked process touched an offloaded"):
                    work()
            assert weight.shape == (50, 32)
            run.engine.close()

        assert in_child(touch) == 0
        plain(run, 1)


def pressed(*_: Any) -> None:
    """What Ctrl-C raises, wherever the user's own code is."""
    raise KeyboardInterrupt


def interrupted_in_forward(run: Run, number: int) -> None:
    handle = run.model.blocks[3].register_forward_pre_hook(pressed)  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        run.loss()
    handle.remove()


def interrupted_in_backward(run: Run, number: int) -> None:
    loss = run.loss()
    hook = run.model.blocks[1].down.weight.register_hook(pressed)  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    hook.remove()
    run.optimizer.zero_grad()


def after_an_interrupt(where: Callable[[Run, int], None], run: Run, number: int) -> None:
    """Save, evaluate, edit, train on: whatever a notebook does next."""
    where(run, number)
    next_cell = number % 3
    if next_cell == 0:
        run.extra += [value.float().sum().item() for value in run.model.state_dict().values()]
    elif next_cell == 1:
        with torch.no_grad():
            run.loss()
    else:
        run.model.blocks[2].up.weight.data.mul_(0.5)  # type: ignore[index,union-attr]
    plain(run, number)


@placements
@pytest.mark.parametrize("where", [interrupted_in_forward, interrupted_in_backward])
def test_ctrl_c_in_the_users_code_leaves_a_usable_engine(
    where: Any, placement: Any, tmp_path: Path
) -> None:
    as_in_plain_torch(partial(after_an_interrupt, where), placement, tmp_path, **fp32())


def test_an_interrupt_inside_the_engine_is_told_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(CPU, tmp_path) as run:
        plain(run, 0)
        monkeypatch.setattr(Passes, "take", pressed)
        with pytest.raises(KeyboardInterrupt):
            run.loss()
        monkeypatch.undo()
        for call in (run.loss, run.optimizer.step, run.model.state_dict):
            with pytest.raises(offload.EngineError, match="interrupted the offload engine"):
                call()
    with attached(CPU, tmp_path) as run:
        plain(run, 0)


# -- refused by name -----------------------------------------------------------------------------


def test_a_graph_of_the_backward_is_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="create_graph=True"):
        run.loss().backward(create_graph=True)
    run.optimizer.zero_grad()
    plain(run, 1)


def test_a_step_in_a_hook_of_backward_is_refused(run: Run) -> None:
    weight: Any = run.model.head.weight  # type: ignore[union-attr]
    calls = run.optimizer.step, run.optimizer.zero_grad, lambda: setattr(weight, "grad", None)
    for call in calls:
        handle = weight.register_hook(lambda _, call=call: call())
        with pytest.raises(RuntimeError, match="in a hook, inside a backward"):
            run.loss().backward()
        handle.remove()
        run.optimizer.zero_grad()
    plain(run, 1)


def test_a_parameter_added_after_attach_is_refused_at_the_step(run: Run) -> None:
    model: Any = run.model
    model.extra = nn.Linear(2, 2)
    run.loss().backward()
    with pytest.raises(RuntimeError, match=r"other parameters than at attach \(extra\.weight"):
        run.optimizer.step()
    del model.extra
    run.step()
    plain(run, 1)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_that_reduce_gradients_themselves_are_refused(tmp_path: Path, one_rank: None) -> None:
    wrapped = DistributedDataParallel(small())
    with pytest.raises(ValueError, match=r"is a DistributedDataParallel.*without it"):
        offload.attach(wrapped, adamw(wrapped), config(CPU, tmp_path))
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(CPU, tmp_path))
    with optimizer.engine, pytest.raises(RuntimeError, match="called by DistributedDataParallel"):
        DistributedDataParallel(model)(tokens())


# -- detach --------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [training.RESIDENT, *STREAMED], ids="-".join)
def test_detach_gives_plain_parameters_and_the_users_own_optimizer_back(
    placement: Any, tmp_path: Path
) -> None:
    ours, theirs = small(), small()
    mine, other = training.alone(adamw(ours)), training.alone(adamw(theirs))
    _, optimizer = offload.attach(ours, mine, config(placement, tmp_path))
    for step in range(4):
        if step == 2:
            assert offload.detach(ours) == (ours, mine)
            assert all(type(p) is nn.Parameter for p in ours.parameters())
        for model, stepped in ((ours, optimizer if step < 2 else mine), (theirs, other)):
            training.loss_of(model, tokens(step)).backward()
            stepped.step()
            stepped.zero_grad()
    for one, wanted in zip(ours.parameters(), theirs.parameters()):
        assert same_bits(one, wanted)
