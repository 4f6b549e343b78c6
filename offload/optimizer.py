"""The torch.optim face of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cpu_adam.hyper import Hyper, SGDHyper
from cpu_adam.optimizer_base import CPUOptimizer
from cpu_adam.parameter_state import check_kind
from offload.accepted import HYPER_OF, check_group, rule_of
from offload.engine import Engine
from offload.frozen import ParameterStep
from offload.interrupt import whole
from offload.passes import refuse_inside
from offload.state_view import StateView
from offload.states import States, check_state
from offload.structure import Structure

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where torch keeps the hooks of an optimizer."""


def _refuse_original(*_: object, **__: object) -> None:
    raise RuntimeError(
        "this optimizer was handed to offload.attach: step the optimizer that attach returned"
    )


# Schedulers built before attach look for this mark, to see that nobody replaced their wrapper.
vars(_refuse_original)["_wrapped_by_lr_sched"] = True


def give_back(original: torch.optim.Optimizer) -> None:
    """Let an optimizer that was taken over step by itself again, through its schedulers if any."""
    if "_offload_step" in vars(original):
        vars(original).pop("step")
        before = vars(original).pop("_offload_step")
        if before is not None:
            vars(original)["step"] = before


def _let_go_at_step(original: torch.optim.Optimizer) -> None:
    """Make states that were handed back what torch's own optimizer steps with, when it first does.

    It has no masters, and moments of the parameter's dtype. Until then nothing is lost: the
    optimizer may be attached again.
    """

    def let_go(*_: object) -> None:
        for parameter, state in original.state.items():
            state.pop("residue", None)
            for name, value in state.items():
                if name != "step":
                    state[name] = value.to(parameter.dtype)
        handle.remove()

    handle = original.register_step_pre_hook(let_go)


