"""What a drive gives to fio, and to the load of `offload bench nvme`, beside a run of training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from functools import partial
from typing import NamedTuple

import aio
from offload.cli.drive_load import Load


class Setting(NamedTuple):
    """Bytes of a block, and blocks under way each way."""

    block_bytes: int
    depth: int


ENGINES = {"io_uring": "io_uring", "linux_aio": "libaio"}
"""fio's engine by backend; with the others nothing is compared."""

FIO_SETTINGS = (Setting(1 << 20, 8), Setting(1 << 20, 32), Setting(4 << 20, 8))


class Disk(Load):
    """A scratch file without a name, of `size` bytes, to read and write."""

    def __init__(self, directory: str, size: int) -> None:
        with contextlib.closing(aio.open_backend()) as opened:
            super().__init__(directory, size, opened.name)

    def choose(self) -> None:
        """Take the setting by which fio is fastest. Raises ValueError without fio."""
        if shutil.which("fio") is None or self.backend not in ENGINES:
            raise ValueError(
                f"no fio on PATH (apt install fio), or {self.backend} is none of {[*ENGINES]}"
            )
        self.setting = min(FIO_SETTINGS, key=partial(self.fio, self.file.bytes))

    def fio(self, size: float, setting: Setting | None = None) -> float:
        """Seconds in which fio moves so many bytes, half of them each way, both ways at once."""
        setting, half = setting or self.setting, self.file.bytes // 2
        each_way = max(1, round(size / 2 / setting.block_bytes)) * setting.block_bytes
        command = [
            *("fio", "--name=global", f"--filename=/proc/{os.getpid()}/fd/{self.file.fd}"),
            *(f"--ioengine={ENGINES[self.backend]}", f"--direct={int(self.file.direct)}"),
            *(f"--bs={setting.block_bytes}", f"--iodepth={setting.depth}", f"--size={half}"),
            *(f"--io_size={each_way}", "--thread", "--allow_file_create=0", "--overwrite=1"),
            *("--fallocate=none", "--invalidate=0", "--scramble_buffers=0"),
            # Memory that is only read into would be faulted in while the clock runs.
            *("--name=read", "--rw=rw", "--rwmixread=100"),
            *("--name=write", "--rw=write", f"--offset={half}", "--output-format=json"),
        ]
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        assert not any(job["error"] for job in jobs), done.stderr
        return max(job[way]["runtime"] for job, way in zip(jobs, ("read", "write"))) / 1e3

    def both(self, seconds: float) -> dict[str, float]:
        """Bytes of a second, of about so many, in which it reads and writes by turns."""
        return {"bytes": self.run("both", seconds), "busy": 1.0}
