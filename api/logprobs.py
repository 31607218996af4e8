"""Logprobs in the forms that clients know: chat's, completions' older one, and vLLM's for prompts."""

from collections.abc import Iterable
from functools import partial

from personae.api.wire.answers import (
    ChatLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TopLogprob,
)
from personae.api.words import Entry
from personae.engine.sequence import TokenLogprobs
from personae.engine.tokens import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(entries: Iterable[Entry], tokenizer: Tokenizer, *, as_ids: bool = False) -> ChatLogprobs:
    """`choices[].logprobs` of chat completions; with `as_ids` tokens are written as their ids."""

    def top(token: int, logprob: float) -> TopLogprob:
        text = _as_id(token) if as_ids else tokenizer.token_text(token)
        return TopLogprob(text, max(logprob, _LEAST), list(tokenizer.token_bytes(token)))

    content = []
    for token, logprobs, _ in entries:
        assert logprobs is not None, "an emitted token has logprobs"
        chosen = top(token, logprobs.logprob)
        alternatives = [top(*candidate) for candidate in logprobs.top]
        content.append(ContentLogprob(chosen.token, chosen.logprob, chosen.bytes, alternatives))
    return ChatLogprobs(content)


def text_logprobs(entries: Iterable[Entry], tokenizer: Tokenizer, *, as_ids: bool = False) -> TextLogprobs:
    """`choices[].logprobs` of completions; with `as_ids` tokens are written as their ids.

    The chosen token is among `top_logprobs` even if it is not one of the likeliest. Where two tokens have the
    same text, the likelier one stays.
    """
    answer = TextLogprobs([], [], [], [])
    spelled = _as_id if as_ids else partial(_spelled, tokenizer)
    for token, logprobs, offset in entries:
        text = spelled(token)
        answer.text_offset.append(offset)
        answer.tokens.append(text)
        if logprobs is None:
            answer.token_logprobs.append(None)
            answer.top_logprobs.append(None)
            continue
        logprob = max(logprobs.logprob, _LEAST)
        top: dict[str, float] = {}
        for candidate, value in logprobs.top:
            top.setdefault(spelled(candidate), max(value, _LEAST))
        top.setdefault(text, logprob)
        answer.token_logprobs.append(logprob)
        answer.top_logprobs.append(top)
    return answer


def _as_id(token: int) -> str:
    """A token as vLLM writes it where tokens are asked for as ids."""
    return f"token_id:{token}"


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; a part of a character as OpenAI writes it, `bytes:\\xe2\\x82`."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(entries: Iterable[TokenLogprobs | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """`prompt_logprobs` as vLLM has it: for each place the likeliest tokens and the prompt's own."""
    return [None if entry is None else _candidates(entry, tokenizer) for entry in entries]


def _candidates(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    candidates = {
        str(token): PromptLogprob(max(logprob, _LEAST), rank, tokenizer.token_text(token))
        for rank, (token, logprob) in enumerate(entry.top, start=1)
    }
    own = PromptLogprob(max(entry.logprob, _LEAST), entry.rank, tokenizer.token_text(entry.token))
    candidates.setdefault(str(entry.token), own)
    return candidates
