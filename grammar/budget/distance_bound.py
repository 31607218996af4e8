"""How far an answer can be from its end, derived from what binds it.

The bounds are in tokens, with one token for each byte of what is not known. They hold at every point of an
answer:

    distance <= rest + container * (open brackets) + lexeme

`container` is the most that one open object or array still needs, including the member that it has begun.
`lexeme` is the most that a begun string, number or name needs. `rest` is what follows JSON in a structure.
The outermost object or array is usually by far the largest, and there is only one. So it counts towards
`rest`, and `roots` says how many brackets are then not counted. An answer that has more tokens left than the
bound need not be watched.
"""

import json
import re
from collections.abc import Callable, Iterable

import msgspec

from personae.grammar.budget.regexes import pattern_distances

_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)+"')
_MOST_LITERALS = 256

# The number of tokens that is enough for the rest of a text, from any place in it.
Measure = Callable[[bytes], int]


class DistanceBound(msgspec.Struct, frozen=True):
    """The bounds. If `proven` is False they are a guess, and a completion is then known from the first token.

    `plain` is how much further from its end plain text within a string or a text can bring the answer; None
    if that is not known. Plain text must not contain the bytes `barred` for this to hold. `hints` are strings
    that an answer may have to write, as JSON, the most useful first (with `words_first` it consists of
    nothing else). `ends` are texts that lead out of free text, `exits` texts that end a repetition. `values`
    are what arrays may have to contain, as JSON, and what objects may, with a colon. `literals` are other
    texts of the grammar, for the slower search. `number_ends` are texts that may follow a number, in addition
    to those in JSON; None: there is no number. `texts`: the content of a string that may be any text does not
    matter. `blanks`: there may be blanks between two tokens of JSON. `endless`: no string has a maximum
    length.
    """

    rest: int = 0
    container: int = 0
    lexeme: int = 0
    plain: int | None = 0
    barred: bytes = b""
    hints: tuple[bytes, ...] = ()
    ends: tuple[str, ...] = ()
    exits: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()
    number_ends: tuple[str, ...] | None = None
    words_first: bool = False
    proven: bool = True
    roots: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    texts: bool = False
    blanks: bool = False
    endless: bool = False
    values: tuple[bytes, ...] = ()

    def then(self, other: "DistanceBound") -> "DistanceBound":
        """The bound of an answer of this kind followed by the other."""
        return self._joined(other, self.rest + other.rest)

    def either(self, other: "DistanceBound") -> "DistanceBound":
        """The bound of an answer of either kind."""
        return self._joined(other, max(self.rest, other.rest))

    def _joined(self, other: "DistanceBound", rest: int) -> "DistanceBound":
        return DistanceBound(
            rest,
            max(self.container, other.container),
            max(self.lexeme, other.lexeme),
            None if self.plain is None or other.plain is None else max(self.plain, other.plain),
            bytes(sorted({*self.barred, *other.barred})),
            tuple(dict.fromkeys(self.hints + other.hints)),
            tuple(dict.fromkeys(self.ends + other.ends)),
            tuple(dict.fromkeys(self.exits + other.exits)),
            tuple(dict.fromkeys(self.literals + other.literals)),
            _both(self.number_ends, other.number_ends),
            proven=self.proven and other.proven,
            texts=self.texts and other.texts,
            endless=self.endless and other.endless,
            steps=tuple(dict.fromkeys(self.steps + other.steps)),
            values=tuple(dict.fromkeys(self.values + other.values)),
        )


def _both(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if one is None or other is None:
        return one if other is None else other
    return tuple(dict.fromkeys(one + other))


def guessed(shortest: int, literals: Iterable[str] = ()) -> DistanceBound:
    """A guess for a grammar that is not understood here, from the length of its shortest text."""
    far = max(512, 8 * shortest)
    return DistanceBound(far, far, far, None, literals=tuple(literals), proven=False)


def grammar_literals(source: str) -> list[str]:
    """The quoted texts of a grammar, in Lark or GBNF."""
    found = (_unquoted(quoted) for quoted in _QUOTED.findall(source))
    return list(dict.fromkeys(text for text in found if text))[:_MOST_LITERALS]


def _unquoted(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def text_bound(
    measure: Measure, texts: Iterable[str], ends: Iterable[str] = (), barred: Iterable[str] = ()
) -> DistanceBound:
    """For fixed `texts`, and for free text up to one of `ends` that contains none of the texts `barred`."""
    ends, texts = tuple(ends), tuple(texts)
    length = sum(measure(text.encode()) for text in (*texts, *ends))
    firsts = {text.encode()[0] for text in (*ends, *barred) if text}
    alone = bool(texts) and not firsts
    return DistanceBound(length, barred=bytes(sorted(firsts)), ends=ends, texts=alone, endless=alone)


def pattern_bound(pattern: str) -> DistanceBound:
    """An answer that matches a regular expression as a whole."""
    bound = pattern_distances(pattern)
    plain = None if bound.wide else 4 * bound.longest
    example = (bound.example,) if bound.example else ()
    words = tuple(text.encode() for text in example)
    return DistanceBound(4 * bound.longest + 4, 0, 0, plain, hints=words, ends=example, words_first=True)
