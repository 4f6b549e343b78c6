"""What only an accelerator can show: run with `pytest -m cuda` on a machine that has one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from cpu_adam import FORMATS, native
from cpu_adam.formats import squares_bytes
from cpu_adam.rules import square_root
from offload.model.engine import Engine
from offload.planning.layout import allocator_bytes
from offload.runtime import device as driver
from offload.runtime.device import Accelerator, PinError, compute_device
from offload.runtime.memory import host_tensor
from tests import training
from tests.adam_states import VARIANTS, State, hyper_of
from tests.adam_states import assert_same as assert_same_numbers
from tests.training import RESIDENT, Net, Run, assert_same, attached, batch, loss_of, plain, train

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytestmark = needs_cuda

CPU_TIER = ("cpu", "cpu", "cpu")
MIXED = ("nvme", "cpu", "nvme")
SLACK_BYTES = 8 << 20
"""Of the device, for what is no value: stand-ins, factors of a step, the allocator's blocks."""


def device() -> Accelerator:
    found = compute_device()
    assert isinstance(found, Accelerator)
    return found


def tied() -> Net:
    return Net(tied=True)


def accumulating(run: Run, number: int) -> None:
    """Two micro-batches, without a look at the loss."""
    for _ in range(2):
        loss_of(run.model, batch(run.generator)).backward()
    run.step()


# -- bits -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> training.Result:
    return train(RESIDENT, tmp_path_factory.mktemp("resident"), accumulating, build=tied)


@pytest.mark.parametrize("placement", training.ALL_PLACEMENTS, ids="-".join)
def test_tied_weights_and_accumulation_in_every_placement(
    placement: tuple[str, str, str], resident: training.Result, tmp_path: Path
) -> None:
    assert_same(train(placement, tmp_path, accumulating, build=tied), resident)


def test_gradients_are_those_of_plain_torch(tmp_path: Path) -> None:
    with attached(CPU_TIER, tmp_path, build=tied) as run:
        torch.manual_seed(1)
        model = tied().to(torch.bfloat16).to(device().torch_device)
        tokens = batch(torch.Generator().manual_seed(3))
        for one in (run.model, model):
            loss_of(one, tokens).backward()
        ours, theirs = dict(run.model.named_parameters()), dict(model.named_parameters())
        for name, parameter in theirs.items():
            assert parameter.grad is not None
            found: Any = ours[name].grad
            assert torch.equal(found, parameter.grad.cpu()), name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_update_on_the_device_is_that_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    elements = (1 << 20) + 128 * 3 + 5
    for variant, changes in enumerate(VARIANTS[FORMATS[name].rule]):
        here = State(name, elements, dtype, seed=variant)
        there = here.clone()
        on = device().torch_device
        there.weight, there.gradient = there.weight.to(on), there.gradient.to(on)
        there.slots = {slot: x.to(on) for slot, x in there.slots.items()}
        by = hyper_of(name, **changes)
        for step in (1, 7):
            here.update(native, by, step=step, gradient_scale=0.37)
            there.update(native, by, step=step, gradient_scale=0.37)
        assert_same_numbers(there.weight.cpu(), here.weight)
        for slot, x in here.slots.items():
            assert_same_numbers(there.slots[slot].cpu(), x)


def test_sums_on_the_device_are_those_on_the_cpu() -> None:
    on = device().torch_device
    for dtype in (torch.bfloat16, torch.float32):
        x, y = (
            (torch.randn(3, 5_000_001) * 10.0 ** torch.randint(-9, 3, (3, 1)))
            .to(dtype)
            .split(1)[:2]
        )
        workspace = torch.full((squares_bytes(x.numel()),), 255, dtype=torch.uint8, device=on)
        for given in (None, workspace):
            assert native.square_sums(x.to(on), 3, given) == native.square_sums(x, 3)
        into = y.to(on)
        native.accumulate(into, x.to(on))
        native.accumulate(y, x)
        assert torch.equal(into.cpu(), y)


def test_the_root_on_the_device_is_correctly_rounded() -> None:
    bits = torch.randint(0, 0x7F800000, (1 << 22,), dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 1e-45, 1.0, float("inf")])])
    there = x.to(device().torch_device)
    wide = torch.empty_like(there, dtype=torch.float64)
    found = square_root(there, wide, torch.empty_like(there)).cpu()
    assert torch.equal(found, torch.from_numpy(np.sqrt(x.numpy())))


