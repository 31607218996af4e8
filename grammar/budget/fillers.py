"""Text that may be written in any amount without changing a plan: plain text within a string, and blanks
between two tokens of JSON.

A token may consist of such a filler and then a beginning of the plan. It leads to where the plan continues
after that beginning, so the grammar need not be asked.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from personae.grammar.budget.string_masks import Words

BLANKS = b" \t\r\n"
# Text and nothing else in a JSON string: whole characters, without quotes, backslashes or control characters.
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_PLAIN = re.compile(r'[^"\\\x00-\x1f\x7f]+')


def is_plain(text: bytes) -> bool:
    """Whether this is plain text."""
    try:
        return bool(_PLAIN.fullmatch(text.decode()))
    except UnicodeDecodeError:
        return False


def is_text(text: bytes) -> bool:
    """Whether this is text within a JSON string: whole characters and escapes."""
    if b"\\" not in text:
        return is_plain(text)
    return stays_in_text(text) and is_plain(_ESCAPE.sub(b"-", text))


def stays_in_text(text: bytes) -> bool:
    """Whether a JSON string continues after this text, possibly in the middle of a character or an escape."""
    return b'"' not in _ESCAPE.sub(b"-", text)


def behind_text(token: bytes) -> bytes | None:
    """The part of a token from the quote on that ends a string. None if there is no text before the quote."""
    at = token.find(b'"') if b"\\" not in token else _ESCAPE.sub(b"--", token).find(b'"')
    return token[at:] if at > 0 and is_text(token[:at]) else None


def behind_blanks(token: bytes) -> bytes | None:
    """The part of a token after its first blanks. None if it has none."""
    rest = token.lstrip(BLANKS)
    return rest if rest and len(rest) < len(token) else None


class Filler:
    """One kind of filler in one vocabulary. Thread-safe.

    `tokens` consist of nothing else. `no_nearer` are these, and others that lead no nearer to the end than
    they do. `behind` gives the part of a token after the filler.
    """

    def __init__(
        self, vocabulary: Iterable[bytes], tokens: Words, no_nearer: Words, *, blanks: bool = False
    ) -> None:
        self.tokens = tokens
        self.no_nearer = no_nearer
        self.others = ~no_nearer
        self.behind = behind_blanks if blanks else behind_text
        self._ids: dict[bytes, list[int]] = defaultdict(list)
        self._without: dict[bytes, Words] = {}
        for token, text in enumerate(vocabulary):
            rest = self.behind(text) if blanks or b'"' in text else None
            if rest is not None:
                self._ids[rest].append(token)

    def without(self, rest: bytes) -> Words | None:
        """All tokens except those that consist of filler and then `rest`. None if there are none to
        exclude."""
        if rest not in self._ids:
            return None
        if rest not in self._without:
            words = ~np.zeros_like(self.tokens)
            for token in self._ids[rest]:
                words[token // 32] &= ~np.uint32(1 << token % 32)
            self._without[rest] = words
        return self._without[rest]

    def alike(self, token: int, text: bytes) -> Words | None:
        """`token`, whose text is `text`, and all tokens that write the same after filler. None if that is
        nothing."""
        without = self.without(self.behind(text) or text)
        if without is None:
            return None
        words = ~without
        words[token // 32] |= np.uint32(1 << token % 32)
        return words
