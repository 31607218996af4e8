"""Reads llama.cpp's GBNF, and writes it as the dialect that xgrammar reads.

The reader takes what llama.cpp takes: `.` for any character, alternatives without content, and a newline only
in parentheses, after `|` or after `::=`. Beyond that, a line may begin with `|`, names may have underscores,
and `-` and `^` may be escaped. It refuses llama.cpp's tokens (`<think>`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_BLANKS = re.compile(r"[ \t]*")
_BLANKS_AND_LINES = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"#[^\r\n]*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEFINED = re.compile(r"[ \t]*::=")
_BOUNDS = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", **{mark: mark for mark in '\\"[]-^'}}
_LAST = 0x10FFFF
_DEPTH = 200  # of parentheses


class GbnfError(ValueError):
    """The text is not GBNF. The message says where."""


@dataclass(slots=True)
class Item:
    """A part of an alternative, with the bounds of its repetitions; a bound that is None is open."""

    repeats: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass(slots=True)
class Text(Item):
    """These characters."""

    text: str = ""


@dataclass(slots=True)
class Characters(Item):
    """One character in one of the ranges, or, if `negated`, in none."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    negated: bool = False


@dataclass(slots=True)
class RuleName(Item):
    """What a rule matches."""

    name: str = ""


@dataclass(slots=True)
class Group(Item):
    """One of the alternatives."""

    alternatives: "list[list[AnyItem]]" = field(default_factory=list)


AnyItem = Text | Characters | RuleName | Group
Rules = dict[str, list[list[AnyItem]]]
"""The alternatives of each rule."""


def read_gbnf(source: str) -> Rules:
    """The rules of a grammar. Raises GbnfError."""
    return _Reader(source).rules()


