"""The text of a compiled XLA program (HLO), read: computations, instructions, and how often each of them runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{")


class Shape(NamedTuple):
    """An array in the text: dtype, dimensions, tile of its two minor dimensions, whether in main memory."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]
    tile: tuple[int, ...]
    resident: bool
    """In main memory (HBM), and not in a faster one."""

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.prod(self.dims) * width(self.dtype)

    @property
    def stored(self) -> int:
        """Padded to whole tiles, as a TPU stores it."""
        dims = [self.dims[i] for i in self.order]  # most minor first
        for i, size in enumerate(reversed(self.tile[-len(dims) :] if dims else ())):
            dims[i] = -(-dims[i] // size) * size
        return math.prod(dims) * width(self.dtype)


class Instruction(NamedTuple):
    """A line of the text."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in what follows the operands."""
        found = re.search(pattern, self.rest)
        return found.group(1) if found else None


Computation = dict[str, Instruction]


class Module:
    """A program's computations by name, and the walk through them that counts."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.roots: dict[str, str] = {}
        self.devices = int((re.search(r"num_partitions=(\d+)", text) or re.search(r"()", text)).group(1) or 1)
        for line in text.splitlines():
            line = re.sub(r"/\*.*?\*/", "", line)
            if header := HEADER.match(line):
                current = header.group(2)
                self.computations[current] = {}
                self.entry = current if header.group(1) else getattr(self, "entry", current)
            elif found := LINE.match(line):
                instruction = _instruction(found.group(2), line[found.end() :])
                self.computations[current][instruction.name] = instruction
                if found.group(1):
                    self.roots[current] = instruction.name
        self.unknown_loops = 0

    def walk(
        self, name: str | None = None, times: int = 1, scheduled: bool = True
    ) -> Iterator[tuple[str, Instruction, int, bool]]:
        """Every instruction: its computation, itself, how often it runs, and whether it is an operation of its own
        (rather than inside a fusion, whose operands and result alone pass through memory)."""
        name = self.entry if name is None else name
        for instruction in self.computations[name].values():
            yield name, instruction, times, scheduled
            if instruction.opcode == "while":
                trips = self.trips(name, instruction)
                yield from self.walk(instruction.attribute(r"body=%?([\w.\-]+)"), times * trips, scheduled)
            elif instruction.opcode == "conditional":
                branches = instruction.attribute(r"branch_computations=\{([^}]*)\}") or ""
                for branch in re.findall(r"[\w.\-]+", branches):
                    yield from self.walk(branch, times, scheduled)
            elif called := instruction.attribute(r"calls=%?([\w.\-]+)"):
                yield from self.walk(called, times, scheduled and instruction.opcode != "fusion")
            elif instruction.opcode == "call":
                yield from self.walk(instruction.attribute(r"to_apply=%?([\w.\-]+)"), times, scheduled)

    def trips(self, name: str, loop: Instruction) -> int:
        """How often a loop runs: as XLA says, or from its counter's start, step and limit; else 1, and it is noted."""
        if known := loop.attribute(r'known_trip_count"?:?=?\{"?n"?:"?(\d+)'):
            return int(known)
        start, step, limit = self.counter(name, loop) or (None, None, None)
        if start is None or limit is None or not step:
            self.unknown_loops += 1
            return 1
        return max(0, -(-(limit - start) // step))

    def counter(self, name: str, loop: Instruction) -> tuple[int | None, int | None, int | None] | None:
        """(start, step, limit) of the number that a loop counts up, each None where it is computed; None for a loop
        that doesn't count up to a limit."""
        condition, body = (loop.attribute(rf"{part}=%?([\w.\-]+)") for part in ("condition", "body"))
        test = self.computations[condition][self.roots[condition]]
        limit = next((self.constant(condition, operand) for operand in reversed(test.operands)), None)
        counter = self.computations[condition].get(test.operands[0]) if test.operands else None
        index = counter.attribute(r"index=(\d+)") if counter else None
        initial, final = self.computations[name].get(loop.operands[0]), self.computations[body][self.roots[body]]
        if test.opcode != "compare" or "direction=LT" not in test.rest or index is None:
            return None
        if initial is None or {initial.opcode, final.opcode} != {"tuple"}:
            return None
        start = self.constant(name, initial.operands[int(index)])
        update = self.source(body, final.operands[int(index)])
        adds = update is not None and update.opcode == "add"
        steps = [self.constant(body, operand) for operand in update.operands] if adds else []
        return start, next((step for step in steps if step), None), limit

    def constant(self, name: str, operand: str) -> int | None:
        """The integer that an operand is; None where it is computed."""
        instruction = self.source(name, operand)
        if instruction is None or instruction.opcode != "constant" or not re.match(r"-?\d+$", instruction.operands[0]):
            return None
        return int(instruction.operands[0])

    def source(self, name: str, operand: str) -> Instruction | None:
        """What makes an operand, looking through copies; None where it isn't an instruction's name."""
        instruction = self.computations[name].get(operand)
        while instruction and instruction.opcode in ("copy", "convert", "bitcast"):
            instruction = self.computations[name].get(instruction.operands[0])
        return instruction

    def shapes(self, name: str, instruction: Instruction) -> list[Shape]:
        """Shapes of all operands."""
        computation = self.computations[name]
        return [shape for o in instruction.operands if o in computation for shape in computation[o].shapes]


def width(dtype: str) -> int:
    """Bytes of a number, a whole one for those of a few bits; 0 for what holds none (a token)."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else int(dtype == "pred")


def _instruction(name: str, text: str) -> Instruction:
    """Parses `type opcode(operands), attributes`."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shapes, text = tuple(_shape(*found) for found in SHAPE.findall(text[:end])), text[end:].lstrip()
    opening = text.index("(")
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing]
    # A constant's value and a parameter's number stand where others have operands.
    operands = re.findall(r"%([\w.\-]+)", inside) or [part.split()[-1] for part in inside.split(",") if part.split()]
    return Instruction(name, shapes, text[:opening], tuple(operands), text[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """Place of the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"HLO line without its closing parenthesis: {text[:80]}")


def _shape(dtype: str, dims: str, order: str, layout: str) -> Shape:
    """Parses `bf16[4,128]{1,0:T(8,128)(2,1)S(1)}`."""
    sizes = tuple(int(size) for size in dims.split(",") if size)
    minor = tuple(int(i) for i in order.split(",") if i) or tuple(reversed(range(len(sizes))))
    tile, space = re.search(r"T\(([\d,]+)\)", layout), re.search(r"S\((\d+)\)", layout)
    tiles = tuple(int(size) for size in tile.group(1).split(",")) if tile else ()
    return Shape(dtype, sizes, minor, tiles, resident=space is None or space.group(1) == "0")
