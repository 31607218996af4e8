"""From a request for a response to the chat completion that answers it, ready to run."""

from personae.api import chat
from personae.api.dialect import RESPONSES
from personae.api.exchange import Exchange
from personae.api.generation import Job
from personae.api.preparation import begin
from personae.api.responses.request import ResponsesRequest
from personae.api.responses.translate import Names, chat_request
from personae.api.routes import prompt_count


async def chat_job(exchange: Exchange, body: ResponsesRequest, earlier: int, field: str) -> tuple[Job, Names]:
    """Check everything, render and encode. The first `earlier` items of the input are stored ones, which the
    request's `field` named."""
    most = exchange.settings.max_messages
    asked, names = await exchange.prepared(lambda brief: chat_request(body, most, earlier, field))
    with names.applied():
        job, _ = await chat.admit(exchange, asked, prefix="resp_", dialect=RESPONSES)
    names.rename_all(exchange.ignored)
    job.rename = names.rename
    return job, names


async def prompt_length(exchange: Exchange, body: ResponsesRequest, earlier: int, field: str) -> int:
    """The number of tokens in the prompt of that chat completion."""
    most = exchange.settings.max_messages
    asked, names = await exchange.prepared(lambda brief: chat_request(body, most, earlier, field))
    with names.applied():
        answered = (await begin(exchange, asked)).exchange
        count = await answered.prepared(lambda brief: prompt_count(answered, asked, brief, RESPONSES))
    names.rename_all(exchange.ignored)
    return count
