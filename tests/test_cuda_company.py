"""What only an accelerator can show of an engine in company: others, forks, graphs, a scaler."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import offload
from offload.program.ops import Op, Verb
from tests import training
from tests.faults import in_child
from tests.test_attachment import fail_half_way
from tests.test_contract import Tokens
from tests.test_cuda import CPU_TIER, MIXED, device, needs_cuda
from tests.training import RESIDENT, assert_same, attached, batch, loss_of, plain, result_of, train

pytestmark = needs_cuda


def test_two_engines_on_one_device(tmp_path: Path) -> None:
    expected = train(CPU_TIER, tmp_path), train(MIXED, tmp_path)
    with attached(CPU_TIER, tmp_path) as one, attached(MIXED, tmp_path) as other:
        for number in range(3):
            for run in (one, other):
                plain(run, number)
        for run, alone in zip((one, other), expected):
            assert_same(result_of(run), alone)


def test_a_fork_beside_a_registered_arena(tmp_path: Path) -> None:
    """Whose child collects garbage: events may be in it, of a device that it cannot reach."""
    expected = train(MIXED, tmp_path)
    with attached(MIXED, tmp_path) as run:
        torch.manual_seed(2)
        for number in range(3):
            assert in_child(gc.collect) == 0
            plain(run, number)
        assert run.engine.runner.memory.arenas["cpu"].tensor.is_pinned()
        assert_same(result_of(run), expected)


def test_forked_workers_change_no_bit(tmp_path: Path) -> None:
    found = []
    for workers in (0, 2):
        with attached(MIXED, tmp_path) as run:
            context = "fork" if workers else None
            for tokens in DataLoader(
                Tokens(), 2, num_workers=workers, multiprocessing_context=context
            ):
                loss_of(run.model, tokens).backward()
                run.step()
            found.append(result_of(run))
    assert_same(*found)


def out_of_memory(*_: Any) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=device().torch_device)


def in_forward(block: nn.Module) -> Any:
    return block.register_forward_hook(out_of_memory)


def in_backward(block: nn.Module) -> Any:
    return block.register_full_backward_hook(out_of_memory)


@pytest.mark.parametrize("where", [in_forward, in_backward])
@pytest.mark.parametrize("placement", [CPU_TIER, MIXED])
def test_running_out_of_memory_leaves_the_engine_usable(
    where: Callable[[nn.Module], Any], placement: tuple[str, str, str], tmp_path: Path
) -> None:
    expected = train(placement, tmp_path)
    with attached(placement, tmp_path) as run:
        torch.manual_seed(2)
        for number in range(3):
            state = run.generator.get_state()
            handle = where(run.model.blocks[2])  # type: ignore[index,arg-type]
            with pytest.raises(torch.OutOfMemoryError):
                loss_of(run.model, batch(run.generator)).backward()
            handle.remove()
            run.optimizer.zero_grad()
            run.generator.set_state(state)
            plain(run, number)
        assert_same(result_of(run), expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_an_attached_model_is_not_captured_and_goes_on(tmp_path: Path) -> None:
    expected = train(CPU_TIER, tmp_path, steps=2)
    tokens = batch(torch.Generator().manual_seed(3)).to(device().torch_device)
    with attached(CPU_TIER, tmp_path) as run:
        torch.manual_seed(2)
        for number in range(2):
            run.engine.settle()
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(RuntimeError, match="Capture nothing"), torch.cuda.graph(graph):
                run.model(tokens)
            plain(run, number)
        assert_same(result_of(run), expected)


def test_a_graph_of_another_model_is_captured_while_lanes_work(tmp_path: Path) -> None:
    def slow(op: Op, since: float) -> float:
        time.sleep(0.02 * (op.verb is Verb.UPDATE))
        return 0.0

    expected = train(CPU_TIER, tmp_path, steps=3)
    one = torch.ones(4, device=device().torch_device)
    with attached(CPU_TIER, tmp_path, pace=slow) as run:
        torch.manual_seed(2)
        for number in range(3):
            plain(run, number)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                two = one + one
            graph.replay()
            assert two.sum().item() == 8
        assert_same(result_of(run), expected)


def test_the_model_and_its_states_come_back_to_the_device(tmp_path: Path) -> None:
    with attached(CPU_TIER, tmp_path) as run:
        plain(run, 0)
        _, original = offload.detach(run.model)
        assert original is not None
        for parameter in run.model.parameters():
            assert parameter.device == device().torch_device
            state = original.state[parameter]
            assert {x.device for name, x in state.items() if name != "step"} == {parameter.device}
        original.step()


@pytest.mark.parametrize("placement", [CPU_TIER, RESIDENT], ids="-".join)
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_an_attach_that_fails_moves_all_back(
    on: str, placement: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_half_way(placement, on, tmp_path, monkeypatch)


# -- a scaler, a second device ----------------------------------------------------------------


@pytest.mark.parametrize("placement", [CPU_TIER, RESIDENT])
def test_a_scaler_has_its_numbers_before_it_uses_them(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """They come from the device, which is late; its gradients lie in CPU memory."""
    with attached(placement, tmp_path, dtype=torch.float32) as run:
        scaler = torch.amp.GradScaler(device().torch_device.type, init_scale=2.0**10)
        tokens = batch(run.generator)
        parameters = list(run.model.parameters())

        def gradients() -> list[torch.Tensor]:
            found: list[Any] = [parameter.grad for parameter in parameters]
            return [gradient.detach().cpu().clone() for gradient in found]

        loss_of(run.model, tokens).backward()
        expected = gradients()
        for overflows in (False, True):
            run.optimizer.zero_grad()
            scaler.scale(loss_of(run.model, tokens)).backward()
            if overflows:
                gradient: Any = parameters[0].grad
                gradient.view(-1)[0] = float("inf")
            torch.cuda._sleep(500_000_000)
            scaler.unscale_(run.optimizer)
            if not overflows:
                assert all(map(torch.equal, gradients(), expected))
                scaler.update()
        scaler.step(run.optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        run.engine.settle()
        assert run.engine.steps == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second device")
@pytest.mark.parametrize("placement", [CPU_TIER, RESIDENT, MIXED])
def test_the_second_device_alone_is_used(placement: tuple[str, str, str], tmp_path: Path) -> None:
    """Also where the one that calls, or the one that closes, has the first as its current one."""
    expected = train(placement, tmp_path)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    with torch.cuda.device(1):
        run_here = attached(placement, tmp_path)
        run = run_here.__enter__()
    found = training.trained(run)
    assert {value.device.index for value in found.weights.values()} == {1}
    closing = threading.Thread(target=run.engine.close)
    closing.start()
    closing.join()
    run_here.__exit__(None, None, None)
    assert torch.cuda.memory_allocated(0) == before
    assert_same(found, expected)
