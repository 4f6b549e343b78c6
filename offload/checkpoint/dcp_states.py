"""The state dicts of a model and its optimizer in folders of torch.distributed.checkpoint.

[Note: Names in DCP folders]
A state dict is nested: `model`, and the optimizer's `state` and `param_groups`, with whatever is
beside them. States are by the names of parameters where torch's `get_state_dict` was asked, nested
or flattened; `optimizer.state_dict()` has numbers. Which parameter has which number is in no file,
unless the optimizer was given named parameters: it is concluded where shapes leave one choice.
"""

from __future__ import annotations

import pickle
import re
from math import prod
from typing import Any

import torch

from offload.checkpoint.dcp_folder import Folder, Path, Shape, write_folder
from offload.checkpoint.deepspeed_shards import RULES, Checkpoint
from offload.checkpoint.directory import FORMAT, decoded, encoded
from offload.checkpoint.saving import progress, states_of
from offload.checkpoint.schema import Refusal, shown, told
from offload.checkpoint.shards import PART_ELEMENTS, WEIGHTS, Sets, Tensor, bytes_of

RESIDUE, STEP = "residue", "step"
HEAD_ELEMENTS = 1 << 10
"""By which tied weights are looked for."""

_ASKED = "a folder of torch.distributed.checkpoint", "it is damaged, or of another release"
"""Of a sentence on what is damaged: what was asked for, and the likely cause."""


def open_dcp(where: str) -> Checkpoint:
    """Map a folder: weights, and where it has an optimizer its states and groups, by name.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is damaged, could run code, or has what a save cannot hold.
    """
    with told(where, *_ASKED):
        return _checkpoint(Folder(where))


def _checkpoint(folder: Folder) -> Checkpoint:
    found = (re.match(r"(|.*\.)param_groups\.", name) for name in folder.paths)
    homes = {match[1] for match in found if match}
    if len(homes) > 1:
        raise Refusal(f"{folder.where}: several optimizers, {shown(sorted(homes))}; not offered")
    mine = tuple(f"{home}{part}." for home in homes for part in ("state", "param_groups"))
    others = [name for name in folder.paths if not name.startswith(mine or "\0")]
    stems: dict[Path, dict[str, str]] = {}
    for name in filter(folder.tensors.get, others):
        *stem, last = folder.paths[name]
        stems.setdefault(tuple(stem), {})[str(last)] = name
    chosen = [stem for stem in stems if stem[-1:] == ("model",)] or [*stems]
    if len(chosen) != 1:
        raise Refusal(
            f"{folder.where}: asked for the weights of a model; found tensors under "
            f"{shown(chosen)}; expected those of one `model`"
        )
    weights, notices = stems[chosen[0]], list[str]()
    rest = [name for name in others if name not in set(weights.values())]
    optimizer = _Optimizer(folder, *homes) if homes else None
    groups, slots = optimizer.named(weights, notices) if optimizer else ([], {})
    trained = {name for group in groups for name in group["parameters"]}
    _drop_tied(folder, weights, trained, notices)
    places: dict[str, dict[str, str]] = {WEIGHTS: weights}
    states: dict[str, Any] = {}
    for name, all_ in slots.items():
        steps = int(folder.object(all_.pop(STEP))) if STEP in all_ else 1  # That of SGD has none.
        states[name] = {"steps": steps, "slots": {}}
        for slot, at in all_.items():
            if folder.tensors[at].shape != folder.tensors[weights[name]].shape:
                raise ValueError(f"{shown(at)} of another shape than {shown(name)}")
            states[name]["slots"][slot] = folder.tensors[at].dtype
            places.setdefault(slot, {})[name] = at
    sets = {
        prefix: {name: folder.tensors[at]._replace(name=name) for name, at in named.items()}
        for prefix, named in places.items()
    }

    def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        with told(folder.where, *_ASKED):
            return folder.values(places[prefix][name], start, count)

    step = max((state["steps"] for state in states.values()), default=0)
    run = {"format": FORMAT, "step": step, "user": _user(folder, rest, notices)}
    if optimizer:
        rule = _rule(folder, {*sets} - {WEIGHTS, RESIDUE}, groups)
        run["optimizer"] = {"rule": rule, "groups": groups, "states": states}
    # All weights are castable, as in `model.to`: nothing tells buffers from parameters.
    return Checkpoint(sets, values, run, weights.keys(), notices=notices)


