"""Finds what binds the text of an answer: `response_format`, vLLM's `structured_outputs`, and its older
names."""

from dataclasses import dataclass
from typing import Any

import msgspec

from personae.api.settings import ApiSettings
from personae.api.wire.conversation import Tool
from personae.api.wire.schema import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    SamplingFields,
    StructuralTagFormat,
    StructuredOutputs,
)
from personae.errors import GrammarError, RequestError, UnsupportedParameter
from personae.grammar.registry import BACKENDS, BACKENDS_OF_KIND, missing
from personae.grammar.schema.document import PARAMS
from personae.grammar.schema.spelling import foreign
from personae.grammar.spec import GrammarKind, GrammarSpec
from personae.grammar.structure.elements import (
    Element,
    Json,
    OneOf,
    Regex,
    Verbatim,
    compacted,
    decode_structure,
    in_any_order,
    structure_spec,
)
from personae.grammar.structure.syntax import grammar_element, grammar_spec
from personae.grammar.structure.tags import structural_tag

_NAME_LENGTH = 64
_MOST_CHOICES = 1024
_MOST_FOREIGN = 64
_BACKEND = "guided_decoding_backend"
_KINDS: dict[GrammarKind, str] = {
    "json_schema": "schemas",
    "json_object": "schemas",
    "regex": "regular expressions",
    "choice": "choices",
    "lark": "grammars of Lark",
    "ebnf": "grammars of GBNF",
    "structure": "answers of parts, as with tools, reasoning or a structural tag",
}
_OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# These bind nothing. They say how JSON is written that another field, or a tool, requires.
_BLANKS_ALONE = tuple(StructuredOutputs(disable_any_whitespace=value) for value in (True, False))


@dataclass(frozen=True, slots=True)
class Bound:
    """What binds the text of an answer, and the field that requires it."""

    spec: GrammarSpec
    param: str

    @property
    def checked(self) -> GrammarSpec | None:
        """The schema to check the finished answer against. None if the grammar enforces it."""
        return self.spec if self.spec.kind == "json_schema" and not self.spec.strict else None

    def element(self) -> Element:
        """The same as one part of an answer with several. Raises GrammarError if that is not possible."""
        source = self.spec.source
        match self.spec.kind:
            case "json_schema":
                return Json(msgspec.json.decode(source), self.spec.strict, self.param)
            case "json_object":
                return Json({"type": "object"}, True, self.param)
            case "regex":
                return Regex(source, self.param)
            case "choice":
                return OneOf(tuple(map(Verbatim, msgspec.json.decode(source))))
            case "ebnf" | "lark":
                return grammar_element(source, self.param)
            case "structure":
                return decode_structure(source)


def bound_of(body: SamplingFields, *, strict: bool = False) -> Bound | None:
    """What binds the answer's text. None if nothing does. `strict` applies to a schema that does not say.

    Raises RequestError or GrammarError if the field is malformed or two fields bind the answer, and
    UnsupportedParameter for what would have to be ignored.
    """
    asked = {
        name: _one(kind, value, name)
        for name, kind in _OLDER.items()
        if (value := getattr(body, name)) is not None
    }
    if body.structured_outputs is not None and body.structured_outputs not in _BLANKS_ALONE:
        asked["structured_outputs"] = _structured(body.structured_outputs)
    if (formatted := _formatted(body, strict)) is not None:
        asked["response_format"] = formatted
    if not asked:
        return None
    first, *others = asked
    for name in others:  # the same under both names is fine: guidance sends both
        if asked[name].spec != asked[first].spec:
            raise RequestError(
                f"`{name}` and `{first}` cannot be combined: an answer can be bound only once.", param=name
            )
    return asked[first]


def foreign_names(body: SamplingFields) -> list[str]:
    """Names of other tools in the body's schemas that bind nothing, each with its place."""
    schemas: dict[str, Any] = {}
    if isinstance(body.response_format, JsonSchemaFormat):
        schemas["response_format.json_schema.schema"] = body.response_format.json_schema.schema
    for index, tool in enumerate(getattr(body, "tools", None) or ()):
        if isinstance(tool, Tool):
            schemas[f"tools[{index}].function.parameters"] = tool.function.parameters
    found = [f"{field}{name}" for field, schema in schemas.items() for name in foreign(schema)]
    return found[:_MOST_FOREIGN]


