"""Models of every structure that people build, each reading tokens and giving logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.training import VOCABULARY, Block, Net, Regions, frozen

WIDTH = 32


class Shell(nn.Module):
    """Embedding, something in the middle, head."""

    def __init__(self, middle: nn.Module, width: int = WIDTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.middle = middle
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(tokens)))  # type: ignore[no-any-return]


class Layers(nn.Module):
    """Blocks in a list, in an order that a method gives."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, bias=False) for _ in range(count))
        self.calls = 0

    def order(self, x: torch.Tensor) -> list[int]:
        return list(range(len(self.layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order(x):
            x = self.layers[index](x)
        self.calls += 1
        return x


class Reordered(Layers):
    """Another order in every call, with blocks left out and blocks used twice."""

    def order(self, x: torch.Tensor) -> list[int]:
        return [[0, 1, 2, 3], [3, 1, 1, 0], [2], [1, 3, 0, 2]][self.calls % 4]


class Branching(Layers):
    """Which blocks are used depends on the data."""

    def order(self, x: torch.Tensor) -> list[int]:
        bits = int(x.detach().float().abs().sum().item() * 64)
        return [0] + [index for index in (1, 2, 3) if bits >> index & 1]


class Sharing(Layers):
    """Two blocks share a matrix, two are one and the same, a third has its norm from the first."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.layers
        blocks[1].up = blocks[0].up
        blocks[2].norm.weight = blocks[0].norm.weight
        self.layers.append(blocks[3])


class Unused(Layers):
    """A block that is never used, one used every other time, a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(7))

    def order(self, x: torch.Tensor) -> list[int]:
        return [0, 2] if self.calls % 2 else [0]


class Buffered(nn.Module):
    """Buffers that the forward changes: running statistics, a counter, an average not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16)) for _ in range(3)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)).to(self.average.dtype))
        return x + self.average.to(x.dtype)


class Nested(nn.Module):
    """Stages of blocks, a list in a list, with a layer between that belongs to the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict(
                {"blocks": nn.ModuleList(Block(WIDTH) for _ in range(2)), "norm": nn.RMSNorm(WIDTH)}
            )
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            parts: Any = stage
            for block in parts["blocks"]:
                x = block(x)
            x = parts["norm"](x)
        return x


class Experts(nn.Module):
    """A block with a router and experts in a list, as Mixtral had it: data decides who works."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Block(WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        weight, chosen = self.router(x).float().softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            here = chosen == index
            out[here] = self.experts[index](x[here]) * weight[here].to(x.dtype)[:, None]
        return x + out


class Bare(nn.Module):
    """No list of modules: parameters of its own and layers by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.first, self.second = Block(WIDTH), Block(WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x @ self.weight) + self.bias) + x  # type: ignore


class Odd(nn.Module):
    """Scalars, empty parameters, one element, and sizes that fill no line."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.one = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i > 0) for i in range(3))
        self.odd = nn.Parameter(torch.randn(3, 5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return x * self.one + self.odd.sum() * 1e-3 + self.empty.sum()


class Islands(Layers):
    """Norms and a router in float32 inside a bfloat16 model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            block: Any = layer
            inside = block.norm(x.float()).to(x.dtype)
            x = x + block.down(F.gelu(block.up(inside)))
        return x * self.gate(x.float()).sigmoid().to(x.dtype)


class Recomputed(nn.Module):
    """Blocks that checkpoint what is in them, as Hugging Face's do: no hook sees the recompute.

    Each passes on a bias that the first has made, as T5's do, so that its gradient comes in the
    middle of the first one's backward.
    """

    class Layer(nn.Module):
        def __init__(self, first: bool):
            super().__init__()
            self.bias = nn.Linear(WIDTH, WIDTH) if first else None
            self.block = Block(WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)

        def inside(self, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
            if self.bias is not None:
                bias = self.bias(x).tanh()
            return self.mix(self.block(x)) + bias, bias

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return checkpoint(self.inside, x, bias, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(index % 3 == 0) for index in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class Around(Recomputed):
    """Such blocks that are called inside one another, by hooks on what is in them."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.layers
        self.inner = nn.ModuleList(self.Layer(True) for _ in range(2))
        layers[1].mix.register_forward_pre_hook(lambda _, args: self._through(0, args))
        layers[4].block.register_forward_pre_hook(lambda _, args: self._through(1, args))

    def _through(self, index: int, args: Any) -> Any:
        return (args[0] + self.inner[index](args[0], None)[0],)


class Parametrized(nn.Module):
    """Weights computed from others in every use, by torch's parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.last = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)  # type: ignore[no-any-return]


class Direct(Layers):
    """Reads its children's weights without calling them, as fused kernels do; last a tied one that
    was called before, as where the factors of an embedding are those of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for layer in self.layers:
            block: Any = layer
            inner = F.layer_norm(x, (WIDTH,), block.norm.weight, block.norm.bias)
            x = x + F.linear(F.gelu(F.linear(inner, block.up.weight)), block.down.weight)
        return x @ self.down.weight


class Recurrent(nn.Module):
    """Recurrent layers, which keep a list of their weights beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Residual convolutions with running statistics, in sequences inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(self._block(4) for _ in range(3)))

    def _block(self, channels: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
        return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(x.shape[0], 4, -1, WIDTH)
        for stage in self.stages:
            image = image + stage(image)
        return image.reshape(x.shape)


class Hooked(Layers):
    """Hooks of the user's: on the gradients of parameters, and around modules both ways."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.layers
        blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
        blocks[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 1.5,))
        blocks[2].register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0.5,))
        blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
        blocks[3].register_forward_hook(lambda module, args, output: output + args[0] * 0.5)


class _Product(torch.autograd.Function):
    """A linear layer that keeps its weight, and a view of it, past torch's own ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.transposed = weight, weight.t()
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        flat, inputs = gradient.reshape(-1, WIDTH), x.reshape(-1, WIDTH)
        nothing = 0 * ctx.weight[0] + 0 * weight[0]
        return gradient @ ctx.transposed.t() + nothing, flat.t() @ inputs


class Keeping(nn.Module):
    """Functions of the user's own that keep weights on their context, also one of a child that is
    not called, as losses do that are given the head's."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Product.apply(x, self.weight).tanh()  # type: ignore

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.scale, self.last = nn.Parameter(torch.ones(WIDTH)), self.Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return _Product.apply(x * self.scale, self.last.weight)  # type: ignore


def _torch_transformer() -> nn.Module:
    """torch's own layers, which take a path of their own in evaluation."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _shell(middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Shell(middle())


def _islands() -> nn.Module:
    """float32 where norms and the gate are, bfloat16 elsewhere."""
    model: Any = Shell(Islands()).to(torch.bfloat16)
    for layer in model.middle.layers:
        layer.norm.float()
    model.middle.gate.float()
    return model


def _unequal() -> nn.Module:
    """An embedding thirty times as large as a block, beside norms."""
    model = Shell(Layers(3))
    model.embed = nn.Embedding(8_000, WIDTH)
    return model


STRUCTURES: dict[str, Callable[[], nn.Module]] = {
    "tied embeddings": lambda: Net(tied=True),
    "parameters shared between blocks": _shell(Sharing),
    "frozen parameters and modules": frozen,
    "parameters used twice or never": _shell(Unused),
    "modules out of order": _shell(Reordered),
    "branches that depend on data": _shell(Branching),
    "experts in a list": lambda: Shell(nn.Sequential(Experts(), Experts())),
    "buffers changed in forward": _shell(Buffered),
    "lists in lists": _shell(Nested),
    "units of very unequal size": _unequal,
    "no list of modules": _shell(Bare),
    "scalars and empty parameters": _shell(Odd),
    "float32 islands": _islands,
    "checkpoints inside blocks": _shell(Recomputed),
    "such blocks inside each other": _shell(Around),
    "parametrized weights": _shell(Parametrized),
    "recurrent layers": _shell(Recurrent),
    "convolutions": _shell(Convolutions),
    "torch's own transformer": _shell(_torch_transformer),
    "hooks of the user's": _shell(Hooked),
    "functions that keep weights": _shell(Keeping),
    "weights read without a call": _shell(Direct),
    "checkpoints over several blocks": Regions,
    "dropout": lambda: Net(dropout=0.2),
}
"""What each is built by, in float32 (islands: as they are)."""
