"""Embeddings: pools a prompt's hidden states, after the final norm, into one vector over its steps."""

from collections.abc import Mapping

import torch
from torch import Tensor

from personae.engine.device_event import to_host
from personae.engine.plan import StepPlan
from personae.engine.sequence import SequenceLog
from personae.engine.worker.worker import Forward, Worker

ROWS = 512  # hidden states that are normalised at a time, to bound memory


class Pooling:
    """The sums of unfinished prompts by slot: [H] float32, on the device."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sums: dict[int, Tensor] = {}
        self._slots: set[int] = set()

    def admit(self, slot: int, log: SequenceLog) -> None:
        """A sequence begins, or begins again."""
        if log.params.pooling is not None:
            self._slots.add(slot)

    def release(self, slot: int) -> None:
        """The slot's sequence has ended, or will be computed again later."""
        self._slots.discard(slot)
        self._sums.pop(slot, None)

    def of(self, plan: StepPlan, forward: Forward, logs: Mapping[int, SequenceLog]) -> dict[int, Tensor]:
        """The vectors [H] float32 of the prompts that this step completes, by row, being copied to the
        host."""
        found: dict[int, Tensor] = {}
        if not self._slots:
            return found
        for packed_row, index in enumerate(forward.packed.order):
            row = plan.rows[index]
            log = logs[row.slot]
            if row.slot not in self._slots or row.start >= log.prompt_length:
                continue
            first = forward.packed.offsets[packed_row]
            count = min(row.count, log.prompt_length - row.start)
            ends = row.start + count == log.prompt_length
            if log.params.pooling == "mean":
                self._add(row.slot, forward, first, count)
                if ends:
                    found[index] = to_host(self._sums.pop(row.slot) / log.prompt_length)
            elif ends:
                found[index] = to_host(self._worker.hidden_states(forward, first + count - 1, 1)[0])
        return found

    def _add(self, slot: int, forward: Forward, first: int, count: int) -> None:
        for done in range(0, count, ROWS):
            part = self._worker.hidden_states(forward, first + done, min(ROWS, count - done))
            total = torch.sum(part, 0)
            self._sums[slot] = total if slot not in self._sums else self._sums[slot] + total
