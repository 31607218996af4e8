"""The server's own verdict on a chat completion: what would be enforced, keyword by keyword.

The request is prepared and its grammar compiled as for an answer, by the engine and within its limits. Then
the request is withdrawn. A schema that is not strict is also compiled strictly: what is refused then is what
an answer is only checked for at its end.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from personae.api import chat
from personae.api.answering import answering
from personae.api.body import read_json
from personae.api.exchange import Exchange, exchange_of
from personae.api.http.operation import operation
from personae.api.respond import json_response
from personae.api.wire.conversation import CustomTool, Tool, UserMessage
from personae.api.wire.errors import ErrorDetail, error_answer
from personae.api.wire.schema import ChatRequest, JsonObjectFormat, JsonSchema, JsonSchemaFormat
from personae.errors import PersonaeError, RequestError
from personae.grammar.schema.document import pointer
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.walk import subschemas

MOST_TOOLS = 16
MOST_KEYWORDS = 1000
MOST_NAMED = 50
"""Keywords that one refusal names."""
_GRAMMAR = "guidance"  # a grammar alone, without checks of each token
_NAMED = re.compile(r"'([^']+)' at (#\S*?)(?=[,.]?\s|[.,]$)")

Verdict = Literal["enforced", "best effort", "checked", "refused", "unknown", "no effect"]


class KeywordVerdict(msgspec.Struct, frozen=True):
    """What happens with one keyword of a schema.

    `enforced`: while the answer is written. `checked`: at its end. `best effort`: both, as far as the schema
    without its checked keywords can be enforced. `refused`; `no effect`; or `unknown`, because the schema is
    refused for another reason.
    """

    keyword: str
    pointer: str
    verdict: Verdict


class SchemaVerdict(msgspec.Struct, frozen=True):
    """What happens with one schema of a request; `param` is its field."""

    param: str
    strict: bool
    accepted: bool
    keywords: list[KeywordVerdict]
    error: ErrorDetail | None = None
    truncated: bool = False


class RequestVerdict(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/chat/completions/check`. `prompt_tokens` is null if the request is refused."""

    accepted: bool
    schemas: list[SchemaVerdict]
    ignored: list[str]
    bound_by: str | None = None
    prompt_tokens: int | None = None
    error: ErrorDetail | None = None
    object: Literal["chat.completion.check"] = "chat.completion.check"


@operation(
    "POST",
    "/v1/chat/completions/check",
    body=ChatRequest,
    answers={200: RequestVerdict},
    refuses=(404,),
)
async def check_request(request: Request) -> Response:
    """Say what of a chat completion would be enforced or refused. No answer is generated."""
    exchange = exchange_of(request)
    body = await read_json(request, ChatRequest, exchange)
    return json_response(await verdict(exchange, body))


async def verdict(exchange: Exchange, body: ChatRequest) -> RequestVerdict:
    """The complete verdict on a request."""
    exchange = await answering(exchange, body.model)
    parts = list(_parts(body, exchange.settings.default_strict))
    try:
        bound_by, prompt = await _compiled(exchange, body)
    except RequestError as error:
        if not parts or error.code == "model_not_found":
            return _refused(exchange, error, [])
        return _refused(exchange, error, [await _judged(exchange, part) for part in parts])
    schemas = [await _judged(exchange, part) for part in parts]
    return RequestVerdict(True, schemas, _ignored(exchange), bound_by, prompt)


def _refused(exchange: Exchange, error: PersonaeError, schemas: list[SchemaVerdict]) -> RequestVerdict:
    return RequestVerdict(False, schemas, _ignored(exchange), error=error_answer(error).error)


def _ignored(exchange: Exchange) -> list[str]:
    return list(dict.fromkeys(exchange.ignored))


@dataclass(frozen=True, slots=True)
class _Part:
    """A schema of a request, and a request with only this schema; `strict` is as in the original request."""

    param: str
    schema: Any
    strict: bool
    alone: ChatRequest
    strictly: ChatRequest


