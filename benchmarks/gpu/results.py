"""What every stage tells: the machine it ran on, a JSON file of rows, a table."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from cpu_adam import kernel, threads

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("GPU_RESULTS") or ROOT / "benchmarks" / "results")

Row = Mapping[str, Any]


def accelerator() -> torch.device:
    """What is measured: the accelerator, or the CPU in a dry run."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def machine() -> dict[str, Any]:
    device = accelerator()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": name or device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": kernel().name,
        "update_threads": threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": os.getloadavg()[0],
    }


def save(stage: str, rows: Sequence[Row], **more: Any) -> Path:
    """Keep what a stage found, in place of what it found before."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"gpu-{stage}.json"
    content = {"stage": stage, "machine": machine(), **more, "rows": list(rows)}
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return path


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as a table in Markdown."""
    cells = [list(columns), *([shown(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(line, widths)) for line in cells]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def all_columns(rows: Sequence[Row]) -> list[str]:
    """Those in which some row has a number or a word."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    plain = (str, int, float)
    return [one for one in columns if any(isinstance(row.get(one), plain) for row in rows)]


def main() -> None:
    """All that was kept, as one page."""
    parts = ["# On a GPU", ""]
    for path in sorted(RESULTS.glob("gpu-*.json")):
        found = json.loads(path.read_text("utf-8"))
        about = found["machine"]
        rows = found["rows"]
        parts += [
            f"## {found['stage']}",
            "",
            f"{about['device']}, torch {about['torch']}, {about['processors']} processors, "
            f"kernel {about['kernel']} on {about['update_threads']} threads, {about['time']}",
            "",
            table(rows, all_columns(rows)),
            "",
        ]
        for more in ("forks", "waits"):
            if found.get(more):
                parts += [table(found[more], all_columns(found[more])), ""]
        for row in rows:
            parts += [f"* {row['placement']}: {notice}" for notice in row.get("notices", ())]
    page = RESULTS / "gpu.md"
    page.write_text("\n".join(parts), "utf-8")
    print("\n".join(parts))


if __name__ == "__main__":
    main()
