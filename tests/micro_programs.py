"""Random legal programs around `Config.micro_batches`, run attached and in plain PyTorch.

A program is a list of (what to do, seed). The attached run comes first. Where it refuses something,
by the sentence that it has for that, the plain run leaves that out too, or raises there, if it was
asked inside a backward: then both must be equal again, so a refusal has changed nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import offload
from cpu_adam import CPUSGD, CPUAdam
from tests.training import config_of, same_bits

WIDTH, WORDS = 8, 11

PLACEMENTS = (
    ("cpu", "cpu", "cpu"),
    ("cpu", "device", "cpu"),
    ("device", "cpu", "cpu"),
    ("device", "device", "cpu"),
    ("cpu", "cpu", "device"),
)

REFUSALS = ("before step()", "between the last backward and step()")
UNFORESEEN = "after its update had begun"
"""Only code in a hook may meet this, which nothing tells beforehand."""


class Refused(Exception):
    """The attached run refused what was asked; the plain one is to do as if."""


class Again(torch.autograd.Function):
    """A checkpoint by hand: its backward runs the function again, and a backward inside."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.x = run, x.detach()
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_(True)
            torch.autograd.backward(ctx.run(x), gradients[0])
        return None, x.grad


class AgainApart(Again):
    """The same in torch's other style, where the forward is not given its node."""

    @staticmethod
    def forward(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:  # type: ignore
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, ctx.x = inputs[0], inputs[1].detach()


def again(how: str, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`run(x)`, recomputed in backward by one of the ways there are."""
    if how == "checkpoint":
        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]
    if how == "to the end":
        with set_checkpoint_early_stop(False):
            return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]
    if not how or not (torch.is_grad_enabled() and x.requires_grad):
        return run(x)
    if how == "reentrant":
        return checkpoint(run, x, use_reentrant=True)  # type: ignore[no-any-return]
    return {"by hand": Again, "apart": AgainApart}[how].apply(run, x)  # type: ignore


TO_AUTOGRAD = ("", "checkpoint", "to the end")
"""Ways of which autograd knows all."""
WAYS = (*TO_AUTOGRAD, "reentrant", "by hand", "apart")


class Block(nn.Module):
    """One unit; `kind` says what is odd about it."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.how, self.branch = kind, "", False
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.peer: list[Any] = []

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "shift":
            return x + self.shift + (self.gain if self.branch else 0)
        if self.kind == "constant":
            x = x + self.gain.detach() * 0.1
        y = again(self.how if self.kind == "inner" else "", self.inner, x)
        if self.kind == "peer":
            y = self.peer[0](y) + self.shift
        if self.branch:
            y = y * self.gain
        return x + y + (self.shift if self.kind == "plain" else 0)


KINDS = ("plain", "plain", "shift", "constant", "inner", "peer")


class Net(nn.Module):
    """Blocks, with flags that a program sets; they change what a forward does."""

    def __init__(self, kinds: list[str], tied: bool):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        for before, one in zip([self.blocks[-1], *self.blocks], self.blocks):
            one.peer = [before]  # type: ignore[assignment]
            if before is one or before.kind == "peer":
                one.kind = "plain" if one.kind == "peer" else one.kind
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.how, self.order, self.size = "", list(range(len(kinds))), 1
        self.raw, self.peeks = 0, False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.peeks:
            with torch.no_grad():
                x = x + self.blocks[0](x).mean() * 0.01
        for at in range(0, len(self.order), self.size):
            region = [self.blocks[index] for index in self.order[at : at + self.size]]
            x = again(self.how, nn.Sequential(*region), x)
        if self.raw == 1:
            x = x * self.blocks[0].norm.weight  # type: ignore[union-attr, operator]
        if self.raw == 2:
            x = again(self.how, lambda x: x + self.blocks[-1].shift, x)  # type: ignore
        if self.raw == 3:
            x = x + self.blocks[0].gain  # type: ignore[operator]
        return self.head(x)  # type: ignore[no-any-return]


@dataclass
class Side:
    """One of the two runs."""

    model: Any
    optimizer: Any
    refused: list[bool] = field(default_factory=list)
    """What became of each attempt, in order."""
    attached: bool = True
    kept: dict[str, Any] = field(default_factory=dict)
    seen: list[torch.Tensor] = field(default_factory=list)
    """What the run has shown."""
    told: Counter[str] = field(default_factory=Counter)
    """What it was told, of what was refused."""
    rate: float = 0.0
    """With which an update may have begun."""
    at: int = 0
    declared: int = 0
    backwards: int = 0
    """Since the last step; before the last of those declared nothing may be refused."""

    def attempt(self, what: Callable[[], Any], *, hook: bool = False) -> Any:
        """What something gives that may be refused; then nothing of it is done.

        Raises:
            Refused: it was.
        """
        at, seen, self.at = self.at, len(self.seen), self.at + 1
        if not self.attached:
            if self.refused[at]:
                raise Refused
            return what()
        self.refused.append(False)
        try:
            return what()
        except RuntimeError as error:
            known = any(one in str(error) for one in (*REFUSALS, *[UNFORESEEN] * hook))
            if not known or self.backwards + hook < self.declared:
                raise
            self.refused[at] = True
            del self.seen[seen:]
            raise Refused(str(error)) from error

    def loss(self, r: random.Random) -> torch.Tensor:
        words = torch.randint(
            0, WORDS, (2, 3), generator=torch.Generator().manual_seed(r.randrange(99))
        )
        logits = self.model(words).float().view(-1, WORDS)
        loss = F.cross_entropy(logits, words.roll(1, 1).view(-1))
        self.seen.append(loss.detach())
        return loss

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """One that counts, so the step is frozen in it."""
        self.rate = self.optimizer.param_groups[0]["lr"]
        try:
            loss.backward(**options)
        except (Refused, ZeroDivisionError):  # In a hook: else it was not begun.
            self.backwards += 1
            raise
        self.backwards += 1

    def block(self, r: random.Random) -> Any:
        return self.model.blocks[r.randrange(len(self.model.blocks))]

    def ones(self) -> torch.Tensor:
        return torch.ones(1, 3, WIDTH, dtype=self.model.embed.weight.dtype)

    def parameter(self, r: random.Random) -> Any:
        return r.choice(list(self.model.parameters()))


# -- what a program does between steps -------------------------------------------------------------


def evaluate(side: Side, r: random.Random) -> None:
    mode = r.choice([torch.no_grad, torch.inference_mode, nullcontext])
    with mode():
        side.loss(r)


def generate(side: Side, r: random.Random) -> None:
    with torch.inference_mode():
        words = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(3):
            words = torch.cat([words, side.model(words)[:, -1:].argmax(-1)], 1)
    side.seen.append(words)


def part(side: Side, r: random.Random) -> None:
    with r.choice([torch.no_grad, torch.inference_mode, nullcontext])():
        side.seen.append(side.block(r)(side.ones()).detach())


def higher(side: Side, r: random.Random) -> None:
    if all(one.how in TO_AUTOGRAD for one in (side.model, *side.model.blocks)):
        loss = side.loss(r)
        leaves = [one for one in side.model.parameters() if one.requires_grad]
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
        side.seen += [one.clone() for one in found if one is not None]


def keep(side: Side, r: random.Random) -> None:
    side.kept["thrown"] = side.loss(r)


def drop(side: Side, r: random.Random) -> None:
    side.kept.clear()


def ways(side: Side, r: random.Random) -> None:
    side.model.how, side.model.size = r.choice(WAYS), r.choice([1, 1, 2])


def inner_ways(side: Side, r: random.Random) -> None:
    side.block(r).how = r.choice(WAYS)


def order(side: Side, r: random.Random) -> None:
    count = len(side.model.blocks)
    side.model.order = r.choice([list(range(count)), [0, *range(count)], [*range(count), 0]])


def branch(side: Side, r: random.Random) -> None:
    one = side.block(r)
    one.branch = not one.branch


def flags(side: Side, r: random.Random) -> None:
    side.model.raw, side.model.peeks = r.randrange(4), r.random() < 0.5


def freeze(side: Side, r: random.Random) -> None:
    one = side.parameter(r)
    one.requires_grad_(not one.requires_grad)


def edit(side: Side, r: random.Random) -> None:
    with torch.no_grad():
        side.parameter(r).mul_(0.9)
    side.kept.pop("thrown", None)


def rate(side: Side, r: random.Random) -> None:
    side.optimizer.param_groups[0]["lr"] = r.choice([1e-2, 3e-3, 1e-1])


def look(side: Side, r: random.Random) -> None:
    found = side.parameter(r).grad
    if found is not None:
        side.seen.append(found.clone())


def hold(side: Side, r: random.Random) -> None:
    side.kept["gradients"] = [one.grad for one in side.model.parameters()]


def failed(side: Side, r: random.Random) -> None:
    def boom(*_: object) -> None:
        raise ZeroDivisionError

    one, when = side.block(r), r.randrange(3)
    if when == 2 and not one.norm.weight.requires_grad:
        return
    register = (one.register_forward_pre_hook, one.register_forward_hook, None)[when]
    handle = one.norm.weight.register_hook(boom) if register is None else register(boom)
    try:
        side.attempt(lambda: side.backward(side.loss(r)))
    except ZeroDivisionError:
        if r.random() < 0.7:
            side.attempt(side.optimizer.zero_grad)
    finally:
        handle.remove()


BETWEEN: tuple[Callable[[Side, random.Random], None], ...] = (
    *(evaluate, evaluate, generate, part, part, higher, keep, drop, ways, ways, inner_ways),
    *(inner_ways, order, order, branch, branch, flags, freeze, edit, rate, look, hold, failed),
)


# -- backwards -------------------------------------------------------------------------------------


def plain(side: Side, r: random.Random) -> None:
    loss = side.loss(r)
    if r.random() < 0.3:
        evaluate(side, r)
    side.backward(loss)


def summed(side: Side, r: random.Random) -> None:
    side.backward(side.loss(r) + side.loss(r))


def penalty(side: Side, r: random.Random) -> None:
    side.backward(side.loss(r) + side.parameter(r).float().pow(2).sum() * 0.01)


def of_a_block(side: Side, r: random.Random) -> None:
    x = side.ones()
    y = side.block(r)(side.model.embed(torch.zeros(1, 3, dtype=torch.long)) + x)
    side.backward(y.sum())


def retained(side: Side, r: random.Random) -> None:
    side.kept["retained"] = loss = side.loss(r)
    side.backward(loss, retain_graph=True)


def of_the_kept(side: Side, r: random.Random) -> None:
    loss = side.kept.pop("thrown", None)
    side.backward(side.loss(r) if loss is None else loss)


def hooked(side: Side, r: random.Random) -> None:
    """Code in a hook: it looks, evaluates, or makes gradients of its own."""
    where, other, what, seed = side.parameter(r), side.parameter(r), r.randrange(3), r.randrange(99)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        more = 0.0
        if what == 0:
            more = other.detach().float().mean().item()
        elif what == 1:
            with torch.no_grad():
                more = side.block(random.Random(seed))(side.ones()).mean().item()
        else:
            with torch.enable_grad():
                side.block(random.Random(seed))(side.ones()).sum().backward()
        return gradient + more

    if not where.requires_grad:
        plain(side, r)
        return
    left = [hook]

    def once(gradient: torch.Tensor) -> Any:
        return side.attempt(partial(left.pop(), gradient), hook=True) if left else gradient

    loss = side.loss(r)
    handle = where.register_hook(once)
    try:
        side.backward(loss)
    finally:
        handle.remove()


PARTS = (*(plain,) * 8, summed, penalty, penalty, of_a_block, retained, of_the_kept, hooked)


# -- a step ----------------------------------------------------------------------------------------


def step(side: Side, r: random.Random) -> None:
    """As loops end one, some after a change of what a step may have begun with."""
    group, what = side.optimizer.param_groups[0], r.randrange(8)
    if what == 0:
        group["lr"] *= 2
    if what == 1:
        for one in side.kept.get("gradients", ()):
            _ = None if one is None else one.mul_(0.5)
    try:
        side.attempt(side.optimizer.step)
    except Refused:
        group["lr"] = side.rate
        side.attempt(side.optimizer.step)
    side.backwards = 0
    side.kept = {"old": list(side.kept.values()), "gradients": side.kept.get("gradients", ())}
    if r.random() < 0.9:
        side.attempt(partial(side.optimizer.zero_grad, set_to_none=r.random() < 0.8))
    if r.random() < 0.5:
        side.seen += [one.clone() for one in side.model.state_dict().values()]


ACTIONS: dict[str, Callable[[Side, random.Random], None]] = {
    "between": lambda side, r: r.choice(BETWEEN)(side, r),
    "part": lambda side, r: r.choice(PARTS)(side, r),
}


@dataclass
class Program:
    """What a seed stands for."""

    seed: int

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.count = r.choice([1, 1, 2, 3])
        self.kinds = [r.choice(KINDS) for _ in range(r.randint(2, 3))]
        self.tied, self.sgd = r.random() < 0.3, r.random() < 0.3
        self.dtype = r.choice([torch.float32, torch.bfloat16])
        self.placement = r.choice(PLACEMENTS)
        self.actions: list[tuple[str, int]] = []
        for _ in range(r.randint(3, 7)):
            exact = r.random() < 0.85
            names = ["between"] * r.choice([0, 0, 1, 2])
            for _ in range(self.count if exact else r.randint(1, self.count + 1)):
                names += ["part"] + ["between"] * (r.random() < 0.15)
            self.actions += [(name, r.randrange(1 << 30)) for name in [*names, "step"]]

    def start(self) -> tuple[Net, Any]:
        torch.manual_seed(self.seed)
        model = Net(self.kinds, self.tied).to(self.dtype)
        if self.sgd:
            return model, CPUSGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)

    def run(self, side: Side) -> None:
        """All of it."""
        for name, seed in self.actions:
            r = random.Random(seed)
            try:
                if name == "step":
                    step(side, r)
                else:
                    side.attempt(partial(ACTIONS[name], side, r))
            except Refused as refusal:
                side.told[str(refusal)] += 1
        side.kept.clear()
        side.seen += side.model.state_dict().values()
        for parameter in side.model.parameters():
            state = side.optimizer.state.get(parameter, {})
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if state.get(key) is not None:
                    side.seen.append(state[key].float())


def differs(seed: int, directory: Any) -> tuple[Counter[str], str]:
    """What the attached run of a program refused, and where the runs part; empty where nowhere."""
    program = Program(seed)
    model, optimizer = program.start()
    asked = config_of(program.placement, directory, micro_batches=program.count)
    attached = Side(*offload.attach(model, optimizer, asked), declared=program.count)
    with attached.optimizer.engine:
        program.run(attached)
    plain = Side(*program.start(), refused=attached.refused, attached=False)
    program.run(plain)
    assert plain.at == len(plain.refused)
    for number, (one, other) in enumerate(zip(attached.seen, plain.seen, strict=True)):
        if not same_bits(one.nan_to_num(0.5), other.nan_to_num(0.5)):  # No NaN is that of another.
            return attached.told, f"{number} of {len(plain.seen)} seen"
    return attached.told, ""
