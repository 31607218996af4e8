"""From bytes to request structs. Every refusal names the field in OpenAI's dotted form.

msgspec checks types and names while it parses. Its message about a failure ("… - at `$.messages[0].role`")
becomes the `param` of the error here, and nowhere else.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from personae.api.options import UnknownFields
from personae.api.wire.compat_names import field_here
from personae.api.wire.foreign import FOREIGN, allowed, neutral
from personae.api.wire.json_scan import check_keys, check_long_json
from personae.api.wire.schema import Body, ChatRequest, Sampling
from personae.api.wire.tolerant import MOST_NAMED, drop_unknown_below
from personae.errors import RequestError, UnsupportedParameter, as_json
from personae.grammar.fuzzy_match import nearest

T = TypeVar("T", bound=Body)

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_NO_INTEGER = re.compile(r"^Expected `[^`]*\bint\b[^`]*`, got `float`")
_INVALID = re.compile(r"^Invalid (?:enum )?value (?P<value>.*)$", re.DOTALL)
_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<units>\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    rb"|\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""An escaped surrogate pair, or half of one."""
_MENDABLE = (_UNKNOWN, _NO_INTEGER)
"""Messages about bodies that may still be accepted after a closer look."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_STEP = re.compile(r"\[\d*\]|[^.\[\]]+")
_SHOWN = 100
"""The number of characters of a client's name that an error repeats."""
LONG = 2**14
"""Bytes; a longer body is decoded and prepared off the event loop."""
_LEAVES = frozenset({str, int, float, bool, type(None)})


def decode(
    body: bytes,
    type: type[T],
    max_depth: int,
    *,
    unknown: UnknownFields = "refuse",
    ignored: list[str] | None = None,
) -> T:
    """Parse and check `body`. The names of ignored fields are added to `ignored`.

    Raises RequestError, UnsupportedParameter for a field that `type` lacks (unless `unknown` ones are
    ignored), and PayloadTooLarge for too many values.
    """
    told = [] if ignored is None else ignored
    body = body.removeprefix(codecs.BOM_UTF8)  # some shells and editors begin a file with it
    if not body:
        raise RequestError("The body is empty; it must be a JSON object.", code="invalid_json")
    long = len(body) > LONG
    if long:
        check_long_json(body)
    try:
        value = _read(body, type, unknown, told)
    except msgspec.ValidationError as error:
        raise named_error(error, type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"The body is not valid JSON: {why_not_json(body, error)}.", code="invalid_json"
        ) from None
    except RecursionError:
        raise RequestError("The body's JSON is nested too deeply.", code="invalid_json") from None
    if not long:
        check_keys(body)
    told += [name for name, unheeded in type.unheeded.items() if getattr(value, name) == unheeded]
    for name in type.free_form:
        if _deeper(getattr(value, name), max_depth):
            raise RequestError(f"`{name}` is nested deeper than {max_depth} levels.", param=name)
    return value


def why_not_json(body: bytes, error: Exception) -> str:
    """Why `body` cannot be read, where msgspec says `error`."""
    try:
        body.decode()
    except UnicodeDecodeError as found:
        return f"it must be in UTF-8, and byte {found.start} is not"
    for escape in _SURROGATE.finditer(body):
        if len(escape["units"]) == 6:
            at = escape.start("units")
            return f"{escape['units'].decode()} (byte {at}) is half of a surrogate pair, and no character"
    return str(error)


def _read(body: bytes, type: type[T], unknown: UnknownFields, ignored: list[str]) -> T:
    """Parse `body`. 5.0 counts as an integer, as in JSON Schema. Raises what msgspec raises.

    Nearly all bodies match their type at once; only the others are examined.
    """
    try:
        return type.read(body, ignored)
    except msgspec.ValidationError as error:
        if not any(pattern.match(str(error)) for pattern in _MENDABLE):
            raise
    ignored.clear()
    value = type.prepared(msgspec.json.decode(body), ignored)
    if isinstance(value, dict):
        ignored += _drop_unknown(value, type, unknown)
    try:
        return type.of(value)
    except msgspec.ValidationError as error:
        if not _NO_INTEGER.match(str(error)):
            raise
    [value] = _with_integers([value], _described(type))
    return type.of(value)


