"""Random legal programs around `p.grad`, run attached and in plain PyTorch.

A program is a list of (what to do, seed). What the attached run refuses, by a sentence that it has
for that, the plain run leaves out: then both must be equal again. What torch itself raises, on a
view of an odd shape for one, both must raise.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import offload
from cpu_adam import CPUSGD, CPUAdam
from tests.training import config_of, same_bits

WIDTH = 6

PLACEMENTS = (
    *(("cpu", "cpu", "cpu"),) * 2,
    ("device", "cpu", "cpu"),
    ("cpu", "device", "device"),
    ("cpu", "nvme", "cpu"),
    ("nvme", "nvme", "nvme"),
    ("device", "device", "cpu"),
    ("device", "device", "device"),
)

REFUSALS = ("before step()", "between the last backward and step()", "share memory (one was")


class Refused(Exception):
    """The attached run refused what was asked; the plain one is to leave it out."""


class Block(nn.Module):
    """A unit of several parameters, a square one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()  # type: ignore[no-any-return]


def net(tied: bool, frozen: bool) -> nn.Module:
    """Some units."""
    blocks = [Block() for _ in range(3)]
    if tied:
        blocks[2].linear.weight = blocks[0].linear.weight
    blocks[1].norm.bias.requires_grad_(not frozen)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *blocks)


@dataclass
class Side:
    """One of the two runs."""

    model: nn.Module
    optimizer: Any
    refused: list[bool] = field(default_factory=list)
    """What became of each attempt, in order."""
    attached: bool = True
    kept: list[Any] = field(default_factory=list)
    """Gradients, and views of them."""
    turned: list[Any] = field(default_factory=list)
    """Those that are not contiguous. Once nobody holds one, `p.grad` is."""
    seen: list[Any] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    at: int = 0

    def attempt(self, what: Callable[[], Any]) -> None:
        """Do what may be refused, or what torch may raise on."""
        at, seen, self.at = self.at, len(self.seen), self.at + 1
        if self.attached:
            self.refused.append(False)
        elif self.refused[at]:
            return
        try:
            what()
        except (RuntimeError, TypeError) as error:
            if self.attached and any(one in str(error) for one in REFUSALS):
                self.refused[at] = True
                del self.seen[seen:]
                self.told[str(error)] += 1
            else:
                self.seen.append(f"{type(error).__name__}: {str(error)[:40]}")

    def parameter(self, r: random.Random) -> Any:
        return r.choice([one for one in self.model.parameters() if one.requires_grad])

    def with_gradient(self, r: random.Random) -> Any:
        """One that has a gradient, else None."""
        found = [one for one in self.model.parameters() if one.grad is not None]
        return r.choice(found) if found else None


# -- what somebody holds ---------------------------------------------------------------------------

VIEWS: tuple[Callable[[Any], Any], ...] = (
    lambda g: g,
    lambda g: g.detach(),
    lambda g: g.data,
    lambda g: g.view(-1),
    lambda g: g.view(-1)[1::2],
    lambda g: g.view(-1).detach().view(-1)[:3],
    lambda g: g[0],
    lambda g: g.t(),
    lambda g: g.unsqueeze(0).data,
    lambda g: g.numpy(),
    lambda g: g.view(-1).numpy()[1:],
    lambda g: torch.from_numpy(g.numpy()),
    lambda g: list(g.unbind(0))[-1],
    lambda g: torch.utils.dlpack.from_dlpack(g.detach()),
    lambda g: g.new_zeros(0).set_(g.untyped_storage(), g.storage_offset(), g.size(), g.stride()),
)


def hold(side: Side, r: random.Random) -> None:
    one, view = side.with_gradient(r), r.choice(VIEWS)
    if one is not None:
        side.kept.append(view(one.grad))


def hold_all(side: Side, r: random.Random) -> None:
    view = r.choice(VIEWS[:4])
    side.kept += [view(p.grad) for p in side.model.parameters() if p.grad is not None]


