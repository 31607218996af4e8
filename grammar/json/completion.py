"""Completes a begun JSON text so that a schema holds for it.

What is written decides which alternatives are left. In each of them, the schemas say what is missing:
members, items, the end of a string. Short values are tried first. All bounds are counts, so the same question
always has the same result: an answer that is replayed gets the same completions.
"""

import json
import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any

from personae.grammar.budget.regexes import pattern_distances
from personae.grammar.json.alternatives import (
    Alternatives,
    Way,
    contradictory,
    dependents,
    required_of,
    types_of,
)
from personae.grammar.json.judge import Judge, canonical, exact
from personae.grammar.json.text import NotJson, Text, Value
from personae.grammar.regex.ending import ending, matches
from personae.grammar.schema.document import Schema
from personae.grammar.schema.prepare import ANALYSIS_ERRORS

_FUEL = 6_000  # steps of a search
_JUDGED_IN_A_STEP = 2  # schemas
_LISTED_IN_A_STEP = 8  # values of an enum
_ROUNDS = ((4, 0.3, True), (9, 1.0, True), (6, 0.7, False))  # how deep, the share of steps, in order
_MOST_TEXTS = 150  # of one round
_MOST_NAMES = 16
_MOST_ITEMS = 64
_MOST_NUMBERS = 90
_LONGEST = 16_384  # characters of a string that has to be long
_MORE = "abcde0123A-"
_MOST_ENDINGS = 64
_LATE = 10**6  # the place of a name that no schema lists
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_OF_FORMATS = {
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "duration": "P1D",
    "uri": "a:",
}
"""A text of each format that no pattern stands for."""

Texts = Iterator[str]


class _OutOfSteps(Exception):
    """The search has taken all its steps."""


