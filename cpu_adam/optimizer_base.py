"""What the optimizers of this package have in common: torch.optim's protocol over native updates.

[Note: Edits]
A bfloat16 parameter is the upper half of its float32 master; the state's `residue` is the lower.
Whatever is written into the parameter between steps (`p.copy_`, `clamp_`, `load_state_dict`,
`p.data = ...`) is served unchanged, and the next step starts within half a bfloat16 unit of it: the
residue cannot carry a weight back, only refine it. Residues are therefore left as they are, as in
torch any state is left when a parameter is edited. To zero them when versions differ was
considered: it loses what clipping weights after every step leaves of each step (such training
stalls), the checkpoint's masters where the model is loaded after its optimizer, and every master
where averaged weights are swapped in and out. Who wants the edited value as the exact master says
`optimizer.state[p]["residue"].zero_()`.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from cpu_adam.batch import Batch, Due, Member
from cpu_adam.checks import check_dense
from cpu_adam.hyper import Hyper
from cpu_adam.memory import are_native
from cpu_adam.parameter_state import (
    STEP,
    check_kind,
    check_parameter,
    check_slot,
    check_state_dict,
    fresh,
    key_of,
    loaded,
    local,
    saved,
)

_REFUSED = {
    "amsgrad": "no state format keeps the largest second moment",
    "capturable": "graphs of kernels cannot hold work on the CPU",
    "differentiable": "the update is no sequence of torch operations that autograd could follow",
}
"""Options of torch's optimizers that are not offered, and why."""


def number(value: Any) -> Any:
    """A number, or a tensor of a single one, as a float; anything else as it is, to be refused."""
    try:
        return float(value) if hasattr(value, "__float__") else value
    except (TypeError, ValueError, RuntimeError):  # Of several elements, or without memory.
        return value


def decays(betas: Any) -> tuple[Any, Any]:
    """Both betas, as `number` gives them. Raises what unpacking does if they are no pair."""
    beta1, beta2 = betas
    return number(beta1), number(beta2)


