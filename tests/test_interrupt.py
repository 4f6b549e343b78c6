"""Ctrl-C anywhere inside the engine: the program goes on as if it had come between two calls."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import offload
from offload import collector, guard, interrupt
from tests.small import MIXED, adamw, config, small, torch_step
from tests.training import (
    RESIDENT,
    Net,
    Result,
    Run,
    assert_same,
    attached,
    batch,
    first_fast,
    loss_of,
    result_of,
    same_bits,
)

ENGINE = str(Path(offload.__file__).parent)
STEPS, PRESSED_IN = 4, 2
PLACEMENTS = [("nvme", "nvme", "nvme"), ("cpu", "cpu", "cpu"), ("nvme", "cpu", "device")]


@contextmanager
def pressing(*at: int | None, within: str = ENGINE) -> Iterator[list[int]]:
    """Press Ctrl-C at the lines with numbers `at` that the engine runs; counts the lines."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(within):
            return None
        if event == "line":
            lines[0] += 1
            for _ in range(at.count(lines[0])):
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    gc.disable()  # What is raised while an engine is collected is lost.
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
        gc.enable()


def one_step(run: Run, tokens: torch.Tensor) -> None:
    model: Any = run.model
    with torch.no_grad():
        model.blocks[1].norm.bias.fill_(0.25)  # Done twice it is the same.
    for _ in range(2):
        loss_of(model, tokens).backward()
    assert model.head.weight.float().sum().isfinite()
    model.norm.weight.grad.mul_(0.5)
    run.optimizer.step()
    run.optimizer.zero_grad()


def train_pressed(
    placement: tuple[str, str, str], drive: Path, at: int | None, **options: Any
) -> tuple[Result, int, int]:
    """(what came of it, lines run in the step, times that Ctrl-C ended it)."""
    with attached(placement, drive, **options) as run:
        number = ended = lines = 0
        while number < STEPS:
            tokens = batch(torch.Generator().manual_seed(number))
            before = run.engine.steps
            press = at if number == PRESSED_IN and not ended else None
            try:
                with pressing(press) as counted:
                    one_step(run, tokens)
                if number == PRESSED_IN:
                    lines = counted[0]
            except KeyboardInterrupt:
                ended += 1
                run.optimizer.zero_grad()
                if run.engine.steps == before:
                    continue
            number += 1
        return result_of(run), lines, ended


