"""Embeddings: pools a prompt's hidden states, after the final norm, into one vector over its steps."""

import torch
from msgspec.structs import replace
from torch import Tensor

from personae.engine.device_event import to_host
from personae.engine.observer import PromptObserver
from personae.engine.plan import StepResult
from personae.engine.worker.worker import Forward, Worker

ROWS = 512  # hidden states that are normalised at a time, to bound memory


class Pooling(PromptObserver[Tensor]):
    """The vectors [H] float32 of prompts with `pooling`. `_sums`: of unfinished prompts by slot, on the
    device."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._sums: dict[int, Tensor] = {}

    def release(self, slot: int) -> None:
        """See PromptObserver."""
        super().release(slot)
        self._sums.pop(slot, None)

    def _read(self, forward: Forward, offset: int, slot: int, start: int, count: int) -> Tensor | None:
        """The vector, if the prompt ends here."""
        log = self.logs[slot]
        ends = start + count == log.prompt_length
        if log.params.pooling == "mean":
            self._add_up(slot, forward, offset, count)
            return to_host(self._sums[slot] / log.prompt_length) if ends else None
        return to_host(self._worker.hidden_states(forward, offset + count - 1, 1)[0]) if ends else None

    def _add_up(self, slot: int, forward: Forward, first: int, count: int) -> None:
        for done in range(0, count, ROWS):
            part = self._worker.hidden_states(forward, first + done, min(ROWS, count - done))
            total = torch.sum(part, 0)
            self._sums[slot] = total if slot not in self._sums else self._sums[slot] + total

    def _add(self, result: StepResult, found: dict[int, Tensor]) -> StepResult:
        vectors = {row: vector.numpy().tobytes() for row, vector in found.items()}
        return replace(result, embeddings=vectors)
