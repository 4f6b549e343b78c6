"""Small models and training loops that the runtime tests run in every placement."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from cpu_adam import CPUSGD, CPUAdam, CPULion
from offload.planning.machine import Machine
from offload.planning.planner import plan
from offload.planning.profile import BLOCK_BYTES
from offload.runtime.runner import Pace

VOCABULARY = 50
TIERS = ("device", "cpu", "nvme")
ALL_PLACEMENTS = tuple(itertools.product(TIERS, repeat=3))
"""(params, gradients, optimizer), all 27."""

RESIDENT = ("device", "device", "device")

SAMPLED = [(p, TIERS[(TIERS.index(p) + TIERS.index(o)) % 3], o) for p in TIERS for o in TIERS]
"""All nine of params x optimizer, with each tier of gradients three times."""


def tiered(fast: bool, *values: Any) -> Any:
    """Parameters of a test in the fast tier or the slow one, named by themselves."""
    names = [one if isinstance(one, tuple) else (getattr(one, "__name__", one),) for one in values]
    name = "-".join(str(part) for parts in names for part in parts)
    return pytest.param(*values, marks=() if fast else pytest.mark.slow, id=name)


def some_fast(values: Iterable[Any], *, fast: int = 1) -> list[Any]:
    """Parameters of a test: the first ones in the fast tier, the others in the slow one."""
    first, others = list(values)[:fast], list(values)[fast:]
    return [*first, *(pytest.param(one, marks=pytest.mark.slow) for one in others)]


def needs(*packages: str) -> pytest.MarkDecorator:
    """For tests that import these themselves: else each process that collects them would."""
    lacking = [one for one in packages if find_spec(one) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"without {', '.join(lacking)}")


def some_rows_fast(rows: Iterable[tuple[Any, ...]], *, fast: int = 1) -> list[Any]:
    """The same of a test with several parameters, of which each row has all."""
    return [
        pytest.param(*row, marks=() if number < fast else pytest.mark.slow)
        for number, row in enumerate(rows)
    ]


def in_turn(names: Iterable[str], others: Sequence[Any]) -> list[Any]:
    """Parameters of a test: each name with one of the others, as placements, in the fast tier, in
    turn; with the rest in the slow one."""
    return [
        tiered(number % len(others) == at, name, other)
        for number, name in enumerate(names)
        for at, other in enumerate(others)
    ]


def everywhere(names: Iterable[str], fast: Iterable[tuple[str, Any]]) -> list[Any]:
    """Parameters of a test: each name in all placements; those pairs in the fast tier."""
    few = {*fast}
    return [tiered(one in few, *one) for one in itertools.product(names, ALL_PLACEMENTS)]


def round_about(placements: Sequence[tuple[str, str, str]]) -> list[Any]:
    """Parameters of a test: all pairs, each with the next one in the fast tier, others slow."""
    return [
        tiered((at + 1) % len(placements) == to, one, other)
        for at, one in enumerate(placements)
        for to, other in enumerate(placements)
    ]


class Block(nn.Module):
    def __init__(self, width: int, bias: bool = True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, head; tied, frozen or checkpointed on demand. The last layer of a
    block has a `bias`."""

    bias = True

    def __init__(
        self,
        *,
        width: int = 32,
        layers: int = 5,
        tied: bool = False,
        checkpointed: bool = False,
        reentrant: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, self.bias) for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointed, self.reentrant = checkpointed, reentrant
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
            x = self.drop(x)
        return self.head(self.norm(x))


class Regions(Net):
    """One checkpoint over several blocks: recomputed together, then left one by one. Without a bias
    autograd takes the weight of a block's last layer before what it has to recompute."""

    bias = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for region in (self.blocks[:3], self.blocks[3:]):
            x = checkpoint(nn.Sequential(*region), x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Positions(nn.Module):
    """Returns a view of its weight, as learned positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 32))

    def forward(self, count: int) -> torch.Tensor:
        return self.weight[:count]


class Positioned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.more = Positions(), Positions()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions, more = self.positions(tokens.shape[1]), self.more(tokens.shape[1])
        x = self.embed(tokens) + positions
        for block in self.blocks:
            x = block(x) * more
        return self.head(self.norm(x + positions))


def frozen(checkpointed: bool = False) -> Net:
    net = Net(checkpointed=checkpointed)
    for parameter in (*net.blocks[1].parameters(), net.blocks[2].up.weight, net.embed.weight):
        parameter.requires_grad_(False)
    return net


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 16), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(model, nn.Module):
        tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens).float()
    return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.roll(1, 1).view(-1))


@dataclass
class Run:
    """A training run under way, and what it leaves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    losses: list[float] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)

    @property
    def engine(self) -> offload.Engine:
        return self.optimizer.engine  # type: ignore[attr-defined]

    def loss(self) -> torch.Tensor:
        loss = loss_of(self.model, batch(self.generator))
        self.losses.append(loss.item())
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


Feature = Callable[[Run, int], None]
"""One training step in some loop: the run and the number of the step."""


def plain(run: Run, number: int) -> None:
    run.loss().backward()
    run.step()


def accumulation(run: Run, number: int) -> None:
    """Another number of micro-batches in every step."""
    for _ in range(1 + number % 3):
        run.loss().backward()
    run.step()


def two_micro_batches(run: Run, number: int) -> None:
    for _ in range(2):
        run.loss().backward()
    run.step()


def torch_clipping(run: Run, number: int) -> None:
    run.loss().backward()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    run.extra.append(norm.item())
    run.step()


def second_backward(run: Run, number: int) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    run.step()


def two_losses(run: Run, number: int) -> None:
    one, two = run.loss(), run.loss()
    (one + two).backward()
    run.step()