def write_ebnf(rules: Rules) -> str:
    """The grammar in xgrammar's dialect."""
    names: dict[str, str] = {}
    for name in rules:  # xgrammar has no names that begin with a digit
        names[name] = name if not name[0].isdigit() else f"rule-{name}"
        while names[name] != name and names[name] in rules:
            names[name] += "-"
    return "".join(f"{names[name]} ::= {_alternatives(body, names)}\n" for name, body in rules.items())


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def rules(self) -> Rules:
        rules: Rules = {}
        self._space(lines=True)
        while self._at < len(self._source):
            name = self._take(_NAME)
            if not name:
                raise self._error("expected the name of a rule")
            if self._take(_DEFINED) is None:
                raise self._error(f"expected '::=' after {name!r}")
            if name in rules:
                raise self._error(f"the rule {name!r} is defined twice")
            self._space(lines=True)
            rules[name] = self._alternatives(0)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._error("expected a new line")
            self._space(lines=True)
        if "root" not in rules:
            raise GbnfError("it has no rule 'root'")
        for name in _names(rules.values()):
            if name not in rules:
                raise GbnfError(f"the rule {name!r} is not defined")
        return rules

    def _alternatives(self, depth: int) -> list[list[AnyItem]]:
        if depth > _DEPTH:
            raise self._error("too many parentheses in each other")
        found: list[list[AnyItem]] = []
        while True:
            found.append(self._sequence(depth))
            end = self._at
            self._space(lines=True)
            if self._source[self._at : self._at + 1] != "|":
                self._at = end
                return found
            self._at += 1
            self._space(lines=True)

    def _sequence(self, depth: int) -> list[AnyItem]:
        items: list[AnyItem] = []
        while self._at < len(self._source):
            character = self._source[self._at]
            if character in "*+?{":
                if not items:
                    raise self._error(f"expected something to repeat before {character!r}")
                items[-1].repeats.append(self._repetition(character))
            elif character == '"':
                items.append(self._text())
            elif character == "[":
                items.append(self._characters())
            elif character == ".":
                self._at += 1
                items.append(Characters(ranges=[(0, _LAST)]))
            elif character == "(":
                self._at += 1
                self._space(lines=True)
                items.append(Group(alternatives=self._alternatives(depth + 1)))
                if self._source[self._at : self._at + 1] != ")":
                    raise self._error("expected ')'")
                self._at += 1
            elif name := self._take(_NAME):
                items.append(RuleName(name=name))
            else:
                break
            self._space(lines=depth > 0)
        return items

    def _repetition(self, character: str) -> tuple[int, int | None]:
        if character != "{":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        bounds = _BOUNDS.match(self._source, self._at)
        if bounds is None:
            raise self._error("expected {m}, {m,} or {m,n}")
        self._at = bounds.end()
        least = int(bounds[1])
        most = least if bounds[2] is None else None if bounds[3] is None else int(bounds[3])
        if most is not None and most < least:
            raise self._error("the second number of a repetition is less than the first")
        return least, most

    def _text(self) -> Text:
        self._at += 1
        characters: list[str] = []
        while self._next('"') != '"':
            characters.append(chr(self._character()))
        self._at += 1
        return Text(text="".join(characters))

    def _characters(self) -> Characters:
        self._at += 1
        negated = self._next("]") == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._next("]") != "]":
            first = last = self._character()
            if self._next("]") == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                self._next("]")
                last = self._character()
                if last < first:
                    raise self._error("the second character of a range comes before the first")
            ranges.append((first, last))
        self._at += 1
        if not ranges and not negated:
            raise self._error("expected a character in []")
        return Characters(ranges=ranges, negated=negated)

    def _next(self, end: str) -> str:
        """The next character of a text or class, which ends with `end`."""
        if self._at >= len(self._source):
            raise self._error(f"expected {end!r}")
        return self._source[self._at]

    def _character(self) -> int:
        """A character of a text or class, which may be escaped."""
        character = self._source[self._at]
        self._at += 1
        if character != "\\":
            return ord(character)
        escaped = self._source[self._at : self._at + 1]
        if escaped in _HEX:
            digits = self._source[self._at + 1 : self._at + 1 + _HEX[escaped]]
            if len(digits) < _HEX[escaped] or not re.fullmatch("[0-9A-Fa-f]+", digits):
                raise self._error(f"expected {_HEX[escaped]} hexadecimal digits after \\{escaped}")
            code = int(digits, 16)
            if code > _LAST or 0xD800 <= code <= 0xDFFF:
                raise self._error(f"U+{code:04X} is no character")
            self._at += 1 + len(digits)
            return code
        if escaped not in _ESCAPED or not escaped:
            raise self._error(f"the escape \\{escaped} is unknown")
        self._at += 1
        return ord(_ESCAPED[escaped])

    def _space(self, *, lines: bool) -> None:
        """Skip blanks and comments, and the ends of lines if `lines`."""
        self._take(_BLANKS_AND_LINES if lines else _BLANKS)
        while self._take(_COMMENT) is not None:
            self._take(_BLANKS_AND_LINES if lines else _BLANKS)

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._source, self._at)
        if match is not None:
            self._at = match.end()
        return None if match is None else match[0]

    def _error(self, why: str) -> GbnfError:
        before = self._source[: self._at]
        line, column = before.count("\n") + 1, self._at - (before.rfind("\n") + 1) + 1
        found = self._source[self._at : self._at + 20].split("\n")[0]
        return GbnfError(f"line {line}, column {column}: {why}" + (f", at {found!r}" if found else ""))


def _names(bodies: Iterable[list[list[AnyItem]]]) -> Iterator[str]:
    for body in bodies:
        for items in body:
            for item in items:
                if isinstance(item, RuleName):
                    yield item.name
                elif isinstance(item, Group):
                    yield from _names([item.alternatives])


def _alternatives(body: list[list[AnyItem]], names: dict[str, str]) -> str:
    return " | ".join(" ".join(_item(item, names) for item in items) or '""' for items in body)


def _item(item: AnyItem, names: dict[str, str]) -> str:
    match item:
        case Text(text=text):
            written = f'"{"".join(map(_character, map(ord, text)))}"'
        case Characters(ranges=[]):
            written = f"[{_character(0)}-{_character(_LAST)}]"  # [^]
        case Characters(ranges=ranges, negated=negated):
            listed = (
                _character(first) + (f"-{_character(last)}" if last > first else "") for first, last in ranges
            )
            written = f"[{'^' if negated else ''}{''.join(listed)}]"
        case RuleName(name=name):
            written = names[name]
        case Group(alternatives=alternatives):
            written = f"({_alternatives(alternatives, names)})"
    for number, bounds in enumerate(item.repeats):
        written = (f"({written})" if number else written) + _bounds(bounds)
    return written


def _bounds(bounds: tuple[int, int | None]) -> str:
    match bounds:
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
        case (least, None):
            return f"{{{least},}}"
        case (least, most):
            return f"{{{least},{most}}}"


def _character(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
