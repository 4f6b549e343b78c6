"""The torch.optim face of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from cpu_adam.hyper import Hyper, SGDHyper
from cpu_adam.optimizer_base import CPUOptimizer
from cpu_adam.parameter_state import check_kind
from offload.model.early_updates import ParameterStep
from offload.model.engine import Engine
from offload.model.passes import refuse_inside
from offload.optim.states import States, check_state
from offload.optim.supported_optimizers import check_group, hyper_of, rule_of
from offload.runtime.entry import entry
from offload.runtime.torch_internals import share_step_hooks

ELSEWHERE = "states are elsewhere"
"""A key in what `TrainerMixin` writes in the place of a state dict: the folder that has it."""

_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""By optimizer that was given to `attach`, the handle of the engine's hook before its step."""


def _refuse_step(*_: object, **__: object) -> None:
    raise RuntimeError(
        "this optimizer was handed to offload.attach: step the optimizer that attach returned"
    )


def _hook(original: torch.optim.Optimizer, before_step: Callable[..., None]) -> None:
    """Call `before_step` before each step of an optimizer, and no earlier hook of the engine's."""
    give_back(original)
    _hooks[original] = original.register_step_pre_hook(before_step)


def give_back(original: torch.optim.Optimizer) -> None:
    """Let an optimizer that was taken over step by itself again."""
    if (handle := _hooks.pop(original, None)) is not None:
        handle.remove()


def _let_go(original: torch.optim.Optimizer, *_: object) -> None:
    """Convert states to moments of the parameter's dtype, without masters, as torch's own optimizer
    steps with them. Until its first step nothing is lost, and it may be attached again."""
    for parameter, state in original.state.items():
        state.pop("residue", None)
        for name, value in state.items():
            if name != "step":
                state[name] = value.to(parameter.dtype)


