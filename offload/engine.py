"""The engine: what the model's hooks, the trap and the optimizer call."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from cpu_adam.choice import available
from offload import interrupt
from offload.arena import Memory
from offload.aside import unseen
from offload.backwards import Backwards
from offload.binding import BoundUnit, count_change
from offload.calls import Calls, refuse_intruder
from offload.casts import Casts
from offload.collector import Collector, take_gradient
from offload.executor import Executor
from offload.exposure import Exposures
from offload.fast_path import slow_path_notice
from offload.finality import Finality
from offload.fork import engines
from offload.frozen import Frozen
from offload.gradients import Gradients
from offload.guard import Handle
from offload.in_use import InUse
from offload.interrupt import torn_times, whole
from offload.layout import Plan
from offload.passes import Passes, in_backward
from offload.phases import compile_program
from offload.profile import profile_of
from offload.program import Program, Verb
from offload.reruns import retains
from offload.resident import Residents
from offload.resting import OffloadedParameter
from offload.totals import Report
from offload.updates import Updates
from offload.usable import close_here, refuse_unusable


class Engine:
    """Everything attached to one model. One thread at a time runs a forward or backward; whoever
    reads or edits parameters takes `lock`."""

    def __init__(
        self,
        units: Sequence[BoundUnit],
        executor: Executor,
        memory: Memory,
        *,
        exposed_bytes_max: int,
        max_grad_norm: float | None,
        micro_batches: int | None,
    ):
        """Run `units`, whose values are at home already, by `executor` in `memory`."""
        self.plan: Plan = executor.plan
        self.executor, self._lanes = executor, executor.lanes
        self.residents = Residents(executor, units, self)
        self.casts = Casts(units, executor.device.torch_device, self.residents)
        streamed = (unit for unit in units if unit.index not in self.residents)
        found = *memory.notices, None if executor.store is None else executor.store.notice
        self._notices = (*found, slow_path_notice(streamed))
        self.passes = Passes(executor, self.plan.profile.forward, self.plan.profile.backward)
        self.steps, self.calls = 0, Calls()
        self.exposures = Exposures(
            executor, self.passes, exposed_bytes_max, lambda unit: units[unit].buffer is not None
        )
        self.in_use = InUse(executor, memory, self.passes, self.exposures, self)
        self.collector = Collector(executor, self.passes)
        self.gradients = Gradients(executor, self.collector, exposed_bytes_max)
        self.updates = Updates(executor, max_grad_norm, self.residents)
        names = [unit.name for unit in self.plan.profile.units]
        self.finality = Finality(micro_batches, names, early=max_grad_norm is None)
        self.finality.reruns.ended = whole(self._begin_final)
        self.units, self.lock = units, threading.RLock()
        self._pid, self._torn, self._since = os.getpid(), torn_times(), time.perf_counter()
        self.backwards = Backwards()
        engines.add(self)
        self._close = weakref.finalize(self, close_here, executor, self._pid)
        available()  # The extensions are loaded now: what is registered later goes first at exit,
        atexit.register(self._close)  # while their threads still come back (native/without_gil.h).

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Engine:
        raise TypeError(
            "an attached model cannot be copied with its engine: copy it before attach, or build "
            "a new model and load_state_dict() into it"
        )

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be pickled: save model.state_dict() instead")

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know, in sentences."""
        return tuple(filter(None, (*self._notices, self.casts.notice, *self.finality.notices)))

    # -- passes ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless the engine can be used here and now."""
        lanes, executor = self._lanes, self.executor
        simple = executor.device.is_host and executor.bed is None
        # Cheap questions first; refuse_unusable asks the others, and raises only if one says no.
        if lanes.ended or not simple or torn_times() != self._torn:
            refuse_unusable(executor, self._pid, self._torn)
        interrupt.owner = lanes.owner

    def refuse_elsewhere(self) -> None:
        """Refuse this thread to go on while another one is inside a forward or backward."""
        if self.calls.elsewhere:
            refuse_intruder("forward")
        if self.executor.device.is_host and self.backwards.elsewhere:
            refuse_intruder("backward")

    def open_forward(self) -> None:
        """The model's forward begins."""
        self.end_pass(finished=False)
        self.finality.require_step("the next forward")
        self.exposures.put_all_home()
        self.passes.open(Verb.FORWARD)

    def enter_backward(self) -> int:
        """Open the backward pass at its first sign, and be called when it ends; its number."""
        graph: int = torch._C._current_graph_task_id()
        if graph in self.backwards:
            return graph
        self.check()
        self.refuse_elsewhere()
        self.backwards.forget()
        if self.passes.verb is not Verb.BACKWARD or not self.backwards:
            self.end_pass(finished=self.passes.verb is not Verb.BACKWARD)
            self.finality.require_step("another backward")
            self.exposures.put_all_home()
            self.gradients.begin_backward(self.residents.all())
            self.finality.backward_began()
            self.passes.open(Verb.BACKWARD)
        self.backwards.began(graph, whole(partial(self._graph_ended, graph)))
        return graph

    def _graph_ended(self, graph: int) -> None:
        """A backward has ended; the outermost one ends the pass."""
        with self.lock:
            self.backwards.ended(graph)
            self.in_use.release_held(others=self.backwards.around(graph))
            if not self.backwards:
                try:
                    self.end_pass(finished=True)
                    for unit in self.finality.final.intersection(self.exposures.copies):
                        self.exposures.put_home(unit)  # Copies that only the backward has used go.
                    self._begin_final()
                finally:
                    if self.passes.verb is None:  # Else it did not end, see `end_pass`.
                        self.finality.backward_ended()
                self.gradients.written.refuse()

    def collect(self, unit: int, index: int, gradient: torch.Tensor) -> None:
        """Take over a gradient; when it makes the unit's final, its update begins soon."""
        if (graph := torch._C._current_graph_task_id()) not in self.backwards:
            self.enter_backward()
        self.finality.gradient_came(unit, index, outermost=graph == self.backwards.outermost)
        self.collector.collect(unit, index, gradient)

    def _begin_final(self) -> None:
        """Begin the updates of units whose gradient is final and whose backward is over."""
        with self.lock:  # Which a function that is over does not have.
            outermost = self.backwards.outermost  # None: it is over.
            if outermost not in (None, torch._C._current_graph_task_id()) or retains():
                return
            # Whoever holds a copy sees whole steps only; a gradient may be changed until step().
            held = self.exposures.copies, self.gradients.followed
            for unit in sorted(self.finality.final):
                bound = self.units[unit]
                if bound.buffer is not None or bound.saved or any(unit in one for one in held):
                    continue
                if outermost is not None and self.finality.more_comes(unit, bound.parameters):
                    continue
                self.collector.send(unit)
                if not self.finality.begun:
                    self.updates.settle()
                if steps := self.finality.begin(unit):
                    with self._lanes.once():
                        self._begin_updates({unit: steps})

    def end_pass(self, *, finished: bool) -> None:
        """Put every unit at rest, send all gradients home, take back what was queued."""
        aborted = self.passes.verb is Verb.BACKWARD and not finished
        self.in_use.release_all(look=aborted or self.calls.broken_off)
        self.calls.end()
        self.backwards.clear()
        if aborted:
            self.finality.aborted()
            for bound in (one for one in self.units if one.index not in self.residents):
                for parameter in bound.parameters:
                    take_gradient(parameter)  # One whose hook Ctrl-C has skipped.
        self.finality.came |= self.collector.send_all()
        verb = self.passes.verb
        self.passes.close(finished=finished)  # An update that has begun may wait for what it drops.
        if verb is Verb.BACKWARD:
            self.gradients.renew_shown()

    def end_abandoned(self) -> None:
        """End a pass that an exception or Ctrl-C has broken off; nothing inside one that runs."""
        self.check()
        if in_backward():
            return
        self.refuse_elsewhere()
        if self.passes.verb is Verb.BACKWARD or self.calls.broken_off:
            self.end_pass(finished=False)

    def enter(self, bound: BoundUnit, *, inside: bool) -> None:
        """A module that uses a unit is about to run, in a call that is not broken off.

        `inside` a backward it is a recompute.
        """
        if inside:
            graph = self.enter_backward()  # A recompute may be the first that is seen of it.
            if not bound.held:
                self.in_use.reached(graph)
            self.finality.recomputed(bound.index)
        else:
            if self.passes.verb is Verb.BACKWARD:
                self.end_pass(finished=False)
            self.finality.called(bound.index)
            if self.in_use.units:
                around = (o.index for o in self.in_use.units if o.depth and o is not bound)
                bound.around.update(around)
        self._use(bound)
        bound.depth += 1

    def hold(self, bound: BoundUnit, began: int) -> None:
        """The backward is next of a unit whose forward `began` at that number of autograd's: let
        go of the units held before it."""
        graph = self.enter_backward()
        others = self.backwards.around(graph) if len(self.backwards) > 1 else ()
        self.in_use.release_held(but=bound, others=others)
        if self.finality.final:
            self._begin_final()  # Before blocking: the lanes may take it up meanwhile.
        if bound.index not in self.finality.begun:  # Else nothing that comes needs its weights.
            bound.hold(graph, began, others)
            self._use(bound)

    def _use(self, bound: BoundUnit) -> None:
        """Bring a unit into use, in a pass that is opened where there is none."""
        if bound.buffer is not None:
            if bound.task is not None:
                self.executor.lanes.join(bound.task)
            return
        if self.passes.verb is None:
            self.finality.require_step("the next forward")
            self.passes.open(Verb.FORWARD)
        if self.exposures.copies:
            self.exposures.put_home(bound.index)
        self.in_use.serve(bound)

    # -- saved tensors ---------------------------------------------------------------------------

    def outliving(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or what shows the same after the use of the unit in whose weights it lies.

        A parameter is itself; all of one, apart from the graph (`p.detach()`), is a view of its
        private copy, of which edits count; anything else is a copy.
        """
        own = type(tensor) is not torch.Tensor and isinstance(tensor, OffloadedParameter)
        if own or not (handle := self.in_use.handle_of(tensor)):
            return tensor
        one = self.units[handle.unit].spec.parameters[handle.parameter]
        if tensor.grad_fn is not None or tensor.numel() != one.elements:
            return tensor.clone()
        self.in_use.keep(self.units[handle.unit])
        return self.in_use.copied(handle).requires_grad_(tensor.requires_grad)

    def tensor_of(self, handle: Handle) -> torch.Tensor:
        """The weights that a handle stands for: in the slot, or a private copy.

        Raises:
            RuntimeError: the parameter was modified after the forward that saved it.
        """
        self.check()
        found = self.units[handle.unit].shown_again(handle) if unseen() else None
        return self._tensor_of(handle) if found is None else found

    @whole
    def _tensor_of(self, handle: Handle) -> torch.Tensor:
        bound = self.units[handle.unit]
        bound.require_version(handle)
        if bound.buffer is not None:
            return bound.shown(handle)
        return self.in_use.copied(handle)

    # -- parameters at rest ----------------------------------------------------------------------

    def stream_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of every offloaded parameter, one at a time, each in memory of its own."""
        self._require_step()
        try:
            for bound in self.units:
                for index, one in enumerate(bound.spec.parameters):
                    yield one.name, self.values_of(bound.index, index)
        finally:
            self.exposures.forget()

    @whole
    def values_of(self, unit: int, index: int) -> torch.Tensor:
        """The true values of a parameter, in memory of their own, whatever exposed_memory is."""
        with self.lock:
            self.end_abandoned()
            if unit in self.residents:
                return self.residents.value(unit, index)
            if (bound := self.units[unit]).buffer is not None:
                return bound.views[index].clone()  # With what its own forward has changed.
            self.exposures.put_home(unit)
            return self.exposures.read(unit, index)

    def gradients_of(self, unit: int) -> Gradients | Residents:
        """Who has the gradients of a unit."""
        return self.residents if unit in self.residents else self.gradients

    # -- the optimizer ---------------------------------------------------------------------------

    @whole
    def step(self, frozen: Frozen) -> None:
        """Take one optimizer step over the parameters in `frozen`; returns before it is done."""
        self.check()
        self.end_pass(finished=False)
        self.residents.check(frozen)
        self.exposures.put_all_home()
        self.gradients.let_go()
        if not (begun := self.finality.begun):
            self.updates.settle()
        due = self.finality.stepped(frozen)
        with self._lanes.once() if begun else nullcontext():
            self._begin_updates(due)
        with self._lanes.once():
            self.steps += 1
            self._lanes.ledger.stepped(self.steps, self.passes.misses)
            for unit in self.exposures.copies:
                self.exposures.renew(unit)
            self.gradients.wait_where_viewed()

    def _begin_updates(self, frozen: Frozen) -> None:
        """Queue updates, and let nobody use what they change as if it stayed."""
        for unit in frozen:
            self.passes.invalidate(unit)
            count_change([self.units[unit].parameters[index] for index in frozen[unit]])
            self.units[unit].note_versions()
        self.executor.step = self.steps + 1
        self.updates.issue(frozen, self.passes.number + 1)

    @whole
    def settle(self) -> None:
        """Block until every update is done; an EngineError tells what went wrong."""
        with self.lock:
            self._require_step()
            self.updates.settle()

    @whole
    def _require_step(self) -> None:
        with self.lock:
            self.end_abandoned()
            self.finality.require_step("a look at the whole state")

    # -- reports and the end ---------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The compiled phases, in the order of use seen last."""
        both = (self.passes.orders[verb] for verb in (Verb.FORWARD, Verb.BACKWARD))
        return compile_program(self.plan.reordered(profile_of(self.plan.profile.units, *both)))

    def report(self) -> Report:
        """What was done and waited for since attach."""
        use = {lane.value: use for lane, use in self.executor.lanes.ledger.use.items()}
        wall = time.perf_counter() - self._since
        exposed = sum(one.exposed_s for one in use.values())
        return Report(self.steps, self.passes.misses, use, self.plan.tiers(), wall, wall - exposed)

    @whole
    def close(self) -> None:
        """Stop the lanes and free memory and files. The model keeps no values: see `detach`."""
        self._close()
        if os.getpid() == self._pid:  # Else a child has nothing of it.
            self.collector.forget_places()
            for bound in self.units:
                bound.close()
