"""`/openapi.json`: the API in a form for programs, generated from the wire types and the table of operations.

OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1), whose schemas are JSON Schema as msgspec writes it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

import personae
from personae.api.http.operation import Content, Operation
from personae.api.wire.errors import ErrorAnswer
from personae.api.wire.foreign import ANY, FOREIGN
from personae.api.wire.schema import Body, Sampling
from personae.api.wire.tolerant import Tolerant

_JSON = "application/json"
_REFS = "#/components/schemas/{name}"
_PLACE = re.compile(r"\{(\w+)(:\w+)?\}")
_RETRY = {429, 503}
_MEANINGS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    403: "The key may not do this.",
    404: "No such thing; another tenant's is the same as none.",
    408: "The request did not arrive in time.",
    409: "The name is taken.",
    413: "The body, or a list in it, is over its limit.",
    424: "A server that the request names does not answer as it should.",
    429: "This tenant's limit is reached.",
    431: "The headers are over their limit.",
    500: "The request was accepted and could not be finished.",
    503: "The server is full, starting or stopping.",
    504: "The request's deadline passed.",
}


def document(operations: Sequence[Operation], root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document of these operations, which are served under `root_path`."""
    types = [ErrorAnswer, *(each for one in operations for each in _types(one))]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFS)
    _describe_leniency(components)
    _describe_neutral(components, operations)
    schema_of = {repr(type): schema for type, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path = _PLACE.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Personae",
            "version": personae.__version__,
            "description": "OpenAI's and Anthropic's API for many LoRA adapters of one base model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "schemas": components,
            "responses": {str(status): _error(status, schema_of) for status in _MEANINGS},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key; not asked for as long as none was made.",
                }
            },
        },
    }


def _describe_leniency(components: dict[str, Any]) -> None:
    """State where unknown keys are ignored instead of refused."""
    for struct in _below(Tolerant):
        components.get(struct.__name__, {}).pop("additionalProperties", None)


def _below(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in struct.__subclasses__():
        yield each
        yield from _below(each)


def _describe_neutral(components: dict[str, Any], operations: Iterable[Operation]) -> None:
    """Add the accepted values of fields that may only be neutral, and the neutral fields of other servers."""
    for body in {one.body for one in operations if isinstance(one.body, type) and issubclass(one.body, Body)}:
        fields = components[body.__name__]["properties"]
        if issubclass(body, Sampling):
            for name, accepted in FOREIGN.items():
                values = {} if accepted is ANY else {"enum": [None, *accepted]}
                fields.setdefault(name, values | {"description": _NEUTRAL})
        for name, accepted in body.unserved.items():
            fields[name] = {"enum": [None, *accepted]}


def _types(one: Operation) -> Iterator[Any]:
    """Every type that the operation's description refers to."""
    for content in _contents(one):
        yield content.type
    if one.error is not None:
        yield one.error.type
    if one.query is not None:
        for field in msgspec.structs.fields(one.query):
            yield field.type
    for header in one.headers:
        yield header.type


def _contents(one: Operation) -> Iterator[Content]:
    if one.body is not None:
        yield from _contents_of(one.body)
    for answer in one.answers.values():
        yield from _contents_of(answer)


def _contents_of(answer: Any) -> Iterable[Content]:
    several = answer if isinstance(answer, tuple) else (answer,)
    return [each if isinstance(each, Content) else Content(_JSON, each) for each in several]


def _operation(one: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    summary, _, rest = one.description.partition("\n")
    described: dict[str, Any] = {
        "operationId": one.endpoint.__name__,
        "summary": summary,
        "tags": [_tag(one)],
        "responses": {
            **{str(status): _answer(status, answer, schema_of) for status, answer in one.answers.items()},
            **{str(status): _refusal(one, status, schema_of) for status in one.errors},
        },
    }
    if rest.strip():
        described["description"] = " ".join(rest.split())
    if one.open:
        described["security"] = []
    if one.admin:
        described["description"] = (described.get("description", "") + " Needs an admin's key.").strip()
    if parameters := list(_parameters(one, schema_of)):
        described["parameters"] = parameters
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": _content(one.body, schema_of)}
    return described


def _tag(one: Operation) -> str:
    """The object that the path names, such as `adapters` for `/v1/adapters/{name}` and for vLLM's
    `/v1/load_lora_adapter`."""
    if not one.path.startswith("/v1/"):
        return "server"
    kind = one.path.split("/")[2]
    return "adapters" if kind.endswith("_lora_adapter") else kind


def _parameters(one: Operation, schema_of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, _ in _PLACE.findall(one.path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    if one.query is not None:
        for field in msgspec.structs.fields(one.query):
            yield {
                "name": field.encode_name,
                "in": "query",
                "required": field.required,
                "schema": schema_of[repr(field.type)],
            }
    for header in one.headers:
        yield {
            "name": header.name,
            "in": "header",
            "required": False,
            "schema": schema_of[repr(header.type)],
            "description": header.description,
        }


def _content(answer: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for content in _contents_of(answer):
        schema = schema_of[repr(content.type)]
        if content.media_type == "text/event-stream":
            # OpenAPI 3.1 cannot describe streams; readers of such a body take the schema as that of each
            # event.
            data = {"type": "string", "contentMediaType": _JSON, "contentSchema": schema}
            schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        found[content.media_type] = {"schema": schema}
    return found


def _answer(status: int, answer: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _REQUEST_ID | _IGNORED | _CLAMPED | _MOVED | _ADAPTER,
        "content": _content(answer, schema_of),
    }


def _refusal(one: Operation, status: int, schema_of: dict[str, Any]) -> dict[str, Any]:
    if one.error is None:
        return {"$ref": f"#/components/responses/{status}"}
    return _error(status, schema_of, one.error.type)


def _error(status: int, schema_of: dict[str, Any], type: Any = ErrorAnswer) -> dict[str, Any]:
    headers = _REQUEST_ID | (_RETRY_AFTER if status in _RETRY else {})
    content = {_JSON: {"schema": schema_of[repr(type)]}}
    return {"description": _MEANINGS[status], "headers": headers, "content": content}


_REQUEST_ID = {
    "x-request-id": {"schema": {"type": "string"}, "description": "The request's id, as in the server's log."}
}
_IGNORED = {
    "x-personae-ignored": {
        "schema": {"type": "string"},
        "description": "The fields of the request that were ignored, with commas between them.",
    }
}
_CLAMPED = {
    "x-personae-max-tokens": {
        "schema": {"type": "integer"},
        "description": "The most tokens of the answer, if the request asked for more than fit.",
    }
}
_MOVED = {
    "x-personae-moved": {
        "schema": {"type": "string"},
        "description": "How often the answer went on at an engine that may compute other tokens.",
    }
}
_ADAPTER = {
    "x-personae-adapter": {
        "schema": {"type": "string"},
        "description": "The exact version of the uploaded adapter that answers, as `poet@2`.",
    }
}
_NEUTRAL = "A field of another server, accepted with values that ask for nothing."
_RETRY_AFTER = {
    "retry-after": {"schema": {"type": "string"}, "description": "When to come back, in seconds."}
}
