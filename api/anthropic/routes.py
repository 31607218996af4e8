"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from personae.api import chat, targets
from personae.api.answering import answering
from personae.api.anthropic.answers import AnswerMessage, AnthropicError, MessageEvent, TokenCount
from personae.api.anthropic.builder import MessageBuilder
from personae.api.anthropic.errors import NO_THREADS, anthropics_words
from personae.api.anthropic.request import CountTokensRequest, MessagesRequest, ThinkingDisabled
from personae.api.anthropic.translate import chat_request, counted
from personae.api.body import read_json
from personae.api.context import RequestContext, context_of
from personae.api.deadline import TIMEOUT
from personae.api.dialect import MESSAGES
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.respond import json_response
from personae.api.routes import prompt_ids
from personae.api.stream import EventStream, respond
from personae.api.wire.schema import ChatRequest, TokenizeRequest, refuse_unserved
from personae.errors import UnsupportedParameter


@operation(
    "POST",
    "/v1/messages",
    body=MessagesRequest,
    answers={200: (AnswerMessage, events(MessageEvent))},
    headers=(TIMEOUT, *targets.HEADERS),
    refuses=(404, 504),
    error=AnthropicError,
)
async def create_message(request: Request) -> Response | EventStream:
    """Answer a conversation, at once or as a stream, in Anthropic's form."""
    context = context_of(request)
    body = await read_json(request, MessagesRequest, context)
    job, form = await admit(context, body)
    return await respond(request, job, form, stream=bool(body.stream))


async def admit(context: RequestContext, body: MessagesRequest) -> tuple[Job, MessageBuilder]:
    """Check everything, render and encode. The job is then ready to run."""
    refuse_unserved(body)
    if body.thread is not None:
        message = "`thread` is not served here; send the whole conversation."
        raise UnsupportedParameter(message, param="thread", code=NO_THREADS)
    context = await answering(context, body.model)
    most, ignored = context.settings.max_messages, context.ignored
    asked, names = await context.prepared(lambda brief: chat_request(body, context.family, most, ignored))
    with names.applied(), anthropics_words():
        job, _ = await chat.admit(context, asked, prefix="msg_", dialect=MESSAGES)
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
    error=AnthropicError,
)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a message would have; nothing is generated."""
    context = context_of(request)
    body = await read_json(request, CountTokensRequest, context)
    refuse_unserved(body)
    context = await answering(context, body.model)
    context = await context.with_defaults(context.model(body.model))
    count = await context.prepared(lambda brief: _count(context, body, brief))
    return json_response(TokenCount(count))


def _count(context: RequestContext, body: CountTokensRequest, brief: bool) -> int:
    asked, names = counted(body, context.family, context.settings.max_messages, context.ignored)
    with names.applied():
        count = len(prompt_ids(context, _tokenized(context, asked), brief, MESSAGES))
    names.rename_all(context.ignored)
    return count


def _tokenized(context: RequestContext, asked: ChatRequest) -> TokenizeRequest:
    kwargs: dict[str, Any] = chat.template_kwargs(context, asked)
    return TokenizeRequest(
        messages=asked.messages,
        tools=asked.tools,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=kwargs,
    )
