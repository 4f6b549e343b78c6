"""A small model, what users do with it, and scripts of that, on a paced device and off it.

A script is trained on a device whose copies and operations are done in an order and at times that
a seed decides, and every value seen is compared with those of the same script where everything is
resident on the CPU and done at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from tests import training
from tests.paced import Paced
from tests.training import RESIDENT, VOCABULARY, Run, attached, batch, loss_of, result_of, same_bits

WIDTH = 8

Aside = Callable[..., AbstractContextManager[None]]
"""Lets what is done inside run on a stream of its own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, aside: Aside) -> torch.Tensor:
        inner = x * self.scale
        with aside():
            inner = self.up(inner)
        return x + self.down(F.gelu(inner))


class Line(nn.Module):
    """The least that a block can be."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, aside: Aside) -> torch.Tensor:
        with aside():
            inner = self.up(x)
        return x + inner


class Small(nn.Module):
    """Runs parts of itself on other streams where there are any; its head is not waited for."""

    block: type[nn.Module] = Block

    def __init__(self, *, tied: bool, checkpointed: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        self.aside: Aside = _here
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, self.aside, use_reentrant=False)
            else:
                x = block(x, self.aside)
        with self.aside(waited_for=False):
            return self.head(x)


class Least(Small):
    """A third of the operations."""

    block = Line


class Wide(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Mixed(Least):
    """Its head stays float32: of gradients in float32, those that are torch's own business."""

    def __init__(self, **options: bool):
        super().__init__(**options)
        self.head = Wide(WIDTH, VOCABULARY, bias=False)

    def to(self, *args: Any, **options: Any) -> Any:
        super().to(*args, **options)
        self.head.float()
        return self


def _here(**_: bool) -> AbstractContextManager[None]:
    """There are no other streams."""
    return nullcontext()


@dataclass
class Loop:
    """A script under way, and all that it has seen."""

    run: Run
    device: Paced | None
    seen: list[torch.Tensor] = field(default_factory=list)
    held: list[torch.Tensor | None] = field(default_factory=list)
    saved: dict[str, Any] | None = None

    def see(self, tensor: torch.Tensor) -> None:
        self.seen.append(tensor.detach().clone())

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.run.model(tokens)
        if self.device is not None:
            self.device.wait_for_those_aside()
        return found

    def backward(self) -> None:
        loss = loss_of(self.logits, batch(self.run.generator))
        self.see(loss)
        if self.device is None:
            loss.backward()
        else:
            self.device.backward(loss)

    def elsewhere(self) -> AbstractContextManager[None]:
        """What is done inside runs on another stream, for which the next step does not wait."""
        return nullcontext() if self.device is None else self.device.aside(waited_for=False)

    def some_parameters(self) -> list[nn.Parameter]:
        model = self.run.model
        second = list(model.blocks[1].parameters())[-1]
        return [model.blocks[0].up.weight, second, model.head.weight]


def backward_only(loop: Loop) -> None:
    loop.backward()


def backward_elsewhere(loop: Loop) -> None:
    with loop.elsewhere():
        loop.backward()


def evaluate_elsewhere(loop: Loop) -> None:
    with loop.elsewhere():
        evaluate(loop)


def step_only(loop: Loop) -> None:
    loop.run.step()


def train(loop: Loop) -> None:
    loop.backward()
    loop.run.step()


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        loop.see(loop.logits(batch(loop.run.generator)))


def use_a_block_alone(loop: Loop) -> None:
    with torch.no_grad():
        loop.see(loop.run.model.blocks[1](torch.ones(2, WIDTH, dtype=torch.bfloat16), _here))


def use_one_block_inside_another(loop: Loop) -> None:
    first, *_, last = loop.run.model.blocks
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)

    @contextmanager
    def inside() -> Iterator[None]:
        loop.see(last(x, _here))
        yield

    with torch.no_grad():
        loop.see(first(x, inside))


def look(loop: Loop) -> None:
    for parameter in loop.some_parameters():
        loop.see(parameter)


