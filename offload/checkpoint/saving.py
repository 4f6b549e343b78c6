"""Save and load an attached model and its optimizer, of any size, through a window.

[Note: Saves]
A save is a directory: sets of tensors (`shards`), one of the weights and one for each slot of the
optimizer's states, and `run.json` with all else. What is where it lives is read chunk by chunk, in
the order in which it lies there, and goes into files one after the other; a load goes the other
way. The key of everything is the parameter's name and the range in it, so that a save of one
placement is loaded into any other. All that can be refused is, before the first byte is written.
"""

from __future__ import annotations

import itertools
import os
import reprlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn
from torch import nn

import aio
from cpu_adam.torch_state import plain_dtypes
from offload.checkpoint.directory import (
    FORMAT,
    decoded,
    encoded,
    random_state,
    read_run,
    set_random_state,
    whole_directory,
    write_run,
)
from offload.checkpoint.rank_parts import Parts, read_together, write_together
from offload.checkpoint.schema import shown
from offload.checkpoint.shards import (
    PART_ELEMENTS,
    SCALE,
    SHARD_BYTES,
    WEIGHTS,
    Sets,
    SetsReader,
    Tensor,
    Values,
    bytes_of,
    items,
    name_of,
    set_writer,
)
from offload.config import warn_user
from offload.model.engine import Engine, engine_of
from offload.model.passes import refuse_inside
from offload.model.units import count_change
from offload.optim.optimizer import Optimizer
from offload.optim.states import StatePart
from offload.planning.layout import Plan
from offload.planning.profile import Parameter, Piece
from offload.planning.tiers import parse_bytes
from offload.program.ops import Value
from offload.runtime.entry import all_or_none, entry, interruptible
from offload.runtime.memory import host_tensor
from offload.runtime.runner import Runner
from offload.runtime.store import AHEAD, ahead

BufferDicts = list[tuple[str, Mapping[str, torch.Tensor | None], Container[str]]]
"""By module its path, its buffers, and the names of those that no state dict has."""


@entry
def save(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    user: Any = None,
    scheduler: Any = None,
    frozen: bool = True,
    shard_bytes: int | str = SHARD_BYTES,
) -> None:
    """Write all that training goes on from to a directory, which is there whole or not at all.

    Weights and states of any size go through a window of some hundred MiB. Gradients are not part
    of it: save after `step()`. Over several ranks all of them call it, and the first one writes,
    with its `user` and `scheduler`; `load` reads it with any number of ranks.

    Args:
        model: attached.
        optimizer: that `attach` returned; None saves the weights alone.
        directory: a new one, or that of an earlier save, which it replaces.
        user: data of JSON, tuples and dicts of any keys, which `load` returns: where in the data
            set the run is, say.
        scheduler: an object with `state_dict()` of such data, as those of torch have.
        frozen: False leaves out the weights that are not trained, such as the base of an adapter;
            `load` leaves them as they are then.
        shard_bytes: most bytes of one file, also as a text: "5GB".

    Raises:
        ValueError: the model is not attached, or keeps extra state; the optimizer is another's.
        TypeError: `user` or the scheduler has something that is no such data, or is no scheduler.
        FileExistsError: there are files in the directory that are of no save.
        OSError: a file could not be written; an earlier save is as it was.
    """
    refuse_inside("offload.save()")
    engine, where = _engine_of(model, optimizer, scheduler), os.path.expanduser(directory)
    most = parse_bytes(shard_bytes)
    run: dict[str, Any] = {"format": FORMAT, "step": engine.steps, "user": encoded(user, "user")}
    if optimizer is None and not frozen:
        raise ValueError(
            "asked to save with frozen=False; found no optimizer: without one all weights are "
            "frozen; this needs the optimizer that attach returned"
        )
    run["frozen"] = frozen
    if scheduler is not None:
        run["scheduler"] = encoded(scheduler.state_dict(), "the scheduler's state")
    with engine.lock, ExitStack() as opened:
        engine.come_to_rest(f"offload.save to {where}")
        if optimizer is not None:
            run["optimizer"] = optimizer_of(engine, optimizer)
            run["random"] = random_state(engine.runner.device.torch_device)
            if engine.ranks is not None:
                run["random_of_ranks"] = engine.ranks.group.all_objects(run["random"])
        sets = sets_of(engine, model, run)
        opened.enter_context(interruptible())

        def write(parts: Parts) -> None:
            with whole_directory(where) as new:
                write_sets(new, sets, parts, f"saving to {where}", most)
                write_run(new, run, sets)

        write_together(engine, parts_of(engine, model, optimizer, sets), sets, write)


