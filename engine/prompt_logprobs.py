"""The log-probabilities of prompt tokens, for the rows of one step that request them."""

from collections.abc import Mapping

import numpy as np

from personae.engine.logprobs import PromptLogprobs, prompt_logprobs
from personae.engine.plan import StepPlan
from personae.engine.sequence import SequenceLog
from personae.engine.worker.worker import Forward, Worker
from personae.kernels.upload import upload

PROMPT_LOGITS_ROWS = 256  # prompt tokens whose logits are computed at a time, to bound memory


def prompt_logprobs_of(
    plan: StepPlan, forward: Forward, logs: Mapping[int, SequenceLog], worker: Worker
) -> dict[int, PromptLogprobs]:
    """For each row that requests them: an entry per prompt token that this chunk predicts, and None for the
    first token of the prompt. `logs`: by slot."""
    found: dict[int, PromptLogprobs] = {}
    for packed_row, index in enumerate(forward.packed.order):
        row = plan.rows[index]
        log = logs[row.slot]
        top = log.params.prompt_logprobs
        if top is None or row.start >= log.prompt_length:
            continue
        targets = log.tokens[row.start + 1 : min(row.start + row.count + 1, log.prompt_length)]
        first = forward.packed.offsets[packed_row]
        parts = []
        for done in range(0, len(targets), PROMPT_LOGITS_ROWS):
            wanted = targets[done : done + PROMPT_LOGITS_ROWS]
            logits = worker.prompt_logits(forward, row.slot, first + done, len(wanted))
            parts.append(prompt_logprobs(logits, upload(np.array(wanted), logits.device), top))
        found[index] = PromptLogprobs(row.start == 0, tuple(parts), top)
    return found
