"""Writes logprobs in the forms that clients know: chat's, completions' older one, and vLLM's for prompts."""

from collections.abc import Iterable, Sequence
from functools import partial

from personae.api.output_pieces import TokenEntry
from personae.api.packing import Pack, as_list
from personae.api.wire.answers import (
    ChatLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TopLogprob,
)
from personae.engine.sequence import TokenLogprobs
from personae.engine.tokens import Tokenizer

_LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def chat_logprobs(
    entries: Iterable[TokenEntry], tokenizer: Tokenizer, pack: Pack = as_list, *, as_ids: bool = False
) -> ChatLogprobs:
    """`choices[].logprobs` of chat completions; with `as_ids` tokens are written as their ids."""

    def top(token: int, logprob: float) -> TopLogprob:
        text = _as_id(token) if as_ids else tokenizer.token_text(token)
        return TopLogprob(text, max(logprob, _LEAST), list(tokenizer.token_bytes(token)))

    def content(entry: TokenEntry) -> ContentLogprob:
        token, logprobs, _ = entry
        assert logprobs is not None, "an emitted token has logprobs"
        chosen = top(token, logprobs.logprob)
        alternatives = [top(*candidate) for candidate in logprobs.top]
        return ContentLogprob(chosen.token, chosen.logprob, chosen.bytes, alternatives)

    return ChatLogprobs(pack(map(content, entries)))


def text_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, pack: Pack = as_list, *, as_ids: bool = False
) -> TextLogprobs:
    """`choices[].logprobs` of completions; with `as_ids` tokens are written as their ids.

    The chosen token is among `top_logprobs` even if it is not one of the likeliest. If two tokens have the
    same text, the likelier one stays.
    """
    spelled = _as_id if as_ids else partial(_spelled, tokenizer)

    def top(entry: TokenEntry) -> dict[str, float] | None:
        if entry.logprobs is None:
            return None
        found: dict[str, float] = {}
        for candidate, value in entry.logprobs.top:
            found.setdefault(spelled(candidate), max(value, _LEAST))
        found.setdefault(spelled(entry.token), max(entry.logprobs.logprob, _LEAST))
        return found

    return TextLogprobs(
        text_offset=[entry.offset for entry in entries],
        token_logprobs=[
            None if entry.logprobs is None else max(entry.logprobs.logprob, _LEAST) for entry in entries
        ],
        tokens=[spelled(entry.token) for entry in entries],
        top_logprobs=pack(map(top, entries)),
    )


def _as_id(token: int) -> str:
    """A token as vLLM writes it when tokens are requested as ids."""
    return f"token_id:{token}"


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text. A part of a character is written as OpenAI does, `bytes:\\xe2\\x82`."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    entries: Iterable[TokenLogprobs | None], tokenizer: Tokenizer, pack: Pack = as_list
) -> PromptLogprobs:
    """`prompt_logprobs` in vLLM's form: for each place the likeliest tokens and the prompt's own."""
    packed: PromptLogprobs = pack(
        None if entry is None else _candidates(entry, tokenizer) for entry in entries
    )
    return packed


def _candidates(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    candidates = {
        str(token): PromptLogprob(max(logprob, _LEAST), rank, tokenizer.token_text(token))
        for rank, (token, logprob) in enumerate(entry.top, start=1)
    }
    own = PromptLogprob(max(entry.logprob, _LEAST), entry.rank, tokenizer.token_text(entry.token))
    candidates.setdefault(str(entry.token), own)
    return candidates
