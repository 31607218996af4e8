"""What some sequences request of a step besides tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from personae.engine.plan import StepPlan, StepResult
from personae.engine.sequence import SequenceLog
from personae.engine.worker.worker import Forward, Worker

Observation = Callable[[StepResult], StepResult]
"""Adds what was observed to the result of its step, once the device has computed that."""

Found = TypeVar("Found")


class PromptObserver(ABC, Generic[Found]):
    """Reads more of prompts than the next token. There is one only while a sequence with such a prompt is
    computed, so steps without one cost nothing. `logs`: of these sequences, by slot."""

    logs: dict[int, SequenceLog]

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.logs = {}

    def release(self, slot: int) -> None:
        """The slot's prompt is computed, or its sequence has left and will be computed again if it comes
        back."""
        self.logs.pop(slot, None)

    def observe(self, plan: StepPlan, forward: Forward) -> Observation | None:
        """Read the prompts in a step whose tokens have been chosen; None if it has none of these. Work on the
        device and copies from it are begun, and not waited for."""
        found: dict[int, Found] = {}
        for offset, index in zip(forward.packed.offsets, forward.packed.order, strict=True):
            row = plan.rows[index]
            log = self.logs.get(row.slot)
            if log is None:
                continue
            count = min(row.count, log.prompt_length - row.start)
            if count > 0 and (one := self._read(forward, offset, row.slot, row.start, count)) is not None:
                found[index] = one
            if row.start + row.count >= log.prompt_length:
                self.release(row.slot)
        return (lambda result: self._add(result, found)) if found else None

    @abstractmethod
    def _read(self, forward: Forward, offset: int, slot: int, start: int, count: int) -> Found | None:
        """Read `count` prompt tokens of a slot from position `start` on, packed from `offset` on."""

    @abstractmethod
    def _add(self, result: StepResult, found: dict[int, Found]) -> StepResult:
        """The result with what was found, by row."""
