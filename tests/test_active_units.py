"""Units in use: by modules called one by one, one inside another, again, or in other orders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.model import running
from offload.model.active_units import ActiveUnits
from offload.model.parameter import OffloadedParameter
from offload.model.units import FlatUnit
from offload.planning import planner
from offload.planning.layout import Plan, lay_out
from offload.planning.profile import StateChoice
from offload.program.ops import Lane, Op, Verb
from tests import training
from tests.paced_loops import Least, Loop, use_one_block_inside_another
from tests.small import config
from tests.structures import STRUCTURES
from tests.training import VOCABULARY, Net, Run, attached, batch, config_of, fp32, plain, same_bits

CPU, NVME = ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")
WIDTH = 8

# -- the bits of plain torch ---------------------------------------------------------------------


class Sharing(nn.Module):
    """Has weights of its own, and one that all blocks have: two units."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) @ self.shared


class Tied(nn.Module):
    """Embedding and head are tied, and the blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.blocks = nn.ModuleList(Sharing(shared) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def called_by_hand(run: Run, number: int) -> None:
    """The loss is made module by module; an embedding and a head that are one, and a shared one."""
    model: Any = run.model
    tokens = batch(run.generator)
    for _ in range(2):
        x = model.embed(tokens)
        for block in model.blocks:
            x = x + block(x).tanh()
        with torch.no_grad():  # Of a tied weight, between its calls.
            model.head.weight.mul_(0.5)
        logits = model.head(x).float().view(-1, VOCABULARY)
        nn.functional.cross_entropy(logits, tokens.roll(1, 1).view(-1)).backward()
    run.step()


def edited_between_parts(run: Run, number: int) -> None:
    """A part of the model is called by itself, and its weights are shared with another."""
    model: Any = run.model
    model.embed(batch(run.generator))
    model.embed.weight.data.mul_(0.5)
    run.extra.append(model.embed.weight.grad is None)
    run.loss().backward()
    model.embed(batch(run.generator))
    run.extra.append(model.embed.weight.grad.sum().item())
    run.step()


def cut_backward(run: Run, number: int) -> None:
    """A second backward raises in the midst of a block: gradients are those that came."""

    def stop(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    run.loss().backward()
    blocks: Any = run.model.blocks
    hook = blocks[1].own.weight.register_hook(stop)
    with pytest.raises(ZeroDivisionError):
        run.loss().backward()
    hook.remove()
    for parameter in (*blocks[1].parameters(), *run.model.parameters()):
        assert parameter.grad is not None
        run.extra.append(parameter.grad.double().sum().item())
    if number == 1:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.step()


LOOPS = {one.__name__: one for one in (called_by_hand, edited_between_parts, cut_backward)}


@pytest.mark.parametrize(("loop", "placement"), training.in_turn(LOOPS, [CPU, NVME]))
def test_the_bits_of_plain_torch(loop: str, placement: Any, tmp_path: Path) -> None:
    training.as_in_plain_torch(LOOPS[loop], placement, tmp_path, **fp32(build=Tied))


@dataclass
class Parcel:
    value: torch.Tensor


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 8))

    def forward(self, count: int) -> Parcel:
        return Parcel(self.weight[:count])


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in [one(4) for one in self.parts]:
            x = x + part.value * x
        return x.pow(2).mean()


def test_a_view_of_a_weight_in_an_object_outlives_the_slot(tmp_path: Path) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model(torch.linspace(-1, 1, 32).view(4, 8)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(1)
    expected = gradients(Parts())
    with attached(CPU, tmp_path, build=Parts, dtype=torch.float32) as run:
        assert all(map(same_bits, gradients(run.model), expected))


def test_an_output_without_views_stays_the_same_object(tmp_path: Path) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(2, 2), {"a": [torch.ones(2)]}

        def forward(self) -> Any:
            self.layer(torch.ones(2))
            return self.kept

    model = Returns()
    offload.attach(model, None, config(CPU, tmp_path))
    assert model() is model.kept
    offload.detach(model)


def test_an_output_is_saved_to_a_file_as_without_an_engine(tmp_path: Path) -> None:
    """Torch warns of hooks that go lost with that, and warnings are errors here."""
    with attached(CPU, tmp_path) as run:
        torch.save(run.model.blocks[0](torch.ones(2, 32, dtype=torch.bfloat16)), tmp_path / "x")


# -- after a backward that was broken off ----------------------------------------------------------


def _press(*_: object) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Run]:
    """A run after a backward that Ctrl-C ended in block 2."""
    with attached(("nvme", "cpu", "cpu"), tmp_path) as run:
        weight: Any = run.model.blocks[2].up.weight  # type: ignore[index,union-attr]
        hook = weight.register_hook(_press)
        with pytest.raises(KeyboardInterrupt):
            run.loss().backward()
        hook.remove()
        assert not isinstance(weight, OffloadedParameter)
        yield run


TOUCHES: dict[str, Callable[[Any], object]] = {
    "data": lambda weight: weight.data,
    "no gradient": lambda weight: weight.grad is None or weight.grad.shape,
    "a gradient": lambda weight: setattr(weight, "grad", torch.ones_like(weight)),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_touch_puts_at_rest_what_was_broken_off(touch: str, cut: Run) -> None:
    weight: Any = cut.model.blocks[2].up.weight  # type: ignore[index,union-attr]
    true = dict(cut.engine.stream_weights())["blocks.2.up.weight"]
    TOUCHES[touch](weight)
    assert isinstance(weight, OffloadedParameter)
    assert same_bits(weight.detach(), true)
    cut.optimizer.zero_grad()
    plain(cut, 1)


# -- beside a unit that has the slot ---------------------------------------------------------------


def seen_beside_the_slot(run: Run) -> list[torch.Tensor]:
    """After a step, the last block called within the first, whose slot is its own, too."""
    loop = Loop(run, None)
    loop.backward()
    run.step()
    use_one_block_inside_another(loop)
    return loop.seen


def test_beside_the_slot_a_unit_waits_for_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is late by more than it takes to look at its home. In CPU memory it has a slot here."""

    def with_slots(*args: Any, states: StateChoice, **how: Any) -> Plan:
        return lay_out(*args, states=replace(states, on_accelerator=True), **how)

    monkeypatch.setattr(planner, "lay_out", with_slots)
    build = partial(Least, tied=False, checkpointed=False)
    with attached(training.RESIDENT, tmp_path, build=build) as run:
        expected = seen_beside_the_slot(run)
        last = [one.name for one in run.engine.plan.profile.units].index("blocks.2")
    late = list[Op]()

    def pace(op: Op, since: float) -> float:
        if op.verb is not Verb.UPDATE or op.value.unit != last:
            return since
        late.append(op)
        return since + 0.2

    budgets = training.smallest_budgets(CPU, tmp_path, build=build)
    with attached(CPU, tmp_path, build=build, pace=pace, **budgets) as run:
        found = seen_beside_the_slot(run)
    assert late
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_what_a_backward_has_behind_it_keeps_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reentrant checkpoint's backward lies within that of the head, which is over."""
    kept: list[int] = []
    release_stayed = ActiveUnits.release_stayed

    def looked(units: ActiveUnits, *args: Any, **more: Any) -> None:
        release_stayed(units, *args, **more)
        kept.append(sum(one.stays for one in units.units if one is not more.get("but")))

    monkeypatch.setattr(ActiveUnits, "release_stayed", looked)
    options = fp32(build=partial(Net, checkpointed=True, reentrant=True))
    training.as_in_plain_torch(plain, ("nvme", "cpu", "cpu"), tmp_path, **options)
    assert kept
    assert not any(kept)


