"""A leaderboard's function as a tool of OpenAI's API, described to the model as the leaderboard describes
it."""

import copy
import json
from typing import Any

from personae.evals.suites.bfcl.compare import api_name

Json = Any

TYPES = {
    "float": "number",
    "number": "number",
    "double": "number",
    "integer": "integer",
    "byte": "integer",
    "short": "integer",
    "long": "integer",
    "Bigint": "integer",
    "boolean": "boolean",
    "bool": "boolean",
    "array": "array",
    "list": "array",
    "tuple": "array",
    "ArrayList": "array",
    "Array": "array",
    "Queue": "array",
    "Stack": "array",
    "dict": "object",
    "object": "object",
    "HashMap": "object",
    "Hashtable": "object",
}
"""The leaderboard's names of types. Every other name is a string."""

_SYNTAX = {"java": "Java 8 SDK", "javascript": "JavaScript", "python": "Python 3"}


def tool(function: dict[str, Json], category: str, *, strict: bool) -> dict[str, Json]:
    """The tool of a function. Java and JavaScript values are requested as text. `strict` closes objects, as
    OpenAI's strict mode requires."""
    language = "javascript" if "javascript" in category else "java" if "java" in category else "python"
    parameters = copy.deepcopy(function["parameters"])
    if language != "python":
        for schema in parameters["properties"].values():
            _as_text(schema, "Java" if language == "java" else "JavaScript")
    made: dict[str, Json] = {
        "name": api_name(function["name"]),
        "description": f"{function['description']} Note that the provided function is in "
        f"{_SYNTAX[language]} syntax.",
        "parameters": _json_schema({**parameters, "type": "object"}),
    }
    if strict:
        made |= {"parameters": closed(made["parameters"]), "strict": True}
    return {"type": "function", "function": made}


def closed(schema: dict[str, Json]) -> dict[str, Json]:
    """The schema with objects that allow only the listed properties."""
    made = dict(schema)
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: closed(value) for name, value in made["properties"].items()}
        made["additionalProperties"] = False
    if isinstance(made.get("items"), dict):
        made["items"] = closed(made["items"])
    return made


def _as_text(schema: dict[str, Json], language: str) -> None:
    kind, said = schema["type"], schema.get("description", "")
    if kind == "any":
        said += f" This parameter can be of any type of {language} object in string representation."
    else:
        said += f" This is {language} {kind} type parameter in string representation."
    if kind in ("ArrayList", "Array", "array"):
        items = schema.pop("items")["type"]
        said += f" The list elements are of type {items}; they are not in string representation."
    if kind == "dict" and "properties" in schema:
        entries = json.dumps(schema.pop("properties"))
        said += (
            " The dictionary entries have the following schema; they are not in string representation. "
            + entries
        )
    schema |= {"type": "string", "description": said}


def _json_schema(schema: dict[str, Json]) -> dict[str, Json]:
    made = {**schema, "type": TYPES.get(schema.get("type", "string"), "string")}
    if schema.get("type") == "float":
        made["description"] = f"{schema.get('description', '')} This is a float type value."
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: _json_schema(entry) for name, entry in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        made["items"] = _json_schema(schema["items"])
    if not isinstance(schema.get("required", []), list):
        del made["required"]  # some entries have a flag where JSON Schema has a list of names
    return made
