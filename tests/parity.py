"""The parity suite: models x placements x loops, each with an engine and in plain PyTorch.

The reference is a loop without any engine, stepped by `cpu_adam.CPUAdam`. Compared bit for bit are
all losses, in the last but one step every gradient and the norm of all, and at the end all weights,
buffers and states. The cases are a pairwise covering of `FACTORS`: any two values that may go
together do in some case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import offload
from cpu_adam import CPUAdam
from tests import training, zoo
from tests.covering import Case, Setting, pairwise
from tests.structures import STRUCTURES
from tests.training import SAMPLED, Feature, Run, accumulation, batch, config_of, fails, plain

STEPS = 5
LOOKED_AT = STEPS - 2
"""The step whose gradients are compared. In the others nobody looks, as in most loops."""


@dataclass
class ParityRun(Run):
    """A run over a model by its name, which keeps what is compared."""

    name: str = ""
    number: int = 0
    seen: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of the step that is looked at."""
    look: bool = True

    def loss(self) -> torch.Tensor:
        """The loss of the next batch."""
        if self.name in STRUCTURES:
            loss = training.loss_of(self.model, batch(self.generator))
        else:
            inputs = zoo.batch_for(self.name, self.generator)
            dtype = next(self.model.parameters()).dtype
            loss = self.model(
                **{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
            ).loss
        self.losses.append(loss.item())
        return loss

    def step(self) -> None:
        """Look at the gradients where it is time to, and take a step."""
        if self.number == LOOKED_AT and self.look:
            for name, parameter in self.model.named_parameters():
                gradient = parameter.grad
                self.seen[name] = None if gradient is None else gradient.clone()
            here = [gradient for gradient in self.seen.values() if gradient is not None]
            self.losses.append(nn.utils.get_total_norm(here).item())
        super().step()


# -- loops ---------------------------------------------------------------------------------------


def evaluation(run: Run, number: int) -> None:
    run.loss().backward()
    run.model.eval()
    with torch.no_grad() if number % 2 else torch.inference_mode():
        run.loss()
    run.model.train()
    run.loss().backward()
    run.optimizer.step()
    with torch.no_grad():
        run.loss()
    run.optimizer.zero_grad()


def skipped(run: Run, number: int) -> None:
    """One batch is dropped after its backward; gradients stay over a step once."""
    run.loss().backward()
    if number == 1:
        run.optimizer.zero_grad()
        return
    if number == 2:
        run.optimizer.step()
        run.loss().backward()
    run.step()


def gradients_edited(run: Run, number: int) -> None:
    run.loss().backward()
    for index, parameter in enumerate(run.model.parameters()):
        if parameter.grad is None:
            continue
        if index % 3 == 0:
            parameter.grad.mul_(0.5)
        elif index % 3 == 1:
            parameter.grad = parameter.grad + 1e-3
    run.loss().backward()
    run.step()


def parameters_edited(run: Run, number: int) -> None:
    """In place each step, and once by `load_state_dict`."""
    plain(run, number)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.99)
    if number == 1:
        halved = {
            name: value * 0.5 if value.is_floating_point() else value.clone()
            for name, value in run.model.state_dict().items()
        }
        run.model.load_state_dict(halved)


def penalty(run: Run, number: int) -> None:
    term = sum(p.float().pow(2).sum() for p in run.model.parameters() if p.requires_grad)
    (run.loss() + 1e-3 * term).backward()
    run.step()


def forward_failed(run: Run, number: int) -> None:
    """A forward and a backward that raise, then as if nothing had been."""
    run.loss().backward()
    inner = [m for m in run.model.modules() if isinstance(m, nn.Linear)]
    handle = inner[len(inner) // 2].register_forward_pre_hook(fails)
    try:
        run.loss()
    except ZeroDivisionError:
        run.losses.append(0.0)
    handle.remove()
    run.optimizer.zero_grad()
    run.loss().backward()
    run.step()


LOOPS: dict[str, tuple[Feature, dict[str, Any]]] = {
    "plain": (plain, {}),
    "updates in backward": (plain, {"micro_batches": 1}),
    "accumulation": (accumulation, {}),
    "clipping": (training.torch_clipping, {}),
    "graph retained": (training.second_backward, {}),
    "two losses": (training.two_losses, {}),
    "evaluation": (evaluation, {}),
    "skipped step": (skipped, {}),
    "gradients edited": (gradients_edited, {}),
    "parameters edited": (parameters_edited, {}),
    "L2 penalty": (penalty, {}),
    "forward failed": (forward_failed, {}),
}
"""By name: one step of the loop, and what is said in the config."""


# -- cases ---------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[str, ...]] = {
    "model": (*zoo.MODELS, *STRUCTURES),
    "placement": tuple("-".join(placement) for placement in SAMPLED),
    "loop": tuple(LOOPS),
    "dtype": ("bfloat16", "float32"),
    "attention": ("eager", "sdpa"),
    "embeddings": ("untied", "tied"),
    "checkpoints": ("none", "not reentrant", "reentrant"),
    "trained": ("all", "half frozen", "LoRA"),
    "budgets": ("ample", "least"),
}


