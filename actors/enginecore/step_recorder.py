"""What the executor was doing last, kept where its death does not reach.

The executor notes each step before it begins: which step, how large, whose. The note lies in memory that
The frontend has mapped too, so it can be read however the engine core has ended, by an exception, a signal or
a device that takes its process along; a message would still be on its way. Who was aboard when the engine
core died is known from it, and nowhere else (`actors/frontend/probation.py`).

    0   u32  which half is valid
    8   two halves: u64 step, u32 rows, u32 tokens, u32 length of what follows, the ids aboard in msgpack
"""

import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from personae.engine.plan import StepPlan

_HALF = 2**18
_FIRST = 8
_HEAD = struct.Struct("<QIII")
SIZE = _FIRST + 2 * _HALF


class LastStep(msgspec.Struct, frozen=True):
    """A step that had begun: `on_device` are the sequences that had a slot."""

    step: int
    rows: int
    tokens: int
    on_device: tuple[str, ...]


class StepRecorder:
    """The memory, as its writer and its reader have it. One thread writes; a reader may come at any time."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._slots: dict[int, str] = {}
        self._ids = msgspec.msgpack.encode(())
        self._half = 0

    @classmethod
    def create(cls) -> "tuple[StepRecorder, int]":
        """A new one, and the open file that another process attaches to it by."""
        file = os.memfd_create("personae-black-box")
        os.ftruncate(file, SIZE)
        return cls(mmap.mmap(file, SIZE)), file

    @classmethod
    def attach(cls, file: int) -> "StepRecorder":
        """That of another process, by an open file, which is closed."""
        recorder = cls(mmap.mmap(file, SIZE))
        os.close(file)
        return recorder

    @classmethod
    def private(cls) -> "StepRecorder":
        """One of this process alone."""
        return cls(bytearray(SIZE))

    def begin(self, plan: "StepPlan") -> None:
        """A step begins."""
        if plan.releases or plan.admissions:
            for slot in plan.releases:
                self._slots.pop(slot, None)
            for admission in plan.admissions:
                self._slots[admission.slot] = admission.log.id
            self._ids = msgspec.msgpack.encode(tuple(self._slots.values()))
        ids = self._ids if len(self._ids) <= _HALF - _HEAD.size else msgspec.msgpack.encode(())
        self._half ^= 1
        at = _FIRST + self._half * _HALF
        tokens = sum([row.count for row in plan.rows])
        _HEAD.pack_into(self._memory, at, plan.step, len(plan.rows), tokens, len(ids))
        at += _HEAD.size
        self._memory[at : at + len(ids)] = ids
        self._memory[0] = self._half + 1  # one byte: the note is whole, or the one before it counts

    def clear(self) -> None:
        """Nothing has begun."""
        self._slots.clear()
        self._ids = msgspec.msgpack.encode(())
        self._memory[0] = 0

    def read(self) -> LastStep | None:
        """The step that began last; None when there was none."""
        half = self._memory[0]
        if not half:
            return None
        at = _FIRST + (half - 1) * _HALF
        step, rows, tokens, length = _HEAD.unpack_from(self._memory, at)
        at += _HEAD.size
        ids = msgspec.msgpack.decode(bytes(self._memory[at : at + length]), type=tuple[str, ...])
        return LastStep(step, rows, tokens, ids)
