"""Which kernel serves: the compiled one that suits this machine, or the reference in Python.

[Note: Choice]
The choice is made at the first use and holds for the process: the best kernel that was compiled and
that the processor can run, or the one that `CPU_ADAM_KERNEL` names. All give the same bits. Without
compiled kernels the reference serves, with one warning: an installation without a compiler is a
choice, one whose compiler failed a mistake that pip does not show. So it does on an x86 processor
of 2011 or before that lacks SSE4.1, as the least of the kernels has it.

Those of a CUDA device, with the same arithmetic, are text for its driver (`ptx`). Whoever has one
launches them: [Note: Launches] of src/device/table.cuh.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cpu_adam.formats import GROUP_ELEMENTS, SUM_BLOCK_ELEMENTS
from cpu_adam.processors import default_threads, threads_most
from cpu_adam.spans import ADDRESS_COLUMNS

KERNELS_VERSION = 4
"""Of the module of compiled kernels, as `src/module.cpp` has it."""
KERNEL_VARIABLE = "CPU_ADAM_KERNEL"
"""Environment variable: name of the kernel to use."""
KERNEL_NAMES = ("avx512", "avx2", "neon", "portable", "python")
"""Every kernel there is; `python` is the reference."""

SQUARES = "squares_of_blocks"
"""The device's entry that leaves the sum of squares of each leaf of a norm."""


def ptx() -> bytes:
    """The text of a device's kernels, in the PTX of CUDA 11.0, for compute capability 7.0 on."""
    return (Path(__file__).parent / "device.ptx").read_bytes()


def block_elements(entry: str) -> int:
    """How many elements a block of a device's kernel takes at a time: a grid needs no more."""
    whole = {"compact": 8 * GROUP_ELEMENTS, SQUARES: 8 * SUM_BLOCK_ELEMENTS}
    return whole.get(entry, 1024)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel that serves in this process."""

    name: str
    """One of `KERNEL_NAMES`."""
    reason: str
    """Why it is this one."""
    native: Any = None
    """The module of compiled kernels; None for the reference."""
    index: int = -1
    """Number of the kernel within that module."""


_lock = threading.Lock()
_kernel: Kernel | None = None
_threads: int | None = None  # as set by `set_threads`
_configured = False
_launching = False
_told_of_versions = False


def kernel() -> Kernel:
    """The kernel in use and why; chosen now if this is the first use.

    Raises ValueError where `CPU_ADAM_KERNEL` names one that does not exist or cannot run here.
    """
    global _kernel
    found = _kernel
    if found is None:
        with _lock:
            found = _kernel = _kernel or _chosen(os.environ.get(KERNEL_VARIABLE))
    return found


def available() -> tuple[str, ...]:
    """Names of the kernels that can run here, the best first; `python` is the last."""
    native = _loaded()[0]
    return (*(native.kernel_names() if native is not None else ()), "python")


@contextmanager
def forced(name: str) -> Iterator[Kernel]:
    """Use the named kernel within a `with` block, in all threads: for tests and benchmarks."""
    global _kernel
    before, _kernel = kernel(), _chosen(name)
    try:
        yield _kernel
    finally:
        _kernel = before


def require_version(module: ModuleType, version: int) -> None:
    """Refuse a compiled module of another version than the Python files that call it.

    An editable installation takes new Python with `git pull`, and new modules with `make` only.
    Raises ImportError; the first one is warned of, too.
    """
    global _told_of_versions
    found = getattr(module, "VERSION", 0)
    if found == version:
        return
    if not _told_of_versions:
        _told_of_versions = True
        warnings.warn(
            "asked for the compiled modules that belong to the Python files here; found others, "
            "of another version, which are not used, and all is slower; likely cause: the files "
            "are newer, as after git pull; try: make, or pip install -e . again",
            RuntimeWarning,
            stacklevel=2,
        )
    raise ImportError(f"{module.__name__} is of version {found}, not {version}: run make")


def compiler() -> str | None:
    """Path of the C++ compiler with which an installation would build the kernels, if any."""
    names = (os.environ.get("CXX", "").split()[:1], ["c++"], ["g++"], ["clang++"])
    found = (shutil.which(name) for name, *_ in filter(None, names))
    return next(filter(None, found), None)


def threads() -> int:
    """Number of threads that an update uses, the caller's included; 1 with the reference."""
    native = kernel().native
    return 1 if native is None else int(native.threads())


