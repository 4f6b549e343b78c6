"""Files that others have changed: an error of one sentence, and no memory for what they say.

`OFFLOAD_MUTATIONS=100000` tries so many, a quarter of them in the fast tier; each is made from its
number alone.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aio
import offload
from cpu_adam import crc32c
from offload.checkpoint.directory import RUN, read_run
from offload.checkpoint.schema import Each, Maybe, check, count, text
from offload.checkpoint.shards import SetsReader
from tests.training import Net, Run, attached, plain, result_of, some_fast

MUTATIONS = int(os.environ.get("OFFLOAD_MUTATIONS", "2000"))
WINDOW_BYTES = 256 << 20
DEEP = "[" * 50_000 + "]" * 50_000
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1 << 31, (1 << 62) + 1, 1 << 64, 1 << 200, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "../x", "/dev/zero", "\0", "\ud800", "float32", "step"),
    *([], {}, [[]], {"a": 1}, [None] * 50, "DEEP", {"__tuple__": 5}, {"__items__": [[[], 1]]}),
    *({"__tuple__": [1]}, {"__items__": 7}, {"__tensor__": ["save", 1]}, {"__tensor__": 3}),
    *([1, 2], ["0"], "a" * 300, "a\nb"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    options: dict[str, Any] = {"build": lambda: Net(layers=1, width=8)}
    with attached(("cpu", "cpu", "cpu"), tmp_path_factory.mktemp("nvme"), **options) as one:
        plain(one, 0)
        yield one


@pytest.fixture(scope="module")
def path(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saves") / "save"
    offload.save(run.model, run.optimizer, directory, user={"epoch": 1, 2: (3,)})
    return directory


@contextmanager
def little_memory() -> Iterator[None]:
    """Nothing is given that goes beyond the window."""
    with open("/proc/self/statm", encoding="utf-8") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + WINDOW_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def place(value: Any, draw: random.Random) -> tuple[Any, Any]:
    """A container somewhere in a value of JSON, and one of its keys."""
    while True:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not (isinstance(value[key], (list, dict)) and value[key] and draw.random() < 0.8):
            return value, key
        value = value[key]


def changed(text: bytes, draw: random.Random) -> str:
    """JSON with something in it that is otherwise."""
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        container, key = place(value, draw)
        what = draw.randrange(4)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[draw.choice(("x", "", "__tuple__", "params", "../y", "a\nb"))] = container[
                key
            ]
        else:
            container[key] = copy.deepcopy(draw.choice(VALUES))
        if not value:
            break
    return json.dumps(value).replace('"DEEP"', DEEP)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes, some of which are others, gone or twice."""
    found = bytearray(content)
    at = draw.randrange(len(found))
    what = draw.randrange(4)
    if what == 0:
        found[at] ^= 1 << draw.randrange(8)
    elif what == 1:
        del found[at : at + draw.choice((1, 8, len(found)))]
    elif what == 2:
        found[at:at] = draw.choice((b"\0", b'"', b"[" * 20_000, found[: draw.randrange(50)]))
    else:
        found[at : at + 8] = draw.randbytes(8)
    return bytes(found)


def sealed(run_text: str) -> bytes:
    """A `run.json` with the checksum that goes with it."""
    try:
        plain_text = json.dumps(json.loads(run_text), separators=(",", ":"), sort_keys=True)
    except RecursionError:
        plain_text = run_text
    crc = crc32c(np.frombuffer(plain_text.encode(), np.uint8), 0)
    return f'{{"crc32c": "{crc:08x}", "run": {run_text}}}'.encode()


def overwrite(file: Path, content: bytes) -> None:
    """In place: some file systems flush a file that was cut to nothing first."""
    with open(file, "r+b") as opened:
        opened.write(content)
        opened.truncate()


def mutated(path: Path, draw: random.Random) -> Path:
    """Damages one file of a save, and says which."""
    kind = draw.choice(
        ("run", "run", "run bytes", "index", "index bytes", "header", "header bytes")
    )
    index = draw.choice(("model", "residue", "exp_avg"))
    if kind.startswith("run"):
        file = path / RUN
        content = file.read_bytes()
        new = sealed(changed(json.dumps(json.loads(content)["run"]).encode(), draw))
    elif kind.startswith("index"):
        file = path / f"{index}.safetensors.index.json"
        content = file.read_bytes()
        new = changed(content, draw).encode()
    else:
        file = path / f"{index}-00001-of-00001.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = changed(content[8 : 8 + length], draw).encode()
        new = len(header).to_bytes(8, "little") + header + content[8 + length :]
    overwrite(file, damaged(content, draw) if kind.endswith("bytes") else new)
    return file


def is_refused(call: Callable[[], object], told: str) -> bool:
    """Whether a call raises: then what users can cause, in one sentence, and not for memory."""
    error = None
    try:
        call()
    except BaseException as raised:
        error = raised.with_traceback(None)  # Its frames have memory.
    told = f"{told}: {error!r:.1000}"
    assert error is None or isinstance(error, (OSError, ValueError)), told
    assert "\n" not in str(error)[:1_000] == str(error), told
    assert getattr(error, "errno", None) != errno.ENOMEM, told
    return error is not None


