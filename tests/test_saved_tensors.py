"""What autograd saves of units, and of what is between: as in plain PyTorch, and let go as soon."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.covering import by_turns
from tests.training import Net, Run, as_in_plain_torch, attached, fp32, plain, same_bits, some_fast

PLACEMENT = ("cpu", "cpu", "cpu")


def stack() -> list[Any]:
    """What packs, for every pair on torch's stack, the lowest first."""
    internal: Any = torch._C._autograd
    found = []
    while (top := internal._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        internal._pop_saved_tensors_default_hooks()
    for pair in reversed(found):
        internal._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in reversed(found)]


@contextmanager
def pressed_in(module: nn.Module) -> Iterator[None]:
    """Ctrl-C in the forward of a module."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        handle.remove()


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_after_ctrl_c_in_a_recompute_the_next_forward_runs(reentrant: bool, tmp_path: Path) -> None:
    with attached(
        PLACEMENT, tmp_path, build=partial(Net, checkpointed=True, reentrant=reentrant)
    ) as run:
        plain(run, 0)
        loss = run.loss()
        with pressed_in(run.model.blocks[2].down):  # type: ignore[union-attr, index, arg-type]
            loss.backward()
        run.optimizer.zero_grad()
        assert stack() == []
        plain(run, 1)
        assert stack() == []


@pytest.mark.parametrize("own", ["before", "around"])
def test_after_ctrl_c_in_a_forward_the_hooks_of_the_user_stay_theirs(
    own: str, tmp_path: Path
) -> None:
    outer = (lambda tensor: tensor, lambda packed: packed)
    with attached(PLACEMENT, tmp_path) as run:
        plain(run, 0)
        with ExitStack() as before:
            if own == "before":
                before.enter_context(saved_tensors_hooks(*outer))
            within = run.model.blocks[2].up  # type: ignore[union-attr, index]
            with pressed_in(within), ExitStack() as around:  # type: ignore[arg-type]
                if own == "around":
                    around.enter_context(saved_tensors_hooks(*outer))
                run.loss()
            run.loss()
            assert stack() == [outer[0]] * (own == "before")
        assert stack() == []
        run.optimizer.zero_grad()
        plain(run, 1)


class Witness:
    """Lives as long as what it is put into."""


class Saving(nn.Module):
    """Has an operation that saves what it gives (`exp`), one that does not, and changes one."""

    def __init__(self, change: str):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change = change
        self.nodes: list[weakref.ref[Witness]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        given = hidden.exp()
        assert given.grad_fn is not None
        given.grad_fn.metadata["witness"] = witness = Witness()
        self.nodes.append(weakref.ref(witness))
        found = self.down(given if self.change != "input" else hidden)
        if self.change == "output":
            given.add_(1.0)
        if self.change == "input":
            hidden.mul_(2.0)
        return (found + given).sigmoid()  # type: ignore[no-any-return]


def saving(change: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Saving(change), Saving(change))


MODES: list[Callable[[], Any]] = [nullcontext, partial(torch.device, "cpu")]
"""With the second one, torch's operations are not plain."""


@pytest.mark.parametrize("mode", MODES, ids=["", "mode"])
@pytest.mark.parametrize("change", ["output", "input", "afterwards"])
def test_what_is_saved_and_then_changed_is_refused_as_torch_does(
    change: str, mode: Callable[[], Any], tmp_path: Path
) -> None:
    said = "modified by an inplace operation"
    with attached(PLACEMENT, tmp_path, build=partial(saving, change), dtype=torch.float32) as run:
        for model in (saving(change), run.model):
            with mode():
                found = model(torch.ones(3, 8))
                if change == "afterwards":
                    found.add_(1.0)
                with pytest.raises(RuntimeError, match=rf"{said}: \[torch.FloatTensor \[3, 8\]\]"):
                    found.sum().backward()


@pytest.mark.parametrize("mode", MODES, ids=["", "mode"])
def test_a_forward_that_has_no_backward_leaves_nothing(
    mode: Callable[[], Any], tmp_path: Path
) -> None:
    with attached(PLACEMENT, tmp_path, build=partial(saving, ""), dtype=torch.float32) as run:
        with mode():
            found = run.model(torch.ones(3, 8))
        nodes = [one for block in run.model for one in block.nodes]  # type: ignore[attr-defined]
        assert [one() is None for one in nodes] == [False, False]
        del found
        assert [one() is None for one in nodes] == [True, True]


