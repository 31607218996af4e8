"""Products of matrices by one warp (mma.sync), and on Hopper by four of them (wgmma).

Products are summed in float64 and rounded once, which a tensor core does not promise; tests allow for it.
"""

import numpy as np
from numpy.typing import NDArray

from ptx.code import elements
from ptx.decode import Operands, Source, operation
from ptx.faults import Fault
from ptx.movement import lanes, spread
from ptx.numbers import Array, halves, integer, widened
from ptx.products import InFlight
from ptx.wave import WARP, Action, Mask, Wave

_LANE = np.arange(WARP)
_GROUP, _PLACE = _LANE // 4, _LANE % 4
WARPGROUP = 128


@operation("mma")
def _multiply(o: Operands) -> Action:
    kind = o.parts[7]
    targets = [o.into(name) for name in elements(o.text(0))]
    a, b = ([o.value(name, "b32") for name in elements(o.text(index))] for index in (1, 2))
    c = [o.value(name, "f32") for name in elements(o.text(3))]

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole_warps(mask, "mma")
        left, right, total = (_matrices(wave, mask, part, kind) for part in (a, b, c))
        with np.errstate(all="ignore"):
            product = (left @ right + total).astype(np.float32)
        for number, target in enumerate(targets):
            rows, columns = _GROUP + 8 * (number >> 1), 2 * _PLACE + (number & 1)
            target(wave, spread(wave, product[:, rows, columns].ravel(), mask), mask)

    def _matrices(wave: Wave, mask: Mask, registers: list[Source], kind: str) -> NDArray[np.float64]:
        values = [lanes(register(wave), mask).reshape(-1, WARP) for register in registers]
        if registers is c:
            whole = np.zeros((len(values[0]), 16, 8))
            for number, value in enumerate(values):
                whole[:, _GROUP + 8 * (number >> 1), 2 * _PLACE + (number & 1)] = value
            return whole
        if registers is b:
            whole = np.zeros((len(values[0]), 16, 8))
            for number, value in enumerate(values):
                low, high = halves(value, kind)
                whole[:, 2 * _PLACE + 8 * number, _GROUP] = low
                whole[:, 2 * _PLACE + 8 * number + 1, _GROUP] = high
            return whole
        return _left(values, kind)

    return run


def _left(values: list[Array], kind: str) -> NDArray[np.float64]:
    """The first operand, [warps, 16, 16], of four registers [warps, 32]."""
    whole = np.zeros((len(values[0]), 16, 16))
    for number, value in enumerate(values):
        low, high = halves(value, kind)
        rows, columns = _GROUP + 8 * (number & 1), 2 * _PLACE + 8 * (number >> 1)
        whole[:, rows, columns] = low
        whole[:, rows, columns + 1] = high
    return whole


@operation("wgmma")
def _hopper(o: Operands) -> Action:
    if "fence" in o.parts:
        return lambda wave, mask: wave.products.fence()
    if "commit_group" in o.parts:
        return lambda wave, mask: wave.products.commit(wave.whole_programs(mask, "a commit of products"))
    if "wait_group" in o.parts:
        pending = integer(o.text(0))
        return lambda wave, mask: wave.products.wait(
            wave.whole_programs(mask, "a wait for products"), pending, wave.shared
        )
    return _WarpgroupProduct(o).run


