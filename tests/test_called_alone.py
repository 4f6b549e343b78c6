"""Modules that are called by themselves, outside a forward of the model: as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.homes import Homes
from tests import training
from tests.training import Run

PLACEMENTS = training.first_fast(
    [("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), training.RESIDENT]
)
WIDTH = 8


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
        self.embed = nn.Embedding(training.VOCABULARY, WIDTH)
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.blocks = nn.ModuleList(Sharing(shared) for _ in range(3))
        self.head = nn.Linear(WIDTH, training.VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def looked_at_over_a_step(run: Run, number: int) -> None:
    """A state dict and views that are taken after such a call show the step, and edits count."""
    model: Any = run.model
    tokens = training.batch(run.generator)
    with torch.no_grad():
        model.embed(tokens)
        state, embedded = model.state_dict(), model.embed.weight.detach()
        model.blocks[1](torch.ones(1, WIDTH))
        shared = model.blocks[1].shared.data[0]
    training.plain(run, number)
    run.extra += [values.double().sum().item() for values in state.values()]
    with torch.no_grad():
        embedded.mul_(0.5)
        shared.mul_(2)


def called_by_hand(run: Run, number: int) -> None:
    """The loss is made module by module; an embedding and a head that are one, and a shared one."""
    model: Any = run.model
    tokens = training.batch(run.generator)
    for _ in range(2):
        x = model.embed(tokens)
        for block in model.blocks:
            x = x + block(x).tanh()
        logits = model.head(x).float().view(-1, training.VOCABULARY)
        nn.functional.cross_entropy(logits, tokens.roll(1, 1).view(-1)).backward()
    run.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("loop", [looked_at_over_a_step, called_by_hand])
def test_of_shared_weights(loop: training.Feature, placement: Any, tmp_path: Path) -> None:
    options = training.fp32(build=Tied)
    found = training.train(placement, tmp_path, loop, **options)
    training.assert_same(found, training.train_alone(loop, **options))


def assert_right(run: Run, weights: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> None:
    """No unit is in use, and what was taken of the weights then stays what they are."""
    assert run.engine.in_use.units == []
    views = {name: p.detach() for name, p in run.model.named_parameters()}
    state = run.model.state_dict()
    with torch.no_grad():
        for _ in range(2):
            run.model(training.batch(run.generator))
    for name, values in weights.items():
        for found in (views[name], state[name], held[name]):
            assert training.same_bits(found, values), name


def test_a_drive_that_fails_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with training.attached(("nvme", "cpu", "cpu"), tmp_path, **training.fp32(build=Tied)) as run:
        block: Any = run.model.blocks[0]  # type: ignore[index,union-attr]
        weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        held = {name: p.detach() for name, p in run.model.named_parameters()}
        look, errors = Homes.look, list[OSError]()

        def fails(homes: Homes, *args: Any, **kwargs: Any) -> Any:
            if errors:
                raise errors.pop()
            return look(homes, *args, **kwargs)

        monkeypatch.setattr(Homes, "look", fails)
        # As late as can be: what is read ahead of it is read.
        hook = block.own.register_forward_hook(lambda *_: errors.append(OSError("no drive")))
        with torch.no_grad(), pytest.raises(OSError, match="no drive"):
            block(torch.ones(1, WIDTH))
        hook.remove()
        assert_right(run, weights, held)


@pytest.mark.parametrize("name", ["own.weight", "shared"])
def test_a_change_that_is_refused(name: str, tmp_path: Path) -> None:
    """Of one of the two units: the other one is at rest after it, too."""
    with training.attached(("cpu", "cpu", "cpu"), tmp_path, **training.fp32(build=Tied)) as run:
        block: Any = run.model.blocks[0]  # type: ignore[index,union-attr]
        held = {name: p.detach() for name, p in run.model.named_parameters()}
        edited = held[f"blocks.0.{name}"]
        hook = block.register_forward_pre_hook(lambda *_: edited.mul_(0.5))
        with torch.no_grad(), pytest.raises(RuntimeError, match="was changed, while its own"):
            block(torch.ones(1, WIDTH))
        hook.remove()
        weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        assert_right(run, weights, held)


@torch.no_grad()
def not_recorded(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(-1)


GIVEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda weight: weight,
    "detached": lambda weight: weight.detach(),
    "its data, flat": lambda weight: weight.data.view(-1),
    "turned": lambda weight: weight.detach().t(),
    "not recorded": lambda weight: not_recorded(weight),
}


class Queries(nn.Module):
    """Gives what it has."""

    def __init__(self, given: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.given = GIVEN[given]

    def forward(self) -> torch.Tensor:
        return self.given(self.weight)


class Queried(nn.Module):
    def __init__(self, given: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(training.VOCABULARY, WIDTH)
        self.queries = nn.ModuleList(Queries(given) for _ in range(2))
        self.head = nn.Linear(WIDTH, training.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for queries in self.queries:
            x = x @ queries().view(WIDTH, WIDTH)
        return self.head(x)  # type: ignore[no-any-return]


def edited_as_given(run: Run, number: int) -> None:
    model: Any = run.model
    training.plain(run, number)
    given = model.queries[1]()
    with torch.no_grad():
        given.clamp_(-0.5, 0.5)
    given.data[:1].mul_(2)
    training.plain(run, number)
    run.extra += [given is model.queries[1].weight, given.detach().double().sum().item()]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_module_gives_of_its_weight_is_a_leaf_that_asks_for_a_gradient(
    placement: Any, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        queries = Queries("itself")
        queries.given = lambda weight: weight.detach().requires_grad_()
        return queries

    def gradient(model: nn.Module) -> torch.Tensor:
        given = model()
        (given * given).sum().backward()
        return given.grad  # type: ignore[no-any-return]

    with training.attached(placement, tmp_path, build=build, dtype=torch.float32) as run:
        assert training.same_bits(gradient(run.model), gradient(build()))


class Clamping(Queries):
    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return super().forward()


class Lasting(nn.Module):
    """Its weight stays in use from the first module to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.more = (
            nn.ModuleList([Clamping("detached")]),
            nn.ModuleList([Queries("itself")]),
        )
        self.more[0].weight = self.queries[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.queries[0]()
        return x @ self.more[0]()  # type: ignore[no-any-return]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_module_gives_is_its_weight_as_it_has_changed_it(
    placement: Any, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Lasting()

    def seen(model: nn.Module) -> list[torch.Tensor]:
        found = model(torch.eye(WIDTH))
        found.square().sum().backward()
        weight = next(model.parameters())
        return [found.detach(), weight.grad, weight.detach()]  # type: ignore[list-item]

    with training.attached(placement, tmp_path, build=build, dtype=torch.float32) as run:
        assert all(map(training.same_bits, seen(run.model), seen(build())))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("given", GIVEN)
def test_of_what_a_module_gives_of_its_weight_edits_count(
    given: str, placement: Any, tmp_path: Path
) -> None:
    options = training.fp32(build=partial(Queried, given))
    found = training.train(placement, tmp_path, edited_as_given, **options)
    expected = training.train_alone(edited_as_given, **options)
    training.assert_same(found, training.without_idle_states(expected))


def test_an_output_is_saved_to_a_file_as_without_an_engine(tmp_path: Path) -> None:
    """Torch warns of hooks that go lost with that, and warnings are errors here."""
    with training.attached(("cpu",) * 3, tmp_path) as run:
        torch.save(run.model.blocks[0](torch.ones(2, 32, dtype=torch.bfloat16)), tmp_path / "x")
