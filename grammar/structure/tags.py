"""Reads structural tags: texts with bound parts, in the JSON form of xgrammar and vLLM.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html

The older form, with `structures` and `triggers`, is the same as one `triggered_tags`.
"""

from typing import Any

import msgspec

from personae.errors import GrammarError, UnsupportedParameter
from personae.grammar.schema.document import MAX_LENGTH, TOO_COMPLEX
from personae.grammar.structure.elements import (
    Concat,
    Element,
    FreeText,
    Json,
    OneOf,
    Regex,
    Repeat,
    Until,
    Verbatim,
)
from personae.grammar.structure.syntax import grammar_element

_MOST = 128
_OF_AN_ELEMENT = 32  # characters of a structure, without what it binds


class _Format(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """The base of the formats."""


class ConstString(_Format, tag="const_string"):
    """This text."""

    value: str


class JsonSchemaTag(_Format, tag="json_schema"):
    """JSON that satisfies a schema."""

    json_schema: dict[str, Any] | bool


class AnyText(_Format, tag="any_text"):
    """Text up to what follows, without any of `excludes`."""

    excludes: list[str] = []


class Pattern(_Format, tag="regex"):
    """Text that a regular expression matches."""

    pattern: str


class GrammarTag(_Format, tag="grammar"):
    """Text of a grammar, GBNF or Lark."""

    grammar: str


class InOrder(_Format, tag="sequence"):
    """One after the other."""

    elements: "list[Format]"


class Either(_Format, tag="or"):
    """Any one."""

    elements: "list[Format]"


class Optional(_Format, tag="optional"):
    """Once or not at all."""

    content: "Format"


class Plus(_Format, tag="plus"):
    """Once or more."""

    content: "Format"


class Star(_Format, tag="star"):
    """Any number of times."""

    content: "Format"


class Repeated(_Format, tag="repeat"):
    """`min` to `max` times. A `max` of -1 means no limit."""

    min: int
    max: int
    content: "Format"


class Tag(_Format, tag="tag"):
    """Something between two texts."""

    begin: str
    content: "Format"
    end: str | list[str]


class TriggeredTags(_Format, tag="triggered_tags"):
    """Free text in which a trigger can only be the beginning of a tag."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    """Tags with a text between any two."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchemaTag
    | AnyText
    | Pattern
    | GrammarTag
    | InOrder
    | Either
    | Optional
    | Plus
    | Star
    | Repeated
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """The newer form."""

    format: Format
    type: str = "structural_tag"


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag of the older form."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class OlderTag(msgspec.Struct, forbid_unknown_fields=True):
    """The older form."""

    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def structural_tag(value: dict[str, Any] | str, param: str) -> Element:
    """The element for a structural tag, given as an object or as JSON text.

    Raises GrammarError or UnsupportedParameter, with `param`, if the tag is malformed or contains something
    unknown.
    """
    try:
        document = msgspec.json.decode(value) if isinstance(value, str) else value
        if isinstance(document, dict) and "structures" in document:
            old = msgspec.convert(document, OlderTag)
            tags = [Tag(one.begin, JsonSchemaTag(one.schema), one.end) for one in old.structures]
            return _Writer(param).element(TriggeredTags(old.triggers, tags), None)
        return _Writer(param).element(msgspec.convert(document, StructuralTag).format, None)
    except msgspec.ValidationError as error:
        message = f"`{param}` is not a known structural tag: {error}."
        raise UnsupportedParameter(message, param=param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"`{param}` is not valid JSON: {error}.", param=param) from None


class _Writer:
    """Writes elements. `then` is the text that follows a format: None if the answer ends there, "" if it is
    not known. In that case unbounded text is refused."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._left = MAX_LENGTH

    def element(self, format: Format, then: str | None) -> Element:
        """The format, then `then`. Raises GrammarError, also if the result gets too long because parts of it
        are repeated for each of its ends or beginnings."""
        self._left -= _OF_AN_ELEMENT + _length(format)
        if self._left < 0:
            message = f"`{self._param}`: the tags nest in so many ways that their grammar gets too long."
            raise GrammarError(message, param=self._param, code=TOO_COMPLEX)
        match format:
            case AnyText(excludes=excludes):
                return self._text(then, tuple(excludes))
            case InOrder(elements=elements):
                return self._sequence(elements, then)
            case Either(elements=elements):
                return OneOf(tuple(self.element(one, then) for one in self._some(elements)))
            case Tag():
                return self._tag(format, format.begin, then)
            case TriggeredTags():
                return self._triggered(format, then)
        return _joined(self._plain(format), then)

    def _plain(self, format: Format) -> Element:
        match format:
            case ConstString(value=value):
                return Verbatim(value)
            case JsonSchemaTag(json_schema=schema):
                return Json({} if schema is True else schema, True, self._param)
            case Pattern(pattern=pattern):
                return Regex(pattern, self._param)
            case GrammarTag(grammar=grammar):
                return grammar_element(grammar, self._param)
            case Optional(content=content):
                return Repeat(self.element(content, ""), 0, 1)
            case Plus(content=content):
                return Repeat(self.element(content, ""), 1)
            case Star(content=content):
                return Repeat(self.element(content, ""))
            case Repeated(content=content, min=least, max=most):
                if not 0 <= least <= (most if most >= 0 else least) <= 10_000:
                    raise GrammarError(f"`{self._param}`: {least} to {most} times?", param=self._param)
                return Repeat(self.element(content, ""), least, None if most < 0 else most)
            case TagsWithSeparator():
                return self._separated(format)
        raise AssertionError(format)

    def _sequence(self, formats: list[Format], then: str | None) -> Element:
        parts: list[Element] = []
        at = 0
        while at < len(formats):
            format, last = formats[at], at == len(formats) - 1
            following = None if last else formats[at + 1]
            if isinstance(format, AnyText) and isinstance(following, ConstString):
                parts.append(self._text(following.value, tuple(format.excludes)))
                at += 2
                if at == len(formats) and then:
                    parts.append(Verbatim(then))
                continue
            parts.append(self.element(format, then if last else ""))
            at += 1
        return Concat(tuple(parts))

    def _tag(self, tag: Tag, begin: str, then: str | None) -> Element:
        ends = [tag.end] if isinstance(tag.end, str) else self._some(tag.end)
        whole = [Concat((Verbatim(begin), self.element(tag.content, end or ""))) for end in ends]
        return _joined(whole[0] if len(whole) == 1 else OneOf(tuple(whole)), then)

    def _triggered(self, format: TriggeredTags, then: str | None) -> Element:
        triggers, excludes = self._some(format.triggers), tuple(format.excludes)
        by_trigger: dict[str, list[Element]] = {trigger: [] for trigger in triggers}
        for tag in self._some(format.tags):
            found = [trigger for trigger in triggers if trigger and tag.begin.startswith(trigger)]
            if len(found) != 1:
                message = f"`{self._param}`: the tag {tag.begin!r} must begin with one of the triggers."
                raise GrammarError(message, param=self._param)
            by_trigger[found[0]].append(self._tag(tag, tag.begin.removeprefix(found[0]), ""))
        begun = [
            Concat((Until(trigger, without=(*_others(trigger, triggers), *excludes)), OneOf(tuple(tags))))
            for trigger, tags in by_trigger.items()
            if tags
        ]
        first = OneOf(tuple(self._tag(tag, tag.begin, "") for tag in format.tags))
        if format.at_least_one and format.stop_after_first:
            return _joined(first, then)
        text = self._text(then, (*triggers, *excludes))
        if format.stop_after_first:
            return OneOf((*(_joined(one, then) for one in begun), text))
        rest = Concat((Repeat(OneOf(tuple(begun))), text))
        return Concat((first, rest)) if format.at_least_one else rest

    def _separated(self, format: TagsWithSeparator) -> Element:
        tag = OneOf(tuple(self._tag(one, one.begin, "") for one in self._some(format.tags)))
        more = Repeat(Concat((Verbatim(format.separator), tag)))
        tags = tag if format.stop_after_first else Concat((tag, more))
        return tags if format.at_least_one else Repeat(tags, 0, 1)

    def _text(self, then: str | None, without: tuple[str, ...]) -> Element:
        if then == "":
            message = f"`{self._param}`: free text must be last, or a fixed text must follow it."
            raise GrammarError(message, param=self._param)
        return FreeText(without) if then is None else Until(then, without=without)

    def _some(self, values: list[Any]) -> list[Any]:
        if not 0 < len(values) <= _MOST:
            raise GrammarError(f"`{self._param}`: a list must have 1 to {_MOST} entries.", param=self._param)
        return values


def _length(format: Format) -> int:
    match format:
        case ConstString(value=text) | Pattern(pattern=text) | GrammarTag(grammar=text):
            return len(text)
        case JsonSchemaTag(json_schema=schema):
            return len(msgspec.json.encode(schema))
    return 0


def _joined(element: Element, then: str | None) -> Element:
    return Concat((element, Verbatim(then))) if then else element


def _others(trigger: str, triggers: list[str]) -> list[str]:
    return [other for other in triggers if other != trigger]
