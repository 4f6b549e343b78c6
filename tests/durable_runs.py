"""Durable runs in forks that tell how far they are, and what of them must be the same bits."""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

import offload
from offload.runtime.entry import EngineError
from tests.forked import Forked
from tests.test_durable import CPU, durable, go_on
from tests.test_saving import buffered
from tests.training import Net, Run, attached, result_of

SAVES = 2
"""A run saves after each so many steps."""


def wide() -> Net:
    """Enough for several drives."""
    return Net(width=96, layers=3)


class Loop(NamedTuple):
    """What a run does."""

    steps: int = 16
    backwards: int = 1
    """Of a step."""
    options: tuple[tuple[str, Any], ...] = ()
    build: Callable[[], Net] = buffered

    def arguments(self) -> dict[str, Any]:
        return {"build": self.build, **dict(self.options)}


LOOPS = [
    Loop(),
    Loop(options=(("micro_batches", 1),)),
    Loop(backwards=3, options=(("micro_batches", 3),)),
    Loop(backwards=2),
    Loop(options=(("max_grad_norm", 0.1),)),
]


def digest(tensors: Any, *others: object) -> str:
    found = hashlib.sha256(json.dumps(others, sort_keys=True).encode())
    for one in tensors:
        found.update(one.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest_of_run(run: Run) -> str:
    found = result_of(run)
    states = (x for state in found.states.values() for x in state.values())
    return digest([*found.weights.values(), *states], found.losses)


def digest_of_save(path: Path) -> tuple[int, str]:
    """The step of a save, and a digest of all that is in it, wherever things lived."""
    run = json.loads((path / "run.json").read_text())["run"]
    tensors = {}
    for file in path.glob("*.safetensors"):
        found = load_file(file)
        tensors.update({(file.name.split("-")[0], name): found[name] for name in found})
    kept = [run["step"], run["user"], run["optimizer"], run["random"]["torch"]]
    return run["step"], digest([tensors[key] for key in sorted(tensors)], sorted(tensors), kept)


HANGS_S = 20
"""Whoever has not returned by then never will."""


def check_error(raised: Exception, where: Path, *codes: int) -> int:
    """One sentence, with the path and the cause, which is one of these; that one."""
    if isinstance(raised, offload.BudgetError):  # Attach itself looks for room.
        raised = OSError(errno.ENOSPC, str(raised))
    assert isinstance(raised, (OSError, EngineError)), repr(raised)
    cause = raised.__cause__ if isinstance(raised, EngineError) else raised
    assert isinstance(cause, OSError), repr(raised)
    assert cause.errno in codes, repr(raised)
    assert "\n" not in str(raised), str(raised)
    assert str(where) in str(raised), str(raised)
    return cause.errno


def nothing(_: int) -> None:
    """What happens before a step."""


def trains(
    run: Run, loop: Loop, path: Path | None, before: Callable[[int], None] = nothing
) -> None:
    """To the end, telling where it is; with a path it saves there."""
    told, at = partial(print, flush=True), run.generator.get_state()

    def user() -> dict[str, Any]:
        return {"at": at.tolist(), "losses": run.losses}

    run.engine.user_state = user
    while run.engine.steps < loop.steps:
        at, step = run.generator.get_state(), run.engine.steps
        before(step)
        told("begins", step)
        for number in range(loop.backwards):
            loss = run.loss()
            if number == 0:
                told("begun", step)
            loss.backward()
        run.step()
        at = run.generator.get_state()
        if run.engine.steps % SAVES == 0 and path is not None:
            told("saves", run.engine.steps)
            offload.save(run.model, run.optimizer, path / "save", user=user())
            told("saved", *digest_of_save(path / "save"))
    told("ends", loop.steps)


def program(
    placement: Any,
    path: Path,
    loop: Loop,
    drive: Any = None,
    before: Callable[[int], None] = nothing,
) -> None:
    """Train from wherever the directory is to the end; tells a digest of what came out."""
    print("attaches", 0, flush=True)
    with durable(placement, path, drive, **loop.arguments()) as run:
        if run.engine.resumed is None:
            torch.manual_seed(2)
        go_on(run)
        print("at", run.engine.steps, flush=True)
        trains(run, loop, path, before)
        found = digest_of_run(run)
    print("digest", found, flush=True)


def from_save(placement: Any, path: Path, loop: Loop) -> None:
    """Go on from the last save, in a run that is not durable."""
    with attached(placement, path, **loop.arguments()) as run:
        user = offload.load(run.model, run.optimizer, path / "save")
        run.generator.set_state(torch.tensor(user["at"], dtype=torch.uint8))
        run.losses[:] = user["losses"]
        trains(run, loop, None)
        print("digest", digest_of_run(run), flush=True)
        offload.save(run.model, run.optimizer, path / "save")


def started(program: Callable[[], object]) -> Forked:
    """A fork that runs it. There torch makes its pool of threads anew, which one thread may."""

    def alone() -> object:
        torch.set_num_threads(1)
        return program()

    return Forked(alone)


def lines(child: Forked) -> Iterator[list[str]]:
    """What it tells, line by line, but for one in whose middle it was killed."""
    for line in child.stdout:
        if line.endswith("\n"):
            yield line.split()


class Whole(NamedTuple):
    """What a run tells that was never broken."""

    digest: str
    saves: dict[int, str]
    """By step, the digest of its save."""


@cache
def whole(loop: Loop) -> Whole:
    with tempfile.TemporaryDirectory() as path:
        told = told_by(partial(program, CPU, Path(path), loop))
    return Whole(told[-1][1], {int(one[1]): one[2] for one in told if one[0] == "saved"})


def told_by(program: Callable[[], object]) -> list[list[str]]:
    """What a program tells that ends well."""
    child = started(program)
    told = [*lines(child)]
    _, errors = child.communicate()
    assert errors == "", errors
    return told


class Told(NamedTuple):
    """What is known of a run, from what it told until it was stopped."""

    begins: int = 0
    """The last step whose successor's forward may have begun."""
    begun: int = 0
    """The last one of which that is certain."""
    committed: int = 0
    saved: int = 0
    digest: str = ""
    now: str = ""
    """What it told last."""

    def after(self, line: list[str]) -> Told:
        """With a line more."""
        word, value = line[0], line[1]
        found = self._replace(now=word)
        if word == "at":
            assert int(value) >= self.committed, "a commit was lost"
        elif word in ("begins", "ends"):
            found = found._replace(begins=max(self.begins, int(value)))
        elif word == "begun":
            found = found._replace(begun=max(self.begun, int(value)))
        elif word == "saved":
            found = found._replace(saved=int(value))
        elif word == "digest":
            found = found._replace(digest=value)
        return found

    def checked(self, path: Path, loop: Loop) -> Told:
        """With what is in the directory, where the run has stopped: its commit is that of the last
        step whose successor's forward had begun, or of the one before; its save is whole."""
        at, saved = committed(path), 0
        told = f"committed {at}, before {self.committed}, begun {self.begun} to {self.begins}"
        assert max(self.begun - 1, self.committed) <= at <= self.begins, told
        if (path / "save").exists():
            saved, found = digest_of_save(path / "save")
            assert found == whole(loop).saves[saved]
        assert saved >= self.saved
        return self._replace(committed=at, saved=saved)


def committed(path: Path) -> int:
    """The step of the commit there is; 0 where there is none."""
    file = path / "run" / "commit.json"
    return int(json.loads(file.read_text())["run"]["run"]["step"]) if file.exists() else 0
