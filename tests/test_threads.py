"""Autograd calls the engine from threads of its own, as it does wherever there is a device."""

from __future__ import annotations

import pkgutil
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import offload
from offload.awaited import Awaited, AwaitedParameter
from offload.binding import BoundUnit
from offload.bystanders import any_in_torch
from tests.training import Net, attached, batch, loss_of, plain

WIDTH, BLOCKS = 16, 6


class Biased(nn.Module):
    """Takes a bias and passes it on, as T5's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, *, bias: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.tanh(self.inner(x) + bias), {"bias": bias}


class Pairs(nn.Module):
    """Two blocks to a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.bias = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Biased() for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x)
        for first in range(0, BLOCKS, 2):
            x, bias = checkpoint(self._two, first, x, bias, use_reentrant=self.reentrant)
        return x

    def _two(
        self, first: int, x: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks[first : first + 2]:
            x, passed = block(x, bias=bias)
        return x, passed["bias"]


def here(work: Callable[[], Any]) -> None:
    work()


def elsewhere(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def trained(
    reentrant: bool, call: Callable[[Callable[[], Any]], None]
) -> tuple[list[list[str]], list[torch.Tensor]]:
    """The units that were held, in each of three backwards that `call` made; and the weights."""
    torch.manual_seed(0)
    model = Pairs(reentrant)
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = offload.Config(params="cpu", gradients="cpu", optimizer="cpu")
    _, optimizer = offload.attach(model, stock, asked)
    engine = optimizer.engine
    hold, held = engine.hold, list[list[str]]()

    def spy(bound: BoundUnit, began: int) -> None:
        held[-1].append(bound.spec.name)
        hold(bound, began)

    engine.hold = spy
    try:
        for _ in range(3):
            held.append([])
            call(model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward)
            optimizer.step()
            optimizer.zero_grad()
        return held, [values for _, values in engine.stream_weights()]
    finally:
        engine.close()


@pytest.mark.parametrize("stops_early", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_units_are_held_in_the_same_order_on_any_thread(reentrant: bool, stops_early: bool) -> None:
    """A recompute's arguments are numbered by the forward's thread, not by autograd's."""
    with set_checkpoint_early_stop(stops_early):
        expected, weights = trained(reentrant, here)
        found, others = trained(reentrant, elsewhere)
    assert found == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, others))
    once = [f"blocks.{number}" for number in reversed(range(BLOCKS))] + ["bias"]
    assert [list(dict.fromkeys(units)) for units in found] == [once] * 3


def test_whoever_calls_the_engine_in_a_backward_keeps_the_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a module's output has left the device its node is the caller's, beside the others."""
    build = partial(Net, checkpointed=True, tied=True)
    with attached(("cpu", "cpu", "cpu"), tmp_path, build=build) as run:
        loss = loss_of(run.model, batch(run.generator))
        alone: dict[str, list[bool]] = {}

        def entered(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            lock: Any = run.engine.lock
            alone.setdefault(name, []).append(lock._is_owned())
            return function(*args, **options)

        methods = ("enter", "leave", "hold", "collect", "tensor_of", "end_pass")
        for name in methods:
            whose = run.engine.in_use if name == "leave" else run.engine
            monkeypatch.setattr(whose, name, partial(entered, name, getattr(whose, name)))
        elsewhere(loss.backward)
    assert set(alone) == set(methods)
    assert {name for name, found in alone.items() if not all(found)} == set()


@pytest.fixture
def switches() -> Iterator[None]:
    """Threads of Python change places fifty times as often: more meetings, and less waiting."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize(
    "placement", [("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("device", "device", "cpu")]
)
def test_who_reads_beside_training_changes_nothing_of_it(
    placement: tuple[str, str, str], tmp_path: Path, switches: None
) -> None:
    """What is read is true, or is refused by name."""

    def trained_beside(placement: tuple[str, str, str], read: bool) -> list[torch.Tensor]:
        told, over = list[str](), threading.Event()
        with attached(placement, tmp_path, dtype=torch.float32) as run:

            def reading() -> None:
                while not over.is_set():
                    for work in (run.model.state_dict, run.optimizer.state_dict):
                        try:
                            found = work()
                        except RuntimeError as error:
                            told.append(str(error))
                            continue
                        told.append("read")
                        values = found.values() if work == run.model.state_dict else ()
                        if not all(value.isfinite().all() for value in values):
                            told.append("not finite")

            thread = threading.Thread(target=reading, name="reader")
            if read:
                thread.start()
            try:
                for number in range(12):
                    plain(run, number)
            finally:
                over.set()
                if read:
                    thread.join()
            refused = {one for one in told if one != "read"}
            assert all("thread 'reader' asked for weights" in one for one in refused), refused
            return [torch.tensor(run.losses), *run.model.state_dict().values()]

    beside, alone = trained_beside(placement, True), trained_beside(placement, False)
    assert all(torch.equal(one, other) for one, other in zip(beside, alone, strict=True))


def test_who_is_inside_torch_with_a_parameter_when_a_step_begins_reads_numbers(
    tmp_path: Path,
) -> None:
    """Torch has asked for its class before, and looks at its memory in the middle of the step."""
    with attached(("device", "device", "cpu"), tmp_path, dtype=torch.float32) as run:
        model: Any = run.model
        plain(run, 0)
        weight, before = model.head.weight.requires_grad_(), torch.ones(1 << 20)

        def overtaken(times: int) -> bool:
            """Whether a step begins and ends while a thread is inside torch, for so long."""
            inside, found = threading.Event(), []

            def read() -> None:
                inside.set()
                found.extend(torch._foreach_norm([before] * times + [weight]))

            run.loss().backward()
            reader = threading.Thread(target=read)
            reader.start()
            inside.wait()
            time.sleep(0.01)
            run.optimizer.step()
            during = reader.is_alive()
            reader.join()
            assert found[-1].isfinite()
            run.optimizer.zero_grad()
            return during

        # How long a step takes is up to who else has the processors.
        assert any(overtaken(times) for times in (200, 1000, 5000))
        plain(run, 1)


def awaited(run: Any) -> int:
    return sum(type(one) is AwaitedParameter for one in run.model.parameters())


def test_who_waits_beside_training_costs_it_nothing(tmp_path: Path) -> None:
    """Threads of progress bars and loaders are there in most trainings."""
    over, inside, turning = threading.Event(), threading.Event(), [True]
    told: queue.Queue[None] = queue.Queue()

    def turn() -> None:
        inside.set()
        while turning:
            pass

    idle = [threading.Thread(target=over.wait), threading.Thread(target=told.get)]
    with attached(("device", "device", "cpu"), tmp_path, dtype=torch.float32) as run:
        for thread in idle:
            thread.start()
        try:
            plain(run, 0)
            assert awaited(run) == len(list(run.model.parameters()))
            busy = threading.Thread(target=turn)
            busy.start()
            inside.wait()
            plain(run, 1)
            assert not awaited(run)
        finally:
            over.set()
            turning.clear()
            told.put(None)
        for thread in (*idle, busy):
            thread.join()
        plain(run, 2)
        assert awaited(run)


@pytest.mark.parametrize("asked", ["value", "gradient", "view"])
def test_who_asks_in_the_middle_of_a_step(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread waits for what the step makes of it; a finalizer, which cannot, has it now."""
    with attached(("device", "device", "cpu"), tmp_path, dtype=torch.float32) as run:
        model: Any = run.model
        plain(run, 0)
        run.loss().backward()
        weight, depart = model.head.weight, Awaited.depart
        gradient, before = weight.grad.clone(), weight.detach().clone()
        found: dict[str, torch.Tensor] = {}
        look: Callable[[], Any] = {
            "value": weight.clone,
            "gradient": lambda: weight.grad,
            "view": lambda: weight.detach(),
        }[asked]

        def read(name: str) -> None:
            found[name] = look()

        other = threading.Thread(target=read, args=("other",))

        def departing(*args: Any) -> Any:
            departed = depart(*args)
            other.start()
            other.join(0.05)
            assert not found
            read("finalizer")
            return departed

        monkeypatch.setattr(Awaited, "depart", departing)
        run.optimizer.step()
        monkeypatch.undo()
        other.join()
        if asked == "gradient":
            assert all(torch.equal(one, gradient) for one in found.values())
        else:
            assert torch.equal(found["other"], weight.detach())
            assert not torch.equal(before, weight.detach())
            now = before if asked == "value" else weight.detach()
            assert torch.equal(found["finalizer"], now)
        run.optimizer.zero_grad()
        plain(run, 1)


def test_a_step_that_cannot_be_queued_leaves_parameters_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(("device", "device", "cpu"), tmp_path, dtype=torch.float32) as run:
        run.loss().backward()

        def broken(*_: Any) -> None:
            raise MemoryError("of a test")

        monkeypatch.setattr(run.engine.executor, "issue_chunk", broken)
        with pytest.raises(MemoryError):
            run.optimizer.step()
        assert all(type(one) is nn.Parameter for one in run.model.parameters())
        assert not any(vars(one) for one in run.model.parameters())


@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_another_thread_is_refused_inside_a_pass(verb: str, tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, dtype=torch.float32) as run:
        model: Any = run.model
        told: list[str] = []
        spare = run.loss()

        def intrude() -> None:
            for work in (
                spare.backward,
                lambda: model.head.weight.detach(),
                lambda: model.head.weight.grad,
                lambda: model(batch(torch.Generator().manual_seed(1))),
                lambda: model.blocks[0](torch.ones(1, 32)),
                run.optimizer.step,
                run.optimizer.zero_grad,
                lambda: run.engine.values_of(0, 0),
            ):
                with pytest.raises(RuntimeError, match=f"another one was inside its {verb}") as one:
                    work()
                told.append(str(one.value))

        def hook(*_: object) -> None:
            elsewhere(intrude)

        if verb == "forward":
            handle = model.blocks[1].register_forward_hook(hook)
            loss = run.loss()
        else:
            loss = run.loss()
            handle = model.blocks[1].up.weight.register_hook(hook)
        loss.backward()
        handle.remove()
        assert len(told) == 8
        run.step()
        elsewhere(partial(plain, run, 1))  # Nobody is inside: any thread may.
        plain(run, 2)


def test_backwards_nested_deep_go_on_on_threads_of_autograd(tmp_path: Path) -> None:
    """Past sixty torch goes on on one that it keeps for that."""

    def deep(block: Any, x: torch.Tensor, depth: int) -> Any:
        if not depth:
            return block(x)
        return checkpoint(deep, block, x, depth - 1, use_reentrant=True)

    with attached(("cpu", "cpu", "cpu"), tmp_path, dtype=torch.float32) as run:
        x = torch.ones(2, 32, requires_grad=True)
        deep(run.model.blocks[0], x, 70).sum().backward()  # type: ignore[index]
        assert x.grad is not None
        found = x.grad.clone()
        x.grad = None
        run.model.blocks[0](x).sum().backward()  # type: ignore[index,operator]
        assert torch.equal(found, x.grad)


def test_a_forward_that_broke_off_on_another_thread_holds_up_nobody(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path, dtype=torch.float32) as run:
        model: Any = run.model

        def broken() -> None:
            handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.loss()
            handle.remove()

        elsewhere(broken)
        assert model.head.weight.detach().isfinite().all()
        plain(run, 0)


MOMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sleep": (lambda run: offload.sleep(run.model), "offload.sleep._home"),
    "wake": (lambda run: offload.wake(run.model), "offload.sleep._home"),
    "detach": (lambda run: offload.detach(run.model), "offload.engine.Engine.values_of"),
    "settle": (lambda run: run.engine.settle(), "offload.updates.Updates.settle"),
    "stream_weights": (lambda run: next(run.engine.stream_weights()), "offload.engine.in_backward"),
}
"""What takes a while, and what it calls in the middle."""


@pytest.mark.parametrize("name", MOMENTS)
def test_a_step_of_another_thread_comes_before_or_after(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle some values would be of before it, and some of after it, in silence."""
    what, inner = MOMENTS[name]
    with attached(("device", "cpu", "cpu"), tmp_path) as run:
        run.loss().backward()
        if name == "wake":
            offload.sleep(run.model)
        came: list[str] = []

        def step() -> None:
            try:
                run.optimizer.step()
            except (RuntimeError, offload.EngineError) as error:
                came.append(str(error))
            else:
                came.append("")

        other = threading.Thread(target=step)
        home, _, attribute = inner.rpartition(".")
        owner: Any = pkgutil.resolve_name(home)
        function = getattr(owner, attribute)

        def slowly(*args: Any, **options: Any) -> Any:
            if other.ident is None:
                other.start()
                other.join(0.05)
                assert not came
            return function(*args, **options)

        monkeypatch.setattr(owner, attribute, slowly)
        what(run)
        other.join(10)
        assert len(came) == 1
        assert ("asleep" in came[0], "closed" in came[0]) == (name == "sleep", name == "detach")


def test_to_look_where_threads_are_keeps_nothing_of_who_looks() -> None:
    """Not until the garbage collector comes."""

    class Held:
        pass

    def looking() -> weakref.ref[Held]:
        held = Held()
        any_in_torch()
        return weakref.ref(held)

    assert looking()() is None
