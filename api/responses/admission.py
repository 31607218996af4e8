"""From a request for a response to a job that is ready to run, and to what keeps its answer."""

import uuid
from dataclasses import dataclass

import msgspec
from anyio import to_thread

from personae.api.exchange import Exchange
from personae.api.responses.answers import Response
from personae.api.responses.builder import ResponseBuilder
from personae.api.responses.chat_job import chat_job, prompt_length
from personae.api.responses.items import Item, ItemReference, MessageItem
from personae.api.responses.kept_items import KeptItem, kept_items
from personae.api.responses.mcp_tools import RequestServers, request_servers, uses_servers
from personae.api.responses.request import InputTokensRequest, ResponsesRequest, conversation_id
from personae.api.responses.rounds import ToolRounds
from personae.api.responses.store import AddedItems, KeptResponse, ResponseStore
from personae.api.stream import AnswerJob
from personae.api.wire.schema import refuse_unserved
from personae.errors import RequestError, UnsupportedParameter

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Earlier:
    """The kept items that a request follows, and the field that named them."""

    items: list[Item]
    field: str = "previous_response_id"


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of a request and its answer: in the store if `stored`, in the `conversation` if there is
    one. `items` are the request's own."""

    store: ResponseStore
    tenant: str
    limit: int | None
    items: list[KeptItem]
    stored: bool
    conversation: str | None

    async def __call__(self, done: Response) -> None:
        """Keep a response that is complete, or one that broke off, which no conversation gets. Raises
        StorageFailed."""
        added = None
        if self.conversation is not None and done.status != "failed":
            output = [msgspec.to_builtins(item) for item in done.output]
            added = AddedItems(self.conversation, [*self.items, *output])
        if done.background:
            await self.store.update(self.kept(done), added)
        else:
            await self.store.put(self.kept(done) if self.stored else None, self.limit, added)

    async def begin(self, response: Response, request: bytes) -> None:
        """Store a response that is not answered yet, with its `request`. Raises StorageFailed."""
        await self.store.put(self.kept(response, request), self.limit)

    def kept(self, response: Response, request: bytes | None = None) -> KeptResponse:
        """A response as it is kept."""
        previous, encoded = response.previous_response_id, _encode(response)
        return KeptResponse(self.tenant, response.id, previous, _encode(self.items), encoded, request)


async def admit(exchange: Exchange, body: ResponsesRequest) -> tuple[AnswerJob, ResponseBuilder]:
    """Check everything, render and encode; the job is ready to run."""
    job, form, _ = await admit_kept(exchange, body)
    return job, form


async def admit_kept(
    exchange: Exchange, body: ResponsesRequest, *, id: str | None = None, created: int | None = None
) -> tuple[AnswerJob, ResponseBuilder, Keeping | None]:
    """The same, with what keeps the answer. An `id` and a time are those of a response that its client knows
    already."""
    refuse_unserved(body)
    if body.background:
        _check_background(exchange, body)
    id = id or f"resp_{uuid.uuid4().hex}"
    own = await _resolved(exchange, _own(body))
    keep = await _keeping(exchange, body, own, id)
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise RequestError(
            "`max_tool_calls` must be at least 1.", param="max_tool_calls", code="out_of_range"
        )
    earlier, using = await _complete_input(exchange, body, own)
    job, names = await chat_job(exchange, body, len(earlier.items), earlier.field)
    job.id, job.created = id, created or job.created
    stored = keep is not None and keep.stored
    if using is None:
        form = ResponseBuilder(job, body, names.namespaces, keep, stored=stored)
        body.input = ""  # it is in the prompt, and may be long
        return job, form, keep
    rounds = ToolRounds(job, body, using, names.server_tools, len(earlier.items), earlier.field)
    form = ResponseBuilder(
        job,
        body,
        names.namespaces,
        keep,
        stored=stored,
        tools=names.server_tools,
        lists=using.lists,
        approved={request.id for request in using.approved},
    )
    return rounds, form, keep


async def count_input(exchange: Exchange, body: InputTokensRequest) -> int:
    """The number of tokens in the prompt of a response with these fields. Its MCP servers are asked for their
    tools. Nothing is generated or stored."""
    refuse_unserved(body)
    asked = body.response()
    earlier, _ = await _complete_input(exchange, asked, await _resolved(exchange, _own(asked)))
    return await prompt_length(exchange, asked, len(earlier.items), earlier.field)


