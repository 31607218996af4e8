"""Hopper's matrix instructions on their way: registers and bytes that they hold until they are waited for."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptx.code import Line
from ptx.faults import Fault
from ptx.shared_memory import SharedMemory


@dataclass
class InFlight:
    """One instruction of one warpgroup. elements: of shared memory that it reads; warps: as bits;
    generation: how many groups its program had committed before; registers: that it writes; read: that it
    reads."""

    elements: NDArray[np.int64]
    warps: int
    program: int
    generation: int
    registers: tuple[int, ...]
    read: tuple[int, ...]


class Products:
    """Those of a wave. operands: the registers of all matrix instructions of the kernel."""

    def __init__(self, programs: int, operands: frozenset[int]) -> None:
        self._operands = operands
        self._pending: dict[int, NDArray[np.int64]] = {}
        self._unfenced = set(operands)  # the first instruction of a kernel needs a fence, too
        self._in_flight: list[InFlight] = []
        self.committed = np.zeros(programs, np.int64)

    @property
    def in_flight(self) -> bool:
        """Whether one has not been waited for."""
        return bool(self._in_flight)

    def check(
        self,
        line: Line,
        reads: frozenset[int],
        writes: frozenset[int],
        program: NDArray[np.int64],
        mask: NDArray[np.bool_] | None,
    ) -> None:
        """Raises Fault where another instruction touches a register that is on its way."""
        if not self._operands or line.opcode[0] == "wgmma":
            return
        self._unfenced |= (reads | writes) & self._operands
        if self._pending:
            for register in (reads | writes) & self._pending.keys():
                waiting = self._pending[register] > 0
                if waiting[program if mask is None else program[mask]].any():
                    raise Fault("touches a register of a wgmma that has not been waited for")

    def fence(self) -> None:
        """Registers that threads have touched may be operands now."""
        self._unfenced.clear()

    def begin(self, flight: InFlight) -> None:
        """An instruction begins."""
        if self._unfenced & {*flight.registers, *flight.read}:
            raise Fault("a register of a wgmma was touched by threads since the last wgmma.fence")
        self._in_flight.append(flight)
        for register in {*flight.registers, *flight.read}:
            count = self._pending.setdefault(register, np.zeros(len(self.committed), np.int64))
            count[flight.program] += 1

    def commit(self, programs: NDArray[np.bool_]) -> None:
        """What has begun is a group."""
        self.committed[programs] += 1

    def wait(self, programs: NDArray[np.bool_], pending: int, shared: SharedMemory) -> None:
        """For all groups but the newest `pending`."""
        left = []
        for flight in self._in_flight:
            done = flight.generation < self.committed[flight.program] - pending
            if not (done and programs[flight.program]):
                left.append(flight)
                continue
            shared.multiplied(flight.elements, flight.warps)
            for register in {*flight.registers, *flight.read}:
                self._pending[register][flight.program] -= 1
        self._in_flight = left
        self._pending = {register: count for register, count in self._pending.items() if count.any()}