def _parts(body: ChatRequest, default: bool) -> Iterator[_Part]:
    bare = replace(
        body,
        messages=[UserMessage("hi")],
        tools=None,
        tool_choice=None,
        response_format=None,
        structured_outputs=None,
        guided_json=None,
        stream=None,
        stream_options=None,
        max_tokens=None,
        max_completion_tokens=None,
    )
    format = body.response_format
    if isinstance(format, JsonSchemaFormat):
        asked = format.json_schema
        strict = default if asked.strict is None else asked.strict
        strictly = JsonSchemaFormat(replace(asked, strict=True))
        yield _Part(
            "response_format.json_schema.schema",
            asked.schema,
            strict,
            replace(bare, response_format=format),
            replace(bare, response_format=strictly, guided_decoding_backend=_GRAMMAR),
        )
    elif isinstance(format, JsonObjectFormat) and format.schema is not None:
        alone = replace(bare, response_format=format)
        strictly = JsonSchemaFormat(JsonSchema(format.schema, strict=True))
        strictly_alone = replace(bare, response_format=strictly, guided_decoding_backend=_GRAMMAR)
        yield _Part("response_format.schema", format.schema, default, alone, strictly_alone)
    for index, tool in enumerate(islice(body.tools or (), MOST_TOOLS)):
        if isinstance(tool, CustomTool) or tool.function.parameters is None:
            continue
        strict = default if tool.function.strict is None else tool.function.strict
        one = replace(bare, tools=[tool], tool_choice="required")
        strict_tool = Tool(replace(tool.function, strict=True))
        yield _Part(
            f"tools[{index}].function.parameters",
            tool.function.parameters,
            strict,
            one,
            replace(one, tools=[strict_tool], guided_decoding_backend=_GRAMMAR),
        )


async def _judged(exchange: Exchange, part: _Part) -> SchemaVerdict:
    failure = await _failure(exchange, part.alone)
    strictly = failure
    if failure is None and not part.strict:
        strictly = await _failure(exchange, part.strictly)
    if strictly is None:
        others: Verdict = "enforced"
    elif failure is None:
        others = "best effort"
    else:
        others = "enforced" if 0 < len(_places(failure)) < MOST_NAMED else "unknown"
    named: Verdict = "checked" if failure is None else "refused"
    places = set() if strictly is None else _places(strictly)
    found = list(islice(_keywords(part.schema, places, named, others), MOST_KEYWORDS + 1))
    return SchemaVerdict(
        part.param,
        part.strict,
        failure is None,
        found[:MOST_KEYWORDS],
        None if failure is None else error_answer(failure).error,
        len(found) > MOST_KEYWORDS,
    )


async def _failure(exchange: Exchange, body: ChatRequest) -> RequestError | None:
    """Why the request would be refused."""
    try:
        await _compiled(exchange, body)
    except RequestError as error:
        return error
    return None


def _keywords(schema: Any, places: set[str], named: Verdict, others: Verdict) -> Iterator[KeywordVerdict]:
    """The keywords of a schema: those at `places` get the verdict `named`, other binding keywords get
    `others`."""
    if not isinstance(schema, dict):
        return
    for one, path in subschemas(schema):
        for keyword in one:
            place = pointer((*path, keyword))
            usual: Verdict = others if keyword in ASSERTIONS else "no effect"
            yield KeywordVerdict(keyword, place, named if place in places else usual)


def _places(error: RequestError) -> set[str]:
    """The places of the keywords that a refusal names."""
    return {place for _, place in _NAMED.findall(error.message)}


async def _compiled(exchange: Exchange, body: ChatRequest) -> tuple[str | None, int]:
    """Prepare a request and compile its grammar. Returns the field that binds its answer, and the number of
    its prompt's tokens. Raises RequestError."""
    job, _ = await chat.admit(exchange, replace(body, stream=None, stream_options=None, n=None))
    job.exchange.caller.ready()
    if job.logs[0].grammar is not None:
        await job.probe()
    return job.bound_by if job.logs[0].grammar is not None else None, job.prompt_tokens
