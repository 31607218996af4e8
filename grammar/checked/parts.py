"""Finds the parts of an answer that are JSON bound by schemas.

An answer may be read in several ways, as a structure may have alternatives. Of all ways in which an element
can end at a place, the one with the fewest invalid parts is kept. So a text in which none is found is an
answer of the structure, and any other shows what is wrong with it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import local
from typing import Any, NamedTuple

import jsonschema_rs

from personae.errors import GrammarError
from personae.grammar.backend import CompiledGrammar
from personae.grammar.checked.pattern_ends import PatternEnds
from personae.grammar.json.completion import Completer
from personae.grammar.json.text import NotJson, Text
from personae.grammar.schema.document import parse_schema, parse_with_validator
from personae.grammar.schema.formats import spell_formats
from personae.grammar.schema.prepare import without_ignored
from personae.grammar.schema.references import resolved
from personae.grammar.schema.whitespace import MOST_BLANKS
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    FreeText,
    Json,
    OneOf,
    Regex,
    Repeat,
    Until,
    Verbatim,
)

_BLANKS = re.compile(r"[ \t\r\n]*")
_BLANKS_OF_A_SPACE = 2
_NEVER = "(?!)"
_MARK = re.compile("[\ud800-\udfff]")
_DECODER = json.JSONDecoder()
_REMEMBERED = 64  # judged values of one schema

Barred = Callable[[str], bool]


class PartSchema:
    """What binds a part. `checked`: the masks do not enforce all of it. `example` is a valid value, as JSON;
    empty if none is known."""

    def __init__(
        self, schema: Any, *, checked: bool = False, any_order: bool = False, example: str = ""
    ) -> None:
        self._source = json.dumps(schema)
        self.checked = checked
        self.example = example
        self._any_order = any_order
        self._of_thread = local()  # a completer, and what it has completed last: that mostly goes on
        self.accepts = lru_cache(_REMEMBERED)(self._accepts)

    @cached_property
    def _validator(self) -> jsonschema_rs.Validator:
        """Made when it is first needed: most parts that the masks enforce never are judged."""
        return parse_with_validator(self._source)[1]

    def _accepts(self, text: str) -> bool:
        """Whether the text is a valid value, and no name comes twice in an object."""
        try:
            return self._validator.is_valid(json.loads(text, object_pairs_hook=_unique))
        except (ValueError, RecursionError):
            return False

    def completions(self, begun: str) -> Iterator[str]:
        """Valid values that begin so, as JSON."""
        mine = self._of_thread
        if not hasattr(mine, "completer"):
            document = spell_formats(resolved(without_ignored(parse_schema(self._source))))
            mine.completer = Completer(document, ordered=not self._any_order)
            mine.begun, mine.text = "", Text()
        if not begun.startswith(mine.begun):
            mine.begun, mine.text = "", Text()
        try:
            text = mine.text.fork().feed(begun[len(mine.begun) :])
        except NotJson:
            return
        mine.begun, mine.text = begun, text
        for rest in mine.completer.completions(text):
            if self.accepts(begun + rest):
                yield begun + rest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these members. Raises ValueError if a name comes twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name comes twice")
    return made


class CheckedPart(NamedTuple):
    """A value in a text. `judged`: the answer is valid only if the value is."""

    start: int
    end: int
    schema: PartSchema
    judged: bool


Parts = tuple[CheckedPart, ...]
Ways = dict[int, Parts]
"""The places where an element may end, and the parts in it."""


class ParsedAnswer:
    """One text that is read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.known: dict[tuple[int, int], Ways] = {}

    def faults(self, parts: Parts) -> Parts:
        """The judged parts that are invalid."""
        return tuple(
            part
            for part in parts
            if part.judged and not part.schema.accepts(self.text[part.start : part.end])
        )

    def add(self, ways: Ways, end: int, parts: Parts) -> None:
        """Add a way. Of two to the same place, the one with fewer faults is kept."""
        there = ways.get(end)
        if there is not None and there != parts:
            both = [tuple(part._replace(judged=True) for part in one) for one in (there, parts)]
            parts = min(both, key=lambda one: len(self.faults(one)))
        ways[end] = parts


