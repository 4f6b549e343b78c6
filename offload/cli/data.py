"""The text that `offload train` learns: bytes of a file, a folder or the standard library.

The files are put in an order that depends on their names alone, one after the other; the last
twentieth of the bytes is held out. So the split is the same on every run and every machine with
the same files, and the two parts share no byte.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes: TypeAlias = npt.NDArray[np.uint8]

HELD_OUT_SHARE = 0.05
HELD_OUT_WINDOWS_MIN = 4
FOLDER_BYTES_MAX = 2**30
PROBE_BYTES = 8192
"""A file of a folder with a zero byte this early is binary, as git has it."""

_LIBRARY_SKIPPED = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Text as bytes: a part to learn from and a part held out."""

    name: str
    training: Bytes
    held_out: Bytes
    notices: tuple[str, ...] = ()
    """What a user should know about files that were left out."""

    def batch(self, seed: int, index: int, windows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets `(windows, length)`: the training windows of batch `index`.

        They depend on the arguments alone, so a run can be repeated from any step.
        """
        random = np.random.default_rng((seed, index))
        starts = random.integers(0, len(self.training) - length, size=windows)
        return _windows(self.training, starts, length)

    def held_out_batches(
        self, windows: int, per_batch: int, length: int
    ) -> list[tuple[Tensor, Tensor]]:
        """At most `windows` windows spread evenly over the held-out part, none overlapping."""
        room = (len(self.held_out) - 1) // length
        count = min(windows, room)
        starts = np.arange(count) * room // count * length
        return [
            _windows(self.held_out, starts[first : first + per_batch], length)
            for first in range(0, count, per_batch)
        ]


def load(path: str | None, length: int) -> Corpus:
    """The corpus in file or folder `path` (None: this interpreter's standard library).

    A file is mapped and not read; of a folder, every file that is text is read, hidden ones apart.
    """
    notices: list[str] = []
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, _LIBRARY_SKIPPED) if file.suffix == ".py"]
        name, text = "the standard library's source", _join(root, files, notices)
    elif (root := Path(path)).is_dir():
        name, text = f"folder {path}", _join(root, _walk(root, frozenset()), notices)
    else:
        name, text = f"file {path}", _map(root)
    held_out = max(int(len(text) * HELD_OUT_SHARE), HELD_OUT_WINDOWS_MIN * length + 1)
    if len(text) < 2 * held_out:
        reason = f" ({'; '.join(notices)})" if notices else ""
        raise ValueError(
            f"not enough data: {name} holds {len(text)} bytes of text{reason}, and windows of "
            f"{length} bytes need at least {2 * (HELD_OUT_WINDOWS_MIN * length + 1)}. "
            "Give more text with --data, or lower --seq-len."
        )
    return Corpus(name, text[:-held_out], text[-held_out:], tuple(notices))


def _windows(text: Bytes, starts: npt.NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
    window = torch.from_numpy(text[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    return window[:, :-1], window[:, 1:]


def _walk(root: Path, skipped: frozenset[str]) -> list[Path]:
    """Files below `root`, hidden ones and folders named in `skipped` apart; links not followed."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return files


def _map(path: Path) -> Bytes:
    if not path.exists():
        raise FileNotFoundError(f"--data {path}: there is no such file or folder")
    if not path.is_file():
        raise ValueError(f"--data {path} is neither a regular file nor a folder")
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _join(root: Path, files: list[Path], notices: list[str]) -> Bytes:
    """All text in `files`, ordered by a hash of their names below `root`, as one array."""
    parts: list[bytes] = []
    total, binary, late = 0, 0, 0
    for file in sorted(files, key=lambda file: _shuffled(file.relative_to(root))):
        if not file.is_file():
            continue
        if total + file.stat().st_size > FOLDER_BYTES_MAX:
            late += 1
            continue
        content = file.read_bytes()
        if b"\0" in content[:PROBE_BYTES]:
            binary += 1
            continue
        parts.append(content)
        total += len(content)
    counts = [(binary, "binary"), (late, f"beyond the first {FOLDER_BYTES_MAX >> 30} GiB")]
    skipped = [f"{count} {why}" for count, why in counts if count]
    if skipped:
        notices.append(f"files left out: {', '.join(skipped)}")
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _shuffled(name: Path) -> bytes:
    return hashlib.sha256(name.as_posix().encode("utf-8", "surrogateescape")).digest()
