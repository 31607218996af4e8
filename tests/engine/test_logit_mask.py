"""Logits that a grammar leaves out are not computed on a CPU, and no answer tells."""

from typing import Any

import pytest
import torch
from bundled import CHOICE, OBJECT, PROMPT, harness, tokenizer
from engine_harness import EngineHarness, Played

from personae.kernels.cpu import operators

pytestmark = pytest.mark.skipif(
    "fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine"
)


def delivered(made: EngineHarness, logprobs: int | None = None) -> dict[str, Played]:
    """Bound answers and free ones, with forced tokens and without; with `logprobs`, all have them."""
    logs = []
    for number in range(9):
        changes: dict[str, Any] = {"jump_forward": number < 6, "logprobs": logprobs, "seed": number}
        grammar = (OBJECT, CHOICE, None)[number % 3]
        changes |= {"grammar": grammar, "max_tokens": 100 + 10 * number, "eos": tokenizer().eos_ids}
        logs.append(made.log(f"{number}", (*PROMPT, number), temperature=1.0, **changes))
    return made.play(logs)


def watched(made: EngineHarness) -> list[torch.Tensor | None]:
    """What of its logits the model is asked for, row by row, from now on."""
    asked: list[torch.Tensor | None] = []
    logits = made.engine.worker.model.logits

    def watching(
        hidden: torch.Tensor, output: Any = None, logit_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        asked.append(logit_mask if logit_mask is None else logit_mask.clone())
        return logits(hidden, output, logit_mask)

    made.engine.worker.model.logits = watching
    return asked


@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize(
    "sizes", [{}, {"max_seqs": 1, "lookahead": 1}, {"max_seqs": 5, "max_batch_tokens": 9}]
)
def test_answers_and_logprobs_have_the_bits_of_those_whose_logits_are_all_computed(sizes, logprobs) -> None:
    made = harness(dtype="bfloat16", **sizes)
    asked = watched(made)
    found = delivered(made, logprobs)
    made = harness(dtype="bfloat16", **sizes)
    made.engine._logit_mask = lambda packed, bitmask: None
    assert delivered(made, logprobs) == found
    words = torch.cat([(logit_mask != 0).float().mean(1) for logit_mask in asked if logit_mask is not None])
    assert words.min() == 1 if logprobs else words.min() < 0.1


def test_of_a_row_whose_token_is_known_one_word_is_needed() -> None:
    made = harness(dtype="bfloat16", max_seqs=1)
    asked = watched(made)
    log = made.log("a", PROMPT, grammar=CHOICE, max_tokens=100, jump_forward=True, eos=tokenizer().eos_ids)
    played = made.play([log])["a"]
    assert len(played.delivered) < len(played.tokens) - 2
    assert all(logit_mask is not None for logit_mask in asked)
    assert sum(int((logit_mask != 0).sum()) == 1 for logit_mask in asked if logit_mask is not None) >= 1
