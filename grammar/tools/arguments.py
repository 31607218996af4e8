"""How a model family writes the arguments of a call: as a JSON object, or one by one."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from personae.errors import GrammarError
from personae.grammar.schema.document import TOO_COMPLEX
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.structure.elements import (
    Concat,
    Element,
    Exactly,
    Json,
    Lark,
    OneOf,
    Regex,
    Repeat,
    Until,
    Verbatim,
)
from personae.grammar.structure.escaped import escaped_lark
from personae.grammar.tools.function import Function
from personae.grammar.tools.parameters import ToolParameter, branches, parameters_of

Kind = Literal["text", "text or null", "json"]
_ANY_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """A JSON object."""

    texts = ""

    def written(self, arguments: Mapping[str, Any] | str) -> str:
        """Arguments as a model writes them; text is written unchanged."""
        return str(arguments) if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def element(self, function: Function) -> Element:
        """The element for the arguments of a call."""
        if isinstance(function.text, Lark):
            text = Lark(escaped_lark(function.text.source, function.param), function.param)
            return Concat((Exactly('{ "input" : "'), text, Exactly('" }')))
        return Json(function.parameters, function.strict, function.param)


@dataclass(frozen=True, slots=True)
class KeyedArguments:
    """Arguments are written one by one, each as `before_key KEY after_key VALUE after_value`, with `between`
    between any two.

    Values are JSON, except for the `constants` of JSON that are written differently, and for strings:

    - `quote` set: a string is written between two of these, unchanged;
    - `raw`: if the schema allows only text, a string is written unchanged up to `after_value`, and an
      alternative `null` is written the same way. Otherwise it is a JSON string.

    A string that a strict schema restricts further than by type or values is always a JSON string, because
    only that can be bound. `key` matches the names that can be written. A space means the same as in the
    texts of a ToolFormat.
    """

    before_key: str
    after_key: str
    after_value: str
    between: str = ""
    quote: str = ""
    raw: bool = False
    constants: Mapping[str, str] = field(default_factory=dict)
    key: str = r"[^\s<>\"=]+"

    @property
    def texts(self) -> str:
        """All the texts. Special tokens outside of them do not matter."""
        return f"{self.before_key} {self.after_key} {self.after_value} {self.between} {self.quote}"

    def written(self, arguments: Mapping[str, Any] | str) -> str:
        """Arguments as a model writes them; text is written as the only one."""
        pairs = {"arguments": str(arguments)} if isinstance(arguments, str) else arguments
        before, after = self.before_key.removeprefix(" "), self.after_key.replace("> <", "><")
        return self.between.replace(" , ", ", ").join(
            before + key + after + self._spelled(value) + self.after_value for key, value in pairs.items()
        )

    def _spelled(self, value: Any) -> str:
        """A value as a model writes it."""
        if isinstance(value, str) and (self.quote or self.raw):
            return self.quote + value + self.quote
        written = json.dumps(value, ensure_ascii=False)
        return self.constants.get(written, written)

    def element(self, function: Function) -> Element:
        """The element for the arguments of a call. Raises GrammarError for a function that cannot be
        written."""
        parameters = parameters_of(function)
        for one in parameters.listed:
            if not re.fullmatch(self.key, one.name):
                raise GrammarError(
                    f"{function.name}: this model has no way to write a parameter named {one.name!r}.",
                    param=function.param,
                )
        if parameters.others is not None:
            value = Json(parameters.others, function.strict, function.param)
            pair = self._pair(Regex(_ANY_KEY, function.param), Concat((value, self._end())))
            more = Repeat(Concat((Exactly(self.between), pair)) if self.between else pair)
            return Repeat(Concat((pair, more)), 0, 1)
        required = [one.required for one in parameters.listed]
        openers = required.index(True) + 1 if True in required else len(required)
        if self.between and openers * len(required) > _MOST_PAIRS:
            raise GrammarError(
                f"{function.name} has {len(required)} parameters, of which any of {openers} may come first: "
                "too many where a model writes them one by one. Make one of the first required.",
                param=function.param,
                code=TOO_COMPLEX,
            )
        pairs = [self._pair(Verbatim(one.name), self._value(one, function)) for one in parameters.listed]
        return _in_order(pairs, required, self.between)

    def kind(self, function: Function | None, key: str) -> Kind:
        """How the value of an argument is to be read."""
        if not self.raw:
            return "json"
        if function is None or function.custom:
            return "text"
        for one in parameters_of(function).listed:
            if one.name == key:
                return self._kind(one.schema, function.strict)
        return "json"

    def _pair(self, key: Element, value: Element) -> Element:
        return Concat((Exactly(self.before_key), key, Exactly(self.after_key), value))

    def _kind(self, schema: dict[str, Any], strict: bool) -> Kind:
        texts = [self._is_text(branch, strict) for branch in branches(schema)]
        others = [branch for branch, text in zip(branches(schema), texts, strict=True) if not text]
        if not any(texts) or any(not _is_null(branch) for branch in others):
            return "json"
        return "text or null" if others else "text"

    def _is_text(self, schema: dict[str, Any], strict: bool) -> bool:
        """Whether the schema allows only strings that can be written unchanged."""
        values = schema.get("enum")
        if values is not None:
            end = self.quote or self.after_value
            return all(isinstance(value, str) and end not in value for value in values)
        if schema.get("type") != "string":
            return False
        return not strict or schema.keys() & ASSERTIONS == {"type"}

    def _value(self, parameter: ToolParameter, function: Function) -> Element:
        """A value and what comes after it."""
        json = Concat((Json(parameter.schema, function.strict, function.param), self._end()))
        if function.text is not None:
            return self._input(function.text, json)
        if self.raw and self._kind(parameter.schema, function.strict) == "json":
            return json
        values = [self._branch(branch, function) for branch in branches(parameter.schema)]
        if all(isinstance(value, Concat) and isinstance(value.parts[0], Json) for value in values):
            return json
        return values[0] if len(values) == 1 else OneOf(tuple(values))

    def _branch(self, schema: dict[str, Any], function: Function) -> Element:
        values = schema.get("enum")
        if (self.raw or self.quote) and self._is_text(schema, function.strict):
            if values is None:
                return self._string()
            texts = OneOf(tuple(Verbatim(self.quote + value + self.quote) for value in values))
            return Concat((texts, self._end()))
        if values is None and schema.get("type") in ("boolean", "null"):
            values = [True, False] if schema["type"] == "boolean" else [None]
        names = [_CONSTANTS.get(repr(value), "") for value in values or ()]
        if names and all(names) and self.constants:
            spelled = (Verbatim(self.constants.get(name, name)) for name in names)
            return Concat((OneOf(tuple(spelled)), self._end()))
        return Concat((Json(schema, function.strict, function.param), self._end()))

    def _string(self) -> Element:
        if not self.quote:
            return Until(self.after_value)
        return Concat((Verbatim(self.quote), Until(self.quote), self._end()))

    def _input(self, text: Regex | Lark, json: Element) -> Element:
        """The value of a custom tool's only argument."""
        end = self.quote or (self.after_value if self.raw else "")
        if end:
            bound = Regex(text.pattern, text.param, (end,)) if isinstance(text, Regex) else text
            return Concat((Verbatim(self.quote), bound, Verbatim(self.quote), self._end()))
        if isinstance(text, Regex):
            return json
        return Concat((Verbatim('"'), Lark(escaped_lark(text.source, text.param), text.param), Verbatim('"')))

    def _end(self) -> Element:
        return Exactly(self.after_value)


_MOST_PAIRS = 8192
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def _is_null(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "null" or schema.get("enum") == [None]


def _in_order(pairs: list[Element], required: list[bool], between: str) -> Element:
    """The pairs in order, with or without those that are not required."""
    if not between:
        return Concat(
            tuple(one if must else Repeat(one, 0, 1) for one, must in zip(pairs, required, strict=True))
        )
    firsts: list[Element] = []
    for first, pair in enumerate(pairs):
        parts = [pair]
        for one, must in zip(pairs[first + 1 :], required[first + 1 :], strict=True):
            more = Concat((Exactly(between), one))
            parts.append(more if must else Repeat(more, 0, 1))
        firsts.append(Concat(tuple(parts)))
        if required[first]:
            return OneOf(tuple(firsts)) if len(firsts) > 1 else firsts[0]
    return Repeat(OneOf(tuple(firsts)), 0, 1) if firsts else Concat(())


Arguments = JsonArguments | KeyedArguments
