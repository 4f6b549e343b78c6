"""Parameters at rest under autograd, the memory of private copies, and `p.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.resting import RestingParameter
from tests.training import RESIDENT, Net, Run, attached, batch, loss_of, plain, same_bits

EVERYWHERE = [("device", "cpu", "cpu"), ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")]


def fp32(placement: tuple[str, str, str], directory: Path, **options: Any) -> Any:
    return attached(placement, directory, dtype=torch.float32, **options)


@pytest.fixture(params=EVERYWHERE[::2], ids="-".join)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A bf16 run of one step, everything at rest."""
    with attached(request.param, tmp_path, build=lambda: Net(layers=3)) as made:
        plain(made, 0)
        yield made


def block(run: Run) -> Any:
    return run.model.blocks[2]  # type: ignore[index,union-attr]


def values(run: Run) -> dict[str, torch.Tensor]:
    """All weights, read past the trap."""
    return {name: tensor.clone() for name, tensor in run.engine.stream_weights()}


# -- autograd ---------------------------------------------------------------------------------


def test_autograd_grad_with_parameters_as_inputs(tmp_path: Path) -> None:
    found = []
    for placement in EVERYWHERE:
        with fp32(placement, tmp_path) as run:
            inputs = [block(run).up.weight, run.model.head.weight]
            grads = torch.autograd.grad(run.loss(), inputs)
            assert all(p.grad is None for p in run.model.parameters())
            run.loss().backward()
            run.step()
            plain(run, 1)
            found.append([*grads, block(run).up.weight.detach().clone()])
    for one in found:
        assert all(same_bits(a, b) for a, b in zip(one, found[0]))
    torch.manual_seed(1)
    model = Net()
    loss = loss_of(model, batch(torch.Generator().manual_seed(7)))
    wanted = torch.autograd.grad(loss, [model.blocks[2].up.weight, model.head.weight])
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted))


def test_backward_with_inputs(tmp_path: Path) -> None:
    with fp32(("nvme", "cpu", "cpu"), tmp_path) as run:
        weight = block(run).up.weight
        run.loss().backward(inputs=[weight])
        assert weight.grad is not None
        assert sum(p.grad is not None for p in run.model.parameters()) == 1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_a_backward_for_some_parameters_calls_sees_the_others(
    checkpointed: bool, tmp_path: Path
) -> None:
    """Hooks, and recomputes of what no module announces: both read parameters at rest."""

    def found(run: Run) -> list[torch.Tensor]:
        model: Any = run.model
        one, other = model.blocks[0].up.weight, model.blocks[1].down.weight

        def loss() -> torch.Tensor:
            hidden = model.blocks[1](model.blocks[0](torch.ones(4, 32)))
            work: Any = lambda x: F.linear(x, model.head.weight).square().mean()  # noqa: E731
            return checkpoint(work, hidden, use_reentrant=False) if checkpointed else work(hidden)

        one.register_hook(lambda gradient: gradient + model.head.weight.detach()[0, 0])
        given = torch.autograd.grad(loss(), [one, other])
        missing = torch.autograd.grad(loss(), [one, model.norm.bias], materialize_grads=True)
        loss().backward(inputs=[one])
        assert other.grad is None
        torch.autograd.backward([loss(), other], [None, torch.ones_like(other)])  # One of both.
        added = one.grad.clone(), other.grad.clone()
        run.optimizer.zero_grad()
        loss().backward(inputs=[one])
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss(), [one, model.norm.bias])
        return [*given, *missing, *added, one.grad.clone()]

    results = []
    for placement in (RESIDENT, ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")):
        with fp32(placement, tmp_path) as run:
            results.append(found(run))
    for one in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(one, results[0], strict=True))
    assert all(value.isfinite().all() for value in results[0])


def test_hooks_on_parameters(run: Run) -> None:
    weight = block(run).up.weight
    seen: list[tuple[torch.Size, bool]] = []
    handles = [
        weight.register_hook(lambda g: seen.append((g.shape, bool(g.any()))) or g * 0),
    ]
    with pytest.raises(RuntimeError, match=r"register_post_accumulate_grad_hook: .*register_hook"):
        weight.register_post_accumulate_grad_hook(lambda p: None)
    run.loss().backward()
    assert seen == [((128, 32), True)]
    assert not weight.grad.any()
    for handle in handles:
        handle.remove()
    run.step()
    run.loss().backward()
    assert len(seen) == 1
    assert weight.grad.any()