# -- waiting ----------------------------------------------------------------------------------


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Torch raises where it lets the host wait for the device; events are no such places."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize("placement", [CPU_TIER, RESIDENT, ("cpu", "device", "cpu"), MIXED])
def test_hooks_and_lanes_let_nobody_wait_in_hiding(
    placement: tuple[str, str, str], states: str, tmp_path: Path
) -> None:
    on = device().torch_device
    tokens = batch(torch.Generator().manual_seed(3)).to(on)
    with attached(placement, tmp_path, states=states) as run:
        model = Net().to(torch.bfloat16).to(on)
        for _ in range(2):
            with no_synchronisation():  # First of a model that we have nothing to do with.
                loss_of(model, tokens).backward()
            with no_synchronisation():
                loss_of(run.model, tokens).backward()
                run.step()
        run.engine.settle()


def test_a_wait_for_the_device_is_booked_on_compute(tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path) as run:
        plain(run, 0)
        run.engine.settle()
        torch.cuda.synchronize()
        before = run.engine.report().lanes["compute"].exposed_s
        loss_of(run.model, batch(run.generator)).backward()
        torch.cuda._sleep(1_000_000_000)
        run.step()
        since = time.perf_counter()
        run.engine.settle()
        took = time.perf_counter() - since
        booked = run.engine.report().lanes["compute"].exposed_s - before
    assert took > 0.1
    assert booked > 0.9 * took


def test_waiting_for_the_device_spins_no_core() -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    since, spent = time.perf_counter(), time.thread_time()
    device().drain()
    took = time.perf_counter() - since
    assert took > 0.2
    assert time.thread_time() - spent < 0.3 * took


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_of_residents_waits_for_their_norm_alone(clip: float | None, tmp_path: Path) -> None:
    with attached(RESIDENT, tmp_path, max_grad_norm=clip) as run:
        plain(run, 0)  # The first of all loads what later ones have.
        loss_of(run.model, batch(run.generator)).backward()
        torch.cuda.synchronize()
        if clip is None:
            torch.cuda._sleep(2_000_000_000)
        run.optimizer.step()
        if clip is None:
            assert not torch.cuda.current_stream().query()
        run.engine.settle()
        assert torch.cuda.current_stream().query()


