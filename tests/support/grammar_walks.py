"""A model that chooses uniformly among the tokens that a grammar allows, and other drivers of a matcher."""

import random

import numpy as np

from personae.grammar.bitmask import words_of
from personae.grammar.matcher import Matcher
from personae.grammar.vocabulary import Vocabulary

# Besides brackets: what an email address, a URI and the pattern b$ need to end.
CLOSERS = (b"}", b"]", b"@", b":", b"b")


class Unfinished(AssertionError):
    """The walk found no end; one may exist."""


def allowed_tokens(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    """The ids that the matcher's mask allows, including ids past the vocabulary if their bits are set."""
    bitmask = np.full((1, words_of(vocabulary.size)), -1, np.int32)
    matcher.fill(bitmask, 0)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, budget: int = 60) -> bytes:
    """Choose at random until the grammar ends. After `budget` tokens prefer the tokens that end it soonest.

    Asserts that no state is a dead end and that every allowed token is accepted.
    """
    text = b""
    for step in range(10 * budget + 500):
        tokens = allowed_tokens(matcher, vocabulary)
        assert tokens, f"nothing is allowed after {text!r}"
        token = rng.choice(tokens)
        if step > budget and rng.random() < 0.8:  # not always: a brace within a string closes nothing
            token = min(tokens, key=lambda one: (_rank(one, vocabulary), rng.random()))
        assert matcher.accept(token), (
            f"{vocabulary.tokens[token]!r} is allowed after {text!r}, and not accepted"
        )
        text += vocabulary.tokens[token]
        if matcher.terminated:
            return text
    raise Unfinished(f"the answer does not end: {text!r}")


def _rank(token: int, vocabulary: Vocabulary) -> int:
    if token in vocabulary.stop_ids:
        return 0
    text = vocabulary.tokens[token]
    if text == b'"':
        return 1
    return 2 if text in CLOSERS else 3


def spell(text: bytes, vocabulary: Vocabulary) -> list[int]:
    """One token for each byte."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens) if len(token) == 1}
    return [ids[bytes([byte])] for byte in text]


def accepts(matcher: Matcher, vocabulary: Vocabulary, text: bytes) -> bool:
    """Whether `text`, written byte by byte, is a complete answer."""
    return all(matcher.accept(token) for token in [*spell(text, vocabulary), vocabulary.stop_ids[0]])
