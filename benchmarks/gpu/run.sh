#!/usr/bin/env bash
# All that only a GPU can show, in one command, without network:
#
#     benchmarks/gpu/run.sh [--dry] [STAGE ...]
#
# Stages, all of them by default and in this order:
#     check     what this machine has and what is missing
#     build     the native modules: pip, else cmake alone, else the reference in Python
#     tests     pytest -m cuda
#     copies    both directions, by kind of memory
#     update    the CPU update by number of threads, and the device's
#     train-1b  train-3b  train-7b      every placement under its cap of device memory
#     train-7b:cpu-cpu-cpu              one placement of a size; what there was no time for
#     table     benchmarks/results/gpu.md from all that was kept
#
# A stage has ten minutes less ten seconds; one that fails does not stop the next. --dry runs each
# with a few bytes on whatever there is, however long that takes there, and keeps nothing. Results go
# to benchmarks/results (or $GPU_RESULTS) as JSON, all that a stage said as gpu-STAGE.log beside
# them. Where a call ends after ten minutes: `check build tests copies update` in the first, then one
# size in each. $PYTHON is the interpreter (default: python3), $NVME_PATH a directory on a
# local drive (default: the system's place for temporary files), $WHEELS a directory of wheels
# for what `check` finds missing.
set -u
PYTHON=${PYTHON:-python3}
case $PYTHON in
    */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") ;; # From anywhere.
esac
cd "$(dirname "$0")/../.." || exit 1
# With the tools that came as packages (cmake, ninja), though its environment may not be active.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
export PATH
NVME_PATH=${NVME_PATH:-$("$PYTHON" -c 'import tempfile; print(tempfile.gettempdir())')}
SECONDS_MAX=590
export NVME_PATH PYTHONPATH=$PWD
DRY=
if [ "${1:-}" = --dry ]; then
    DRY=--dry
    SECONDS_MAX=0 # None.
    shift
    GPU_RESULTS=$(mktemp -d)
    export GPU_RESULTS
fi

stage_check() {
    "$PYTHON" - <<'PROGRAM'
import importlib.util
import os
import shutil
import sys
import sysconfig

# What for, and whether nothing at all works without it.
NEEDED = {
    "torch": ("everything", True),
    "numpy": ("everything", True),
    "psutil": ("everything: what memory is free", True),
    "pytest": ("tests", False),
    "pytest_timeout": ("tests: ends one that hangs; they run without", False),
    "nanobind": ("build: the native modules", False),
    "scikit_build_core": ("build by pip; cmake alone does it too", False),
    "rich": ("the command line; nothing here", False),
    "tyro": ("the command line; nothing here", False),
    "safetensors": ("some tests of the command line; nothing here", False),
}
missing = {name: why for name, why in NEEDED.items() if importlib.util.find_spec(name) is None}
for name, (why, _) in missing.items():
    print(f"missing: {name}, for {why}; carry its wheel and set WHEELS")
for tools in (("cmake",), ("ninja", "make"), ("c++", "g++", "clang++")):
    if not any(map(shutil.which, tools)):
        print(f"missing: {' or '.join(tools)}, for build; the reference in Python serves, slowly")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("missing: Python.h, for build; the reference in Python serves, slowly")
if any(fatal for _, fatal in missing.values()):
    sys.exit("nothing can run here without what is missing")
import torch

from offload.machine import host_free_bytes, nvme_free_bytes

print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
      f"{len(os.sched_getaffinity(0))} processors, "
      f"{host_free_bytes() / 2**30:.0f} GiB of memory free")
try:
    free = nvme_free_bytes((os.environ["NVME_PATH"],)) / 2**30
    print(f"NVME_PATH {os.environ['NVME_PATH']}: {free:.0f} GiB free")
except OSError as error:
    print(f"NVME_PATH serves no training on nvme, set another: {error}")
if not torch.accelerator.is_available():
    print("no accelerator: only --dry makes sense here")