def test_hooks_run_on_autograds_thread_and_the_streams_of_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[threading.Thread, Any]] = []
    collect = Engine.collect

    def spy(*args: Any) -> None:
        seen.append((threading.current_thread(), torch.cuda.current_stream()))
        collect(*args)

    monkeypatch.setattr(Engine, "collect", spy)
    side = torch.cuda.Stream()

    def on_the_side(run: Run, number: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            accumulating(run, number)

    expected = train(CPU_TIER, tmp_path, accumulating)
    assert seen
    assert all(thread is not threading.main_thread() for thread, _ in seen)
    assert {stream for _, stream in seen} == {torch.cuda.current_stream()}
    seen.clear()
    assert_same(train(CPU_TIER, tmp_path, on_the_side), expected)
    assert {stream for _, stream in seen} == {side}


# -- memory -----------------------------------------------------------------------------------


def test_exactly_the_arena_is_pinned_until_the_end(tmp_path: Path) -> None:
    with attached(CPU_TIER, tmp_path) as run:
        memory = run.engine.runner.memory
        arena = memory.arenas["cpu"]
        assert arena.notices == []
        assert arena.pinned_bytes == arena.bytes == run.engine.plan.taken_bytes("cpu")
        tensor = arena.tensor
        assert tensor.is_pinned()
        assert tensor[-4096:].is_pinned()
        plain(run, 0)
    assert not tensor.is_pinned()


@pytest.mark.parametrize("piece", [1 << 16, 1 << 18])
def test_registration_in_many_pieces(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(CPU_TIER, tmp_path)
    monkeypatch.setattr("offload.runtime.memory.PIN_BYTES_MAX", piece)
    assert_same(train(CPU_TIER, tmp_path), expected)


def test_a_real_refusal_is_told_and_leaves_nothing_pending() -> None:
    on = device()
    memory = host_tensor(1 << 20)
    on.driver.pin(memory.data_ptr(), memory.nbytes)
    with pytest.raises(PinError, match="cudaHostRegister"):
        on.driver.pin(memory.data_ptr(), memory.nbytes)
    torch.ones(8, device=on.torch_device).add_(1)  # Would find an error left behind.
    torch.cuda.synchronize()
    on.driver.unpin(memory.data_ptr())
    on.driver.unpin(memory.data_ptr())
    torch.ones(8, device=on.torch_device).add_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("fail_at", [1, 2])
def test_pageable_memory_trains_to_the_same_bits(
    fail_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(MIXED, tmp_path)
    monkeypatch.setattr("offload.runtime.memory.PIN_BYTES_MAX", 1 << 16)
    calls = []
    pin = driver.Accelerator.pin

    def failing(self: Any, address: int, size: int) -> None:
        calls.append(address)
        if len(calls) == fail_at:
            raise PinError("injected")
        pin(self, address, size)

    monkeypatch.setattr(driver.Accelerator, "pin", failing)
    with attached(MIXED, tmp_path) as run:
        assert any("injected" in notice for notice in run.engine.notices)
        assert_same(training.trained(run), expected)


@pytest.mark.parametrize("states", ["auto", "cpu", "nvme"])
def test_device_memory_is_a_hard_cap(states: Any, tmp_path: Path) -> None:
    """Half a gigabyte of weights and two and a half of states in 400 MB of the device."""
    cap, width = 400 << 20, 2048
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(64))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    asked = offload.Config(
        params="cpu",
        gradients="cpu",
        optimizer=states,
        nvme_path=(str(tmp_path),),
        device_memory=cap,
        cpu_memory="6GiB",
        nvme_space="8GiB",
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, attached_optimizer = offload.attach(model, optimizer, asked)
    try:
        x = torch.randn(8, width, device=device().torch_device, dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            model(x).float().square().mean().backward()
            attached_optimizer.step()
            attached_optimizer.zero_grad()
        attached_optimizer.engine.settle()
        # Of the user's own: inputs and their gradients, one weight's gradient, and cuBLAS's
        # workspaces, of the thread of the forward and of autograd's.
        compute = 64 * 4 * x.nbytes + 3 * 2 * width * width + 2 * (32 << 20)
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= cap + compute + SLACK_BYTES
        if states == "auto":
            assert torch.cuda.memory_allocated() - before > cap // 2  # It uses what it may.
    finally:
        attached_optimizer.engine.close()


def test_torch_takes_no_more_for_residents_than_is_counted(tmp_path: Path) -> None:
    """Weights and gradients of 9 bytes to 12.5 MiB, most of them just above a boundary."""
    widths = (3, 17, 512, 725, 1025, 1100, 2240, 2561)
    model = nn.ModuleList(nn.Linear(width, width) for width in widths for _ in range(3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    asked: dict[str, Any] = dict.fromkeys(("params", "gradients", "optimizer"), "device")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    _, stepped = offload.attach(model, optimizer, offload.Config(**asked, device_memory="4GiB"))
    try:
        plan = stepped.engine.plan
        assert len(plan.residents) == len(stepped.engine.units)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stepped.step()
        stepped.engine.settle()
        # The arena is one block, too, and there are stand-ins and factors of a step.
        taken = torch.cuda.memory_allocated() - before
        assert taken <= allocator_bytes(plan.taken_bytes("device")) + (64 << 10)
    finally:
        stepped.engine.close()


def test_large_copies_arrive_in_both_directions() -> None:
    on, size = device(), (192 << 20) + 4096
    source, back = host_tensor(size), host_tensor(size)
    source.random_(0, 256)
    for memory in (source, back):
        on.driver.pin(memory.data_ptr(), size)
    there = on.zeros(size)
    for into, from_ in ((there, source), (back, there)):
        into.copy_(from_, non_blocking=True)
        on.drain()
    for memory in (source, back):
        on.driver.unpin(memory.data_ptr())
    assert torch.equal(source, back)


def test_a_sleeping_model_leaves_the_device_and_comes_back(tmp_path: Path) -> None:
    def napping(run: Run, number: int) -> None:
        plain(run, number)
        held = torch.cuda.memory_allocated()
        offload.sleep(run.model)
        gone = run.engine.plan.arena_bytes["device"]
        gone += sum(p.numel() * p.itemsize for p in run.model.parameters())
        assert torch.cuda.memory_allocated() <= held - gone
        offload.wake(run.model)

    assert_same(train(RESIDENT, tmp_path, napping), train(RESIDENT, tmp_path))