async def _complete_input(
    exchange: Exchange, body: ResponsesRequest, own: list[Item]
) -> tuple[Earlier, RequestServers | None]:
    """Put what the request follows before its `own` items, and the tools of MCP servers behind them."""
    earlier = await _earlier(exchange, body)
    if earlier.items or not isinstance(body.input, str):
        body.input = [*earlier.items, *own]
    using = None
    if uses_servers(body):
        using = await request_servers(exchange, body)
        if using.lists:
            body.input = [*(own if isinstance(body.input, str) else body.input), *using.lists]
    return earlier, using


def _own(body: ResponsesRequest) -> list[Item]:
    """The items of the request itself."""
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def _check_background(exchange: Exchange, body: ResponsesRequest) -> None:
    """Raises UnsupportedParameter where no answer can be made in the background."""
    if exchange.background:
        raise UnsupportedParameter("A batch's requests are not run in the background.", param="background")
    if exchange.services.responses is None or exchange.services.responses.check_background is None:
        raise UnsupportedParameter("`background`: this server stores no responses.", param="background")
    exchange.services.responses.check_background(exchange.caller.tenant)
    if body.store is False:
        raise RequestError("`background` needs `store`: the answer is fetched later.", param="store")
    if body.stream:
        raise UnsupportedParameter(
            "`background` with `stream` is not served here; fetch the response by its id.", param="stream"
        )


async def _keeping(exchange: Exchange, body: ResponsesRequest, own: list[Item], id: str) -> Keeping | None:
    """What keeps the response of that id, None if nothing does.

    A response is kept unless `store` is false; one of a batch only if it is true.
    """
    store, who, conversation = exchange.services.responses, exchange.caller.identity, conversation_id(body)
    if store is None:
        if body.store:
            exchange.ignored.append("store")
        return None
    wanted = not exchange.background if body.store is None else body.store
    if not wanted and conversation is None:
        return None
    items = kept_items(own, id if wanted else None)
    exchange.keep(len(_encode(items)))
    limit = who.limits.response_bytes
    if conversation is not None:
        await to_thread.run_sync(store.conversations.check_room, who.tenant, limit)
    return Keeping(store, who.tenant, limit, items, wanted, conversation)


async def _resolved(exchange: Exchange, own: list[Item]) -> list[Item]:
    """The items, with the tenant's stored ones in the places of references to them. Raises RequestError for
    one that is not stored, or that is already there: each may be long."""
    named: dict[str, str] = {}
    for index, item in enumerate(own):
        if isinstance(item, ItemReference):
            place = f"input[{index}]"
            if exchange.services.responses is None:
                raise UnsupportedParameter(
                    f"`{place}`: this server stores no responses; send the item itself.", param=place
                )
            if item.id in named:
                raise RequestError(f"`{place}` is the same item as `{named[item.id]}`.", param=place)
            named[item.id] = place
    if not named or exchange.services.responses is None:
        return own
    found = await to_thread.run_sync(exchange.services.responses.items, exchange.caller.tenant, named)
    return [found[item.id] if isinstance(item, ItemReference) else item for item in own]


async def _earlier(exchange: Exchange, body: ResponsesRequest) -> Earlier:
    """What the request follows."""
    previous, conversation = body.previous_response_id, conversation_id(body)
    if previous is None and conversation is None:
        return Earlier([])
    field = "previous_response_id" if conversation is None else "conversation"
    if previous is not None and conversation is not None:
        raise RequestError(
            "Give either `previous_response_id` or `conversation`.", param="previous_response_id"
        )
    store, tenant, most = exchange.services.responses, exchange.caller.tenant, exchange.settings.max_messages
    if store is None:
        raise UnsupportedParameter(f"`{field}`: this server stores no responses.", param=field)
    if conversation is not None:
        return Earlier(await to_thread.run_sync(store.conversations.items, tenant, conversation), field)
    assert previous is not None
    return Earlier(await to_thread.run_sync(store.conversation, tenant, previous, most), field)
