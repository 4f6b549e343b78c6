"""`offload doctor`: what this machine has and what is missing, one fix per line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro
from rich.table import Table
from rich.text import Text

import aio
from offload.cli import EXIT_FAILED, findings, findings_drives, findings_host
from offload.cli.console import Output
from offload.cli.findings import Finding
from offload.cli.flags import Flags
from offload.config import format_bytes
from offload.machine import (
    nvme_free_bytes,
    profile_path,
    ranks_on_host,
    saved_speeds,
    unreadable_speeds,
)

_ROOT = Path("/")
_Paths = tyro.conf.arg(
    metavar="[PATH ...]", help_behavior_hint="", help="Directories for the nvme tier. Default: all."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Doctor:
    """Look at this machine: what training has here, what it lacks, and one fix for each. Takes
    some seconds, most of them to import torch; leaves nothing behind. The exit status is 0 where
    training can start and 1 where it cannot.
    """

    paths: tyro.conf.Positional[Annotated[tuple[str, ...], _Paths]] = ()

    json: bool = False
    """One JSON object on standard output, nothing else there."""


FLAGS = Flags(
    kind=Doctor,
    command="offload doctor",
    known=tuple(field.name for field in dataclasses.fields(Doctor) if field.name != "paths"),
)
"""The flags of `offload doctor`."""

_STYLES = {"ok": "green", "note": "yellow", "stop": "bold red"}


def command(arguments: Sequence[str]) -> int:
    """Shows what was found; 0 where training can start, 1 where it cannot.

    Raises:
        BadInput: the arguments.
    """
    asked = FLAGS.parse(arguments)
    console = Output(stderr=asked.json)
    seen: list[Finding] = []
    for finding in _findings(asked.paths):
        seen.append(finding)
        if not asked.json:
            show(console, finding)
    ready = findings.ready(seen)
    notes = sum(finding.level == "note" for finding in seen)
    if asked.json:
        told = {"ready": ready, "findings": [asdict(finding) for finding in seen]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        more = f"; {notes} note{'s' if notes > 1 else ''} above may make it faster" if notes else ""
        verdict = f"training can start{more}" if ready else "training cannot start: see stop above"
        console.sentence(verdict)
    return 0 if ready else EXIT_FAILED


def show(console: Output, finding: Finding) -> None:
    """One finding: a line, which a terminal folds under its own beginning."""
    told = Text(f"{finding.subject}: ", style="bold").append(Text(finding.found, style="not bold"))
    if finding.fix:
        told.append(Text(f". Fix: {finding.fix}", style="not bold italic"))
    mark = Text(f"{finding.level:<4}", style=_STYLES[finding.level])
    if not console.is_terminal:
        console.print(mark, told, highlight=False, soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_row(mark, told)
    console.print(grid, highlight=False)


def _findings(paths: Sequence[str]) -> Iterator[Finding]:
    """All that is found, as it is found."""
    yield findings.python(sys.version_info[:3], sys.platform)
    yield findings.packages(
        [name for name in findings.PACKAGES if importlib.util.find_spec(name) is None]
    )
    ranks = 1
    try:
        ranks = ranks_on_host()
    except ValueError as error:
        yield findings.refused("ranks", error, "unset LOCAL_WORLD_SIZE")
    torch, told = _torch()
    yield told
    accelerator = _accelerator(torch) if torch else findings.Accelerator(name=None)
    if torch:
        yield findings.accelerator(accelerator, _ROOT, os.environ, format_bytes)
        yield _kernels()
    yield from findings.file_backends(aio.probe(), os.environ)
    yield findings_host.memory(_ROOT, ranks)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    yield findings_host.memlock(
        None if unlimited else limit, _ROOT, registers=accelerator.registers
    )
    yield findings_host.aio_requests(_ROOT)
    yield findings_host.huge_pages(_ROOT)
    allowed = psutil.Process().cpu_affinity() if sys.platform == "linux" else []
    allowed = allowed or list(range(os.cpu_count() or 1))
    yield findings_host.processors(allowed, os.cpu_count() or 1, _quota() if torch else None)
    yield findings_host.numa(_ROOT, allowed)
    yield findings_host.governor(_ROOT)
    yield from findings_host.threads(os.environ, len(allowed), ranks)
    yield _speeds()
    usable = []
    for tried in _tried(paths):
        told = findings_drives.directory(tried, findings_drives.mounts(_ROOT), _ROOT)
        usable += [tried.path] if not tried.error else []
        yield told
    if torch:
        yield _trained(torch, usable[:1])


def _speeds() -> Finding:
    try:
        kept = profile_path()
    except OSError as error:
        told = f"{error.strerror}; what `offload bench nvme` measures is not kept"
        return Finding("speeds", "note", told, "OFFLOAD_MACHINE=FILE, somewhere you can write")
    wrong = unreadable_speeds()
    return findings.kept_speeds(
        kept, findings.may_write(kept), wrong, {} if wrong else saved_speeds()
    )


def _torch() -> tuple[Any, Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, findings.torch(None, " ".join(str(error).split()))
    return torch, findings.torch(str(torch.__version__))


def _accelerator(torch: Any) -> findings.Accelerator:
    """What torch says of accelerators; nothing that is wrong with one raises."""
    from offload import driver
    from offload.device import compute_device

    built = driver.built_for()
    try:
        device = compute_device()
        if not device.is_host:
            kind = device.torch_device.type
            return findings.Accelerator(
                name=getattr(torch, kind).get_device_name(device.torch_device),
                free_bytes=device.free_bytes() or 0,
                built_for=built or kind,
                registers=device.driver is not None and device.driver.registers,
            )
        if built:
            driver.initialize()
    except (RuntimeError, AssertionError, AttributeError) as error:
        told = " ".join(str(error).split())
        return findings.Accelerator(name=None, built_for=built, error=told)
    return findings.Accelerator(name=None, built_for=built)


def _quota() -> float | None:
    from cpu_adam.processors import processor_quota

    return processor_quota(_ROOT)


def _kernels() -> Finding:
    import warnings

    from cpu_adam import choice

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            found = choice.kernel()
        except ValueError as error:
            return findings.refused("update", error, "unset the variable that it names")
    return findings.kernels(found.name, found.reason, choice.compiler())


def _tried(paths: Sequence[str]) -> Iterator[findings_drives.Tried]:
    """Every directory with what came of making a scratch file there."""
    mounted = findings_drives.mounts(_ROOT)
    found = [os.curdir] + [
        at
        for at in findings_drives.candidates(mounted)
        if os.path.isdir(at) and os.stat(at).st_dev != os.stat(os.curdir).st_dev
    ]
    with contextlib.closing(aio.open_backend("python", depth=1)) as backend:
        for path in paths or found:
            shown, asked = os.path.abspath(path), bool(paths)
            try:
                free = nvme_free_bytes((path,), asked="it")
                with aio.create_scratch(path, aio.ALIGN_BYTES, backend) as file:
                    direct, notice = file.direct, file.notice
            except OSError as error:
                why = str(error.strerror or error)
                yield findings_drives.Tried(path=shown, asked=asked, error=why)
                continue
            yield findings_drives.Tried(
                path=shown, asked=asked, direct=direct, notice=notice, free_bytes=free
            )


def _trained(torch: Any, paths: Sequence[str]) -> Finding:
    """What comes of a training step of a very small model, its states where they would be."""
    import warnings

    import offload

    tier: Any = "nvme" if paths else "cpu"
    try:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        config = offload.Config(
            params="cpu", gradients="cpu", optimizer=tier, nvme_path=tuple(paths)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # A finding of its own says it.
            model, optimizer = offload.attach(model, optimizer, config)
        with optimizer.engine:
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.engine.settle()
    except Exception as error:
        return findings.untrained(error, paths)
    told = f"taken with its states in {tier}, by a very small model"
    return Finding("a step", "ok", told)
