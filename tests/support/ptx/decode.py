"""From lines to instructions: operands are looked up once, and each becomes a function of the wave."""

from collections.abc import Callable
from functools import partial

import numpy as np

from ptx import forms
from ptx.code import Code, Line, elements
from ptx.numbers import BITS, TYPES, Array, immediate, integer
from ptx.wave import Action, Instruction, Mask, Wave

Source = Callable[[Wave], Array]
Target = Callable[[Wave, Array, Mask], None]
Decoder = Callable[["Operands"], Action]
DECODERS: dict[str, Decoder] = {}
_AXES = "xyz"


class Operands:
    """What an instruction names; remembers which registers it reads and writes."""

    def __init__(self, line: Line, code: Code) -> None:
        self.line, self.code = line, code
        self.parts, self.kind = line.opcode, line.kind
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def __len__(self) -> int:
        return len(self.line.operands)

    def text(self, index: int) -> str:
        """The operand as it is written."""
        return self.line.operands[index]

    def source(self, index: int, kind: str | None = None) -> Source:
        """Reads an operand as a type, by default the instruction's."""
        return self.value(self.line.operands[index], kind or self.kind)

    def sources(self, kind: str, first: int = 1) -> list[Source]:
        """All operands from one on."""
        return [self.source(index, kind) for index in range(first, len(self))]

    def value(self, name: str, kind: str) -> Source:
        """Reads a register, a special register or a constant as a type."""
        dtype = TYPES[kind]
        if name == "%tid.x":
            return lambda wave: wave.thread.view(dtype)
        if name.startswith("%ctaid."):
            axis = _AXES.index(name[-1])
            return lambda wave: wave.program_ids[axis].view(dtype)
        if name.startswith("%nctaid."):
            axis = _AXES.index(name[-1])
            return lambda wave: np.uint32(wave.job.grid[axis]).view(dtype)
        if name == "%laneid":
            return lambda wave: (wave.thread & np.uint32(31)).view(dtype)
        if name == "global_smem":
            return lambda wave: np.zeros(wave.size, dtype)
        if name[0] == "%" or (name[0].isalpha() and name not in ("inf",)):
            return self._register(name, dtype)
        constant = immediate(name, kind)
        return lambda wave: constant

    def _register(self, name: str, dtype: np.dtype) -> Source:
        register = self.code.register(name)
        self.reads.add(register)
        own = self.code.dtypes[register]
        if own == dtype:
            return lambda wave: wave.registers[register]
        if own.itemsize == dtype.itemsize:
            return lambda wave: wave.registers[register].view(dtype)
        bits = BITS[dtype.itemsize]
        return lambda wave: wave.registers[register].astype(bits).view(dtype)

    def target(self, index: int = 0) -> Target:
        """Writes an operand."""
        return self.into(self.line.operands[index])

    def into(self, name: str) -> Target:
        """Writes a register."""
        if name == "_":
            return lambda wave, value, mask: None
        register = self.code.register(name)
        self.writes.add(register)
        return lambda wave, value, mask: wave.write(register, value, mask)

    def numbers(self, index: int) -> list[int]:
        """The registers of {a, b, ...}, by number; they count as neither read nor written."""
        return [self.code.register(name) for name in elements(self.line.operands[index])]

    def address(self, index: int) -> Callable[[Wave], Array]:
        """[base + offset], int64."""
        text = self.line.operands[index].strip("[] ")
        base, _, offset = text.partition("+")
        distance = np.int64(integer(offset.strip()) if offset else 0)
        kind = "u64" if base.strip().startswith("%rd") else "u32"
        read = self.value(base.strip(), kind)
        return lambda wave: read(wave).astype(np.int64) + distance

    def width(self) -> tuple[int, int]:
        """(bytes of an element, elements) of a load or a store."""
        vector = next((part for part in self.parts if part in ("v2", "v4", "v8")), "v1")
        return TYPES[self.kind].itemsize, int(vector[1:])


def operation(*names: str) -> Callable[[Decoder], Decoder]:
    """Registers what decodes instructions that begin so."""

    def register(decode: Decoder) -> Decoder:
        for name in names:
            DECODERS[name] = decode
        return decode

    return register


def decode(code: Code) -> list[Instruction]:
    """All instructions of a kernel."""
    return [instruction(line, code) for line in code.lines]


def instruction(line: Line, code: Code) -> Instruction:
    """One line of a kernel. Raises Fault if the interpreter does not know it."""
    forms.check(line)
    build = partial(Instruction, line)
    predicate = None
    if line.predicate is not None:
        predicate = code.register(line.predicate[0]), line.predicate[1]
    if line.opcode[0] in ("bra", "ret"):
        target = code.labels[line.operands[0]] if line.opcode[0] == "bra" else None
        return build(None, predicate, target, frozenset(), frozenset())
    operands = Operands(line, code)
    action = DECODERS[line.opcode[0]](operands)
    return build(action, predicate, None, frozenset(operands.reads), frozenset(operands.writes))


def product_registers(code: Code) -> frozenset[int]:
    """All registers of Hopper's matrix instructions."""
    found = set()
    for line in code.lines:
        if line.opcode[:2] == ("wgmma", "mma_async"):
            for operand in line.operands[:2]:
                if operand.startswith("{"):
                    found |= {code.register(name) for name in elements(operand)}
    return frozenset(found)
