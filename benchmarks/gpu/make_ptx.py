"""Makes `cpu_adam/device.ptx` from `cpu_adam/src/device/device.cu`, anew after each change there.

    python benchmarks/gpu/make_ptx.py            # needs the network or a wheel of NVRTC, and no GPU

NVRTC is NVIDIA's compiler as a library. It is put into a directory that goes with the run: it is a
tool of whoever changes the kernels, and no dependency. Drivers from CUDA 11 on load the text, as
all in it is as old; ptxas makes the same code of it, byte for byte, as of NVRTC's own version.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NVRTC = "nvidia-cuda-nvrtc-cu12==12.4.*"
VERSION = "7.0"
"""Of PTX: its newer ones need a newer driver."""
ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "cpu_adam" / "src" / "device" / "device.cu"
MADE = ROOT / "cpu_adam" / "device.ptx"
OPTIONS = (
    "--gpu-architecture=compute_70",
    "--std=c++20",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "--device-as-default-execution-space",
    "--diag-suppress=20044",  # What is declared of the CPU's kernels is nowhere defined.
)
INTEGERS = {
    **{"int8_t": "signed char", "int16_t": "short", "int32_t": "int", "int64_t": "long"},
    **{"uint8_t": "unsigned char", "uint16_t": "unsigned short", "uint32_t": "unsigned"},
    "uint64_t": "unsigned long",
}
HEADERS = {"cstdint": "".join(f"using {name} = {of};\n" for name, of in INTEGERS.items())}
"""The C++ library's, of which there is none on a device."""


def sources() -> dict[str, str]:
    """The text of all files that the kernels are made of, by the names that include them."""
    found, left = {SOURCE.name: SOURCE.read_text(encoding="utf-8")}, [SOURCE]
    while left:
        path = left.pop()
        for name in re.findall(r'#include "(.+?)"', path.read_text(encoding="utf-8")):
            if name not in found:
                left.append((path.parent / name).resolve())
                found[name] = left[-1].read_text(encoding="utf-8")
    return found


def digest() -> str:
    """Of these and the options: comments, and how lines are broken, do not count."""
    texts = [re.sub(r"//.*", "", text) for _, text in sorted(sources().items())]
    words = " ".join([*OPTIONS, *texts]).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def compiled(folder: Path) -> str:
    """The text that NVRTC makes, from the package in a folder."""
    libraries = folder / "nvidia" / "cuda_nvrtc" / "lib"
    ctypes.CDLL(str(next(libraries.glob("libnvrtc-builtins.so*"))), ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(next(libraries.glob("libnvrtc.so*"))))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def strings(texts: Any) -> Any:
        given = [text.encode() for text in texts]
        return len(given), (ctypes.c_char_p * len(given))(*given)

    def text_of(what: str) -> str:
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, text)
        return text.value.decode()

    headers = {"cstddef": "", **HEADERS, **sources()}
    source = headers.pop(SOURCE.name).encode()
    count, texts = strings(headers.values())
    names = strings(headers)[1]
    given = ctypes.byref(program), source, SOURCE.name.encode()
    assert nvrtc.nvrtcCreateProgram(*given, count, texts, names) == 0
    if nvrtc.nvrtcCompileProgram(program, *strings(OPTIONS)) != 0:
        raise SystemExit(text_of("ProgramLog"))
    print(text_of("ProgramLog"), end="")
    return text_of("PTX")


def pruned(text: str) -> str:
    """Without comments, empty lines, and constants that no code reads."""
    stripped = (re.sub(r"//.*", "", line).strip() for line in text.split("\n"))
    lines = [line for line in stripped if line]
    while True:
        words = re.findall(r"[\w$]+", "\n".join(lines))
        counts = dict.fromkeys(words, 0)
        for word in words:
            counts[word] += 1
        kept = [
            line
            for line in lines
            if not (name := re.match(r"\.global .*?([\w$]+)(\[\d+\])?( = .*)?;", line))
            or counts[name[1]] > 1
        ]
        if kept == lines:
            return "\n".join(lines)
        lines = kept


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, NVRTC]
        subprocess.run(pip, check=True)
        text = pruned(compiled(Path(folder)))
    text = re.sub(r"\.version \S+", f".version {VERSION}", text, count=1)
    head = f"// By benchmarks/gpu/{Path(__file__).name}, from sources of SHA-256 {digest()}\n"
    MADE.write_text(head + text + "\n", encoding="utf-8")
    print(f"{MADE.relative_to(ROOT)}: {MADE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
