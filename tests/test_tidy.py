"""The house rules that a machine can check: sizes, layers, and what must not be in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("offload", "aio", "cpu_adam", "tests", "examples", "benchmarks")

LINE_COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
TEST_FILE_LINES_MAX = 500

PURE = ("config", "machine", "profile", "records", "scoreboard", "layout", "plan", "program")
PURE += ("task", "schedule", "rules", "variants", "verify", "simulate", "deepspeed")
PURE += (
    "deepspeed_keys",
    "deepspeed_values",
    "deepspeed_optimizer",
    "trace",
    "intervals",
    "runs",
    "breakdown",
)
PURE += ("disks", "kept", "rows", "blocks", "shapes", "sizes", "ops", "phases")
"""Decide, compile, prove, predict: no torch, no threads, no files."""

PURE_OF_CPU_ADAM = ("formats", "checksum")
"""What the pure core may use of `cpu_adam`."""

LAYERS: tuple[tuple[str, ...], ...] = (
    ("deepspeed_keys", "intervals", "kept", "aside", "shapes", "scaler", "inert"),
    ("deepspeed_values", "warned"),
    ("declared",),
    ("deepspeed", "deepspeed_optimizer"),
    ("runs", "disks", "forms"),
    ("breakdown",),
    ("interrupt", "fork", "outputs", "config", "profile", "records", "scoreboard", "numa"),
    ("machine",),
    ("rows", "blocks", "accepted", "frozen", "backwards"),
    ("sizes",),
    ("layout",),
    ("plan",),
    ("shared",),
    ("program",),
    ("ops",),
    ("phases",),
    ("task", "rules", "variants", "trace"),
    ("schedule", "driver", "device"),
    ("books",),
    ("compiled",),
    ("verify", "simulate"),
    ("arena", "store", "ledger", "copies"),
    ("lanes",),
    ("bounce",),
    ("bed",),
    ("executor", "totals", "calls", "reruns"),
    ("homes", "usable"),
    ("known_ops",),
    ("states", "exposure", "passes", "resting", "marks"),
    ("served", "guard"),
    ("collector", "extents"),
    ("shown", "assigned"),
    ("places",),
    ("gradients", "binding", "finality", "structure", "state_view"),
    ("bystanders", "carrier", "holders"),
    ("awaited",),
    ("asleep",),
    ("in_use", "casts", "resident", "fast_path"),
    ("updates",),
    ("engine",),
    ("parameter_home", "hooks"),
    ("optimizer",),
    ("checks", "recorded", "meta", "before", "strangers"),
    ("attaching",),
    ("attach",),
    ("sleep",),
    ("__init__",),
    ("cli", "__main__"),
)
"""Files of `offload`, the lowest first: each imports from its own layer and those below."""

FORBIDDEN_IMPORTS = {
    "aio": ("offload", "cpu_adam", "torch"),
    "cpu_adam": ("offload", "aio"),
}

FORBIDDEN_TEXT = {
    "an open end": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a path of somebody's home": re.compile(r"/(ho" + r"me|Us" + r"ers|ro" + r"ot)/\w"),
}


NATIVE_SUFFIXES = (".cpp", ".h", ".inc")


def native_sources() -> list[Path]:
    """Every C++ file of the project."""
    folders = [ROOT / "native", *(ROOT / package for package in PACKAGES)]
    found = (path for folder in folders for path in sorted(folder.rglob("*")))
    return [path for path in found if path.suffix in NATIVE_SUFFIXES]


def sources() -> list[Path]:
    """Every Python file of the project."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if "__pycache__" not in path.parts]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below one, and handlers; nothing in an expression can break a rule."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            yield from statements(inner)


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules that a file imports anywhere, types included."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            # `from offload import records` names a file too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> int | None:
    for number, layer in enumerate(LAYERS):
        if name in layer:
            return number
    return None


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def too_long(path: Path, text: str) -> Iterator[str]:
    """What is wrong with a file's sizes."""
    lines = text.splitlines()
    long = [n for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX]
    if long:
        yield f"{named(path)}: lines over {LINE_COLUMNS_MAX} columns: {long}"
    most = TEST_FILE_LINES_MAX if path.parts[len(ROOT.parts)] == "tests" else FILE_LINES_MAX
    if len(lines) > most:
        yield f"{named(path)} has {len(lines)} lines, more than {most}"


