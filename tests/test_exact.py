"""The same bits wherever values live: placements crossed with what training loops do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from cpu_adam import CPULion
from tests import training
from tests.training import Net, Run, accumulation, batch, fp32, plain, train, without_idle_states


def own_clipping(run: Run, number: int) -> None:
    accumulation(run, number)
    run.extra.append(run.optimizer.grad_norm())


def other_thread(run: Run, number: int) -> None:
    loss = run.loss()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    run.step()


def evaluation(run: Run, number: int) -> None:
    for _ in range(2):
        run.loss().backward()
        run.model.eval()
        with torch.no_grad():
            run.loss()
        run.model.train()
    run.optimizer.step()
    with torch.inference_mode():
        run.loss()
    run.optimizer.zero_grad()


def l2_term(run: Run, number: int) -> None:
    penalty = sum(p.float().pow(2).sum() for p in run.model.parameters())
    for _ in range(2):
        (run.loss() + 1e-3 * penalty).backward(retain_graph=True)
    (1e-3 * sum(p.float().pow(2).sum() for p in run.model.parameters())).backward()
    run.step()


def unannounced(run: Run, number: int) -> None:
    """A forward that no hook announces: functions on the parameters themselves."""
    model: Any = run.model
    for _ in range(2):
        tokens = batch(run.generator)
        x = nn.functional.embedding(tokens, model.embed.weight)
        for block in model.blocks:
            x = x + nn.functional.linear(x, block.up.weight[:32], block.down.bias)
        x = nn.functional.layer_norm(x, (32,), model.norm.weight, model.norm.bias)
        logits = nn.functional.linear(x, model.head.weight).float()
        loss = nn.functional.cross_entropy(logits.view(-1, 50), tokens.view(-1))
        run.losses.append(loss.item())
        loss.backward()
        run.loss().backward()
    run.step()


def edits_at_rest(run: Run, number: int) -> None:
    run.loss().backward()
    run.step()
    for parameter in run.model.parameters():
        parameter.data.mul_(0.99)
    with torch.no_grad():
        next(iter(run.model.parameters())).add_(0.01)
    run.loss().backward()
    run.step()
    state = {name: value.clone() * 0.5 for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state)


def gradients_touched(run: Run, number: int) -> None:
    run.loss().backward()
    for index, parameter in enumerate(run.model.parameters()):
        if index % 3 == 0 and parameter.grad is not None:
            parameter.grad.mul_(0.5)
        elif index % 3 == 1:
            parameter.grad = torch.ones_like(parameter) * 1e-3
    run.loss().backward()
    first = next(iter(run.model.parameters()))
    run.extra.append(first.grad.float().sum().item())
    first.grad = None
    run.optimizer.step()
    run.model.zero_grad(set_to_none=number % 2 == 0)


def out_of_order(run: Run, number: int) -> None:
    """Blocks skipped, repeated and reversed, as branches do."""
    model: Any = run.model
    order = [[0, 1, 2, 3, 4], [4, 2, 2, 0], [3]][number % 3]
    tokens = batch(run.generator)
    x = model.embed(tokens)
    for index in order:
        x = model.blocks[index](x)
    logits = model.head(model.norm(x)).float()
    loss = nn.functional.cross_entropy(logits.view(-1, 50), tokens.view(-1))
    run.losses.append(loss.item())
    loss.backward()
    run.step()


def skipped_step(run: Run, number: int) -> None:
    run.loss().backward()
    if number == 1:
        run.optimizer.zero_grad()
    run.step()
    run.step()


def failed_forward(run: Run, number: int) -> None:
    run.loss().backward()
    blocks: Any = run.model.blocks
    handle = blocks[3].register_forward_pre_hook(training.fails)
    with pytest.raises(ZeroDivisionError):
        run.loss()
    handle.remove()
    loss = run.loss()
    hook = blocks[1].down.weight.register_hook(training.fails)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    run.optimizer.zero_grad()
    run.loss().backward()
    run.step()


def gradients_held(run: Run, number: int) -> None:
    """What is held over a step, or over zero_grad(), keeps what it showed."""
    run.loss().backward()
    held = [p.grad for p in run.model.parameters()]
    kept = [gradient.clone() for gradient in held if gradient is not None]
    run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(kept, held))  # type: ignore[arg-type]
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    run.loss().backward()
    again = [p.grad for p in run.model.parameters()]
    run.extra += [gradient.float().abs().sum().item() for gradient in again if gradient is not None]
    run.optimizer.step()
    run.optimizer.zero_grad()
    kept = [gradient.clone() for gradient in again if gradient is not None]
    run.loss().backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, again))  # type: ignore[arg-type]
    run.step()


def gradients_kept_apart(run: Run, number: int) -> None:
    """Two lists of gradients, swapped, summed, and read again after a further backward."""
    parameters = list(run.model.parameters())
    run.loss().backward()
    one = [p.grad for p in parameters]
    run.optimizer.zero_grad()
    run.loss().backward()
    for p, gradient in zip(parameters, one):
        assert p.grad is not None
        assert gradient is not None
        p.grad += gradient
    a, b = parameters[2], parameters[8]  # Two norms, in two units.
    assert a.shape == b.shape
    a.grad, b.grad = b.grad, a.grad
    run.loss().backward()
    for p in parameters:
        assert p.grad is not None
        run.extra.append(p.grad.float().sum().item())
        p.grad.mul_(0.25)
    run.loss().backward()
    run.step()


def touched_in_inference(run: Run, number: int) -> None:
    with torch.inference_mode():
        run.extra += [p.float().norm().item() for p in run.model.parameters()]
    penalty = sum(p.float().pow(2).sum() for p in run.model.parameters())
    (run.loss() + 1e-2 * penalty).backward()
    run.step()


def blocks_inside_blocks(run: Run, number: int) -> None:
    """Units of one size in use together: three calls deep, and a weight in another's forward."""
    blocks: Any = run.model.blocks

    def inside(inner: nn.Module) -> Callable[..., Any]:
        return lambda module, args: (args[0] + 0.5 * inner(args[0]),)

    def borrowed(module: nn.Module, args: Any) -> Any:
        return (nn.functional.linear(args[0], blocks[0].up.weight[:32]),)

    handles = [
        blocks[1].register_forward_pre_hook(inside(blocks[0])),
        blocks[2].register_forward_pre_hook(inside(blocks[1])),
        blocks[4].register_forward_pre_hook(inside(blocks[3])),
        blocks[3].up.register_forward_pre_hook(borrowed),
    ]
    accumulation(run, number)
    for handle in handles:
        handle.remove()
    plain(run, number)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.Adam(
        [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest, "lr": torch.tensor(3e-2), "maximize": True},
        ],
        lr=1e-2,
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def lion(model: nn.Module) -> torch.optim.Optimizer:
    return CPULion(model.parameters(), lr=1e-3, weight_decay=0.1)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (plain, {}),
    "plain fp32": (plain, fp32()),
    "fp32 gradients": (accumulation, {"gradient_dtype": "fp32"}),
    "accumulation": (accumulation, {"steps": 4}),
    "updates inside backward": (plain, {"micro_batches": 1, "steps": 4}),
    "updates inside backward, accumulation": (
        training.two_micro_batches,
        {"micro_batches": 2, "build": partial(Net, tied=True), "steps": 4},
    ),
    "torch clipping": (training.torch_clipping, {}),
    "own clipping": (own_clipping, {"max_grad_norm": 0.5}),
    "tied, accumulation": (accumulation, {"build": partial(Net, tied=True)}),
    "frozen": (accumulation, {"build": training.frozen}),
    "checkpointing": (accumulation, {"build": partial(Net, checkpointed=True)}),
    "checkpointing, reentrant": (
        accumulation,
        {"build": partial(Net, checkpointed=True, reentrant=True)},
    ),
    "checkpointing, frozen": (accumulation, {"build": partial(training.frozen, checkpointed=True)}),
    "dropout": (plain, {"build": partial(Net, dropout=0.2, checkpointed=True)}),
    "second backward": (training.second_backward, {}),
    "two losses": (training.two_losses, {}),
    "backward in another thread": (other_thread, {}),
    "evaluation": (evaluation, {}),
    "L2 term": (l2_term, fp32()),
    "L2 term bf16": (l2_term, {}),
    "unannounced forward": (unannounced, {}),
    "edits at rest": (edits_at_rest, {}),
    "gradients touched": (gradients_touched, {}),
    "gradients held": (gradients_held, {}),
    "gradients kept apart": (gradients_kept_apart, {}),
    "edited between reentrant": (
        gradients_touched,
        {"build": partial(Net, checkpointed=True, reentrant=True)},
    ),
    "touched in inference mode": (touched_in_inference, fp32()),
    "outputs that are views": (accumulation, {"build": training.Positioned}),
    "blocks inside blocks": (blocks_inside_blocks, {}),
    "checkpoints over several": (accumulation, {"build": training.Regions}),
    "checkpoints over several, reentrant": (
        accumulation,
        {"build": partial(training.Regions, reentrant=True)},
    ),
    "out of order": (out_of_order, {"steps": 4}),
    "skipped step": (skipped_step, {}),
    "failed forward": (failed_forward, {}),
    "groups, L2 decay": (accumulation, {"optimizer": grouped}),
    "SGD": (accumulation, {"optimizer": momentum}),
    "SGD, fp32, edits": (edits_at_rest, fp32(optimizer=plain_sgd)),
    "Lion": (accumulation, {"optimizer": lion}),
    "compact": (accumulation, {"states": "compact", "steps": 4}),
    "compact, tied, own clipping": (
        own_clipping,
        {"states": "compact", "max_grad_norm": 0.5, "build": partial(Net, tied=True)},
    ),
    "compact, edits": (edits_at_rest, {"states": "compact"}),
    "groups, fp32": (accumulation, fp32(optimizer=grouped, max_grad_norm=1.0)),
}


