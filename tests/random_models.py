"""Models drawn at random: of a seed always the same modules, whose values are torch's to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.structures import Keeping
from tests.training import VOCABULARY

WIDTH, TOKENS, DEPTH_MAX = 32, 6, 3


@dataclass
class Given:
    """What some parts return in place of a tensor."""

    x: Tensor
    aside: Tensor | None = None


FORMS: tuple[Callable[..., Any], ...] = (
    lambda *found: found,
    lambda x, aside, unused: {"x": x, "aside": aside, "unused": unused},
    lambda x, aside, unused: Given(x, aside),
)
"""What a part may make of its output, of one that is added to it, and of one that nobody uses."""


def bare(out: Any) -> Tensor:
    """The tensor of what a part returns, with the second one added where there is one."""
    if isinstance(out, Tensor):
        return out
    found = vars(out) if isinstance(out, Given) else out
    x, aside, *_ = found.values() if isinstance(found, dict) else found
    return x if aside is None else x + aside


class Leaf(nn.Module):
    """Holds parameters and modules by name, and calls a function of itself."""

    def __init__(self, call: Callable[[Any, Tensor], Any], **held: Any):
        super().__init__()
        self.call = call
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def _line(draw: Draw) -> nn.Module:
    """May share the weight of another one."""
    line = nn.Linear(WIDTH, WIDTH, draw.chance(0.5))
    others = [one for one in draw.made if type(one) is nn.Linear]
    if others and draw.chance(0.3):
        line.weight = draw.of(others).weight
    return line


def _mlp(draw: Draw) -> nn.Module:
    act = draw.of([nn.ReLU(), nn.ReLU(inplace=True), nn.GELU()])
    norm = draw.of([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Identity()])
    down = nn.Linear(2 * WIDTH, WIDTH, draw.chance(0.5))
    return nn.Sequential(norm, nn.Linear(WIDTH, 2 * WIDTH), act, down)


def _lists(draw: Draw) -> nn.Module:
    """Parameters in a list and a dict, of which the data may decide which is used."""

    def call(self: Any, x: Tensor) -> Any:
        used = self.some[int(x.sum().item() * 64) % 2 if draw.routes else 0]
        return x @ used * self.named["gain"] + self.named["shift"]

    some = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(2))
    named = nn.ParameterDict({"gain": torch.ones(WIDTH), "shift": torch.zeros(())})
    return Leaf(call, some=some, named=named)


LEAVES: dict[str, Callable[[Draw], nn.Module]] = {
    "line": _line,
    "mlp": _mlp,
    "norm": lambda draw: draw.of([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)]),
    "batch norm": lambda draw: nn.BatchNorm1d(TOKENS),
    "convolution": lambda draw: Leaf(
        lambda self, x: self.inner(x.transpose(1, 2)).transpose(1, 2),
        inner=nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    ),
    "torch's attention": lambda draw: Leaf(
        lambda self, x: self.inner(x, x, x, need_weights=False)[0],
        inner=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "recurrent": lambda draw: Leaf(
        lambda self, x: self.inner(x)[0], inner=nn.GRU(WIDTH, WIDTH, batch_first=True)
    ),
    "weight norm": lambda draw: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda draw: orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley"),
    "spectral norm": lambda draw: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "lists": _lists,
    "counting": lambda draw: Leaf(  # An average in a buffer, which the forward changes and uses.
        lambda self, x: self.line(x - self.average.mul_(0.9).add_(x.detach().mean((0, 1)))),
        line=nn.Linear(WIDTH, WIDTH),
        average=nn.Buffer(torch.zeros(WIDTH)),
    ),
    "keeping": lambda draw: Keeping.Layer() if draw.chance(0.5) else Keeping(),
    "dropout": lambda draw: nn.Dropout(0.2),
}

OF_BUFFERS = {"counting", "spectral norm", "batch norm"}
"""Those whose buffers tell whether a block was recomputed, as one of frozen weights is not."""

WAYS = (
    *("inside", "hooked", "twice", "recomputed", "reentrant", "gained", "one_by_one", "in_place"),
    *("cast", "taught", "read", "skipping", "experts", "by_data"),
)


class Around(nn.Module):
    """Calls its parts in one of the `WAYS`, each a method; by its flag in a variant of it."""

    def __init__(self, way: str, parts: list[nn.Module], flag: bool):
        super().__init__()
        self.way, self.parts, self.flag = way, nn.ModuleList(parts), flag
        self.by_reentrant = way == "reentrant" or (way == "one_by_one" and flag)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if way == "gained" else None
        self.router: Any = nn.Linear(WIDTH, len(parts), False) if way == "experts" else None
        if way == "hooked":
            self.parts[0].register_forward_hook(lambda _, args, out: bare(out) + args[0])
            self.parts[-1].register_full_backward_hook(lambda _, inner, outer: (inner[0],))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.way)(x)  # type: ignore[no-any-return]

    def inside(self, x: Tensor) -> Tensor:
        """One part after the other."""
        for part in self.parts:
            x = x + bare(part(x)) if self.flag else bare(part(x))
            x = x if self.gain is None else x.tanh() * self.gain
        return x

    hooked = inside

    def twice(self, x: Tensor) -> Tensor:
        return self.inside(self.inside(x).tanh() + x)

    def recomputed(self, x: Tensor) -> Tensor:
        """All parts in one checkpoint."""
        return x + checkpoint(self.inside, x, use_reentrant=self.by_reentrant)  # type: ignore

    reentrant = gained = recomputed

    def one_by_one(self, x: Tensor) -> Tensor:
        """Each part in a checkpoint of its own."""
        for part in self.parts:
            x = x + bare(checkpoint(part, x, use_reentrant=self.by_reentrant))
        return x

    def in_place(self, x: Tensor) -> Tensor:
        x = self.inside(x).mul(0.5)
        x.add_(1).mul_(0.5)
        x[..., 1].zero_()
        return x

    def cast(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = self.inside(x)
        return x + made.to(x.dtype)

    def taught(self, x: Tensor) -> Tensor:
        """By themselves, with a gradient or without."""
        with torch.set_grad_enabled(not self.flag and torch.is_grad_enabled()):
            made = self.inside(x.detach())
        return self.inside(x) + made

    def read(self, x: Tensor) -> Tensor:
        """Weights of its parts without a call of theirs, before it and after it."""
        for part in self.parts:
            weights = [p for p in part.parameters() if p.shape == (WIDTH, WIDTH)]
            x = F.linear(x, weights[0]).tanh() if weights and not self.flag else x
            x = x + bare(part(x))
            x = (x @ weights[-1].t()).tanh() if weights else x
        return x

    def skipping(self, x: Tensor) -> Tensor:
        kept = [x]
        for part in self.parts:
            kept.append(bare(part(kept[-1])).tanh())
        return torch.stack(kept[::2]).sum(0) + kept[-1]

    def experts(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).float().softmax(-1).max(-1)
        out = x.clone()
        for at in chosen.unique().tolist():
            made = out + bare(self.parts[at](x)) * weight.to(x.dtype)[..., None]
            out = torch.where((chosen == at)[..., None], made, out)
        return out

    def by_data(self, x: Tensor) -> Tensor:
        bits = int(x.detach().float().abs().sum().item() * 64)
        for at, part in enumerate(self.parts):
            x = x + bare(part(x)) if bits >> at & 1 else x
        return x * min(1.0, x.detach().float().norm().item())


class Draw:
    """What the parts of a model are drawn with."""

    def __init__(self, seed: int):
        self.random, self.made, self.names = Random(f"model {seed}"), list[nn.Module](), set[str]()
        self.of, self.routes = self.random.choice, self.chance(0.5)
        self.dtype = torch.bfloat16 if self.chance(0.4) else torch.float32
        # Nobody may choose what is used by values that a recompute makes anew.
        without = OF_BUFFERS - {"batch norm"} if self.routes else {"by_data", "experts"}
        without |= {"keeping" if self.chance(0.5) else "cast"}  # Torch casts no function for it.
        without |= set() if self.dtype == torch.float32 else {"orthogonal"}
        self.leaves = [one for one in LEAVES if one not in without]
        self.ways = [one for one in WAYS if one not in without]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def part(self, depth: int = 0) -> nn.Module:
        """A leaf, something around parts, or a part that is used elsewhere, too."""
        if self.made and self.chance(0.12):
            return self.of(self.made)
        if depth == DEPTH_MAX or self.chance(0.25 + 0.2 * depth):
            name = self.of(self.leaves)
            self.names.add(name)
            made = LEAVES[name](self)
        else:
            parts = [self.part(depth + 1) for _ in range(self.random.randint(1, 3))]
            made = Around(self.of(self.ways), parts, self.chance(0.5))
        if self.chance(0.15):
            made = self.giving(made)
        self.made.append(made)
        return made

    def giving(self, inner: nn.Module) -> nn.Module:
        """Returns what a part makes in some form, beside what nobody uses."""
        form, both = self.of(FORMS), self.chance(0.5)
        gain, unused = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

        def call(self: Any, x: Tensor) -> Any:
            return form(bare(self.inner(x)), x * self.gain if both else None, x * self.unused)

        return Leaf(call, inner=inner, gain=gain, unused=unused)


class Model(nn.Module):
    """Embedding, parts, head and loss, with a parameter of its own and exits on the way."""

    def __init__(self, seed: int):
        super().__init__()
        draw = Draw(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.parts = nn.ModuleList(draw.part() for _ in range(draw.random.randint(1, 5)))
        self.norm, self.form = nn.LayerNorm(WIDTH), draw.of(FORMS)
        self.head_by = draw.of(["called", "tied", "read", "product"])
        self.loss_by = draw.of(["plain", "recomputed", "reentrant", "in chunks", "looked at"])
        self.by_reentrant = self.loss_by == "reentrant"
        if self.head_by != "product":
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=draw.chance(0.3))
        if self.head_by == "tied":
            self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(WIDTH)) if draw.chance(0.5) else None
        self.exits = {at for at, _ in enumerate(self.parts) if draw.chance(0.2)}
        self.to(draw.dtype)
        freezes = not draw.names & OF_BUFFERS
        for parameter in self.parameters() if freezes and draw.chance(0.3) else ():
            parameter.requires_grad_(draw.chance(0.7))
        self.norm.requires_grad_(True)  # Something is trained.
        self.trained = [n for n, p in self.named_parameters() if freezes and p.requires_grad]
        """What loops may freeze, and train again."""

    def logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.head_by == "product":
            return x @ self.embed.weight.t()
        if self.head_by == "read":
            return F.linear(x, self.head.weight, self.head.bias)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).float().flatten(0, -2), targets.flatten())

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Any:
        targets, x = tokens.roll(1, 1), self.embed(tokens)
        x = x if self.gain is None else x * self.gain
        found = x.new_zeros((), dtype=torch.float32)
        for at, part in enumerate(self.parts):
            x = x + bare(part(x))
            if at in self.exits:
                found = found + self.loss(x, targets) * 0.3
        if self.loss_by in ("recomputed", "reentrant"):
            last = checkpoint(self.loss, x, targets, use_reentrant=self.by_reentrant)
        elif self.loss_by == "in chunks":
            last = torch.stack([self.loss(*row) for row in zip(x, targets)]).mean()
        else:
            last = self.loss(x, targets)
            last = last * 0.5 if self.loss_by == "looked at" and last.item() > 4 else last
        return self.form((found + last) * scale, None, x)
