"""Marks special tokens in text: each becomes a lone surrogate, a character that text decoded from UTF-8 never
has.

So a parser can distinguish a tag that the model wrote as a token from the same letters in a string. It needs
no second code path for models whose tags are ordinary text.
"""

from collections.abc import Mapping

_FIRST = 0xDC00
_MOST = 0x400


class Marks:
    """The special tokens among `special` (names to ids) whose names occur in `texts`."""

    def __init__(self, special: Mapping[str, int], texts: str) -> None:
        named = [name for name in sorted(special, key=len, reverse=True) if name and name in texts]
        self._marks = {name: chr(_FIRST + index) for index, name in enumerate(named[:_MOST])}
        self._of_token = {special[name]: mark for name, mark in self._marks.items()}
        self._shown = {ord(mark): name for name, mark in self._marks.items()}
        self._hidden = dict.fromkeys(self._shown)

    def of(self, token: int) -> str | None:
        """The mark that stands for a token. None if the token has none."""
        return self._of_token.get(token)

    def put(self, text: str) -> str:
        """`text` with marks for the names of special tokens."""
        for name, mark in self._marks.items():
            text = text.replace(name, mark)
        return text

    def restore(self, text: str, *, shown: bool) -> str:
        """`text` without marks: with their names in their places if `shown`, else without them."""
        return text.translate(self._shown if shown else self._hidden)
