"""A request is its token log; everything else is a cache.

`SequenceLog` is the whole truth about one sequence. KV pages, grammar state, batch rows and sampler state are
made from it and can be dropped at any moment. Preemption, recovery and draining all *drop the cache and
resubmit the log*.
"""

import msgspec

from personae.engine.params import SamplingParams
from personae.grammar.spec import GrammarSpec


class LatencyTargets(msgspec.Struct, frozen=True):
    """The seconds until the first token, and per token after it, that a client wants. `refuse`: refuse the
    request at once if the first cannot be met."""

    first: float | None = None
    token: float | None = None
    refuse: bool = False

    def met(self, first: float, each: float) -> bool:
        """Whether an answer met them whose first token took `first` seconds, and each after it `each`."""
        return (self.first is None or first <= self.first) and (self.token is None or each <= self.token)


class SequenceLog(msgspec.Struct, frozen=True, tag=True):
    """One sequence, complete: its next token follows from this alone.

    `tokens` holds the prompt (`prompt_length` ids), followed by the emitted tokens. `adapter` is the
    adapter's content digest, None for the base model; tokens before `adapter_start` are computed by the base
    (activated LoRA). `salt` keys the prefix cache per tenant; the server makes it. `after` names a sequence
    with the same prompt (another choice of `n` > 1): this sequence waits until that one's prompt is computed,
    and then shares its pages. A `background` sequence yields to all others. A lower `priority` goes earlier
    among the tenant's sequences for the same adapter; `weight` is the tenant's. `targets` are the client's;
    `session` is the conversation's name. These two only decide where and when the sequence runs. The pages of
    the session's last sequence are kept for `session_seconds` after it has ended. With `in_memory` no tier
    gets its pages that outlives the process. `pages_at` is the address of an engine that may have its pages.
    With `prefill` the engine ends it when it has chosen one more token, with `finish` "prefilled"; another
    engine goes on.
    """

    id: str
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    eos: tuple[int, ...] = ()
    adapter: str | None = None
    grammar: GrammarSpec | None = None
    tenant: str = "default"
    salt: bytes = b""
    after: str | None = None
    adapter_start: int = 0
    priority: int = 0
    weight: float = 1.0
    background: bool = False
    targets: LatencyTargets | None = None
    session: str | None = None
    session_seconds: float = 0.0
    in_memory: bool = False
    pages_at: str | None = None
    prefill: bool = False

    @property
    def is_bound(self) -> bool:
        """Whether not every token is allowed: it has a grammar, or the parameters exclude tokens."""
        params = self.params
        return bool(self.grammar is not None or params.allowed_tokens or params.bad_words_token_ids)

    def budget(self, max_model_len: int) -> int:
        """The most tokens that the answer can have, emitted ones included."""
        return min(self.params.max_tokens, max_model_len - self.prompt_length)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The model's own natural-log probabilities (before temperature, penalties and masks) at one position.

    `top` lists (token id, logprob), most likely first. The chosen token's `rank` counts from 1.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """What one step did for one sequence.

    `finish` is None while the sequence goes on, then "stop" (EOS or a stop token), "length" or "error";
    between the engine core and the frontend also "cancelled", "preempted" or "prefilled". `stop_token` is the
    id that stopped it, the last of `tokens`. `prompt_logprobs` has an entry for each prompt token computed in
    this step; the first prompt token's is None, because nothing precedes it. `cached` (first delta only)
    counts the prompt tokens whose KV came from the prefix cache. `queued` (first delta only; the frontend
    sets it) is how many seconds the sequence waited before it was computed. `code` is the code of an `error`
    that the caller can fix. `drafted` has how many drafts the step had for it, and how many were right.
    `moved` (the frontend sets it) is how often since the last delta the sequence moved to an engine of
    another numerics class. `embedding` is the prompt's vector (float32) if `params.pooling` requests one; it
    comes once.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: str | None = None
    stop_token: int | None = None
    error: str | None = None
    cached: int | None = None
    queued: float | None = None
    code: str | None = None
    drafted: tuple[int, int] | None = None
    moved: int = 0
    embedding: bytes | None = None
