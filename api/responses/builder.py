"""Builds a response: its items, complete or as events."""

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from personae.api.choices import Part
from personae.api.generation import Job
from personae.api.logprobs import chat_logprobs
from personae.api.output_pieces import CallOutcome, CallPart, Span
from personae.api.packing import Pack, as_list
from personae.api.responses.answers import (
    Completed,
    ConversationRef,
    Created,
    EndedEarly,
    Event,
    Failed,
    Incomplete,
    InProgress,
    InputCounts,
    ItemAdded,
    ItemDone,
    OutputItem,
    Response,
    ResponseError,
    ResponseUsage,
)
from personae.api.responses.items import Status
from personae.api.responses.mcp_items import McpListItem
from personae.api.responses.mcp_writing import ApprovalWriter, McpCallWriter, ServerTool, listed
from personae.api.responses.request import (
    ENCRYPTED,
    ReasoningOptions,
    ResponsesRequest,
    TextOptions,
    conversation_id,
)
from personae.api.responses.writing import (
    CallWriter,
    CustomCallWriter,
    ItemWriter,
    MessageWriter,
    ReasoningWriter,
)
from personae.api.stream import AnswerBuilder
from personae.api.wire.schema import TextFormat
from personae.errors import PersonaeError


class ResponseBuilder(AnswerBuilder):
    """Follows the one choice of a job: reasoning, text and calls become items, in the order in which they
    arrive.

    An answer that is not streamed is made from the same events, which are then not sent.
    """

    done = b""

    def __init__(
        self,
        job: Job,
        body: ResponsesRequest,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
        keep: Callable[[Response], Awaitable[None]] | None = None,
        *,
        stored: bool = False,
        tools: Mapping[str, ServerTool] | None = None,
        lists: Sequence[McpListItem] = (),
        approved: Collection[str] = (),
    ) -> None:
        """`namespaces` has the namespace and the name of the tools that are in one; `keep` stores the
        complete response before the client gets it. `stored` says whether the client can fetch it again.
        `tools` are those of MCP servers by the names that the model sees, `lists` the first items of the
        response; `approved` are the ids of calls that the client has approved."""
        self._job = job
        self._body = body
        self._namespaces = namespaces or {}
        self._keep = keep
        self._stored = stored
        self._tools = tools or {}
        self._lists = lists
        self._approved = approved
        self._calls: dict[str, McpCallWriter] = {}  # those without an outcome
        self._encrypted = ENCRYPTED in (body.include or ())
        self._logprobs = job.logs[0].params.logprobs is not None
        self._numbers = count()
        self._output: list[OutputItem] = []
        self._open: ItemWriter | None = None
        self._response = self._fresh()
        self._begun = False
        self._place_of_rest = ""

    def whole(self, parts: list[Part], pack: Pack = as_list) -> Response:
        """The complete response of a request that is not streamed."""
        for _ in self.of(parts[0]):
            pass
        return self._response

    def of(self, part: Part) -> Iterator[Event]:
        """The events for a part."""
        if not self._begun:
            self._begun = True
            yield self._event(Created, response=self._response)
            yield self._event(InProgress, response=self._response)
            for event in listed(self._event, self._job.id, self._lists):
                if isinstance(event, ItemDone):
                    self._output.append(event.item)
                yield event
        for piece in part.words.pieces:
            if isinstance(piece, CallPart):
                yield from self._called(piece)
            elif isinstance(piece, CallOutcome):
                yield from self._settled(piece)
            elif piece.reasoning:
                yield from self._thought(piece)
            else:
                yield from self._said(piece)
        if part.finish is not None:
            yield from self._ended(part)

    async def store(self) -> None:
        """Keep the complete response. Raises StorageFailed."""
        if self._keep is not None:
            await self._keep(self._response)

    def last(self) -> Iterator[Event]:
        """The event that completes the response."""
        spent = self._response.status == "incomplete"
        yield self._event(EndedEarly if spent else Completed, response=self._response)

    async def store_broken_off(self, error: PersonaeError) -> None:
        """If the server is stopping, keep the items that are complete; the last event says where they are.
        Raises StorageFailed."""
        if self._keep is not None and self._stored and error.code == "shutting_down":
            await self._keep(self.broken_off(error))
            self._place_of_rest = f" What is complete of this one is at /v1/responses/{self._job.id}."

    def failed(self, error: PersonaeError) -> Iterator[Event]:
        """The event that ends a response that broke off."""
        yield self._event(Failed, response=self.broken_off(error))

    def broken_off(self, error: PersonaeError) -> Response:
        """The response that ends with an error."""
        response = self._fresh()
        response.status, response.output = "failed", list(self._output)
        for call in self._calls.values():
            response.output[call.place] = call.item("incomplete")
        response.error = ResponseError("server_error", error.message + self._place_of_rest)
        return response

    def begun(self) -> Response:
        """The response before its answer."""
        return self._fresh()

    @property
    def _place(self) -> int:
        """The place of the item that would be opened now."""
        return len(self._output) + (self._open is not None)

    def _event(self, kind: type[Any], **fields: Any) -> Event:
        event: Event = kind(sequence_number=next(self._numbers), **fields)
        return event

    def _thought(self, span: Span) -> Iterator[Event]:
        if not isinstance(self._open, ReasoningWriter):
            yield from self._opened(
                ReasoningWriter(self._event, self._job.id, self._place, encrypted=self._encrypted)
            )
        yield from self._written(span.text)

    def _said(self, span: Span) -> Iterator[Event]:
        if not isinstance(self._open, MessageWriter):
            yield from self._opened(
                MessageWriter(self._event, self._job.id, self._place, logprobs=self._logprobs)
            )
        assert isinstance(self._open, MessageWriter)
        self._open.add(chat_logprobs(span.entries, self._job.exchange.client.tokenizer).content)
        yield from self._written(span.text)

    def _called(self, call: CallPart) -> Iterator[Event]:
        if call.id is not None:
            yield from self._closed("completed")
            yield from self._opened(self._writer(call, call.id))
        if call.arguments:
            yield from self._written(call.arguments)

    def _writer(self, call: CallPart, id: str) -> ItemWriter:
        """What writes a call that begins."""
        place, response = self._place, self._job.id
        if (tool := self._tools.get(call.name or "")) is not None:
            if tool.approval and id not in self._approved:
                return ApprovalWriter(self._event, response, place, tool)
            request = id if id in self._approved else None
            self._calls[id] = writer = McpCallWriter(self._event, response, place, tool, request)
            return writer
        kind = CustomCallWriter if call.custom else CallWriter
        namespace, name = self._namespaces.get(call.name or "", (None, call.name or ""))
        return kind(self._event, response, place, id, name, namespace)

    def _settled(self, outcome: CallOutcome) -> Iterator[Event]:
        """A call was made."""
        yield from self._closed("completed")
        call = self._calls.pop(outcome.id)
        yield from call.settle(outcome)
        item = self._output[call.place] = call.item("completed")
        yield self._event(ItemDone, output_index=call.place, item=item)

    def _opened(self, item: ItemWriter) -> Iterator[Event]:
        yield from self._closed("completed")
        self._open = item
        yield self._event(ItemAdded, output_index=len(self._output), item=item.item("in_progress"))
        yield from item.begin()

    def _written(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        yield from self._open.write(text)

    def _closed(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._open.end()
        calling = isinstance(self._open, McpCallWriter)  # it is complete when the tool has answered
        item, place = self._open.item("in_progress" if calling else status), len(self._output)
        self._output.append(item)
        self._open = None
        if not calling:
            yield self._event(ItemDone, output_index=place, item=item)

    def _ended(self, part: Part) -> Iterator[Event]:
        if self._open is None and len(self._output) == len(self._lists):
            yield from self._said(Span(""))
        spent = part.finish == "length"
        yield from self._closed("incomplete" if spent else "completed")
        for call in self._calls.values():
            item = self._output[call.place] = call.item("incomplete")
            yield self._event(ItemDone, output_index=call.place, item=item)
        response = self._response = self._fresh()
        response.output, response.personae = self._output, part.extension
        response.usage = self._usage()
        if spent:
            response.status, response.incomplete_details = "incomplete", Incomplete()
        else:
            response.status, response.completed_at = "completed", int(time.time())

    def _usage(self) -> ResponseUsage:
        usage = self._job.usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputCounts(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            usage.completion_tokens_details,
            usage.total_tokens,
            usage.personae,
        )

    def _fresh(self) -> Response:
        """The response before any text."""
        job, body = self._job, self._body
        conversation = conversation_id(body)
        params = job.logs[0].params
        return Response(
            id=job.id,
            created_at=job.created,
            model=job.model.name,
            status="in_progress",
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            temperature=params.temperature,
            top_p=params.top_p,
            text=body.text or TextOptions(TextFormat()),
            reasoning=body.reasoning or ReasoningOptions(),
            metadata=body.metadata or {},
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            top_logprobs=body.top_logprobs or 0,
            user=body.user,
            store=self._stored,
            background=bool(body.background),
            previous_response_id=body.previous_response_id,
            conversation=None if conversation is None else ConversationRef(conversation),
        )