def test_a_step_between_forward_and_backward_is_an_error(run: Run) -> None:
    loss = run.loss()
    run.loss().backward()
    run.optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified.*between a forward and its backward|inplace"):
        loss.backward()
    run.optimizer.zero_grad()
    plain(run, 1)


def test_an_edit_between_forward_and_backward_is_an_error(run: Run) -> None:
    loss = run.loss()
    with torch.no_grad():
        block(run).up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    run.optimizer.zero_grad()
    plain(run, 1)


def test_a_function_of_very_many_parameters(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(520)))

    with attached(("cpu", "cpu", "cpu"), tmp_path, build=build) as run:
        vector = nn.utils.parameters_to_vector(run.model.parameters())
        assert vector.numel() == 520 * 6


def test_sparse_tensors_may_be_saved(tmp_path: Path) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.edges = torch.eye(4).to_sparse()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.edges, self.linear(x))

    with attached(("cpu", "cpu", "cpu"), tmp_path, build=Graph, dtype=torch.float32) as run:
        x = torch.randn(4, 4)
        run.model(x).sum().backward()
        weight = run.model.linear.weight  # type: ignore[union-attr]
        assert torch.equal(weight.grad, x.sum(0).expand(4, 4))  # type: ignore[arg-type, union-attr]
        run.step()


