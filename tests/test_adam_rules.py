"""Lion and SGD: the reference against numpy bit for bit, against torch, and their properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cpu_adam import FORMATS, LionHyper, SGDHyper, choice, native, reference
from cpu_adam.hyper import Hyper

Float32 = npt.NDArray[np.float32]
f = np.float32


def lion(**changes: Any) -> LionHyper:
    base = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    return LionHyper(**{**base, **changes})


def sgd(**changes: Any) -> SGDHyper:
    return SGDHyper(**{"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, **changes})


def random(elements: int, seed: int) -> Float32:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-6, 3, elements)
    return (rng.normal(size=elements) * scale).astype("f4")


def numpy_lion(p: Float32, g: Float32, m: Float32, by: LionHyper) -> tuple[Float32, Float32]:
    u = f(by.beta1) * m + f(1.0 - by.beta1) * g
    m = f(by.beta2) * m + f(1.0 - by.beta2) * g
    return p - (p * f(by.lr * by.weight_decay) + f(by.lr) * np.sign(u)), m


def numpy_sgd(
    p: Float32, g: Float32, b: Float32, by: SGDHyper, step: int
) -> tuple[Float32, Float32]:
    if by.weight_decay != 0.0:
        g = g + f(by.weight_decay) * p
    if by.momentum == 0.0:
        return p - f(by.lr) * g, b
    b = g if step == 1 else f(by.momentum) * b + f(1.0 - by.dampening) * g
    return p - f(by.lr) * (g + f(by.momentum) * b if by.nesterov else b), b


def numpy_step(
    p: Float32, g: Float32, state: Float32, by: Hyper, step: int, scale: float
) -> tuple[Float32, Float32]:
    g = g * f(scale)
    g = -g if by.maximize else g
    if isinstance(by, LionHyper):
        return numpy_lion(p, g, state, by)
    assert isinstance(by, SGDHyper)
    return numpy_sgd(p, g, state, by, step)


RULES_WITH_ONE_STATE: list[Hyper] = [
    *(lion(), lion(weight_decay=0.0, maximize=True), lion(beta1=0.0)),
    *(sgd(), sgd(momentum=0.0), sgd(nesterov=True, maximize=True), sgd(dampening=0.5)),
    sgd(weight_decay=0.0),
]


def stepped(
    name: str, p: Float32, gradients: list[Float32], by: Hyper, scale: float = 1.0
) -> tuple[Float32, Float32]:
    """Master and state after steps of the reference from a state of zeros."""
    form = FORMATS[name]
    master, state = torch.from_numpy(p.copy()), torch.zeros(p.size)
    slots = {form.slots[-1].name: state}
    weight = master
    if name.endswith("exact"):
        weight = torch.empty(p.size, dtype=torch.bfloat16)
        slots["residue"] = torch.empty(p.size, dtype=torch.int16)
        reference.split(master, weight, slots["residue"])
    for step, g in enumerate(gradients, 1):
        options: dict[str, Any] = {"step": step, "gradient_scale": scale, "format": form}
        reference.update(weight, torch.from_numpy(g), slots, by, **options)
    if weight is not master:
        reference.join(weight, slots["residue"], out=master)
    return master.numpy(), state.numpy()


@pytest.mark.parametrize("master", ["exact", "fp32"])
@pytest.mark.parametrize("by", RULES_WITH_ONE_STATE, ids=repr)
def test_update_equals_numpy(by: Hyper, master: str) -> None:
    start = random(1021, 0)
    gradients = [random(1021, seed) for seed in (1, 2, 3)]
    gradients[1][:99] = 0.0
    for scale in (1.0, 0.37):
        p, state = start, np.zeros_like(start)
        for step, g in enumerate(gradients, 1):
            p, state = numpy_step(p, g, state, by, step, scale)
        found = stepped(f"{by.rule}_{master}", start, gradients, by, scale)
        np.testing.assert_array_equal(found[0].view("i4"), p.view("i4"))
        np.testing.assert_array_equal(found[1].view("i4"), state.view("i4"))


def test_lion_moves_every_weight_by_the_learning_rate() -> None:
    g = np.array([1e-30, -1e30, 0.0, -0.0, np.nan, np.inf, 2.0], "f4")
    p, _ = stepped("lion_fp32", np.ones_like(g), [g], lion(lr=0.25, weight_decay=0.0))
    np.testing.assert_array_equal(p, np.array([0.75, 1.25, 1.0, 1.0, np.nan, 0.75, 0.75], "f4"))


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("kernel", choice.available())
@pytest.mark.parametrize("master", ["exact", "fp32"])
def test_sgd_without_momentum_leaves_its_buffer_alone(master: str, kernel: str, step: int) -> None:
    form, by = FORMATS[f"sgd_{master}"], sgd(momentum=0.0, weight_decay=0.0, lr=0.5)
    p = torch.ones(3333, dtype=getattr(torch, form.weight_dtype))
    slots = {slot.name: torch.zeros(3333, dtype=getattr(torch, slot.dtype)) for slot in form.slots}
    slots["momentum_buffer"].fill_(torch.nan)
    with choice.forced(kernel):
        native.update(p, torch.ones(3333), slots, by, step=step, format=form)
    assert bool((p == 0.5).all())
    assert bool(slots["momentum_buffer"].isnan().all())


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].rule != "adam"])
def test_it_converges_on_a_quadratic(name: str) -> None:
    target = random(257, 3).clip(-1, 1)
    rule, form = FORMATS[name].rule, FORMATS[name]
    weight = torch.zeros(257, dtype=getattr(torch, form.weight_dtype))
    slots = {slot.name: torch.zeros(257, dtype=getattr(torch, slot.dtype)) for slot in form.slots}
    for step in range(1, 401):
        lr = 0.05 * (1 - step / 401)
        make = {"lion": lion, "sgd": sgd}[rule]
        gradient = weight.float() - torch.from_numpy(target)
        by = make(lr=lr, weight_decay=0.0)
        reference.update(weight, gradient, slots, by, step=step, format=form)
    assert float((weight.float() - torch.from_numpy(target)).abs().max()) < 1e-2