class Spectral(nn.Module):
    """Uses its weight as complex numbers, in ways that torch keeps as bits of a view."""

    USES: ClassVar[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
        "conjugated": lambda x, weight: (x * weight.conj()[0]).real,
        "conjugated, transposed": lambda x, weight: (x @ weight.mH).real,
        "negated": lambda x, weight: x.real * weight.conj().imag[0],
        "negated and not": lambda x, weight: x.real * weight.conj().imag[1] + weight.conj()[0].real,
    }

    def __init__(self, use: str):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 2))
        self.use = self.USES[use]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.use(torch.complex(x, x.sin()), torch.view_as_complex(self.weight))
        return x + found.tanh()


def spectral(use: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Spectral(use), Spectral(use))


@pytest.mark.parametrize(("use", "at_rest"), by_turns(list(Spectral.USES), [False, True]))
def test_a_saved_view_of_a_weight_is_conjugated_and_negated_as_it_was(
    use: str, at_rest: bool, tmp_path: Path
) -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        found = model(torch.arange(24.0).view(3, 8) / 24)
        if at_rest:  # Lent to the functions that use it.
            found = found + Spectral.USES[use](found + 1j, torch.view_as_complex(model[1].weight))
        found.pow(2).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    with attached(PLACEMENT, tmp_path, build=partial(spectral, use), dtype=torch.float32) as run:
        found = gradients(run.model)
        assert all(map(same_bits, found, gradients(spectral(use))))


def weights_of_others(run: Run, number: int) -> None:
    """A checkpoint outside of modules, over weights at rest: in use, maybe, when it runs again."""
    blocks: Any = run.model.blocks

    def penalty(x: torch.Tensor) -> torch.Tensor:
        return sum((x @ block.up.weight.t()).sin().sum() for block in blocks)  # type: ignore

    x = torch.ones(2, 32, requires_grad=True)
    (run.loss() + checkpoint(penalty, x, use_reentrant=False)).backward()
    run.step()


@pytest.mark.parametrize("placement", some_fast([("nvme", "cpu", "nvme"), PLACEMENT]))
def test_a_checkpoint_outside_of_modules_runs_over_weights_at_rest(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    as_in_plain_torch(weights_of_others, placement, tmp_path, **fp32())


def test_sparse_tensors_may_be_saved(tmp_path: Path) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.edges = torch.eye(4).to_sparse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.edges, self.linear(x))

    with attached(PLACEMENT, tmp_path, build=Graph, dtype=torch.float32) as run:
        x = torch.randn(4, 4)
        run.model(x).sum().backward()
        weight = run.model.linear.weight  # type: ignore[union-attr]
        assert torch.equal(weight.grad, x.sum(0).expand(4, 4))  # type: ignore[arg-type, union-attr]
        run.step()


class Marked(torch.Tensor):
    """Of a class of the user's, with an attribute."""

    scale: float


class Scaling(torch.autograd.Function):
    """Saves a tensor that has no gradient, and asks it for more than its values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Marked) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x * factor.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        assert type(factor) is Marked
        return gradient * factor.scale, None


class Scaled(nn.Module):
    def __init__(self, factor: Marked):
        super().__init__()
        self.factor, self.up = factor, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return Scaling.apply(self.up(x), self.factor)


def test_what_is_saved_of_no_graph_is_the_object_itself(tmp_path: Path) -> None:
    factor = torch.ones(1).as_subclass(Marked)
    factor.scale = 3.0

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Scaled(factor), nn.Linear(8, 8))

    def gradient(model: Any) -> torch.Tensor:
        model(torch.ones(3, 8)).sum().backward()
        return model[0].up.weight.grad  # type: ignore[no-any-return]

    with attached(PLACEMENT, tmp_path, build=build, dtype=torch.float32) as run:
        assert same_bits(gradient(run.model), gradient(build()))
