"""What `offload bench nvme` keeps for the planner: the speed of each drive."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from offload.cli.bench_nvme_report import Report
from offload.machine import DriveSpeed, save_speed

_ELSEWHERE = "OFFLOAD_MACHINE=FILE on another"
_ADVICE = {
    errno.ENOSPC: ("its disk is full", _ELSEWHERE),
    errno.EDQUOT: ("its disk is full", _ELSEWHERE),
    errno.EAGAIN: ("another `offload bench nvme` was stopped in the midst of saving", "once more"),
    errno.EEXIST: (
        "it was cut off or edited, or is another program's",
        "to remove it, OFFLOAD_MACHINE=FILE",
    ),
}
"""By errno the likely cause, and what to try."""
_NO_ADVICE = ("that file or folder is not yours", "OFFLOAD_MACHINE=FILE")


def saved(report: Report, others_percent: int = 0) -> str:
    """Keeps the speeds: where, or why they are not, and how they are forgotten.

    Args:
        others_percent: of the processors' time, what other programs took meanwhile.
    """
    told = "not saved: no drive has all three figures by O_DIRECT"
    if report.too_brief and any(found.direct for found in report.found):
        return f"not saved: {report.too_brief}"
    for path, speed in _speeds(report, others_percent):
        try:
            kept = save_speed(path, speed)
        except OSError as error:
            likely, attempt = _ADVICE.get(error.errno or 0, _NO_ADVICE)
            return (
                f"note: the speeds could not be saved to {error.filename}: {error.strerror}; "
                f"likely {likely}; try: {attempt}, or --no-save"
            )
        told = f"saved to {kept}, where offload finds it when it plans; remove it to forget it"
        if others_percent:
            told += f"; measure again where others take less than {others_percent}%"
    return told


def _speeds(report: Report, others_percent: int) -> Iterator[tuple[str, DriveSpeed]]:
    for found in report.found:
        figures: Any = [found.figure(mode) for mode in ("read", "write", "both")]
        if not all(figures) or not found.direct:  # The page cache's speed is not the drive's.
            continue
        read, write, both = figures
        yield (
            found.path,
            DriveSpeed(
                read_bytes_per_s=read.bytes_per_s,
                write_bytes_per_s=write.bytes_per_s,
                both_bytes_per_s=both.bytes_per_s,
                backend=both.setting.backend,
                block_bytes=both.setting.block_bytes,
                depth=both.setting.depth,
                measured=datetime.now().isoformat(timespec="seconds"),
                others_percent=others_percent,
            ),
        )