class Completer:
    """Completes texts for one document, one at a time. `ordered`: members come in the order in which schemas
    list them, if there is such a completion."""

    def __init__(self, document: Schema, *, ordered: bool) -> None:
        self._document = document
        self._judge = Judge(document)
        self._alternatives = Alternatives(self._judge, self._spend)
        self._rounds = [(deepest, share, ordered and in_order) for deepest, share, in_order in _ROUNDS]
        self._fuel = self._deepest = self._depth = 0
        # Of one round, by their depth and number, and the identities of schemas: these, and values for them.
        self._found: dict[tuple[int, ...], tuple[list[Any], list[str]]] = {}
        self._ordered = ordered

    def completions(self, begun: Text) -> Texts:
        """Texts after which the whole is valid. Ends once others are asked for."""
        found: set[str] = set()
        for deepest, share, in_order in self._rounds:
            self._deepest, self._ordered = deepest, in_order
            self._fuel, self._depth, self._judge.judged = int(_FUEL * share), 0, 0
            self._found.clear()
            try:
                for text in islice(self._texts(begun), _MOST_TEXTS):
                    if text not in found and self._holds([self._document], begun, text):
                        found.add(text)
                        yield text
            except (_OutOfSteps, *ANALYSIS_ERRORS):
                continue

    def _spend(self, steps: int = 1) -> None:
        self._fuel -= steps
        if self._fuel < self._judge.judged // _JUDGED_IN_A_STEP:
            raise _OutOfSteps

    def _texts(self, begun: Text) -> Texts:
        if begun.root is None:
            return self._new([self._document])
        return self._rest([self._document], begun, 0)

    def _holds(self, schemas: Iterable[Any], begun: Text, text: str) -> bool:
        """Whether all of `schemas` hold for the text with this end."""
        self._spend()
        try:
            value = begun.fork().feed(text).end()
        except NotJson:
            return False
        return value is not None and all(self._judge.verdict(one, value) for one in schemas)

    # Values that have begun

    def _rest(self, schemas: list[Any], text: Text, depth: int) -> Texts:
        """How the value at a depth of the stack may end, so that all of `schemas` hold for it."""
        self._spend()
        if depth == len(text.stack):
            yield ""
            return
        value, given = text.stack[depth], set[str]()
        ways = self._alternatives.ways(schemas, value)
        for rest in _in_turn(self._rest_in(way, value, text, depth) for way in ways):
            if rest not in given:
                given.add(rest)
                if depth == 0 or self._closes(schemas, text, depth, rest):
                    yield rest

    def _closes(self, schemas: list[Any], text: Text, depth: int, rest: str) -> bool:
        """Whether the value at a depth, closed by `rest`, fits its own schemas."""
        self._spend()
        whole = text.fork()
        value = whole.stack[depth]
        try:
            whole.feed(rest)
        except NotJson:
            return False
        if not value.done:
            whole.end_number()
        return value.done and all(self._judge.verdict(one, value) for one in schemas)

    def _rest_in(self, way: Way, value: Value, text: Text, depth: int) -> Texts:
        match value.kind:
            case "object":
                yield from self._rest_of_object(way, value, text, depth)
            case "array":
                yield from self._rest_of_array(way, value, text, depth)
            case "string":
                escape = {0: "", 1: "n"}.get(len(text.escape), "0041"[len(text.escape) - 2 :])
                yield from (escape + rest for rest in self._string(way, value.text + ("?" if escape else "")))
            case "number":
                yield from self._number(way, value.text)
            case _:
                whole = {"t": "true", "f": "false", "n": "null"}[value.text[0]]
                yield whole[len(value.text) :]

    def _rest_of_object(self, way: Way, value: Value, text: Text, depth: int) -> Texts:
        inner = depth + 1 < len(text.stack)
        there = list(value.members)
        # What comes before further members, the names that are there then, and the way.
        heads: Iterable[tuple[str, list[str], Way]] = [("", there, way)]
        if inner:
            assert value.name is not None
            rests = self._rest(self._of_name(way, value.name), text, depth + 1)
            heads = ((rest, there, way) for rest in islice(rests, 6))
        elif text.at == "name":
            heads = self._named(way, value.name or "", there)
        elif value.name is not None:
            colon = ":" if text.at == "colon" else ""
            values = self._some(self._of_name(way, value.name), 6)
            heads = [(colon + one, [*there, value.name], way) for one in values]
        comma_is_there = text.at == "next name" and not inner
        for head, names, taken in heads:
            self._spend()
            for body in self._members(taken, names, must=comma_is_there):
                comma = "," if body and names and not comma_is_there else ""
                yield head + comma + body + "}"

    def _named(self, way: Way, begun: str, there: list[str]) -> Iterator[tuple[str, list[str], Way]]:
        """Members of which the name has begun."""
        written = len(_quoted(begun)) - 1
        for name in self._names(way, begun, there):
            more = dependents_of(way, [name])
            for extra in self._alternatives.ways(more, None)[:6]:
                taken = way + extra
                for value in self._some(self._of_name(taken, name), 3):
                    yield f"{_quoted(name)[written:]}:{value}", [*there, name], taken

    def _rest_of_array(self, way: Way, value: Value, text: Text, depth: int) -> Texts:
        count = len(value.items)
        inner = depth + 1 < len(text.stack)
        heads = [""]
        if inner:
            heads = list(islice(self._rest(self._of_item(way, count - 1), text, depth + 1), 8))
        comma_is_there = text.at == "value" and not inner
        for head in heads:
            after = text.fork().feed(head)
            after.end_number()
            for body in self._items(way, after.stack[depth], must=comma_is_there):
                yield head + ("," if body and count and not comma_is_there else "") + body + "]"

    # Members and items to add

    def _of_name(self, way: Way, name: str) -> list[Any]:
        return [one for schema in way for one in self._judge.of_name(schema, name)]

    def _of_item(self, way: Way, place: int) -> list[Any]:
        return [self._judge.of_item(schema, place) for schema in way]

    def _later(self, way: Way, there: Iterable[str], names: Iterable[str]) -> list[str]:
        """Those of the names that may still come, in the order in which schemas list them."""
        listed = [name for schema in way for name in schema.get("properties", {})]
        listed += [name for schema in way for name in required_of(schema)]
        places = {name: place for place, name in enumerate(dict.fromkeys(listed))}
        last = max((places.get(name, _LATE) for name in there), default=-1)
        if not self._ordered:
            last = -1
        late = (name for name in names if places.get(name, _LATE) > last or name not in places)
        return sorted(late, key=lambda name: places.get(name, _LATE))

    def _names(self, way: Way, begun: str, there: list[str]) -> list[str]:
        """Names that a further member may have, and that begin so."""
        found = dict.fromkeys(_needed(way, there))
        ends: list[Texts] = []  # of each pattern; a name of any of them may be the only one that fits
        for schema in way:
            found |= dict.fromkeys(schema.get("properties", {}))
            patterns = [(pattern,) for pattern in schema.get("patternProperties", {})]
            names = schema.get("propertyNames")
            if isinstance(names, dict):
                if isinstance(names.get("pattern"), str):
                    patterns.append((names["pattern"],))
                of_names = self._alternatives.known("name", names, partial(_of_names, names))
                found |= {json.loads(text): None for text in self._some([of_names], 6)}
            ends += (_endings(pattern, begun) for pattern in patterns)
        found |= dict.fromkeys(begun + end for end in _in_turn([*ends, iter(("", *_MORE))]))
        fitting = (
            name
            for name in found
            if name.startswith(begun) and name not in there and self._may_be_named(way, name)
        )
        return self._later(way, there, fitting)[:_MOST_NAMES]

    def _may_be_named(self, way: Way, name: str) -> bool:
        value = Value("string", name, done=True)
        names = (schema.get("propertyNames", True) for schema in way)
        return False not in self._of_name(way, name) and all(self._judge.verdict(one, value) for one in names)

    def _members(self, way: Way, there: list[str], *, must: bool, depth: int = 0) -> Texts:
        """Members to add, as one text; at least one if there `must` be."""
        needed = self._needed(way, there, must=must)
        more = dependents_of(way, needed)
        if more and depth < 3:
            for extra in self._alternatives.ways(more, None)[:8]:
                if not contradictory(way + extra):
                    yield from islice(self._members(way + extra, there, must=must, depth=depth + 1), 6)
            return
        names = self._later(way, there, needed)
        if len(names) < len(needed):
            return
        options = []
        for name in names:
            values = self._some(self._of_name(way, name), 4 if len(names) < 5 else 2)
            options.append([f"{_quoted(name)}:{value}" for value in values])
            if not options[-1]:
                return
        if names or not must:
            for members in islice(product(*options), 12):
                self._spend()
                yield ",".join(members)
        chosen = {name: members[0] for name, members in zip(names, options, strict=True)}
        yield from self._with_one_more(way, there, chosen, must=must, depth=depth)

    def _with_one_more(
        self, way: Way, there: list[str], chosen: dict[str, str], *, must: bool, depth: int
    ) -> Texts:
        """Members with one that is optional: what tells alternatives apart may be there."""
        listed = (name for schema in way for name in schema.get("properties", {}))
        optional = (name for name in dict.fromkeys(listed) if name not in there and name not in chosen)
        for name in self._later(way, there, optional)[:8]:
            more = dependents_of(way, [name])
            if more and depth < 3:
                require = {"required": [name]}
                for extra in self._alternatives.ways(more, None)[:6]:
                    taken = [*way, *extra, require]
                    if not contradictory(taken):
                        yield from islice(self._members(taken, there, must=must, depth=depth + 1), 2)
            added = [*_needed(way, [*there, *chosen, name]), name]
            texts = {one: self._some(self._of_name(way, one), 1) for one in added}
            if more or [] in texts.values():
                continue
            for value in self._some(self._of_name(way, name), 2):
                members = chosen | {one: f"{_quoted(one)}:{text[0]}" for one, text in texts.items()}
                members[name] = f"{_quoted(name)}:{value}"
                names = self._later(way, there, members)
                if len(names) == len(members):
                    yield ",".join(members[one] for one in names)

    def _needed(self, way: Way, there: list[str], *, must: bool) -> list[str]:
        """The names of the members that have to be added."""
        needed = _needed(way, there)
        least = max((schema.get("minProperties", 0) for schema in way), default=0) - len(there)
        least = max(least, 1 if must else 0)
        if len(needed) < least:
            for name in self._names(way, "", [*there, *needed]):
                if self._some(self._of_name(way, name), 1):
                    needed.append(name)
                    needed += _needed(way, [*there, *needed])
                if len(needed) >= least:
                    break
        return needed

    def _items(self, way: Way, value: Value | None, *, must: bool) -> Texts:
        """Items to add, as one text."""
        items = value.items if value is not None else []
        wanted = []
        for schema in way:
            if "contains" in schema:
                there = sum(self._judge.verdict(schema["contains"], one) is True for one in items)
                wanted += [schema["contains"]] * (schema.get("minContains", 1) - there)
        least = max((schema.get("minItems", 0) for schema in way), default=0) - len(items)
        unique = any(schema.get("uniqueItems") for schema in way)
        others = {canonical(one) for one in items if one.done} if unique else None
        behind = max(len(self._judge.first_items(schema)) for schema in way) - len(items) if way else 0
        for before, more in ((0, 0), *([(behind, 0)] if wanted and behind > 0 else []), (0, 1), (0, 2)):
            count = max(least, before + len(wanted), 1 if must else 0) + more
            if count <= _MOST_ITEMS:
                schemas = [self._of_item(way, len(items) + place) for place in range(count)]
                for one, contained in zip(schemas[before:], wanted, strict=False):
                    one.append(contained)
                yield from self._of_items(schemas, others)

    def _of_items(self, schemas: list[list[Any]], there: set[Any] | None) -> Texts:
        """Texts of items, one of each schema. `there`: which others are there, if all must differ."""
        if there is not None:
            for skipped in range(4 if schemas else 1):
                yield from self._distinct(schemas, set(there), skipped)
            return
        first = [self._some(one, 1) for one in schemas]
        if [] not in first:
            yield ",".join(text for (text,) in first)
            options = [self._some(one, 4) for one in schemas]
            yield from (",".join(texts) for texts in islice(product(*options), 1, 12))

    def _distinct(self, schemas: list[list[Any]], there: set[Any], skipped: int) -> Texts:
        """One text of items that differ from each other and from those that are there. So many texts for the
        first one are passed over."""
        found: list[str] = []
        for one in schemas:
            for text in islice(self._new(one), 0 if found else skipped, 2 * _MOST_ITEMS):
                value = Text(text).end()
                assert value is not None
                if canonical(value) not in there:
                    there.add(canonical(value))
                    found.append(text)
                    break
            else:
                return
        yield ",".join(found)

    # Strings and numbers

    def _string(self, way: Way, text: str) -> Texts:
        """How a string that begins with `text` may end."""
        quoted = len(_quoted(text)) - 1
        for value in _listed(way):
            if isinstance(value, str) and value.startswith(text):
                yield _quoted(value)[quoted:]
        formats = (_OF_FORMATS.get(str(schema.get("format")), "") for schema in way)
        yield from (_quoted(one)[quoted:] for one in formats if one and one.startswith(text))
        least = max((schema.get("minLength", 0) for schema in way), default=0) - len(text)
        if least > _LONGEST:
            return
        patterns = tuple(schema["pattern"] for schema in way if "pattern" in schema)
        if not patterns:
            yield "a" * least + '"'
        else:
            yield from (_quoted(end)[1:] for end in _endings(patterns, text, least))
            for example in (pattern_distances(pattern).example for pattern in patterns):
                if example.startswith(text):
                    yield _quoted(example)[quoted:]
                yield from (_quoted(example + more)[1:] for more in ("", "a"))
        yield from (char * max(1, least) + '"' for char in "0A- .bcdefghijklmnopqrstuvwxyz")
        irregular = "".join(pattern for pattern in patterns if matches(pattern, "") is None)
        if irregular:
            chars = dict.fromkeys(char for char in irregular + text[-3:] if char.isalnum() or char in " -_")
            for size in (1, 2, 3):
                yield from ("".join(one) + '"' for one in product([*chars][:8], repeat=size))

    def _number(self, way: Way, text: str) -> Texts:
        """How a number that begins with `text` may end."""
        found: dict[str, None] = {}
        for number in _numbers(way):
            written = json.dumps(number)
            if written.startswith(text) and (text or len(found) < _MOST_NUMBERS):
                found[written[len(text) :]] = None
        yield from found
        if text:
            yield from ("", "0", "00", ".5", "5", "e0", ".0", *"123456789")
            for step in _steps(way):
                if text.lstrip("-").isdigit() and step >= 1:
                    for digits in range(1, len(str(step)) + 1):
                        yield str(-int(text) * 10**digits % step).zfill(digits)

    # New values

    def _some(self, schemas: list[Any], most: int) -> list[str]:
        """The first few new values for which all of `schemas` hold."""
        key = self._depth, most, *map(id, schemas)
        if key not in self._found:
            self._found[key] = schemas, [*islice(self._new(schemas), most)]
        return self._found[key][1]

    def _new(self, schemas: list[Any]) -> Texts:
        """New values for which all of `schemas` hold."""
        given: set[str] = set()
        texts = _in_turn(self._new_in(way) for way in self._alternatives.ways(schemas, None))
        while self._depth < self._deepest:
            self._depth += 1
            try:
                text = next(texts, None)
            finally:
                self._depth -= 1
            if text is None:
                return
            if text not in given:
                given.add(text)
                if self._holds(schemas, Text(), text):
                    yield text

    def _new_in(self, way: Way) -> Texts:
        self._spend()
        listed = sorted(map(_written, _listed(way)), key=len)
        self._spend(len(listed) // _LISTED_IN_A_STEP)
        if listed:
            yield from listed
            return
        for kind in types_of(way):
            match kind:
                case "null":
                    yield "null"
                case "boolean":
                    yield from ("true", "false")
                case "number":
                    yield from self._number(way, "")
                case "string":
                    yield from (f'"{rest}' for rest in self._string(way, ""))
                case "array":
                    yield from (f"[{items}]" for items in self._items(way, None, must=False))
                case _:
                    yield from (f"{{{members}}}" for members in self._members(way, [], must=False))
        for schema in way:
            yield from map(_written, schema.get("examples", ()))
            if "default" in schema:
                yield _written(schema["default"])


def _in_turn(texts: Iterable[Texts]) -> Texts:
    """One of each in turn; the first two of each come first."""
    going = []
    for one in texts:
        yield from islice(one, 2)
        going.append(one)
    while going:
        for one in tuple(going):
            text = next(one, None)
            if text is None:
                going.remove(one)
            else:
                yield text


def _needed(way: Way, there: Iterable[str]) -> list[str]:
    """The names that are required, or that others require, and are not there."""
    found, before = dict.fromkeys(there), -1
    there = set(found)
    while before < len(found):
        before = len(found)
        for schema in way:
            found |= dict.fromkeys(required_of(schema))
            for keyword in ("dependentRequired", "dependencies"):
                for name, one in schema.get(keyword, {}).items():
                    if name in found and isinstance(one, list):
                        found |= dict.fromkeys(one)
    return [name for name in found if name not in there]


def _endings(patterns: tuple[str, ...], begun: str, least: int = 0) -> Iterator[str]:
    """Ends of a begun text in which all patterns are found, the shortest first."""
    found: dict[str, None] = {}
    starts = ["", *(char * least for char in "a0A-" if least > 0), *_MORE]
    while starts and len(found) < _MOST_ENDINGS:
        start = starts.pop(0)
        end = ending(patterns, begun + start)
        if end is not None and start + end not in found:
            text = start + end
            found[text] = None
            yield text
            places = range(len(text), -1, -1)
            starts += [text[:place] + more for place in places for more in _MORE][:_MOST_ENDINGS]


def dependents_of(way: Way, names: Iterable[str]) -> list[dict[str, Any]]:
    """The schemas that come to bind an object with the members of these names."""
    found = (one for schema in way for one in dependents(schema, names))
    return [one for one in found if not any(one is schema for schema in way)]


def _of_names(names: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "allOf": [names]}


def _listed(way: Way) -> list[Any]:
    """The values that a way lists."""
    found = []
    for schema in way:
        found += schema.get("enum", [])
        if "const" in schema:
            found.append(schema["const"])
    return found


def _steps(way: Way) -> list[int]:
    """The whole numbers of which numbers of a way are multiples, and the least multiple of them all."""
    steps = [schema["multipleOf"] for schema in way if schema.get("multipleOf")]
    whole = [int(step) for step in steps if exact(step).denominator == 1]
    return [*whole, math.lcm(*whole)] if len(whole) > 1 else whole


def _numbers(way: Way) -> Iterator[float]:
    """Numbers that a way may allow, the likeliest first."""
    yield from (one for one in _listed(way) if isinstance(one, int | float) and not isinstance(one, bool))
    bounds = [schema[keyword] for schema in way for keyword in _BOUNDS if keyword in schema]
    bounds = [one for one in bounds if not isinstance(one, bool)]
    yield from (0, 1, -1, *bounds)
    yield from (one + more for one in bounds for more in (1, -1))
    steps = [schema["multipleOf"] for schema in way if schema.get("multipleOf")]
    for step in dict.fromkeys((*_steps(way)[::-1], *steps)):
        for base in (0, *(round_ * step for one in bounds for round_ in (one // step, -(-one // step)))):
            yield from (base + place * step for place in range(-3, 12))
    yield from ((one + other) / 2 for one in bounds for other in bounds if one < other)
    start = math.ceil(min(bounds, default=0))
    yield from range(start, start + _MOST_NUMBERS)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