@entry
def load(
    model: nn.Module,
    optimizer: Optimizer | None,
    directory: str | os.PathLike[str],
    *,
    scheduler: Any = None,
) -> Any:
    """Take over what `save` wrote: weights, states, step numbers, hyper-parameters, the scheduler
    and the random numbers. Placement and budgets may be others than then.

    Args:
        model: attached, with the parameters and buffers that were saved.
        optimizer: that `attach` returned; None loads the weights alone.
        directory: of a save.
        scheduler: an object with `load_state_dict()`; given where, and only where, one was saved.

    Returns:
        The `user` data that was saved.

    Raises:
        ValueError: it is of another model or optimizer, or damaged; nothing was changed.
        OSError: a file is missing, cannot be read, or is found damaged when its tensors are read.
            In the last case the engine has ended: load another save in a new process.
    """
    refuse_inside("offload.load()")
    engine, where = _engine_of(model, optimizer, scheduler), os.path.expanduser(directory)
    with engine.lock, ExitStack() as opened:
        engine.come_to_rest(f"offload.load of {where}")
        with all_or_none(engine.ranks and engine.ranks.group):
            run, asked = read_run(where), f"asked to load {where}"
            if optimizer is None:
                run.pop("optimizer", None)
            else:
                check_run(run, optimizer, scheduler, asked)
            sets = sets_of(engine, model, run)
            backend = opened.enter_context(closing(aio.open_backend()))
            reader = opened.enter_context(closing(SetsReader(where, sets, backend)))
            check_sets(sets, reader.tensors, asked)
        reader.shared = engine.ranks is not None
        if scheduler is not None:
            scheduler.load_state_dict(decoded(run["scheduler"]))
        moved = opened.enter_context(progress(f"loading {where}", sets))

        def values(*of: Any) -> torch.Tensor:
            found = reader.values(*of)
            moved(found.nbytes)
            return found

        take = partial(take_over, engine, model, optimizer, run, sets, values)
        read_together(engine, reader, take)
        engine.commits.loaded()
    return decoded(run["user"])


def write_sets(directory: str, sets: Sets, parts: Parts, told: str, shard_bytes: int) -> None:
    """Write sets to a new directory; `parts` has all values in their order."""
    with ExitStack() as opened:
        backend = opened.enter_context(closing(aio.open_backend()))
        moved = opened.enter_context(progress(told, sets))
        writers = {
            prefix: opened.enter_context(
                closing(set_writer(directory, prefix, tensors, backend, shard_bytes))
            )
            for prefix, tensors in sets.items()
        }
        wanted = {prefix: next(writer) for prefix, writer in writers.items()}
        for prefix, name, part in parts:
            assert wanted[prefix] == name, f"{name}: out of order"
            content = bytes_of(part.cpu().contiguous())
            wanted[prefix] = writers[prefix].send(content)
            moved(content.size)
        assert not any(wanted.values()), f"{wanted}: missing"


# -- what there is ---------------------------------------------------------------------------------


