"""`POST /v1/responses`."""

from collections.abc import Callable

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from personae.api import chat, targets
from personae.api.body import read_json
from personae.api.context import RequestContext, context_of
from personae.api.deadline import TIMEOUT
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.respond import json_response
from personae.api.responses.answers import Event, Response, ResponseDeleted
from personae.api.responses.builder import ResponseBuilder
from personae.api.responses.items import Item, MessageItem
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.store import ResponseStore
from personae.api.responses.translate import chat_request
from personae.api.stream import EventStream, respond
from personae.api.wire.schema import refuse_unserved
from personae.errors import NotFound, UnsupportedParameter


@operation(
    "POST",
    "/v1/responses",
    body=ResponsesRequest,
    answers={200: (Response, events(Event))},
    headers=(TIMEOUT, *targets.HEADERS),
    refuses=(404, 504),
)
async def create_response(request: Request) -> HttpResponse | EventStream:
    """Answer a conversation, at once or as a stream, in OpenAI's newer form."""
    context = context_of(request)
    body = await read_json(request, ResponsesRequest, context)
    job, form = await admit(context, body)
    return await respond(request, job, form, stream=bool(body.stream))


async def admit(context: RequestContext, body: ResponsesRequest) -> tuple[Job, ResponseBuilder]:
    """Check everything, render and encode. The job is then ready to run."""
    refuse_unserved(body)
    keep, earlier = await _kept(context, body)
    most = context.settings.max_messages
    asked, names = await context.prepared(lambda brief: chat_request(body, most, earlier))
    with names.applied():
        job, _ = await chat.admit(context, asked, prefix="resp_")
    job.rename = names.rename
    body.input = ""  # it is in the prompt, and may be long
    return job, ResponseBuilder(job, body, names.namespaces, keep)


Keep = Callable[[Response], None]


async def _kept(context: RequestContext, body: ResponsesRequest) -> tuple[Keep | None, int]:
    """What stores the response, or None if nothing does. Puts the conversation that the response follows
    before its input, and returns how many items that has.

    A response is stored unless `store` is false; a response of a batch only if it is true.
    """
    store, who = context.responses, context.caller.identity
    if store is None:
        if body.store:
            context.ignored.append("store")
        if body.previous_response_id is not None:
            raise UnsupportedParameter(
                "`previous_response_id`: this server stores no responses.", param="previous_response_id"
            )
        return None, 0
    wanted = not context.background if body.store is None else body.store
    own: list[Item] = (
        [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    added = msgspec.json.encode(own) if wanted else b""
    if wanted:
        store.check_room()
        context.keep(len(added))
    if (previous := body.previous_response_id) is not None:
        most = context.settings.max_messages
        past = await to_thread.run_sync(store.conversation, who.tenant, previous, most)
        body.input = [*past, *own]
    else:
        past = []
    limit = who.limits.response_bytes
    return (lambda done: store.keep(who.tenant, limit, done, added)) if wanted else None, len(past)


@operation("GET", "/v1/responses/{id}", answers={200: Response}, refuses=(404,))
async def get_response(request: Request) -> HttpResponse:
    """Show a stored response."""
    context, id = context_of(request), request.path_params["id"]
    kept = await to_thread.run_sync(_store(context).find, context.caller.tenant, id)
    return HttpResponse(kept.response, media_type="application/json")


@operation("DELETE", "/v1/responses/{id}", answers={200: ResponseDeleted}, refuses=(404,))
async def delete_response(request: Request) -> HttpResponse:
    """Delete a response. Responses that follow it can no longer be continued."""
    context, id = context_of(request), request.path_params["id"]
    await to_thread.run_sync(_store(context).remove, context.caller.tenant, id)
    return json_response(ResponseDeleted(id))


def _store(context: RequestContext) -> ResponseStore:
    if context.responses is None:
        raise NotFound("This server stores no responses.", code="no_responses")
    return context.responses
