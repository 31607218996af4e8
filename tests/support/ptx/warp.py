"""Instructions in which the threads of a warp exchange registers, and those that move 8 x 8 matrices."""

import numpy as np

from ptx.code import elements
from ptx.decode import Operands, operation
from ptx.faults import Fault
from ptx.movement import lanes, shared_addresses, spread
from ptx.numbers import Array, pair
from ptx.wave import WARP, Action, Mask, Wave

_LANE = np.arange(WARP)


@operation("shfl")
def _shuffle(o: Operands) -> Action:
    mode, value, distance = o.parts[2], o.source(1, "u32"), o.source(2, "u32")
    target = o.target()

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole_warps(mask, "shfl")
        by = np.broadcast_to(distance(wave), wave.size).astype(np.int64).reshape(-1, WARP)
        if mode == "bfly":
            source = _LANE ^ by
        elif mode == "idx":
            source = by % WARP
        elif mode == "up":
            source = np.where(by <= _LANE, _LANE - by, _LANE)
        else:
            source = np.where(_LANE + by < WARP, _LANE + by, _LANE)
        values = np.broadcast_to(value(wave), wave.size).reshape(-1, WARP)
        target(wave, np.take_along_axis(values, source, 1).ravel(), mask)

    return run


_REDUCTIONS = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "xor": np.bitwise_xor,
}


@operation("redux")
def _reduce(o: Operands) -> Action:
    reduction, value, members, target = (
        _REDUCTIONS[o.parts[2]],
        o.source(1),
        o.source(2, "u32"),
        o.target(),
    )

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole_warps(mask, "redux")
        if (lanes(np.broadcast_to(members(wave), wave.size), mask) != 0xFFFF_FFFF).any():
            raise Fault("redux of a part of a warp")
        values = np.broadcast_to(value(wave), wave.size).reshape(-1, WARP)
        found = reduction.reduce(values, axis=1, dtype=values.dtype)
        target(wave, np.repeat(found, WARP), mask)

    return run


@operation("vote")
def _vote(o: Operands) -> Action:
    value, target = o.source(1, "pred"), o.target()

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole_warps(mask, "vote")
        votes = np.broadcast_to(value(wave), wave.size).reshape(-1, WARP)
        found = np.packbits(votes, axis=1, bitorder="little").view(np.uint32).ravel()
        target(wave, np.repeat(found, WARP), mask)

    return run


@operation("ldmatrix")
def _load_matrices(o: Operands) -> Action:
    targets = [o.into(name) for name in elements(o.text(0))]
    address, transposed = o.address(1), "trans" in o.parts

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole_warps(mask, "ldmatrix")
        at = shared_addresses(wave, address(wave), mask).reshape(-1, WARP)
        bits = lanes(wave.warp, mask).reshape(-1, WARP)
        for number, target in enumerate(targets):
            rows = slice(8 * number, 8 * number + 8)
            octets = wave.shared.load(at[:, rows].ravel(), 16, bits[:, rows].ravel())
            matrix = octets.view(np.uint16).reshape(-1, 8, 8)
            low, high = _fragment(matrix.swapaxes(1, 2) if transposed else matrix)
            found = pair(low, high).ravel()
            target(wave, spread(wave, found, mask), mask)

    return run


def _fragment(matrix: Array) -> tuple[Array, Array]:
    """The two elements of each lane of matrices [N, 8, 8]: [N, 32] each."""
    return matrix[:, _LANE // 4, 2 * (_LANE % 4)], matrix[:, _LANE // 4, 2 * (_LANE % 4) + 1]


@operation("stmatrix")
def _store_matrices(o: Operands) -> Action:
    sources = [o.value(name, "b32") for name in elements(o.text(1))]
    address, transposed = o.address(0), "trans" in o.parts

    def run(wave: Wave, mask: Mask) -> None:
        wave.whole_warps(mask, "stmatrix")
        at = shared_addresses(wave, address(wave), mask).reshape(-1, WARP)
        bits = lanes(wave.warp, mask).reshape(-1, WARP)
        for number, source in enumerate(sources):
            rows = slice(8 * number, 8 * number + 8)
            lane = lanes(source(wave), mask).reshape(-1, WARP)
            matrix = np.zeros((len(lane), 8, 8), np.uint16)
            matrix[:, _LANE // 4, 2 * (_LANE % 4)] = lane.astype(np.uint16)
            matrix[:, _LANE // 4, 2 * (_LANE % 4) + 1] = (lane >> np.uint32(16)).astype(np.uint16)
            if transposed:
                matrix = matrix.swapaxes(1, 2)
            data = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 16)
            wave.shared.store(at[:, rows].ravel(), data, bits[:, rows].ravel())

    return run
