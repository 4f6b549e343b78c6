"""The house rules that a machine can check: rooms, sizes, and what must not be in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.wait_sites import WAITS, Wait
from tests.waits import source_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("offload", "aio", "cpu_adam", "tests", "examples", "benchmarks")

LINE_COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
FILE_LINES = range(60, 601)
TEST_FILE_LINES_MAX = 500
NATIVE_FILE_LINES_MAX = 900

LINES_MAX = {"offload": 20_500, "offload/cli": 3_353, "aio": 4_013, "cpu_adam": 5_479}
"""Python and C++ together; of offload without cli."""

TEST_LINES_PER_LINE_MAX = 1.2

ROOMS = (
    "planning",
    "program",
    "runtime",
    "model",
    "optim",
    "parallel",
    "checkpoint",
    "attachment",
    "cli",
)
"""Folders of `offload`, the lowest first: each imports from itself and those below."""

TOP = {"config": "planning", "deepspeed": "planning", "reporting": "planning"}
TOP |= {
    "recording": "attachment",
    "pretrained": "attachment",
    "sleeping": "attachment",
    "trainer_mixin": "attachment",
    "unit_plan": "attachment",
    "__init__": "cli",
    "__main__": "cli",
}
"""Files beside the folders, and the folder on whose floor each stands."""

PURE_IMPORTS_NO = ("torch", "threading", "aio")
"""What the rooms `planning` and `program` know nothing of."""

IMPORT_DEPTH_MAX = 15
ENGINE_IMPORTS_MAX = 12
PRIVATE_NAMES_MAX = 19
PRIVATE_NAMES = "offload/runtime/torch_internals.py"

FORBIDDEN_IMPORTS = {"aio": ("offload", "cpu_adam", "torch"), "cpu_adam": ("offload", "aio")}

FORBIDDEN_TEXT = {
    "an open end": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a path of somebody's home": re.compile(r"/(ho" + r"me|Us" + r"ers|ro" + r"ot)/\w"),
}

NATIVE_SUFFIXES = (".cpp", ".h", ".inc")


def files(folder: Path, *suffixes: str) -> list[Path]:
    """Every file of a folder that ends so."""
    found = (path for path in sorted(folder.rglob("*")) if path.suffix in suffixes)
    return [path for path in found if "__pycache__" not in path.parts]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of what a file imports anywhere, inside functions and for types, too."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in files(ROOT / "offload", ".py")
}


def siblings(module: str) -> set[str]:
    """The modules of `offload` that one imports."""
    return {name for name in imports(MODULES[module]) if name in MODULES and name != module}


@cache
def depth(module: str) -> int:
    """How long the longest chain of imports is that begins with a module."""
    return 1 + max((depth(name) for name in siblings(module)), default=0)


def floor_of(module: str) -> int:
    name = module.split(".")[1]
    return ROOMS.index(TOP.get(name, name))


# -- rooms -----------------------------------------------------------------------------------------


def test_nothing_imports_upward() -> None:
    for module in MODULES:
        for below in siblings(module) if not module.endswith("__init__") else ():
            assert floor_of(below) <= floor_of(module), f"{module} imports {below}, above it"


def test_chains_of_imports_are_short() -> None:
    found = {name: depth(name) for name in MODULES if not name.endswith("__init__")}
    assert max(found.values()) <= IMPORT_DEPTH_MAX, max(found, key=lambda name: found[name])
    assert len(siblings("offload.model.engine")) <= ENGINE_IMPORTS_MAX


@pytest.mark.parametrize("room", ["planning", "program"])
def test_the_pure_rooms_are_pure(room: str) -> None:
    for path in files(ROOT / "offload" / room, ".py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots.intersection(PURE_IMPORTS_NO), named(path)


@pytest.mark.parametrize("package", list(FORBIDDEN_IMPORTS))
def test_what_stands_on_the_ground(package: str) -> None:
    for path in files(ROOT / package, ".py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & set(FORBIDDEN_IMPORTS[package]), named(path)


def test_no_module_bears_the_name_of_a_public_function() -> None:
    public = (ROOT / "offload/__init__.py").read_text(encoding="utf-8")
    names = ast.literal_eval(re.findall(r"^__all__ = (\[.*?\])", public, re.M | re.S)[0])
    assert not {path.stem for path in MODULES.values()} & set(names)


def test_examples_use_the_public_face_only() -> None:
    for path in files(ROOT / "examples", ".py"):
        private = {name for name in imports(path) if name in MODULES}
        assert not private, f"{named(path)} imports {sorted(private)}"


# -- private names of torch ------------------------------------------------------------------------


def private_names(path: Path) -> set[str]:
    """Names of torch with a leading underscore in a file: `torch._C.x`, `Tensor._version`."""
    text = path.read_text(encoding="utf-8")
    dotted = re.findall(r"\b(?:torch|nn|_modes)(?:\.\w+)*?\.(_[a-z]\w*|_C(?:\.\w+)+)", text)
    asked = re.findall(r'getattr\([\w.]+, "(_\w+)"', text)
    return {name for name in (*dotted, *asked) if not name.startswith("__")}


def test_private_names_of_torch_stand_in_one_file_and_are_few() -> None:
    for path in [*files(ROOT / "offload", ".py"), *files(ROOT / "cpu_adam", ".py")]:
        if named(path) != PRIVATE_NAMES:
            assert not private_names(path), f"{named(path)} names {private_names(path)}"
    defined = [
        node
        for node in tree_of(ROOT / PRIVATE_NAMES).body
        if isinstance(node, (ast.FunctionDef, ast.AnnAssign))
    ]
    assert 5 < len(private_names(ROOT / PRIVATE_NAMES)) <= len(defined) <= PRIVATE_NAMES_MAX + 1


# -- sizes -----------------------------------------------------------------------------------------


def lines_of(part: str) -> int:
    """Lines of Python and C++ in a part of the tree, but for the stand-in."""
    found = files(ROOT / part, ".py", ".pyi", *NATIVE_SUFFIXES)
    found = [path for path in found if path.stem != "libcuda_stand_in"]
    if part == "offload":
        found = [path for path in found if "cli" not in path.relative_to(ROOT / part).parts]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found)


@pytest.mark.parametrize("part", list(LINES_MAX))
def test_each_part_is_within_its_lines(part: str) -> None:
    assert lines_of(part) <= LINES_MAX[part]


def test_tests_are_not_much_longer_than_what_they_test() -> None:
    assert lines_of("tests") <= TEST_LINES_PER_LINE_MAX * sum(map(lines_of, LINES_MAX))


def too_long(path: Path, text: str) -> Iterator[str]:
    """What is wrong with a file's sizes."""
    lines, package = text.splitlines(), path.relative_to(ROOT).parts[0]
    long = [n for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX]
    if long:
        yield f"{named(path)}: lines over {LINE_COLUMNS_MAX} columns: {long}"
    most = TEST_FILE_LINES_MAX if package == "tests" else FILE_LINES.stop - 1
    if len(lines) > (NATIVE_FILE_LINES_MAX if path.suffix in NATIVE_SUFFIXES else most):
        yield f"{named(path)} has {len(lines)} lines: it would read better as two nouns"
    noun = package in ("offload", "aio", "cpu_adam") and not path.stem.startswith("__")
    if noun and path.suffix == ".py" and len(lines) < FILE_LINES.start:
        yield f"{named(path)} has {len(lines)} lines: it is part of another noun"


