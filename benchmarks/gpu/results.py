"""What every stage tells: JSON lines that are written as they come, and the page made of them.

A line has a `stage` and a `row`, its name there. A later line of the same name replaces an earlier
one, so a call adds to what the calls before it have kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from cpu_adam import kernel, threads

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("GPU_RESULTS") or ROOT / "benchmarks" / "results")
EXPECTED = Path(__file__).with_name("EXPECTED.md")

Row = Mapping[str, Any]

NUMBER = (int, float)
SCHEMA: dict[str, Any] = {
    **dict.fromkeys(("stage", "row", "at", "size", "placement", "point", "refused"), str),
    **dict.fromkeys(("tokens", "steps", "misses", "chunk"), int),
    **dict.fromkeys(("attach_s", "step_s", "tokens_per_s", "tflops", "exposed_s"), NUMBER),
    **{f"{lane}_gb_s": NUMBER for lane in ("h2d", "d2h", "cpu", "disk")},
    **dict.fromkeys(("ops", "host_us", "busy", "kernel_busy", "profiled_s"), NUMBER),
    **dict.fromkeys(("rss_gib", "device_peak_gib", "device_reserved_gib", "pinned_gib"), NUMBER),
    **{f"{tier}_tier_gib": NUMBER for tier in ("device", "cpu", "nvme")},
    **dict.fromkeys(("gaps", "notices"), list),
    "lanes": dict,
}
"""The keys of a line of training, with their types; see the head of `train.py`."""

DERIVED = ("share", "light", "expected_s", "off")
"""Columns that the page adds: the step in HBM over this one, with fp32 and with bf16 states; the
step that EXPECTED.md predicts, and this one over that."""

COLUMNS = (
    *("row", "step_s", "expected_s", "off", "share", "light", "tokens_per_s", "tflops", "busy"),
    *("kernel_busy", "exposed_s", "h2d_gb_s", "d2h_gb_s", "cpu_gb_s", "disk_gb_s", "ops"),
    *("host_us", "device_peak_gib", "cpu_tier_gib", "attach_s", "misses", "refused"),
)


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
        "available_bytes": psutil.virtual_memory().available,
        "memory_given": os.environ.get("GPU_MEMORY", ""),
        "kernel": kernel().name,
        "update_threads": threads(),
        "load": os.getloadavg()[0],
    }


def keep(stage: str, row: Row) -> Path:
    """Append a line, whole: the stage may be ended at any time."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path, at = RESULTS / "gpu.jsonl", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage, **row, "at": at}) + "\n")
    return path


def kept() -> dict[str, dict[str, dict[str, Any]]]:
    """By stage and name, the last line."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    path = RESULTS / "gpu.jsonl"
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # Cut by the end of a call.
        found.setdefault(row["stage"], {})[row["row"]] = row
    return found


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


def used_columns(rows: Sequence[Row], columns: Iterable[str] | None = None) -> list[str]:
    """Those in which some row has a number or a word."""
    named = dict.fromkeys(key for row in rows for key in row if key not in ("stage", "at"))
    plain = (str, int, float)
    return [
        one
        for one in (named if columns is None else columns)
        if any(isinstance(row.get(one), plain) for row in rows)
    ]


def expected() -> dict[str, float]:
    """The seconds of a step that EXPECTED.md has, by row."""
    lines = re.findall(r"^\| (\w+ [\w -]+?) +\| ([\d.]+) ", EXPECTED.read_text("utf-8"), re.M)
    return {row: float(seconds) for row, seconds in lines}


def compared(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Lines of training beside what they are to be held against."""
    predicted, found = expected(), []
    for name, row in rows.items():
        more: dict[str, Any] = {"expected_s": predicted.get(name)}
        if step_s := row.get("step_s"):
            same = row["point"].removesuffix("-unsaid")
            for column, states in (("share", "fp32"), ("light", "bf16")):
                base = rows.get(f"{row['size']} torch-{states} {same}", {}).get("step_s")
                more[column] = base and base / step_s
            more["off"] = more["expected_s"] and step_s / more["expected_s"]
        found.append({**row, **more})
    return found


def page(found: Mapping[str, Mapping[str, Row]]) -> str:
    """All that was kept."""
    parts = ["# On a GPU", ""]
    for stage, rows in found.items():
        many, columns = list(rows.values()), None
        if stage == "train":
            many, columns = compared(rows), COLUMNS  # type: ignore[assignment]
        parts += [f"## {stage}", "", table(many, used_columns(many, columns)), ""]
        parts += [f"* {row['row']}: {notice}" for row in many for notice in row.get("notices", ())]
        for row in many:
            if gaps := row.get("gaps"):
                head = f"### {row['row']}: the longest times without a kernel"
                parts += ["", head, "", table(gaps, used_columns(gaps)), ""]
    return "\n".join(parts)


def main() -> None:
    told = page(kept())
    (RESULTS / "gpu.md").write_text(told, "utf-8")
    print(told)


if __name__ == "__main__":
    main()
