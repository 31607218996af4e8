"""Judges calls like the leaderboard's AST comparison (ShishirPatil/gorilla, BFCL v4).

A call is {name: arguments}. An answer is {name: {parameter: accepted values}}; "" among the values means that
the parameter may be omitted. Each function returns None if the call is right, or the reason why it is wrong.
It is as lenient and as odd as the leaderboard: tests compare its verdicts with ours.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from personae.errors import RequestError
from personae.evals.suites.bfcl.literals import JAVA, JAVASCRIPT, read_java, read_javascript

Call = Mapping[str, Any]
Answer = Mapping[str, Mapping[str, Sequence[Any]]]
Function = Mapping[str, Any]

PYTHON = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
_IGNORED = re.compile(r"[ ,./\-_*^]")


class Typed(NamedTuple):
    """A value in the language's type, and the types that it and its elements should have."""

    value: Any
    outer: type
    inner: type | None


def compare(
    category: str, functions: Sequence[Function], calls: Sequence[Call], answers: Sequence[Answer]
) -> str | None:
    """Why the calls are wrong, for an entry of a category such as `parallel_multiple` or `simple_java`."""
    if "parallel" in category:
        return _in_any_order(category, functions, calls, answers)
    if len(calls) != len(answers) or (len(calls) != 1 and "multiple" not in category):
        return f"{len(calls)} calls where there should be {len(answers)}"
    if "multiple" in category:
        return _one(category, _named(functions, answers[0]), calls[0], answers[0])
    return _one(category, functions[0], calls[0], answers[0])


def api_name(name: str) -> str:
    """A function's name in the form that OpenAI's API allows."""
    return name.replace(".", "_")


def _in_any_order(
    category: str, functions: Sequence[Function], calls: Sequence[Call], answers: Sequence[Answer]
) -> str | None:
    """Each answer takes the first remaining call that fits."""
    if len(calls) != len(answers):
        return f"{len(calls)} calls where there should be {len(answers)}"
    left = list(calls)
    for answer in answers:
        function = _named(functions, answer)
        reasons = [_one(category, function, call, answer) for call in left]
        if None not in reasons:
            return "; ".join(dict.fromkeys(reason for reason in reasons if reason))
        del left[reasons.index(None)]
    return None


def _named(functions: Sequence[Function], answer: Answer) -> Function:
    name = next(iter(answer))
    for function in functions:
        if function["name"] == name:
            return function
    raise RequestError(f"The answer calls {name!r}, which is not among the entry's functions.")


def _one(category: str, function: Function, call: Call, answer: Answer) -> str | None:
    """Compares one call with one answer."""
    accepted = next(iter(answer.values()))
    name = api_name(function["name"])
    if name not in call:
        return f"{name} is not called"
    given, parameters = call[name], function["parameters"]
    for parameter in parameters.get("required", ()):
        if parameter not in given:
            return f"{parameter} is required"
    for parameter, value in given.items():
        if parameter not in parameters["properties"] or parameter not in accepted:
            return f"{parameter} is unexpected"
        schema = parameters["properties"][parameter]
        if reason := _argument(category, schema, value, accepted[parameter]):
            return f"{parameter}: {reason}"
    for parameter, values in accepted.items():
        if parameter not in given and "" not in values:
            return f"{parameter} is missing"
    return None


def _argument(category: str, schema: Mapping[str, Any], value: Any, accepted: Sequence[Any]) -> str | None:
    try:
        typed = _typed(category, schema, value)
    except _WrongType as wrong:
        return str(wrong)
    fits, stands_for_something = _fits(typed, accepted)
    if not fits:
        return f"{typed.value!r} is no {schema['type']}"
    if stands_for_something:
        right = typed.value in accepted
    elif typed.outer is dict:
        right = _record(typed.value, accepted)
    elif typed.outer is list and typed.inner is dict:
        right = _records(typed.value, accepted)
    elif typed.outer is str:
        right = _plain(typed.value) in [_plain(entry) for entry in accepted if isinstance(entry, str)]
    elif typed.outer is list:
        right = _each_plain(typed.value) in [_each_plain(entry) for entry in accepted]
    else:
        right = typed.value in accepted
    return None if right else f"{typed.value!r} is none of {accepted}"


class _WrongType(Exception):
    """The text of a Java or JavaScript argument is not even text."""


def _typed(category: str, schema: Mapping[str, Any], value: Any) -> Typed:
    kind = schema["type"]
    if "java" in category:  # javascript too
        engine_spec = "javascript" in category
        types: Mapping[str, type] = JAVASCRIPT if engine_spec else JAVA
        read: Callable[..., Any] = read_javascript if engine_spec else read_java
        if not isinstance(value, str):
            raise _WrongType(f"{value!r} is not written as text")
        items = schema["items"]["type"] if kind in ("Array", "ArrayList", "array") else None
        return Typed(read(value, kind, items), types[kind], types[items] if items else None)
    inner = PYTHON[schema["items"]["type"]] if kind in ("array", "tuple") else None
    if kind == "float" and type(value) is int:
        value = float(value)
    return Typed(value, PYTHON[kind], inner)


def _fits(typed: Typed, accepted: Any) -> tuple[bool, bool]:
    """Whether the type is right, and whether the value may be a variable of that type.

    It may be if the accepted values have another type than the function declares.
    """
    known = next((type(entry) for entry in accepted if entry != ""), None)
    elements: Any = typed.value
    if type(typed.value) is not typed.outer:
        return known is not None and type(typed.value) is known, True
    variable = known is not None and known is not typed.outer
    if typed.inner is None:
        return True, variable
    inner = typed.inner
    for entry in accepted:
        if not isinstance(entry, list) or all(_fits(Typed(v, inner, None), entry)[0] for v in elements):
            return True, variable
    return False, False


def _record(value: Mapping[str, Any], accepted: Sequence[Any]) -> bool:
    """An object: every key is expected, every value is accepted for its key, and no key is missing."""
    for entry in accepted:
        if entry == "":
            continue
        known = all(
            key in entry and _plain(given) in [_plain(one) for one in entry[key]]
            for key, given in value.items()
        )
        if known and all(key in value or "" in values for key, values in entry.items()):
            return True
    return False


def _records(value: Sequence[Any], accepted: Sequence[Any]) -> bool:
    """A list of objects, in the accepted order."""
    return any(
        len(value) == len(entry)
        and all(
            isinstance(one, Mapping) and _record(one, [wanted])
            for one, wanted in zip(value, entry, strict=True)
        )
        for entry in accepted
    )


def _plain(value: Any) -> Any:
    """Text without case, blanks and some punctuation; other values unchanged."""
    if not isinstance(value, str):
        return value
    return _IGNORED.sub("", value).lower().replace("'", '"')


def _each_plain(value: Sequence[Any]) -> list[Any]:
    return [_plain(entry) for entry in value]
