"""Parameters at rest: whatever is asked of one, or done to it, is as of a plain parameter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.model.parameter import OffloadedParameter
from tests.training import RESIDENT, Net, Run, attached, batch, fp32, plain, same_bits, some_fast

CPU, NVME = ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")


@pytest.fixture(params=some_fast([NVME, ("device", "cpu", "cpu")]), ids="-".join)
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


# -- questions --------------------------------------------------------------------------------

QUESTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "shape": (lambda p: p.shape, torch.Size([128, 32])),
    "size()": (lambda p: p.size(), torch.Size([128, 32])),
    "ndim": (lambda p: p.ndim, 2),
    "dim()": (lambda p: p.dim(), 2),
    "numel": (lambda p: p.numel(), 4096),
    "dtype": (lambda p: p.dtype, torch.bfloat16),
    "device": (lambda p: p.device, torch.device("cpu")),
    "layout": (lambda p: p.layout, torch.strided),
    "requires_grad": (lambda p: p.requires_grad, True),
    "is_leaf": (lambda p: p.is_leaf, True),
    "grad_fn": (lambda p: p.grad_fn, None),
    "is_cuda": (lambda p: p.is_cuda, False),
    "is_cpu": (lambda p: p.is_cpu, True),
    "is_floating_point": (lambda p: p.is_floating_point(), True),
    "is_complex": (lambda p: p.is_complex(), False),
    "element_size": (lambda p: p.element_size(), 2),
    "nbytes": (lambda p: p.nbytes, 8192),
    "len": (len, 128),
    "is_tensor": (torch.is_tensor, True),
    "hash": (lambda p: hash(p) == id(p), True),
    "identity": (lambda p: {p: 1}[p], 1),
    "grad is None": (lambda p: p.grad is None, True),
    "stride": (lambda p: p.stride(), (32, 1)),
    "is_contiguous": (lambda p: p.is_contiguous(), True),
    "storage_offset": (lambda p: p.storage_offset(), 0),
}


def test_questions_are_answered_truly_and_wake_nothing(tmp_path: Path) -> None:
    with attached(NVME, tmp_path, build=lambda: Net(layers=3)) as run:
        parameter = block(run).up.weight
        assert type(parameter) is OffloadedParameter
        for question, (ask, expected) in QUESTIONS.items():
            assert ask(parameter) == expected, question
            assert run.engine.snapshots.bytes == 0, question
            store: Any = run.engine.runner.store
            assert store.chunks.bytes_read == 0, question


def test_questions_of_modules_and_torch_wake_nothing(run: Run) -> None:
    run.engine.settle()
    read = run.engine.runner.store.chunks.bytes_read if run.engine.runner.store else 0
    model = run.model
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 28_512
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    model.train(), model.eval()
    handle = block(run).up.weight.register_hook(lambda gradient: gradient)
    handle.remove()
    assert "Linear(in_features=32" in repr(model)
    model.requires_grad_(True)
    list(model.named_parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    model.to("cpu"), model.cpu(), model.bfloat16(), model.to(torch.bfloat16)
    assert run.engine.snapshots.bytes == 0
    assert (run.engine.runner.store.chunks.bytes_read if run.engine.runner.store else 0) == read


def test_repr_shows_the_values(run: Run) -> None:
    shown = repr(block(run).norm.weight)
    assert "nan" not in shown
    assert "0.9" in shown or "1." in shown


# -- values -----------------------------------------------------------------------------------

VALUES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "float": lambda p: p.float().bfloat16(),
    "index": lambda p: torch.stack([p[i] for i in range(len(p))]),
    "iteration": lambda p: torch.stack(list(p)),
    "arithmetic": lambda p: p + 0,
    "numpy": lambda p: torch.from_numpy(p.detach().float().numpy()).bfloat16(),
    "np.asarray": lambda p: torch.from_numpy(np.asarray(p.detach().float())).bfloat16(),
    "tolist": lambda p: torch.tensor(p.tolist(), dtype=torch.bfloat16),
    "item": lambda p: torch.tensor([[p[0, 0].item()]]).bfloat16().expand(1, 1),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(p.shape),
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "cat": lambda p: torch.cat([p, p])[: len(p)],
    "out": lambda p: torch.add(p, 0, out=torch.empty(p.shape, dtype=p.dtype)),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "deepcopy": lambda p: copy.deepcopy(p),
    "storage": lambda p: (
        torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(p.dtype).view(p.shape)
    ),
    "view": lambda p: p.view(-1).view(p.shape),
    "to": lambda p: p.to(torch.float64).to(torch.bfloat16),
    "cpu": lambda p: p.cpu(),
    "copy_ from": lambda p: torch.empty(p.shape, dtype=p.dtype).copy_(p),
}


@torch.no_grad()
def test_values_are_true(tmp_path: Path) -> None:
    with attached(("nvme", "cpu", "cpu"), tmp_path, build=lambda: Net(layers=3)) as run:
        parameter = block(run).up.weight
        for how, read in VALUES.items():
            plain_step(run)
            wanted = values(run)["blocks.2.up.weight"]
            found = read(parameter).detach()
            assert same_bits(found, wanted[: len(found), : found.shape[1]]), how
            assert type(parameter) is OffloadedParameter, how


def plain_step(run: Run) -> None:
    with torch.enable_grad():
        plain(run, 0)


def test_state_dict_and_safetensors(run: Run, tmp_path: Path) -> None:
    wanted = values(run)
    state = run.model.state_dict()
    assert state.keys() == wanted.keys()
    assert all(same_bits(state[name], wanted[name]) for name in wanted)
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    safetensors.torch.save_model(run.model, str(tmp_path / "b.safetensors"))
    for file in ("a", "b"):
        loaded = safetensors.torch.load_file(tmp_path / f"{file}.safetensors")
        assert all(same_bits(loaded[name], wanted[name]) for name in wanted)
    for value in wanted.values():
        value.mul_(2)
    safetensors.torch.save_file(wanted, tmp_path / "c.safetensors")
    safetensors.torch.load_model(run.model, str(tmp_path / "c.safetensors"))
    del state
    block(run).up.renamed = block(run).up._parameters.pop("weight")  # As pruning ends.
    renamed = {name.replace("2.up.weight", "2.up.renamed") for name in wanted}
    assert run.model.state_dict().keys() == renamed
    assert all(same_bits(value, wanted[name]) for name, value in values(run).items())


# -- edits ------------------------------------------------------------------------------------


def _vector(p: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(torch.full((p.numel(),), 0.5, dtype=p.dtype), [p])


def _numpy(p: nn.Parameter) -> None:
    p.data.view(torch.int16).numpy()[:] = 0x3F00


def _data(p: Any) -> None:
    p.data = torch.full(p.shape, 0.5, dtype=p.dtype)


def _row(p: Any) -> None:
    for i in range(len(p)):
        p[i] = 0.5


def _iadd(p: Any) -> None:
    p.zero_()
    p += 0.5


EDITS: dict[str, Callable[[Any], Any]] = {
    "data =": _data,
    "set_": lambda p: p.set_(torch.full(p.shape, 0.5, dtype=p.dtype)),
    "data.mul_": lambda p: p.data.mul_(0).add_(0.5),
    "mul_": lambda p: p.mul_(0).add_(0.5),
    "init": lambda p: nn.init.constant_(p, 0.5),
    "rows": _row,
    "+=": _iadd,
    "fill_": lambda p: p.fill_(0.5),
    "copy_": lambda p: p.copy_(torch.full((128, 32), 0.5)),
    "foreach": lambda p: torch._foreach_copy_([p], [torch.full((128, 32), 0.5)]),
    "vector": _vector,
    "numpy": _numpy,
    "detach": lambda p: p.detach().fill_(0.5),
    "view": lambda p: p.view(-1).fill_(0.5),
    "out=": lambda p: torch.mul(p, 0, out=p).add_(0.5),
    "set by data of a list": lambda p: p.data.copy_(torch.tensor([0.5])),
}


@pytest.mark.parametrize("placement", some_fast([CPU, NVME]), ids="-".join)
@torch.no_grad()
def test_edits_are_honoured(placement: tuple[str, str, str], tmp_path: Path) -> None:
    tokens = batch(torch.Generator().manual_seed(3))
    with attached(placement, tmp_path, build=lambda: Net(layers=3)) as run:
        for number, (how, edit) in enumerate(EDITS.items()):
            plain_step(run)
            block(run).up.weight.normal_(std=0.1)
            before, logits = values(run), run.model(tokens)
            edit(block(run).up.weight)
            assert not torch.equal(run.model(tokens), logits), how
            after = values(run)
            assert after["blocks.2.up.weight"].eq(0.5).all(), how
            for name, value in before.items():
                assert name == "blocks.2.up.weight" or same_bits(after[name], value), how
            assert run.optimizer.state[block(run).up.weight]["step"] == number + 1, how


def test_an_edit_leaves_the_states(tmp_path: Path) -> None:
    """Residues of what was edited are kept, too: the master is the new weight and they."""
    with attached(NVME, tmp_path) as run:
        for number in range(3):
            plain(run, number)
        weight = block(run).up.weight
        residue = run.optimizer.state[weight]["residue"]
        assert residue[:4].any()
        weight.data[:2] = 0.25
        assert same_bits(run.optimizer.state[weight]["residue"], residue)


REFUSED: dict[str, Callable[[Any, nn.Module], Any]] = {
    "shape": lambda p, model: setattr(p, "data", torch.zeros(4)),
    "dtype": lambda p, model: setattr(p, "data", torch.zeros(128, 32, dtype=torch.float64)),
    "resize_": lambda p, model: p.resize_(2, 2),
    "half()": lambda p, model: model.half(),
    "double()": lambda p, model: model.double(),
    "swapped": lambda p, _: torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone())),
    "gradient's shape": lambda p, model: setattr(p, "grad", torch.zeros(3)),
}


def test_what_cannot_be_honoured_is_refused_loudly(run: Run) -> None:
    wanted = values(run)
    for how, edit in REFUSED.items():
        with torch.no_grad(), pytest.raises((ValueError, RuntimeError)):
            edit(block(run).up.weight, run.model)
            raise AssertionError(how)
        assert block(run).up.weight.shape == (128, 32), how
        assert block(run).up.weight.dtype == torch.bfloat16, how
    assert all(same_bits(value, wanted[name]) for name, value in values(run).items())
    plain(run, 0)


def frozen_net() -> Net:
    net = Net(layers=3)
    net.blocks[1].up.weight.requires_grad_(False)
    return net


def test_freezing_and_unfreezing(tmp_path: Path) -> None:
    with attached(CPU, tmp_path, build=frozen_net) as run:
        blocks: Any = run.model.blocks
        for thaw in (
            lambda: blocks[1].up.weight.requires_grad_(True),
            lambda: setattr(blocks[1].up.weight, "requires_grad", True),
            lambda: run.model.requires_grad_(True),
        ):
            with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight was frozen"):
                thaw()
        plain(run, 0)
        blocks[2].up.weight.requires_grad_(False)
        before = values(run)
        run.loss().backward()
        assert blocks[2].up.weight.grad is None
        run.step()
        after = values(run)
        assert same_bits(after["blocks.2.up.weight"], before["blocks.2.up.weight"])
        assert not same_bits(after["blocks.2.down.weight"], before["blocks.2.down.weight"])
        blocks[2].up.weight.requires_grad_(True)
        plain(run, 0)
        assert not same_bits(values(run)["blocks.2.up.weight"], before["blocks.2.up.weight"])


def test_two_parameters_may_exchange_their_values(run: Run) -> None:
    model: Any = run.model
    one, other = model.blocks[2].up.weight, model.blocks[1].up.weight
    before = one.detach().clone(), other.detach().clone()
    first, second = one.data, other.data
    one.data, other.data = second, first
    assert same_bits(one.detach(), before[1])
    assert same_bits(other.detach(), before[0])


# -- autograd ---------------------------------------------------------------------------------


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
        loss().backward(inputs=[one])
        assert other.grad is None
        torch.autograd.backward([loss(), other], [None, torch.ones_like(other)])  # One of both.
        added = one.grad.clone(), other.grad.clone()
        run.optimizer.zero_grad()
        loss().backward(inputs=[one])
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss(), [one, model.norm.bias])
        return [*given, *added, one.grad.clone()]

    results = []
    for placement in (RESIDENT, CPU):
        with attached(placement, tmp_path, **fp32()) as run:
            results.append(found(run))
    for one in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(one, results[0], strict=True))
    assert all(value.isfinite().all() for value in results[0])


def test_hooks_on_parameters(run: Run) -> None:
    weight = block(run).up.weight
    seen: list[tuple[torch.Size, bool]] = []
    handle = weight.register_hook(lambda g: seen.append((g.shape, bool(g.any()))) or g * 0)
    with pytest.raises(RuntimeError, match=r"register_post_accumulate_grad_hook of .*p\.grad"):
        weight.register_post_accumulate_grad_hook(lambda p: None)
    run.loss().backward()
    assert seen == [((128, 32), True)]
    assert not weight.grad.any()
    handle.remove()
    run.step()
    run.loss().backward()
    assert len(seen) == 1
    assert weight.grad.any()


@pytest.mark.parametrize("how", ["by a step", "by hand"])
def test_an_edit_between_forward_and_backward_is_an_error(run: Run, how: str) -> None:
    loss = run.loss()
    if how == "by a step":
        run.loss().backward()
        run.optimizer.step()
    else:
        with torch.no_grad():
            block(run).up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified.*between a forward and its backward|inplace"):
        loss.backward()
    run.optimizer.zero_grad()
    plain(run, 1)
