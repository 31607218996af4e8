"""`POST /v1/responses`."""

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from personae.api import chat
from personae.api.body import read_json
from personae.api.context import RequestContext, context_of
from personae.api.deadline import TIMEOUT
from personae.api.generation import Job
from personae.api.http.operation import events, operation
from personae.api.responses.answers import Event, Response
from personae.api.responses.builder import ResponseBuilder
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.translate import chat_request
from personae.api.stream import EventStream, respond
from personae.api.wire.schema import refuse_unserved


@operation(
    "POST",
    "/v1/responses",
    body=ResponsesRequest,
    answers={200: (Response, events(Event))},
    headers=(TIMEOUT,),
    refuses=(404, 504),
)
async def create_response(request: Request) -> HttpResponse | EventStream:
    """Answer a conversation, at once or as a stream, in OpenAI's newer form. Nothing is stored."""
    context = context_of(request)
    body = await read_json(request, ResponsesRequest, context)
    job, form = await admit(context, body)
    return await respond(request, job, form, stream=bool(body.stream))


async def admit(context: RequestContext, body: ResponsesRequest) -> tuple[Job, ResponseBuilder]:
    """Check everything, render and encode; the job is ready to run."""
    refuse_unserved(body)
    asked, names = await context.prepared(lambda brief: chat_request(body, context.settings.max_messages))
    with names.applied():
        job, _ = await chat.admit(context, asked, prefix="resp_")
    job.rename = names.rename
    body.input = ""  # it is in the prompt, and may be long
    return job, ResponseBuilder(job, body, names.namespaces)
