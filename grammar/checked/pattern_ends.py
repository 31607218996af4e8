"""Finds where texts of a regular expression may end."""

from collections import deque

from personae.grammar.backend import CompiledGrammar
from personae.grammar.budget.table import STOP

_REMEMBERED = 16
_FIRST_MARK, _LAST_MARK = "\ud800", "\udfff"


class PatternEnds:
    """`compiled` is the expression over bytes. What was read last is remembered: the same text is mostly read
    again with another ending."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        # What was read, whether the text ended there, and where the expression may end.
        self._known: deque[tuple[str, bool, tuple[int, ...]]] = deque(maxlen=_REMEMBERED)

    def ends(self, text: str, at: int) -> list[int]:
        """Where a text that begins at a place may end."""
        for read, whole, found in tuple(self._known):
            if text.startswith(read, at) and (not whole or len(text) == at + len(read)):
                return [at + end for end in found]
        read, found = self._read(text, at)
        self._known.append((read, len(text) == at + len(read), found))
        return [at + end for end in found]

    def _read(self, text: str, at: int) -> tuple[str, tuple[int, ...]]:
        """What was read, up to the first character that cannot follow, and the ends."""
        matcher = self._compiled.matcher()
        ends = [0] if matcher.follows((STOP,)) else []
        place = at
        for place in range(at, len(text)):
            char = text[place]
            written = b"" if _FIRST_MARK <= char <= _LAST_MARK else char.encode()
            follows = matcher.follows((*written, STOP))
            if not written or follows < len(written):
                break
            if follows > len(written):
                ends.append(place + 1 - at)
            matcher.feed(written)
        return text[at : place + 1], tuple(ends)