else:
    from offload.device import compute_device
    device = compute_device()
    print(f"{device.torch_device}: {device.free_bytes() / 2**30:.0f} GiB free, "
          f"NUMA node {device.driver.numa_node()}")
PROGRAM
}

stage_build() {
    local offline=(--no-index) into=.
    [ -n "$DRY" ] && into=build/gpu/installed
    if [ -n "${WHEELS:-}" ]; then
        offline=(--no-index --find-links "$WHEELS")
        "$PYTHON" -m pip install "${offline[@]}" --no-deps "$WHEELS"/*.whl || echo "not all wheels fit"
    fi
    if [ -z "$DRY" ]; then
        "$PYTHON" -m pip install "${offline[@]}" --no-build-isolation --no-deps -e . && stage_built && return
    fi
    echo "pip did not build it: cmake alone"
    command -v ninja >/dev/null && export CMAKE_GENERATOR=Ninja # There may be no make.
    rm -rf build/gpu                                            # Of another one, or interpreter.
    cmake -S . -B build/gpu -DPython_EXECUTABLE="$(command -v "$PYTHON")" &&
        cmake --build build/gpu --parallel &&
        cmake --install build/gpu --prefix "$into" &&
        { [ -n "$DRY" ] || stage_built; }
}

stage_built() {
    "$PYTHON" -c 'import cpu_adam, aio; k = cpu_adam.kernel(); print("kernel:", k.name, "-", k.reason)
assert k.native is not None'
}

stage_tests() {
    local marker=cuda
    local files=(tests/test_cuda*.py)
    if [ -n "$DRY" ]; then
        marker="not slow"
        files=(tests/test_driver.py tests/test_scaler.py tests/test_cuda*.py)
    fi
    # Warnings of another torch than that of the fast tier are no failures of this one, nor is it
    # one where pytest does not know an option of a plugin that is missing.
    "$PYTHON" -m pytest "${files[@]}" -m "$marker" -o addopts= -o filterwarnings= \
        -p no:cacheprovider -q -ra --durations 10
}

stage_copies() { "$PYTHON" benchmarks/gpu/copies.py $DRY; }
stage_update() { "$PYTHON" benchmarks/gpu/update.py $DRY; }
stage_table() { "$PYTHON" benchmarks/gpu/results.py; }

stage_train() { # SIZE [PLACEMENT]
    if [ -n "$DRY" ]; then
        "$PYTHON" benchmarks/gpu/sweep.py dry ${2:+"$2"} --nvme-path "$NVME_PATH" --batch 2 --length 32
    else
        "$PYTHON" benchmarks/gpu/sweep.py "$1" ${2:+"$2"} --nvme-path "$NVME_PATH" --seconds 570
    fi
}

run_stage() {
    case $1 in
        check | build | tests | copies | update | table) "stage_$1" ;;
        train-*:*) size=${1#train-} && stage_train "${size%%:*}" "${size#*:}" ;;
        train-*) stage_train "${1#train-}" ;;
        *) echo "there is no stage $1: see the head of $0" && return 2 ;;
    esac
}

# A stage runs in a shell of its own under timeout, so the functions are read again there.
if [ "${GPU_STAGE:-}" ]; then
    DRY=${GPU_DRY:-}
    run_stage "$GPU_STAGE"
    exit
fi

if [ $# -eq 0 ]; then
    set -- check build tests copies update train-1b train-3b train-7b table
fi
RESULTS=${GPU_RESULTS:-benchmarks/results}
mkdir -p "$RESULTS"
failed=()
for stage in "$@"; do
    echo "== $stage"
    GPU_STAGE=$stage GPU_DRY=$DRY timeout --kill-after 5 $SECONDS_MAX bash benchmarks/gpu/run.sh 2>&1 |
        tee "$RESULTS/gpu-${stage//[^a-z0-9-]/_}.log"
    status=${PIPESTATUS[0]}
    [ $status -eq 124 ] && echo "$stage took more than $SECONDS_MAX s"
    [ $status -ne 0 ] && failed+=("$stage ($status)")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all stages done"