def _drop_unknown(value: dict[str, Any], type: type[Body], unknown: UnknownFields) -> list[str]:
    """Drop, in place, what may be ignored. Returns the names. Raises UnsupportedParameter for a field of
    another server with a value that is not neutral."""
    ignored: list[str] = []
    for name in value.keys() - _names(type):
        if issubclass(type, Sampling) and neutral(name, value[name]):
            del value[name]
        elif unknown == "ignore":
            del value[name]
            if len(ignored) < MOST_NAMED:
                ignored.append(name)
        elif issubclass(type, Sampling) and name in FOREIGN and field_here(name, _fields(type, "")) is None:
            values = allowed(FOREIGN[name])
            raise UnsupportedParameter(f"`{name}` is not served here; it may only be {values}.", param=name)
    return sorted(ignored) + drop_unknown_below(value, type)


@cache
def _names(type: type[Body]) -> frozenset[str]:
    """The fields of a body."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(type))


def _with_integers(values: Iterable[Any], types: Sequence[inspect.Type]) -> list[Any]:
    """`values`, each to be of one of `types`, with integers for floats where only integers are accepted."""
    kinds = {one.__class__ for one in types}
    whole = inspect.IntType in kinds and inspect.FloatType not in kinds
    return [
        int(value) if whole and isinstance(value, float) and value.is_integer() else _inner(value, types)
        for value in values
    ]


def _inner(value: Any, types: Sequence[inspect.Type]) -> Any:
    """`_with_integers` for what is in a list or an object."""
    if isinstance(value, list) and (items := _within(types, "[]")):
        return _with_integers(value, items)
    if isinstance(value, dict):
        structs = (one for one in types if isinstance(one, inspect.StructType))
        names = {field.encode_name for struct in structs for field in struct.fields} & value.keys()
        return value | {name: _with_integers([value[name]], _within(types, name))[0] for name in names}
    return value


_BOUND = re.compile(r"Expected `(?:int|float)` (?P<side>[<>]=?) (?P<bound>\S+)$")
_BOUNDS = {">=": "at least", "<=": "at most", ">": "over", "<": "below"}
_BOUND_TEXT = re.compile(r"Expected `\w+` (?:of length|matching)")
_TOOL_TYPE = re.compile(r"tools\[\d+\]\.type")
_TOOL = ' A tool is {"type": "function", "function": {"name": …, "parameters": …}} here.'


def named_error(error: msgspec.ValidationError, type: type[msgspec.Struct]) -> RequestError:
    """msgspec's error about a `type`, with the field that it is about."""
    message, path = str(error), ""
    if at := _AT.search(message):
        message, path = message[: at.start()], at["path"].replace("[...]", "")
    if unknown := _UNKNOWN.match(message):
        name = _join(path, unknown["name"][:_SHOWN])
        hint = _hint(type, path, unknown["name"][:_SHOWN])
        return UnsupportedParameter(
            f"`{name}` is not a parameter of this request.{hint}", param=name, code="unknown_parameter"
        )
    if path == "logit_bias" and message.startswith("Expected `int`"):
        message = 'its keys are token ids, such as "1729"; one is not'
    if missing := _MISSING.match(message):
        name = _join(path, missing["name"])
        hint = _TOOL if issubclass(type, ChatRequest) and _TOOL_TYPE.fullmatch(name) else ""
        return RequestError(f"`{name}` is required.{hint}", param=name, code="missing_required_parameter")
    if bound := _BOUND.match(message):
        wanted = f"{_BOUNDS[bound['side']]} {bound['bound'].removesuffix('.0')}"
        return RequestError(f"`{path}` must be {wanted}.", param=path, code="out_of_range")
    code = "invalid_value" if _BOUND_TEXT.match(message) else "invalid_type"
    if invalid := _INVALID.match(message):
        message = f"Invalid value {_as_sent(invalid['value'])}"
        if valid := _valid(type, path):
            message, code = f"{message}; valid are {', '.join(sorted(valid))}", "invalid_value"
    else:
        message = message.replace("`NoneType`", "`null`")[: 2 * _SHOWN]
    return RequestError(f"`{path or 'body'}`: {message}.", param=path or None, code=code)


