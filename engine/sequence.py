"""A request is its token log; everything else is cache.

`SequenceLog` is the whole truth about one sequence. KV pages, grammar state, batch rows and sampler state are
made from it and can be dropped at any moment: preemption, recovery and draining all *drop the cache and
resubmit the log*.
"""

import msgspec

from personae.engine.params import SamplingParams
from personae.grammar.spec import GrammarSpec


class LatencyTargets(msgspec.Struct, frozen=True):
    """Seconds until the first token, and for each token after it, that a client wants. `refuse`: it wants to
    be refused at once where the first cannot be met."""

    first: float | None = None
    token: float | None = None
    refuse: bool = False


class SequenceLog(msgspec.Struct, frozen=True, tag=True):
    """One sequence, complete: from this alone its next token follows.

    `tokens` holds the prompt (`prompt_length` ids) and then what has been emitted so far. `adapter` is the
    adapter's content digest, None for the base model; tokens before `adapter_start` are the base's all the
    same (activated LoRA). `salt` keys the prefix cache per tenant; the server
    makes it. `after` names a sequence with the same prompt (a sibling of `n` > 1): this one waits until
    that one's prompt is computed, to share its pages. A `background` sequence gives way to all others. The
    lower its `priority`, the earlier its turn among its tenant's for the same adapter; `weight` is the
    tenant's. `targets` are those of the client; `session` is the conversation that it belongs to. Both only
    say where it goes, and when.
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

    def budget(self, max_model_len: int) -> int:
        """The most tokens that its answer can have, those emitted included."""
        return min(self.params.max_tokens, max_model_len - self.prompt_length)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of the model itself (before temperature, penalties and masks) at one place.

    `top` lists (token id, logprob), most likely first; `rank` of the chosen token counts from 1.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """What one step did for one sequence.

    `finish` is None while it goes on, else "stop" (EOS or a stop token), "length" or "error", and between
    The engine core and the frontend also "cancelled" or "recalled"; `stop_token` is the id that stopped it
    (it is the last of `tokens`). `prompt_logprobs` has an entry for each prompt token computed in this step;
    the first prompt token's is None, nothing comes before it. `cached` (first delta only) counts prompt
    tokens whose KV came from the prefix cache. `queued` (first delta only; Front fills it in) is how many
    seconds the sequence waited before it was computed. `code` is that of an `error` that is the caller's to
    mend. `drafted` says how many drafts the step had for it, and how many of them were right. `moved` (the
    frontend fills it in) is how often since the last delta the sequence went on at an engine whose numbers
    differ.
    `embedding` is the prompt's vector (float32), if `params.pooling` asks for one; it comes once.
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
