"""Records the executor's last step where a crash cannot destroy it.

The executor notes each step before it begins: its number, its size and its sequences. The note lies in memory
that the frontend has mapped too. So the frontend can read it however the engine core ended: by an exception,
a signal, or a device that takes its process down. A message could still be in transit. Only from this note
does the frontend know which sequences were on the device when the engine core died
(`actors/frontend/probation.py`).

    0   u32  which half is valid
    8   two halves: u64 step, u32 rows, u32 tokens, u32 length of the rest, the ids on the device in msgpack
"""

import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from personae.kernels.memory_file import nameless_file

if TYPE_CHECKING:
    from personae.engine.plan import StepPlan

_HALF = 2**18
_FIRST = 8
_HEAD = struct.Struct("<QIII")
SIZE = _FIRST + 2 * _HALF


class LastStep(msgspec.Struct, frozen=True):
    """A step that had begun. `on_device` are the sequences that had a slot."""

    step: int
    rows: int
    tokens: int
    on_device: tuple[str, ...]


class StepRecorder:
    """The memory, for its writer and its reader. One thread writes; a reader may read at any time."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._slots: dict[int, str] = {}
        self._ids = msgspec.msgpack.encode(())
        self._half = 0

    @classmethod
    def create(cls) -> "tuple[StepRecorder, int]":
        """Create one. Also returns the file descriptor by which another process attaches to it."""
        file = nameless_file(SIZE)
        return cls(mmap.mmap(file, SIZE)), file

    @classmethod
    def attach(cls, file: int) -> "StepRecorder":
        """Attach to another process's recorder by a file descriptor, and close that."""
        recorder = cls(mmap.mmap(file, SIZE))
        os.close(file)
        return recorder

    @classmethod
    def private(cls) -> "StepRecorder":
        """Create one for this process alone."""
        return cls(bytearray(SIZE))

    def begin(self, plan: "StepPlan") -> None:
        """Note a step that begins."""
        if plan.releases or plan.admissions:
            for slot in plan.releases:
                self._slots.pop(slot, None)
            for admission in plan.admissions:
                self._slots[admission.slot] = admission.log.id
            self._ids = msgspec.msgpack.encode(tuple(self._slots.values()))
        ids = self._ids if len(self._ids) <= _HALF - _HEAD.size else msgspec.msgpack.encode(())
        self._half ^= 1
        at = _FIRST + self._half * _HALF
        _HEAD.pack_into(self._memory, at, plan.step, len(plan.rows), plan.tokens, len(ids))
        at += _HEAD.size
        self._memory[at : at + len(ids)] = ids
        self._memory[0] = (
            self._half + 1
        )  # a single byte: either the new note is complete, or the old one counts

    def clear(self) -> None:
        """Forget the last step."""
        self._slots.clear()
        self._ids = msgspec.msgpack.encode(())
        self._memory[0] = 0

    def read(self) -> LastStep | None:
        """Return the last step that began, or None."""
        half = self._memory[0]
        if not half:
            return None
        at = _FIRST + (half - 1) * _HALF
        step, rows, tokens, length = _HEAD.unpack_from(self._memory, at)
        at += _HEAD.size
        ids = msgspec.msgpack.decode(bytes(self._memory[at : at + length]), type=tuple[str, ...])
        return LastStep(step, rows, tokens, ids)
