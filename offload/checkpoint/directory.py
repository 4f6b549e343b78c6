"""A directory that is there whole or not at all, and what a training run has besides tensors."""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch

from aio.errors import naming
from cpu_adam import crc32c
from offload.checkpoint.schema import Each, accepted, check, count, flag, shown, text
from offload.checkpoint.shards import NAMES, checksum, head_of, index_of, read_json, write_file

RUN = "run.json"
FORMAT = 1

_OF_SAVES = re.compile(r"run\.json|[a-z_]+(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Names of its files."""

_AT_FDCWD, _EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Of kernels, file systems and seccomp filters that have no such call."""


@contextmanager
def whole_directory(path: str) -> Iterator[str]:
    """A new directory beside `path`, to write in, which takes its place once all of it is flushed.

    On an error it is removed, and what was at `path` is as it was.

    Raises:
        FileExistsError: there is something at `path` that `offload.save` has not written, or in it.
        OSError: the directory cannot be made, flushed or renamed.
    """
    path = os.path.abspath(path)
    parent, name = os.path.split(path)
    taken = os.path.lexists(path)
    if taken and (os.path.islink(path) or not os.path.isdir(path)):
        raise FileExistsError(
            errno.EEXIST, "asked to save there; found a file or a link; try a new name", path
        )
    if taken and os.listdir(path) and not os.path.exists(os.path.join(path, RUN)):
        raise FileExistsError(
            errno.EEXIST,
            f"asked to save there; found files, and no {RUN}: likely another's; try a new name",
            path,
        )
    for other in sorted(os.listdir(path)) if taken else ():
        if not _OF_SAVES.fullmatch(other) or not os.path.isfile(os.path.join(path, other)):
            told = f"asked to save there again; found {other}, of no save, which would be lost"
            raise FileExistsError(errno.EEXIST, f"{told}; move it, or save elsewhere", path)
    if os.path.ismount(path):
        told = "asked to save there; found a mount point, in whose place nothing can be put"
        raise FileExistsError(errno.EEXIST, f"{told}; give a directory in it", path)
    os.makedirs(parent, exist_ok=True)
    for other in os.listdir(parent):  # Of processes that were killed in the middle.
        head, _, pid = other.removesuffix(".old").rpartition(".")
        if head == f".{name}.new" and pid.isdigit() and not psutil.pid_exists(int(pid)):
            if other.endswith(".old") and not os.path.lexists(path):
                os.rename(os.path.join(parent, other), path)  # Between the names of two saves.
                taken = True
            shutil.rmtree(os.path.join(parent, other), ignore_errors=True)
    new = os.path.join(parent, f".{name}.new.{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    with naming(f"save to {path}", parent):
        os.mkdir(new, 0o700)
    try:
        yield new
        flush(new)
        if taken:
            _exchange(new, path)
        else:
            os.rename(new, path)
        flush(parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def flush(directory: str) -> None:
    """Return when the names in a directory are on the drive."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming("flush", directory):
            os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: str, old: str) -> None:
    """Let two directories change names at once; where the file system cannot, one by one."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = [os.fsencode(one) for one in (new, old)]
    if call is not None:
        if not call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE):
            return
        if (code := ctypes.get_errno()) not in _NO_EXCHANGE:
            raise OSError(code, os.strerror(code), new, None, old)
    aside = new + ".old"
    try:
        os.rename(old, aside)
        os.rename(new, old)
    except BaseException:
        if os.path.lexists(old):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(aside, old)
        raise
    os.rename(aside, new)


# -- what a run has besides tensors ----------------------------------------------------------------


def read_run(directory: str) -> dict[str, Any]:
    """What a save has in `run.json`; refused where it is not there, or was changed."""
    path = os.path.join(directory, RUN)
    try:
        run = read_checked(path, FORMAT)
    except FileNotFoundError as error:
        told = "asked to load a save; found none: likely another directory, or one never finished"
        if os.path.exists(os.path.join(directory, "commit.json")):
            told = "asked to load a save; found a durable run; try attach with Config(durable=...)"
            told += ", or `offload convert`, which writes it as a save"
        elif os.path.exists(os.path.join(directory, "config.json")):
            told = "asked to load a save; found a folder of Hugging Face; try from_pretrained"
        raise FileNotFoundError(errno.ENOENT, told, path) from error
    check_fields(run, path)
    for prefix, crc in run.pop("sets", {}).items():
        head = head_of(directory, prefix)
        if os.path.exists(head) and (not head.endswith(".json") or crc != _crc_of(head)):
            raise ValueError(
                f"{head}: of another save than the {RUN} beside it; likely something was exported "
                "or copied there, or the drive changed bits; load another checkpoint"
            )
    return run


def write_run(directory: str, run: Mapping[str, Any], prefixes: Iterable[str]) -> None:
    """Write the `run.json` of a save, whose sets are there: it tells them from those of others."""
    sets = {prefix: _crc_of(os.path.join(directory, index_of(prefix))) for prefix in prefixes}
    write_checked(os.path.join(directory, RUN), {**run, "sets": sets})


def _crc_of(path: str) -> str:
    with open(path, "rb") as file:
        return _crc(file.read())


def _crc(content: bytes) -> str:
    return f"{crc32c(np.frombuffer(content, np.uint8), 0):08x}"


def write_checked(path: str, run: Mapping[str, Any]) -> None:
    """A new file of JSON with its checksum, flushed to the drive."""
    text = _plain(run).encode()
    write_file(path, b'{"crc32c": "%b", "run": %b}\n' % (_crc(text).encode(), text))


def read_checked(path: str, format_: int) -> dict[str, Any]:
    """What `write_checked` wrote; refused where it was changed, or is of another format."""
    found = read_json(path)
    run = found.get("run")
    if not isinstance(run, dict) or found.keys() != {"crc32c", "run"}:
        raise ValueError(f"{path}: no record of a run")
    if found["crc32c"] != _crc(_plain(run).encode()):
        raise ValueError(
            f"{path}: checksum mismatch; likely it was edited, or the drive changed bits; load "
            "another checkpoint"
        )
    if run.get("format") != format_:
        raise ValueError(f"{path} is of format {shown(run.get('format'))}, not {format_}")
    return run


def check_fields(run: Any, where: str) -> None:
    """Refuse a run with a field that no save can have, by its name."""
    check(run, _RUN, where)
    saved = run.get("optimizer", {"groups": [], "states": {}})
    known = {name for group in saved["groups"] for name in group["parameters"]}
    if other := saved["states"].keys() - known:
        raise ValueError(f"{where} has a state of {shown(min(other))}, which is in no group")


def _plain(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), sort_keys=True)
    except RecursionError as error:
        raise ValueError("asked for data as JSON; found lists or dicts nested too deep") from error


def encoded(value: Any, what: str) -> Any:
    """A value as JSON has it, such that `decoded` gives an equal one of the same types; `what`
    names it where it has another one."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        items = [encoded(one, f"{what}[{at}]") for at, one in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, dict):
        found = {k: encoded(v, f"{what}[{k!r}]") for k, v in value.items()}
        if all(type(k) is str and not k.startswith("__") for k in found):
            return found
        return {"__items__": [[encoded(k, what), v] for k, v in found.items()]}
    if isinstance(value, torch.Tensor) and value.ndim == 0:  # A learning rate, mostly.
        return {"__tensor__": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"{what} is a {type(value).__name__}, and a save keeps data of JSON: None, bool, int, "
        "float, str, lists, tuples and dicts; put tensors in a file of your own"
    )


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(map(decoded, value["__tuple__"]))
    if value.keys() == {"__items__"}:
        return {decoded(k): decoded(v) for k, v in value["__items__"]}
    if value.keys() == {"__tensor__"}:
        (dtype, item), known = value["__tensor__"], {name: getattr(torch, name) for name in NAMES}
        return torch.tensor([item], dtype=known[dtype]).view(())
    return {k: decoded(v) for k, v in value.items()}