def test_create_graph_is_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="create_graph"):
        run.loss().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(run.loss(), [block(run).up.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        block(run).up.weight.pow(2).sum().backward(create_graph=True)
    plain(run, 1)


def test_functional_use_at_rest_has_the_gradient_of_torch(tmp_path: Path) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    theirs: Any = Net().blocks[2]
    (F.linear(x, theirs.up.weight, theirs.up.bias).pow(2).sum() + theirs.up.weight.sum()).backward()
    with fp32(("nvme", "nvme", "nvme"), tmp_path) as run:
        ours = block(run)
        out = F.linear(x, ours.up.weight, ours.up.bias).pow(2).sum() + ours.up.weight.sum()
        out.backward()
        assert same_bits(ours.up.weight.grad, theirs.up.weight.grad)
        assert same_bits(ours.up.bias.grad, theirs.up.bias.grad)
        torch.func.functional_call(
            run.model, dict(run.model.named_parameters()), (batch(run.generator),)
        )


# -- exposed memory ---------------------------------------------------------------------------


def test_exposed_memory_is_bounded(tmp_path: Path) -> None:
    limit = 20_000  # two of the large weights
    with attached(("nvme", "cpu", "cpu"), tmp_path, exposed_memory=limit) as run:
        plain(run, 0)
        with pytest.raises(MemoryError, match=r"stream_weights\(\)") as caught:
            run.model.state_dict()
        assert "exposed_memory" in str(caught.value)
        del caught
        total = 0.0
        for parameter in run.model.parameters():
            total += parameter.detach().float().norm().item()
            assert run.engine.exposures.bytes <= limit
        assert total > 0
        streamed = 0
        for name, tensor in run.engine.stream_weights():
            assert run.engine.exposures.bytes <= limit
            streamed += tensor.numel()
            assert name in dict(run.model.named_parameters())
        assert streamed == sum(p.numel() for p in run.model.parameters())
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.fill_(0.5)
        assert all(value.eq(0.5).all() for value in values(run).values())
        plain(run, 1)
        assert run.engine.exposures.bytes == 0


def test_edits_put_home_to_make_room_are_what_the_next_forward_uses(tmp_path: Path) -> None:
    """The slot of a unit that is alone in it holds what was there before the edit."""
    outputs = []
    for placement in (RESIDENT, ("cpu", "cpu", "cpu"), ("nvme", "cpu", "cpu")):
        with fp32(placement, tmp_path, exposed_memory=20_000) as run, torch.no_grad():
            tokens = batch(run.generator)
            run.model(tokens)
            for parameter in run.model.parameters():
                parameter.data.mul_(2)
            outputs.append(run.model(tokens))
    assert all(same_bits(one, outputs[0]) for one in outputs)


def test_who_holds_data_makes_no_use_a_miss(run: Run) -> None:
    kept = [p.data for p in run.model.parameters()]
    plain(run, 1)
    misses = run.engine.passes.misses
    plain(run, 2)
    assert (run.engine.passes.misses, len(kept)) == (misses, len(list(run.model.parameters())))


def test_copies_go_when_nobody_holds_them(run: Run) -> None:
    held = block(run).up.weight.detach()
    block(run).down.weight.detach()
    assert run.engine.exposures.bytes == 2 * held.nbytes
    plain(run, 1)
    assert run.engine.exposures.bytes == held.nbytes
    del held
    plain(run, 2)
    assert run.engine.exposures.bytes == 0


@pytest.mark.parametrize("hold", [lambda p: p.data, lambda p: p.detach(), lambda p: p.view(-1)[:]])
def test_a_held_alias_shows_the_new_values(hold: Callable[[Any], Any], run: Run) -> None:
    with torch.no_grad():
        alias = hold(block(run).up.weight)
    old = alias.clone()
    for number in range(2):
        plain(run, number)
    now = values(run)["blocks.2.up.weight"].view(alias.shape)
    assert same_bits(alias.detach(), now)
    assert not same_bits(alias.detach(), old)
    with torch.no_grad():
        alias.zero_()
    assert not values(run)["blocks.2.up.weight"].any()


def test_a_held_alias_changes_no_bit(tmp_path: Path) -> None:
    found = []
    for hold in (False, True):
        with attached(("nvme", "cpu", "nvme"), tmp_path) as run:
            kept = [p.data for p in run.model.parameters()] if hold else []
            for number in range(3):
                plain(run, number)
            found.append((run.losses, values(run)))
            del kept
    assert found[0][0] == found[1][0]
    assert all(same_bits(value, found[1][1][name]) for name, value in found[0][1].items())


# -- gradients --------------------------------------------------------------------------------


def test_grad_is_none_inside_backward_and_there_after(run: Run) -> None:
    weight = block(run).up.weight
    seen: list[Any] = []
    run.model.embed.weight.register_hook(lambda g: seen.append(weight.grad))  # type: ignore
    run.loss().backward()
    assert seen == [None]
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert weight.grad.is_contiguous()
    assert weight.grad.device.type == "cpu"
    assert weight.grad.dtype == torch.bfloat16


def test_grad_is_one_view_and_edits_count(run: Run) -> None:
    weight, bias = block(run).up.weight, block(run).up.bias
    run.loss().backward()
    gradient = weight.grad
    assert weight.grad.data_ptr() == gradient.data_ptr()
    gradient.fill_(0.5)
    weight.grad[0].mul_(2)
    assert weight.grad[0].eq(1).all()
    bias.grad = None
    before = values(run)
    run.optimizer.step()
    moment = run.optimizer.state[weight]["exp_avg"]
    assert (moment[0] - moment[1]).gt(0.04).all()
    assert same_bits(values(run)["blocks.2.up.bias"], before["blocks.2.up.bias"])
    assert weight.grad is not None  # until zero_grad
    assert weight.grad[0].eq(1).all()
    run.optimizer.zero_grad()
    assert weight.grad is None


def test_grad_can_be_assigned_and_deleted(run: Run) -> None:
    weight = block(run).up.weight
    mine = torch.full((128, 32), 0.25, dtype=torch.bfloat16)
    weight.grad = mine
    assert torch.equal(weight.grad, mine)
    weight.grad = weight.grad  # of itself
    weight.grad += 0.25
    assert weight.grad.eq(0.5).all()
    run.loss().backward()
    assert not weight.grad.eq(0.5).all()
    del weight.grad
    assert weight.grad is None
    weight.grad = torch.zeros(128, 32, dtype=torch.bfloat16)
    run.step()
    assert run.optimizer.state[weight]["step"] == 2


def test_accumulation_adds_to_an_edited_gradient(tmp_path: Path) -> None:
    found = []
    for placement in EVERYWHERE:
        with attached(placement, tmp_path) as run:
            run.loss().backward()
            weight = block(run).up.weight
            weight.grad.mul_(3)
            run.loss().backward()
            found.append(weight.grad.clone())
    assert all(same_bits(one, found[0]) for one in found)


def test_gradients_on_nvme_are_shown_up_to_a_limit(tmp_path: Path) -> None:
    limit = 30_000
    with attached(("cpu", "nvme", "cpu"), tmp_path, exposed_memory=limit) as run:
        run.loss().backward()
        first = next(iter(run.model.parameters()))
        assert first.grad is not None
        with pytest.raises(MemoryError, match="max_grad_norm") as caught:
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        assert "exposed_memory" in str(caught.value)
        run.step()
        plain(run, 1)


def test_a_gradient_that_cannot_be_read_is_not_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(("cpu", "nvme", "cpu"), tmp_path) as run:
        run.loss().backward()
        parameter = run.model.head.weight
        with monkeypatch.context() as patch:
            patch.setattr(run.engine.executor, "peek", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                assert parameter.grad is not None
        assert parameter.grad is not None
        assert parameter.grad.any()


def test_a_gradient_that_is_kept_is_the_users(run: Run) -> None:
    """After zero_grad what was shown before is not part of the next step."""
    run.loss().backward()
    weight = block(run).up.weight
    old = weight.grad
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.loss().backward()
    wanted = weight.grad.clone()
    run.optimizer.zero_grad()
    old.fill_(7)
    assert weight.grad is None
    run.generator.manual_seed(7)
    run.loss().backward()
    assert not weight.grad.eq(7).any()
    assert wanted.shape == weight.grad.shape


def test_one_gradient_given_up_by_itself_is_its_holders(run: Run) -> None:
    run.loss().backward()
    weight, bias = block(run).up.weight, block(run).up.bias
    old, kept = weight.grad, bias.grad
    before = old.clone()
    weight.grad = None
    run.loss().backward()
    assert same_bits(old, before)
    assert kept is bias.grad


def test_the_data_of_a_gradient_can_be_assigned(run: Run) -> None:
    run.loss().backward()
    weight = block(run).up.weight
    weight.grad.data = torch.full_like(weight, 3)
    wanted = weight.grad.clone()
    run.loss().backward(inputs=[run.model.head.weight])
    assert same_bits(weight.grad, wanted)
    run.optimizer.zero_grad()
    weight.grad = torch.ones_like(weight)
    weight.grad.data = torch.zeros_like(weight)
    before = weight.detach().clone()
    run.optimizer.param_groups[0]["weight_decay"] = 0.0
    run.optimizer.state = {}
    run.optimizer.step()
    assert same_bits(weight.detach(), before)


def test_the_model_keeps_saying_what_it_is(tmp_path: Path) -> None:
    with attached(("nvme", "nvme", "nvme"), tmp_path) as run:
        identity = [id(p) for p in run.model.parameters()]
        plain(run, 0)
        assert [id(p) for p in run.model.parameters()] == identity
        assert isinstance(run.engine, offload.Engine)
        assert all(type(p) is RestingParameter for p in run.model.parameters())


@pytest.mark.parametrize("placement", [RESIDENT, ("cpu", "cpu", "cpu")], ids="-".join)
def test_what_data_was_stays_with_who_holds_it(
    placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """As where averaged weights are swapped in and out."""
    with attached(placement, tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        before, held = weight.detach().clone(), weight.data
        weight.data = before * 0.5
        assert torch.equal(held, before)
        assert torch.equal(weight.detach(), before * 0.5)
        weight.data = held
        assert torch.equal(weight.detach(), before)


def test_two_parameters_may_exchange_their_values(run: Run) -> None:
    model: Any = run.model
    one, other = model.blocks[2].up.weight, model.blocks[1].up.weight
    before = one.detach().clone(), other.detach().clone()
    first, second = one.data, other.data
    one.data, other.data = second, first
    assert same_bits(one.detach(), before[1])
    assert same_bits(other.detach(), before[0])


def test_gradients_are_not_replaced_while_some_are_on_their_way(tmp_path: Path) -> None:
    with attached(("cpu", "cpu", "cpu"), tmp_path) as run:
        weight: Any = run.model.head.weight  # type: ignore[union-attr]
        asked: list[Callable[[], Any]] = [
            run.optimizer.zero_grad,
            lambda: setattr(weight, "grad", None),
            lambda: setattr(weight, "grad", torch.ones_like(weight)),
        ]
        block: Any = run.model.blocks[1]  # type: ignore[union-attr,index]
        for ask in asked:
            handle = block.up.weight.register_hook(lambda _, ask=ask: ask())
            with pytest.raises(RuntimeError, match="inside a backward"):
                run.loss().backward()
            handle.remove()
            run.optimizer.zero_grad()
        run.loss().backward()
        run.step()