def out_of_place(path: Path, text: str) -> Iterator[str]:
    """What must not be in any file."""
    for what, pattern in FORBIDDEN_TEXT.items():
        if pattern.search(text):
            yield f"{named(path)} has {what}"


def too_much(path: Path, text: str) -> Iterator[str]:
    """Functions beyond a screen, and handlers that catch everything."""
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{named(path)}: {node.name} has {length} lines"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{named(path)}: bare except in line {node.lineno}"


@pytest.mark.parametrize("package", PACKAGES)
def test_files_lines_and_functions_are_short(package: str) -> None:
    wrong: list[str] = []
    for path in files(ROOT / package, ".py"):
        text = path.read_text(encoding="utf-8")
        for rule in (too_long, out_of_place, too_much):
            wrong += rule(path, text)
    assert not wrong, "\n".join(wrong)


def test_native_files_know_no_torch_and_kernels_no_library() -> None:
    found = [
        path for name in ("native", *PACKAGES) for path in files(ROOT / name, *NATIVE_SUFFIXES)
    ]
    assert len(found) > 20
    for path in found:
        text = path.read_text(encoding="utf-8")
        wrong = [*too_long(path, text), *out_of_place(path, text)]
        assert not wrong, "\n".join(wrong)
        included = re.findall(r"#include [<\"](.+?)[>\"]", text)
        assert path.name == "module.cpp" or not any(
            name.split("/")[0] in ("torch", "ATen", "nanobind", "Python.h") for name in included
        ), named(path)
        # Functions of the C++ library compiled for one instruction set could be linked into
        # another's.
        if path.suffix == ".inc" or path.name == "vector.h" or path.name.startswith("kernel_"):
            kernel = {"kernel.h", "vector.h", "immintrin.h", "arm_neon.h"}
            assert {name for name in included if not name.endswith(".inc")} <= kernel, named(path)


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.name)
def test_a_wait_that_is_taken_out_is_in_the_source(wait: Wait) -> None:
    assert source_of(wait)[1].count(wait.present) == 1
