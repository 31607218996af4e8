"""Writes names of properties as terminals of a Lark grammar.

A name has one spelling: no escape that is not needed. So the names that are not listed are the strings of
which the text is none of theirs. The library takes that difference itself. A pattern for it would spell out
each character of each name, which takes the library longer than all else in a large schema.
"""

import json
from dataclasses import dataclass

# As the library writes strings of JSON with the escapes that it is allowed (`json_allowed_escapes`).
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\[nrbtf"\\])*"/'


@dataclass(frozen=True, slots=True)
class NamesBut:
    """All names but those listed."""

    listed: tuple[str, ...]

    def terminal(self) -> str:
        """The right side of a terminal."""
        if not self.listed:
            return _STRING
        return f"{_STRING} & ~({' | '.join(map(name_literal, self.listed))})"


def name_literal(name: str) -> str:
    """One name, in quotes, as a literal of Lark."""
    return literal(json.dumps(name, ensure_ascii=False))


def literal(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