# -- random numbers --------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch, of the compute device, of numpy and of Python: what their next numbers come of."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [kind, [int(key) for key in keys], *rest],
        "python": encoded(random.getstate(), "the state of random"),
    }
    if device.type != "cpu":
        found["device"] = _text(torch.get_device_module(device).get_rng_state(device))
    return found


def set_random_state(found: Mapping[str, Any], device: torch.device) -> None:
    """Let the next numbers be those that came after `random_state`; that of a device which the run
    did not have stays."""
    torch.set_rng_state(_bytes(found["torch"]))
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    random.setstate(decoded(found["python"]))
    if device.type != "cpu" and "device" in found:
        torch.get_device_module(device).set_rng_state(_bytes(found["device"]), device)


def _take_numpy(found: Any) -> None:
    kind, keys, at, *rest = found
    if at not in range(len(keys) + 1):
        raise ValueError("numpy would read beyond its keys")
    np.random.RandomState().set_state((kind, np.array(keys, np.uint32), at, *rest))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# -- what a run can say ----------------------------------------------------------------------------


def _take_options(found: Any) -> None:
    options = decoded(found)
    if not isinstance(options, dict) or "params" in options or not all(map(text, options)):
        raise TypeError


def _word(value: Any) -> bool:
    """a word of small letters"""
    return text(value) and re.fullmatch("[a-z_]{1,40}", value) is not None


def _dtype(value: Any) -> bool:
    """a dtype that safetensors has"""
    return text(value) and value in NAMES


_DATA = accepted("data as `user` may be", decoded)
_STATE = {"steps": count, "slots": Each(_word, _dtype)}
_GROUP = {"parameters": [text], "options": accepted("options of a group", _take_options)}
_RANDOM = {
    "torch": accepted("a state of torch's", lambda v: torch.Generator().set_state(_bytes(v))),
    "device?": accepted("bytes in base64", _bytes),
    "numpy": accepted("a state of numpy's", _take_numpy),
    "python": accepted("a state of Python's", lambda v: random.Random().setstate(decoded(v))),
}
_RUN = {
    "format": count,
    "step": count,
    "user": _DATA,
    "frozen?": flag,
    "sets?": Each(_word, checksum),
    "scheduler?": _DATA,
    "random?": _RANDOM,
    "random_of_ranks?": [_RANDOM],
    "part?": {"number": count, "run": text, "ranks": count},
    "optimizer?": {"rule": _word, "groups": [_GROUP], "states": Each(text, _STATE)},
}