Read = Callable[[ParsedAnswer, int], Ways]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a structure's texts and parts mean. `put` marks special tokens in texts, `schema_of` gives what
    binds a strict part, and `compiled` the grammar of a regular expression over bytes."""

    put: Callable[[str], str]
    schema_of: Callable[[Json], PartSchema]
    compiled: Callable[[Regex], CompiledGrammar]


def reader(element: Element, terms: Terms) -> Read:
    """What finds the ways in which `element` may begin at a place of a text.

    Raises GrammarError for a structure with a grammar.
    """
    put = terms.put
    match element:
        case Exactly(text=text, or_json=or_json):
            return _fixed(_spaced(put(text), MOST_BLANKS if or_json else _BLANKS_OF_A_SPACE))
        case Verbatim(text=text):
            return _fixed(re.escape(put(text)))
        case Until(end=end, without=without, openings=openings):
            return _until(put(end), _conditions(put, without, openings))
        case FreeText(without=without, openings=openings):
            return _free(_conditions(put, without, openings))
        case Json(openings=openings):
            begun = [_spaced(put(opening), MOST_BLANKS) for opening in openings]
            return _remembered(_json(terms.schema_of(element) if element.strict else None, begun))
        case Concat(parts=parts):
            return _remembered(_concat([reader(part, terms) for part in parts]))
        case OneOf(parts=parts):
            return _remembered(_one_of([reader(part, terms) for part in parts]))
        case Repeat(part=part, least=least, most=most):
            return _remembered(_repeat(reader(part, terms), least, most))
        case Regex(without=without):
            return _ended(PatternEnds(terms.compiled(element)), without)
    raise GrammarError(
        "Beside a grammar no schema can be checked while the answer is written.", param=element.param
    )


def _remembered(read: Read) -> Read:
    def again(answer: ParsedAnswer, at: int) -> Ways:
        key = id(read), at
        if key not in answer.known:
            answer.known[key] = read(answer, at)
        return answer.known[key]

    return again


def _spaced(text: str, most: int) -> str:
    """The expression of a text in which a space stands for at most so many blanks, and `#` for a number."""
    blanks = f"[ \\t\\r\\n]{{0,{most}}}".join(map(re.escape, text.split(" ")))
    return blanks.replace(re.escape("#"), "[0-9]{1,4}")


def _fixed(expression: str) -> Read:
    pattern = re.compile(expression)

    def read(answer: ParsedAnswer, at: int) -> Ways:
        found = pattern.match(answer.text, at)
        return {} if found is None else {found.end(): ()}

    return read


def _conditions(put: Callable[[str], str], without: tuple[str, ...], openings: tuple[str, ...]) -> Barred:
    """Whether a text is not free of `without`, or begins with one of `openings`, or has a special token."""
    within, begun = tuple(map(put, without)), tuple(map(put, openings))

    def barred(text: str) -> bool:
        if any(one in text for one in within) or (not text.isascii() and _MARK.search(text)):
            return True
        return bool(begun) and text[_after_blanks(text, 0) :].startswith(begun)

    return barred


def _until(end: str, barred: Barred) -> Read:
    def read(answer: ParsedAnswer, at: int) -> Ways:
        found = answer.text.find(end, at)
        if found < 0 or barred(answer.text[at:found]):
            return {}
        return {found + len(end): ()}

    return read


def _free(barred: Barred) -> Read:
    """Free text is always last, so it ends with the answer."""

    def read(answer: ParsedAnswer, at: int) -> Ways:
        return {} if barred(answer.text[at:]) else {len(answer.text): ()}

    return read


def _ended(pattern: PatternEnds, without: tuple[str, ...]) -> Read:
    def read(answer: ParsedAnswer, at: int) -> Ways:
        barred = [found + len(text) for text in without if (found := answer.text.find(text, at)) >= 0]
        most = min(barred, default=len(answer.text) + 1)
        return {end: () for end in pattern.ends(answer.text, at) if end < most}

    return read


def _json(schema: PartSchema | None, openings: list[str]) -> Read:
    """`openings` are expressions of the texts with which the value does not begin."""
    barred = re.compile("|".join(openings) or _NEVER)

    def read(answer: ParsedAnswer, at: int) -> Ways:
        start = _after_blanks(answer.text, at)
        if barred.match(answer.text, start):
            return {}
        try:
            _, end = _DECODER.raw_decode(answer.text, start)
        except (ValueError, RecursionError):
            return {}
        parts = () if schema is None else (CheckedPart(start, end, schema, schema.checked),)
        return dict.fromkeys((end, _after_blanks(answer.text, end)), parts)

    return read


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return at if found is None else found.end()


def _concat(reads: list[Read]) -> Read:
    def read(answer: ParsedAnswer, at: int) -> Ways:
        ways: Ways = {at: ()}
        for one in reads:
            ways = _then(answer, ways, one)
        return ways

    return read


def _then(answer: ParsedAnswer, ways: Ways, read: Read) -> Ways:
    following: Ways = {}
    for at, before in ways.items():
        for end, parts in read(answer, at).items():
            answer.add(following, end, before + parts)
    return following


def _one_of(reads: list[Read]) -> Read:
    def read(answer: ParsedAnswer, at: int) -> Ways:
        ways: Ways = {}
        for one in reads:
            for end, parts in one(answer, at).items():
                answer.add(ways, end, parts)
        return ways

    return read


def _repeat(once: Read, least: int, most: int | None) -> Read:
    def rounds(answer: ParsedAnswer, at: int) -> Iterator[Ways]:
        ways: Ways = {at: ()}
        yield ways
        while ways:
            ways = _then(answer, ways, once)
            yield ways

    def read(answer: ParsedAnswer, at: int) -> Ways:
        ended: Ways = {}
        for number, ways in enumerate(rounds(answer, at)):
            fresh = ways.keys() - ended.keys()
            if number >= least:
                for end, parts in ways.items():
                    answer.add(ended, end, parts)
            if number == most or (number > least and not fresh):
                break
        return ended

    return read
