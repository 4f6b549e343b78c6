"""What no training should do and some does: tensors without memory, changed layouts, shared bytes.

None of it may crash, write elsewhere, or give other weights than torch without a word.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import cpu_adam
from cpu_adam import CPUSGD, CPUAdam, UpdateTable, choice
from tests.optimizers import (
    FOUR_PARTS,
    OURS,
    assert_same,
    contiguous,
    every_optimizer,
    freed,
    of_any_dtype,
    parameters,
    run,
    set_gradients,
    tensors_of,
)


def stepped(*shape: int, build: Any = CPUAdam, **options: Any) -> tuple[nn.Parameter, Any]:
    """A parameter and its optimizer after a step."""
    p = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape) - 3)
    optimizer = build([p], lr=0.1, **options)
    p.grad = torch.linspace(-1, 2, p.numel()).view(shape)
    optimizer.step()
    return p, optimizer


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(8)


# Memory.


@pytest.mark.parametrize("make", [fake, lambda: TwoTensor(torch.ones(8), torch.ones(8))])
def test_wrappers_are_refused(make: Callable[[], Tensor]) -> None:
    x = make()
    with pytest.raises(ValueError, match=FOUR_PARTS):
        CPUAdam([nn.Parameter(x)])
    for call in (cpu_adam.sum_of_squares, cpu_adam.is_finite):
        with pytest.raises(ValueError, match=FOUR_PARTS):
            call(x)
    with pytest.raises(ValueError, match=FOUR_PARTS):
        cpu_adam.accumulate(torch.zeros(8), x)


@pytest.mark.parametrize("left", [0, 28])
@pytest.mark.parametrize("which", ["gradient", "parameter", "state"])
@every_optimizer
def test_memory_that_was_freed_is_refused(kind: str, which: str, left: int) -> None:
    p, optimizer = stepped(8, build=OURS[kind])
    before = [x.clone() for x in tensors_of(optimizer)]
    assert p.grad is not None
    slots = [x for x in optimizer.state[p].values() if x.dim()]
    gone = {"gradient": p.grad, "parameter": p, "state": slots[0]}[which]
    freed(gone, left)
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.step()
    if which == "gradient":
        assert_same(tensors_of(optimizer), before)


@pytest.mark.parametrize("left", [0, 28])
def test_freed_memory_is_refused_by_every_function(left: int) -> None:
    for call in (cpu_adam.sum_of_squares, cpu_adam.crc32c):
        with pytest.raises(ValueError, match=FOUR_PARTS):
            call(freed(torch.ones(8), left))
    with pytest.raises(ValueError, match=FOUR_PARTS):
        cpu_adam.accumulate(torch.zeros(8), freed(torch.ones(8), left))


@pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")
def test_the_native_module_refuses_null() -> None:
    native, index = cpu_adam.kernel().native, cpu_adam.kernel().index
    assert native is not None
    operation = native.OPERATIONS.index("stream")
    row = np.array([[4, 0, 0, 0]], np.int64)
    with pytest.raises(ValueError, match="memory"):
        native.run(index, operation, 0, row, np.zeros((1, native.FACTORS), np.float32), None)
    with pytest.raises(ValueError, match="memory"):
        native.sum_of_squares(index, 0, 0, 4)


@pytest.mark.parametrize(
    "gradient", [torch._efficientzerotensor(8), torch._neg_view(torch.arange(8.0))]
)
@every_optimizer
def test_gradients_are_taken_as_they_read(kind: str, gradient: Tensor) -> None:
    results = []
    for x in (gradient, torch.zeros(8).add(gradient)):
        p, optimizer = stepped(8, build=OURS[kind])
        p.grad = x
        optimizer.step()
        results.append(p.detach())
        assert cpu_adam.sum_of_squares(x) == float(x.double().square().sum())
    assert_same(results[:1], results[1:])
    into = torch.zeros(8)
    cpu_adam.accumulate(into, gradient)
    assert_same([into], [torch.zeros(8).add(gradient)])


def test_elements_that_share_memory_are_refused() -> None:
    for shape, strides in (((16,), (0,)), ((4, 4), (1, 1)), ((3, 4), (3, 1)), ((2, 2), (3, 3))):
        p = nn.Parameter(torch.ones(16).as_strided(shape, strides))
        optimizer = CPUAdam([p])
        p.grad = torch.ones(shape)
        with pytest.raises(ValueError, match=FOUR_PARTS):
            optimizer.step()
        assert not optimizer.state


# Layouts.


def transposed(p: nn.Parameter) -> None:
    p.data = p.data.t()


def restrided(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.as_strided_((4, 4), (1, 4))


@pytest.mark.parametrize("change", [transposed, restrided])
def test_another_layout_at_the_same_address_is_seen(change: Callable[..., None]) -> None:
    results = []
    for build in (torch.optim.AdamW, CPUAdam):
        p, optimizer = stepped(4, 4, build=build)
        change(p)
        p.grad = torch.arange(16.0).view(4, 4) - 5
        optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(results[1], results[0])


@every_optimizer
def test_fewer_elements_at_the_same_address_are_seen(kind: str) -> None:
    p, optimizer = stepped(8, build=OURS[kind])
    base = p.data
    before = base.clone()
    p.data = base[:4]
    p.grad = torch.ones(4)
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.step()
    assert torch.equal(base, before)


def test_a_state_in_another_layout_is_seen() -> None:
    results = []
    for build in (torch.optim.AdamW, CPUAdam):
        p, optimizer = stepped(4, 4, build=build)
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t()
        optimizer.step()
        results.append(optimizer.state[p]["exp_avg"])
    torch.testing.assert_close(results[1], results[0])


# Steps.


def _double(p: nn.Parameter) -> None:
    p.data = p.data.double()
    p.grad = torch.ones_like(p)
    p.data = p.data.float()


def _short(p: nn.Parameter) -> None:
    kept = p.data
    p.grad = None
    p.data = torch.ones(2)
    p.grad = torch.ones(2)
    p.data = kept


@pytest.mark.parametrize("spoil", [_double, _short])
@pytest.mark.parametrize("steps", [0, 2])
@every_optimizer
def test_a_gradient_that_does_not_fit_changes_nothing(
    kind: str, steps: int, spoil: Callable[[nn.Parameter], None]
) -> None:
    params = contiguous([*parameters(), *parameters(torch.bfloat16)])
    optimizer = OURS[kind](params)
    run(optimizer, max(steps, 1))
    if not steps:
        optimizer.state.clear()
    before = [x.clone() for x in tensors_of(optimizer)]
    spoil(params[5])
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.step()
    assert_same(tensors_of(optimizer), before)


OTHER_GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.ones(4, 4).to_sparse(),
    "freed": lambda: freed(torch.ones(4, 4)),
    "a wrapper": lambda: TwoTensor(torch.ones(4, 4), torch.ones(4, 4)),
    "zeros without memory": lambda: torch._efficientzerotensor(4, 4),
    "negative": lambda: torch._neg_view(torch.arange(16.0).view(4, 4)),
    "transposed": lambda: torch.arange(16.0).view(4, 4).t(),
    "half": lambda: torch.arange(16.0).view(4, 4).half(),
    "with gaps": lambda: torch.arange(32.0).view(4, 8)[:, ::2],
}


@pytest.mark.parametrize("before", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    "what",
    [pytest.param(one, marks=of_any_dtype if one == "half" else ()) for one in OTHER_GRADIENTS],
)
def test_another_kind_of_gradient_after_many_is_seen(what: str, before: str) -> None:
    """A step that compares with the last one takes or refuses it as a first one does."""
    results: list[Any] = []
    for again in (True, False):
        p, optimizer = stepped(4, 4)
        if before == "transposed":
            p.grad = OTHER_GRADIENTS[before]()
        for _ in range(3):
            optimizer.step()
        p.grad_dtype = None  # Any will do.
        p.grad = OTHER_GRADIENTS[what]()
        if not again:
            optimizer._batch = None
        try:
            optimizer.step()
        except ValueError as refusal:
            results.append(str(refusal))
        else:
            results.append([x.tolist() for x in tensors_of(optimizer)])
    assert results[0] == results[1]


@pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")
def test_a_step_of_many_tensors_runs_little_python() -> None:
    """What is looked at for each tensor in every step is looked at by loops in C."""

    def calls(tensors: int) -> int:
        optimizer = CPUAdam([nn.Parameter(torch.ones(4)) for _ in range(tensors)])
        run(optimizer, 2)
        events: list[str] = []
        sys.setprofile(lambda frame, event, _: events.append(event))
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    assert calls(300) - calls(100) < 20


def test_what_is_no_tensor_in_a_state_is_seen() -> None:
    p, optimizer = stepped(4, build=CPUSGD, momentum=0.9)
    optimizer.state[p]["momentum_buffer"] = None
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], p.grad)
    p, optimizer = stepped(4)
    optimizer.state[p]["step"] = 5
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 6
    for wrong in (float("nan"), -1, None, 2**60, 1.5):
        optimizer.state[p]["step"] = wrong
        with pytest.raises(ValueError, match=FOUR_PARTS):
            optimizer.step()


@every_optimizer
def test_gradients_that_lie_in_weights_are_copied_first(kind: str) -> None:
    results = []
    for alias in (True, False):
        base = torch.randn(1001, generator=torch.Generator().manual_seed(0))
        params = [nn.Parameter(base[:501]), nn.Parameter(base[501:])]
        optimizer = OURS[kind](params, lr=0.1)
        run(optimizer, 1)
        gradients = [base[500:], base[1:501]]  # Each is, or overlaps, the other's weight.
        for p, gradient in zip(params, gradients):
            p.grad = gradient if alias else gradient.clone()
        optimizer.step()
        results.append(base)
    assert_same(results[:1], results[1:])


@every_optimizer
def test_parameters_that_share_memory_take_turns(kind: str, monkeypatch: Any) -> None:
    """As torch takes them one by one, in their order; all that share none go in the first call."""
    calls: list[int] = []
    original = UpdateTable.update

    def counted(self: UpdateTable, *arguments: Any, **options: Any) -> Any:
        calls.append(len(options["gradients"]))
        return original(self, *arguments, **options)

    monkeypatch.setattr(UpdateTable, "update", counted)
    results = []
    for together in (True, False):
        base = torch.randn(40, 10, generator=torch.Generator().manual_seed(0))
        views = [base[:5], base[3:8], base[7:9], *(row for row in base[10:39]), base[39, ::2]]
        params = [nn.Parameter(view) for view in [*views, base[39, 1::2], base[8:10, :4]]]
        optimizers = [OURS[kind]([p], lr=0.1) for p in params]
        if together:
            optimizers = [OURS[kind](params, lr=0.1)]
        for step in range(3):
            set_gradients(params, step)
            for optimizer in optimizers:
                optimizer.step()
        results.append(base)
        if together:
            assert calls == 3 * [len(params) - 4, 2, 1, 1]
    assert_same(results[:1], results[1:])


NO_NUMBERS: list[Any] = [None, "0.1", 1j, [0.1], torch.ones(2), torch.ones((), device="meta")]


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *((kind, option) for kind in OURS for option in ("lr", "weight_decay")),
        *(("adam", "betas"), ("adam", "eps"), ("lion", "betas")),
        *(("sgd", "momentum"), ("sgd", "dampening")),
    ],
)
def test_what_is_no_number_is_refused(kind: str, option: str, wrong: Any) -> None:
    optimizer = OURS[kind]([nn.Parameter(torch.ones(2))])
    given = (wrong, 0.9) if option == "betas" else wrong
    with pytest.raises(TypeError, match=FOUR_PARTS):
        OURS[kind]([nn.Parameter(torch.ones(2))], **{option: given})
    with pytest.raises(TypeError, match=FOUR_PARTS):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], option: given})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][option] = given
    with pytest.raises(TypeError, match=FOUR_PARTS):
        run(optimizer, 1)
    assert not optimizer.state


@pytest.mark.parametrize("wrong", [None, 0.9, (), (0.9,), (0.9, 0.9, 0.9)])
def test_betas_that_are_no_pair_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=FOUR_PARTS):
        CPUAdam([nn.Parameter(torch.ones(2))], betas=wrong)


@every_optimizer
def test_a_number_of_any_kind_will_do(kind: str) -> None:
    results = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), Fraction(1, 2)):
        results.append(run(OURS[kind]([nn.Parameter(torch.ones(2))], lr=lr), 2))
    for result in results[1:]:
        assert_same(result, results[0])
    with pytest.raises(ValueError, match=FOUR_PARTS):
        OURS[kind]([nn.Parameter(torch.ones(2))], lr=10**400)


def test_a_parameter_twice_in_a_group_is_refused() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=FOUR_PARTS):
        CPUAdam([p, p])


# Loading.


@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("step", x) for x in (float("nan"), float("inf"), -1, 1.5, 2.0**53, None, "x")),
        ("step", torch.ones(2)),
        ("step", torch.tensor(1.0, device="meta")),
        ("exp_avg_sq", -torch.ones(300)),
        ("exp_avg", torch.zeros(300).to_sparse()),
        ("exp_avg", torch.zeros(300, device="meta")),
        (None, 5),
    ],
)
def test_a_damaged_checkpoint_is_refused_whole(key: str | None, wrong: Any, states: str) -> None:
    p = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = CPUAdam([p], states=states)
    run(optimizer, 1)
    before = [x.clone() for x in tensors_of(optimizer)]
    state = copy.deepcopy(optimizer.state_dict())
    good = {"step": torch.tensor(1.0), "exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300)}
    state["state"][0] = wrong if key is None else {**good, key: wrong}
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.load_state_dict(state)
    assert_same(tensors_of(optimizer), before)


def test_scales_below_zero_are_refused_and_nan_is_kept() -> None:
    optimizer = CPUAdam([nn.Parameter(torch.ones(300, dtype=torch.bfloat16))], states="compact")
    run(optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    for value in (float("nan"), float("inf")):
        state["state"][0]["exp_avg_scale"].fill_(value)
        optimizer.load_state_dict(state)
    state["state"][0]["exp_avg_scale"].fill_(-1.0)
    with pytest.raises(ValueError, match=FOUR_PARTS):
        optimizer.load_state_dict(state)


def test_a_step_beside_momentum_keeps_the_momentum() -> None:
    results = []
    for extra in ({}, {"step": torch.tensor(0.0)}):
        p, optimizer = stepped(4, build=CPUSGD, momentum=0.9, dampening=0.5)
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0].update(extra)
        optimizer.load_state_dict(state)
        optimizer.step()
        results.append(p.detach())
    assert_same(results[:1], results[1:])


# Forks.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.slow
def test_a_fork_while_the_lock_is_held_does_not_hang_the_child() -> None:
    script = (
        "import faulthandler, os, cpu_adam\n"
        "from cpu_adam import choice\n"
        "cpu_adam.kernel()\n"
        "choice._lock.acquire()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    faulthandler.dump_traceback_later(5, exit=True)\n"
        "    cpu_adam.set_threads(1)\n"
        "    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert choice._lock.acquire(timeout=1)
    choice._lock.release()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_threads_may_step_one_optimizer() -> None:
    """Results are nobody's business then, but memory is."""
    p = nn.Parameter(torch.ones(64, 2048))
    optimizer = CPUAdam([p])
    p.grad = torch.ones(2048, 64).t()

    def work() -> None:
        for _ in range(20):
            optimizer.step()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.isfinite(p).all()


@every_optimizer
def test_the_default_device_of_torch_is_not_ours(kind: str) -> None:
    """A script may set it: what a step makes for itself is where the parameters are."""
    plain, other = OURS[kind](parameters(torch.bfloat16)), OURS[kind](parameters(torch.bfloat16))
    run(plain, 2)
    for step in range(2):
        set_gradients(other.param_groups[0]["params"], step)
        with torch.device("meta"):
            other.step()
            other.load_state_dict(other.state_dict())
    assert_same(tensors_of(other), tensors_of(plain))
