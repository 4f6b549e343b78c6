#!/usr/bin/env bash
# All that only a GPU can show, in one command, without network:
#
#     benchmarks/gpu/run.sh [--dry] [--memory SIZE] first-hour | STAGE ...
#
# Stages; first-hour is all of them, the most telling first, but those that an earlier call has done:
#     facts     what this machine has and what is missing
#     build     the native modules: pip, else cmake alone
#     tests     pytest -m cuda; tests:loops those whose names hold that word
#     3b-first  three billion parameters, 16k tokens: in HBM, states on the CPU, all on the CPU
#     update    the update by size of a chunk, on the CPU by number of threads, and on the device
#     copies    both directions, by kind of memory
#     7b-first  as 3b-first, and at 32k tokens
#     3b        other numbers of tokens, clipping, accumulation, on the device, DeepSpeed, compiled
#     7b        likewise
#     nvme      everything on the drive
#     rows:3b   of all rows (rows.py) those that this pattern is in, though they are there
#     table     gpu.md from all that was kept
#
# Each row is kept as a line of gpu.jsonl in benchmarks/results (or $GPU_RESULTS, which begins with
# those of benchmarks/results) the moment it is there; all that was said is in gpu.log beside it.
# So a call may be cut anywhere, and the next one goes on: where one ends after ten minutes, give
# GPU_CALL_SECONDS=595 and call it again until it says `all stages done`. EXPECTED.md has what to
# expect. A stage has eight minutes (or $GPU_SECONDS), the tests in first-hour five; then it is
# interrupted, and after ten seconds more ended. One that fails does not stop the next.
#
# --memory (or $GPU_MEMORY) is what the machine has where it shows less, such as 120GiB on one whose
# memory grows as it is used. --dry runs each stage with a few bytes on whatever there is and keeps
# nothing. $PYTHON is the interpreter (default: python3), $NVME_PATH a directory on a local drive
# (default: the system's place for temporary files), $WHEELS a directory of wheels for what `facts`
# finds missing.
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
SECONDS_MAX=${GPU_SECONDS:-480}
HOUR=(facts build tests 3b-first update copies 7b-first 3b 7b nvme table)
DRY=
while :; do
    case ${1:-} in
        --dry) DRY=--dry && GPU_RESULTS=$(mktemp -d) && shift ;;
        --memory) export GPU_MEMORY=$2 && shift 2 ;;
        *) break ;;
    esac
done
GPU_RESULTS=${GPU_RESULTS:-$PWD/benchmarks/results}
# Ranks of this machine talk over it alone: it may have no other network.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export NVME_PATH GPU_RESULTS PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

stage_facts() {
    "$PYTHON" - <<'PROGRAM'
import importlib.util
import os
import shutil
import sys
import sysconfig

wanted = ("torch", "numpy", "psutil", "safetensors", "rich", "pytest", "nanobind")
if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
    print(f"missing: {', '.join(missing)}; carry the wheels and set WHEELS")
for tools in (("cmake",), ("ninja", "make"), ("c++", "g++", "clang++")):
    if not any(map(shutil.which, tools)):
        print(f"missing: {' or '.join(tools)}, for build: without it a GPU is refused")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("missing: Python.h, for build: without it a GPU is refused")
import torch

from benchmarks.gpu.results import keep, machine
from offload.planning.machine import host_free_bytes, nvme_free_bytes

keep("facts", {"row": "machine", **(facts := machine())})
print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n")
print(f"{host_free_bytes() / 2**30:.0f} GiB of memory free; if it has more, say --memory SIZE")
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
    print(f"{device.torch_device}: {device.free_bytes() / 2**30:.0f} GiB free")
PROGRAM
    local status=$?
    grep -E 'MemTotal|MemAvailable' /proc/meminfo
    lscpu 2>/dev/null | grep -E 'Model name|Socket|per core|NUMA node|L3'
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max \
        --format=csv 2>/dev/null
    return $status
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
    local workers=()
    [ -z "$DRY" ] && "$PYTHON" -c 'import xdist' 2>/dev/null && workers=(-n 6 --dist worksteal)
    "$PYTHON" -m pytest "${files[@]}" "${workers[@]}" -m "$marker" ${1:+-k "$1"} -o addopts= -o filterwarnings= \
        -o faulthandler_timeout=100 -p no:cacheprovider -v -ra --tb short --durations 10 --maxfail 40
}

