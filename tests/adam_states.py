"""Weights, states and gradients of every kind of number, and how they are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpu_adam import FORMATS, AdamHyper, LionHyper, SGDHyper, reference
from cpu_adam.hyper import Hyper


def hyper(**changes: Any) -> AdamHyper:
    base = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    return AdamHyper(**{**base, "decoupled": True, **changes})


def hyper_of(name: str, **changes: Any) -> Hyper:
    """Hyper-parameters of the rule of a state format."""
    if FORMATS[name].rule == "adam":
        return hyper(**changes)
    if FORMATS[name].rule == "lion":
        lion = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}
        return LionHyper(**{**lion, **changes})
    return SGDHyper(**{"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01, **changes})


VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "adam": ({}, {"decoupled": False}, {"weight_decay": 0.0}, {"eps": 0.0, "beta1": 0.0}),
    "lion": ({}, {"weight_decay": 0.0}, {"beta1": 0.0}, {"lr": 0.3, "beta2": 0.0}),
    "sgd": ({"nesterov": True}, {"weight_decay": 0.0}, {"momentum": 0.0}, {"dampening": 0.3}),
}


def special(elements: int, seed: int) -> torch.Tensor:
    """Float32 numbers of every kind: normal, huge, subnormal, zero, infinite, NaN."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=elements) * 10.0 ** rng.integers(-12, 6, elements)
    numbers = numbers.astype("f4")
    words = rng.integers(0, 1 << 32, elements, dtype=np.uint64).astype("u4").view("f4")
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-42, 3e38, -3.4e38, 1e-38], "f4")
    kind = rng.integers(0, 8, elements)
    numbers = np.where(kind == 0, words, numbers)
    return torch.from_numpy(np.where(kind == 1, rng.choice(odd, elements), numbers))


def mostly_finite(elements: int, seed: int, group: int) -> torch.Tensor:
    """Float32 numbers below 4000 or so, but of every kind in about an eighth of the groups."""
    rng = np.random.default_rng(seed)
    numbers = torch.from_numpy(rng.normal(size=elements) * 10.0 ** rng.integers(-12, 4, elements))
    poisoned = torch.from_numpy(rng.random(-(-elements // group)) < 1 / 8)
    here = poisoned.repeat_interleave(group)[:elements]
    return torch.where(here, special(elements, seed), numbers.float())


class State:
    """A weight, its slots and a gradient; each starts `offset` elements into its memory.

    Where elements share their scales, most numbers are such that scales come out finite.
    """

    def __init__(
        self, name: str, elements: int, dtype: torch.dtype, seed: int = 0, offset: int = 0
    ) -> None:
        def cut(x: torch.Tensor, to: torch.dtype | None = None) -> torch.Tensor:
            held = torch.empty(x.numel() + offset, dtype=to or x.dtype)[offset:]
            return held.copy_(x)

        self.format = FORMATS[name]
        group = self.format.group_elements
        coded = self.format.coded
        gradient = mostly_finite(elements, seed, group) if coded else special(elements, seed)
        self.gradient = cut(gradient, dtype)
        self.weight = cut(special(elements, seed + 1))
        self.slots: dict[str, torch.Tensor] = {}
        for k, slot in enumerate(self.format.slots):
            items = slot.items(elements)
            numbers = special(items, seed + 2 + k)
            if coded:
                numbers = mostly_finite(items, seed + 2 + k, 1).abs()
            if slot.dtype != "float32":
                # Any bits, not only those that an update writes.
                rng, kind = np.random.default_rng(seed + 9 + k), np.iinfo(slot.dtype)
                numbers = torch.from_numpy(
                    rng.integers(kind.min, kind.max, elements, slot.dtype, endpoint=True)
                )
            self.slots[slot.name] = cut(numbers.abs() if slot.name == "exp_avg_sq" else numbers)
        if "residue" in self.slots:
            bits = np.random.default_rng(seed + 8).integers(-(1 << 15), 1 << 15, elements, "i2")
            self.weight = cut(torch.from_numpy(bits).view(torch.bfloat16))
            if coded:
                self.weight = cut(mostly_finite(elements, seed + 7, group).bfloat16())

    def clone(self) -> State:
        other = object.__new__(State)
        other.format, other.gradient = self.format, self.gradient
        other.weight = self.weight.clone()
        other.slots = {name: slot.clone() for name, slot in self.slots.items()}
        return other

    def become(self, other: State) -> None:
        """The numbers of another one, in the memory that this one has."""
        self.weight.copy_(other.weight)
        for name, slot in other.slots.items():
            self.slots[name].copy_(slot)

    def part(self, start: int, elements: int) -> State:
        """Some of the elements, in the memory that this one has."""
        other, here = object.__new__(State), slice(start, start + elements)
        other.format, other.gradient = self.format, self.gradient[here]
        other.weight = self.weight[here]
        other.slots = reference.cut(self.slots, self.format, start, elements)
        return other

    def update(self, by: Any, *args: Any, **options: Any) -> None:
        by.update(self.weight, self.gradient, self.slots, *args, format=self.format, **options)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit, but for the payload of a float32 NaN."""
    assert got.dtype == want.dtype
    if got.dtype == torch.float32:
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan)
        got, want = got.masked_fill(nan, 0.0), want.masked_fill(nan, 0.0)
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.contiguous().view(words), want.contiguous().view(words))


def assert_same_floats(got: torch.Tensor, want: npt.NDArray[Any]) -> None:
    """Equal bit for bit, but for the sign and payload of NaNs."""
    found = got.numpy()
    assert found.dtype == want.dtype
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(found), nan)
    words = np.int32 if want.dtype == np.float32 else np.int64
    np.testing.assert_array_equal(found.view(words)[~nan], want.view(words)[~nan])


def assert_same_state(got: State, want: State) -> None:
    assert_same(got.weight, want.weight)
    for name, slot in want.slots.items():
        assert_same(got.slots[name], slot)


@contextmanager
def told(*where: object) -> Iterator[None]:
    """Says where a comparison has failed."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error