def _hint(type: type[msgspec.Struct], path: str, name: str) -> str:
    """A suggestion for a field at `path` that `type` lacks."""
    whole = _join(path, name)
    if whole == "extra_body":
        return " It is an argument of the `openai` package, whose fields go into the body itself."
    if (here := field_here(whole, _fields(type, ""))) is not None:
        return f" Here it is `{here}`."
    if issubclass(type, Sampling) and whole in _fields(ChatRequest, ""):
        return " It is one of /v1/chat/completions."
    meant = nearest(name, _fields(type, path))
    return "" if meant is None else f" Did you mean `{_join(path, meant)}`?"


def _valid(type: type[msgspec.Struct], path: str) -> set[str]:
    """The values that the field at `path` accepts, as an error lists them: texts without quotes."""
    literals = (one for one in _at(type, path) if isinstance(one, inspect.LiteralType))
    values = (value for literal in literals for value in literal.values)
    return {value if isinstance(value, str) else as_json(value) for value in values}


def _as_sent(shown: str) -> str:
    """A value in JSON that msgspec shows as Python writes it."""
    if shown[:1] in ("'", '"'):
        text = shown[1:-1][:_SHOWN]
        return '"' + text.replace("\\'", "'").replace('"', '\\"') + '"'
    return _PYTHON.get(shown, shown[:_SHOWN])


def _fields(type: type[msgspec.Struct], path: str) -> set[str]:
    """The names of supported fields at `path`."""
    structs = (one for one in _at(type, path) if isinstance(one, inspect.StructType))
    return {
        field.encode_name
        for struct in structs
        for field in struct.fields
        if field.encode_name not in getattr(struct.cls, "unserved", ())
    }


def _at(type: type[msgspec.Struct], path: str) -> Sequence[inspect.Type]:
    """The types that are accepted at `path`."""
    found = _described(type)
    for step in _STEP.findall(path):
        found = _within(found, step)
    return found


@cache
def _described(type: type[msgspec.Struct]) -> Sequence[inspect.Type]:
    """The description of a body of `type`; takes a millisecond the first time."""
    return _members(inspect.type_info(type))


def _within(types: Iterable[inspect.Type], step: str) -> Sequence[inspect.Type]:
    """The types one step of a path further within one of `types`."""
    return [member for one in types for inner in _inside(one, step) for member in _members(inner)]


def _members(type: inspect.Type) -> tuple[inspect.Type, ...]:
    return type.types if isinstance(type, inspect.UnionType) else (type,)


def _inside(type: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The type one step of a path further within a type."""
    if isinstance(type, inspect.ListType) and step.startswith("["):
        yield type.item_type
    elif isinstance(type, inspect.StructType) and type.tag_field == step:
        yield inspect.LiteralType((type.tag,))
    elif isinstance(type, inspect.StructType):
        yield from (field.type for field in type.fields if field.encode_name == step)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _deeper(value: Any, depth: int) -> bool:
    """Whether `value` nests dicts, lists or structs deeper than `depth`; by levels, not by recursion."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            child
            for parent in level
            for child in _children(parent)
            if type(child) not in _LEAVES  # a schema may have a hundred thousand of these
        ]
        if not level:
            return False
    return any(True for parent in level for _ in _children(parent))


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, msgspec.Struct):
        return (getattr(value, name) for name in value.__struct_fields__)
    return ()