class CPUOptimizer(torch.optim.Optimizer):
    """An optimizer of parameters in CPU memory; each step is one native call per state format."""

    rule: ClassVar[str]
    """Name of the rule in `cpu_adam.FORMATS`."""
    counts_steps: ClassVar[bool] = False
    """Whether a state has the number of its steps."""
    _step_supports_amp_scaling = True
    """Tells GradScaler that `step` looks at its `grad_scale` and `found_inf`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """given: the arguments of an optimizer, by name: those that are not ours are of groups."""
        ours = ("self", "__class__", "params")
        defaults = {name: value for name, value in given.items() if name not in ours}
        if "betas" in defaults:
            defaults["betas"] = decays(defaults["betas"])
        self.skipped_steps = 0
        """Steps that changed nothing: GradScaler had found a gradient that was not finite."""
        self._batch: Batch | None = None
        super().__init__(given["params"], defaults)

    @staticmethod
    @abstractmethod
    def hyper_of(group: Mapping[str, Any]) -> Hyper:
        """The hyper-parameters of a group. Raises ValueError where no step is defined by them,
        TypeError where one is no number."""

    def _unused(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Slots that a group does without."""
        return ()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does.

        Raises ValueError or TypeError, and adds none, if it cannot be served.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        for option, reason in _REFUSED.items():
            if group.get(option):
                raise ValueError(
                    f"asked for {type(self).__name__} with {option}=True; found that {reason}; "
                    f"likely cause: options copied from another optimizer; try: {option}=False"
                )
        self.hyper_of(group)
        for parameter in group["params"]:
            check_parameter(parameter, group["states"], self.rule)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; the closure's loss, if there is a closure.

        Raises ValueError, before anything is changed, for sparse gradients, parameters that are not
        in CPU memory and hyper-parameters by which no step is defined.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update = self._update
        if torch.compiler.is_compiling():  # It calls what cannot be traced.
            update = torch.compiler.disable(update)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            update()
        return loss

    def _update(self) -> None:
        hypers = [self.hyper_of(group) for group in self.param_groups]
        due = self._due()
        setting = [(group["states"], self._unused(group)) for group in self.param_groups]
        batch = self._batch
        if batch is not None and not batch.serves(due, self.state, setting):
            batch = self._batch = None
        if batch is None:
            for gradient, parameter in zip(due.gradients, due.parameters):
                check_dense(gradient, parameter)
            are_native(map(local, due.gradients))  # Which refuses some.
        if float(getattr(self, "found_inf", None) or 0.0) != 0.0:
            self.skipped_steps += 1
            return
        scale = self._scale()
        if batch is None:
            members = [self._member(p, number) for p, number in zip(due.parameters, due.groups)]
            batch = self._batch = Batch(due, members, setting)
        batch.run(hypers, due.gradients, scale, self.state)

    def _scale(self) -> float:
        """What gradients are multiplied by: GradScaler says what they were multiplied by before."""
        grad_scale = getattr(self, "grad_scale", None)
        divisor = 1.0 if grad_scale is None else float(grad_scale)
        if not 0.0 < divisor < math.inf:
            raise ValueError(
                f"asked for a step by gradients that are divided by grad_scale, a positive number; "
                f"found {divisor}; likely cause: a GradScaler whose scale was halved to "
                f"nothing, as no gradient was finite; try: look for the first NaN of the forward "
                f"pass"
            )
        return 1.0 / divisor

    def _due(self) -> Due:
        due = Due([], [], [])
        for number, group in enumerate(self.param_groups):
            found = [(p, g) for p in group["params"] if (g := p.grad) is not None]
            due.parameters.extend([p for p, _ in found])
            due.gradients.extend([g for _, g in found])
            due.groups.extend([number] * len(found))
        return due

    def _member(self, parameter: Tensor, number: int) -> Member:
        """A parameter with its state and what is to be in it; nothing is changed yet.

        Raises ValueError where the parameter or what is there of its state cannot be updated.
        """
        group = self.param_groups[number]
        format = check_parameter(parameter, group["states"], self.rule)
        are_native([local(parameter)])
        unused = self._unused(group)
        state = self.state.get(parameter, {})
        begins = False
        slots, kept = {}, {}
        for slot in format.slots:
            key = key_of(slot)
            if slot.name in unused:
                continue
            value = state.get(key)
            if value is None:
                value = fresh(parameter, slot)
                begins = slot.name != "residue" or begins
            else:
                check_slot(parameter, slot, value)
                value = value if local(value).is_contiguous() else value.contiguous()
            slots[slot.name] = kept[key] = value
        if self.counts_steps:
            kept[STEP] = state.get(STEP, 0.0)
        return Member(parameter, format, state, slots, kept, begins)

    def state_dict(self) -> dict[str, Any]:
        """The options and states in torch's format, as references like torch's own.

        A residue that is sharded over processes comes as an int32 copy, which gloo and NCCL can
        gather.
        """
        found = super().state_dict()
        states = {key: saved(state) for key, state in found["state"].items()}
        return {**found, "state": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this optimizer or of its counterpart in torch returned.

        Everything is copied. float32 moments of bfloat16 parameters stay float32; a checkpoint
        without residues loads as masters that equal their weights. Options that the checkpoint
        does not have stay as they are. The model may be loaded before or after: see [Note: Edits].
        `compact` states come from where they were saved, or from moments as numbers, but do not go
        elsewhere. Raises ValueError, and changes nothing, where groups, shapes or states do not
        fit; TypeError where a hyper-parameter is no number.
        """
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        saved_groups, saved_states = check_state_dict(state_dict)
        have = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in saved_groups]
        if have != given:
            raise ValueError(
                f"asked to load parameter groups of {have} parameters; found groups of {given}; "
                f"likely cause: the checkpoint is of another model or was grouped otherwise; try: "
                f"build the groups as they were when it was saved"
            )
        groups, owners = [], {}
        for group, old in zip(self.param_groups, saved_groups):
            options = {key: value for key, value in old.items() if key != "params"}
            check_kind(self.defaults, options)
            groups.append({**group, **copy.deepcopy(options), "params": group["params"]})
            self._check_group(groups[-1])
            owners.update({key: (p, groups[-1]) for key, p in zip(old["params"], group["params"])})
        state: dict[Any, Any] = {}
        for key, value in saved_states.items():
            if key in owners:
                parameter, group = owners[key]
                format = check_parameter(parameter, group["states"], self.rule)
                state[parameter] = loaded(parameter, format, value, self.counts_steps)
            else:
                state[key] = copy.deepcopy(value)
        self.__setstate__({"state": type(self.state)(dict, state), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "skipped_steps": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._batch = None
