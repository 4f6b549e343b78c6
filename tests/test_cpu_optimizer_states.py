"""State dicts of the CPU optimizers: to and from torch's, and back to their own bit for bit."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import cpu_adam
from cpu_adam import CPUSGD, CPUAdam
from cpu_adam.torch_state import to_plain
from tests import optimizers as helpers
from tests.optimizers import OURS, assert_near, assert_same, contiguous, parameters, run, tensors_of

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

COUNTERPARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (torch.optim.AdamW, CPUAdam),
    "fused adamw": (lambda p, **o: torch.optim.AdamW(p, fused=True, **o), CPUAdam),
    "adam": (torch.optim.Adam, lambda p, **o: CPUAdam(p, decoupled_weight_decay=False, **o)),
    "sgd": (torch.optim.SGD, CPUSGD),
    "sgd with momentum": (
        lambda p, **o: torch.optim.SGD(p, momentum=0.9, nesterov=True, **o),
        lambda p, **o: CPUSGD(p, momentum=0.9, nesterov=True, **o),
    ),
}
every_counterpart = pytest.mark.parametrize("name", COUNTERPARTS)


def params_like(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


def through_torch_save(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_counterpart
@pytest.mark.parametrize("start_with_ours", [False, True])
def test_training_goes_on_in_the_other_optimizer(name: str, start_with_ours: bool) -> None:
    """Options, such as the learning rate and the kind of weight decay, travel with the state."""
    builds = COUNTERPARTS[name]
    first, second = reversed(builds) if start_with_ours else builds
    reference = builds[0](contiguous(parameters()), lr=1e-2, weight_decay=0.1)
    whole = run(reference, 8)
    optimizer = first(contiguous(parameters()), lr=1e-2, weight_decay=0.1)
    run(optimizer, 4)
    other = second(params_like(optimizer))
    other.load_state_dict(through_torch_save(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 1e-2
    assert_near(run(other, 4, 4), whole, 0.1, 8)


@every_counterpart
def test_bfloat16_states_go_both_ways(name: str) -> None:
    theirs, ours = COUNTERPARTS[name]
    optimizer = theirs(contiguous(parameters(torch.bfloat16)))
    run(optimizer, 3)
    mine = ours(params_like(optimizer))
    mine.load_state_dict(optimizer.state_dict())
    run(mine, 1, 3)
    for p in mine.param_groups[0]["params"]:
        for key, value in mine.state[p].items():
            assert value.dtype == (torch.int16 if key == "residue" else torch.float32)
    back = theirs(params_like(mine))
    back.load_state_dict(mine.state_dict())
    run(back, 1, 4)
    for p, q in zip(back.param_groups[0]["params"], mine.param_groups[0]["params"]):
        assert (p.detach() - q.detach()).abs().max() < 0.1 if p.numel() else True


def compact(params: Any, **options: Any) -> CPUAdam:
    return CPUAdam(params, states="compact", **options)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*itertools.product(OURS, [torch.float32, torch.bfloat16]), ("compact", torch.bfloat16)],
)
@pytest.mark.parametrize("way", ["direct", "file", "deepcopy", "pickle"])
def test_own_round_trip_is_exact(kind: str, dtype: torch.dtype, way: str) -> None:
    optimizer = {**OURS, "compact": compact}[kind](parameters(dtype), lr=1e-2, weight_decay=0.1)
    run(optimizer, 3)
    other: Any
    if way in ("direct", "file"):
        other = OURS.get(kind, CPUAdam)(params_like(optimizer))
        state = optimizer.state_dict()
        other.load_state_dict(through_torch_save(state) if way == "file" else state)
    elif way == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = pickle.loads(pickle.dumps(optimizer))
    assert_same(tensors_of(other), tensors_of(optimizer))
    mine, copies = run(optimizer, 3, 3), run(other, 3, 3)
    assert_same(copies, mine)
    assert_same(tensors_of(other), tensors_of(optimizer))


@helpers.every_optimizer
@pytest.mark.parametrize("model_first", [False, True])
def test_the_order_of_loading_does_not_matter(kind: str, model_first: bool) -> None:
    """A model loaded after its optimizer keeps the masters of the checkpoint."""
    model = nn.Linear(7, 5).bfloat16()
    optimizer = OURS[kind](model.parameters(), lr=1e-3)
    run(optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = nn.Linear(7, 5).bfloat16()
    other = OURS[kind](resumed.parameters(), lr=1e-3)
    run(other, 2)
    for load in (model_first, not model_first):
        if load:
            resumed.load_state_dict(saved[0])
        else:
            other.load_state_dict(saved[1])
    run(optimizer, 3, 5)
    run(other, 3, 5)
    assert_same(tensors_of(other), tensors_of(optimizer))


# A byte per moment.


@pytest.mark.parametrize("states", ["exact", "fp32", "compact"])
def test_a_step_is_that_of_the_update(states: str) -> None:
    format = cpu_adam.FORMATS[states]
    dtype = getattr(torch, format.weight_dtype)
    optimizer = CPUAdam(parameters(dtype), states=states, weight_decay=0.0)
    run(optimizer, 2)
    by = optimizer.hyper_of(optimizer.param_groups[0])
    records = []
    for p in parameters(dtype):
        record = torch.zeros(format.record_bytes(p.numel()), dtype=torch.uint8)
        views = cpu_adam.views(record, format, p.numel())
        records.append((p, p.detach().contiguous().view(-1).clone(), views))
    for step in (1, 2):
        helpers.set_gradients([p for p, _, _ in records], step - 1)
        for p, weight, views in records:
            assert p.grad is not None
            gradient = p.grad.reshape(-1)
            cpu_adam.update(weight, gradient, views, by, step=step, format=format)
    for (_, weight, _), p in zip(records, optimizer.param_groups[0]["params"]):
        assert_same([p.detach().reshape(-1)], [weight])


def test_moments_of_torch_are_encoded() -> None:
    """And torch does not take codes for moments."""
    theirs = torch.optim.AdamW(contiguous(parameters(torch.bfloat16)), lr=1e-2)
    run(theirs, 5)
    mine = compact(params_like(theirs), lr=1e-2)
    mine.load_state_dict(theirs.state_dict())
    for p, q in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        assert mine.state[p]["exp_avg_code"].dtype == torch.uint8
        if p.numel():
            largest = theirs.state[q]["exp_avg"].abs().amax().float()
            assert largest / 2 < mine.state[p]["exp_avg_scale"].max() <= largest
    run(mine, 1)
    theirs.load_state_dict(mine.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        run(theirs, 1)


def test_what_was_loaded_is_a_copy() -> None:
    optimizer = CPUAdam(parameters())
    run(optimizer, 2)
    other = CPUAdam(params_like(optimizer))
    other.load_state_dict(optimizer.state_dict())
    before = [x.clone() for x in tensors_of(optimizer)]
    run(other, 2)
    assert_same(tensors_of(optimizer)[len(parameters()) :], before[len(parameters()) :])


def test_options_that_a_checkpoint_lacks_stay() -> None:
    optimizer = CPUAdam(parameters(torch.bfloat16), maximize=True)
    state = optimizer.state_dict()
    for option in ("states", "maximize", "decoupled_weight_decay"):
        del state["param_groups"][0][option]
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["states"], group["maximize"], group["lr"]) == ("exact", True, 0.5)


def test_load_hooks_run() -> None:
    optimizer = CPUAdam(parameters())
    run(optimizer, 1)
    state = optimizer.state_dict()
    seen = []

    def before(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": 0.25} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda it: seen.append(it.param_groups[0]["lr"]))
    optimizer.load_state_dict(state)
    assert seen == [0.25]


SPOILED: dict[str, Callable[[Any], object]] = {
    "groups": lambda s: s["param_groups"].append(s["param_groups"][0]),
    "shape": lambda s: s["state"][3].update(exp_avg=torch.zeros(5, 3)),
    "lacking": lambda s: s["state"][3].pop("exp_avg_sq"),
    "codes": lambda s: s["state"][3].update(exp_avg=torch.zeros(3, 5, dtype=torch.int8)),
    "no step": lambda s: s["state"][3].pop("step"),
    "wide residue": lambda s: s["state"][3].update(
        residue=torch.full((3, 5), 1 << 15, dtype=torch.int32)
    ),
    "amsgrad": lambda s: s["param_groups"][0].update(amsgrad=True),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_state_that_does_not_fit_is_refused_whole(spoil: str) -> None:
    optimizer = CPUAdam(parameters(torch.bfloat16), lr=0.5)
    other = CPUAdam(parameters(torch.bfloat16))
    run(optimizer, 2)
    run(other, 1)
    before = [x.clone() for x in tensors_of(other)]
    state = copy.deepcopy(optimizer.state_dict())
    SPOILED[spoil](state)
    with pytest.raises(ValueError, match=r"asked .*; found .*; likely cause: .*; try: "):
        other.load_state_dict(state)
    assert_same(tensors_of(other), before)
    assert other.param_groups[0]["lr"] == 1e-3


def test_momentum_that_begins_later_begins_as_in_torch() -> None:
    results = []
    for build in (torch.optim.SGD, CPUSGD):
        optimizer = build(parameters(), lr=1e-2)
        run(optimizer, 2)
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        run(optimizer, 3, 2)
        optimizer.param_groups[0].update(momentum=0.0)
        run(optimizer, 1, 5)
        optimizer.param_groups[0].update(momentum=0.9)
        results.append(run(optimizer, 2, 6))
    assert_near(results[1], results[0], 1.0, 8)


def test_sgd_without_momentum_keeps_what_torch_keeps() -> None:
    """Nothing, then a buffer from when there is momentum on, which stays when there is none."""
    optimizers = [build(parameters(), lr=1e-2) for build in (torch.optim.SGD, CPUSGD)]
    for step, momentum in enumerate((0.0, 0.0, 0.9, 0.9, 0.0, 0.0)):
        kept = []
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
            run(optimizer, 1, step)
            kept.append(optimizer.state_dict()["state"])
        torch.testing.assert_close(kept[1], kept[0], rtol=1e-5, atol=1e-6)
    assert kept[1]


@pytest.mark.parametrize("empty", [{}, {"momentum_buffer": None}])
@pytest.mark.parametrize("build", [torch.optim.SGD, CPUSGD])
def test_a_buffer_that_is_none_begins_with_the_next_gradient(build: Any, empty: Any) -> None:
    """Older versions of torch write it so."""
    optimizer = build(parameters(), lr=1e-2, momentum=0.9)
    state = optimizer.state_dict()
    state["state"] = {key: dict(empty) for key in state["param_groups"][0]["params"]}
    optimizer.load_state_dict(state)
    run(optimizer, 1)
    for p in optimizer.param_groups[0]["params"]:
        assert torch.equal(optimizer.state[p]["momentum_buffer"], p.grad)


@helpers.every_optimizer
@every_dtype
@pytest.mark.parametrize("flatten", [False, True])
def test_helpers_of_distributed_checkpoints(kind: str, dtype: torch.dtype, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models = [nn.Linear(7, 5).to(dtype) for _ in range(2)]
    first, second = (OURS[kind](model.parameters(), lr=1e-2) for model in models)
    run(first, 3)
    models[1].load_state_dict(models[0].state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(models[0], first, options=options))
    set_optimizer_state_dict(models[1], second, state, options=options)
    assert_same(tensors_of(second), tensors_of(first))
    helpers.set_gradients(list(models[0].parameters()), 9)
    helpers.set_gradients(list(models[1].parameters()), 9)
    first.step()
    second.step()
    assert_same(tensors_of(second), tensors_of(first))


@helpers.every_optimizer
def test_a_refused_first_step_leaves_no_state(kind: str) -> None:
    """SGD takes its first step undampened, so it must know whether it has taken one."""
    options = {"lr": 1.0, **({"dampening": 0.5} if kind == "sgd" else {})}
    p, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer, want = OURS[kind]([p], **options), OURS[kind]([other], **options)
    p.grad = torch.ones(4)
    p.grad.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="without memory"):
            optimizer.step()
        assert not optimizer.state
    p.grad = other.grad = torch.ones(4)
    for _ in range(2):
        optimizer.step()
        want.step()
        assert_same(tensors_of(optimizer), tensors_of(want))


def test_moments_that_were_decoded_are_loaded_as_the_same_moments() -> None:
    """As the engine hands them out: rounded to the nearest, not by the dither of a step."""
    format = cpu_adam.FORMATS["compact"]
    p = nn.Parameter(torch.zeros(5000, dtype=torch.bfloat16))
    optimizer, again = (CPUAdam([p], states="compact") for _ in range(2))

    def plain(by: CPUAdam) -> dict[str, torch.Tensor]:
        slots = {key.removesuffix("_code"): value for key, value in by.state[p].items()}
        return {"step": slots["step"], **to_plain(slots, format)}

    run(optimizer, 5)
    saved = plain(optimizer)
    again.load_state_dict({**optimizer.state_dict(), "state": {0: saved}})
    for key, value in plain(again).items():
        assert torch.equal(value, saved[key]), key


def asked_for_huge_pages() -> list[tuple[int, int]]:
    """The parts of this process's memory, as addresses, for which huge pages were asked."""
    found, here = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(match[1], 16), int(match[2], 16)
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found.append(here)
    return found


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists()
    or not Path("/proc/self/smaps").exists(),
    reason="a system without huge pages, or that does not say what was asked",
)
@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize("was_loaded", [False, True])
def test_large_states_lie_on_huge_pages(states: str, was_loaded: bool) -> None:
    weight = nn.Parameter(torch.zeros(5 << 20, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = CPUAdam([weight], states=states)
    optimizer.step()
    if was_loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    asked = asked_for_huge_pages()
    large = [x for x in tensors_of(optimizer)[1:] if x.nbytes > 4 << 20]
    assert len(large) == 3
    for x in large:
        middle = x.data_ptr() + x.nbytes // 2
        assert any(start <= middle < stop for start, stop in asked)
