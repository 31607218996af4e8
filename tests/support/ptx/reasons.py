"""Why a change that no case notices changes nothing: shown by a further run, or not at all.

Each reason is a run in which the change is replaced by something worse, or by a count of what it could have
changed: garbage in the registers of the threads concerned, a note of who touches which byte on both sides of
a barrier.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ptx.code import Line, elements
from ptx.decode import Operands
from ptx.execute import Prepared
from ptx.mutations import Mutant, Subject, fails
from ptx.shared_memory import SharedMemory
from ptx.wave import Instruction, Mask, Wave

UNUSED = "what these threads get is part of no result"
Own = NDArray[np.bool_]
Probe = Callable[[Wave, Own, Own], None]
"""Of a wave, the threads that come there, and those of them whose predicate is true."""


def explain(subject: Subject, mutant: Mutant) -> str | None:
    """The reason why an unnoticed change is harmless in these cases; None: none was found."""
    if mutant.group == "barrier":
        return None if _orders(subject, mutant) else "no warp touches what another wrote or read before it"
    if mutant.group in ("wait", "fence"):
        return _of_a_wait(subject, mutant)
    line = _line(subject, mutant)
    if line.opcode[0] == "bra":
        return None
    if mutant.kind == "dropped":
        return _of_a_dropped_predicate(subject, mutant, line)
    if (
        mutant.kind == "inverted"
        and line.opcode[0] in ("st", "cp")
        and _stores_the_same(subject, mutant, line)
    ):
        return "the threads that store or copy instead do the same, in the same place"
    if line.opcode[0] in ("ld", "ldmatrix") and mutant.kind == "offset" and _gives_the_same(subject, mutant):
        return "what lies beside it is the same"
    return UNUSED if not _with_garbage(subject, mutant, line, all_threads=True) else None


def _gives_the_same(subject: Subject, mutant: Mutant) -> bool:
    """Whether the changed instruction gives the same registers wherever it is executed."""
    assert mutant.line is not None
    first = subject.prepared.instructions[mutant.at]
    second = subject.prepared.with_line(mutant.at, mutant.line).instructions[mutant.at]
    differs = False

    def look(wave: Wave, own: Own, chosen: Own) -> None:
        nonlocal differs
        given = []
        for instruction in (second, first):
            assert instruction.run is not None
            instruction.run(wave, None if chosen.all() else chosen)
            given.append([wave.registers[register][chosen] for register in sorted(first.writes)])
        differs = differs or not all(np.array_equal(*pair) for pair in zip(*given, strict=True))

    return not _run(subject, mutant, look, instead=True) and not differs


def _line(subject: Subject, mutant: Mutant) -> Line:
    return subject.prepared.code.lines[mutant.at]


def _of_a_wait(subject: Subject, mutant: Mutant) -> str | None:
    """The interpreter marks every byte and register that is on its way; that none was touched is the reason,
    so what is on its way is touched later or never."""
    if mutant.group == "fence":
        return "what it makes visible is no operand before a later fence"
    if _line(subject, mutant).opcode[0] == "griddepcontrol":
        return "the programs that come there have waited before"
    busy = False

    def look(wave: Wave, own: Own, chosen: Own) -> None:
        nonlocal busy
        busy = busy or wave.shared.copies_in_flight or wave.products.in_flight

    _run(subject, mutant, look)
    return "what it waits for is touched behind a later wait, or never" if busy else "nothing is on its way"


def _of_a_dropped_predicate(subject: Subject, mutant: Mutant, line: Line) -> str | None:
    held, stored_otherwise = 0, 0

    def look(wave: Wave, own: Own, chosen: Own) -> None:
        nonlocal held, stored_otherwise
        if line.opcode[0] == "cp":
            chosen = own & (_copied(subject, line)(wave) > 0)
        held += int((own & ~chosen).sum())
        if line.opcode[0] == "st":
            stored_otherwise += _stored_otherwise(subject, line, wave, own & ~chosen, chosen)

    _run(subject, mutant, look)
    if not held:
        return "the predicate is true for every thread"
    if line.opcode[0] == "st" and not stored_otherwise:
        return "the threads held back would store the same as others, in the same place"
    return UNUSED if not _with_garbage(subject, mutant, line, all_threads=False) else None


def _copied(subject: Subject, line: Line) -> Callable[[Wave], NDArray[np.int64]]:
    if len(line.operands) < 4:
        return lambda wave: np.ones(wave.size, np.int64)
    size = Operands(line, subject.prepared.code).source(3, "u32")
    return lambda wave: np.broadcast_to(size(wave), wave.size).astype(np.int64)


def _stores_the_same(subject: Subject, mutant: Mutant, line: Line) -> bool:
    """Whether the threads with the predicate and those without would always store the same."""
    differences = 0

    def look(wave: Wave, own: Own, chosen: Own) -> None:
        nonlocal differences
        differences += _stored_otherwise(subject, line, wave, own & ~chosen, chosen)
        differences += _stored_otherwise(subject, line, wave, chosen, own & ~chosen)

    _run(subject, mutant, look)
    return not differences


def _stored_otherwise(subject: Subject, line: Line, wave: Wave, those: Own, others: Own) -> int:
    """How many of those threads store what none of the others does, or would, in the same place."""
    operands = Operands(line, subject.prepared.code)
    if line.opcode[0] == "cp":
        sources = [operands.address(1), _copied(subject, line)]
    else:
        size, _ = operands.width()
        sources = [operands.value(name, f"b{8 * size}") for name in elements(operands.text(1))]
    columns = [
        operands.address(0)(wave),
        wave.program,
        *(np.broadcast_to(s(wave), wave.size) for s in sources),
    ]
    rows = np.stack([np.asarray(column).astype(np.uint64) for column in columns], 1)
    stored = {row.tobytes() for row in rows[others]}
    return sum(row.tobytes() not in stored for row in rows[those])


def _with_garbage(subject: Subject, mutant: Mutant, line: Line, *, all_threads: bool) -> bool:
    """Whether a case fails if the threads held back, or all of them, have garbage."""
    dice = np.random.default_rng(mutant.at)
    original = subject.prepared.instructions[mutant.at]
    assert original.run is not None

    def spoil(wave: Wave, registers: frozenset[int], threads: Own) -> None:
        for register in registers:
            own = wave.registers[register]
            noise = dice.integers(0, 256, own.nbytes, np.uint8).view(
                own.dtype if own.dtype.kind != "b" else np.uint8
            )
            wave.write(register, noise % 2 == 1 if own.dtype.kind == "b" else noise, threads)

    def run(wave: Wave, own: Own, chosen: Own) -> None:
        spoiled = own if all_threads else own & ~chosen
        if line.opcode[0] == "cp":
            live = own & (_copied(subject, line)(wave) > 0) if len(line.operands) > 3 else chosen
            if chosen.any():
                original.run(wave, chosen)
                rows = (chosen & (all_threads | ~live))[chosen]
                data = wave.shared.newest_copy()
                data[rows] = dice.integers(0, 256, data[rows].shape, np.uint8)
            return
        if line.opcode[0] == "st":
            kept = [register.copy() for register in wave.registers]
            names = elements(line.operands[1])
            spoil(
                wave,
                frozenset(subject.prepared.code.register(name) for name in names if name[0] == "%"),
                spoiled,
            )
            original.run(wave, own)
            wave.registers[:] = kept
            return
        if chosen.any():
            original.run(wave, chosen)
        spoil(wave, original.writes, spoiled)

    return _run(subject, mutant, run, instead=True)


def _run(subject: Subject, mutant: Mutant, probe: Probe, *, instead: bool = False) -> bool:
    """Runs the cases with a look at one place, or with something else there; whether one fails."""
    at = mutant.at
    original = subject.prepared.instructions[at]

    def act(wave: Wave, mask: Mask) -> None:
        own = np.ones(wave.size, np.bool_) if mask is None else mask
        chosen = own
        if original.predicate is not None:
            register, negated = original.predicate
            chosen = own & (wave.registers[register] ^ negated)
        probe(wave, own, chosen)
        if not instead and original.run is not None and chosen.any():
            original.run(wave, None if chosen.all() else chosen)

    reads = original.reads
    changed = Instruction(original.line, act, None, None, reads, original.writes)

    def change(ptx: str, kernel: Prepared) -> Prepared:
        if ptx != subject.ptx:
            return kernel
        return replace(
            kernel, instructions=[*kernel.instructions[:at], changed, *kernel.instructions[at + 1 :]]
        )

    return any(fails(case, subject, change) for case in subject.reaching(mutant))


def _orders(subject: Subject, mutant: Mutant) -> bool:
    """Whether a barrier parts two warps of a program that touch the same byte, one of them to write it."""
    conflicts = False
    before: dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
    place = [False]
    barrier = SharedMemory.barrier

    def noted(shared: SharedMemory, programs: Own) -> None:
        nonlocal conflicts
        writers, readers = shared.touched()
        if id(shared) in before:
            old_writers, old_readers = before.pop(id(shared))
            conflicts = (
                conflicts or _conflict(old_writers, writers | readers) or _conflict(writers, old_readers)
            )
        if place[0]:
            before[id(shared)] = writers, readers
        barrier(shared, programs)

    def here(wave: Wave, own: Own, chosen: Own) -> None:
        place[0] = True
        wave.shared.barrier(wave.whole_programs(None if own.all() else own, "a barrier"))
        place[0] = False

    SharedMemory.barrier = noted  # type: ignore[method-assign]
    try:
        _run(subject, mutant, here, instead=True)
    finally:
        SharedMemory.barrier = barrier  # type: ignore[method-assign]
    return conflicts


def _conflict(writers: NDArray[np.uint8], touched: NDArray[np.uint8]) -> bool:
    """Whether a byte has a writer among the first and another warp among the second."""
    several = np.bitwise_count(writers | touched) > 1
    return bool(((writers != 0) & (touched != 0) & several).any())
