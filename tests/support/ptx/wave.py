"""Runs a wave: neighbouring programs of a launch, all their threads one vector, in lockstep where they agree.

Where threads part, those at the earliest instruction go first, until they meet again.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptx.code import Code, Line
from ptx.faults import Fault
from ptx.global_memory import GlobalMemory
from ptx.numbers import Array
from ptx.products import Products
from ptx.shared_memory import SharedMemory

WARP = 32
Mask = NDArray[np.bool_] | None  # None: all threads
Action = Callable[["Wave", Mask], None]


@dataclass(frozen=True)
class Instruction:
    """A line, ready to run. predicate: register, negation; target: of a branch; reads, writes: registers."""

    line: Line
    run: Action | None
    predicate: tuple[int, bool] | None
    target: int | None
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass
class Counts:
    """What a launch did. instructions: of the longest warp; bytes: by access, as "load 16"; reached: by line,
    whether a thread came there; acted: whether one did with its predicate true."""

    reached: NDArray[np.bool_]
    acted: NDArray[np.bool_]
    instructions: int = 0
    bytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Job:
    """What all waves of a launch have in common. early: the launch before may still run until a wait;
    operands: registers of Hopper's matrix instructions; longest: the most instructions of a thread."""

    code: Code
    instructions: list[Instruction]
    threads: int
    grid: tuple[int, int, int]
    shared: int
    parameters: dict[str, Array]
    memory: GlobalMemory
    counts: Counts
    early: bool
    operands: frozenset[int]
    longest: int | None


class Wave:
    """`count` programs from number `first` on."""

    def __init__(self, job: Job, first: int, count: int) -> None:
        self.job, self.memory, self.counts = job, job.memory, job.counts
        self.programs, self.size = count, count * job.threads
        thread = np.arange(self.size)
        self.program = thread // job.threads  # of each thread, in the wave
        self.number = self.program + first + 1  # of each thread, in the launch, from 1
        self.thread = (thread % job.threads).astype(np.uint32)
        self.warp = np.uint8(1) << (self.thread // WARP).astype(np.uint8)
        x, y, _ = job.grid
        number = self.number - 1
        self.program_ids = [n.astype(np.uint32) for n in (number % x, number // x % y, number // (x * y))]
        self.shared = SharedMemory(job.shared, count)
        self.registers: list[Array] = [np.zeros(self.size, dtype) for dtype in job.code.dtypes]
        self.early = np.full(count, job.early)
        self.products = Products(count, job.operands)
        self._steps = np.zeros(self.size // WARP, np.int64)

    def write(self, register: int, value: Array, mask: Mask) -> None:
        """Sets a register's bits; a value of another size is converted as its type says."""
        dtype = self.job.code.dtypes[register]
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(dtype)
        elif value.dtype != dtype:
            value = (value if value.ndim == 0 else np.ascontiguousarray(value)).view(dtype)
        if mask is not None:
            self.registers[register] = np.where(mask, value, self.registers[register])
        elif value.ndim == 0:
            self.registers[register] = np.full(self.size, value)
        else:
            self.registers[register] = value

    def whole_programs(self, mask: Mask, what: str) -> NDArray[np.bool_]:
        """The programs whose threads take part, which must be all threads of each."""
        if mask is None:
            return np.ones(self.programs, np.bool_)
        threads = mask.reshape(self.programs, -1)
        some = threads.any(1)
        if (some != threads.all(1)).any():
            raise Fault(f"{what} that not all threads reach")
        return some

    def whole_warps(self, mask: Mask, what: str) -> NDArray[np.bool_]:
        """The warps [N] that take part, which must be all threads of each."""
        if mask is None:
            return np.ones(self.size // WARP, np.bool_)
        threads = mask.reshape(-1, WARP)
        some = threads.any(1)
        if (some != threads.all(1)).any():
            raise Fault(f"{what} in a part of a warp")
        return some

    def run(self) -> None:
        """To the end of all threads."""
        waiting: dict[int, NDArray[np.bool_]] = {0: np.ones(self.size, np.bool_)}
        while waiting:
            place = min(waiting)
            self._run_strand(place, waiting.pop(place), waiting)
            if self.job.longest is not None and self._steps.max() > self.job.longest:
                raise Fault(f"a thread has executed {self._steps.max()} instructions and has not ended")
        if self.early.any():
            raise Fault(
                f"{self.job.code.name}: a program ends without griddepcontrol.wait: what is launched "
                "behind it may begin before the launch before it has ended"
            )
        self.counts.instructions = max(self.counts.instructions, int(self._steps.max()))

    def _run_strand(
        self, place: int, active: NDArray[np.bool_], waiting: dict[int, NDArray[np.bool_]]
    ) -> None:
        """Until the active threads part, or come to where others wait."""
        instructions = self.job.instructions
        full = bool(active.all())
        nearest = min(waiting, default=len(instructions))
        first, steps = place, 0
        while place < len(instructions) and place < nearest:
            instruction = instructions[place]
            steps += 1
            mask: Mask = None if full else active
            if instruction.predicate is not None:
                register, negated = instruction.predicate
                chosen = ~self.registers[register] if negated else self.registers[register]
                mask = chosen if full else chosen & active
                if not mask.any():
                    place += 1
                    continue
                if mask.all():
                    mask = None
            self.counts.acted[place] = True
            if instruction.run is not None:
                try:
                    self.products.check(
                        instruction.line, instruction.reads, instruction.writes, self.program, mask
                    )
                    instruction.run(self, mask)
                except Fault as fault:
                    raise self._fault(fault, instruction) from None
                place += 1
                continue
            # A branch, or the end.
            goes = active if mask is None or np.array_equal(mask, active) else mask
            if goes is not active:
                _join(waiting, place + 1, active & ~goes)
            if instruction.target is not None:
                _join(waiting, instruction.target, goes)
            break
        else:
            if place < len(instructions):
                _join(waiting, place, active)
        self.counts.reached[first : first + steps] = True
        self._steps[active.reshape(-1, WARP).any(1)] += steps

    def _fault(self, fault: Fault, instruction: Instruction) -> Fault:
        line = instruction.line
        return Fault(f"{self.job.code.name}, {line.source}: {fault}: {line.text[:100]}")


def _join(waiting: dict[int, NDArray[np.bool_]], place: int, threads: NDArray[np.bool_]) -> None:
    waiting[place] = waiting[place] | threads if place in waiting else threads