def _engine_of(model: nn.Module, optimizer: Optimizer | None, scheduler: Any) -> Engine:
    engine = engine_of(model)
    engine.require_whole("offload.save or load")
    if optimizer is not None and getattr(optimizer, "engine", None) is not engine:
        raise ValueError(
            "asked for a model and its optimizer; found an optimizer that is not the one attach "
            "returned with this model; try that one, or None for the weights alone"
        )
    if optimizer is None and scheduler is not None:
        raise ValueError(
            "asked for a scheduler; found a scheduler and no optimizer, whose hyper-parameters go "
            "with it; give the optimizer that attach returned, or leave scheduler= out"
        )
    if isinstance(scheduler, type) or not (scheduler is None or hasattr(scheduler, "state_dict")):
        raise TypeError(
            f"asked for scheduler={reprlib.repr(scheduler)}; found no scheduler; give one that was "
            "made of the optimizer; data of your own goes in user="
        )
    of, mine = getattr(scheduler, "optimizer", None), getattr(optimizer, "param_groups", None)
    if isinstance(of, torch.optim.Optimizer) and of.param_groups is not mine:
        raise ValueError(
            f"asked for a {type(scheduler).__name__}; found that it is of another optimizer, whose "
            "learning rate it changes; make it of the one that attach took or returned"
        )
    return engine


def _parameters(engine: Engine) -> Iterator[tuple[tuple[int, int], Parameter]]:
    """All parameters in the order in which they lie, each with its unit and index."""
    for unit, spec in enumerate(engine.plan.profile.full):
        for index, one in enumerate(spec.parameters):
            yield (unit, index), one


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has, each once."""
    return buffers_in(buffer_dicts(model))


def buffer_dicts(model: nn.Module) -> BufferDicts:
    """Where the modules of a model keep their buffers, under all names; it keeps none alive."""
    modules = model.named_modules(remove_duplicate=False)
    return [(path, one._buffers, one._non_persistent_buffers_set) for path, one in modules]


def buffers_in(dicts: BufferDicts, once: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are there now and a state dict has, each `once`, or under all names."""
    seen = set[int]()
    for path, buffers, passing in dicts:
        for name, buffer in buffers.items():
            if buffer is not None and name not in passing and not (once and id(buffer) in seen):
                seen.add(id(buffer))
                yield f"{path}.{name}".lstrip("."), buffer


def states_of(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a run, by parameter that has stepped: its `steps`, and the dtypes of its `slots`."""
    return run["optimizer"]["states"] if "optimizer" in run else {}


def sets_of(engine: Engine, model: nn.Module, run: Mapping[str, Any]) -> Sets:
    """The tensors of the save of a run, in the order of `parts_of`."""
    found, states = Sets({WEIGHTS: {}}), states_of(run)
    for _, one in _parameters(engine):
        if not one.trainable and not run.get("frozen", True):
            continue
        slots = states[one.name]["slots"] if one.name in states else {}
        for prefix, dtype in {WEIGHTS: one.dtype, **slots}.items():
            shape = (items(prefix, one.elements),) if prefix.endswith(SCALE) else one.shape
            found.setdefault(prefix, {})[one.name] = Tensor(one.name, dtype, shape)
    refuse_extra_state(model)
    for name, buffer in buffers_of(model):
        found[WEIGHTS][name] = Tensor(name, name_of(buffer.dtype), tuple(buffer.shape))
    return found


def refuse_extra_state(model: nn.Module) -> None:
    """Raise ValueError where a module keeps a state that is no tensor."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"asked for a whole save; found that {path or 'the model'} keeps extra state, "
                "which may be any object; try torch.save(model.state_dict())"
            )