def set_threads(count: int | None) -> None:
    """Use `count` threads, the caller's included; None for the default of this machine.

    The default is `CPU_ADAM_THREADS`, or one per core that the process may use, by affinity, cgroup
    quota and ranks of the host. Results do not depend on it. A forked child has one thread. Raises
    ValueError for anything but a whole number from 1 to four per processor of the machine (or 64).
    """
    global _threads, _configured
    most = threads_most()
    if count is not None and (type(count) is not int or not 1 <= count <= most):
        raise ValueError(
            f"asked for the update's number of threads, a whole number from 1 to {most} on "
            f"this machine; found {count!r}; likely cause: a share of cores rounded down to "
            f"none, or not rounded; try: cpu_adam.set_threads(1)"
        )
    with _lock:
        _threads = count
        native, _ = _loaded()
        if native is not None:
            native.configure(count or default_threads(launching=_launching))
            _configured = True


def leave_launching_cores() -> None:
    """Leave cores to threads that launch work on a device, unless a number of threads was set.

    A launching thread that waits for a core leaves the device idle.
    """
    global _launching
    _launching = True
    set_threads(_threads)


def _loaded() -> tuple[ModuleType | None, str]:
    """The compiled kernels with their number of threads set, or None and why not."""
    global _configured
    try:
        found = importlib.import_module("cpu_adam._kernels")
        require_version(found, KERNELS_VERSION)
    except ImportError as error:
        return None, str(error)
    if not _configured:
        assert found.GROUP_ELEMENTS == GROUP_ELEMENTS
        assert found.SUM_BLOCK_ELEMENTS == SUM_BLOCK_ELEMENTS
        assert found.ADDRESS_COLUMNS == ADDRESS_COLUMNS
        found.configure(_threads or default_threads(launching=_launching))
        _configured = True
    return (found, "") if found.kernel_names() else (None, _TOO_OLD)


_TOO_OLD = "this processor lacks SSE4.1, which all compiled kernels need"
_REINSTALL = f"reinstall ({sys.executable} -m pip install -v -e . in a checkout)"


def _chosen(asked: str | None) -> Kernel:
    if asked == "python":
        return Kernel("python", "asked for")
    native, cause = _loaded()
    names = native.kernel_names() if native is not None else []
    if native is not None and not asked:
        return Kernel(names[0], "the best that this processor can run", native, 0)
    if asked is not None and asked in names:
        return Kernel(asked, "asked for", native, names.index(asked))
    if asked:
        raise ValueError(
            f"asked for the {asked} kernel by {KERNEL_VARIABLE}; found "
            f"{', '.join(names) or 'no compiled kernel'}; likely cause: "
            f"{cause or 'a typing error, or this processor cannot run it'}; try: one of those, or "
            f"leave it unset"
        )
    here = compiler()
    likely, remedy = "no C++ compiler when it was installed", _REINSTALL
    if cause == _TOO_OLD:
        likely = "an x86 processor of 2011 or before, or a virtual machine that plays one"
        remedy = "a newer one; for a virtual machine the host's own (-cpu host)"
    elif here is None:
        remedy = f"install g++, then run make in a checkout, or {_REINSTALL}"
    else:
        likely += f" ({here} is here now), or it failed"
        remedy += ", which shows its errors"
    warnings.warn(
        f"asked for the compiled update of cpu_adam; found only its Python reference, which gives "
        f"the same bits some ten times more slowly ({cause}); likely cause: {likely}; try: "
        f"{remedy}, or set {KERNEL_VARIABLE}=python to say that this is meant",
        RuntimeWarning,
        stacklevel=2,
    )
    return Kernel("python", f"no compiled kernels: {cause}")
