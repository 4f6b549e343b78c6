"""What is done to an attached model as a whole: refused by name, or right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import offload
from offload.structure import Structure, structure_of
from tests.small import MIXED, adamw, config, small, tokens, torch_step
from tests.training import (
    RESIDENT,
    Run,
    alone,
    assert_same,
    fp32,
    loss_of,
    plain,
    same_bits,
    train,
    train_alone,
    without_idle_states,
)


@pytest.fixture(scope="module")
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _weight(model: Any) -> Any:
    model.head.weight = nn.Parameter(torch.zeros(50, 32))


def _past_torch(model: Any) -> Any:
    model.head._parameters["weight"] = nn.Parameter(torch.zeros(50, 32))


def _module(model: Any) -> Any:
    model.blocks.append(nn.Linear(2, 2))


def _embeddings(model: Any) -> Any:
    model.embed = nn.Embedding(60, 32)


def _swapped(model: Any) -> Any:
    torch.utils.swap_tensors(model.norm.weight, nn.Parameter(torch.ones(32)))


def _swapped_in(model: Any) -> Any:
    torch.utils.swap_tensors(nn.Parameter(torch.ones(32)), model.norm.weight)


def _identity(model: Any) -> Any:
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter": (_weight, "weight, a parameter of a Linear of an attached"),
    "a parameter, past torch": (_past_torch, r"head\.weight, a parameter of an attached"),
    "a module": (_module, r"5\.weight, in a module of a ModuleList|3\.weight"),
    "resized embeddings": (_embeddings, r"embed\.weight, in a module of a Net"),
    "a parametrization": (lambda m: parametrizations.weight_norm(m.head), "before attach, or aft"),
    "a parametrization of one": (_identity, "given other storage.*detach"),
    "swapped": (_swapped, r"swap_tensors\(\) of an offloaded"),
    "swapped in": (_swapped_in, r"swap_tensors\(\) of an offloaded"),
    "a parameter of it": (
        lambda m: nn.Parameter(m.norm.weight),
        r"before attach.*detach\(\)\.clone",
    ),
    "other gradients": (
        lambda m: setattr(m.head.weight, "grad_dtype", torch.bfloat16),
        r"grad_dtype = torch.bfloat16.*gradient_dtype='fp32'",
    ),
    "shards": (fully_shard, r"embed\.weight, a parameter of an attached"),
    "another device": (lambda m: m.to("meta"), "torch.float32 on meta.*detach"),
    "another dtype": (lambda m: m.half(), "detach"),
    "shared memory": (lambda m: m.share_memory(), r"share_memory_\(\).*clone"),
    "ranks": (DistributedDataParallel, r"DistributedDataParallel.*all_reduce"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_structure_is_refused_by_name(how: str, tmp_path: Path, one_rank: Any) -> None:
    change, message = CHANGES[how]
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        before = model.norm.weight.detach().clone()
        with pytest.raises((RuntimeError, ValueError), match=message):
            change(model)
            torch_step(model, optimizer)
        assert how == "shards" or torch.equal(model.norm.weight, before)


def test_after_detach_a_model_may_be_changed_again(tmp_path: Path) -> None:
    model = small()
    offload.attach(model, adamw(model), config(MIXED, tmp_path))
    offload.detach(model)
    model.embed = nn.Embedding(60, 32)
    model.extra = nn.Linear(2, 2)
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        torch_step(model, optimizer)


def test_a_wrapper_that_reduces_gradients_is_not_attached(tmp_path: Path, one_rank: Any) -> None:
    wrapped = DistributedDataParallel(small())
    with pytest.raises(ValueError, match=r"DistributedDataParallel.*all_reduce"):
        offload.attach(wrapped, adamw(wrapped), config(MIXED, tmp_path))


@pytest.mark.parametrize("placement", [RESIDENT, MIXED], ids="-".join)
def test_what_a_gradient_would_be_lost_with_is_not_attached(placement: Any, tmp_path: Path) -> None:
    model: Any = small()
    model.norm.weight.grad_dtype = torch.bfloat16
    with pytest.raises(ValueError, match=r"norm\.weight has grad_dtype torch\.bfloat16.*'fp32'"):
        offload.attach(model, adamw(model), config(placement, tmp_path))
    model.norm.weight.grad_dtype = torch.float32
    loss_of(model, tokens()).backward()
    with pytest.raises(ValueError, match=r"embed\.weight has a gradient.*without an optimizer"):
        offload.attach(model, None, config(placement, tmp_path))
    model.head.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"head\.weight has a gradient and it is frozen.*zero_grad"
    ):
        offload.attach(model, adamw(model), config(placement, tmp_path))
    model.head.weight.grad = None
    _, optimizer = offload.attach(model, adamw(model), config(placement, tmp_path))
    with optimizer.engine:
        optimizer.step()


def test_channels_last_after_attach_is_refused(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3))
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine, pytest.raises(ValueError, match="channels_last"):
        model.to(memory_format=torch.channels_last)


def test_what_changes_nothing_is_let_through(tmp_path: Path) -> None:
    """Trainers move models to where they are; optimizers' states, too."""
    model = small()
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        torch_step(model, optimizer)
        kept = list(model.parameters())
        model.to("cpu").to(torch.float32).float().cpu().to("cpu", torch.float32).train().eval()
        assert all(p is q for p, q in zip(model.parameters(), kept))
        before = optimizer.state[model.head.weight]["exp_avg"].clone()
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = {name: value.to("cpu") for name, value in state.items()}
        assert same_bits(optimizer.state[model.head.weight]["exp_avg"], before)
        assert optimizer.state[model.head.weight]["step"] == 1
        optimizer.state[model.head.weight] = {}
        assert not optimizer.state[model.head.weight]


