"""Which kernels a processor is offered, asked on processors that an emulator plays."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys

import pytest

from cpu_adam import choice

QEMU = shutil.which("qemu-x86_64")
ASK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
kernels.configure(1)
print(*kernels.kernel_names())
"""

emulated = pytest.mark.skipif(
    platform.machine() != "x86_64" or QEMU is None or choice._loaded()[0] is None,
    reason="not x86-64, no emulator of it, or no kernels",
)


@emulated
@pytest.mark.parametrize(
    ("processor", "offered"),
    [
        pytest.param("qemu64", "", marks=pytest.mark.slow),
        ("core2duo", ""),  # With SSSE3, and without SSE4.1.
        ("Penryn", "portable"),
        ("Haswell", "avx2 portable"),
    ],
)
def test_a_kernel_is_offered_where_it_runs(processor: str, offered: str) -> None:
    found = importlib.util.find_spec("cpu_adam._kernels")
    assert QEMU is not None
    assert found is not None
    assert found.origin is not None
    command = [QEMU, "-cpu", processor, sys.executable, "-S", "-c", ASK, found.origin]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, offered), run.stderr


def test_the_reference_serves_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("cpu_adam._kernels")
    monkeypatch.setattr(kernels, "kernel_names", list)
    assert choice.available() == ("python",)
    with pytest.warns(RuntimeWarning, match=r"lacks SSE4\.1.*likely cause: an x86 .*try: a newer"):
        assert choice._chosen(None).name == "python"
    with pytest.raises(ValueError, match=r"asked for the portable kernel.*lacks SSE4\.1"):
        choice._chosen("portable")
