"""The engine: what a model's hooks, touches of its parameters and its optimizer call."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from cpu_adam.choice import available
from offload.model.active_units import ActiveUnits
from offload.model.early_updates import EarlyUpdates, Step
from offload.model.gradients import Gradients, take_gradient
from offload.model.passes import Passes, refuse_inside
from offload.model.resident import Residents
from offload.model.running import ForwardCall, GraphTasks, in_backward
from offload.model.snapshots import Key, Snapshots
from offload.model.units import FlatUnit, count_change
from offload.program.ops import Use, Verb
from offload.runtime import entry as entries
from offload.runtime.entry import EngineError, entry
from offload.runtime.runner import Runner
from offload.runtime.stats import Report

STEPS_OF_PEAK = 2
"""So many steps have seen the highest use of the device's memory."""

WHOLE_STATE = "a look at the whole state"

engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""All engines of the process."""


class Attached:
    """What is attached to a model, which has it itself: they are collected together, whatever leads
    from one to the other. Copies and pickles of the model have None in its place."""

    name = "_offload_attached"

    def __init__(self, model: nn.Module, engine: Engine, hooks: Any, optimizer: Any):
        self.model, self.engine = weakref.ref(model), engine
        self.hooks, self.optimizer = hooks, optimizer

    def __reduce__(self) -> Any:
        return type(None), ()


def attached_to(model: object) -> Attached | None:
    """What is attached to a model, None where nothing is."""
    found: Attached | None = getattr(model, "__dict__", {}).get(Attached.name)
    return found if found is not None and found.model() is model else None  # Else it is a copy.


def engine_of(model: nn.Module) -> Engine:
    """The engine attached to a model.

    Raises:
        ValueError: there is none.
    """
    if (found := attached_to(model)) is None:
        raise ValueError(
            f"the model is not attached: asked for one first; found a {type(model).__name__}; give "
            "what offload.attach returned, itself, and before offload.detach"
        )
    return found.engine


class NoCommits:
    """Without `Config(durable=...)` in the place of `Commits` of `checkpoint.durable`, which stands
    above: is told the same, and commits nothing."""

    durable = False

    def _nothing(self, *_: Any) -> None:
        """Nothing comes of it."""

    forward_begins = wait = updated = before_write = loaded = close = agreed = _nothing

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def commit(self, *, alone: bool = False) -> None:
        """Refuse to."""
        raise ValueError("asked for a commit; found no Config(durable=...); try offload.save")


class Engine:
    """Everything attached to one model. Every access to its values takes `lock`."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        runner: Runner,
        *,
        nvme_path: tuple[str, ...],
        exposed_bytes_max: int,
        micro_batches: int | None,
    ):
        """Run `units`, whose values are at home already, by `runner`."""
        self.plan, self.nvme_path = runner.plan, nvme_path
        self.units, self.lock = units, threading.RLock()
        self.places = {p: (one.index, i) for one in units for i, p in enumerate(one.parameters)}
        """The unit of each parameter, and which of its parameters it is."""
        self.runner = runner
        self.residents = Residents(runner, units, self.lock, self.check)
        self.passes = Passes(runner, self.plan.profile.forward, self.plan.profile.backward)
        self.snapshots = Snapshots(runner, self.weights_changed, exposed_bytes_max)
        self.snapshots.enter = self._lend_gradient
        self.active = ActiveUnits(runner, self.passes, self.snapshots, units, self.lock, self.check)
        self.updates: Any
        """Of `optim.update`, which stands above."""
        names, clips = self.plan.profile.names, self.plan.clips
        self.early = EarlyUpdates(micro_batches, names, clips=clips)
        self.gradients = Gradients(runner, self.passes, self.snapshots)
        self.ranks: Any = None
        """Of `parallel`, which stands above, as are `gradients` then; None with one rank."""
        self.forward, self.graph_tasks = ForwardCall(), GraphTasks()
        self._owner = threading.get_ident()
        """The thread that began the pass under way, or the last one."""
        self.steps = 0
        self.commits: Any = NoCommits()
        self.user_state: Callable[[], Any] | None = None
        """Called when a step is committed; gives data of JSON, tuples and dicts of any keys, which
        the run that goes on finds in `resumed`."""
        self.resumed: tuple[int, Any] | None = None
        """The step that this run goes on from, and what `user_state` gave then."""
        found = (
            *runner.memory.notices,
            runner.notice,
            None if runner.store is None else runner.store.volume.notice,
        )
        self._notices: tuple[str, ...] = tuple(filter(None, found))
        self._pid, self._since = os.getpid(), time.perf_counter()
        self._interruptions = len(entries.interruptions)
        engines.add(self)
        self._close = weakref.finalize(self, _close, runner, self._pid)
        available()  # The extensions are loaded now: what is registered later goes first at exit,
        atexit.register(self._close)  # while their threads still come back (native/without_gil.h).

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an offload engine cannot be copied or pickled: build a new model, and load "
            "model.state_dict() into it"
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know, in sentences; after some steps also how much of the device's
        memory is idle, where a larger budget would be filled."""
        told = [self.early.notice]
        if self.steps >= STEPS_OF_PEAK:
            told.append(self.plan.told_idle(self.runner.device.idle_bytes()))
        return (*self._notices, *filter(None, told))

    def tell(self, notice: str) -> None:
        """One more of `notices`."""
        self._notices += (notice,)

    # -- whether it can be used --------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless the engine can be used here and now.

        Raises:
            EngineError: it was closed, a lane has failed, or an interrupt has cut through it.
            RuntimeError: it is of another process, asleep, or a CUDA graph is being captured.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a forked process touched an offloaded model, whose memory stays with the parent: "
                "move the work there, or start workers with multiprocessing 'spawn'"
            )
        if self.runner.closed:
            raise EngineError(
                "the offload engine of this model was closed: after offload.detach() go on with "
                "the optimizer that it returned; after close() attach the model anew"
            )
        if len(entries.interruptions) != self._interruptions:
            raise EngineError(
                f"{entries.interruptions[-1]} interrupted the offload engine in the middle of "
                "something that may be half done: go on from the last checkpoint"
            )
        self.runner.check()

    @property
    def owned(self) -> bool:
        """Whether this thread drives the pass under way, or autograd does for it."""
        return threading.get_ident() == self._owner or in_backward()

    def refuse_intruder(self) -> None:
        """Refuse this thread while another one is inside a forward or backward."""
        if threading.get_ident() == self._owner:
            return
        if in_backward() and not self.runner.device.is_host:
            return  # There a backward calls hooks on threads of autograd's own.
        if self.forward.running or self.graph_tasks.go_on:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} asked for weights, gradients or "
                "states of an offloaded model while another thread was inside its forward or "
                "backward: one thread at a time drives a model. Take what is needed between two "
                "steps (p.detach().clone(), model.state_dict())"
            )

    def require_whole(self, what: str) -> None:
        """Raise ValueError for what knows whole tensors alone, where parameters are DTensors."""
        every = (one for unit in self.units for one in unit.spec.parameters)
        if parts := [one.name for one in every if one.part is not None]:
            raise ValueError(
                f"{what} was asked for a model of DTensors ({parts[0]}), and knows whole tensors: "
                "on all ranks, torch.distributed.checkpoint.save of model.state_dict() and "
                "optimizer.state_dict()"
            )

    # -- passes ----------------------------------------------------------------------------------

    def open_forward(self) -> None:
        """The model's forward begins."""
        self.refuse_intruder()
        self.end_pass(finished=False)
        self._open(Verb.FORWARD)

    def _open(self, verb: Verb) -> None:
        self.early.require_step(f"another {verb.value}")
        self.snapshots.boundary()
        self._owner = threading.get_ident()
        if verb is Verb.FORWARD:
            self.commits.forward_begins()
        else:
            self.early.backward_began()
        self.passes.open(verb)

    def enter_backward(self) -> int:
        """Open the backward pass at its first sign, and be called when it ends; its graph task."""
        task = self.graph_tasks.current()
        if task in self.graph_tasks:
            return task
        self.check()
        self.refuse_intruder()
        if self.passes.verb is not Verb.BACKWARD or not self.graph_tasks.running:
            self.end_pass(finished=self.passes.verb is not Verb.BACKWARD)
            self._open(Verb.BACKWARD)
        self.graph_tasks.began(task, entry(partial(self._graph_ended, task)))
        return task

    def _graph_ended(self, task: int) -> None:
        """A backward has ended; the outermost one ends the pass."""
        with self.lock:
            self.graph_tasks.ended(task)
            self.active.release_stayed(task)
            if self.graph_tasks.running:
                self._begin_final()
                return
            self.end_pass(finished=True)
            for unit in self.early.final:
                self.snapshots.boundary(unit)  # Snapshots that the backward itself has made.
            self._begin_final()
            self.early.backward_ended(finished=True)

    def collect(self, unit: int, index: int, gradient: torch.Tensor) -> None:
        """Take over a gradient; when it completes the unit's, its update begins soon."""
        self.enter_backward()
        self.early.gradient_came(unit, index)
        gradient = self.units[unit].bindings[index].local(gradient)
        passing = self.gradients.collect(unit, index, gradient)
        if passing is not None and self.plan.clips and unit in self.early.final:
            self._sum_squares(unit, passing)

    def _sum_squares(self, unit: int, at: Use | None = None) -> None:
        """Sum the squares of a FINAL unit; those that somebody may still edit wait for `step()`."""
        self.early.final.discard(unit)
        if not self.gradients.shows(unit):
            one = self.gradients.units[unit]
            one.summed = frozenset(one.kept)
            self.updates.sum_squares(unit, one.summed, self.passes.number, at)

    def _begin_final(self) -> None:
        """Begin the updates of FINAL units that are at rest, see [Note: Early updates]."""
        if self.early.final:
            self.commits.wait()
        for index in filter(self.gradients.is_sum, sorted(self.early.final)):
            if self.plan.clips:
                self.gradients.send(index)
                self._sum_squares(index)
                continue
            unit = self.units[index]
            if unit.weights is not None or unit.saved or self.gradients.shows(index):
                continue
            self.gradients.send(index)
            if not self.early.begun:
                self.updates.settle()
            if steps := self.early.begin(index):
                with self.runner.once():
                    self._begin_updates({index: steps})

    def end_pass(self, *, finished: bool) -> None:
        """Put every unit at rest, send all gradients home, take back what was queued."""
        verb = self.passes.verb
        aborted = verb is Verb.BACKWARD and not finished
        self.active.release_all()
        self.forward.end()
        self.graph_tasks.clear()
        if aborted:
            self.early.backward_ended(finished=False)
            for unit in (one for one in self.units if one.index not in self.residents):
                for parameter in unit.parameters:
                    take_gradient(parameter)  # One whose hook Ctrl-C has skipped.
        self.gradients.send_all()
        self.passes.close(finished=finished)  # An update that has begun may wait for what it drops.

    def end_broken_pass(self) -> None:
        """End a pass that an exception or Ctrl-C has broken off; nothing inside one that runs."""
        self.check()
        self.refuse_intruder()
        if in_backward():
            return
        if self.passes.verb is Verb.BACKWARD or self.forward.broken_off:
            self.end_pass(finished=False)

    @contextmanager
    def call(self, what: str | None = None) -> Iterator[None]:
        """A context with the lock, and no broken pass; `what` is refused before a due `step()`."""
        with self.lock:
            self.end_broken_pass()
            if what is not None:
                self.early.require_step(what)
            yield

    def begin_call(self) -> bool:
        """A hooked module is called outside a backward; whether that is the outermost call."""
        self.refuse_intruder()
        if self.forward.running:
            return False
        self.end_broken_pass()
        self.forward.begin()
        self._owner = threading.get_ident()
        return True

    def enter(self, unit: FlatUnit) -> None:
        """A module that uses a unit is about to run; inside a backward it is a recompute."""
        if in_backward():
            task = self.enter_backward()  # A recompute may be the first that is seen of it.
            self.active.release_stayed(task, but=unit)  # Their backward is over.
            self.early.require_open(unit.index, "a recompute")
        else:
            self.commits.forward_begins()  # The pass may have begun without gradients.
            if self.active.units:
                unit.around.update(one.index for one in self.active.units if one.depth)
        self._use(unit)
        unit.depth += 1

    def hold(self, unit: FlatUnit) -> None:
        """The backward of a unit is next: let go of the units held before it."""
        task = self.enter_backward()
        self.active.release_stayed(task, but=unit)
        self._begin_final()  # Before blocking: the lanes may take it up meanwhile.
        if unit.index not in self.early.begun:  # Else nothing that comes needs its weights.
            self.active.hold(unit, task)
            self._use(unit)

    def _use(self, unit: FlatUnit) -> None:
        """Bring a unit into use, in a pass that is opened where there is none."""
        if unit.between and not unit.stays:
            self.snapshots.boundary(unit.index)  # An edit puts it at rest.
        if unit.weights is not None:
            if unit.task is not None:
                self.runner.join(unit.task)
            return
        if self.passes.verb is None:
            self._open(Verb.FORWARD)
        self.active.make_way()
        self.snapshots.boundary(unit.index)
        self.active.use(unit)

    def weights_changed(self, unit: int) -> None:
        """The home of a unit's weights changes: what a slot has of them is old."""
        self.active.make_way(self.units[unit])
        self.passes.weights_changed(unit)

    # -- weights outside their use -----------------------------------------------------------------

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of every offloaded parameter, one at a time, each in memory of its own."""
        for unit in self.units:
            for index, one in enumerate(unit.spec.parameters):
                yield one.name, self.values_of(unit.index, index)

    @entry
    def values_of(self, unit: int, index: int) -> torch.Tensor:
        """The true values of a parameter, in memory of their own, whatever exposed_memory is."""
        with self.call(WHOLE_STATE):
            if unit in self.residents:
                return self.units[unit].parameters[index].detach().clone()
            if (used := self.units[unit].weights) is not None:
                return used.views[index].clone()
            self.snapshots.boundary(unit)
            return self.whole(unit, index, self.snapshots.read(Key("weight", unit, index)))

    def gradient_of(self, unit: int, index: int) -> torch.Tensor | None:
        """A gradient in memory of its own; None where there is none."""
        found = self.gradients.read(unit, index)
        return None if found is None else self.whole(unit, index, found)

    def whole(self, unit: int, index: int, here: torch.Tensor) -> torch.Tensor:
        """A value of a parameter of which this is here: the same with one rank."""
        return here if self.ranks is None else self.ranks.assembled(unit, index, here)

    def part(self, unit: int, index: int, value: torch.Tensor) -> torch.Tensor:
        """As much of a value of a parameter as is here: all of it with one rank."""
        value = self.units[unit].bindings[index].local(value)
        if self.ranks is None:
            return value
        return self.ranks.part(unit, index, value)  # type: ignore[no-any-return]

    def shown(self, kind: str, unit: int, index: int, here: torch.Tensor) -> torch.Tensor:
        """A value of a parameter, of which this is here, as the user has it."""
        if self.ranks is not None:
            here = self.ranks.shard(kind, unit, index, here)
        return self.wrapped(unit, index, here)

    def wrapped(self, unit: int, index: int, local: torch.Tensor) -> torch.Tensor:
        """A value of a parameter as the user has it, a DTensor where that is one."""
        return self.units[unit].bindings[index].shown(local)

    def saved(self, unit: int, index: int) -> torch.Tensor:
        """What `state_dict()` has of a parameter: a copy in CPU memory, of what is here."""
        if self.ranks is not None or self.units[unit].weights is not None:
            parameter = self.units[unit].parameters[index]
            found: torch.Tensor = parameter.detach().to("cpu", copy=True)
            return found
        with self.call(WHOLE_STATE):
            copy = self.snapshots.take_copy(Key("weight", unit, index))
        return self.wrapped(unit, index, copy)

    @entry
    def boundary(self, unit: int | None = None) -> None:
        """Take over the edits of all snapshots, or of one unit's, between two passes."""
        with self.call():
            if not in_backward() and not self.forward.running:
                self.snapshots.boundary(unit)

    @entry
    def _lend_gradient(self, key: Key) -> Any:
        with self.call():
            return self.snapshots.lend(key)

    def gradients_of(self, unit: int) -> Gradients | Residents:
        """What has the gradients of a unit."""
        return self.residents if unit in self.residents else self.gradients

    # -- the optimizer ---------------------------------------------------------------------------

    def last_micro_batch(self) -> None:
        """Say that the next backward is the last before `optimizer.step()`.

        Updates then begin inside it. Where every step has the same number of backwards,
        `Config(micro_batches=N)` says so once.
        """
        self.early.last_micro_batch()

    @entry
    def skip_backward(self) -> None:
        """Take no part in a backward, after an exception in its forward, loss or middle.

        Over ranks the others may be in theirs, and wait for this one: they are served until it is
        over. Call it first in an `except` around forward and backward; then agree to skip the step.
        """
        refuse_inside("skip_backward()")
        began = self.passes.verb is Verb.BACKWARD  # It is ended, and one that others began with it.
        with self.call("skip_backward()"):
            if self.ranks is not None and not began:
                self._open(Verb.BACKWARD)
                self.end_pass(finished=False)

    def step(self, step: Step) -> None:
        """Take one optimizer step over the parameters in `step`; returns before it is done."""
        self.commits.wait()  # Ctrl-C here leaves the step to be taken.
        self.end_pass(finished=False)
        self.residents.check(step)
        self.snapshots.boundary()
        self.gradients.let_go()
        if self.ranks is not None:
            commits = self.commits.due(self.steps + 1)
            self.commits.agreed(self.ranks.collectives.agree(step, commits))
        if not (begun := self.early.begun):
            self.updates.settle()
        due = self.early.stepped(step)
        with self.runner.once() if begun else nullcontext():
            self._begin_updates(due)
        self.steps += 1
        self.runner.stats.stepped(self.steps, self.passes.misses)

    def _begin_updates(self, step: Step) -> None:
        """Queue updates, and let nobody use what they change as if it stayed."""
        self.commits.updated(step)
        for unit in step:
            self.passes.invalidate(unit)
            count_change([self.units[unit].parameters[index] for index in step[unit]])
            self.units[unit].note_versions()
        self.runner.step[0] = self.steps + 1
        summed = {unit: self.gradients.units[unit].summed for unit in step}
        self.updates.issue(step, self.passes.number + 1, summed)

    @entry
    def settle(self) -> None:
        """Block until every update is done; an EngineError tells what went wrong."""
        with self.call(WHOLE_STATE):
            self.updates.settle()
            self.commits.wait()

    def come_to_rest(self, before: str) -> None:
        """Let all values be at home, and nothing under way, on all ranks, which come to the same:
        what is done then, in words."""
        self.settle()
        self.end_pass(finished=False)
        self.snapshots.boundary()
        self.runner.idle()
        self.runner.drain()
        if self.ranks is not None:
            self.ranks.meet()
            self.ranks.group.require_same(before)

    # -- reports and the end ---------------------------------------------------------------------

    def report(self) -> Report:
        """What was done and waited for since attach."""
        use = {lane.value: use for lane, use in self.runner.stats.use.items()}
        wall = time.perf_counter() - self._since
        exposed = sum(one.exposed_s for one in use.values())
        counts, ranks = (self.steps, self.passes.misses), str(self.ranks or "")
        return Report(*counts, use, self.plan.tiers(), wall, wall - exposed, ranks)

    def _usable(self) -> bool:
        """Whether its values are those of a finished step."""
        try:
            self.check()
        except RuntimeError:
            return False
        return not self.early.begun

    @entry
    def commit(self, *, alone: bool = False) -> None:
        """Commit the last step as all is now, where the engine is durable, and return when that is
        done; over ranks on all of them, unless this one comes to its end `alone`. Gradients are no
        part of a commit: do it after `step()`, not between the backwards of a step.

        Raises:
            ValueError: the engine is not durable.
        """
        with self.call(WHOLE_STATE):
            self.boundary()
            self.commits.commit(alone=alone)

    def commit_by(self, commits: Any) -> None:
        """Let these commits be told of steps from now on."""
        self.commits, self.runner.before_write = commits, commits.before_write

    def close(self) -> None:
        """Stop the lanes and free memory and files, after a commit of the last step where the
        engine is durable. The model keeps no values: see `detach`."""
        mine = os.getpid() == self._pid
        try:
            if mine and self.commits.durable and self._usable():
                self.commit(alone=True)
        finally:
            if mine:
                self.commits.close()
            self._close()
        if mine:  # Else a child has nothing of it.
            self.gradients.forget_places()
            for unit in self.units:
                unit.close()


def _close(runner: Runner, pid: int) -> None:
    """Close a runner, in the process that made it only."""
    if os.getpid() == pid:
        runner.close()