def _tied(model: Any) -> None:
    model.head.weight = model.embed.weight


def _pruned(model: Any) -> None:
    prune.random_unstructured(model.blocks[1].up, "weight", 0.5)


def _replicated(model: Any) -> Any:
    return nn.DataParallel(model)


@pytest.mark.parametrize("change", [_tied, _pruned, _replicated])
def test_what_can_be_done_after_attach_is_right(change: Any, tmp_path: Path) -> None:
    def losses(attached: bool) -> list[float]:
        model = small(torch.bfloat16)
        optimizer = alone(adamw(model))
        if attached:
            _, optimizer = offload.attach(model, optimizer, config(MIXED, tmp_path))
        torch.manual_seed(3)
        used = change(model) or model
        return [torch_step(used, optimizer, seed) for seed in range(3)]

    assert losses(True) == losses(False)


# -- the optimizer's own hooks ------------------------------------------------------------------


@pytest.mark.parametrize("on_the_original", [True, False])
def test_hooks_of_the_optimizer_go_on(on_the_original: bool, tmp_path: Path) -> None:
    model = small()
    mine: Any = adamw(model)
    seen: list[str] = []

    def note(what: str) -> Any:
        return lambda optimizer, *_: seen.append(f"{what} {type(optimizer).__module__}")

    def register(optimizer: Any) -> list[Any]:
        return [
            optimizer.register_step_pre_hook(note("before")),
            optimizer.register_step_post_hook(note("after")),
            optimizer.register_state_dict_pre_hook(note("saved")),
            optimizer.register_load_state_dict_pre_hook(note("loaded")),
        ]

    handles = register(mine) if on_the_original else []
    _, optimizer = offload.attach(model, mine, config(MIXED, tmp_path))
    handles = handles or register(optimizer)
    with optimizer.engine:
        for _ in range(2):
            torch_step(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            for handle in handles:
                handle.remove()
    each = ("before", "after", "saved", "loaded")
    assert seen == [f"{what} offload.optimizer" for what in each]


# -- views that modules keep ------------------------------------------------------------------


class Stashes(nn.Module):
    """Keeps a view of its weight in its forward, under some name, in some container."""

    def __init__(self, put: Callable[[Any, torch.Tensor], Any]):
        super().__init__()
        self.linear, self.put = nn.Linear(4, 4), put

    def forward(self, x: torch.Tensor) -> Any:
        self.put(self, self.linear.weight.t())
        return self.linear(x)


PUTS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "attribute": (lambda m, view: setattr(m, "kept", view), r"Stashes\.kept"),
    "list": (lambda m, view: setattr(m.linear, "kept", [view]), r"Stashes\.linear\.kept"),
    "dict": (lambda m, view: setattr(m, "kept", {"a": view.detach()}), r"Stashes\.kept"),
}


@pytest.mark.parametrize("how", PUTS)
def test_a_view_stashed_in_forward_is_refused_by_name(how: str, tmp_path: Path) -> None:
    put, message = PUTS[how]
    internal: Any = torch._C._autograd
    model = nn.Sequential(Stashes(put))
    _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
    with optimizer.engine:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                model(torch.ones(1, 4))
            assert internal._top_saved_tensors_default_hooks(True) is None  # No guard is left.
        model[0].put = lambda m, view: setattr(m, "kept", view.clone())
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        model.eval()
        model[0].put = put
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(1, 4))


# -- torch.compile --------------------------------------------------------------------------------


def _blocks(model: Any, backend: str) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def _whole(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def broken_at_units(model: Any) -> None:
    """Let graphs end where an engine ends them: what inductor fuses is rounded otherwise."""
    for module in (model.embed, *model.blocks, model.norm, model.head):
        module.register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))
        module.register_forward_hook(torch._dynamo.disable(lambda *_: None))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own.