def optimizer_of(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """What a run goes on from of an optimizer, besides tensors: its rule, which states there are,
    and the groups."""
    states, found = optimizer.states, dict[str, dict[str, Any]]()
    for owner, one in _parameters(engine):
        if steps := states.steps.get(owner, 0):
            slots = _slots_of(optimizer, owner)
            if owner not in states.buffers:
                slots.pop("momentum_buffer", None)
            found[one.name] = {"steps": steps, "slots": slots}
    return {"rule": optimizer.rule, "states": found, "groups": _groups(optimizer)}


def _slots_of(optimizer: Optimizer, owner: tuple[int, int]) -> dict[str, str]:
    """The dtypes of a parameter's slots as a save has them."""
    fmt = optimizer.states.format(*owner)
    one = optimizer.engine.plan.profile.units[owner[0]].parameters[owner[1]]
    grouped = {slot.name: slot.dtype for slot in fmt.slots if slot.elements_per_item > 1}
    plain = {name: name_of(dtype) for name, dtype in plain_dtypes(fmt).items()}
    return plain | (grouped if one.trainable else {})


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer by the names of their parameters."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        names = [optimizer.name_of(one) for one in group["params"] if one.numel()]
        given = {name: value for name, value in group.items() if name != "params"}
        options = encoded(given, f"group {number}")
        found.append({"parameters": names, "options": options})
    return found


def options_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of each group of a save."""
    return [decoded(group["options"]) for group in run["optimizer"]["groups"]]


class SavedChunk(NamedTuple):
    """A chunk of a unit: what of parameters it has, and the values that have homes of their own,
    which weights of torch's own parameters have not."""

    pieces: list[Piece]
    weight: Value | None
    state: Value | None


def chunks_of(plan: Plan, sets: Sets | None = None, *, lasts: bool = False) -> Iterator[SavedChunk]:
    """All chunks, or those whose weights are in some sets, in the order of their parameters. Where
    what `lasts` on nvme is there, those that have other values, without states on nvme."""
    for unit, spec in enumerate(plan.profile.units):
        by_chunk = plan.profile.by_chunk(unit)
        there, states = (lasts and plan.home(k, unit).tier == "nvme" for k in ("weight", "state"))
        for at in range(len(spec.weight_chunks)):
            pieces = by_chunk.get(at, [])  # None in a part of a unit that is another rank's.
            weight = None if unit in plan.residents else Value("weight", unit, at)
            state = Value("state", unit, at) if at < len(spec.chunks) and not states else None
            if there and state is None:
                continue
            if sets is None or (pieces and plan.profile.name_of(pieces[0]) in sets[WEIGHTS]):
                yield SavedChunk(pieces, weight, state)


def _slots_in(sets: Sets, name: str) -> list[str]:
    """Those of the states of a parameter."""
    return [prefix for prefix, named in sets.items() if prefix != WEIGHTS and name in named]


def part_of(
    piece: Piece, content: torch.Tensor | None, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The values of a piece: in the content of its chunk, or in the parameters of its unit, where
    that has None."""
    one = parameters[piece.parameter]
    if content is not None:
        return content.view(one.dtype)[piece.chunk_start :][: piece.elements]
    return one.detach().view(-1)[piece.parameter_start : piece.parameter_stop]


def parts_of(engine: Engine, model: nn.Module, optimizer: Optimizer | None, sets: Sets) -> Parts:
    """What is here of the values of some sets, each part where it lies."""

    def read(chunk: SavedChunk) -> tuple[SavedChunk, list[torch.Tensor | None]]:
        wanted = chunk.weight, chunk.state if len(sets) > 1 else None
        return chunk, [one and engine.runner.read_home(one) for one in wanted]

    for chunk, (weights, record) in ahead(read, chunks_of(engine.plan, sets)):
        for piece in chunk.pieces:
            name = engine.plan.profile.name_of(piece)
            yield WEIGHTS, name, part_of(piece, weights, engine.units[piece.unit].parameters)
            slots = _slots_in(sets, name)
            if slots and optimizer is not None and record is not None:
                state = optimizer.states.part(piece, record, scaled=True)
                yield from ((slot, name, state[slot]) for slot in slots)
    for name, buffer in buffers_of(model):
        yield WEIGHTS, name, buffer.detach().reshape(-1)


@torch.no_grad()
def fill(
    runner: Runner,
    chunks: Iterable[SavedChunk],
    parameters: Sequence[Sequence[torch.Tensor]],
    values: Values,
    optimizer: Optimizer | None = None,
    sets: Sets | None = None,
) -> None:
    """Read chunks in order and put them home: weights, those of resident units into `parameters`,
    which has those of each unit, and of an optimizer the states that are in `sets`."""
    plan = runner.plan
    largest = max(size for unit in plan.profile.units for _, size in unit.weight_chunks)
    waiting = 0 if runner.store is None else AHEAD + 1
    buffers = itertools.cycle([host_tensor(largest) for _ in range(1 + waiting)])

    def put(chunk: SavedChunk, weights: torch.Tensor | None, parts: list[StatePart]) -> None:
        if chunk.weight is not None and weights is not None:
            runner.write_home(chunk.weight, weights)
        if chunk.state is not None and optimizer is not None and parts:
            optimizer.states.write_chunk(chunk.state, parts, len(parts))

    def puts() -> Iterator[Callable[[], None]]:
        for chunk in chunks:
            weights, parts = None, list[StatePart]()
            homes = [plan.home(v.kind, v.unit).tier for v in chunk[1:] if v is not None]
            if chunk.weight is not None:
                weights = next(buffers)[: runner.memory.extent(chunk.weight)[1]].zero_()
            for piece in (part for one in chunk.pieces for part in one.parts(PART_ELEMENTS)):
                name = plan.profile.name_of(piece)
                first, count = plan.profile.element(piece), piece.elements
                there = part_of(piece, weights, parameters[piece.unit])
                there.copy_(values(WEIGHTS, name, first, count))
                slots = _slots_in(sets or {}, name) if chunk.state is not None else []
                given = {k: values(k, name, items(k, first), items(k, count)) for k in slots}
                parts.append((piece, given))
                if "nvme" not in homes:  # Chunks are large there, and written where they lie.
                    put(chunk, None, parts)
                    parts.clear()
            if "nvme" in homes and "device" not in homes:
                yield partial(put, chunk, weights, parts)
            else:
                put(chunk, weights, parts)

    for _ in ahead(lambda put: put(), puts()):
        pass  # What is on nvme is written while the next is read.


@torch.no_grad()
def take_over(
    engine: Engine,
    model: nn.Module,
    optimizer: Optimizer | None,
    run: Mapping[str, Any],
    sets: Sets,
    values: Values,
    *,
    lasts: bool = False,
) -> None:
    """Go on from a run that `check_run` and `check_sets` let pass: weights and buffers, and with an
    optimizer its states, step numbers and hyper-parameters, and the random numbers. What `lasts` on
    nvme is there."""
    with engine.runner.once():
        for unit in engine.units:
            if unit.index not in engine.residents:
                engine.weights_changed(unit.index)
            count_change(unit.parameters)
        parameters = [unit.parameters for unit in engine.units]
        chunks = chunks_of(engine.plan, sets, lasts=lasts)
        fill(engine.runner, chunks, parameters, values, optimizer, sets)
        for name, buffer in buffers_of(model):
            buffer.copy_(values(WEIGHTS, name, 0, buffer.numel()).view(buffer.shape))
        if optimizer is None:
            return
        for owner, parameter in _parameters(engine):
            saved = states_of(run).get(parameter.name, {"steps": 0, "slots": {}})
            optimizer.states.count(owner, saved["steps"], saved["slots"])
        engine.steps = run["step"]
        if engine.ranks is not None:
            engine.ranks.group.step = engine.steps
        optimizer.take_options(options_of(run))
        rank = 0 if engine.ranks is None else engine.ranks.group.rank
        random = run.get("random_of_ranks", [run["random"]] if "random" in run else [])
        for one in random[rank : rank + 1]:  # None in what was converted.
            set_random_state(one, engine.runner.device.torch_device)


# -- whether it fits -------------------------------------------------------------------------------


def check_sets(sets: Sets, found: Sets, asked: str) -> None:
    """Refuse sets that have other tensors than those wanted."""
    for prefix, wanted in sets.items():
        there = found[prefix]
        other = {
            "missing": wanted.keys() - there.keys(),
            "unexpected": there.keys() - wanted.keys(),
            "of another dtype or shape": {
                f"{name} ({there[name].dtype} {there[name].shape}, here {one.dtype} {one.shape})"
                for name, one in wanted.items()
                if there.get(name, one) != one
            },
        }
        told = [
            f"{len(v)} {k}: {', '.join(map(shown, sorted(v)[:3]))}" for k, v in other.items() if v
        ]
        if told:
            raise ValueError(
                f"{asked}; found other tensors in the set {prefix} than the model has: "
                f"{'; '.join(told)}; likely it is of another model: build that one, or name "
                "another directory; nothing was changed"
            )


def check_run(run: Mapping[str, Any], optimizer: Optimizer, scheduler: Any, asked: str) -> None:
    """Refuse a run that cannot go on with this optimizer."""
    saved = run.get("optimizer")
    alone = "load(model, None, ...) takes the weights of a save alone (`offload convert` writes a "
    alone += "durable run as one)"
    if saved is None:
        raise ValueError(f"{asked}; found a save of weights alone; {alone}")
    if ("scheduler" in run) != (scheduler is not None):
        raise ValueError(
            f"{asked}; found a scheduler in the save; give scheduler="
            if "scheduler" in run
            else f"{asked}; found no scheduler in the save; leave scheduler= out (of a durable "
            "run it is in the user data, which load returns)"
        )
    if saved["rule"] != optimizer.rule:
        raise ValueError(
            f"{asked}; found states of {saved['rule']}, this optimizer's are of "
            f"{optimizer.rule}; {alone}"
        )
    theirs, mine = (
        [set(group["parameters"]) for group in groups]
        for groups in (saved["groups"], _groups(optimizer))
    )
    if theirs != mine:
        raise ValueError(
            f"{asked}; found groups of {[*map(len, theirs)]} parameters, this optimizer has "
            f"{[*map(len, mine)]}, or others in them; build it as it was then; {alone}"
        )
    try:
        optimizer.check_options(options_of(run))
    except TypeError as error:
        raise ValueError(f"{asked}; found options that are none: {error}") from error
    frozen = {one.name for _, one in _parameters(optimizer.engine) if not one.trainable}
    if lost := sorted(frozen & saved["states"].keys()):
        raise ValueError(
            f"{asked}; found states of {', '.join(lost[:3])}, frozen when the model was "
            "attached; attach with it trained, load, and freeze it then"
        )
    rounded = False
    for owner, one in _parameters(optimizer.engine):
        if one.name not in saved["states"]:
            continue
        both = saved["states"][one.name]["slots"], _slots_of(optimizer, owner)
        there, slots = (
            {name: dtype for name, dtype in of.items() if not name.endswith(SCALE)} for of in both
        )
        rounded |= len(both[0]) == len(there) and len(both[1]) > len(slots)
        if slots.keys() - there.keys() - {"momentum_buffer"} or there.items() - slots.items():
            raise ValueError(
                f"{asked}; found a state of {one.name} with {shown(there)}, here it has {slots}: "
                f"likely the parameter is of {one.dtype} and was of another dtype or shape; {alone}"
            )
    if rounded:
        warn_user(
            f"{asked}; found moments in float32, of which Config(states='compact') keeps a byte "
            "each from now on: states='exact' goes on with the same bits"
        )


@contextmanager
def progress(what: str, sets: Sets) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, which stays with the time it took; is told of bytes moved."""
    total = sum(one.bytes for tensors in sets.values() for one in tensors.values())
    columns = "{task.description}", BarColumn(), DownloadColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
