"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from starlette.requests import Request
from starlette.responses import Response

from personae.api import chat, targets
from personae.api.answering import answering, find_model, with_defaults
from personae.api.anthropic.answers import AnswerMessage, MessageEvent, TokenCount
from personae.api.anthropic.builder import MessageBuilder
from personae.api.anthropic.errors import ERRORS, NO_THREADS, anthropics_words
from personae.api.anthropic.request import CountTokensRequest, MessagesRequest, ThinkingDisabled
from personae.api.anthropic.translate import chat_request, counted
from personae.api.body import read_json
from personae.api.dialect import MESSAGES
from personae.api.exchange import Exchange, exchange_of
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.respond import json_response
from personae.api.routes import prompt_count
from personae.api.stream import EventStream, respond
from personae.api.wire.schema import refuse_unserved
from personae.errors import UnsupportedParameter


@operation(
    "POST",
    "/v1/messages",
    body=MessagesRequest,
    answers={200: (AnswerMessage, events(MessageEvent))},
    headers=(targets.TIMEOUT, *targets.HEADERS),
    refuses=(404, 504),
    error=ERRORS,
)
async def create_message(request: Request) -> Response | EventStream:
    """Answer a conversation, at once or as a stream, in Anthropic's form."""
    exchange = _exchange_of(request)
    body = await read_json(request, MessagesRequest, exchange)
    job, form = await admit(exchange, body)
    return await respond(request, job, form, stream=bool(body.stream))


async def admit(exchange: Exchange, body: MessagesRequest) -> tuple[Job, MessageBuilder]:
    """Check everything, render and encode. The job is then ready to run."""
    refuse_unserved(body)
    if body.thread is not None:
        message = "`thread` is not served here; send the whole conversation."
        raise UnsupportedParameter(message, param="thread", code=NO_THREADS)
    exchange = await answering(exchange, body.model)
    most, ignored = exchange.settings.max_messages, exchange.ignored
    if body.diagnostics is not None and body.diagnostics.previous_message_id is not None:
        ignored.append("diagnostics")
    asked, names = await exchange.prepared(lambda brief: chat_request(body, exchange.family, most, ignored))
    with names.applied(), anthropics_words():
        job, _ = await chat.admit(exchange, asked, prefix="msg_", dialect=MESSAGES)
    names.rename_all(ignored)
    job.rename = names.rename
    thinking = body.thinking
    omitted = not isinstance(thinking, ThinkingDisabled | None) and thinking.display == "omitted"
    body.messages = []  # they are in the prompt, and may be long
    return job, MessageBuilder(job, omitted=omitted)


@operation(
    "POST",
    "/v1/messages/count_tokens",
    body=CountTokensRequest,
    answers={200: TokenCount},
    refuses=(404,),
    error=ERRORS,
)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a message would have; nothing is generated."""
    exchange = _exchange_of(request)
    body = await read_json(request, CountTokensRequest, exchange)
    refuse_unserved(body)
    exchange = await answering(exchange, body.model)
    exchange = await with_defaults(exchange, find_model(exchange, body.model))
    count = await exchange.prepared(lambda brief: _count(exchange, body, brief))
    return json_response(TokenCount(count))


def _count(exchange: Exchange, body: CountTokensRequest, brief: bool) -> int:
    asked, names = counted(body, exchange.family, exchange.settings.max_messages, exchange.ignored)
    with names.applied():
        count = prompt_count(exchange, asked, brief, MESSAGES)
    names.rename_all(exchange.ignored)
    return count


def _exchange_of(request: Request) -> Exchange:
    """The exchange, whose answer has the request's id under the name that Anthropic's clients read."""
    exchange = exchange_of(request)
    exchange.answer_headers[ERRORS.id_header] = request.state.request_id
    return exchange