SETTINGS = {"gradient_dtype", "max_grad_norm", "states"}
"""What plain PyTorch has not: loops with it are held against the resident run."""


@cache
def reference(case: str, directory: str) -> training.Result:
    """The same loop in plain PyTorch, stepped by `cpu_adam`, wherever that can run it."""
    feature, options = CASES[case]
    options = {name: value for name, value in options.items() if name != "micro_batches"}
    if SETTINGS & options.keys():
        return without_idle_states(train(training.RESIDENT, directory, feature, **options))
    return without_idle_states(training.train_alone(feature, **options))


def assert_as_the_reference(result: training.Result, case: str, directory: str) -> None:
    training.assert_same(without_idle_states(result), reference(case, directory))


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("drive"))


SLOW = {
    *("plain fp32", "checkpointing, frozen", "L2 term bf16", "gradients kept apart", "compact"),
    *("checkpoints over several", "compact, edits", "SGD, fp32, edits"),
    *("edited between reentrant", "backward in another thread", "unannounced forward"),
    *("tied, accumulation", "checkpointing", "checkpointing, reentrant", "groups, fp32"),
    *("updates inside backward", "frozen"),
}
"""Loops that are much like others, and not in the fast tier."""


IN_TURN = [one for one in zip(CASES, itertools.cycle(training.SAMPLED)) if one[0] not in SLOW]
"""Every loop in one of the nine, every one of the nine in a ninth of the loops."""


@pytest.mark.parametrize(("case", "placement"), training.everywhere(CASES, IN_TURN))
def test_every_loop_in_all_placements(
    case: str, placement: tuple[str, str, str], drive: str
) -> None:
    feature, options = CASES[case]
    assert_as_the_reference(train(placement, drive, feature, **options), case, drive)


@pytest.mark.parametrize(
    ("case", "placement"), training.everywhere(CASES, zip([*CASES][:24:12], training.SAMPLED))
)
def test_every_loop_in_the_smallest_budgets(
    case: str, placement: tuple[str, str, str], drive: str
) -> None:
    """One weight slot per size class, staging for the largest value: not a block more is given."""
    feature, options = CASES[case]
    kept = {name: value for name, value in options.items() if name != "steps"}
    least = training.smallest_budgets(placement, drive, **kept)
    result = train(placement, drive, feature, **options, **least)
    assert_as_the_reference(result, case, drive)
