"""Writes a structure as a grammar in llguidance's dialect of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

Its lexer is greedy: of the texts that the grammar allows at a place it takes the longest, and only then asks
what may follow. So a fixed text with its blanks is one lexeme. Where JSON is possible, too, it has the
lexemes of JSON, because a longer one would hide them. Text up to an end is a lexeme with that suffix. Text
without some string is a regular expression that cannot contain it.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import msgspec

from personae.errors import GrammarError
from personae.grammar.schema.whitespace import MOST_BLANKS
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    FreeText,
    Json,
    Lark,
    OneOf,
    Regex,
    Repeat,
    Until,
    Verbatim,
)

_BLANKS = r"[ \t\r\n]"
_ANY = "(?s:.*)"

BoundElement = Json | Regex | Lark
Bind = Callable[[BoundElement], str]


def lark(element: Element, special: Mapping[str, int], bind: Bind) -> str:
    """The grammar's text. `special` maps the names of special tokens to ids. `bind` writes the right side of
    the rule for an element that the caller wrote: a schema, a regular expression, a grammar."""
    writer = _Writer(special, bind)
    start = writer.expression(element)
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    def __init__(self, special: Mapping[str, int], bind: Bind) -> None:
        self._special = special
        self._bind = bind
        self._names = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules_of: dict[bytes, str] = {}
        self.rules: list[str] = []

    def expression(self, element: Element) -> str:
        match element:
            case Exactly(text=text, or_json=True):
                return " ".join(_tokens(text)) or '""'
            case Exactly(text=text):
                return " ".join(self._fixed(text, _spaced)) or '""'
            case Verbatim(text=text):
                return " ".join(self._fixed(text, _escaped)) or '""'
            case FreeText():
                return self._text(element)
            case Until():
                return self._until(element)
            case Regex():
                return self._rule("regex", self._regex(element), terminal=True)
            case Json() | Lark():
                return self._shared(element, lambda: self._bind(element), least=0)
            case Concat(parts=parts):
                return self._shared(element, lambda: " ".join(map(self.expression, parts)) or '""')
            case OneOf(parts=parts):
                return "(" + " | ".join(self.expression(part) for part in parts) + ")"
            case Repeat(part=part, least=least, most=most):
                return f"({self.expression(part)}){{{least},{'' if most is None else most}}}"

    def _shared(self, element: Element, body: Callable[[], str], least: int = 300) -> str:
        """A rule for an element, shared by all its occurrences; the body alone if it is short."""
        key = msgspec.json.encode(element)
        if len(key) < least:
            return body()
        if key not in self._rules_of:
            self._rules_of[key] = self._rule("part", body())
        return self._rules_of[key]

    def _fixed(self, text: str, pattern: Callable[[str], str]) -> list[str]:
        """Lexemes and tokens, one after the other."""
        pieces = []
        at = 0
        for found in self._names.finditer(text):
            pieces += [_lexeme(pattern(text[at : found.start()])), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        pieces.append(_lexeme(pattern(text[at:])))
        return [piece for piece in pieces if piece]

    def _regex(self, element: Regex) -> str:
        return " & ".join([self._bind(element), *self._lacking(element.without)])

    def _text(self, element: FreeText) -> str:
        conditions = [
            f"/{_ANY}/",
            *self._openings(element.openings),
            *self._lacking(element.without),
        ]
        return self._rule("text", " & ".join(conditions), terminal=True)

    def _until(self, element: Until) -> str:
        conditions = [*self._openings(element.openings), *self._lacking(element.without)]
        body = " & ".join([f"/{_ANY}/", *conditions])
        last = next((name for name in self._special if name and element.end.endswith(name)), None)
        if last is not None:
            before = element.end.removesuffix(last)
            if not self._names.search(before):
                body = " & ".join([f"/{_ANY}{_escaped(before)}/", *conditions])
                return f"{self._rule('text', body, terminal=True)} <[{self._special[last]}]>"
        if self._names.search(element.end):
            raise GrammarError(f"{element.end!r} has special tokens in its middle, and cannot end a text.")
        name = f"until{len(self.rules)}"
        self.rules.append(f"{name}[suffix=/{_escaped(element.end)}/]: {body}")
        return name

    def _lacking(self, texts: tuple[str, ...]) -> list[str]:
        return [f"~/{_ANY}{_escaped(text)}{_ANY}/" for text in texts if text not in self._special]

    def _openings(self, openings: tuple[str, ...]) -> list[str]:
        spelled = [opening for opening in openings if opening not in self._special]
        return [f"~/{_BLANKS}*{_escaped(opening)}{_ANY}/" for opening in spelled]

    def _rule(self, name: str, body: str, *, terminal: bool = False) -> str:
        name = f"{name}{len(self.rules)}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}: {body}")
        return name


def _lexeme(pattern: str) -> str:
    return f"/{pattern}/" if pattern else ""


def _tokens(text: str) -> Iterator[str]:
    """The lexemes of tokens of JSON, with a space between any two that blanks may separate."""
    for place, token in enumerate(text.split(" ")):
        if place:
            yield f"/{_BLANKS}{{1,{MOST_BLANKS}}}/?"
        if token:
            yield _lexeme(_escaped(token))


def _spaced(text: str) -> str:
    """As `_escaped`; a space stands for blanks that may be there or not, `#` for a number."""
    blanks = f"{_BLANKS}{{0,2}}".join(_escaped(piece) for piece in text.split(" "))
    return blanks.replace(_escaped("#"), "[0-9]{1,4}")


def _escaped(text: str) -> str:
    """A regular expression for `text`, for use between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
