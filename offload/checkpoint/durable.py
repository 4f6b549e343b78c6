"""Commits of a durable run: every finished step, beside training.

[Note: Closing a step]
A step is closed when the next training forward begins: what user code does between the two, such as
a scheduler's step, belongs to it. There its hyper-parameters, random numbers and user data are
taken. A thread then waits for the step's updates, writes what of weights and states does not live
on nvme, and commits. Training goes on meanwhile: nothing that is to be written changes before the
next update, or edit, of a weight or state, and those wait for the commit. Weights of resident units
are torch's own, and nobody is asked before an edit: where one has changed while they were written
([Note: Residents] of `model.resident`; a version counter tells), nothing is committed, and the next
commit is not left to a thread.

What lives on nvme is written by its update, to the home that the last commit does not name. A run
that goes on with the plan of the commit finds it there, and moves only what lives in memory.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import nn

from offload.checkpoint.commits import RunDirectory, durable_values
from offload.checkpoint.directory import decoded, encoded, random_state, set_random_state
from offload.checkpoint.saving import (
    buffer_dicts,
    buffers_in,
    check_run,
    check_sets,
    optimizer_of,
    options_of,
    part_of,
    refuse_extra_state,
    sets_of,
    take_over,
)
from offload.checkpoint.shards import WEIGHTS
from offload.config import warn_user
from offload.model.engine import Engine
from offload.model.running import in_backward
from offload.optim.optimizer import Optimizer
from offload.planning.profile import Kind
from offload.program.ops import Lane, Value
from offload.runtime.entry import Hook, all_or_none, ended_by, interruptible
from offload.runtime.memory import host_tensor
from offload.runtime.runner import LOOK_AGAIN_S
from offload.runtime.torch_internals import no_trap, version

REST = 10
"""Without `commit_every`, where states live in memory, the next commit begins when so many times
the seconds of the last one have passed."""


class Commits:
    """Commits the steps of an engine to its directory."""

    durable = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        directory: RunDirectory,
        every: int | None,
    ):
        """Of an attached pair, `every` so many steps, or as often as the drive can without being
        waited for. Nothing is written yet; `resume` takes over what was committed before.
        """
        self._agreed = False
        """Whether all ranks commit the last step."""
        self._buffers, self._optimizer, self._directory = buffer_dicts(model), optimizer, directory
        self._engine: Engine = optimizer.engine
        assert self._engine.runner.store is not None
        self._store = self._engine.runner.store
        self._stream = self._engine.runner.device.new_stream()
        """On which values of the device are read, beside training."""
        refuse_extra_state(model)
        self._every = every
        plan = self._engine.plan
        self._values = [key for key in durable_values(plan) if plan.home(*key).tier != "nvme"]
        """Those that no update writes."""
        self._streams = all(kind == "weight" for kind, _ in self._values)
        self._changed, self._edited = set(self._values), False
        self._closed = self._engine.steps
        """The step that was closed last; -1 where it is not that any more."""
        self._asked = self._closed
        """The step at whose first forward it was asked whether it is to be committed."""
        self._versions = self._seen()
        """Those of residents' weights that were written last."""
        self._alone = True
        """Whether a thread may write what the user may edit."""
        self._thread: threading.Thread | None = None
        self._ended, self._seconds = time.monotonic(), 0.0
        self._restored: tuple[Mapping[str, Any], bool] | None = None
        """The run that goes on, until its first forward, and whether it was closed by one: its
        random numbers are put back there once more."""

    def _at_exit(self) -> None:
        """Commit the last step, where the program has come to its end and nobody closed the engine.

        After an exception nothing is: it may have come in the middle of what belongs to the step.
        """
        if self._engine.commits is not self:
            return
        ended, told = ended_by(), "offload: the last step is not committed:"
        if ended is not None:
            if self._engine.steps != self._closed:
                why = f"{type(ended).__name__} ended the program;"
                print(told, why, self._engine.runner.remedy, file=sys.stderr)
            return
        self._alone = False  # No thread can be started now.
        try:
            self._engine.commit(alone=True)
        except RuntimeError as error:  # Or it is asleep, closed, or in the middle of a step.
            if error.__cause__ is not None:
                print(told, error, file=sys.stderr)

    def _let_go(self) -> None:
        """Commit the last step and close, as nobody has the model any more."""
        if threading.current_thread() is self._thread:  # In which a collector has found that.
            threading.Thread(target=self._engine.close).start()
        else:
            self._engine.close()

    # -- going on ----------------------------------------------------------------------------------

    def resume(self, model: nn.Module) -> None:
        """Take over the values of the commit, where there is one; on all ranks, or on none. One of
        another model or optimizer is refused, and nothing changed."""
        with all_or_none(self._directory.group):
            self._resume(model)
        self._handles = [
            module.register_forward_pre_hook(Hook(self.forward_begins))
            for unit in sorted(self._engine.plan.residents)
            for ref in self._engine.units[unit].modules
            if (module := ref()) is not None
        ]
        """Of modules that no hook of the engine announces."""
        atexit.register(self._at_exit)
        self._dropped = weakref.finalize(model, self._let_go)
        self._dropped.atexit = False

    def _resume(self, model: nn.Module) -> None:
        engine, optimizer = self._engine, self._optimizer
        if (made := self._directory.reader()) is None:
            return
        with closing(made) as reader, engine.lock:
            run, path = reader.commit["run"], self._directory.path
            asked = f"asked to go on from step {run['step']} in {path}"
            sets = sets_of(engine, model, run)
            check_sets({WEIGHTS: sets[WEIGHTS]}, {WEIGHTS: reader.tensors}, asked)
            check_run(run, optimizer, None, asked)
            if lasts := self._store.take_over():
                self._changed = set()
            take_over(engine, model, optimizer, run, sets, reader.values, lasts=lasts)
        self._closed = self._asked = run["step"]
        self._committed(run["step"])
        self._versions = self._seen()
        if self._directory.commit is not None:  # Else of a rank that is new.
            self._restored = run, reader.commit["forward"]
            set_random_state(run["random"], engine.runner.device.torch_device)
        engine.resumed = run["step"], decoded(run["user"])
        if run["user"] is None:
            engine.tell(
                f"this run goes on from step {run['step']}; where in its data the program is, and "
                "its scheduler, were not kept: set engine.user_state (docs/quickstart.md)"
            )

    # -- from step to step -------------------------------------------------------------------------

    def forward_begins(self, *_: object) -> None:
        """A forward begins, or goes on: in training the step before it is closed."""
        if in_backward() or not torch.is_grad_enabled():
            return
        if self._restored is not None:
            (run, in_forward), self._restored = self._restored, None
            if in_forward:
                set_random_state(run["random"], self._engine.runner.device.torch_device)
            for number, (group, options) in enumerate(
                zip(self._optimizer.param_groups, options_of(run))
            ):
                if other := [k for k, v in options.items() if group.get(k, v) != v]:
                    told = ", ".join(f"{k} {group[k]!r}, committed {options[k]!r}" for k in other)
                    warn_user(
                        f"group {number} goes on with {told}: likely a scheduler was built after "
                        "attach, which starts anew; build it before attach, or set these"
                    )
        step = self._engine.steps
        if step != self._asked:  # Once: later forwards belong to the next step.
            self._asked = step
            if self.due(step) if self._engine.ranks is None else self._agreed:
                self.close_step(forward=True)

    @property
    def amid_step(self) -> bool:
        """Whether a step has begun on any rank: what its forward has changed, such as statistics of
        norms, belongs to it, and the last one can no more be committed as it was."""
        begun, ranks = self._asked == self._engine.steps, self._engine.ranks
        return begun if ranks is None else ranks.meet(begun)

    def due(self, step: int) -> bool:
        """Whether a step is to be committed, as far as this rank knows."""
        if self._every is not None:
            return step // self._every != self._closed // self._every
        if self._thread is not None and self._thread.is_alive():
            return self._streams
        return self._streams or time.monotonic() - self._ended > REST * self._seconds

    def agreed(self, commits: bool) -> None:
        """All ranks take a step, and each of them commits it, or none."""
        self._agreed = commits

    def close_step(self, *, forward: bool = False) -> None:
        """Begin the commit of the last step; `forward` says that the next one begins."""
        engine, user = self._engine, None
        self.wait()
        if engine.user_state is not None:
            if not callable(engine.user_state):
                raise TypeError(
                    f"asked for engine.user_state; found a {type(engine.user_state).__name__}; "
                    "give a function that returns it: engine.user_state = lambda: {...}"
                )
            with interruptible():
                user = engine.user_state()
        run = {
            "step": engine.steps,
            "user": encoded(user, "engine.user_state()"),
            "optimizer": optimizer_of(engine, self._optimizer),
            "random": random_state(engine.runner.device.torch_device),
            **self._directory.begin(),
        }
        if self._restored is not None:  # What the program draws until then it will draw again.
            kept, forward = self._restored
            run["random"] = kept["random"]
            run["user"] = kept["user"] if engine.user_state is None else run["user"]
        buffers = {
            name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, value in buffers_in(self._buffers)
        }
        versions = self._seen()
        edited = {("weight", u) for u, seen in versions.items() if seen != self._versions[u]}
        changed, self._changed, self._closed = self._changed | edited, set(), engine.steps
        self._versions, self._edited = versions, False
        device = engine.runner.device
        fence = device.fence(device.stream())
        args = run, buffers, forward, [key for key in self._values if key in changed], fence
        # The reference works on the thread that waits.
        if not engine.runner.lasting or not self._alone:
            self._alone = True
            self._commit(*args)
            engine.runner.check()
            return
        self._thread = threading.Thread(target=self._commit, args=args, name="offload-commit")
        self._thread.start()

    def wait(self) -> None:
        """Block until the commit that was begun is there, on all ranks."""
        self._join()
        self._directory.wait()

    def _join(self) -> None:
        if (thread := self._thread) is not None:
            with self._engine.runner.waited(Lane.DISK), interruptible():
                while thread.is_alive():
                    thread.join(LOOK_AGAIN_S)
            self._thread = None
            self._engine.runner.check()

    def updated(self, units: Any) -> None:
        """Updates of these units begin, once what was begun is committed."""
        self.wait()
        self._changed.update((kind, unit) for unit in units for kind in ("weight", "state"))

    def before_write(self, kind: Kind, unit: int) -> None:
        """The user's thread writes a weight or state home."""
        if kind != "gradient":
            self.wait()
            self._changed.add((kind, unit))
            self._edited = True

    def commit(self, *, alone: bool = False) -> None:
        """Commit the last step as all is now, on all ranks; `alone`, as this one comes to its end,
        where weights or states have changed since one was closed."""
        self._join()
        ranks = None if alone else self._engine.ranks
        if ranks is not None:  # Others may be in a forward, which this one serves.
            ranks.meet()
        new = self._engine.steps != self._closed or self._edited or self._versions != self._seen()
        if new or not alone:
            self.close_step()
        self._join() if alone else self.wait()
        if ranks is not None:  # Nobody leaves, maybe with the store, while another asks it.
            ranks.meet()

    def loaded(self) -> None:
        """All values are those of another step, and so are the random numbers."""
        self._changed, self._closed, self._restored = set(self._values), -1, None
        self._asked = -1

    def _seen(self) -> dict[int, list[tuple[int, int]]]:
        """By resident unit, where its weights are and how often they were changed."""
        units = self._engine.units
        with no_trap():
            return {
                unit: [(one.data_ptr(), version(one)) for one in units[unit].parameters]
                for unit in self._engine.plan.residents
            }

    def close(self) -> None:
        """Wait for the thread, whatever it has met, and leave the model."""
        self._dropped.detach()
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join()
        for handle in self._handles:
            handle.remove()

    # -- the thread --------------------------------------------------------------------------------

    @torch.no_grad()
    def _commit(
        self,
        run: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
        forward: bool,
        changed: list[Any],
        fence: Any,
    ) -> None:
        engine, runner, since = self._engine, self._engine.runner, time.monotonic()
        try:
            tasks = engine.updates.begun()
            places = {unit: at for at, unit in enumerate(tasks)}
            if fence is not None:
                fence.synchronize()
            for kind, unit in sorted(changed, key=lambda key: places.get(key[1], -1)):
                if unit in tasks and not runner.over(tasks[unit]):
                    return
                with self._stream():
                    self._write(kind, unit, run["step"])
            if not all(map(runner.over, tasks.values())):
                return
            if self._versions == self._seen():
                self._directory.write(run, buffers, self._store, forward=forward)
                self._committed(run["step"])
            else:
                self._changed.update(changed)
                self._closed, self._alone = -1, False
        except BaseException as error:
            runner.fail(error)
        self._ended = time.monotonic()
        self._seconds = self._ended - since

    def _committed(self, step: int) -> None:
        which = f"step {step}" if self._engine.ranks is None else "the last step of all ranks"
        self._engine.runner.remedy = (
            f"start the same program again: it goes on from {which}, committed in "
            f"{self._directory.path}"
        )

    def _write(self, kind: Any, unit: int, step: int) -> None:
        """Write a value whose home is in memory, chunk by chunk."""
        engine, runner = self._engine, self._engine.runner
        pieces, parameters = engine.plan.profile.by_chunk(unit), engine.units[unit].parameters
        for chunk, size in enumerate(engine.plan.sizes.chunks[kind][unit]):
            value = Value(kind, unit, chunk)
            if kind == "weight" and unit in engine.residents:
                content = host_tensor(size)
                with no_trap():  # Its update is over, and who waits for that is not told yet.
                    for piece in pieces[chunk]:
                        there, here = (part_of(piece, x, parameters) for x in (content, None))
                        there.copy_(here)
            else:
                content = runner.read_home(value)
                if runner.device.holds(content) or content.data_ptr() % 4096:
                    away, content = content, host_tensor(size)
                    content.copy_(away)
            self._store.write(value, content, step)