stage_copies() { "$PYTHON" benchmarks/gpu/copies.py $DRY; }
stage_update() { "$PYTHON" benchmarks/gpu/update.py $DRY; }
stage_table() { "$PYTHON" benchmarks/gpu/results.py; }

stage_rows() { # A stage of rows.py, or a pattern
    "$PYTHON" benchmarks/gpu/rows.py "$1" --nvme-path "$NVME_PATH" $DRY \
        --seconds $((SECONDS_MAX - 15))
}

run_stage() {
    case $1 in
        facts | build | tests | copies | update | table) "stage_$1" ;;
        tests:*) stage_tests "${1#tests:}" ;;
        3b-first | 7b-first | 3b | 7b | nvme) stage_rows "$1" ;;
        rows:*) stage_rows "${1#rows:}" ;;
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
    [ "$hour$1" = yestests ] && [ "$limit" -gt 300 ] && limit=300
    if [ -n "${GPU_CALL_SECONDS:-}" ]; then
        left=$((GPU_CALL_SECONDS - SECONDS - 15)) # Its end, and that of `tee`, take a while.
        if [ "$left" -lt 30 ] && [ "$1" != table ]; then
            echo "no time left for $1: call again"
            failed+=("$1 (no time)")
            return 1
        fi
        [ "$limit" -gt "$left" ] && limit=$((left > 5 ? left : 5))
    fi
    exec {told}> >(tee -a "$GPU_RESULTS/gpu.log")
    tee=$!
    GPU_STAGE=$1 GPU_DRY=$DRY GPU_SECONDS=$limit timeout --signal INT --kill-after 10 "$limit" \
        bash benchmarks/gpu/run.sh >&"$told" 2>&1 {told}>&-
    status=$?
    exec {told}>&-
    # Not for ever: what the driver holds keeps its end of the pipe, whoever ends it.
    for _ in {1..100}; do kill -0 "$tee" 2>/dev/null && sleep 0.05 || break; done
    case $status in 124 | 137) echo "$1 took more than $limit s" ;; esac
    [ $status -ne 0 ] && failed+=("$1 ($status)")
    # Tests that fail are told once; what failed by then is not tried in the next call.
    if [ $status -eq 0 ] || [ "$1" = tests ]; then
        printf '{"stage": "done", "row": "%s", "status": %d}\n' "$1" $status \
            >>"$GPU_RESULTS/gpu.jsonl"
    fi
    return $status
}

needs_build() { # STAGE
    case $1 in
        facts | build | table) return 1 ;;
        *) [ -z "$DRY" ] && [ -z "$built" ] && ! stage_built >/dev/null 2>&1 ;;
    esac
}

is_done() { # STAGE of the hour: by an earlier call; what each machine needs is done again
    case $1 in
        facts | table) return 1 ;;
        build) [ -z "$DRY" ] && stage_built >/dev/null 2>&1 ;;
        *) grep -qsF "\"stage\": \"done\", \"row\": \"$1\"" "$GPU_RESULTS/gpu.jsonl" ;;
    esac
}

hour=
[ $# -eq 0 ] && set -- first-hour
[ "$1" = first-hour ] && hour=yes && set -- "${HOUR[@]}"
mkdir -p "$GPU_RESULTS"
before=benchmarks/results/gpu.jsonl
[ -n "$DRY" ] || [ ! -f $before ] || [ -f "$GPU_RESULTS/gpu.jsonl" ] || cp $before "$GPU_RESULTS"
failed=()
built=
for stage in "$@"; do
    [ -n "$hour" ] && is_done "$stage" && continue
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
