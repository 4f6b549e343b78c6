"""What a step of many small tensors costs beyond one tensor as large, by CPUAdam and by torch.

    python benchmarks/optimizers.py [--tensors 1000] [--elements 4096]

Times are medians of steps taken in turns; "Python" is a step of CPUAdam less its native calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cpu_adam import CPUAdam, kernel, native, threads


def optimizer_of(
    build: Callable[..., torch.optim.Optimizer], tensors: int, elements: int, dtype: torch.dtype
) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.randn(elements).to(dtype)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn(elements).to(dtype)
    return build(params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    inside = 0.0
    run = native._run

    def timed(*arguments: Any) -> None:
        nonlocal inside
        start = time.perf_counter()
        run(*arguments)
        inside += time.perf_counter() - start

    native._run = timed
    print(f"{asked.tensors} tensors of {asked.elements}; {kernel().name}, {threads()} threads")
    for dtype in (torch.bfloat16, torch.float32):
        many, one = (asked.tensors, asked.elements), (1, asked.tensors * asked.elements)
        optimizers = {
            "one tensor": optimizer_of(CPUAdam, *one, dtype),
            "many": optimizer_of(CPUAdam, *many, dtype),
            "torch, fused": optimizer_of(lambda p: torch.optim.AdamW(p, fused=True), *many, dtype),
        }
        times: dict[str, list[float]] = {name: [] for name in (*optimizers, "many, native")}
        for _ in range(asked.rounds):
            for name, optimizer in optimizers.items():
                inside = 0.0
                start = time.perf_counter()
                optimizer.step()
                times[name].append(time.perf_counter() - start)
                if name == "many":
                    times["many, native"].append(inside)
        each = {
            name: statistics.median(found) / asked.tensors * 1e6 for name, found in times.items()
        }
        print(f"{dtype}, microseconds per tensor:")
        for name, value in each.items():
            print(f"    {name:14}{value:8.2f}")
        print(f"    {'native beyond':14}{each['many, native'] - each['one tensor']:8.2f}")
        print(f"    {'Python':14}{each['many'] - each['many, native']:8.2f}")


if __name__ == "__main__":
    main()
