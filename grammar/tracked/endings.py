"""Knows which tokens of a vocabulary end or separate the items of sets."""

import re
from bisect import bisect_left
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from personae.grammar.vocabulary import Vocabulary

_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_BLANKS = b" \t\r\n"
_CROSSING = re.compile(rb",[ \t\r\n]*[^ \t\r\n]", re.DOTALL)
_CROSSING_WITHIN = re.compile(rb"[}\]].*,[ \t\r\n]*[^ \t\r\n]", re.DOTALL)
_NAME = re.compile(rb',[ \t\r\n]*"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME_BEGUN = re.compile(rb',[ \t\r\n]*"[^"]', re.DOTALL)
_COMMA = re.compile(rb",", re.DOTALL)
_COMMA_BEHIND_TEXT = re.compile(rb'".*,', re.DOTALL)
_COMMA_BEHIND_VALUE = re.compile(rb"[}\]].*,", re.DOTALL)
_END = re.compile(rb"\A[,\] \t\r\n]")
_OPENING = re.compile(rb"\[.*,", re.DOTALL)

Words = NDArray[np.uint32]


class Endings:
    """Knows which tokens of a vocabulary end strings. `longest`: bytes of the longest one. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token: name.encode() for name, token in vocabulary.special.items()}
        self.tokens = tuple(text or names.get(token, b"") for token, text in enumerate(vocabulary.tokens))
        self.longest = max(map(len, self.tokens), default=0)
        with_quotes = [(text, token) for token, text in enumerate(self.tokens) if b'"' in text]
        with_quotes.sort()
        self._texts = [text for text, _ in with_quotes]
        self._ids = np.array([token for _, token in with_quotes], np.int64)
        words = (vocabulary.size + 31) // 32
        quotes = [_ESCAPED.sub(b"", text).count(b'"') for text in self._texts]
        self.within = self._bits([count < 3 for count in quotes], words)
        self.between = self._bits([count < 2 for count in quotes], words)
        self.anywhere = self._bits(
            [count < 4 or b"[" not in text for count, text in zip(quotes, self._texts, strict=True)], words
        )

    def _bits(self, kept: list[bool], words: int) -> Words:
        """A mask of all tokens except those that are not kept."""
        bits = np.full(words, 0xFFFFFFFF, np.uint32)
        for token in self._ids[~np.array(kept, bool)] if kept else ():
            bits[token // 32] &= ~np.uint32(1 << int(token) % 32)
        return bits

    def beginning_string(self, text: bytes, _: bool = True) -> NDArray[np.int64]:
        """The tokens that begin with `text`, which ends with a quote."""
        first = bisect_left(self._texts, text)
        return self._ids[first : bisect_left(self._texts, text[:-1] + b"#", lo=first)]

    @cached_property
    def _all(self) -> "_Sorted":
        return _Sorted([(text, token) for token, text in enumerate(self.tokens) if text])

    @cached_property
    def _behind_blanks(self) -> "_Sorted":
        """Tokens that begin with blanks, sorted by the rest."""
        led = [
            (text.lstrip(_BLANKS), token) for token, text in enumerate(self.tokens) if text[:1] in _LEADING
        ]
        return _Sorted([(text, token) for text, token in led if text])

    @cached_property
    def directly(self) -> Words:
        """All tokens but those that go on to the next item of a set of which they are at the top level."""
        return self._without(_CROSSING)

    @cached_property
    def deeper(self) -> Words:
        """All tokens but those that go on to the next item of a set from within an item."""
        return self._without(_CROSSING_WITHIN)

    @cached_property
    def unended(self) -> Words:
        """All tokens but those that end a value which is complete before them."""
        return self._without(_END)

    @cached_property
    def outside(self) -> Words:
        """All tokens but those that begin an array and end an item in it."""
        return self._without(_OPENING)

    @cached_property
    def unnamed(self) -> Words:
        """All tokens but those that end a property or a value and write the next name."""
        return self._without(_NAME)

    @cached_property
    def unbegun(self) -> Words:
        """The tokens that do not both end a property or a value and begin the next name."""
        return self._without(_NAME_BEGUN)

    @cached_property
    def _uncontinued(self) -> tuple[Words, Words, Words]:
        return self._without(_COMMA), self._without(_COMMA_BEHIND_TEXT), self._without(_COMMA_BEHIND_VALUE)

    def after(self, *, within: bool, deeper: bool) -> Words:
        """All tokens but those that write a comma behind the last member of an object. `within`: a string is
        being written; `deeper`: within a member that is an object or array."""
        outside, in_string, in_value = self._uncontinued
        return in_value if deeper else in_string if within else outside

    def prepare(self) -> None:
        """Build what sets of values need: it takes longer than a step may."""
        for table in (
            self.directly,
            self.deeper,
            self.unended,
            self.outside,
            self.unnamed,
            self.unbegun,
            self._uncontinued,
            self._all,
            self._behind_blanks,
        ):
            del table

    def _without(self, pattern: re.Pattern[bytes]) -> Words:
        found = [token for token, text in enumerate(self.tokens) if pattern.search(text)]
        words = np.full((len(self.tokens) + 31) // 32, 0xFFFFFFFF, np.uint32)
        clear_tokens(words, np.array(found, np.int64))
        return words

    def beginning(self, text: bytes, after_blanks: bool) -> NDArray[np.int64]:
        """The tokens that begin with `text`, also those with blanks before it, if asked."""
        tokens = self._all.beginning(text)
        return np.concatenate((tokens, self._behind_blanks.beginning(text))) if after_blanks else tokens


_LEADING = (b" ", b"\t", b"\r", b"\n")


class _Sorted:
    """Tokens sorted by text."""

    def __init__(self, texts: list[tuple[bytes, int]]) -> None:
        texts.sort()
        self._texts = [text for text, _ in texts]
        self._ids = np.array([token for _, token in texts], np.int64)

    def beginning(self, text: bytes) -> NDArray[np.int64]:
        """The tokens that begin with `text`. No text that is allowed has the byte 0xff."""
        first = bisect_left(self._texts, text)
        return self._ids[first : bisect_left(self._texts, text + b"\xff", lo=first)]


def clear_tokens(words: Words, tokens: NDArray[np.int64]) -> None:
    """Take tokens out of a row of a bitmask."""
    if len(tokens):
        bits = ~np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32))
        np.bitwise_and.at(words, tokens // 32, bits)