def hold_in_another(side: Side, r: random.Random) -> None:
    one = side.with_gradient(r)
    if one is not None:
        other = torch.zeros_like(one, requires_grad=True)
        other.grad = one.grad
        side.kept.append(other)


def value(kept: Any) -> Any:
    if isinstance(kept, np.ndarray):
        return torch.from_numpy(kept)
    return kept.grad if kept.is_leaf and kept.requires_grad else kept


@torch.no_grad()
def edit(side: Side, r: random.Random) -> None:
    if side.kept:
        one = value(r.choice(side.kept))
        change: Any = r.choice([lambda g: g.mul_(0.5), lambda g: g.add_(0.25), lambda g: g.zero_()])
        change(one)


@torch.no_grad()
def edit_all(side: Side, r: random.Random) -> None:
    for one in side.kept:
        value(one).mul_(0.5)


def drop(side: Side, r: random.Random) -> None:
    del side.kept[: r.randint(0, len(side.kept))]


@torch.no_grad()
def look(side: Side, r: random.Random) -> None:
    side.seen += [value(one).clone() for one in side.kept]
    if r.random() < 0.5:
        side.seen += [p.grad if p.grad is None else p.grad.clone() for p in side.model.parameters()]


# -- what is done to p.grad ------------------------------------------------------------------------


def assign(side: Side, r: random.Random) -> None:
    one, how = side.with_gradient(r), r.randrange(9)
    if one is None:
        return
    if how == 0:
        one.grad = one.grad.detach()
    elif how == 1:
        one.grad = one.grad.clone()
    elif how == 2:
        one.grad = None
    elif how == 3:
        del one.grad
    elif how == 4 and one.dim() == 2:
        one.grad = one.grad.t()
        side.turned.append(one.grad)
    elif how == 5:
        one.grad = one.grad.view(-1).view(one.shape)
    elif how == 6:
        one.grad = torch.full_like(one, 0.5)
    elif how == 7:  # As autograd.grad(create_graph=True) gives it.
        side.kept.append((one * 0.5).clone())
        one.grad = side.kept[-1]
    else:
        one.grad *= 2


def assign_kept(side: Side, r: random.Random) -> None:
    one = side.parameter(r)
    fitting = [value(kept) for kept in side.kept]
    fitting = [kept for kept in fitting if kept.shape == one.shape and kept.dtype == one.dtype]
    if fitting:
        one.grad = r.choice(fitting)


def cut(side: Side, r: random.Random) -> None:
    """Gradients that are pieces of a buffer, which is kept."""
    one = side.parameter(r)
    buffer = torch.full((one.numel() + 2,), 0.125, dtype=one.dtype)
    one.grad = buffer[1:-1].view(one.shape)
    side.kept.append(buffer)


def set_data(side: Side, r: random.Random) -> None:
    one = side.with_gradient(r)
    if one is not None:
        one.grad.data = one.grad.data * 0.5


def turn(side: Side, r: random.Random) -> None:
    one = side.with_gradient(r)
    if one is not None and one.dim() == 2:
        side.turned.append(one.grad.t_())


@torch.no_grad()
def clip(side: Side, r: random.Random) -> None:
    if r.random() < 0.5:
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)
    else:
        torch.nn.utils.clip_grad_value_(side.model.parameters(), 0.1)


@torch.no_grad()
def loop(side: Side, r: random.Random) -> None:
    """Which leaves its variable behind."""
    last = [p.grad.data for p in side.model.parameters() if p.grad is not None]
    for one in last:
        one.mul_(0.5)
    side.kept += last[-1:]


def used(side: Side, r: random.Random) -> None:
    one = side.with_gradient(r)
    if one is not None:
        with torch.no_grad():
            one.sub_(one.grad, alpha=0.1)


def freeze(side: Side, r: random.Random) -> None:
    one = side.parameter(r)
    if sum(p.requires_grad for p in side.model.parameters()) > 3:
        one.requires_grad_(False)


