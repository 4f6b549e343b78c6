"""Compiled modules of another version than the Python beside them: not used, and told once."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from aio.file import ENGINE_VERSION
from cpu_adam.choice import KERNELS_VERSION
from offload.runtime.native import RUNNER_VERSION
from tests.forked import Forked, anew

ROOT = Path(__file__).parent.parent

OFFERED = {
    "aio/src": (ENGINE_VERSION, "88373cec4af8"),
    "cpu_adam/src": (KERNELS_VERSION, "55c8ee73e31f"),
    "offload/runtime/src": (RUNNER_VERSION, "9c398cb7bb3c"),
}
"""The version of each module, and a digest of what it offers."""

OLDER = """
import sys, types, warnings
for name in ("aio._native", "cpu_adam._kernels", "offload.runtime._runner"):
    sys.modules[name] = types.ModuleType(name)
warnings.simplefilter("default")
with warnings.catch_warnings(record=True) as told:
    import offload, torch, aio
    from offload.runtime import native
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    config = offload.Config(params="nvme", gradients="cpu", optimizer="cpu", nvme_path=sys.argv[1])
    _, optimizer = offload.attach(model, optimizer, config)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    offload.detach(model)
assert native._native is None
print(*(one.filename.split("/")[-2] for one in told if "try: make" in str(one.message)))
"""


def test_older_modules_are_as_if_not_compiled(tmp_path: Path) -> None:
    run = Forked(lambda: anew(OLDER, tmp_path))
    printed, errors = run.communicate()
    assert run.returncode == 0, errors
    assert sorted(printed.split()) == ["aio", "runtime"]  # Which know nothing of each other.


@pytest.mark.parametrize("folder", OFFERED)
def test_who_changes_what_a_module_offers_counts_its_version_up(folder: str) -> None:
    text = (ROOT / folder / "module.cpp").read_text(encoding="utf-8")
    offers = " ".join(text[text.index("NB_MODULE(") :].split())
    version, digest = OFFERED[folder]
    assert re.findall(r'attr\("VERSION"\) = (\d+);', offers) == [str(version)]
    found = hashlib.sha256(offers.encode()).hexdigest()[:12]
    assert found == digest, "count VERSION up, here and there, and write this digest down"