def read_headers(path: Path, prefix: str, backend: aio.Backend) -> None:
    SetsReader(str(path), [prefix], backend).close()


@pytest.mark.parametrize("count", some_fast([MUTATIONS // 4, MUTATIONS]))
def test_mutated_files_are_refused_in_a_sentence(run: Run, path: Path, count: int) -> None:
    good = {one: one.read_bytes() for one in path.iterdir()}
    refused = 0
    with closing(aio.open_backend()) as backend, little_memory():
        for seed in range(count):
            file = mutated(path, random.Random(seed))
            read = partial(offload.load, run.model, run.optimizer, path)
            if file.name != RUN:
                read = partial(read_headers, path, re.split(r"[-.]", file.name)[0], backend)
            refused += is_refused(read, f"mutation {seed} of {file.name}")
            overwrite(file, good[file])
    assert refused > 0.8 * count
    offload.load(run.model, run.optimizer, path)  # The engine has not ended.


def refused(path: Path, change: Any) -> str:
    """What `read_run` says of a run that was changed and has the right checksum."""
    content = (path / RUN).read_bytes()
    run = json.loads(content)["run"]
    change(run)
    (path / RUN).write_bytes(sealed(json.dumps(run)))
    try:
        with pytest.raises(ValueError) as error:
            read_run(str(path))
    finally:
        (path / RUN).write_bytes(content)
    return str(error.value).removeprefix(str(path / RUN))


def test_each_field_of_a_run_is_named_where_it_is_wrong(path: Path) -> None:
    name = "blocks.0.up.weight"
    deep: Any = [0]  # From Python 3.12 on a level takes a single frame.
    for _ in range(900 if sys.version_info < (3, 12) else 990):
        deep = [deep]
    changes: dict[str, Any] = {
        "has no step": lambda run: run.pop("step"),
        "has 'more', which": lambda run: run.update(more=1),
        ".step is -1; expected a whole number": lambda run: run.update(step=-1),
        ".step is True": lambda run: run.update(step=True),
        ".step is nan": lambda run: run.update(step=float("nan")),
        ".step is 4611686018427387905": lambda run: run.update(step=(1 << 62) + 1),
        ".user is": lambda run: run.update(user={"__items__": [[[], 1]]}),
        ".user is [[[": lambda run: run.update(user=deep),
        f".optimizer.states['{name}'].steps is '1'": lambda run: run["optimizer"]["states"][
            name
        ].update(steps="1"),
        "a key of": lambda run: run["optimizer"]["states"][name]["slots"].update({"../x": "int8"}),
        "a state of 'y', which is in no group": lambda run: run["optimizer"]["states"].update(
            y={"steps": 1, "slots": {}}
        ),
        ".random.torch is 'AA=='": lambda run: run["random"].update(torch="AA=="),
        ".random.numpy is": lambda run: run["random"]["numpy"].__setitem__(2, 625),
        ".random.python is": lambda run: run["random"].update(python=[3]),
        ".optimizer.groups[0].options is": lambda run: run["optimizer"]["groups"][0][
            "options"
        ].update(params=[]),
        "is of format 2, not 1": lambda run: run.update(format=2),
    }
    for told, change in changes.items():
        assert told in refused(path, change), told


def test_states_of_another_form_are_refused(run: Run, path: Path) -> None:
    """A slot that the engine would take for zeros, or does not know."""
    content = (path / RUN).read_bytes()
    before = result_of(run)
    for slots in ({"exp_avg": "int16"}, {"exp_avg_sq": "float32"}, {"x": "float32"}):
        found = json.loads(content)["run"]
        found["optimizer"]["states"]["norm.bias"]["slots"].update(slots)
        if "exp_avg_sq" in slots:
            del found["optimizer"]["states"]["norm.bias"]["slots"]["residue"]
        (path / RUN).write_bytes(sealed(json.dumps(found)))
        with pytest.raises(ValueError, match=r"found a state of norm.bias"):
            offload.load(run.model, run.optimizer, path)
    (path / RUN).write_bytes(content)
    assert result_of(run).losses == before.losses


def test_a_schema_says_where_and_what_was_expected() -> None:
    schema = {"a": [count], "b?": Each(text, count), "c?": (text, Maybe(count))}
    check({"a": [1, 2]}, schema, "it")
    check({"a": [], "b": {"x": 0}, "c": ["x", None]}, schema, "it")
    for told, value in {
        "it is 5; expected a dict": 5,
        "it has no a": {"b": {}},
        "it has 'd', which this release does not know": {"a": [], "d": 1},
        "it.c is ['x']; expected a list of 2": {"a": [], "c": ["x"]},
        "it.c[1] is 'y'; expected a whole number from 0 to 2^62": {"a": [], "c": ["x", "y"]},
        "it.a is {}; expected a list": {"a": {}},
        "it.a[1] is -1; expected a whole number from 0 to 2^62": {"a": [1, -1]},
        "it.b['x'] is None; expected a whole number from 0 to 2^62": {"a": [], "b": {"x": None}},
    }.items():
        with pytest.raises(ValueError) as error:
            check(value, schema, "it")
        assert str(error.value) == told