def _rule(folder: Folder, slots: set[str], groups: list[dict[str, Any]]) -> str:
    """That of an optimizer with such slots, or of its options where there is no state."""
    if not slots:
        return "sgd" if "momentum" in decoded(groups[0]["options"]) else "adam"
    if (kinds := tuple(sorted(slots))) not in RULES:
        found = f"states of {', '.join(kinds)}: an optimizer that is not offered"
        raise Refusal(f"{folder.where}: {found}")
    return RULES[kinds]


class _Optimizer:
    """The names of an optimizer's entries: of each state its slots, of each group its options."""

    def __init__(self, folder: Folder, home: str):
        self._folder = folder
        self.slots: dict[str, dict[str, str]] = {}
        options: dict[str, dict[str, str]] = {}
        for part, found in (("state", self.slots), ("param_groups", options)):
            for name in folder.paths:
                if name.startswith(f"{home}{part}."):
                    key, _, one = name.removeprefix(f"{home}{part}.").rpartition(".")
                    if one == STEP or name in folder.tensors or part == "param_groups":
                        found.setdefault(key, {})[one] = name
        numbered = [key for key, one in options.items() if "params" in one]
        self.groups = [self._read(options[key]) for key in sorted(numbered, key=int)]
        flat: dict[str, dict[str, Any]] = {}
        for key, one in options.items() if not numbered else ():  # They were flattened.
            read = self._read(one)
            group = flat.setdefault(repr(sorted(read.items())), {**read, "params": []})
            group["params"].append(key)
        self.groups += flat.values()

    def _read(self, options: dict[str, str]) -> dict[str, Any]:
        return {option: self._folder.object(name) for option, name in options.items()}

    def named(
        self, weights: dict[str, str], notices: list[str]
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
        """Groups as a save has them, and slots, by the names of the parameters."""
        shapes = {name: self._folder.tensors[at].shape for name, at in weights.items()}
        names: dict[Any, str] = {}
        for group in self.groups:
            names |= dict(zip(group["params"], group.pop("param_names", group["params"])))
        if not all(isinstance(one, str) for one in names.values()):
            _drop_tied(self._folder, weights, (), notices)
            names = self._by_shape({name: shapes[name] for name in weights})
            notices.append(
                "states of numbers were given to parameters by order and shape: right if each "
                "group had its parameters in the model's order; torch's get_state_dict writes names"
            )
        groups = []
        for group in self.groups:
            of = [names[one] for one in group.pop("params")]
            of = [one for one in of if 0 not in shapes[one]]
            groups.append({"parameters": of, "options": encoded(group, "options of a group")})
        keys = {str(key): name for key, name in names.items()}
        return groups, {keys[key]: one for key, one in self.slots.items() if keys[key] in shapes}

    def _by_shape(self, shapes: dict[str, Shape]) -> dict[Any, str]:
        """The parameters that numbers stand for.

        Raises:
            ValueError: there is more than one way to see it.
        """
        numbers = [one for group in self.groups for one in group["params"]]
        if len(self.groups) == 1 and len(numbers) == len(shapes):
            return dict(zip(numbers, shapes))
        found: dict[Any, str] = {}
        for shape in dict.fromkeys(shapes.values()):
            theirs = [name for name, one in shapes.items() if one == shape]
            given = [
                mine
                for group in self.groups
                if (mine := [one for one in group["params"] if self._shape(one) == shape])
            ]
            if len(given) > 1 or any(len(mine) != len(theirs) for mine in given):
                raise Refusal(
                    f"{self._folder.where}: states by number; found several ways to give those of "
                    f"shape {shape} to {shown(theirs)}; save what torch's get_state_dict gives, "
                    "which has names"
                )
            found.update(pair for mine in given for pair in zip(mine, theirs))
        if lost := [one for one in numbers if one not in found]:
            raise Refusal(
                f"{self._folder.where}: states by number; found none of {shown(lost)}, and no "
                "names; save what torch's get_state_dict gives, which has names"
            )
        return found

    def _shape(self, number: Any) -> Any:
        slots = [at for slot, at in self.slots.get(str(number), {}).items() if slot != STEP]
        return self._folder.tensors[slots[0]].shape if slots else None


def _drop_tied(folder: Folder, weights: dict[str, str], trained: Any, notices: list[str]) -> None:
    """Leave out the second name of each matrix that has two. All that a folder says of that are
    equal bits: matrices of one number only do not count, nor two that were trained."""
    found: dict[Any, str] = {}
    for name in sorted(weights, key=lambda name: name not in trained):
        one = folder.tensors[weights[name]]
        if len(one.shape) < 2 or 0 in one.shape:
            continue
        head = folder.values(weights[name], 0, min(HEAD_ELEMENTS, prod(one.shape)))
        first = found.setdefault((one.dtype, one.shape, bytes_of(head).tobytes()), name)
        if first == name or name in trained or bool((head == head[0]).all()):
            continue
        pairs = (
            [folder.values(weights[each], *part) for each in (first, name)]
            for part in one.parts(PART_ELEMENTS)
        )
        if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            notices.append(f"left out: {name}, which has the bits of {first}: likely they are tied")
            del weights[name]


def _user(folder: Folder, names: list[str], notices: list[str]) -> Any:
    """What is beside model and optimizer, nested as it was."""
    found: dict[Any, Any] = {}
    for name in names:
        if name in folder.tensors and folder.tensors[name].shape:
            notices.append(f"left out: {name}, a tensor beside the model's")
            continue
        path = folder.paths[name]
        try:
            value = encoded(folder.object(name), name)
        except (TypeError, ValueError, RuntimeError, pickle.PickleError) as error:
            notices.append(f"left out: {name}: {' '.join(str(error).split())[:200]}")
            continue
        at = found
        for one in path[:-1]:
            at = at.setdefault(one, {})
        at[path[-1]] = decoded(value)
    return encoded(found["user"] if found.keys() == {"user"} else found or None, "user")


# -- write -----------------------------------------------------------------------------------------


def write_dcp(where: str, made: Checkpoint, what: str) -> None:
    """Write what a save of `made` would have to an empty directory, with the names that torch's
    `get_state_dict` gives, nested and flattened. `what` stands beside the bar.

    Raises:
        OSError: something cannot be read or written.
    """
    saved, states = made.run.get("optimizer", {"rule": "", "groups": []}), states_of(made.run)
    sets: Sets = {**made.sets, STEP: {name: Tensor(name, "float32", ()) for name in states}}
    tensors: dict[Path, tuple[str, Tensor]] = {}
    for prefix, named in sets.items():
        for name, one in named.items():
            state: Path = ("optimizer", "state", name, prefix)
            tensors[("model", name) if prefix == WEIGHTS else state] = prefix, one

    def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        if prefix == STEP:
            return torch.tensor([float(states[name]["steps"])])
        return made.values(prefix, name, start, count)

    objects: list[tuple[Any, list[Path]]] = []
    kind: Any = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(saved["rule"])
    default = kind([torch.zeros(1)]).param_groups[0] if kind else {}
    for number, group in enumerate(saved["groups"]):
        options = {**default, **decoded(group["options"]), "params": group["parameters"]}
        for option, value in options.items():
            flat: list[Path] = [
                ("optimizer", f"param_groups.{name}.{option}")
                for name in group["parameters"]
                if option != "params" and not name.isdigit()  # A group is a digit.
            ]
            objects.append((value, [("optimizer", "param_groups", number, option), *flat]))
    for beside in ("user", "scheduler"):
        if made.run.get(beside) is not None:
            objects.append((decoded(made.run[beside]), [(beside,)]))
    with progress(what, sets) as moved:
        write_folder(where, tensors, objects, values, moved)
