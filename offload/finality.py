"""When a gradient is final before `step()`, and what must then follow.

[Note: Updates inside backward]
Only the user knows which backward is the last before a step. Where `Config.micro_batches` says so,
a unit goes this way in that backward:

    OPEN --all of its gradient has come--> FINAL --its backward is over--> BEGUN
      ^                                      |                               |
      +---more comes, or the backward ends---+                               |
      +---------------------------------step()-------------------------------+

*All of its gradient has come* when each parameter's came as often as in the last backward that was
finished, and its modules were called as often: inside the backward, and before it where what they
save goes to hooks (a checkpoint that is not reentrant), which may run a forward again. Evaluations
do not count there, nor does another loss that is thrown away.

*Its backward is over* when the unit is at rest, nobody holds a private copy of its weights or a
gradient, autograd keeps nothing that needs it (`BoundUnit.saved`), and the backward under way will
bring no gradient of it and run no function in which it was called (see [Note: Reruns]). Of what is
to come only the outermost backward is asked, and only in it: inside another one nothing begins.
Where autograd keeps something for longer, as for an output that no loss uses, the update begins at
`step()`. After retain_graph=True, which says that another backward follows, every update begins at
`step()`. So does, from then on, that of a unit whose gradient came in an inner backward which no
such function runs.

What is left is code that a hook, or a function in its backward, runs on a unit for the first time,
which nothing tells beforehand. After the unit's update has begun it is refused, and that backward
ends as any in which a hook raised: `step()` completes it. Nothing begins early from then on.

What each event does to the books, of which only the backwards are kept (`declared`) where nothing
begins early:

    event                  counts under way     counts before   backwards   FINAL       BEGUN
    a backward begins      dropped, but calls   -               -           -           refused
    it ends *              become those before  replaced        + 1         -> OPEN     stays
    it is aborted          dropped              -               -           -> OPEN     stays
    gradients are touched  -                    -               0           -           refused
    step()                 -                    -               0           -           -> OPEN

    * Without a gradient of any parameter (`autograd.grad`) it does not count: nothing changes.

Gradients are touched by `zero_grad`, and by reading or setting `p.grad`, which hands out memory
that may be zeroed: the step may have been given up, so micro-batches are counted from one again.
Were it not given up, the updates begin at `step()`.

Once an update has begun `step()` must follow, with the hyper-parameters that were frozen: an update
cannot be undone. Whatever would look at half-updated weights, or change a gradient that is used
already, is refused. This holds too when the last backward ends with an exception (Ctrl-C is one):
`step()` then updates all parameters of which a gradient came, in it or in an earlier micro-batch,
which is what torch does when `step()` is called after a backward that raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload.declared import DeclaredBackwards
from offload.frozen import Frozen, ParameterStep
from offload.reruns import Reruns, may_be_recomputed, runs_inside, will_accumulate


@dataclass(slots=True)
class _Counts:
    """What of one unit came in one backward, and before it."""

    gradients: Counter[int] = field(default_factory=Counter)
    """By parameter."""
    repeatable: int = 0
    """Calls of its modules, since the backward before, that may be repeated for what is saved."""
    recomputes: int = 0
    """Calls of its modules inside the backward."""
    outermost: set[int] = field(default_factory=set, compare=False)
    """Parameters whose gradient came in the backward itself, in none that it runs inside."""


class Finality:
    """The backward calls since the last step, and the updates begun before the next."""

    def __init__(self, micro_batches: int | None, names: Sequence[str], *, early: bool = True):
        """`micro_batches` backward calls make a step (None: unknown, nothing begins early).

        Not `early`: nothing begins early, whatever is known.
        """
        self.freeze: Callable[[int], Mapping[int, ParameterStep]] = lambda unit: {}
        """What a step taken now would do to a unit; set by the optimizer."""
        self.begun: dict[int, Mapping[int, ParameterStep]] = {}
        """Updates begun before `step()`, by unit."""
        self.declared = DeclaredBackwards(micro_batches)
        self.begins_early = early and micro_batches is not None
        """Whether updates may begin inside a backward."""
        self.came = False
        """Whether a gradient came in the backward under way."""
        self.reruns = Reruns()
        """Functions that may call units again."""
        self._unforeseen: set[int] = set()
        """Units of which nobody can tell what is to come; they begin at `step()`."""
        self._nested = False
        """Whether the backward under way may be inside one that has not shown itself yet."""
        self._names = names
        self.final: set[int] = set()
        """Units all of whose gradient has come, in the last backward before a step."""
        self._now = [_Counts() for _ in names]
        self._before = [_Counts() for _ in names]
        """`_now` of the last finished backward."""
        self._told_no_more: str | None = None
        """Why nothing begins early any more."""
        self._aborted = False
        """Whether the last backward ended with an exception after updates had begun."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know of how the declared number is kept."""
        return tuple(one for one in (self.declared.notice, self._told_no_more) if one is not None)

    # -- what happens ----------------------------------------------------------------------------

    def called(self, unit: int) -> None:
        """`unit` is called, or a parameter of it used, in a forward."""
        if not self.begins_early:
            return
        self._now[unit].repeatable += may_be_recomputed()
        self.reruns.called(unit)

    def recomputed(self, unit: int) -> None:
        """A module of `unit` is called inside backward.

        Raises:
            RuntimeError: the unit's update has begun.
        """
        if not self.begins_early:
            return
        self.require_open(unit, "a recompute")
        self._now[unit].recomputes += 1
        self._judge(unit)

    def gradient_came(self, unit: int, parameter: int, *, outermost: bool) -> None:
        """The backward under way, or one inside the `outermost`, has produced a gradient.

        Raises:
            RuntimeError: the unit's update has begun without it.
        """
        self.came = True
        if not self.begins_early:
            return
        self.require_open(unit, "another gradient")
        came = self._now[unit].gradients
        came[parameter] = came.get(parameter, 0) + 1
        if outermost:
            self._now[unit].outermost.add(parameter)
        elif not self.reruns.running(unit):
            self._unforeseen.add(unit)
        self._judge(unit)

    def _judge(self, unit: int) -> None:
        """Let a unit be FINAL or OPEN."""
        last = self.declared.next_is_last and not self._nested
        known = unit not in self._unforeseen
        if last and known and self._now[unit] == self._before[unit]:
            self.final.add(unit)
        else:
            self.final.discard(unit)

    def more_comes(self, unit: int, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the outermost backward, which asks, will use a FINAL unit again."""
        if self.reruns.pending(unit):
            return True
        came = self._now[unit].outermost
        left = (one for index, one in enumerate(parameters) if index not in came)
        if any(will_accumulate(one) for one in left):
            self.final.remove(unit)  # What comes is more than came the last time.
            return True
        return False

    def begin(self, unit: int) -> Mapping[int, ParameterStep]:
        """Freeze the update of a FINAL unit whose backward is over; nothing where none is due."""
        self.final.remove(unit)
        steps = self.freeze(unit)
        if steps:
            self.begun[unit] = steps
        return steps

    def backward_began(self) -> None:
        """An outermost backward begins."""
        assert not self.begun
        self.came = False
        for now in self._now if self.begins_early else ():
            now.gradients.clear()
            now.outermost.clear()
            now.recomputes = 0
        self.reruns.backward_began()
        self._nested = self.begins_early and runs_inside()

    def backward_ended(self) -> None:
        """The outermost backward has run to its end."""
        self.final.clear()
        if self._nested:  # The one around it is what counts.
            return
        if self.came:
            self.declared.ended()
        if self.came and self.begins_early:
            self._before, self._now = self._now, [_Counts() for _ in self._names]

    def aborted(self) -> None:
        """The outermost backward has ended with an exception; it does not count."""
        self.final.clear()
        self._now = [_Counts() for _ in self._names]
        self._aborted = bool(self.begun)

    def discarded(self) -> None:
        """Gradients may have been thrown away: the next backward may be the first of a step."""
        assert not self.begun
        self.declared.discarded()

    def stepped(self, frozen: Frozen) -> Frozen:
        """What of a step has not begun yet; the step is then taken.

        Raises:
            RuntimeError: the step is not the one that was begun.
        """
        begun = self.begun
        self.declared.look(counts=not (begun or self._aborted), early=self.begins_early)
        if any(frozen.get(unit, {}) != steps for unit, steps in begun.items()):
            raise RuntimeError(
                "learning rate, decay or another hyper-parameter changed between the last backward "
                "and step(), but updates had begun with the earlier values. Put them back and call "
                "step() again; change them after step(), or leave Config.micro_batches out"
            )
        self.begun, self._aborted = {}, False
        self.declared.stepped()
        return {unit: steps for unit, steps in frozen.items() if unit not in begun}

    # -- what is refused -------------------------------------------------------------------------

    def require_open(self, unit: int, what: str) -> None:
        """Refuse `what`, which is of a unit and comes inside a backward.

        Raises:
            RuntimeError: the unit's update has begun.
        """
        if unit not in self.begun:
            return
        self._begin_no_more()
        raise RuntimeError(
            f"{what} of {self._names[unit]} came inside a backward after its update had begun, "
            "as Config.micro_batches lets it: likely code in a hook, or in a function's backward, "
            "that used it for the first time. The weights are whole: step() completes this step "
            "with the gradients that came, as torch does after a backward that raised. Go on from "
            "there, as nothing begins early any more, or leave micro_batches out"
        )

    def _begin_no_more(self) -> None:
        """What came could not be foreseen, and will be no error another time."""
        self._unforeseen.update(range(len(self._names)))
        self._told_no_more = (
            "Config.micro_batches: no update begins inside a backward any more, as code in a hook "
            "or in a function's backward used a unit after its update had begun; leave it out"
        )

    def require_step(self, what: str) -> None:
        """Something is asked that makes no sense between an early update and its step.

        Raises:
            RuntimeError: `step()` has to come first.
        """
        if not self.begun:
            return
        count = f"{len(self.begun)} of {len(self._names)} units"
        if self._aborted:
            raise RuntimeError(
                f"{what} came before step(): the last backward ended with an exception after "
                f"updates of {count} had begun, and these cannot be undone. step() completes it "
                "with the gradients that came, as torch does; call it first, then zero_grad(), and "
                "go on. To be able to drop a backward that failed, leave Config.micro_batches out"
            )
        raise RuntimeError(
            f"{what} came before step(), but Config.micro_batches={self.declared.number} declared "
            f"that step() follows, and updates of {count} have begun; likely the loop, or the "
            "trainer, accumulates another number of batches, or looks at gradients before step() "
            "(to clip them, which Config.max_grad_norm does inside step()): call step() first, "
            "declare that number, or leave micro_batches out"
        )