@pytest.mark.parametrize(
    ("how", "before", "backend", "checkpointed"),
    [
        *itertools.product(
            (_blocks, _whole), (True, False), ("aot_eager", "inductor"), (True, False)
        )
    ],
)
@pytest.mark.slow
def test_compiled(how: Any, before: bool, backend: str, checkpointed: bool, tmp_path: Path) -> None:
    """Blocks, or what lies between two hooks of the engine, give the same bits."""

    def run(attached: bool) -> Any:
        torch._dynamo.reset()
        model = small(checkpointed=checkpointed)
        optimizer = alone(adamw(model))
        if not attached:
            broken_at_units(model)
        used = how(model, backend) if before or not attached else model
        if attached:
            _, optimizer = offload.attach(used, optimizer, config(MIXED, tmp_path))
        if attached and not before:
            used = how(model, backend)
        losses = [torch_step(used, optimizer, seed) for seed in range(3)]
        with torch.no_grad():
            losses.append(loss_of(used, tokens()).item())
        return losses, [p.detach().clone() for p in model.parameters()]

    (ours, weights), (theirs, wanted) = run(True), run(False)
    assert ours == theirs
    assert all(same_bits(one, other) for one, other in zip(weights, wanted))


def compiled(run: Run, function: Callable[..., Any]) -> Callable[..., Any]:
    """By dynamo where there is an engine; torch alone computes the same without it, and sooner."""
    attached = hasattr(run.optimizer, "engine")
    return torch.compile(function, backend="eager") if attached else function


def compiled_loss(run: Run, number: int) -> None:
    """That uses weights at rest, one given and one found."""
    bias = run.model.norm.bias

    def penalized(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return loss + weight.pow(2).sum() * bias[:1].exp().squeeze()

    compiled(run, penalized)(run.loss(), run.model.head.weight).backward()
    run.step()


def compiled_edit(run: Run, number: int) -> None:
    plain(run, number)
    with torch.no_grad():
        compiled(run, lambda weight: weight.mul_(0.5).sum())(run.model.head.weight)


def compiled_step(run: Run, number: int) -> None:
    """With all that such a step asks of parameters."""
    weights = list(run.model.parameters())

    def step() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(weights, 0.5)
        seen = weights[-1].T.sum() + weights[-1].data.sum()
        weights[-1].data = weights[-1].data * 0.9
        run.step()
        return norm + seen

    run.loss().backward()
    run.extra.append(compiled(run, step)().item())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own.
@pytest.mark.filterwarnings("ignore:Profiler function:UserWarning")
@pytest.mark.parametrize("feature", [compiled_loss, compiled_edit, compiled_step])
def test_what_is_compiled_outside_of_the_model_has_true_weights(
    feature: Any, tmp_path: Path
) -> None:
    """Its graph is broken where it touches one that is at rest."""
    expected = train_alone(feature, **fp32())
    torch._dynamo.reset()
    assert_same(train(MIXED, tmp_path, feature, **fp32()), without_idle_states(expected))


def test_a_second_model_is_looked_for_once_in_each_attached_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, contains = [0], Structure.__contains__

    def counted(structure: Structure, parameter: object) -> bool:
        looks[0] += structure.engine() is attached_one.engine
        return contains(structure, parameter)

    first, second = small(), small()
    _, attached_one = offload.attach(first, adamw(first), config(MIXED, tmp_path))
    with attached_one.engine:
        monkeypatch.setattr(Structure, "__contains__", counted)
        assert structure_of(second.parameters()) is None
        assert looks == [len(list(second.parameters()))]
        found = structure_of([*second.parameters(), first.head.weight])
        assert found is not None
        assert found.engine() is attached_one.engine


# -- autocast ---------------------------------------------------------------------------------


def test_what_autocast_keeps_is_counted_and_told(tmp_path: Path) -> None:
    """At most the weights of one forward in the lower dtype; none where torch casts none."""
    for dtype, some in ((torch.float32, True), (torch.bfloat16, False)):
        model = small(dtype)
        model.blocks[0].requires_grad_(False)
        _, optimizer = offload.attach(model, adamw(model), config(MIXED, tmp_path))
        with optimizer.engine as engine:
            torch_step(model, optimizer)
            before = engine.notices
            assert engine.casts.bytes_max == 0
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for seed in range(2):
                    (loss_of(model, tokens(seed)) + loss_of(model, tokens(seed))).backward()
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            assert engine.casts.bytes_max == (2 * trained if some else 0)
            told = [notice for notice in engine.notices if notice not in before]
            assert len(told) == some
            assert all("autocast keeps copies" in notice for notice in told)
