"""The hyper-parameters of the rules by which weights are updated, and the scalars of one step.

A rule is named by its hyper-parameters (`rule`); which state it keeps is a row of
`cpu_adam.formats.FORMATS`. `factors` computes, in float64, what of a step is the same for all its
elements, by name; the reference and the kernels round each number once to float32. In that order
they are a row of factors of the kernels (enums in src/rules.inc): first the scale of the gradient,
whose sign climbs or descends, second the L2 decay where the rule has one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

STEP_LOW = 1 << 24
"""A step number goes into factors as remainder and quotient by this: each exact in float32."""
STEPS = STEP_LOW * STEP_LOW
"""Numbers of steps are below this."""
LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""The largest float32. What a step multiplies by is at most that."""


def _refusal(found: str, asked: str) -> str:
    """The message for a hyper-parameter with which no step is defined."""
    return (
        f"asked for {asked}; found {found}; likely cause: a wrong value in a parameter group or a "
        f"scheduler; try: print optimizer.param_groups before the step"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """The hyper-parameters of one parameter group, frozen for one step: what all rules have.

    Raises ValueError for values with which no step is defined, TypeError for what is no number.
    """

    rule: ClassVar[str]
    """Name of the rule, as `StateFormat.rule` has it."""

    lr: float
    """Learning rate."""
    maximize: bool = False
    """Whether to climb instead of descend."""

    @abstractmethod
    def factors(self, step: int, gradient_scale: float) -> dict[str, float]:
        """The scalars of a step, counted from 1, of gradients that are multiplied by the scale."""

    def _scale(self, gradient_scale: float) -> float:
        return -gradient_scale if self.maximize else gradient_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamHyper(Hyper):
    """Under AdamW or Adam."""

    rule: ClassVar[str] = "adam"

    beta1: float
    """Decay of the first moment per step, in [0, 1)."""
    beta2: float
    """Decay of the second moment per step, in [0, 1)."""
    eps: float
    """Added to the root of the second moment after its bias was corrected."""
    weight_decay: float
    """Strength of the weight decay; 0 for none."""
    decoupled: bool
    """True for AdamW (the weight shrinks by lr * weight_decay), False for Adam with an L2 term."""

    def __post_init__(self) -> None:
        _check_sizes(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _check_decays(beta1=self.beta1, beta2=self.beta2)
        _check_products(self.lr, self.lr / (1.0 - self.beta1), self.weight_decay)

    def factors(self, step: int, gradient_scale: float) -> dict[str, float]:
        """`correction2` is the reciprocal of the root of the second moment's bias correction,
        `decay` the share of the weight that decays. From `step_low` on they are for `compact`."""
        return {
            "scale": self._scale(gradient_scale),
            "decay_l2": 0.0 if self.decoupled else self.weight_decay,
            "rest1": 1.0 - self.beta1,
            "beta2": self.beta2,
            "rest2": 1.0 - self.beta2,
            "correction2": 1.0 / math.sqrt(1.0 - self.beta2**step),
            "eps": self.eps,
            "decay": self.lr * self.weight_decay if self.decoupled else 0.0,
            "step_size": self.lr / (1.0 - self.beta1**step),
            "step_low": float(step % STEP_LOW),
            "step_high": float(step // STEP_LOW),
            "beta1": self.beta1,
            "root_rest2": math.sqrt(1.0 - self.beta2),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LionHyper(Hyper):
    """Under Lion (arXiv 2302.06675): each weight moves by the learning rate."""

    rule: ClassVar[str] = "lion"

    beta1: float
    """Share of the momentum, against the gradient, in the direction of the step; in [0, 1)."""
    beta2: float
    """Decay of the momentum per step, in [0, 1)."""
    weight_decay: float
    """The weight shrinks by lr * weight_decay; 0 for none."""

    def __post_init__(self) -> None:
        _check_sizes(lr=self.lr, weight_decay=self.weight_decay)
        _check_decays(beta1=self.beta1, beta2=self.beta2)
        _check_products(self.lr, self.lr, self.weight_decay)

    def factors(self, step: int, gradient_scale: float) -> dict[str, float]:
        """`decay` is the share of the weight that decays."""
        return {
            "scale": self._scale(gradient_scale),
            "beta1": self.beta1,
            "rest1": 1.0 - self.beta1,
            "beta2": self.beta2,
            "rest2": 1.0 - self.beta2,
            "decay": self.lr * self.weight_decay,
            "lr": self.lr,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDHyper(Hyper):
    """Under SGD, as in torch.optim.SGD."""

    rule: ClassVar[str] = "sgd"

    momentum: float
    """Decay of the momentum buffer per step; 0 for no momentum."""
    dampening: float = 0.0
    """Share of the gradient that is kept out of the buffer, from the second step on."""
    weight_decay: float = 0.0
    """Strength of the weight decay, an L2 term; 0 for none."""
    nesterov: bool = False
    """Whether the step looks ahead: gradient + momentum * buffer. Without dampening only."""

    def __post_init__(self) -> None:
        _check_sizes(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        small = "a number finite in float32"
        _require(small, lambda x: abs(1.0 - x) <= LARGEST, dampening=self.dampening)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            found = f"momentum={self.momentum} and dampening={self.dampening}"
            raise ValueError(_refusal(found, "nesterov, which needs a momentum and no dampening"))

    def factors(self, step: int, gradient_scale: float) -> dict[str, float]:
        """The last three are 1 or 0: whether there is a buffer (with momentum), whether it starts
        from the gradient (at step 1), whether nesterov."""
        return {
            "scale": self._scale(gradient_scale),
            "decay_l2": self.weight_decay,
            "momentum": self.momentum,
            "rest": 1.0 - self.dampening,
            "lr": self.lr,
            "kept": float(self.momentum != 0.0),
            "fresh": float(step == 1),
            "nesterov": float(self.nesterov),
        }


def _require(asked: str, fits: Callable[[float], bool], **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real):
            raise TypeError(_refusal(f"{name}={value!r}", "a number, or a tensor of a single one"))
        if not fits(value):
            raise ValueError(_refusal(f"{name}={value}", asked))


def _check_sizes(**sizes: float) -> None:
    _require("a number finite in float32, 0 or more", lambda x: 0.0 <= x <= LARGEST, **sizes)


def _check_decays(**decays: float) -> None:
    _require("a number from 0 up to but below 1", lambda x: 0.0 <= x < 1.0, **decays)


def _check_products(lr: float, step_size: float, weight_decay: float) -> None:
    """The learning rate as it is used at most, and with the weight decay."""
    if not max(step_size, lr * weight_decay) <= LARGEST:
        found = f"lr={lr} with weight_decay={weight_decay}, of which a step is {step_size}"
        raise ValueError(_refusal(found, "steps that are finite in float32"))