class Optimizer(torch.optim.Optimizer):
    """The optimizer that `attach` returns: the user's own parameter groups, updated by the engine.

    `state_dict()` is in torch's format, with fp32 moments. Parameters in bfloat16 have one more
    key, `residue` (int16): the bits of the fp32 master that the weight lacks. `state` gives copies:
    to change a state, assign it.
    """

    gives_copies = False
    """Whether what `state` gives now is to be edited, as in a state dict."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        engine: Engine,
        states: States,
        check_model: Callable[[], None],
    ):
        """Take over `original`; `check_model` raises where the model has other parameters than at
        attach."""
        self.engine = engine
        self.states = states
        self._places = engine.places
        self._original = original
        self._check_model = check_model
        self._early: tuple[int, dict[int, list[tuple[int, Hyper]]]] = (-1, {})
        """The number of a backward, and `_by_unit` when its first update began."""
        super().__init__(original.param_groups, original.defaults)
        self.param_groups = original.param_groups
        engine.early.freeze = self._freeze_early
        self._hyper_of = hyper_of(original)
        give_back(original)  # Its hooks are the user's alone.
        share_step_hooks(original, self)
        _hook(original, _refuse_step)

    @property
    def state(self) -> Any:
        """The optimizer states by parameter, read when asked: copies. To change one, assign it."""
        return StateView(self)

    @state.setter
    def state(self, value: Any) -> None:
        """Replace all states. (Torch sets none when it builds the object.)"""
        if hasattr(self, "_hyper_of"):
            self.replace_states([(p, value.get(p, {})) for p in self.parameters()])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an offloaded optimizer cannot be copied or pickled: use its state_dict(); in a module "
            "that is copied (by Lightning's weight averaging) hold a function that returns it, as "
            "examples/lightning_trainer.py does"
        )

    @property
    def rule(self) -> str:
        """The update rule."""
        return rule_of(self._original)

    def name_of(self, parameter: nn.Parameter) -> str:
        """The qualified name of a parameter in the model; of a tied one the first."""
        unit, index = self._places[parameter]
        return self.engine.plan.profile.units[unit].parameters[index].name

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of all groups, but those without elements, which have no home."""
        every = (one for group in self.param_groups for one in group["params"])
        return (one for one in every if one in self._places)

    def stepped(self) -> list[nn.Parameter]:
        """Those that have a state, in the order in which states lie: each chunk is read once."""
        return sorted(filter(self.steps_of, self.parameters()), key=self._places.__getitem__)

    def steps_of(self, parameter: nn.Parameter) -> int:
        """Steps that a parameter has taken."""
        return self.states.steps.get(self._places[parameter], 0)

    @entry
    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """`step` and the slots of a parameter's state; empty before its first step."""
        steps = self.steps_of(parameter)
        if not steps:
            return {}
        with self.engine.lock:
            self.engine.settle()
            place = self._places[parameter]
            read = self.states.read(*place)
            found = {name: self.engine.shown(name, *place, value) for name, value in read.items()}
            return {"step": torch.tensor(float(steps)), **found}

    def state_dict(self) -> dict[str, Any]:
        """As torch has it, of tensors that take edits: they are the caller's own."""
        with self.engine.lock:
            before, self.gives_copies = self.gives_copies, True
            try:
                return super().state_dict()
            finally:
                self.gives_copies = before

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that the model had when it was attached.

        Raises:
            ValueError: a parameter that is not part of the attached model, or an option that is not
                offered.
        """
        if hasattr(self, "_hyper_of"):
            check_group(len(self.param_groups), {**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter not in self._places and parameter.numel():
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was added to the optimizer but "
                    "was not in the model when it was attached: give it an optimizer of its own"
                )

    @entry
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the groups' parameters, or make them zeros.

        Raises:
            RuntimeError: inside a backward.
        """
        refuse_inside("zero_grad()")
        with self.engine.call("zero_grad()"):
            self.engine.early.gave_up()
            self.engine.snapshots.boundary()
            for parameter in (one for group in self.param_groups for one in group["params"]):
                if parameter in self._places:
                    unit, index = self._places[parameter]
                    gradients = self.engine.gradients_of(unit)
                    (gradients.give_up if set_to_none else gradients.zero)(unit, index)
                elif set_to_none:  # An empty one: zeros it has none.
                    parameter.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Freeze one step and return; the update runs after it, see `optim.update`.

        Raises:
            EngineError: a lane failed before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @entry
    def _take_step(self) -> None:
        refuse_inside("step()")
        with self.engine.call():
            self._check_model()
            frozen = self._freeze()
            self.engine.step(frozen)
            for unit, steps in frozen.items():
                for index, step in steps.items():
                    self.states.stepped((unit, index), step.hyper)
            self._original._opt_called = True  # type: ignore[attr-defined]
            # Schedulers that were built before attach look there whether a step came before theirs.

    def _freeze(self) -> dict[int, dict[int, ParameterStep]]:
        """What a step taken now does to every parameter with a gradient."""
        frozen = {unit: self._steps_of(unit, mine) for unit, mine in self._by_unit().items()}
        return {unit: steps for unit, steps in frozen.items() if steps}

    def _by_unit(self) -> dict[int, list[tuple[int, Hyper]]]:
        """The parameters of each unit, and what the group of each is frozen to now."""
        found: dict[int, list[tuple[int, Hyper]]] = {}
        for number, group in enumerate(self.param_groups):
            check_group(number, group)
            hyper = self._hyper_of(group)
            for parameter in group["params"]:
                if parameter in self._places:  # Else it is empty: it lives nowhere, unchanged.
                    unit, index = self._places[parameter]
                    found.setdefault(unit, []).append((index, hyper))
        return found

    def _steps_of(self, unit: int, mine: Iterable[tuple[int, Hyper]]) -> dict[int, ParameterStep]:
        """What a step does to those of a unit's parameters that have a gradient."""
        steps, gradients = {}, self.engine.gradients_of(unit)
        for index, hyper in mine:
            if gradients.has(unit, index):
                number = self.states.steps.get((unit, index), 0) + 1
                if isinstance(hyper, SGDHyper):  # It counts the steps of its buffer.
                    number = 2 if (unit, index) in self.states.buffers else 1
                steps[index] = ParameterStep(hyper, number)
        return steps

    def _freeze_early(self, unit: int) -> Mapping[int, ParameterStep]:
        """What the step will do to a unit, asked inside backward; the first looks at all groups."""
        number = self.engine.passes.number
        if self._early[0] != number:
            self._early = number, self._by_unit()
        return self._steps_of(unit, self._early[1].get(unit, ()))

    def give_up(self) -> torch.optim.Optimizer:
        """Hand all states to the optimizer that was attached, which steps by itself again: one of
        torch by `_let_go`, as it cannot step with all of it."""
        for parameter in list(self.state):
            place, found = self._places[parameter], self.state_of(parameter)
            for name, value in found.items():
                if name != "step":
                    whole = self.engine.whole(*place, self.engine.part(*place, value))
                    found[name] = self.engine.wrapped(*place, whole).to(parameter.device)
            self._original.state[parameter] = found
        share_step_hooks(self, self._original)
        if isinstance(self._original, CPUOptimizer):
            give_back(self._original)
        else:
            _hook(self._original, _let_go)
        return self._original

    @entry
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradient before clipping; None without max_grad_norm."""
        return self.engine.updates.grad_norm()  # type: ignore[no-any-return]

    @entry
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states and groups in torch's format, from this optimizer or from torch's own.

        Raises:
            ValueError: the groups or shapes are of another model; nothing is changed.
        """
        if ELSEWHERE in state_dict:
            raise ValueError(
                "asked to load states of a checkpoint of offload.TrainerMixin; found that they are "
                f"in its folder {state_dict[ELSEWHERE]!r}: go on with class "
                "Trainer(offload.TrainerMixin, transformers.Trainer), or offload.load that folder"
            )
        groups, saved = self.param_groups, state_dict["param_groups"]
        theirs, mine = ([len(group["params"]) for group in all_] for all_ in (saved, groups))
        if theirs != mine:
            raise ValueError(
                f"the state has parameter groups of {theirs} parameters, this optimizer of {mine}: "
                "it is of another model"
            )
        options = [{name: v for name, v in old.items() if name != "params"} for old in saved]
        self.check_options(options)
        self.replace_states(
            [
                (parameter, state_dict["state"].get(key, {}))
                for group, old in zip(groups, saved)
                for parameter, key in zip(group["params"], old["params"])
            ]
        )
        self.take_options(options)

    def check_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError unless these can be the options of the groups."""
        for number, (group, changes) in enumerate(zip(self.param_groups, options)):
            check_kind(group, changes)
            check_group(number, {**group, **changes})
            self._hyper_of({**group, **changes})  # Refuses what is no number.

    def take_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Give the groups options that `check_options` let pass."""
        for group, changes in zip(self.param_groups, options):
            group.update(changes)
        # A kind may insist on options of its own, as AdamW does on its decay.
        self._original.__setstate__({"param_groups": self.param_groups})

    @entry
    def replace_states(self, found: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Take over other states, empty ones of parameters that begin anew."""
        self.engine.settle()
        begun = self.states.steps
        self.import_states(
            [
                (parameter, state)
                for parameter, state in found  # Others have none, or zeros.
                if parameter.numel() and (state or self._places.get(parameter) in begun)
            ]
        )

    def import_states(self, found: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Take over the states of parameters, and make those fresh that are empty."""
        given, rule = [], self.rule
        for parameter, state in found:
            unit, index = self._places[parameter]
            shape = self.engine.plan.profile.full[unit].parameters[index].shape
            one = self.engine.plan.profile.units[unit].parameters[index]
            local = self.engine.units[unit].bindings[index].local
            slots = {k: local(v) for k, v in state.items() if k != "step" and v is not None}
            for name, value in slots.items():
                if getattr(value, "shape", None) == shape:  # Else it is refused.
                    slots[name] = self.engine.part(unit, index, value)
            check_state(rule, one, {**state, **slots})
            # torch's SGD counts no steps; what a buffer holds came of one at least.
            steps = int(state.get("step", 1 if slots else 0))
            given.append(((unit, index), slots, steps))
        self.states.write(given)


class StateView(MutableMapping[nn.Parameter, Mapping[str, Any]]):
    """What torch code reads as `optimizer.state`: copies, read from the records when asked."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer

    def __getitem__(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        optimizer = self._optimizer
        with nullcontext() if optimizer.gives_copies else torch.inference_mode():
            return optimizer.state_of(parameter)  # Of what is made there torch refuses edits.

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._optimizer.stepped())

    def __len__(self) -> int:
        return len(self._optimizer.stepped())

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is one for one in self)

    def __setitem__(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        self._optimizer.replace_states([(parameter, state)])

    def __delitem__(self, parameter: nn.Parameter) -> None:
        self._optimizer.replace_states([(parameter, {})])