# -- threads of autograd, as there are wherever there is a device ----------------------------------


class Biased(nn.Module):
    """Takes a bias and passes it on, as T5's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> Any:
        return torch.tanh(self.inner(x) + bias), {"bias": bias}


class Pairs(nn.Module):
    """Two blocks to a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.bias = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Biased() for _ in range(6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(x)
        for first in range(0, 6, 2):
            x, bias = checkpoint(self._two, first, x, bias, use_reentrant=self.reentrant)
        return x

    def _two(self, first: int, x: torch.Tensor, bias: torch.Tensor) -> Any:
        for block in self.blocks[first : first + 2]:
            x, passed = block(x, bias=bias)
        return x, passed["bias"]


def elsewhere(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("reentrant", [False, True])
def test_units_are_held_in_the_same_order_on_any_thread(reentrant: bool, tmp_path: Path) -> None:
    """A recompute's arguments are numbered by the forward's thread, not by autograd's."""
    found = []
    for call in (lambda work: work(), elsewhere):
        with attached(CPU, tmp_path, build=partial(Pairs, reentrant), dtype=torch.float32) as run:
            engine: Any = run.engine
            hold, held = engine.hold, list[str]()

            def spy(unit: FlatUnit, hold: Any = hold, held: list[str] = held) -> None:
                held.append(unit.spec.name)
                hold(unit)

            engine.hold = spy
            for _ in range(2):
                call(run.model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward)
                run.step()
            found.append((held, [value for _, value in engine.stream_weights()]))
    (expected, weights), (order, others) = found
    assert order == expected
    assert all(map(same_bits, weights, others))
    assert list(dict.fromkeys(order)) == [f"blocks.{number}" for number in range(5, -1, -1)] + [
        "bias"
    ]


def test_whoever_calls_the_engine_in_a_backward_keeps_the_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a module's output has left the device its node is the caller's, beside the others."""
    build = partial(Net, checkpointed=True, tied=True)
    with attached(CPU, tmp_path, build=build) as run:
        loss = training.loss_of(run.model, batch(run.generator))
        alone: dict[str, list[bool]] = {}

        def entered(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            lock: Any = run.engine.lock
            alone.setdefault(name, []).append(lock._is_owned())
            return function(*args, **options)

        methods = ("enter", "leave", "hold", "collect", "end_pass")
        for name in methods:
            whose = run.engine.active if name == "leave" else run.engine
            monkeypatch.setattr(whose, name, partial(entered, name, getattr(whose, name)))
        saved = "require_version"  # For each saved weight.
        for unit in run.engine.units:
            monkeypatch.setattr(unit, saved, partial(entered, saved, unit.require_version))
        elsewhere(loss.backward)
    assert set(alone) == {*methods, saved}
    assert {name for name, found in alone.items() if not all(found)} == set()


# -- other orders than compiled --------------------------------------------------------------------


def test_a_first_backward_follows_its_forward(tmp_path: Path) -> None:
    """Which used the units in another order than they are declared."""

    class Reversed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(list(self)):
                x = block(x)
            return x

    model = Reversed(*[nn.Linear(8, 8) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    _, optimizer = offload.attach(model, optimizer, config_of(NVME, (str(tmp_path),)))
    with optimizer.engine as engine:  # type: ignore[attr-defined]
        loss = model(torch.ones(2, 8)).sum()
        before = engine.report().misses
        assert before
        loss.backward()
        assert engine.report().misses == before


def test_only_the_experts_that_are_chosen_are_used(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = STRUCTURES["experts in a list"]()
    model, _ = offload.attach(model, None, config_of(("nvme", "cpu", "cpu"), (str(tmp_path),)))
    called: list[str] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("experts"):
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with offload.engine_of(model) as engine, torch.no_grad():
        for seed in range(4):
            called.clear()
            model(batch(torch.Generator().manual_seed(seed))[:1, :2])
            used = [engine.units[unit].spec.name for unit in engine.passes.orders[Verb.FORWARD]]
            assert [name for name in used if "experts" in name] == called
            assert 2 <= len(called) < 8


# -- units whose backward needs no weights ------------------------------------------------------


class Recomputed(Net):
    """Embeddings inside checkpoints, more than there are slots."""

    def __init__(self) -> None:
        super().__init__(width=32, layers=1)
        self.again = nn.ModuleList(nn.Embedding(50, 32) for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for one in self.again:
            x = checkpoint(lambda y, one=one: y * one(tokens), x, use_reentrant=True)
        return self.head(self.norm(x))


def test_an_embedding_that_a_backward_recomputes_waits_for_its_fetch(tmp_path: Path) -> None:
    def pace(op: Op, since: float) -> float:
        return since + 0.01 * (op.lane in (Lane.H2D, Lane.DISK))

    expected = training.train_alone(plain, build=Recomputed)
    for placement in (("cpu", "cpu", "cpu"), ("nvme", "cpu", "cpu")):
        training.assert_same(
            training.train(placement, tmp_path, plain, build=Recomputed, pace=pace), expected
        )


def test_a_backward_that_raised_elsewhere_is_over_once_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator a thread of autograd's has it, and forgets it a moment after it raised."""
    call_at_end, kept = running.call_at_end, list[object]()

    def lingering(ended: Callable[[], None]) -> None:
        kept.append(ended)
        call_at_end(ended)

    def fails(loss: torch.Tensor) -> None:
        with pytest.raises(ZeroDivisionError):
            loss.backward()

    with attached(CPU, tmp_path) as run:
        plain(run, 0)
        loss = run.loss()
        hook = run.model.blocks[2].up.weight.register_hook(lambda _: 1 / 0)  # type: ignore
        monkeypatch.setattr(running, "call_at_end", lingering)
        elsewhere(partial(fails, loss))
        hook.remove()
        assert kept
        threading.Timer(0.05, kept.clear).start()
        run.optimizer.zero_grad()
        assert not kept
        plain(run, 1)