def points(lines: int, count: int, seed: int) -> list[int]:
    """Lines to press at, in all parts of a step: one in each of `count` equal stretches."""
    rng = random.Random(seed)
    edges = [1 + number * lines // count for number in range(count + 1)]
    return [rng.randrange(low, high) for low, high in pairwise(edges)]


def same_at(
    placement: tuple[str, str, str], drive: Path, count: int, seed: int, **options: Any
) -> None:
    whole_run, lines, ended = train_pressed(placement, drive, None, **options)
    assert not ended
    presses = 0
    for at in points(lines, count, seed):
        pressed, ran, ended = train_pressed(placement, drive, at, **options)
        assert ended or ran < at  # How many lines a step runs depends on who waits for whom.
        presses += ended
        try:
            assert_same(pressed, whole_run)
        except AssertionError as error:
            raise AssertionError(f"pressed at line {at} of {lines}, seed {seed}") from error
    assert presses >= count * 3 // 4


@pytest.mark.parametrize("placement", first_fast(PLACEMENTS))
def test_pressed_anywhere_in_a_step(placement: tuple[str, str, str], tmp_path: Path) -> None:
    same_at(placement, tmp_path, 2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_pressed_at_many_lines(
    placement: tuple[str, str, str], clip: float | None, tmp_path: Path
) -> None:
    same_at(placement, tmp_path, 60, seed=1, max_grad_norm=clip)


def partly_frozen() -> Net:
    net = Net()
    for module in (net.embed, *net.blocks[:3]):
        module.requires_grad_(False)
    return net


AUTO = ("auto", "auto", "auto")
MIXES: dict[str, tuple[tuple[str, str, str], dict[str, Any]]] = {
    "states": (AUTO, {"device_memory": "450KiB", "cpu_memory": "700KiB"}),
    "weights": (
        ("auto", "cpu", "nvme"),
        {"device_memory": "140KiB", "cpu_memory": "640KiB", "build": partly_frozen},
    ),
}
"""Units with the kind named on the device, on cpu, and on nvme, in one model."""


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("mix", MIXES)
def test_pressed_at_many_lines_of_a_mix(mix: str, clip: float | None, tmp_path: Path) -> None:
    placement, options = MIXES[mix]
    kind: Any = mix.removesuffix("s")
    with attached(placement, tmp_path, max_grad_norm=clip, **options) as run:
        plan = run.engine.plan
        found = {plan.home(kind, unit).tier for unit in range(len(plan.placements))}
        assert found == {"device", "cpu", "nvme"}
    same_at(placement, tmp_path, 40, seed=5, max_grad_norm=clip, **options)


# -- updates that begin inside backward -----------------------------------------------------------


def early_step(run: Run, tokens: torch.Tensor) -> None:
    model: Any = run.model
    loss_of(model, tokens).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def train_early(
    drive: Path, placement: tuple[str, str, str], at: int | None
) -> tuple[Result, int, bool, set[str] | None]:
    """(what came of it, lines run in the step, whether Ctrl-C ended it, what was stepped if it did.

    An interrupt after updates have begun leaves one way on, `step()`; else the step is repeated.
    """
    with attached(placement, drive, micro_batches=1) as run:
        lines, ended, stepped, number = 0, False, None, 0
        while number < STEPS:
            tokens = batch(torch.Generator().manual_seed(number))
            before = run.engine.steps
            try:
                with pressing(at if number == PRESSED_IN and not ended else None) as counted:
                    early_step(run, tokens)
                if number == PRESSED_IN:
                    lines = counted[0]
            except KeyboardInterrupt:
                ended = True
                if run.engine.finality.begun:
                    run.optimizer.step()
                    stepped = stepped_in(run, PRESSED_IN + 1)
                run.optimizer.zero_grad()
                if run.engine.steps == before:
                    continue
            number += 1
        return result_of(run), lines, ended, stepped


def stepped_in(run: Run, number: int) -> set[str]:
    """Parameters that have taken as many steps."""
    optimizer: Any = run.optimizer
    named = run.model.named_parameters()
    return {name for name, parameter in named if optimizer.steps_of(parameter) == number}


def resident_in_part(drive: Path, stepped: set[str]) -> Result:
    """The resident run in which one step has the gradients of `stepped` only."""
    with attached(RESIDENT, drive) as run:
        for number in range(STEPS):
            loss_of(run.model, batch(torch.Generator().manual_seed(number))).backward()
            if number == PRESSED_IN:
                for name, parameter in run.model.named_parameters():
                    if name not in stepped:
                        parameter.grad = None
            run.optimizer.step()
            run.optimizer.zero_grad()
        return result_of(run)


def early_at(placement: tuple[str, str, str], drive: Path, count: int, seed: int) -> None:
    whole_run, lines, _, _ = train_early(drive, placement, None)
    presses = completed = 0
    for at in points(lines, count, seed):
        pressed, ran, ended, stepped = train_early(drive, placement, at)
        assert ended or ran < at
        presses += ended
        completed += stepped is not None
        expected = whole_run if stepped is None else resident_in_part(drive, stepped)
        try:
            assert_same(pressed, expected)
        except AssertionError as error:
            raise AssertionError(f"pressed at line {at} of {lines}, seed {seed}") from error
    assert presses >= count * 3 // 4
    assert completed >= count // 8


@pytest.mark.slow
@pytest.mark.parametrize("placement", [PLACEMENTS[0]], ids="-".join)
def test_pressed_anywhere_with_updates_inside_backward(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    early_at(placement, tmp_path, 8, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_pressed_at_many_lines_with_updates_inside_backward(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    early_at(placement, tmp_path, 60, seed=3)


# -- attach ---------------------------------------------------------------------------------------


def kept(model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that attach moves, in memory of its own."""
    found = {f"state {n}": p.detach().clone() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
        for slot, value in optimizer.state[parameter].items():
            found[f"{slot} {name}"] = value.clone()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "meta",
    [pytest.param(False, id="trained", marks=pytest.mark.slow), pytest.param(True, id="meta")],
)
def test_pressed_anywhere_in_attach(meta: bool, tmp_path: Path) -> None:
    def made() -> tuple[Any, Any]:
        with torch.device("meta" if meta else "cpu"):
            model = small()
            optimizer = adamw(model)
        if not meta:
            torch_step(model, optimizer)
        return model, optimizer

    def press(at: int | None) -> tuple[Any, Any, bool, int]:
        model, optimizer = made()
        gc.collect()
        torch.manual_seed(3)
        with pressing(at) as counted:
            try:
                offload.attach(model, optimizer, config(MIXED, tmp_path))
            except KeyboardInterrupt:
                return model, optimizer, True, counted[0]
        return model, optimizer, False, counted[0]

    wanted = kept(*made())
    lines = press(None)[-1]
    presses = 0
    for at in [*points(lines, 12, seed=4), *range(lines - 60, lines, 7)]:
        model, optimizer, pressed, ran = press(at)
        assert pressed or ran < at
        presses += pressed
        if not pressed:
            continue
        with suppress(ValueError):
            offload.detach(model)  # Pressed when all was done, but before attach returned.
            assert at > lines - 20
        parameters = list(model.parameters())
        assert all(p.is_meta is meta and type(p) is torch.nn.Parameter for p in parameters)
        assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"]))
        for name, value in () if meta else kept(model, optimizer).items():
            same = value is None if wanted[name] is None else same_bits(value, wanted[name])
            assert same, (at, name)
        _, attached_optimizer = offload.attach(model, optimizer, config(MIXED, tmp_path))
        torch_step(model, attached_optimizer)
        attached_optimizer.engine.close()
    assert presses >= 12


# -- whole ----------------------------------------------------------------------------------------


def test_what_is_whole_ends_before_the_interrupt_counts(whole: Any) -> None:
    done: list[str] = []

    @whole
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("inner")

    @whole
    def outer() -> None:
        inner()
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_inside_is_the_context_of_the_interrupt(whole: Any) -> None:
    @whole
    def fail() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("on purpose")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_the_handler_that_was_there_is_asked_and_stays(whole: Any) -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        assert whole(lambda: signal.raise_signal(signal.SIGINT) or 7)() == 7
        assert asked == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert len(asked) == 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert whole(lambda: signal.raise_signal(signal.SIGINT) or 7)() == 7
    finally:
        signal.signal(signal.SIGINT, before)


def test_pressed_twice_anywhere_the_handler_is_back(whole: Any) -> None:
    """Two presses at every pair of lines of `whole` and what is, the last ones too."""
    asked: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    own, torn = interrupt.__file__, [*interrupt.torn()]
    work = whole(eval(compile("lambda: None", own, "eval")))  # As if it were a line of the same.
    before = signal.signal(signal.SIGINT, mine)
    raised = 0
    try:
        with pressing(within=own) as counted:
            work()
        for one in range(1, counted[0] + 1):
            for other in range(one, counted[0] + 1):
                asked.clear()
                with suppress(KeyboardInterrupt), pressing(one, other, within=own):
                    work()
                    raised -= 1
                raised += 1
                assert signal.getsignal(signal.SIGINT) is mine
                assert not interrupt.inside()
                assert asked
                work()  # What was counted then is not counted now.
        assert raised == counted[0] * (counted[0] + 1) // 2
        assert len(interrupt.torn()) > len(torn)
    finally:
        signal.signal(signal.SIGINT, before)
        interrupt._torn[:] = torn


def test_on_another_thread_nothing_is_done(whole: Any) -> None:
    seen: list[bool] = []
    look = whole(lambda: seen.append(interrupt.inside()))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()
    assert seen == [False, True]
    assert not interrupt.inside()


def test_pressed_twice_it_ends_at_once_and_no_engine_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "_torn", [])
    with attached(("nvme", "cpu", "cpu"), tmp_path) as run:
        lanes = run.engine.executor.lanes
        begin = lanes.begin

        def stuck(task: Any) -> None:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            begin(task)

        monkeypatch.setattr(lanes, "begin", stuck)
        with pytest.raises(KeyboardInterrupt):
            run.loss()
        for touch in (run.loss, run.optimizer.step, lambda: run.model.head.weight.sum()):
            with pytest.raises(offload.EngineError, match="pressed twice"):
                touch()


ENDLESS = """
import sys, torch, offload
from tests.training import attached, plain
with attached(("nvme", "nvme", "nvme"), sys.argv[1]) as run:
    print("ready", flush=True)
    try:
        while True:
            plain(run, 0)
    except KeyboardInterrupt:
        run.optimizer.zero_grad()
        plain(run, 0)
        print("went on", flush=True)
"""


@pytest.mark.slow
def test_a_real_interrupt_and_on(tmp_path: Path) -> None:
    script = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    root = Path(ENGINE).parent
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        threading.Timer(0.3, process.send_signal, [signal.SIGINT]).start()
        assert process.communicate(timeout=60)[0] == "went on\n"
        assert process.returncode == 0


def test_ctrl_c_at_every_line_of_the_guard_leaves_the_trap_on(tmp_path: Path) -> None:
    """Torch's functions would pass parameters at rest by, for good."""
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        with pressing(within=guard.__file__) as counted:
            run.loss().backward()
        for at in range(1, counted[0] + 1, 9):
            with suppress(KeyboardInterrupt), pressing(at, within=guard.__file__):
                run.loss().backward()
            assert torch._C._is_torch_function_enabled(), at
            run.optimizer.zero_grad()


def test_ctrl_c_at_every_line_of_collecting_leaves_no_part_of_a_gradient(tmp_path: Path) -> None:
    tokens = batch(torch.Generator().manual_seed(0))
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:

        def gradients() -> dict[str, Any]:
            named = [(n, p.grad) for n, p in run.model.named_parameters()]
            run.optimizer.zero_grad(set_to_none=True)
            return {name: gradient for name, gradient in named if gradient is not None}

        with pressing(within=collector.__file__) as lines:
            loss_of(run.model, tokens).backward()
        wanted, between = gradients(), 0
        for at in range(1, lines[0] + 1, 13):
            with suppress(KeyboardInterrupt), pressing(at, within=collector.__file__):
                loss_of(run.model, tokens).backward()
            came = gradients()
            between += len(came) < len(wanted)
            assert all(same_bits(came[name], wanted[name]) for name in came), at
        assert between > 10
