"""Tokens that an answer may not contain: `allowed_token_ids` and `bad_words`, and what rules these fields
out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from personae.api.exchange import Exchange
from personae.api.prompt import check_ids, encode_texts
from personae.api.wire.schema import Sampling
from personae.errors import RequestError
from personae.grammar.bitmask import mask_of

_MOST_WORDS = 1024
_LONGEST_WORD = 128
_MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Exclusions:
    """`allowed_tokens` and `bad_words_token_ids` of `SamplingParams`."""

    allowed: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()


NOTHING = Exclusions()


async def exclusions(exchange: Exchange, body: Sampling, bound_by: str | None) -> Exclusions:
    """What a request excludes that names tokens or words. `bound_by` is the field that binds the answer, if
    one does.

    Raises RequestError for an invalid list, and if no token might be left.
    """
    given = {"allowed_token_ids": body.allowed_token_ids is not None, "bad_words": bool(body.bad_words)}
    names = [name for name, asked in given.items() if asked]
    if bound_by is not None:
        raise RequestError(
            f"`{names[0]}` cannot be combined with `{bound_by}`: a bound answer may need an excluded token "
            "and could then not be completed. Give one of the two.",
            param=names[0],
        )
    vocab, eos = exchange.client.vocab_size, exchange.client.tokenizer.eos_ids
    words = await _bad_words(exchange, body.bad_words or ())
    left = np.ones(vocab, np.bool_)
    if body.allowed_token_ids is not None:
        left = _allowed(exchange, body.allowed_token_ids)
    allowed = b"" if left.all() else mask_of(left).tobytes()
    left[[word[-1] for word in words]] = False
    if body.min_tokens:
        names.append("min_tokens")
        ends = [*(body.stop_token_ids or ()), *(() if body.ignore_eos else eos)]
        left[[token for token in ends if 0 <= token < vocab]] = False
    if not left.any():
        fields = " and ".join(f"`{name}`" for name in names)
        raise RequestError(f"{fields} may leave no token to be said.", param=names[0])
    return Exclusions(allowed, words)


def _allowed(exchange: Exchange, ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    vocab = exchange.client.vocab_size
    if not 0 < len(ids) <= vocab:
        raise RequestError(
            f"`allowed_token_ids` must have 1 to {vocab} ids; null allows all.", param="allowed_token_ids"
        )
    check_ids(exchange, ids, "allowed_token_ids")
    allowed = np.zeros(vocab, np.bool_)
    allowed[ids] = True
    return allowed


async def _bad_words(exchange: Exchange, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, at the beginning of a text and after a space."""
    if len(words) > _MOST_WORDS:
        raise RequestError(f"`bad_words` may have at most {_MOST_WORDS} words.", param="bad_words")
    spelled: list[str] = []
    for index, word in enumerate(words):
        bare = word.lstrip(" ")
        if not 0 < len(bare) <= _LONGEST_WORD:
            name = f"bad_words[{index}]"
            raise RequestError(
                f"`{name}` must have 1 to {_LONGEST_WORD} characters, spaces before it not counted.",
                param=name,
            )
        spelled += bare, f" {bare}"
    lists = await exchange.prepared(
        lambda brief: encode_texts(exchange, spelled, add_special_tokens=False, brief=brief)
    )
    if sum(map(len, lists)) > _MOST_TOKENS:
        raise RequestError(f"`bad_words` may have at most {_MOST_TOKENS} tokens in all.", param="bad_words")
    # A tokenizer may know more ids than the model. Tokens that the model cannot choose need not be excluded.
    return tuple(dict.fromkeys(tuple(ids) for ids in lists if ids and max(ids) < exchange.client.vocab_size))