def as_asked(spec: GrammarSpec | None, body: SamplingFields, settings: ApiSettings) -> GrammarSpec | None:
    """Apply the request's options to the spec of a whole answer: a backend that it names, JSON without
    blanks and properties in any order (as the request or the server says).

    Raises UnsupportedParameter if the backend does not exist, is not installed, or does not support what
    binds the answer.
    """
    asked = None if body.structured_outputs is None else body.structured_outputs.disable_any_whitespace
    if asked and spec is None:
        param = "structured_outputs.disable_any_whitespace"
        raise UnsupportedParameter(f"`{param}`: nothing binds the answer; leave it out.", param=param)
    if spec is not None and (settings.disable_any_whitespace if asked is None else asked):
        spec = compacted(spec)
    if body.property_order == "any" and spec is None:
        raise UnsupportedParameter(
            "`property_order`: nothing binds the answer; leave it out.", param="property_order"
        )
    if spec is not None and (body.property_order or settings.property_order) == "any":
        spec = in_any_order(spec)
    if spec is not None and (package := missing(BACKENDS_OF_KIND[spec.kind][-1])) is not None:
        raise UnsupportedParameter(
            f"`{PARAMS[spec.kind]}`: {_KINDS[spec.kind]} need the package {package}, which is not installed "
            f"here (pip install {package}). Lark needs no package.",
            param=PARAMS[spec.kind],
        )
    name = body.guided_decoding_backend
    if name in (None, "auto"):
        return spec
    if name not in BACKENDS:
        names = ", ".join(("auto", *BACKENDS))
        raise UnsupportedParameter(
            f"`{_BACKEND}`: there is no such backend; there are {names}.", param=_BACKEND
        )
    if spec is None:
        raise UnsupportedParameter(f"`{_BACKEND}`: nothing binds the answer; leave it out.", param=_BACKEND)
    taking = BACKENDS_OF_KIND[spec.kind]
    if BACKENDS[name] not in taking:
        others = " or ".join(other for other, backend in BACKENDS.items() if backend in taking)
        raise UnsupportedParameter(
            f"`{_BACKEND}`: {name} does not support {_KINDS[spec.kind]}; {others} does.", param=_BACKEND
        )
    return msgspec.structs.replace(spec, backend=BACKENDS[name])


def _formatted(body: SamplingFields, strict: bool) -> Bound | None:
    format, param = body.response_format, "response_format.json_schema.schema"
    if isinstance(format, JsonObjectFormat):
        if format.schema is None:
            return Bound(GrammarSpec("json_object"), "response_format")
        format, param = JsonSchemaFormat(JsonSchema(format.schema)), "response_format.schema"
    if isinstance(format, StructuralTagFormat):
        return _one("structural_tag", _tag_of(format), "response_format")
    if not isinstance(format, JsonSchemaFormat):
        return None
    asked = format.json_schema
    if asked.name is not None and not 0 < len(asked.name) <= _NAME_LENGTH:
        name = "response_format.json_schema.name"
        raise RequestError(f"`{name}` must have 1 to {_NAME_LENGTH} characters.", param=name)
    strict = strict if asked.strict is None else asked.strict
    return _schema(asked.schema, param, strict=strict)


def _structured(asked: StructuredOutputs) -> Bound:
    for name, harmless in asked.unserved.items():
        value = getattr(asked, name)
        if value is not None and value is not harmless:
            param = f"structured_outputs.{name}"
            raise UnsupportedParameter(f"`{param}` is not served here.", param=param)
    given = {name: value for name in asked.kinds if (value := getattr(asked, name)) not in (None, False)}
    if len(given) != 1:
        kinds = f"not {' and '.join(given)} at once" if given else f"of {', '.join(asked.kinds)}"
        raise RequestError(f"`structured_outputs` needs one, {kinds}.", param="structured_outputs")
    [(kind, value)] = given.items()
    return _one(kind, value, f"structured_outputs.{kind}")


def _one(kind: str, value: Any, param: str) -> Bound:
    match kind:
        case "json":
            return _schema(_document(value, param), param, strict=True)
        case "json_object":
            return Bound(GrammarSpec("json_object"), param)
        case "regex":
            return Bound(GrammarSpec("regex", value), param)
        case "choice":
            if not 0 < len(value) <= _MOST_CHOICES:
                raise RequestError(f"`{param}` must have 1 to {_MOST_CHOICES} texts.", param=param)
            if "" in value:
                raise RequestError(f"`{param}` may not have an empty text.", param=param)
            return Bound(GrammarSpec("choice", msgspec.json.encode(value).decode()), param)
        case "grammar":
            return Bound(grammar_spec(value), param)
    return Bound(structure_spec(structural_tag(value, param)), param)


def _schema(schema: dict[str, Any] | bool, param: str, *, strict: bool) -> Bound:
    if schema is False:
        raise GrammarError("The schema `false` allows no answer.", param=param)
    source = msgspec.json.encode({} if schema is True else schema).decode()
    return Bound(GrammarSpec("json_schema", source, strict=strict), param)


def _document(value: Any, param: str) -> dict[str, Any] | bool:
    """A schema, which vLLM also accepts as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"`{param}` is not valid JSON: {error}.", param=param) from None
    if not isinstance(value, dict | bool):
        raise GrammarError(f"`{param}`: a JSON Schema is an object, true or false.", param=param)
    return value


def _tag_of(format: StructuralTagFormat) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(format)
    return {name: value for name, value in fields.items() if value is not None}