def out_of_place(path: Path, text: str) -> Iterator[str]:
    """What must not be in any file."""
    for what, pattern in FORBIDDEN_TEXT.items():
        if pattern.search(text):
            yield f"{named(path)} has {what}"


def too_much(path: Path, text: str) -> Iterator[str]:
    """Functions beyond a screen, and handlers that catch everything."""
    for node in statements(ast.parse(text, str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{named(path)}: {node.name} has {length} lines"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{named(path)}: bare except in line {node.lineno}"


def test_the_rules_find_what_breaks_them() -> None:
    body = "    x = 1\n" * FUNCTION_LINES_MAX
    text = f"def f():\n{body}\ntry:\n    pass\nexcept:\n    pass\n"
    assert sorted(found.split(": ")[1] for found in too_much(ROOT / "a.py", text)) == [
        "bare except in line 75",
        "f has 71 lines",
    ]
    lines = ("y" * (LINE_COLUMNS_MAX + 1) + "\n") * (FILE_LINES_MAX + 1)
    assert len(list(too_long(ROOT / "offload" / "a.py", lines))) == 2
    assert len(list(out_of_place(ROOT / "a.py", "# FIX" + "ME"))) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_files_lines_and_functions_are_short(package: str) -> None:
    wrong = []
    for path in sources():
        if path.is_relative_to(ROOT / package):
            text = path.read_text(encoding="utf-8")
            for rule in (too_long, out_of_place, too_much):
                wrong += rule(path, text)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", native_sources(), ids=named)
def test_native_files_know_no_torch_and_kernels_no_library(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = [*too_long(path, text), *out_of_place(path, text)]
    assert not wrong, "\n".join(wrong)
    included = re.findall(r"#include [<\"](.+?)[>\"]", text)
    assert path.name == "module.cpp" or not any(
        name.split("/")[0] in ("torch", "ATen", "nanobind", "Python.h") for name in included
    )
    # Functions of the C++ library compiled for one instruction set could be linked into another's.
    if path.suffix == ".inc" or path.name == "vector.h" or path.name.startswith("kernel_"):
        kernel = {"kernel.h", "vector.h", "immintrin.h", "arm_neon.h"}
        assert {name for name in included if not name.endswith(".inc")} <= kernel, named(path)


@pytest.mark.parametrize("package", list(FORBIDDEN_IMPORTS))
def test_what_stands_on_the_ground(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & set(FORBIDDEN_IMPORTS[package]), named(path)


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_is_pure(name: str) -> None:
    path = ROOT / "offload" / f"{name}.py"
    pure = [[name] for name in PURE_OF_CPU_ADAM]
    for module in imports(path):
        first, *rest = module.split(".")
        assert first not in ("torch", "threading", "aio"), f"{name} imports {module}"
        assert first != "cpu_adam" or rest[:1] in pure, f"{name} imports {module}"
        assert first != "offload" or not rest or rest[0] in PURE, f"{name} imports {module}"


@pytest.mark.parametrize("name", PURE_OF_CPU_ADAM)
def test_what_the_pure_core_needs_imports_no_torch(name: str) -> None:
    path = ROOT / "cpu_adam" / f"{name}.py"
    assert "torch" not in {module.split(".")[0] for module in imports(path)}


def test_nothing_imports_upward() -> None:
    for path in sorted((ROOT / "offload").rglob("*.py")):
        name = path.relative_to(ROOT / "offload").parts[0].removesuffix(".py")
        own = layer_of(name)
        assert own is not None, f"offload/{name} is in no layer: add it to LAYERS"
        for module in imports(path):
            first, *rest = module.split(".")
            below = layer_of(rest[0]) if first == "offload" and rest else None
            assert below is None or below <= own, f"offload/{name} imports {module}, above it"


def test_layers_name_files_that_exist() -> None:
    for layer in LAYERS:
        for name in layer:
            path = ROOT / "offload" / name
            assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_examples_use_the_public_face_only() -> None:
    for path in sorted((ROOT / "examples").rglob("*.py")):
        names = {module for module in imports(path) if module.split(".")[0] == "offload"}
        private = {name for name in names if name.split(".")[1:2] and layer_of(name.split(".")[1])}
        assert not private, f"{named(path)} imports {sorted(private)}"