class _WarpgroupProduct:
    """wgmma.mma_async: d = a b (+ d); a in registers or in shared memory, b in shared memory."""

    def __init__(self, o: Operands) -> None:
        columns = o.parts[4].removeprefix("m64n").removesuffix("k16")
        self._columns, self._kind = int(columns), o.parts[6]
        self._total = o.numbers(0)
        self._in_registers = o.text(1).startswith("{")
        self._a_registers = o.numbers(1) if self._in_registers else []
        self._a = None if self._in_registers else o.source(1, "u64")
        self._b, self._adds = o.source(2, "u64"), o.source(3, "pred")
        flags = [integer(o.text(index)) for index in range(4, len(o))]
        if flags[:2] != [1, 1]:
            raise Fault("negated operands of a wgmma are not modelled")
        self._a_transposed = not self._in_registers and bool(flags[2])
        self._b_transposed = bool(flags[-1])
        self.operands = frozenset(self._total + self._a_registers)

    def run(self, wave: Wave, mask: Mask) -> None:
        for program in np.flatnonzero(wave.whole_programs(mask, "wgmma")):
            for start in range(0, wave.job.threads, WARPGROUP):
                self._multiply(wave, int(program), start)

    def _multiply(self, wave: Wave, program: int, start: int) -> None:
        first = program * wave.job.threads + start
        own = slice(first, first + WARPGROUP)
        reads = []
        if self._a is None:
            values = [wave.registers[register][own].reshape(4, WARP) for register in self._a_registers]
            left = _left(values, self._kind).reshape(64, 16)
        else:
            descriptor = int(np.broadcast_to(self._a(wave), wave.size)[first])
            left = self._tile(wave, program, descriptor, 64, self._a_transposed, reads)
        descriptor = int(np.broadcast_to(self._b(wave), wave.size)[first])
        right = self._tile(wave, program, descriptor, self._columns, self._b_transposed, reads)
        total = np.zeros((64, self._columns))
        adds = bool(np.broadcast_to(self._adds(wave), wave.size)[first])
        lane = np.arange(WARPGROUP)
        warp, group, place = lane // WARP, lane % WARP // 4, lane % 4
        for number, register in enumerate(self._total):
            rows, columns = self._element(number, warp, group, place)
            if adds:
                total[rows, columns] = wave.registers[register][own].view(np.float32)
        with np.errstate(all="ignore"):
            product = (left @ right.T + total).astype(np.float32)
        for number, register in enumerate(self._total):
            rows, columns = self._element(number, warp, group, place)
            wave.registers[register] = wave.registers[register].copy()
            wave.registers[register][own] = product[rows, columns].view(np.uint32)
        warps = int(np.bitwise_or.reduce(wave.warp[own]))
        touched = tuple(self._total if adds else []) + tuple(self._a_registers)
        generation = int(wave.products.committed[program])
        wave.products.begin(
            InFlight(np.concatenate(reads), warps, program, generation, tuple(self._total), touched)
        )

    @staticmethod
    def _element(number: int, warp: Array, group: Array, place: Array) -> tuple[Array, Array]:
        """Row and column of each thread's element in a register of the sum."""
        return 16 * warp + group + 8 * (number >> 1 & 1), 8 * (number >> 2) + 2 * place + (number & 1)

    def _tile(
        self,
        wave: Wave,
        program: int,
        descriptor: int,
        rows: int,
        transposed: bool,
        reads: list[NDArray[np.int64]],
    ) -> NDArray[np.float64]:
        """[rows, 16] of an operand in shared memory, whose layout its descriptor says."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        swizzle = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62)
        if swizzle is None or descriptor >> 49 & 7:
            raise Fault("a wgmma descriptor without swizzle, or with a base, is not modelled")
        row, column = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
        wide = swizzle // 2
        if transposed:  # rows are contiguous: pieces of `wide` rows by 8 columns
            outer, inner = row // wide * leading + column // 8 * stride, column % 8 * swizzle + row % wide * 2
        else:  # pieces of 8 rows by `wide` columns
            outer, inner = row // 8 * stride + column // wide * leading, row % 8 * swizzle + column % wide * 2
        linear = start + outer + inner
        # Bits 4 to 6 of an address are changed by bits 7 to 9.
        address = linear ^ ((linear >> 7 & (swizzle // 16 - 1)) << 4)
        if address.max() + 2 > wave.shared.size:
            raise Fault("wgmma reads shared memory out of bounds")
        at = (address + program * wave.shared.stride) // 2
        reads.append(np.unique(at))
        return widened(wave.shared.multiply(at.ravel()), self._kind).astype(np.float64).reshape(at.shape)