def fails(*_: Any) -> None:
    """A hook that does."""
    raise ZeroDivisionError("on purpose")


def fp32(**options: Any) -> dict[str, Any]:
    """Options of a run in float32."""
    return {"dtype": torch.float32, **options}


def config_of(placement: tuple[str, str, str], directory: Any, **config: Any) -> offload.Config:
    """Everything forced to its tier, with more than enough of each but where `config` says less."""
    params, gradients, states = placement
    budgets = {"device_memory": "64MiB", "cpu_memory": "64MiB", "nvme_space": "256MiB"}
    return offload.Config(
        params=params,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        optimizer=states,  # type: ignore[arg-type]
        nvme_path=directory,
        **{**budgets, **config},
    )


def smallest_budgets(
    placement: tuple[str, str, str],
    directory: Any,
    *,
    build: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **config: Any,
) -> dict[str, int]:
    """What `plan` just accepts: the least of the device, of the cpu given that, then of nvme."""
    kept = {"build": build, "dtype": dtype, "optimizer": optimizer}
    with attached(placement, directory, **kept, **config) as run:
        profile, rule = run.engine.plan.profile, run.engine.plan.states.rule
        is_host = run.engine.runner.device.is_host
    asked, free = config_of(placement, directory, **config), 1 << 60
    machine = Machine(device_bytes=free, cpu_bytes=free, nvme_bytes=free, device_is_cpu=is_host)

    def least(name: str, given: dict[str, int]) -> int:
        def fits(blocks: int) -> bool:
            try:
                given_here = {**given, name: blocks * BLOCK_BYTES}
                plan(profile, replace(asked, **given_here), machine, rule=rule)
            except offload.BudgetError:
                return False
            return True

        found = bisect_left(range(1 << 14), True, key=fits)
        assert fits(found)
        return found * BLOCK_BYTES

    budgets: dict[str, int] = {}
    for name in ("device_memory", "cpu_memory", "nvme_space"):
        budgets[name] = least(name, budgets)
    return budgets


@contextmanager
def attached(
    placement: tuple[str, str, str],
    directory: Any,
    *,
    build: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    pace: Pace | None = None,
    machine: Machine | None = None,
    **config: Any,
) -> Iterator[Run]:
    """A fresh model and optimizer, seeded, attached with everything forced to its tier."""
    torch.manual_seed(1)
    model = build().to(dtype)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer(model)
    asked = config_of(placement, directory, **config)
    _, attached_optimizer = offload.attach(model, made, asked, pace=pace, machine=machine)
    run = Run(model, attached_optimizer, torch.Generator().manual_seed(7))
    try:
        yield run
    finally:
        run.engine.close()


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]]
    extra: list[Any]


def train(
    placement: tuple[str, str, str],
    directory: Any,
    feature: Feature = plain,
    *,
    steps: int = 3,
    **options: Any,
) -> Result:
    """Train some steps and read everything back."""
    with attached(placement, directory, **options) as run:
        return trained(run, feature, steps)


def trained(run: Run, feature: Feature = plain, steps: int = 3) -> Result:
    """What a fresh run leaves after some steps."""
    torch.manual_seed(2)
    for number in range(steps):
        feature(run, number)
    return result_of(run)


def alone(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of `cpu_adam` that does what another one is asked to do."""
    kinds: Any = {torch.optim.AdamW: CPUAdam, torch.optim.Adam: CPUAdam, torch.optim.SGD: CPUSGD}
    kind = kinds.get(type(optimizer), CPULion)
    return kind(optimizer.param_groups, lr=optimizer.defaults["lr"])  # type: ignore[no-any-return]


def train_alone(
    feature: Feature = plain,
    *,
    steps: int = 3,
    build: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Result:
    """The same as `train` in plain PyTorch, without an engine."""
    torch.manual_seed(1)
    model = build().to(dtype)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer(model)
    return trained(Run(model, alone(made), torch.Generator().manual_seed(7)), feature, steps)


def without_idle_states(result: Result) -> Result:
    """Less what `cpu_adam` alone does not keep: steps that only Adam counts, unused momenta."""
    for number, slots in list(result.states.items()):
        if "exp_avg_sq" not in slots:
            slots.pop("step", None)
        if "momentum_buffer" in slots and not slots["momentum_buffer"].any():
            del slots["momentum_buffer"]
        if not slots:
            del result.states[number]
    return result


OF_TORCH = {"steps", "build", "dtype", "optimizer"}
"""Options that plain PyTorch has, too."""


def as_in_plain_torch(
    feature: Feature, placement: tuple[str, str, str], directory: Any, **options: Any
) -> Result:
    """Train: a loop has the bits of the same loop without an engine."""
    ours = without_idle_states(train(placement, directory, feature, **options))
    plainly = {name: value for name, value in options.items() if name in OF_TORCH}
    assert_same(ours, without_idle_states(train_alone(feature, **plainly)))
    return ours


def result_of(run: Run) -> Result:
    """All losses, weights and moments of a run, in memory of their own."""
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    return Result(run.losses, weights, run.optimizer.state_dict()["state"], run.extra)


def assert_same(one: Result, other: Result) -> None:
    """Bit for bit."""
    assert one.losses == other.losses
    assert one.extra == other.extra
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        assert same_bits(value, other.weights[name]), name
    assert one.states.keys() == other.states.keys()
    for key, slots in one.states.items():
        assert slots.keys() == other.states[key].keys()
        for name, value in slots.items():
            assert same_bits(value, other.states[key][name]), (key, name)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat, flat_other = (x.cpu().contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(flat, flat_other)
