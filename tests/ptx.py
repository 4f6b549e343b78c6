"""Runs PTX without a device: the instructions that our kernels have, each for 256 threads at once.

[Note: Threads of PTX]
Threads that are not at the same instruction wait for those that are behind: the least one of all
places is next, for the threads that are there. So those that went different ways meet again where
the ways do, as a shuffle and a barrier ask of them; these look whether all are there.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]
THREADS, WARP = 256, 32
REGISTERS = {"rs": 16, "r": 32, "rd": 64, "f": 32, "fd": 64, "p": 1}
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
MEMORY = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32, 64: ctypes.c_uint64}
KINDS = {"u": "u", "s": "i", "b": "u", "f": "f"}
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "neu": lambda a, b: ~(a == b),
    "leu": lambda a, b: ~(a > b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: ~((a == a) & (b == b)),
}
COMPUTED: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "sqrt": np.sqrt,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "max": np.maximum,
    "mad": lambda a, b, c: a * b + c,
}


class Instruction(NamedTuple):
    """One, with the predicate under which it is done."""

    guard: str | None
    operation: str
    type: str
    operands: list[str]
    text: str


@dataclass
class Entry:
    """A kernel."""

    parameter: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def bits_of(x: Any) -> Bits:
    """Numbers of any type as the bits of registers."""
    return x.view(WORDS[8 * x.dtype.itemsize]).astype(np.uint64)  # type: ignore[no-any-return]


def typed(bits: Bits, kind: str) -> Any:
    """The bits of registers as numbers of a type, such as `f32`."""
    width = int(kind[1:])
    return bits.astype(WORDS[width]).view(f"{KINDS[kind[0]]}{width // 8}")


class Program:
    """The entries of a text."""

    def __init__(self, text: str) -> None:
        self.entries: dict[str, Entry] = {}
        self._held: dict[str, Any] = {}  # memory of globals
        self._symbols: dict[str, int] = {}
        for name, values in re.findall(r"\.global \.align \d+ \.b8 (\w+)\[\d+\] = {(.*?)};", text):
            held = np.array([int(x) & 255 for x in values.split(",")], np.uint8)
            self._held[name], self._symbols[name] = held, held.ctypes.data
        entry = None
        for line in text.split("\n"):
            if found := re.match(r"\.visible \.entry (\w+)\(", line):
                entry = self.entries[found[1]] = Entry(f"{found[1]}_param_0")
            elif entry is None or not line or line[0] in ".(){}":
                continue
            elif line.endswith(":"):
                entry.labels[line[:-1]] = len(entry.instructions)
            elif found := re.match(r"(?:@(!?%p\d+)\s+)?([\w.]+)\s*(.*);$", line):
                operation, _, kind = found[2].rpartition(".")
                operands = re.findall(r"\[[^\]]*\]|{[^}]*}|[^\s,]+", found[3])
                entry.instructions.append(
                    Instruction(found[1], operation or kind, kind, operands, found[2])
                )
            else:
                assert line == '.pragma "nounroll";', line

    def launch(self, entry: str, grid: tuple[int, int], arguments: bytes) -> None:
        """Run the blocks of a grid one after the other."""
        held = ctypes.create_string_buffer(arguments, len(arguments))
        kernel = self.entries[entry]
        symbols = {**self._symbols, kernel.parameter: ctypes.addressof(held)}
        with np.errstate(all="ignore"):
            for row in range(grid[1]):
                for column in range(grid[0]):
                    special = {"%ctaid.x": column, "%ctaid.y": row, "%nctaid.x": grid[0]}
                    Block(kernel, {**symbols, **special}).run()


class Block:
    """The threads of a block, with their registers."""

    def __init__(self, kernel: Entry, known: dict[str, int]) -> None:
        self._kernel, self._known = kernel, known
        self._registers: dict[str, Bits] = {"%tid.x": np.arange(THREADS, dtype=np.uint64)}
        self._at = np.zeros(THREADS, np.int64)

    def run(self) -> None:
        """To the end of all."""
        end = len(self._kernel.instructions)
        while (place := int(self._at.min())) < end:
            here = self._at == place
            one = self._kernel.instructions[place]
            if one.guard is not None:
                held = self.read(one.guard.lstrip("!")) != 0
                here &= ~held if one.guard[0] == "!" else held
            self._at[self._at == place] += 1
            self._do(one, here, end)

    def read(self, operand: str) -> Bits:
        """Bits of an operand: a register, a number or an address."""
        if operand in self._registers:
            return self._registers[operand]
        if found := re.match(r"0([fd])([0-9A-F]+)$", operand):
            value = int(found[2], 16)
        elif operand in self._known:
            value = self._known[operand]
        else:
            assert operand[0] != "%", f"{operand} is read before it is written"
            value = int(operand) & (1 << 64) - 1
        return np.full(THREADS, value, np.uint64)

    def write(self, register: str, value: Bits, here: npt.NDArray[np.bool_]) -> None:
        """Put bits into a register of some threads, as many as it has."""
        name = re.match(r"%([a-z]+)", register)
        assert name is not None, register
        value = value & np.uint64((1 << REGISTERS[name[1]]) - 1)
        before = self._registers.get(register, np.uint64(0))
        self._registers[register] = np.where(here, value, before)

    def _do(self, one: Instruction, here: npt.NDArray[np.bool_], end: int) -> None:
        name, _, how = one.operation.partition(".")
        into, *given = one.operands or [""]
        if name == "bra" or one.type == "bra":
            self._at[here] = self._kernel.labels[into]
        elif one.type == "ret":
            self._at[here] = end
        elif name in ("ld", "st"):
            self._move(one, here, store=name == "st")
        elif name == "bar":
            assert here.all() or (self._at[~here] == end).all()
        elif name == "shfl":
            self._shuffle(one, here)
        elif name == "mov" and "{" in "".join(one.operands):
            self._pair(into, given[0], here)
        else:
            self.write(into, self._computed(name, how, one, given), here)

    def _computed(self, name: str, how: str, one: Instruction, given: list[str]) -> Bits:
        bits, kind = [self.read(x) for x in given], one.type
        if name in ("mov", "cvta"):
            return bits[0]
        if name == "selp":
            return np.where(bits[2] != 0, bits[0], bits[1])
        if kind == "pred":
            return np.asarray(COMPUTED[name](*bits), np.uint64)
        if name == "setp":
            compared = COMPARED[how](typed(bits[0], kind), typed(bits[1], kind))
            return np.asarray(compared, np.uint64)
        if name == "cvt":
            target = how.rpartition(".")[2]
            number = typed(bits[0], kind)
            if target[0] != "f":  # To the width of a register, with the sign of what there was.
                return np.asarray(number.astype(np.int64)).view(np.uint64)
            return bits_of(number.astype(f"f{int(target[1:]) // 8}"))
        if name in ("shl", "shr"):
            number, by = typed(bits[0], kind), bits[1].astype(np.uint32)
            assert (by < int(kind[1:])).all()
            return bits_of(
                number << by.astype(number.dtype)
                if name == "shl"
                else number >> by.astype(number.dtype)
            )
        numbers = [typed(x, kind) for x in bits]
        if how == "wide":
            return bits_of(numbers[0].astype(f"{KINDS[kind[0]]}8") * numbers[1])
        assert kind[0] != "f" or how == "rn", one.text
        assert kind[0] == "f" or how in ("", "lo"), one.text
        return bits_of(COMPUTED[name](*numbers))

    def _move(self, one: Instruction, here: npt.NDArray[np.bool_], store: bool) -> None:
        place, value = one.operands if store else one.operands[::-1]
        base, _, offset = place.strip("[]").partition("+")
        first = self.read(base) + np.uint64(int(offset or 0) & (1 << 64) - 1)
        width = int(one.type[1:])
        for k, register in enumerate(re.findall(r"%\w+", value)):
            addresses = (first + np.uint64(k * width // 8))[here].tolist()
            assert not any(address % (width // 8) for address in addresses), one.text
            cells = [MEMORY[width].from_address(address) for address in addresses]
            if store:
                for cell, bits in zip(cells, self.read(register)[here].tolist()):
                    cell.value = bits & (1 << width) - 1
                continue
            read = np.zeros(THREADS, np.uint64)
            read[here] = [cell.value for cell in cells]
            if one.type[0] == "s":
                read = typed(read, one.type).astype(np.int64).view(np.uint64)
            self.write(register, read, here)

    def _shuffle(self, one: Instruction, here: npt.NDArray[np.bool_]) -> None:
        assert (here.reshape(-1, WARP).all(1) | ~here.reshape(-1, WARP).any(1)).all()
        into, value, way, *_ = one.operands
        lane = np.arange(THREADS) % WARP
        by = self.read(way).astype(np.int64)
        other = lane ^ by if ".bfly" in one.operation else lane + by
        other = np.where(other < WARP, other, lane)
        shuffled = self.read(value)[np.arange(THREADS) - lane + other]
        self.write(into.partition("|")[0], shuffled, here)

    def _pair(self, into: str, given: str, here: npt.NDArray[np.bool_]) -> None:
        """Of two registers one twice as wide, or the other way round."""
        parts = re.findall(r"%\w+", into if "{" in into else given)
        half = np.uint64(32)
        if "{" in into:
            whole = self.read(given)
            self.write(parts[0], whole & np.uint64(0xFFFFFFFF), here)
            self.write(parts[1], whole >> half, here)
        else:
            self.write(into, self.read(parts[0]) | self.read(parts[1]) << half, here)
