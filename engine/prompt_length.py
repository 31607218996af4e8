"""Checks whether a text can fit a number of tokens, without encoding all of it.

Encoding a text of many megabytes takes seconds and a gigabyte. Almost every such text is then rejected
because it is longer than the context. So its length is bounded first, in two ways:

- by the longest token of the vocabulary: `limit` tokens have at most `limit` times as many bytes;
- by its parts: a text that is long for its limit is counted part by part, until the parts have twice as many
  tokens as fit. The factor is there because a cut between parts may be within a token.
"""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from personae.errors import RequestError

USUAL_CHARACTERS = 8
"""Characters per token, a generous estimate. A text with fewer per token of its limit is encoded without a
count."""
PART = 2**14  # characters
_SHRINKING = {"NFC": 3, "NFKC": 4, "NFKD": 4, "NFD": 1, "Prepend": 1}
"""By normalizer: how many bytes of a text become one byte at most."""


class TooManyTokens(RequestError):
    """The text at this index has more than `limit` tokens. A caller that knows the field raises its own
    error."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, index: int) -> None:
        super().__init__(f"The text has more than {limit} tokens.")
        self.index = index


def bytes_of_token(backend: tokenizers.Tokenizer, byte_level: bool) -> int | None:
    """The most bytes of text that one token stands for; None if there is no limit.

    There is no limit for models that put an unknown word of any length into one token, and for normalizers
    that drop text.
    """
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or (model.unk_token is not None and model.fuse_unk):
        return None
    normalizer = backend.normalizer
    shrinks = 1 if normalizer is None else _shrinking(json.loads(normalizer.__getstate__()))
    if shrinks is None:
        return None
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        return None
    plain = byte_level  # each character of a byte-level token stands for a byte
    longest = max(len(text) if plain and text not in added else len(text.encode()) for text in vocabulary)
    return longest * shrinks


def _shrinking(normalizer: dict[str, Any]) -> int | None:
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _shrinking(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "Replace":  # SentencePiece writes a space as ▁
        return 1 if normalizer["pattern"] == {"String": " "} and normalizer["content"] == "▁" else None
    return _SHRINKING.get(kind)


def is_long_for(text: str, tokens: int) -> bool:
    """Whether a text is much longer than usual for this many tokens."""
    return len(text) > USUAL_CHARACTERS * tokens + PART


def parts(text: str) -> Iterator[str]:
    """The text in parts, cut at spaces if possible."""
    start = 0
    while start < len(text):
        end = min(start + PART, len(text))
        if end < len(text):
            blank = text.rfind(" ", start + PART // 2, end)
            end = end if blank < 0 else blank
        yield text[start:end]
        start = end


def heads(text: str, tokens: int) -> Iterator[str]:
    """Beginnings of the text. Each is twice as long as the one before; the last is the whole text."""
    length = USUAL_CHARACTERS * tokens + PART
    while length < len(text):
        blank = text.rfind(" ", length - PART // 2, length)
        yield text[: length if blank < 0 else blank]
        length *= 2
    yield text


def tails(text: str, tokens: int) -> Iterator[str]:
    """Ends of the text. Each is twice as long as the one before; the last is the whole text."""
    length = USUAL_CHARACTERS * tokens + PART
    while length < len(text):
        start = len(text) - length
        blank = text.find(" ", start, start + PART // 2)
        yield text[start if blank < 0 else blank :]
        length *= 2
    yield text
