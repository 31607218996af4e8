"""Loads, stores, copies and barriers."""

from typing import Any

import numpy as np

from ptx.code import elements
from ptx.decode import Operands, operation
from ptx.faults import Fault
from ptx.numbers import TYPES, Array, integer
from ptx.wave import Action, Mask, Wave


def lanes(value: Array, mask: Mask) -> Any:
    """Of the threads that take part."""
    return value if mask is None else value[mask]


def shared_addresses(wave: Wave, addresses: Array, mask: Mask) -> Any:
    """Of the threads that take part, within the wave."""
    return wave.shared.place(lanes(addresses, mask), lanes(wave.program, mask))


def spread(wave: Wave, rows: Array, mask: Mask) -> Array:
    """Rows of the threads that take part as rows of all."""
    if mask is None:
        return rows
    whole = np.zeros((wave.size, *rows.shape[1:]), rows.dtype)
    whole[mask] = rows
    return whole


@operation("ld")
def _load(o: Operands) -> Action:
    if "param" in o.parts:
        return _load_parameter(o)
    size, count = o.width()
    width, space = size * count, o.parts[1].split("::")[0]
    targets = [o.into(name) for name in elements(o.text(0))]
    address, dtype = o.address(1), TYPES[o.kind]

    def run(wave: Wave, mask: Mask) -> None:
        if space == "shared":
            at = shared_addresses(wave, address(wave), mask)
            rows = wave.shared.load(at, width, lanes(wave.warp, mask))
        else:
            number = lanes(wave.number, mask)
            early = bool(wave.early.any() and lanes(wave.early[wave.program], mask).any())
            rows = wave.memory.load(lanes(address(wave), mask), width, number, early=early)
            wave.counts.bytes[f"load {width}"] += width * len(number)
        found = spread(wave, rows, mask).view(dtype)
        for at, target in enumerate(targets):
            target(wave, np.ascontiguousarray(found[:, at]), mask)

    return run


def _load_parameter(o: Operands) -> Action:
    name, dtype, target = o.text(1).strip("[]"), TYPES[o.kind], o.target()
    return lambda wave, mask: target(wave, wave.job.parameters[name].view(dtype), mask)


@operation("st")
def _store(o: Operands) -> Action:
    size, _ = o.width()
    space = o.parts[1].split("::")[0]
    sources = [o.value(name, f"b{8 * size}") for name in elements(o.text(1))]
    address = o.address(0)

    def run(wave: Wave, mask: Mask) -> None:
        columns = [np.broadcast_to(source(wave), wave.size) for source in sources]
        data = lanes(np.stack(columns, 1).view(np.uint8).reshape(wave.size, -1), mask)
        if space == "shared":
            at = shared_addresses(wave, address(wave), mask)
            wave.shared.store(at, data, lanes(wave.warp, mask))
            return
        number = lanes(wave.number, mask)
        early = bool(wave.early.any() and lanes(wave.early[wave.program], mask).any())
        wave.memory.store(lanes(address(wave), mask), data, number, early=early)
        wave.counts.bytes[f"store {data.shape[1]}"] += data.size

    return run


@operation("cp")
def _copy(o: Operands) -> Action:
    if "commit_group" in o.parts:
        return lambda wave, mask: wave.shared.commit_copies(wave.whole_programs(mask, "a commit of copies"))
    if "wait_all" in o.parts or "wait_group" in o.parts:
        pending = integer(o.text(0)) if "wait_group" in o.parts else None
        return lambda wave, mask: wave.shared.await_copies(
            wave.whole_programs(mask, "a wait for copies"), pending
        )
    width, to, address = integer(o.text(2)), o.address(0), o.address(1)
    size = o.source(3, "u32") if len(o) > 3 else None

    def run(wave: Wave, mask: Mask) -> None:
        number, warps = lanes(wave.number, mask), lanes(wave.warp, mask)
        data = np.zeros((len(number), width), np.uint8)
        given = np.full(wave.size, width) if size is None else np.broadcast_to(size(wave), wave.size)
        count = lanes(given, mask)
        if not np.isin(count, (0, width)).all():
            raise Fault("a cp.async of a part of its bytes is not modelled")
        live = count > 0
        if live.any():
            early = bool(wave.early.any())
            source = lanes(address(wave), mask)[live]
            data[live] = wave.memory.load(source, width, number[live], early=early)
        wave.counts.bytes[f"copy {width}"] += width * int(live.sum())
        program = lanes(wave.program, mask)
        wave.shared.copy(shared_addresses(wave, to(wave), mask), data, warps, program)

    return run


@operation("bar", "barrier")
def _barrier(o: Operands) -> Action:
    if "warp" in o.parts:
        return _warp_barrier
    return lambda wave, mask: wave.shared.barrier(wave.whole_programs(mask, "a barrier"))


def _warp_barrier(wave: Wave, mask: Mask) -> None:
    wave.whole_warps(mask, "bar.warp.sync")


@operation("fence")
def _fence(_: Operands) -> Action:
    return lambda wave, mask: wave.shared.fence(wave.whole_programs(mask, "a fence"))


@operation("griddepcontrol")
def _dependent_launch(o: Operands) -> Action:
    def wait(wave: Wave, mask: Mask) -> None:
        wave.early[wave.whole_programs(mask, "griddepcontrol.wait")] = False

    return wait if "wait" in o.parts else lambda wave, mask: None


@operation("createpolicy")
def _policy(o: Operands) -> Action:
    target = o.target()
    return lambda wave, mask: target(wave, np.uint64(0), mask)