def look_elsewhere(loop: Loop) -> None:
    """What is read on another stream is looked at on this one."""
    with loop.elsewhere():
        held = [parameter.detach() for parameter in loop.some_parameters()]
    for tensor in held:
        loop.see(tensor)


def edit_held(loop: Loop) -> None:
    """By an alias, which shows it, as the next look does."""
    held = [parameter.detach() for parameter in loop.some_parameters()]
    for tensor in held:
        tensor.mul_(0.5)
    for tensor in (*held, *loop.some_parameters()):
        loop.see(tensor)


def edit(loop: Loop) -> None:
    with torch.no_grad():
        for parameter in loop.some_parameters():
            parameter.mul_(0.5)


def look_at_gradients(loop: Loop) -> None:
    for parameter in loop.some_parameters():
        if parameter.grad is not None:
            loop.see(parameter.grad)


def edit_gradients(loop: Loop) -> None:
    for parameter in loop.some_parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _made_on_the_device(loop: Loop, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient from there, for which nobody waits."""
    made = torch.empty if loop.device is None else loop.device.empty
    return made(tuple(parameter.shape), dtype=torch.bfloat16).fill_(0.25)


def copy_into_gradients(loop: Loop) -> None:
    """As one who computes gradients on the device does."""
    for parameter in loop.some_parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(_made_on_the_device(loop, parameter), non_blocking=True)


def set_gradients(loop: Loop) -> None:
    """Held, as memory that is not the device's has no allocator that waits for its streams."""
    for parameter in loop.some_parameters():
        parameter.grad = torch.full(tuple(parameter.shape), 0.25, dtype=torch.bfloat16)
        loop.held.append(parameter.grad)


def set_gradients_of_the_device(loop: Loop) -> None:
    """And look at none of them, which would wait for it."""
    for parameter in loop.some_parameters():
        loop.held.append(_made_on_the_device(loop, parameter))
        parameter.grad = loop.held[-1]


def set_expanded_gradients(loop: Loop) -> None:
    """Those are copied, as no sum can be written to them."""
    for parameter in loop.some_parameters():
        one = torch.full((1,) * parameter.ndim, 0.25, dtype=torch.bfloat16)
        parameter.grad = one.expand_as(parameter)


def zero_gradients(loop: Loop) -> None:
    loop.run.optimizer.zero_grad(set_to_none=False)


def give_gradients_up(loop: Loop) -> None:
    loop.run.optimizer.zero_grad()


def give_up_what_is_held(loop: Loop) -> None:
    """It shows the backwards before, the last one too."""
    held = [parameter.grad for parameter in loop.some_parameters()]
    loop.backward()
    give_gradients_up(loop)
    for gradient in held:
        assert gradient is not None
        loop.see(gradient)


def step_and_keep_gradients(loop: Loop) -> None:
    loop.run.optimizer.step()


def stream_weights(loop: Loop) -> None:
    loop.seen += [values for _, values in loop.run.engine.stream_weights()]


def look_at_states(loop: Loop) -> None:
    for state in loop.run.optimizer.state_dict()["state"].values():
        loop.see(state["exp_avg"])


def save_states(loop: Loop) -> None:
    loop.saved = loop.run.optimizer.state_dict()


def load_states(loop: Loop) -> None:
    if loop.saved is not None:
        loop.run.optimizer.load_state_dict(loop.saved)


def nap(loop: Loop) -> None:
    with suppress(offload.BudgetError):  # Of the smallest budgets none is left for it.
        offload.sleep(loop.run.model)
        offload.wake(loop.run.model)


Action = Callable[[Loop], None]
Actions = list[Action]
AT_REST: Actions = [evaluate, evaluate_elsewhere, use_a_block_alone, use_one_block_inside_another]
AT_REST += [look, edit_held, edit, stream_weights, look_at_states, save_states, load_states, nap]
WITH_GRADIENTS: Actions = [*AT_REST, backward_only, backward_elsewhere, look_at_gradients]
WITH_GRADIENTS += [edit_gradients, set_gradients, set_gradients_of_the_device, zero_gradients]
WITH_GRADIENTS += [step_and_keep_gradients]


class Step(NamedTuple):
    """One optimizer step, what is done around it, and the delays of the device meanwhile."""

    before: list[Action]
    between: list[Action]
    """Its backward and itself."""
    after: list[Action]
    delays: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Script:
    """What is trained, and what is done with it."""

    steps: list[Step]
    tied: bool
    checkpointed: bool
    forked: bool
    """Whether parts of the model run on streams of their own."""
    max_grad_norm: float | None
    micro_batches: int | None
    model: type[Small] = Small

    def go(
        self,
        placement: tuple[str, str, str],
        directory: Any,
        device: Paced | None = None,
        **budgets: str,
    ) -> list[torch.Tensor]:
        """Everything seen, and all weights and states in the end."""
        with attached(
            placement,
            directory,
            build=lambda: self.model(tied=self.tied, checkpointed=self.checkpointed),
            max_grad_norm=self.max_grad_norm,
            micro_batches=self.micro_batches,
            **budgets,
        ) as run:
            loop = Loop(run, device)
            if self.forked and device is not None:
                run.model.aside = device.aside
            for before, between, after, delays in self.steps:
                if device is not None:
                    device.change(**delays)
                for action in (*before, backward_only, *between, step_only, *after, evaluate):
                    # Residents are torch's own parameters: before a step, too, the user waits.
                    alone = action is step_only and not run.engine.plan.residents
                    if device is not None and not alone:
                        device.wait_for_those_aside()
                    action(loop)
            result = result_of(run)
            states = [slot for state in result.states.values() for slot in state.values()]
            return [*loop.seen, *result.weights.values(), *states]


def draw_script(random: Random, steps: int, model: type[Small] = Small) -> Script:
    """Any script of so many steps."""
    micro_batches = random.choice([None, 1])
    most, longest_s = (2, 3e-3) if model is Small else (1, 1e-4)

    def some(actions: Actions) -> Actions:
        return [random.choice(actions) for _ in range(random.randrange(most + 1))]

    drawn = [
        Step(
            some(AT_REST),
            [] if micro_batches else some(WITH_GRADIENTS),
            some(AT_REST),
            {
                "seed": random.randrange(1 << 32),
                "host_pace": random.choice([0.0, 1.0, 30.0, 1000.0]),
                "host_pauses_s": random.choice([0.0, 0.0, 3e-4, longest_s]),
            },
        )
        for _ in range(steps)
    ]
    checkpointed, forked = random.choice([(False, False), (True, False), (False, True)])
    clip = random.choice([None, 0.1])
    return Script(drawn, random.random() < 0.5, checkpointed, forked, clip, micro_batches, model)


@functools.cache
def least(
    placement: tuple[str, str, str],
    tied: bool,
    max_grad_norm: float | None,
    model: type[Small],
    directory: Any,
) -> dict[str, int]:
    """The smallest budgets; the norm takes some of the device too."""
    return training.smallest_budgets(
        placement,
        directory,
        build=lambda: model(tied=tied, checkpointed=False),
        max_grad_norm=max_grad_norm,
    )


def check(
    script: Script,
    placement: tuple[str, str, str],
    directory: Any,
    *,
    tight: bool,
    on: Callable[[], AbstractContextManager[Paced]],
) -> None:
    """Hold a script on a paced device against the same on the CPU, where all is resident."""
    expected = script.go(RESIDENT, directory)
    with on() as device:
        of = (script.tied, script.max_grad_norm, script.model)
        budgets = least(placement, *of, directory) if tight else {}
        found = script.go(placement, directory, device, **budgets)
        device.timeline.finish()
    assert not device.timeline.races, "\n".join(sorted(set(device.timeline.races)))
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected)):
        assert same_bits(one, other), number