class Optimizer(torch.optim.Optimizer):
    """The optimizer that `attach` returns: the user's own parameter groups, updated by the engine.

    `state_dict()` is in torch's format, with fp32 moments; parameters in bfloat16 have one key
    more, `residue` (int16), the bits of the fp32 master that the weight lacks. What `state` gives
    are copies: to change a state, assign it.
    """

    def __init__(
        self,
        original: torch.optim.Optimizer,
        engine: Engine,
        states: States,
        places: Mapping[nn.Parameter, tuple[int, int]],
        structure: Structure,
    ):
        """Take over `original`; `places` gives each parameter's unit and index."""
        self.engine = engine
        self._states = states
        self._places = dict(places)
        self._original = original
        self._structure = structure
        self._saving = False
        self._early: tuple[int, dict[int, list[tuple[int, Hyper]]]] = (-1, {})
        """`_by_unit` as it was when the first update of a backward began, and that pass."""
        super().__init__(original.param_groups, original.defaults)
        self.param_groups = original.param_groups
        engine.finality.freeze = self._freeze_early
        for name in _HOOKS:  # One dictionary for both: a handle removes from either.
            setattr(self, name, getattr(original, name))
        self._hyper_of = HYPER_OF[type(original)]
        vars(original)["_offload_step"] = vars(original).get("step")
        vars(original)["step"] = _refuse_original

    @property
    def state(self) -> Any:
        """The optimizer states by parameter, read when asked; they refuse to be changed."""
        return StateView(self, plain=self._saving)

    @state.setter
    def state(self, value: Any) -> None:
        """Replace all states. (Torch sets none when it builds the object.)"""
        if hasattr(self, "_hyper_of"):
            self.replace_states([(p, value.get(p, {})) for p in self.parameters()])

    def state_dict(self) -> dict[str, Any]:
        """In torch's format, the caller's to change."""
        self._saving = True
        try:
            return super().state_dict()
        finally:
            self._saving = False

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError(
            "an offloaded optimizer cannot be copied: use its state_dict(); where a module that "
            "holds it is copied (by Lightning's weight averaging), hold it elsewhere: make it in "
            "configure_optimizers(), as examples/lightning_trainer.py does"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an offloaded optimizer cannot be pickled: save its state_dict()")

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """What a parameter is called in the model; None where it is not trained here."""
        if parameter not in self._places:
            return None
        unit, index = self._places[parameter]
        return self.engine.units[unit].spec.parameters[index].name

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of all groups but the empty ones, which live nowhere."""
        return (parameter for parameter in self._all() if parameter in self._places)

    def _all(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def in_places(self) -> list[nn.Parameter]:
        """`parameters()`, in the order in which their states lie."""
        return sorted(self.parameters(), key=lambda one: self._states.order(self._places[one]))

    def steps_of(self, parameter: nn.Parameter) -> int:
        """Steps that a parameter has taken."""
        return self._states.steps.get(self._places[parameter], 0)

    @whole
    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """`step` and the slots of a parameter's state; empty before its first step."""
        steps = self.steps_of(parameter)
        if not steps:
            return {}
        with self.engine.lock:
            self.engine.settle()
            self.engine.exposures.put_home(self._places[parameter][0])
            return {
                "step": torch.tensor(float(steps)),
                **self._states.read(*self._places[parameter]),
            }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that the model had when it was attached.

        Raises:
            ValueError: a parameter that is not part of the attached model.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter not in self._places and parameter.numel():
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was added to the optimizer but "
                    "was not in the model when it was attached: attach the whole model again"
                )

    @whole
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the groups' parameters, or make them zeros.

        Raises:
            RuntimeError: inside a backward.
        """
        refuse_inside("zero_grad()")
        with self.engine.lock:
            self._zero_grad(set_to_none)

    def _zero_grad(self, set_to_none: bool) -> None:
        self.engine.end_abandoned()
        self.engine.finality.require_step("zero_grad()")
        self.engine.finality.discarded()
        mine: dict[int, list[int]] = {}
        for parameter in self._all():
            if parameter in self._places:
                unit, index = self._places[parameter]
                mine.setdefault(unit, []).append(index)
            elif set_to_none:  # An empty one: zeros it has none.
                parameter.grad = None
        for unit, indices in mine.items():
            gradients = self.engine.gradients_of(unit)
            if not set_to_none:
                gradients.zero(unit, indices)
                continue
            for index in indices:
                gradients.give_up(unit, index)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Freeze one step and return; the update runs after it, see `updates`.

        Raises:
            EngineError: a lane failed before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @whole
    def _take_step(self) -> None:
        with self.engine.lock:
            self.engine.end_abandoned()
            self._structure.check()
            self.engine.collector.send_all()  # In a hook inside a backward: what still waits.
            frozen = self._freeze()
            self.engine.step(frozen)
            for unit, steps in frozen.items():
                for index, step in steps.items():
                    self._states.stepped((unit, index), step.hyper)
        self._original._opt_called = True  # type: ignore[attr-defined]

    def _freeze(self) -> dict[int, dict[int, ParameterStep]]:
        """What a step taken now does to every parameter with a gradient."""
        frozen = {unit: self._steps_of(unit, mine) for unit, mine in self._by_unit().items()}
        return {unit: steps for unit, steps in frozen.items() if steps}

    def _by_unit(self) -> dict[int, list[tuple[int, Hyper]]]:
        """The parameters of each unit, and what the group of each is frozen to now."""
        found: dict[int, list[tuple[int, Hyper]]] = {}
        for group in self.param_groups:
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
                number = self._states.steps.get((unit, index), 0) + 1
                if isinstance(hyper, SGDHyper):  # Which counts the steps of its buffer.
                    number = 2 if (unit, index) in self._states.buffers else 1
                steps[index] = ParameterStep(hyper, number)
        return steps

    def _freeze_early(self, unit: int) -> Mapping[int, ParameterStep]:
        """What the step will do to a unit, asked inside backward; the first asks for all of them.

        Raises:
            RuntimeError: the step will be refused, and nothing has been updated yet.
        """
        residents, number = self.engine.residents, self.engine.passes.number
        if self._early[0] != number:
            for parameter in self.parameters():
                if self._places[parameter][0] in residents:
                    residents.require_place(*self._places[parameter])
            self._early = number, self._by_unit()
        return self._steps_of(unit, self._early[1].get(unit, ()))

    def give_up(self) -> torch.optim.Optimizer:
        """Hand all states to the optimizer that was attached, which steps by itself again.

        An optimizer of torch cannot step with all of it, see `_let_go_at_step`; `CPUAdam` can.
        """
        for parameter in list(self.state):
            self._original.state[parameter] = {
                name: value if name == "step" else value.to(parameter.device)
                for name, value in self.state_of(parameter).items()
            }
        if not isinstance(self._original, CPUOptimizer):
            _let_go_at_step(self._original)
        give_back(self._original)
        return self._original

    @whole
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradient before clipping; None without max_grad_norm."""
        return self.engine.updates.grad_norm()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load states and groups in torch's format, from this optimizer or from torch's own.

        Raises:
            ValueError: the groups or shapes are of another model; nothing is changed.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed: Any = before(self, state_dict)  # type: ignore[arg-type]
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @whole
    def _load(self, state_dict: Mapping[str, Any]) -> None:
        groups, saved = self.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
            raise ValueError(
                f"the state has parameter groups of {[len(g['params']) for g in saved]} parameters,"
                f" this optimizer of {[len(g['params']) for g in groups]}: it is of another model"
            )
        options = [{name: v for name, v in old.items() if name != "params"} for old in saved]
        for number, (group, changes) in enumerate(zip(groups, options)):
            check_kind(group, changes)
            check_group(number, {**group, **changes})
            self._hyper_of({**group, **changes})  # Which refuses what is no number.
        found: list[tuple[nn.Parameter, Mapping[str, Any]]] = []
        for group, old in zip(groups, saved):
            for parameter, key in zip(group["params"], old["params"]):
                found.append((parameter, state_dict["state"].get(key, {})))
        self.replace_states(found)
        for group, changes in zip(groups, options):
            group.update(changes)
        # A kind may insist on options of its own, as AdamW does on its decay.
        self._original.__setstate__({"param_groups": groups})

    @whole
    def replace_states(self, found: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Take over other states, empty ones of parameters that begin anew.

        Raises:
            ValueError: one is of another model or optimizer; nothing is changed.
        """
        self.engine.settle()
        for parameter, state in found:
            check_state(rule_of(self._original), parameter, state)
        begun = self._states.steps
        self.import_states(
            [
                (parameter, state)
                for parameter, state in found  # Others have none, or zeros.
                if parameter.numel() and (state or self._places.get(parameter) in begun)
            ]
        )

    def import_states(self, found: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        """Take over the states of parameters, and make those fresh that are empty."""
        given = []
        for parameter, state in found:
            slots = {k: v for k, v in state.items() if k != "step" and v is not None}
            # torch's SGD counts no steps; what a buffer holds came of one at least.
            steps = int(state.get("step", 1 if slots else 0))
            given.append((self._places[parameter], slots, steps))
        self._states.write(given)
