"""Small file systems in a mount namespace of a forked process, which nobody else sees."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked import Forked

_NEW_NAMESPACE = 0x00020000


def sh(*command: object) -> None:
    """Run a command that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"


def in_mounts(program: Callable[[], object]) -> str:
    """Run it in a fork whose mounts are its own; what it prints.

    They are gone with it, and so are the loop devices.
    """

    def alone() -> None:
        call = ctypes.CDLL(None, use_errno=True).unshare
        if call(_NEW_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        sh("mount", "--make-rprivate", "/")
        program()

    child = Forked(alone)
    told, errors = child.communicate()
    assert (child.returncode, errors) == (0, ""), errors[-4000:]
    return told


@functools.cache
def refused(kind: str) -> str:
    """Why such a file system cannot be mounted here; empty where it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "mounts are root's"
    if kind != "tmpfs" and shutil.which(f"mkfs.{kind}") is None:
        return f"there is no mkfs.{kind}"

    def tried() -> None:
        with mounted(kind, Path(tempfile.gettempdir()), 32 << 20):
            pass

    try:
        in_mounts(tried)
    except (AssertionError, OSError) as error:
        return f"mounts are refused: {error!s:.200}"
    return ""


def needs(*kinds: str) -> None:
    """Skip a test where such file systems cannot be mounted."""
    for kind in kinds:
        if why := refused(kind):
            pytest.skip(why)


@contextlib.contextmanager
def mounted(kind: str, where: Path, size: int, image: Path | None = None) -> Iterator[Path]:
    """A new file system over a directory: a tmpfs, or one in a file, `image` or one in memory."""
    if kind == "tmpfs":
        sh("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where)
    else:
        image = Path(f"/dev/shm/image-{os.getpid()}") if image is None else image
        with open(image, "wb") as file:
            file.truncate(size)
        sh(f"mkfs.{kind}", "-q", image)
        mount(image, where)
    try:
        yield where
    finally:
        sh("umount", "-l", where)
        if image is not None:
            image.unlink(missing_ok=True)


def mount(image: Path, where: Path) -> None:
    """Mount an image; where the file system finds itself broken it is read-only from then on."""
    sh("mount", "-o", "loop,errors=remount-ro", image, where)


def repair(image: Path, where: Path) -> None:
    """What an administrator does with a file system that has turned read-only."""
    sh("umount", where)
    sh("sh", "-c", f"e2fsck -fy {image} || test $? = 1")
    mount(image, where)


def device_of(where: Path) -> str:
    """The name of the device of what is mounted there."""
    for line in Path("/proc/mounts").read_text().splitlines():
        device, place, *_ = line.split()
        if place == str(where):
            found = os.path.basename(device)
    return found


def fill(where: Path) -> Path:
    """A file that takes all space that is left."""
    path = where / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096, 512):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    return path
