"""Durable runs over ranks, as jobs of a `ranks.World`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

import offload
from offload.checkpoint.commits import RunDirectory
from tests.ranks import MEMORY, How, digest, values_of
from tests.ranks_jobs import _attached, _mesh, _steps


@dataclass(frozen=True)
class Life:
    """A run between two starts of its processes."""

    until: int
    """The step that it takes last, where it lives so long."""
    dies: int | None = None
    """The rank that is killed."""
    after_s: float = 0.0
    """So long after attach that is, while steps are taken on and on."""
    slow: int | None = None
    """The rank whose commits take long."""
    ends: str = "close"
    new: int = 99
    """The first rank that was not there before."""
    apart: bool = False
    """Whether no rank sees the directories of others, as on machines of their own."""


def live(rank: int, ranks: int, how: How, life: Life) -> tuple[int, int, list[float]]:
    """Go on from the last commit; the step of that, a digest of what is left, and the losses."""
    mesh = _mesh(how.mesh) if how.mesh else None
    config = offload.Config(**{**MEMORY, "comm_timeout": 20.0, **how.config})
    if life.apart:
        config = replace(config, durable=f"{config.durable}-of-{rank}")
    model, optimizer = how.build()
    model.register_buffer("mine", torch.zeros(3))
    model, optimizer = offload.attach(model, optimizer, config, mesh=mesh)
    if offload.engine_of(model).resumed:
        assert model.mine.tolist() == [rank * (rank < life.new)] * 3
    model.mine.fill_(rank)
    engine = offload.engine_of(model)
    begun, user = engine.resumed or (0, {"step": 0})
    assert user["step"] == begun == engine.steps == engine.ranks.group.step
    engine.user_state = lambda: {"step": engine.steps}
    if life.slow == rank:
        _slow_down()
    if life.dies == rank:
        after = threading.Timer(life.after_s, os.kill, (os.getpid(), signal.SIGKILL))
        after.start()
    losses = _steps(model, optimizer, how, rank, ranks, list(range(begun, life.until)))
    if life.ends == "commit":
        engine.commit()
    found = digest(values_of(model, optimizer))
    engine.close()
    return begun, found, losses


def order(rank: int, ranks: int, how: How) -> tuple[dict[int, float], dict[int, float]]:
    """When the first update of each step began here, and when its commit was made; that of the last
    rank takes long."""
    updates, commits = dict[int, float](), dict[int, float]()
    model, optimizer = offload.attach(*how.build(), offload.Config(**{**MEMORY, **how.config}))
    engine = offload.engine_of(model)
    issue, write = engine.updates.issue, engine.commits._directory.write

    def issued(*args: Any) -> None:
        updates.setdefault(engine.steps + 1, time.monotonic())
        issue(*args)

    def written(run: Any, *args: Any, **options: Any) -> None:
        time.sleep(0.2 * (rank == ranks - 1))
        write(run, *args, **options)
        commits[run["step"]] = time.monotonic()

    engine.updates.issue, engine.commits._directory.write = issued, written
    _steps(model, optimizer, how, rank, ranks, list(range(how.steps)))
    engine.close()
    return updates, commits


def edit_and_commit(rank: int, ranks: int, how: How) -> list[float]:
    """Edit a weight between two steps, commit, and go on: the edit each time."""
    found = []
    for _ in range(2):
        model, optimizer = offload.attach(*how.build(), offload.Config(**{**MEMORY, **how.config}))
        engine = offload.engine_of(model)
        if engine.resumed is None:
            _steps(model, optimizer, how, rank, ranks, [0, 1])
            with torch.no_grad():
                model.head.weight.copy_(torch.full(model.head.weight.shape, 3.0))
            engine.commit()
        with offload.gathered(model, "head.weight"):
            found.append(model.head.weight.float().mean().item())
        engine.close()
    return found


def commit_and_leave(rank: int, ranks: int, how: How) -> tuple[float, float]:
    """When a commit looked last whether all ranks have made it, and when it returned; the last rank
    looks late."""
    model, optimizer = offload.attach(*how.build(), offload.Config(**{**MEMORY, **how.config}))
    engine, looked = offload.engine_of(model), list[float]()
    wait = engine.commits._directory.wait

    def late() -> None:
        time.sleep(0.3 * (rank == ranks - 1))
        wait()
        looked.append(time.monotonic())

    engine.commits._directory.wait = late
    _steps(model, optimizer, how, rank, ranks, [0])
    engine.commit()
    found = looked[-1], time.monotonic()
    engine.close()
    return found


def attach_alone(rank: int, ranks: int, how: How) -> None:
    """Attach, which is refused."""
    offload.attach(*how.build(), offload.Config(**{**MEMORY, **how.config}))


def _slow_down() -> None:
    write: Any = RunDirectory.write

    def slowly(self: RunDirectory, *args: Any, **options: Any) -> None:
        time.sleep(random.random() / 5)
        write(self, *args, **options)

    RunDirectory.write = slowly  # type: ignore[method-assign]


def uneven(rank: int, ranks: int, how: How, more: int) -> tuple[int, list[float]]:
    """Evaluate weights that are halved, and then the true ones, on other ranks `more` batches than
    on the first. Gives a digest of what is left, and the losses of training."""
    model, optimizer = _attached(how)
    losses = list[float]()
    for step in range(3):
        losses += _steps(model, optimizer, how, rank, ranks, [step])
        with offload.gathered(model):
            live = {name: value.clone() for name, value in model.state_dict().items()}
        for weights in {name: value / 2 for name, value in live.items()}, live:
            model.load_state_dict(weights)
            with torch.no_grad():
                for _ in range(1 + more * rank):
                    how.loss(model, 0)
        optimizer.engine.commit()
    found = digest(values_of(model, optimizer))
    offload.engine_of(model).close()
    return found, losses
