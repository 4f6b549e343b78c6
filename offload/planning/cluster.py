"""Alike nodes of alike GPUs, as a file tells of them: what a rank sees there. Pure.

[Note: Two constants]
Of what a cluster is said to have, a program gets a part. Two parts are calibrated on published
steps: `compute_share`, what the GPUs' kernels make of their peak, and `nic_share`, what collectives
make of the NICs. `LINK_SHARE` is one for all, seen with tensor parallelism. What they were seen in
is the cluster's `source`; `python -m benchmarks.marks` has predictions beside what was published.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.planning.machine import Machine

LINK_SHARE = 0.7
"""What a collective makes of the links inside a node."""

KNOWN = Path(__file__).with_name("machines.json")
"""Clusters by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What a node has, all of its GPUs together unless it says otherwise. Speeds are of one
    direction. See [Note: Two constants] for the shares."""

    gpus: int
    gpu_flops_per_s: float
    """Peak of one GPU in bfloat16 or float16, dense."""
    gpu_bytes: float
    """Memory of one GPU, and its speed."""
    gpu_bytes_per_s: float
    host_bytes: float
    host_bytes_per_s: float
    """Of CPU memory, as sums and updates get it."""
    pcie_bytes_per_s: float
    """Of one GPU. It shares that with what it gets from other nodes."""
    host_link_bytes_per_s: float
    """Between CPU memory and all GPUs, where switches share a way there."""
    link_bytes_per_s: float = 0.0
    """Of one GPU to the others; 0 is its PCIe."""
    nic_bytes_per_s: float = 12.5e9
    nvme_bytes: float = 0.0
    nvme_read_bytes_per_s: float = 3e9
    nvme_write_bytes_per_s: float = 2e9
    hop_seconds: float = 5e-6
    compute_share: float = 0.5
    nic_share: float = 0.5
    source: str = ""
    """Where these figures are from."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value: Any = getattr(self, one.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            right, expected = number and 0 <= value < 1e30, "a number above 0"
            right = right and (value > 0 or one.default == 0.0)
            if one.name == "source":
                right, expected = isinstance(value, str), "a text"
            if not right:
                raise ValueError(f"{one.name}={value!r}: expected {expected}")
        if int(self.gpus) != self.gpus:
            raise ValueError(f"gpus={self.gpus!r}: expected a whole number")

    def machine(self, nodes: int = 1, ranks: int | None = None, nic_exchange: float = 1) -> Machine:
        """What each of so many ranks of a node sees, see [Note: What ranks share] of `machine`."""
        here = ranks or self.gpus
        copies = min(self.pcie_bytes_per_s, self.host_link_bytes_per_s / here)
        return Machine(
            device_bytes=int(self.gpu_bytes),
            cpu_bytes=int(self.host_bytes / here),
            nvme_bytes=int(self.nvme_bytes / here),
            h2d_bytes_per_s=copies,
            d2h_bytes_per_s=copies,
            disk_read_bytes_per_s=self.nvme_read_bytes_per_s / here,
            disk_write_bytes_per_s=self.nvme_write_bytes_per_s / here,
            cpu_bytes_per_s=self.host_bytes_per_s / here,
            compute_bytes_per_s=self.gpu_bytes_per_s,
            op_seconds=3e-5,
            nodes=nodes,
            link_bytes_per_s=LINK_SHARE * (self.link_bytes_per_s or copies),
            nic_bytes_per_s=self.nic_share * self.nic_bytes_per_s / here,
            pcie_bytes_per_s=self.pcie_bytes_per_s,
            hop_seconds=self.hop_seconds,
            nic_exchange=nic_exchange,
        )


def cluster_of(name: str) -> Cluster:
    """One of `KNOWN`, or what a JSON file has of its fields; `like` there names one whose fields
    count where the file has none. Raises OSError or ValueError where it is neither."""
    known = json.loads(KNOWN.read_text("utf-8"))
    if name in known:
        return Cluster(**known[name])
    if not name.endswith(".json"):
        raise ValueError(f"machine {name!r}: expected {', '.join(known)}, or a file of JSON")
    try:
        told = json.loads(Path(name).read_text("utf-8"))
        like = told.pop("like", None)
        likewise = {**known[like], "source": f"The file, and {like}."} if like else {}
        return Cluster(**{**likewise, **told})
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        names = ", ".join(one.name for one in fields(Cluster))
        raise ValueError(
            f"{name} is no machine ({type(error).__name__}: {error}): expected an object of "
            f'{names}; of some of them with "like", one of {", ".join(known)}'
        ) from error
