"""PTX as text, taken apart: instructions, labels, registers and parameters of one kernel."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptx.faults import Fault
from ptx.numbers import BITS, TYPES

_REGISTER = re.compile(r"%([a-z]+)(\d+)$")
_DTYPES = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "f": np.uint32, "rd": np.uint64, "fd": np.uint64}
_PREDICATE = re.compile(r"@(!?)(%p\d+)\s+(.*)")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,\n]*?(\w+_param_\d+)")
_LABEL = re.compile(r"(\$\w+):$")
_SCOPE = re.compile(r"^\{\s*(?=$|[@.a-z])")  # of inline assembly
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+([A-Za-z].*)")  # within inline assembly
_NAME = re.compile(r"(?<![\w%$.])([A-Za-z_]+)(\d*)\b")
_LOCATION = re.compile(r"\.loc\s.*//\s*(\S+)")


@dataclass(frozen=True)
class Line:
    """One instruction. opcode: its parts between dots; predicate: a register, and whether it is negated."""

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: tuple[str, bool] | None
    text: str
    source: str

    @property
    def kind(self) -> str:
        """The last part of the opcode, most often a type."""
        return self.opcode[-1]


@dataclass
class Code:
    """A kernel. parameters: (type, name) in order; registers: numbered as they first occur. Those of inline
    assembly are named "name:type", by their declaration."""

    name: str
    parameters: list[tuple[str, str]]
    lines: list[Line] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    dtypes: list[np.dtype] = field(default_factory=list)

    def register(self, name: str) -> int:
        """The number of a register."""
        if name not in self.registers:
            _, declared, kind = name.partition(":")
            if declared:
                dtype = np.bool_ if kind == "pred" else BITS[TYPES[kind].itemsize]
            elif match := _REGISTER.match(name):
                dtype = _DTYPES[match[1]]
            else:
                raise Fault(f"{name} is used, but not declared")
            self.registers[name] = len(self.dtypes)
            self.dtypes.append(np.dtype(dtype))
        return self.registers[name]


def read(ptx: str) -> Code:
    """The first kernel of a PTX module."""
    body = ptx[ptx.index(".entry") :]
    head, body = body.split("{", 1)
    name = re.search(r"\.entry\s+(\w+)", head)
    assert name is not None
    code = Code(name[1], _PARAMETER.findall(head))
    source, inline = "", dict[str, str]()  # types by the name; of "a<2>", which is a0 and a1, by "a<"
    for text in _statements(body.split("$L__func_end")[0]):
        if location := _LOCATION.match(text):
            source = location[1]
        elif label := _LABEL.match(text):
            code.labels[label[1]] = len(code.lines)
        elif declared := _DECLARED.match(text):
            for name in declared[2].split(","):
                inline["".join(name.strip().partition("<")[:2])] = declared[1]
        elif not text.startswith("."):
            code.lines.append(_line(text, source, inline))
    return code


def _statements(body: str) -> Iterator[str]:
    for line in body.split("\n"):
        stripped = line.strip()
        if stripped.startswith(".loc"):
            yield stripped
            continue
        for part in stripped.split("//")[0].split(";"):
            statement = _SCOPE.sub("", part.strip())
            if statement and statement != "}":
                yield statement


def _line(text: str, source: str, inline: dict[str, str]) -> Line:
    predicate = None
    rest = text
    if match := _PREDICATE.match(text):
        predicate, rest = (match[2], match[1] == "!"), match[3]
    opcode, *operands = rest.split(None, 1)

    def typed(match: re.Match[str]) -> str:
        kind = inline.get(match[0]) or inline.get(f"{match[1]}<")
        return match[0] if kind is None else f"{match[0]}:{kind}"

    named = _NAME.sub(typed, operands[0] if operands else "")
    return Line(tuple(opcode.split(".")), tuple(split(named)), predicate, text, source)


def split(operands: str) -> list[str]:
    """Operands between the commas that are outside of brackets."""
    found, depth, current = [], 0, ""
    for sign in operands:
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += sign
    return [*found, current.strip()] if current.strip() else found


def elements(operand: str) -> list[str]:
    """The registers of {a, b, ...}, or the one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]
