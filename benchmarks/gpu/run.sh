#!/usr/bin/env bash
# All that only a GPU can show, in one command, without network:
#
#     benchmarks/gpu/run.sh [--dry] [STAGE ...]
#
# Stages, all of them by default and in this order:
#     check     what this machine has and what is missing
#     build     the native modules: pip, else cmake alone, else the reference in Python
#     tests     pytest -m cuda; tests:loops those whose names hold that word
#     copies    both directions, by kind of memory
#     update    the CPU update by number of threads, and the device's
#     train-1b  train-3b  train-7b      every placement under its cap of device memory
#     train-7b:cpu-cpu-cpu              one placement of a size; what there was no time for
#     table     benchmarks/results/gpu.md from all that was kept
#
# A stage has ten minutes less twenty seconds (or $GPU_SECONDS); then it is interrupted, and after
# ten more ended. One that fails does not stop the next. What needs the native modules builds them
# first where they are missing. --dry runs each stage with a few bytes on whatever there is, however
# long that takes there, and keeps nothing. Results go to benchmarks/results (or $GPU_RESULTS) as
# JSON, all that a stage said as gpu-STAGE.log beside them; a later call adds to what is there.
# Where a call ends after ten minutes: GPU_CALL_SECONDS=595, of which the last stage gets what is
# left, and `check build tests` in the first call, `copies update` in the second, then one size in
# each. $PYTHON is the interpreter (default: python3), $NVME_PATH a
# directory on a local drive (default: the system's place for temporary files), $WHEELS a directory
# of wheels for what `check` finds missing.
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
SECONDS_MAX=${GPU_SECONDS:-580}
export NVME_PATH PYTHONPATH=$PWD
DRY=
if [ "${1:-}" = --dry ]; then
    DRY=--dry
    SECONDS_MAX=${GPU_SECONDS:-0} # None.
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

from offload.planning.machine import host_free_bytes, nvme_free_bytes

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
    from offload.runtime.device import compute_device
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

stage_tests() { # [WORD]
    local marker=cuda
    local files=(tests/test_cuda*.py)
    if [ -n "$DRY" ]; then
        marker="not slow"
        files=(tests/test_driver.py tests/test_scaler.py tests/test_cuda*.py)
    fi
    # Warnings of another torch than that of the fast tier are no failures of this one, nor is it
    # one where pytest does not know an option of a plugin that is missing. Each test is named when
    # it ends, and where one hangs all threads are shown: who reads may not see the end.
    "$PYTHON" -m pytest "${files[@]}" -m "$marker" ${1:+-k "$1"} -o addopts= -o filterwarnings= \
        -o faulthandler_timeout=100 -p no:cacheprovider -v -ra --tb short --durations 10
}

stage_copies() { "$PYTHON" benchmarks/gpu/copies.py $DRY; }
stage_update() { "$PYTHON" benchmarks/gpu/update.py $DRY; }
stage_table() { "$PYTHON" benchmarks/gpu/results.py; }

stage_train() { # SIZE [PLACEMENT]
    if [ -n "$DRY" ]; then
        "$PYTHON" benchmarks/gpu/sweep.py dry ${2:+"$2"} --nvme-path "$NVME_PATH" --batch 2 --length 32
    else
        "$PYTHON" benchmarks/gpu/sweep.py "$1" ${2:+"$2"} --nvme-path "$NVME_PATH" \
            --seconds $((SECONDS_MAX - 20))
    fi
}

run_stage() {
    case $1 in
        check | build | tests | copies | update | table) "stage_$1" ;;
        tests:*) stage_tests "${1#tests:}" ;;
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

run_alone() { # STAGE: in a process of its own, ended in time
    local told tee status limit=$SECONDS_MAX left
    echo "== $1"
    if [ -n "${GPU_CALL_SECONDS:-}" ]; then
        left=$((GPU_CALL_SECONDS - SECONDS - 15)) # Its end, and that of `tee`, take a while.
        if [ "$left" -lt 30 ]; then
            echo "no time left for $1: ask for it in a call of its own"
            failed+=("$1 (no time)")
            return 1
        fi
        [ "$limit" -eq 0 ] || [ "$limit" -gt "$left" ] && limit=$left
    fi
    exec {told}> >(tee "$RESULTS/gpu-${1//[^a-z0-9-]/_}.log")
    tee=$!
    GPU_STAGE=$1 GPU_DRY=$DRY GPU_SECONDS=$limit timeout --signal INT --kill-after 10 "$limit" \
        bash benchmarks/gpu/run.sh >&"$told" 2>&1 {told}>&-
    status=$?
    exec {told}>&-
    # Not for ever: what the driver holds keeps its end of the pipe, whoever ends it.
    for _ in {1..100}; do kill -0 "$tee" 2>/dev/null && sleep 0.05 || break; done
    case $status in 124 | 137) echo "$1 took more than $limit s" ;; esac
    [ $status -ne 0 ] && failed+=("$1 ($status)")
    return $status
}

needs_build() { # STAGE
    case $1 in
        tests* | copies | update | train-*) [ -z "$DRY" ] && [ -z "$built" ] && ! stage_built >/dev/null 2>&1 ;;
        *) return 1 ;;
    esac
}

if [ $# -eq 0 ]; then
    set -- check build tests copies update train-1b train-3b train-7b table
fi
RESULTS=${GPU_RESULTS:-benchmarks/results}
mkdir -p "$RESULTS"
failed=()
built=
for stage in "$@"; do
    if needs_build "$stage"; then
        run_alone build
        built=tried
    fi
    run_alone "$stage"
    [ "$stage" = build ] && built=tried
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all stages done"