def excluded(one: Setting, other: Setting) -> bool:
    """What cannot be: variants that a model does not have."""
    (factor, value), (variant, chosen) = one, other
    if factor != "model" or chosen == FACTORS[variant][0]:
        return False
    if value in STRUCTURES:
        return variant in ("attention", "embeddings", "checkpoints", "trained")
    models = {"embeddings": zoo.TIES, "attention": zoo.FUSES}
    return value not in models.get(variant, zoo.MODELS)


def cases() -> list[Case]:
    """All cases of the suite."""
    return pairwise(FACTORS, excluded)


def build(case: Case) -> nn.Module:
    """The model of a case, seeded."""
    torch.manual_seed(1)
    name, dtype = case["model"], getattr(torch, case["dtype"])
    if name in STRUCTURES:
        model = STRUCTURES[name]()
        return model if name == "float32 islands" else model.to(dtype)
    made: Any = zoo.build(name, attention=case["attention"], embeddings=case["embeddings"])
    made = made.to(dtype)
    if case["checkpoints"] != "none":
        reentrant = case["checkpoints"] == "reentrant"
        older = getattr(made, "gradient_checkpointing_enable", None)
        checkpoint = getattr(made, "activation_checkpointing_enable", older)
        checkpoint({"use_reentrant": reentrant})
    if case["trained"] == "half frozen":
        for index, parameter in enumerate(made.parameters()):
            parameter.requires_grad_(index % 2 == 0)
    elif case["trained"] == "LoRA":
        made = zoo.with_lora(made)
    return made  # type: ignore[no-any-return]


@dataclass
class Outcome:
    """What is compared of a run."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def run_case(case: Case, directory: Any, *, offloaded: bool) -> Outcome:
    """Train a case, with an engine or in plain PyTorch."""
    feature, settings = LOOPS[case["loop"]]
    model = build(case)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = CPUAdam(parameters, lr=1e-2, weight_decay=0.01)
    if offloaded:
        placement: Any = tuple(case["placement"].split("-"))
        budgets = {}
        if case["budgets"] == "least":
            budgets = training.smallest_budgets(
                placement, directory, build=lambda: build(case), dtype=None, **settings
            )
        asked = config_of(placement, directory, **settings, **budgets)
        _, optimizer = offload.attach(model, optimizer, asked)
    run = ParityRun(
        model,
        optimizer,
        torch.Generator().manual_seed(7),
        name=case["model"],
        look="micro_batches" not in settings,
    )
    try:
        torch.manual_seed(2)
        for number in range(STEPS):
            run.number = number
            feature(run, number)
        return _outcome(run)
    finally:
        if offloaded:
            optimizer.engine.close()


def _outcome(run: ParityRun) -> Outcome:
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    buffers = {name: value.clone() for name, value in run.model.named_buffers()}
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    states = {
        f"{number}.{slot}": value.clone()
        for number, slots in run.optimizer.state_dict()["state"].items()
        for slot, value in slots.items()
        if trained[number].numel()  # What has no elements has no state with us.
    }
    return Outcome(run.losses + run.extra, run.seen, {**buffers, **weights}, states)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What is not the same, bit for bit."""
    found = [
        f"loss {i}: {a} is not {b}"
        for i, (a, b) in enumerate(zip(one.losses, other.losses, strict=True))
        if a != b and not (a != a and b != b)
    ]
    for kind in ("gradients", "weights", "states"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        found += [f"{kind}: only one has {name}" for name in sorted(ours.keys() ^ theirs.keys())]
        for name in ours.keys() & theirs.keys():
            a, b = ours[name], theirs[name]
            if (a is None) != (b is None) or (a is not None and not training.same_bits(a, b)):
                found.append(f"{kind}: {name}")
    return found
