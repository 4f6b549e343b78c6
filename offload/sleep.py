"""Sleep and wake: everything an engine holds of the fast tiers goes to a slower one, and back.

[Note: Sleep]
Between two phases of a job that share a device (a policy is trained, then sampled from elsewhere)
an engine gives all its memory of the faster tiers back. The homes there are put away, byte for
byte: in CPU memory beside the cpu tier, or on nvme in a file of their own, checked like all that is
stored. Slots hold nothing that the homes do not. Asleep, whatever needs a value is refused: it is
`wake` that takes the memory, at a time of the user's choice. Sleeping and waking change no bit, and
either is done wholly or not at all: a drive that is full leaves the engine awake, memory that
others have taken leaves it asleep.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn

from offload.attach import attached
from offload.bed import Bed
from offload.bounce import bounce
from offload.config import TIERS, Tier
from offload.engine import Engine
from offload.interrupt import whole
from offload.parameter_home import ParameterHome
from offload.program import Value


def sleep(model: nn.Module, tier: Literal["cpu", "nvme"] = "cpu") -> None:
    """Put all values of an attached model into `tier`, and give the memory above it back.

    Returns when it is done. Until `wake` only what is known without values (shapes, names, the
    report) may be asked for. Gradients and optimizer states sleep too; a gradient that somebody
    holds stays with its holder.

    Args:
        model: attached, and awake.
        tier: `cpu` gives device memory back, `nvme` that of the CPU too.

    Raises:
        ValueError: the model is not attached; `tier` is no such tier, or there is no nvme_path.
        RuntimeError: it is asleep already, or an update has begun whose step() is due.
        BudgetError: what is to sleep does not fit the budget of `tier`.
        OSError, MemoryError: the drive or the memory failed; the model is awake as before.
    """
    if tier not in ("cpu", "nvme"):
        raise ValueError(f"offload.sleep: tier is {tier!r}, expected 'cpu' or 'nvme'")
    entry = attached(model)
    directories = entry.config.nvme_path if tier == "nvme" else ()
    if tier == "nvme" and not directories:
        raise ValueError(
            "offload.sleep: tier is nvme, but the model was attached without nvme_path: attach it "
            "with Config(nvme_path=...), which alone puts nothing there that fits elsewhere, or "
            "let it sleep in cpu memory"
        )
    with entry.engine.lock:  # A step of another thread's comes before, or finds it asleep.
        entry.engine.settle()
        _put_to_sleep(entry.engine, TIERS[: TIERS.index(tier)], directories)


def wake(model: nn.Module) -> None:
    """Take the memory of a sleeping model again, and put all its values back.

    Raises:
        ValueError: the model is not attached.
        RuntimeError: it is not asleep.
        BudgetError, MemoryError: others have the memory; the model sleeps on.
        OSError: the drive failed; the model sleeps on.
    """
    engine = attached(model).engine
    with engine.lock:
        bed = engine.executor.bed
        if bed is None:
            raise RuntimeError(
                "offload.wake: the model is not asleep: offload.sleep(model) goes first"
            )
        _wake_up(engine, bed)


def _refuse(ref: Callable[[], Engine | None], _: nn.Parameter) -> None:
    """A gradient comes to a parameter of an engine that sleeps."""
    engine = ref()
    if engine is not None:
        engine.check()


@whole
def _put_to_sleep(engine: Engine, given: tuple[Tier, ...], directories: tuple[str, ...]) -> None:
    executor = engine.executor
    _let_go_of_all(engine)
    bed = Bed(engine.plan, given, directories, executor.share, executor.device)
    try:
        with bounce(executor.device, bed.largest) as copy:
            for value in bed.values():
                bed.put(value, _home(engine, value), executor.step, copy)
    except BaseException:
        bed.left()
        raise
    refuse = partial(_refuse, weakref.ref(engine))
    engine.residents.asleep.rest(partial(ParameterHome, engine), refuse)
    for tier in given:
        executor.memory.give_back(tier)
    engine.gradients.forget_places(given)
    executor.bed = bed
    bed.asleep()


def _let_go_of_all(engine: Engine) -> None:
    """Let nothing be in use, under way, edited, shown in place, or remembered of the slots."""
    engine.end_pass(finished=False)
    engine.exposures.put_all_home()
    engine.gradients.let_go()
    engine.collector.forget_places()
    engine.passes.forget()
    engine.executor.idle()
    for bound in engine.units:
        bound.close()


@whole
def _wake_up(engine: Engine, bed: Bed) -> None:
    executor, taken = engine.executor, list[Tier]()
    bed.wakes()
    try:
        for tier in bed.given:
            executor.memory.take(tier)
            taken.append(tier)
        with bounce(executor.device, bed.largest) as copy:
            engine.residents.asleep.take_room()
            for value in bed.values():
                if engine.plan.in_arena(value.kind, value.unit):
                    bed.get(value, _home(engine, value), copy)
                else:
                    engine.residents.asleep.scatter(value, partial(bed.get, value, copy=copy))
    except BaseException:
        engine.residents.asleep.give_room()
        for tier in taken:
            executor.memory.give_back(tier)
        bed.asleep()
        raise
    engine.residents.asleep.wake()
    executor.bed = None
    bed.left()


def _home(engine: Engine, value: Value) -> torch.Tensor:
    """The bytes of a value at home in a memory tier; a copy where it lies with torch."""
    if not engine.plan.in_arena(value.kind, value.unit):
        return engine.residents.asleep.gathered(value)
    return engine.executor.peek(value)
