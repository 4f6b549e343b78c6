"""`offload doctor`: what this machine has and what is missing, one fix per line."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro
from rich.text import Text

import aio
from aio.system import COPY_ON_WRITE
from offload.cli import EXIT_FAILED, findings
from offload.cli.console import Output, emit, warnings_of
from offload.cli.findings import Finding
from offload.cli.flags import AsJson, parse_flags
from offload.planning.machine import (
    host_free_bytes,
    mount_point,
    nvme_free_bytes,
    ranks_on_host,
    saved_speeds,
)
from offload.planning.tiers import format_bytes

_ROOT = Path("/")
_Paths = tyro.conf.arg(
    metavar="[PATH ...]",
    help_behavior_hint="",
    help="Directories for the nvme tier. Default: this one.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Doctor(AsJson):
    """Look at this machine: what training has here, what it lacks, and one fix for each. Takes
    some seconds, most of them to import torch; leaves nothing behind. The exit status is 0 where
    training can start and 1 where it cannot.
    """

    paths: tyro.conf.Positional[Annotated[tuple[str, ...], _Paths]] = ()


_STYLES = {"ok": "green", "note": "yellow", "stop": "bold red"}


def command(arguments: Sequence[str]) -> int:
    """Shows what was found; 0 where training can start, 1 where it cannot."""
    asked = parse_flags(Doctor, "offload doctor", arguments)
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
        emit(told)
    else:
        more = f"; {notes} note{'s' if notes > 1 else ''} above may make it faster" if notes else ""
        verdict = f"training can start{more}" if ready else "training cannot start: see stop above"
        console.sentence(verdict)
    return 0 if ready else EXIT_FAILED


def show(console: Output, finding: Finding) -> None:
    """One finding, in a line."""
    told = Text(f"{finding.level:<4}", style=_STYLES[finding.level])
    told.append(Text(f" {finding.subject}: ", style="bold")).append(finding.found)
    if finding.fix:
        told.append(f". Fix: {finding.fix}", style="italic")
    console.print(told, highlight=False, soft_wrap=True)


def _findings(paths: Sequence[str]) -> Iterator[Finding]:
    """All that is found, as it is found."""
    yield Finding("Python", "ok", platform.python_version())
    ranks = 1
    try:
        ranks = ranks_on_host()
    except ValueError as error:
        yield findings.refused("ranks", error, "unset LOCAL_WORLD_SIZE")
    torch, told = _torch()
    yield told
    if torch:
        yield _accelerator()
        yield _kernels()
    yield findings.file_backends(aio.probe(), os.environ)
    yield findings.memory(host_free_bytes(), psutil.virtual_memory().total, ranks)
    allowed = len(os.sched_getaffinity(0))
    yield findings.processors(allowed, os.cpu_count() or 1, _quota() if torch else None)
    yield findings.threads(os.environ, allowed, ranks)
    yield findings.speeds(*saved_speeds())
    tried = [_directory(path, asked=bool(paths)) for path in paths or [os.curdir]]
    yield from (finding for finding, _ in tried)
    if torch:
        yield _trained(torch, [path for _, path in tried if path][:1])


def _torch() -> tuple[Any, Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, findings.torch(None, " ".join(str(error).split()))
    return torch, findings.torch(str(torch.__version__))


def _accelerator() -> Finding:
    """What torch says of accelerators; nothing that is wrong with one raises."""
    from offload.runtime import device as driver

    built, told, error = driver.built_for(), "", ""
    try:
        device = driver.compute_device()
        if not device.is_host:
            told = f"{device.name()}, {format_bytes(device.free_bytes() or 0)} free"
        elif built:
            driver.initialize()
    except (RuntimeError, AssertionError, AttributeError) as raised:
        error = " ".join(str(raised).split())
    return findings.accelerator(told, built, error, _ROOT, os.environ)


def _quota() -> float | None:
    from cpu_adam.processors import processor_quota

    return processor_quota(_ROOT)


def _kernels() -> Finding:
    from cpu_adam import choice

    try:
        found, _ = warnings_of(choice.kernel)
    except ValueError as error:
        return findings.refused("update", error, "unset the variable that it names")
    return findings.kernels(found.name, found.reason)


def _directory(path: str, *, asked: bool) -> tuple[Finding, str]:
    """What comes of making a scratch file in a directory; and the directory, if it can be used."""
    shown = os.path.abspath(path)
    try:
        free = nvme_free_bytes((path,), asked="it")
        with (
            contextlib.closing(aio.open_backend("python", depth=1)) as backend,
            aio.create_scratch(path, aio.ALIGN_BYTES, backend) as file,
        ):
            kind, direct = backend.io.file_system(file.fd), file.direct
            copies = kind in COPY_ON_WRITE and file.notice is not None
    except OSError as error:
        return findings.unusable(shown, str(error.strerror or error), asked), ""
    mount = mount_point(path)
    found = findings.directory(shown, kind, free, mount, direct=direct, copies=copies, asked=asked)
    return found, shown


def _trained(torch: Any, paths: Sequence[str]) -> Finding:
    """What comes of a training step of a very small model, its states where they would be."""
    import offload

    tier: Any = "nvme" if paths else "cpu"
    try:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        config = offload.Config(
            params="cpu", gradients="cpu", optimizer=tier, nvme_path=tuple(paths)
        )
        # What it warns of is a finding of its own.
        (model, optimizer), _ = warnings_of(lambda: offload.attach(model, optimizer, config))
        with optimizer.engine:
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.engine.settle()
    except Exception as error:
        fix = "take one with offload train and OFFLOAD_TRACEBACK=1, which shows where it ends"
        return findings.refused("a step", error, fix)
    told = f"taken with its states in {tier}, by a very small model"
    return Finding("a step", "ok", told)