def sleep(side: Side, r: random.Random) -> None:
    tier: Any = r.choice(["cpu", "nvme"])
    if side.attached:
        offload.sleep(side.model, tier)
    if r.random() < 0.5:
        edit(side, r)
    if side.attached:
        offload.wake(side.model)


def zero(side: Side, r: random.Random) -> None:
    owner = r.choice([side.optimizer, side.optimizer, side.model])
    owner.zero_grad(set_to_none=r.random() < 0.5)


def backward(side: Side, r: random.Random) -> None:
    generator = torch.Generator().manual_seed(r.randrange(99))
    one, hooked, penalized = side.parameter(r), r.random() < 0.2, r.random() < 0.2
    x = torch.randn(2, WIDTH, generator=generator).to(one.dtype)
    some = [p for p in side.model.parameters() if p.requires_grad and r.random() < 0.6]
    inputs = some if some and r.random() < 0.2 else None
    handle = one.register_hook(lambda g: g * 0.5) if hooked else None
    try:
        loss = side.model(x).float().pow(2).mean()
        if penalized:
            loss = loss + one.float().pow(2).sum() * 0.01
        side.seen.append(loss.detach())
        loss.backward(inputs=inputs)
    finally:
        if handle is not None:
            handle.remove()


def step(side: Side, r: random.Random) -> None:
    side.optimizer.step()


Action = Callable[[Side, random.Random], None]
ACTIONS: dict[str, Action] = {
    one.__name__: one
    for one in (
        *(hold, hold_all, hold_in_another, edit, edit_all, drop, look, assign, assign_kept, cut),
        *(set_data, turn, clip, loop, used, freeze, sleep, zero, backward, step),
    )
}

BETWEEN = (
    *("hold",) * 6,
    *("edit",) * 5,
    *("hold_all", "hold_in_another", "edit_all", "edit_all", "drop", "look", "look", "assign"),
    *("assign", "assign_kept", "cut", "set_data", "turn", "clip", "loop", "used", "freeze"),
)


@dataclass
class Program:
    """What a seed stands for."""

    seed: int

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.tied, self.frozen, self.sgd = (r.random() < 0.3 for _ in range(3))
        self.dtype = r.choice([torch.float32, torch.float32, torch.bfloat16])
        self.placement, self.declared = r.choice(PLACEMENTS), r.choice([None, None, 1])
        sleeps, names = r.random() < 0.2, list[str]()
        for _ in range(r.randint(3, 6)):
            for part in (["backward"] * r.choice([1, 1, 2]), ["step"], ["zero"]):
                names += [*part, *r.choices(BETWEEN, k=r.choice([0, 1, 2]))]
                names += ["sleep"] if sleeps and r.random() < 0.2 else []
            if r.random() < 0.3:
                names.remove("zero")
        self.actions = [(name, r.randrange(1 << 30)) for name in [*names, "look"]]

    def start(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(self.seed)
        model = net(self.tied, self.frozen).to(self.dtype)
        if self.sgd:
            return model, CPUSGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)

    def run(self, side: Side) -> None:
        """All of it."""
        for name, seed in self.actions:
            side.attempt(partial(ACTIONS[name], side, random.Random(seed)))
        side.kept.clear()
        side.seen += side.model.state_dict().values()


def differs(seed: int, directory: Any) -> tuple[Counter[str], str]:
    """What the attached run of a program refused, and where the runs part; empty where nowhere."""
    program = Program(seed)
    asked = config_of(program.placement, directory, micro_batches=program.declared)
    attached = Side(*offload.attach(*program.start(), asked))
    with attached.optimizer.engine:
        program.run(attached)
    plain = Side(*program.start(), refused=attached.refused, attached=False)
    program.run(plain)
    for number, (one, other) in enumerate(zip(attached.seen, plain.seen, strict=True)):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            same = same_bits(one.nan_to_num(0.5), other.nan_to_num(0.5))
        else:
            same = one == other
        if not same:
            return attached.told, f"{number} of {len(plain.seen)}: {one} {other}"
    return attached.told, ""
