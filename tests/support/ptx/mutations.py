"""What a wrong compiler or a wrong kernel would do: one instruction of the PTX changed at a time."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ptx.cases import Case
from ptx.code import Line
from ptx.execute import Prepared, prepare
from ptx.launches import Interpreted
from ptx.numbers import TYPES, integer

_ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\w+))?\s*\]")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")
_MEMORY = ("ld", "st", "cp", "ldmatrix", "stmatrix")
_LONGEST = 5  # times as many instructions as without the change: then it does not end


@dataclass(frozen=True)
class Mutant:
    """A change: its class and kind, the line, and what is there instead; None: nothing."""

    group: str
    kind: str
    at: int
    line: Line | None


def _barriers(line: Line) -> Iterator[tuple[str, Line | None]]:
    if line.opcode[0] in ("bar", "barrier") and "warp" not in line.opcode:
        yield "removed", None


def _waits(line: Line) -> Iterator[tuple[str, Line | None]]:
    if "wait_group" in line.opcode:
        yield "weakened by one group", _with_operand(line, 0, str(integer(line.operands[0]) + 1))
    if "wait_group" in line.opcode or "wait_all" in line.opcode or line.opcode == ("griddepcontrol", "wait"):
        yield "removed", None
    if "commit_group" in line.opcode:
        yield "group not closed", None


def _fences(line: Line) -> Iterator[tuple[str, Line | None]]:
    if line.opcode[0] == "fence" or line.opcode[:2] == ("wgmma", "fence"):
        yield "removed", None


def _predicates(line: Line) -> Iterator[tuple[str, Line | None]]:
    if line.predicate is not None:
        register, negated = line.predicate
        yield "inverted", replace(line, predicate=(register, not negated))
        if line.opcode[0] in _MEMORY:
            yield "dropped", replace(line, predicate=None)
    if line.opcode[0] == "cp" and len(line.operands) > 3:
        yield "dropped", replace(line, operands=line.operands[:3])


def _strides(line: Line) -> Iterator[tuple[str, Line | None]]:
    if line.opcode[0] in _MEMORY and "param" not in line.opcode and "bulk" not in line.opcode:
        for index, operand in enumerate(line.operands):
            if match := _ADDRESS.match(operand):
                offset = integer(match[2] or "0") + _width(line)
                yield "offset", _with_operand(line, index, f"[{match[1]} + {offset}]")
    if line.opcode[0] == "shl" and _NUMBER.match(line.operands[2]):
        yield "stride doubled", _with_operand(line, 2, str(integer(line.operands[2]) + 1))
    if line.opcode[0] in ("mul", "mad") and line.kind[0] in "su" and _NUMBER.match(line.operands[2]):
        yield "stride", _with_operand(line, 2, str(integer(line.operands[2]) + 1))


GROUPS: dict[str, Callable[[Line], Iterator[tuple[str, Line | None]]]] = {
    "barrier": _barriers,
    "wait": _waits,
    "fence": _fences,
    "predicate": _predicates,
    "stride or offset": _strides,
}


def _width(line: Line) -> int:
    """Bytes of one access."""
    if line.opcode[0] == "cp":
        return integer(line.operands[2])
    if line.opcode[0] in ("ldmatrix", "stmatrix"):
        return 16
    vector = next((part for part in line.opcode if part in ("v2", "v4", "v8")), "v1")
    return TYPES[line.kind].itemsize * int(vector[1:])


def _with_operand(line: Line, index: int, operand: str) -> Line:
    return replace(line, operands=(*line.operands[:index], operand, *line.operands[index + 1 :]))


def mutants(kernel: Prepared) -> Iterator[Mutant]:
    """All changes of a kernel, by place."""
    for at, line in enumerate(kernel.code.lines):
        for group, changes in GROUPS.items():
            for kind, changed in changes(line):
                yield Mutant(group, kind, at, changed)


@dataclass
class Subject:
    """A kernel's PTX, and the cases that launch it with the lines that threads come to, and those where a
    predicate is true for one; instructions: of the longest warp."""

    kernel: str
    ptx: str
    capability: int
    cases: list[tuple[Case, set[int], set[int]]] = field(default_factory=list)
    instructions: int = 0

    def reaching(self, mutant: Mutant) -> list[Case]:
        """The cases to which a change could make a difference."""
        by = 1 if mutant.group == "predicate" else 2
        return [own[0] for own in self.cases if mutant.at in own[by]]

    @property
    def prepared(self) -> Prepared:
        """What is run without a change."""
        return prepare(self.ptx)


def subjects(cases: list[Case], capability: int) -> list[Subject]:
    """All kernels that cases launch. Each case has to pass."""
    found: dict[str, Subject] = {}
    for case in cases:
        with Interpreted(capability) as gpu:
            assert not [check for check in case.run() if check.failed()], case.text
        lines: dict[str, tuple[set[int], set[int]]] = {}
        for run in gpu.runs:
            subject = found.setdefault(run.ptx, Subject(run.kernel, run.ptx, capability))
            subject.instructions = max(subject.instructions, run.counts.instructions)
            reached, acted = lines.setdefault(run.ptx, (set(), set()))
            reached.update(run.counts.reached.nonzero()[0].tolist())
            acted.update(run.counts.acted.nonzero()[0].tolist())
        for ptx, own in lines.items():
            found[ptx].cases.append((case, *own))
    return list(found.values())


def noticed(subject: Subject, mutant: Mutant) -> bool | None:
    """Whether one of the cases fails with the change; None if none of them reaches the place."""

    def change(ptx: str, kernel: Prepared) -> Prepared:
        return kernel.with_line(mutant.at, mutant.line) if ptx == subject.ptx else kernel

    own = subject.reaching(mutant)
    return any(fails(case, subject, change) for case in own) if own else None


def fails(case: Case, subject: Subject, change: Callable[[str, Prepared], Prepared]) -> bool:
    """Whether a case finds a fault or another result than the reference's."""
    longest = _LONGEST * (subject.instructions + 1000)
    try:
        with Interpreted(subject.capability, change, longest):
            return any(check.failed() for check in case.run())
    except Exception:  # a Fault, or what the garbage led to
        return True


def sample(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """At most so many of each class, in order."""
    dice = random.Random(seed)
    chosen: list[Mutant] = []
    for group in GROUPS:
        own = [mutant for mutant in found if mutant.group == group]
        chosen += dice.sample(own, min(count, len(own)))
    return sorted(chosen, key=lambda mutant: mutant.at)
