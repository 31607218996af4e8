"""Runs one launch of a kernel, given as PTX, over NumPy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

import ptx.arithmetic
import ptx.matrix
import ptx.movement
import ptx.warp  # noqa: F401  # these four register what they decode
from ptx.code import Code, Line, read
from ptx.decode import decode, instruction, product_registers
from ptx.global_memory import GAP, GlobalMemory
from ptx.numbers import BITS, TYPES, Array
from ptx.wave import Counts, Instruction, Job, Wave

THREADS = 4096  # of a wave, about: NumPy's calls cost less than what they do from here on


class Buffer:
    """Bytes that a kernel is given the address of, and changes in place.

    unwritten: bytes that must be written before they are read. unfinished: what the launch before has
    written, where that may still run. written: what this launch has.
    """

    def __init__(
        self,
        data: NDArray[np.uint8],
        unwritten: NDArray[np.bool_] | None = None,
        unfinished: NDArray[np.bool_] | None = None,
    ) -> None:
        self.data, self.unwritten, self.unfinished = data, unwritten, unfinished
        self.written = np.zeros(len(data), np.bool_)


Argument = int | float | tuple[Buffer, int]


@dataclass(frozen=True)
class Prepared:
    """A kernel, ready to run. operands: registers of Hopper's matrix instructions."""

    code: Code
    instructions: list[Instruction]
    operands: frozenset[int]

    def with_line(self, at: int, line: Line | None) -> "Prepared":
        """The kernel with another instruction at a place, or with none there."""
        changed = instruction(line, self.code) if line else _nothing(self.instructions[at])
        return replace(self, instructions=[*self.instructions[:at], changed, *self.instructions[at + 1 :]])


def _nothing(removed: Instruction) -> Instruction:
    return Instruction(removed.line, lambda wave, mask: None, None, None, frozenset(), frozenset())


@lru_cache(maxsize=64)
def prepare(ptx: str) -> Prepared:
    """The first kernel of a PTX module."""
    code = read(ptx)
    return Prepared(code, decode(code), product_registers(code))


def execute(
    ptx: str | Prepared,
    grid: Sequence[int],
    arguments: Sequence[Argument],
    *,
    threads: int,
    shared: int = 0,
    early: bool = False,
    longest: int | None = None,
) -> Counts:
    """Runs all programs of the grid; an argument that is a buffer comes with an offset in bytes.

    longest: the most instructions that a thread may execute; None: any number.
    """
    kernel = prepare(ptx) if isinstance(ptx, str) else ptx
    code = kernel.code
    buffers = {id(given[0]): given[0] for given in arguments if isinstance(given, tuple)}
    memory = GlobalMemory(sum(len(buffer.data) + 2 * GAP for buffer in buffers.values()))
    addresses = {
        key: memory.allocate(buffer.data, buffer.unwritten, buffer.unfinished)
        for key, buffer in buffers.items()
    }
    parameters = _parameters(code, arguments, addresses)
    whole = (*grid, 1, 1, 1)[:3]
    job = Job(
        code,
        kernel.instructions,
        threads,
        whole,
        shared,
        parameters,
        memory,
        Counts(*np.zeros((2, len(code.lines)), np.bool_)),
        early,
        kernel.operands,
        longest,
    )
    programs, size = int(np.prod(whole)), max(1, THREADS // threads)
    with np.errstate(all="ignore"):
        for first in range(0, programs, size):
            Wave(job, first, min(size, programs - first)).run()
    for key, buffer in buffers.items():
        buffer.data[:], buffer.written = memory.contents(addresses[key], len(buffer.data))
    return job.counts


def _parameters(code: Code, arguments: Sequence[Argument], addresses: Mapping[int, int]) -> dict[str, Array]:
    """By name, as bits. Triton appends parameters for scratch memory, which our kernels have none of."""
    found: dict[str, Array] = {}
    given = [*arguments, *[0] * (len(code.parameters) - len(arguments))]
    for (kind, name), argument in zip(code.parameters, given, strict=True):
        dtype = TYPES[kind]
        if isinstance(argument, tuple):
            value = np.uint64(addresses[id(argument[0])] + argument[1])
        elif dtype.kind == "f":
            value = dtype.type(argument)
        else:
            value = BITS[dtype.itemsize].type(int(argument) & ((1 << 8 * dtype.itemsize) - 1))
        found[name] = value
    return found
