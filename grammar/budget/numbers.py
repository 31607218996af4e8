"""Makes numbers end: no more characters than a double needs, and no exponent that no double has.

JSON allows numbers of any length, and so do the backends. A model in a loop would write one for ever, and its
reader would get infinity or an error.
"""

import re
from typing import NamedTuple

from personae.grammar.budget.string_masks import Words
from personae.grammar.budget.table import TokenTable

MOST = 24  # characters: -2.2250738585072014e-308
_NUMERIC = re.compile(rb"[0-9.eE+-]*$")
_EXPONENT = re.compile(rb"[0-9][eE][+-]?([0-9]*)$")
_CHARACTERS = frozenset(b"0123456789.eE+-")
_LONGEST_TOKEN = 16  # the most characters that a numeric token is taken to have
_KEPT = 4 * MOST


class NumberGuard(NamedTuple):
    """Follows one answer: the numeric characters at its end. `ends` are the tokens that may follow a number;
    None if the answer has no numbers."""

    table: TokenTable
    ends: Words | None
    run: bytes = b""

    def after(self, text: bytes) -> "NumberGuard":
        """The guard after `text` was added."""
        if text and text[-1] not in _CHARACTERS:
            return self._replace(run=b"") if self.run else self
        tail = text[_NUMERIC.search(text).start() :]  # type: ignore[union-attr]  # the empty tail matches
        return self._replace(run=(self.run + tail)[-_KEPT:] if len(tail) == len(text) else tail)

    def narrow(self, words: Words) -> Words | None:
        """What `words` allows without tokens that would make the number too long. None if nothing has to be
        excluded."""
        run, table = self.run, self.table
        if len(run) < 2 or self.ends is None:
            return None
        exponent = _EXPONENT.search(run)
        if exponent is None and len(run) <= MOST - _LONGEST_TOKEN:
            return None
        if (words & table.letters).any():
            return None  # not a number, but digits within a string
        if exponent is not None and len(exponent[1]) < 2:
            barred = table.numeric_longer
        else:
            barred = table.numeric_over(max(MOST - len(run), 0) if exponent is None else 0)
            in_string = table.quote is not None and table.holds(words, table.quote)
            if in_string or not (words & self.ends).any():
                return None  # or in a number that has to continue
        kept = words & ~barred
        return kept if kept.any() else None
