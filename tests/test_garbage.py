"""What the engine makes goes as soon as nobody has it, and waits for no garbage collector.

What only a collector finds keeps with it all that it holds: a frame of the engine's those of the
user's loop, and with them a loss with its graph; and how often one runs, is anybody's guess.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from tests.training import Net, Run, attached, in_turn, plain, tiered

PLACEMENTS = (
    *(("device", "device", "cpu"), ("device", "device", "nvme"), ("device", "cpu", "cpu")),
    *(("cpu", "device", "device"), ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")),
)


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """What nobody but a garbage collector found of what was made in this context, by kind."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.freeze()  # What was there before may be let go of meanwhile, and is no business of ours.
    # It stays frozen: to look through all of torch again, each attach of later tests takes 0.3 s.
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(one).__qualname__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def evaluated(run: Run, number: int) -> None:
    plain(run, number)
    with torch.no_grad():
        run.loss()


def looked_at(run: Run, number: int) -> None:
    run.loss().backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
    for parameter in run.model.parameters():
        parameter.grad.add_(1)
        parameter.data.mul_(0.5)
    run.step()
    run.model.state_dict()
    run.optimizer.state_dict()


def accumulated(run: Run, number: int) -> None:
    run.loss().backward()
    (run.loss() + run.loss()).backward()
    run.step()


def slept(run: Run, number: int) -> None:
    plain(run, number)
    offload.sleep(run.model)
    offload.wake(run.model)


def under_a_mode(run: Run, number: int) -> None:
    with torch.device("cpu"):
        plain(run, number)


LOOPS: dict[str, tuple[Callable[[Run, int], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "updates in backward": (plain, {"micro_batches": 1}),
    "clipped": (plain, {"max_grad_norm": 0.5}),
    "accumulated": (accumulated, {}),
    "evaluated": (evaluated, {}),
    "looked at": (looked_at, {}),
    "slept": (slept, {}),
    "under a mode": (under_a_mode, {}),
}


def left_by(
    loop: Callable[[Run, int], None], placement: tuple[str, str, str], tmp_path: Path, options: Any
) -> Counter[str]:
    """The garbage of two steps."""
    with attached(placement, tmp_path, **options) as run:
        for number in range(2):
            loop(run, number)
        with garbage() as found:
            for number in range(2, 4):
                loop(run, number)
            run.engine.settle()
    return found


def placed() -> list[Any]:
    """Every loop in one placement, three of them in the fast tier; in the others slow."""
    fast = {"looked at": 0, "updates in backward": 4, "slept": 5}
    return [
        tiered(fast.get(name) == at, name, where)
        for name in LOOPS
        for at, where in enumerate(PLACEMENTS)
    ]


@pytest.mark.parametrize(("name", "placement"), placed())
def test_a_step_leaves_nothing_to_a_garbage_collector(
    name: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    loop, options = LOOPS[name]
    assert not left_by(loop, placement, tmp_path, options)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_leaves_no_more_than_torch_s_own(reentrant: bool, tmp_path: Path) -> None:
    options = {"build": partial(Net, checkpointed=True, reentrant=reentrant)}
    here, there = (left_by(plain, (tier,) * 3, tmp_path, options) for tier in ("device", "cpu"))
    assert there == here


ENDS: dict[str, Callable[[Run], object]] = {
    "closed": lambda run: run.engine.close(),
    "detached": lambda run: offload.detach(run.model),
}


@pytest.mark.parametrize(("how", "placement"), in_turn(ENDS, PLACEMENTS[-2:]))
def test_who_has_ended_keeps_no_memory(
    how: str, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Though its model, its optimizer and itself are held, and nobody collects garbage."""
    with garbage(), attached(placement, tmp_path) as run:
        engine = run.engine
        for number in range(2):
            plain(run, number)
        arenas = [one.tensor for one in engine.runner.memory.arenas.values()]
        areas = [range(one.data_ptr(), one.data_ptr() + one.nbytes) for one in arenas]
        assert any(areas)
        del arenas
        ENDS[how](run)
        with torch._C.DisableTorchFunctionSubclass():
            held = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
            places = [one.data_ptr() for one in held]
        assert not [place for place in places if any(place in area for area in areas)]


def test_who_was_dropped_makes_room_for_the_next(tmp_path: Path) -> None:
    alive: list[Any] = []
    with garbage():
        for _ in range(3):
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.AdamW(model.parameters())
            config = offload.Config(device_memory="1MiB", cpu_memory="1MiB")
            model, optimizer = offload.attach(model, optimizer, config)
            alive.append(weakref.ref(optimizer.engine))
        assert [one() is None for one in alive] == [True, True, False]
        optimizer.engine.close()


@pytest.mark.parametrize("placement", PLACEMENTS[:2])
def test_lanes_keep_no_gradient_of_before_and_no_weight_of_a_sleeping_model(
    runner: None, placement: tuple[str, str, str], tmp_path: Path
) -> None:
    """Where torch owns them, whose memory is the user's as soon as an update is done."""

    def alive(tensors: list[Any]) -> list[Any]:
        return [StorageWeakRef(one.detach().untyped_storage()) for one in tensors]  # type: ignore

    with attached(placement, tmp_path) as run:
        run.loss().backward()
        parameters = list(run.model.parameters())
        weights, gradients = alive(parameters), alive([one.grad for one in parameters])
        run.step()
        run.loss().backward()
        assert all(one.expired() for one in gradients)
        run.step()
        offload.sleep(run.model)
        assert all(one.expired() for one in weights)
        offload.wake(run.model)
