"""Models and loops drawn at random have the bits of plain torch."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpu_adam import CPULion
from tests import training
from tests.random_models import TOKENS, Model, bare
from tests.training import Run, some_fast

REFUSALS = r"in a backward after its update had begun|takes a copy of|came before step\(\)"
"""What docs/limits.md has of such models and loops."""


def make_optimizer(seed: int, model: nn.Module) -> torch.optim.Optimizer:
    """With one group, or two, of what is trained or of everything."""
    random, every = Random(f"optimizer {seed}"), list(model.parameters())
    given = random.choice([every, [one for one in every if one.requires_grad]])
    groups: Any = [{"params": given}]
    if random.random() < 0.3:
        groups = [{"params": given[::2]}, {"params": given[1::2], "lr": 1e-3, "weight_decay": 0.0}]
    kind: Any = random.choice([torch.optim.AdamW, torch.optim.AdamW, torch.optim.SGD, CPULion])
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return kind(groups, lr=1e-3, **options)  # type: ignore[no-any-return]


def digest(value: Tensor | None) -> int | None:
    """What tells other bits from these."""
    bits = None if value is None else value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return None if bits is None else zlib.crc32(bits.clone().numpy())


class Step:
    """One step of a loop, under way."""

    def __init__(self, run: Run, seed: int, number: int):
        self.run, self.model, self.extra = run, run.model, run.extra
        self.random = Random(f"loop {seed} {number}")
        self.batches = torch.Generator().manual_seed(number)

    def loss(self, scale: float = 1.0) -> Tensor:
        tokens = torch.randint(0, training.VOCABULARY, (2, TOKENS), generator=self.batches)
        loss = bare(self.model(tokens, scale))
        self.extra.append(digest(loss))
        return loss

    def some(self) -> list[nn.Parameter]:
        every = [p for p in self.model.parameters() if p.requires_grad]
        return self.random.sample(every, min(3, len(every)))

    def evaluate(self) -> None:
        mode = self.random.choice([torch.no_grad, torch.inference_mode])
        self.model.train(self.random.random() < 0.5)
        with mode():
            self.loss()
        self.model.train()

    def beside_others(self) -> None:
        """One forward before, which is dropped, and one between, which is kept."""
        self.loss()
        kept = self.loss()
        self.loss().backward()
        del kept

    def evaluated(self) -> None:
        """Before a forward, and between it and its backward."""
        self.evaluate()
        loss = self.loss()
        if self.random.random() < 0.5:
            self.evaluate()
        loss.backward()

    def retained(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()

    def one_after_the_other(self) -> None:
        losses = [self.loss() for _ in range(self.random.randint(2, 3))]
        for loss in self.random.sample(losses, len(losses)):
            loss.backward()

    def asked(self) -> None:
        """By `grad`, which torch does not offer over a reentrant checkpoint."""
        loss = self.loss()
        if any(getattr(one, "by_reentrant", False) for one in self.model.modules()):
            return loss.backward()
        found = torch.autograd.grad(loss, self.some(), retain_graph=True, allow_unused=True)
        self.extra.append([*map(digest, found)])
        loss.backward(inputs=self.some())

    def penalized(self) -> None:
        term = sum(p.float().pow(2).sum() for p in self.some())
        (self.loss() + 1e-3 * term).backward()

    def edit_gradients(self) -> None:
        for number, parameter in enumerate(self.some()):
            if parameter.grad is not None:
                if number == 0:
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad + 1e-3 if number == 1 else None

    def edit_weights(self) -> None:
        with torch.no_grad():
            for parameter in self.some():
                parameter.mul_(0.99)
        self.some()[0].data.add_(1e-3)

    def freeze(self) -> None:
        """Some that were trained, which may come back in a later step."""
        model: Any = self.model
        for name, parameter in model.named_parameters():
            if name in model.trained:
                parameter.requires_grad_(self.random.random() < 0.8)
        model.norm.requires_grad_(True)


ONE: tuple[Callable[[Step], Any], ...] = (
    *[lambda step: step.loss().backward()] * 2,
    lambda step: (step.loss() + step.loss(0.5)).backward(),
    lambda step: torch.autograd.backward([step.loss(), step.loss(0.5)]),
    *(Step.beside_others, Step.evaluated),
)
"""With one backward."""

SEVERAL = (Step.retained, Step.one_after_the_other, Step.asked, Step.penalized)

BEFORE: tuple[Callable[[Step], Any], ...] = (
    lambda step: step.extra.append([digest(p.grad) for p in step.model.parameters()]),
    lambda step: step.extra.append(digest(nn.utils.clip_grad_norm_(step.model.parameters(), 0.5))),
    Step.edit_gradients,
)

AFTER: tuple[Callable[[Step], Any], ...] = (
    lambda step: step.extra.append([digest(p.data) for p in step.some()]),
    *(Step.edit_weights, Step.freeze, Step.evaluate),
    lambda step: step.run.optimizer.param_groups[0].update(lr=5e-4),
)


def take(run: Run, number: int, *, seed: int, micro: int | None) -> None:
    """A step: with `micro` backwards where updates come in the last one, or else as many as are
    drawn, whose gradients may stay over some steps."""
    step = Step(run, seed, number)
    random = step.random
    for _ in range(micro or random.randint(1, 3)):
        random.choice(ONE if micro else (*ONE, *SEVERAL))(step)
    for one in () if micro else BEFORE:
        if random.random() < 0.3:
            one(step)
    if micro or random.random() < 0.85:
        run.optimizer.step()
    if micro or random.random() < 0.85:
        run.optimizer.zero_grad(set_to_none=random.random() < 0.7)
    for one in AFTER:
        if random.random() < 0.2:
            one(step)


def outcome(seed: int, directory: Any) -> str:
    """The same bits as in plain torch, a refusal, or nothing to compare them with: where torch
    itself raises, or ends in infinities and NaNs, whose bits tell how a kernel was compiled."""
    random = Random(f"case {seed}")
    placement, micro = random.choice(training.ALL_PLACEMENTS), random.choice([None, None, 1, 2])
    of_torch: Any = {"build": partial(Model, seed), "dtype": None}
    of_torch["optimizer"] = partial(make_optimizer, seed)
    loop, config = partial(take, seed=seed, micro=micro), {**of_torch, "micro_batches": micro}
    try:
        expected = training.train_alone(loop, steps=4, **of_torch)
    except RuntimeError:
        return "nothing"
    if not all(value.isfinite().all() for value in expected.weights.values()):
        return "nothing"
    try:
        if random.random() < 0.35:
            config |= training.smallest_budgets(placement, directory, **config)
        ours = training.train(placement, directory, loop, steps=4, **config)
    except RuntimeError as error:
        if re.search(REFUSALS, str(error)):
            return "refused"
        raise
    training.assert_same(training.without_idle_states(ours), training.without_idle_states(expected))
    return "same"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seeds", some_fast([(3, 73), *(range(at, at + 30) for at in (0, 30, 60, 90))])
)
def test_drawn_models_have_the_bits_of_plain_torch(seeds: Sequence[int], tmp_path: Path) -> None:
    found = Counter[str]()
    for seed in seeds:
        print(f"seed {seed}")
        found[outcome(seed, tmp_path)] += 1
    assert found["refused"] <= len(seeds) / 5, found
    assert found["nothing"] <= len(seeds) / 10, found
