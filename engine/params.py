"""How a request wants its tokens chosen. The API checks these parameters; the engine trusts them."""

from typing import Literal

import msgspec

Pooling = Literal["mean", "last"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: division by them would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters of one sequence. Names and meanings are OpenAI's, the rest as in vLLM.

    `seed` is always set: the API draws one if the caller gave none, so the log alone decides every token.
    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean off.

    `logprobs` is None (off) or the number of alternatives besides the chosen token (0 to 20). With
    `logprob_tokens` the alternatives are these tokens instead of the likeliest. `prompt_logprobs` is the same
    for the prompt's tokens.

    `max_tokens` counts emitted tokens, at least 1. `stop_token_ids` end the sequence as EOS does; they do not
    include the EOS ids. `ignore_eos` turns off EOS only.

    `allowed_tokens` is a row of a bitmask (grammar/bitmask.py); empty allows all. No sequence of
    `bad_words_token_ids` is emitted. A sequence with either has no grammar, and at least one token is allowed
    at every position.

    `jump_forward`: text that a grammar forces is appended in the tokenizer's own tokens
    (`speculation/forced.py`). `speculate` False: this answer gets no drafts (`speculation/`). `prediction`
    has the tokens that the caller expects in the answer. Neither changes the answer. `pooling` makes a vector
    from the prompt's hidden states: their mean, or the last token's.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_tokens: bytes = b""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    jump_forward: bool = False
    speculate: bool = True
    prediction: tuple[int, ...] = ()
    pooling: Pooling | None = None
