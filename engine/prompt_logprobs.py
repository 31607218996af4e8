"""The log-probabilities of prompt tokens, for the rows of one step that request them."""

import numpy as np
from msgspec.structs import replace

from personae.engine.logprobs import PromptLogprobs, prompt_logprobs
from personae.engine.observer import PromptObserver
from personae.engine.plan import StepResult
from personae.engine.worker.worker import Forward
from personae.kernels.upload import upload

PROMPT_LOGITS_ROWS = 256  # prompt tokens whose logits are computed at a time, to bound memory


class PromptLogprobsObserver(PromptObserver[PromptLogprobs]):
    """Reads an entry per prompt token that a chunk predicts, and None for the first token of the prompt."""

    def _read(self, forward: Forward, offset: int, slot: int, start: int, count: int) -> PromptLogprobs:
        log = self.logs[slot]
        top = log.params.prompt_logprobs
        assert top is not None
        targets = log.tokens[start + 1 : min(start + count + 1, log.prompt_length)]
        parts = []
        for done in range(0, len(targets), PROMPT_LOGITS_ROWS):
            wanted = targets[done : done + PROMPT_LOGITS_ROWS]
            logits = self._worker.prompt_logits(forward, slot, offset + done, len(wanted))
            parts.append(prompt_logprobs(logits, upload(np.array(wanted), logits.device), top))
        return PromptLogprobs(start == 0, tuple(parts), top)

    def _add(self, result: StepResult, found: dict[int, PromptLogprobs]) -> StepResult:
        entries = {row: logprobs.read() for row, logprobs in found.items()}
        return replace(result, prompt_logprobs=entries)
