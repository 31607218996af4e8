"""Tools for chat templates that cannot show them: described in the system message, calls and results as text.

A tool's parameters are written as TypeScript would declare them, which is shorter than their JSON Schema:

    get_weather: The weather of a city.
    {
    "city": string, // The city's name.
    "unit"?: "c" | "f", // Default: "c".
    }

What TypeScript has no words for stands as JSON in the comment.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from personae.grammar.tools.arguments import JsonArguments
from personae.grammar.tools.format import ToolFormat

RESULT = "<tool_response>"
"""Opens a tool's result in a message of the user."""

_SAID = frozenset(
    {"type", "description", "enum", "const", "properties", "required", "items", "anyOf", "default"}
)
"""Keywords that the declaration or the comment expresses in its own words."""
_SILENT = frozenset({"title", "examples", "additionalProperties", "strict", "optional"})
_DEEPEST = 8


def describe(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """The system message's description of the tools, and of the calls in the model's `format`."""
    return "\n\n".join([_introduction(format), *(_tool(tool["function"]) for tool in tools)])


def call_text(calls: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """Calls, each with its name and its arguments, as the model writes them."""
    return format.written([(call["name"], call["arguments"]) for call in calls])


def result_text(result: str) -> str:
    """A tool's result, for a message of the user."""
    return f"{RESULT}{result}</tool_response>"


def _introduction(format: ToolFormat) -> str:
    """How to call a tool. An object's arguments are left open; others are shown one by one."""
    example = format.written(
        [("...", "{...}" if isinstance(format.arguments, JsonArguments) else {"...": "..."})]
    )
    more = "" if format.single else "\nand once more for each further call"
    return (
        f"You can call tools. To call one, answer only with\n{example}{more}. "
        "Call nothing if no tool fits or a required value is missing."
    )


def _tool(function: Mapping[str, Any]) -> str:
    name, said = function["name"], _line(function.get("description"))
    parameters = function.get("parameters") or {}
    head = f"{name}: {said}" if said else str(name)
    if parameters.keys() & {"properties"} and isinstance(parameters["properties"], Mapping):
        rest = {key: value for key, value in parameters.items() if key not in _SAID | _SILENT}
        fields = _fields(parameters, 0, "\n")
        return f"{head}\n{{{fields}}}" + (f" // {_json(rest)}" if rest else "")
    return f"{head}\n" + (_json(parameters) if parameters.keys() - _SILENT - {"type"} else "{}")


def _fields(schema: Mapping[str, Any], depth: int, end: str) -> str:
    """An object's properties, inside its braces."""
    required = schema.get("required")
    must = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    written = end
    for key, value in schema["properties"].items():
        value = value if isinstance(value, Mapping) else {}
        mark = "" if key in must else "?"
        comment = _comment(value)
        kind = _type(value, depth + 1)
        if end == "\n":
            written += f"{_json(key)}{mark}: {kind},{' // ' + comment if comment else ''}\n"
        else:
            written += f"{_json(key)}{mark}: {kind}{' /* ' + comment + ' */' if comment else ''}, "
    return written if end == "\n" else written.removesuffix(", ")


def _type(schema: Mapping[str, Any], depth: int) -> str:
    """The type of a value; JSON Schema if TypeScript has no type for it."""
    if "const" in schema:
        return _json(schema["const"])
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return " | ".join(map(_json, schema["enum"]))
    branches = schema.get("anyOf")
    if isinstance(branches, list) and branches and all(isinstance(one, Mapping) for one in branches):
        return " | ".join(_type(one, depth + 1) for one in branches)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_type({**schema, "type": one}, depth + 1) for one in kind) or "any"
    if depth > _DEEPEST or not isinstance(kind, str):
        return _json(dict(schema)) if schema.keys() - _SILENT - {"description", "default"} else "any"
    if kind == "array":
        items = schema.get("items")
        inner = _type(items, depth + 1) if isinstance(items, Mapping) else "any"
        return f"({inner})[]" if " " in inner and not inner.startswith("{") else f"{inner}[]"
    if kind == "object":
        if isinstance(schema.get("properties"), Mapping) and schema["properties"]:
            return "{" + _fields(schema, depth, "") + "}"
        return "object"
    return kind


def _comment(schema: Mapping[str, Any]) -> str:
    """What else there is to say about a value."""
    said = [_line(schema["description"])] if schema.get("description") else []
    if "default" in schema:
        said.append(f"Default: {_json(schema['default'])}.")
    rest = {key: value for key, value in schema.items() if key not in _SAID | _SILENT}
    items = schema.get("items")
    if isinstance(items, Mapping) and (inner := _comment(items)):
        said.append(f"Each: {inner}")
    if rest and isinstance(schema.get("type"), str):
        said.append(_json(rest))
    return " ".join(said)


def _line(text: Any) -> str:
    return " ".join(str(text or "").split())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
