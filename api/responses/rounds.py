"""A response whose model calls tools of MCP servers: it answers, the calls are made, and it goes on with what
they answered, until it calls nothing more.

Each round is a chat completion of its own, within the tenant's limits. The response ends early where a call
needs the client: its approval, or the answer of one of its functions.
"""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from starlette.types import Receive

from personae.api.choices import Part
from personae.api.exchange import Exchange
from personae.api.generation import Job, Sink, unless_disconnected
from personae.api.mcp.session import INVALID, McpFailed, McpSession, ToolFailed, session
from personae.api.output_pieces import CallOutcome, CallPart, OutputPieces, Span
from personae.api.responses.chat_job import chat_job
from personae.api.responses.items import (
    ChosenTools,
    Item,
    MessageItem,
    ReasoningItem,
    ReasoningText,
    ToolChoice,
)
from personae.api.responses.mcp_items import McpCallItem
from personae.api.responses.mcp_tools import RequestServers
from personae.api.responses.mcp_writing import ServerTool, call_error
from personae.api.responses.request import ResponsesRequest
from personae.errors import DeadlineExceeded

MOST_CALLS = 64
"""Calls of MCP servers in one response. A request's `max_tool_calls` may be lower."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that has to be made. Its id is the piece's, or that of the request for approval."""

    id: str
    tool: ServerTool
    arguments: str


class ToolRounds:
    """Runs all rounds of a response. `tools` are the servers' tools by the names that the model sees; the
    first `earlier` items of the body's input are stored ones, which its `field` named."""

    def __init__(
        self,
        job: Job,
        body: ResponsesRequest,
        using: RequestServers,
        tools: Mapping[str, ServerTool],
        earlier: int,
        field: str,
    ) -> None:
        self._first = job
        self._body = body
        self._using = using
        self._tools = tools
        self._earlier = (earlier, field)
        self._items: list[Item] = list(body.input) if not isinstance(body.input, str) else []
        self._names = {(tool.label, tool.name): shown for shown, tool in tools.items()}
        self._most = MOST_CALLS if body.max_tool_calls is None else min(body.max_tool_calls, MOST_CALLS)
        self._made = 0
        self._sessions: dict[str, McpSession] = {}

    @property
    def exchange(self) -> Exchange:
        """The request's exchange."""
        return self._first.exchange

    async def gather(self, receive: Receive) -> list[Part]:
        """Run to the end and return the whole answer. Raises Cancelled if the client leaves."""
        whole = Part(0)
        await unless_disconnected(receive, lambda: self.run(whole.add))
        return [whole]

    async def run(self, sink: Sink, admitted: Callable[[], None] = lambda: None) -> None:
        """Pass every part to `sink` as it arrives. Raises what `Job.run` and admission raise."""
        async with AsyncExitStack() as sessions:
            job = self._first
            if self._using.approved:
                await self._approved(sessions, sink)
                job.prompt_tokens = 0  # it was only checked: the calls' answers are not in its prompt
                job = await self._next()
            while (following := await self._round(job, sessions, sink, admitted)) is not None:
                job = following

    async def _approved(self, sessions: AsyncExitStack, sink: Sink) -> None:
        """Make the calls that the client has approved."""
        for index, request in enumerate(self._using.approved):
            tool = ServerTool(request.server_label, request.name, approval=True)
            name = self._names.get((tool.label, tool.name))
            call = _Call(request.id, tool, request.arguments)
            outcome = None
            if name is None:
                why = "the server has no such tool, or it is not allowed"
                outcome = CallOutcome(call.id, None, why, INVALID)
            _tell(sink, CallPart(index, request.id, name or "", request.arguments))
            self._items.append(await self._make(call, sessions, sink, request.id, outcome))

    async def _round(
        self, job: Job, sessions: AsyncExitStack, sink: Sink, admitted: Callable[[], None]
    ) -> Job | None:
        """Run one round, and make its calls. Returns the next round's job, None at the end."""
        said, ending = Part(0), Part(0)

        def take(part: Part) -> None:
            nonlocal ending
            said.add(part)
            if part.finish is None:
                sink(part)
            else:  # whether the response ends with it is not known yet
                ending = part

        await job.run(take, admitted)
        if job is not self._first:
            self._first.add_counts(job)
        sink(msgspec.structs.replace(ending, finish=None, stop_reason=None, validation=None))
        end = Part(0, finish=ending.finish, stop_reason=ending.stop_reason, validation=ending.validation)
        if ending.finish != "length":
            calls = said.words.calls
            own = [
                _Call(call.id or "", tool, call.arguments)
                for call in calls
                if (tool := self._tools.get(call.name or "")) is not None
            ]
            free = [call for call in own if not call.tool.approval]
            results = {call.id: await self._make(call, sessions, sink) for call in free}
            if free and len(free) == len(calls):
                self._items += _items(said.words, results)
                if self._left() != 0:
                    return await self._next()
                end.finish = "length"
        sink(end)
        return None

    async def _make(
        self,
        call: _Call,
        sessions: AsyncExitStack,
        sink: Sink,
        approved: str | None = None,
        outcome: CallOutcome | None = None,
    ) -> McpCallItem:
        """Make one call, unless its outcome is known, and tell it. Returns its item."""
        outcome = outcome or await self._outcome(call, sessions)
        self.exchange.keep(len(outcome.output or outcome.error))
        _tell(sink, outcome)
        return McpCallItem(
            server_label=call.tool.label,
            name=call.tool.name,
            arguments=call.arguments,
            id=call.id,
            output=outcome.output,
            error=call_error(outcome),
            approval_request_id=approved,
        )

    async def _outcome(self, call: _Call, sessions: AsyncExitStack) -> CallOutcome:
        if self._made >= self._most:
            return CallOutcome(call.id, None, f"the response may make {self._most} calls", INVALID)
        self._made += 1
        try:
            arguments: Any = msgspec.json.decode(call.arguments or "{}")
        except msgspec.DecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            return CallOutcome(call.id, None, "the arguments are no JSON object", INVALID)
        label, revocations = call.tool.label, self.exchange.services.revocations
        if label not in self._sessions:
            opened = session(self._using.servers[label])
            self._sessions[label] = await sessions.enter_async_context(opened)
        with (
            anyio.CancelScope(deadline=self._first.deadline) as patience,
            revocations.watching(self.exchange.caller.identity, patience.cancel) as watched,
        ):
            try:
                return CallOutcome(call.id, await self._sessions[label].call(call.tool.name, arguments))
            except ToolFailed as failed:
                return CallOutcome(call.id, None, failed.text)
            except McpFailed as failed:
                return CallOutcome(call.id, None, failed.message, failed.code)
        if watched.revoked:
            raise watched.error()
        raise DeadlineExceeded("The request's time was over before its answer was complete.")

    async def _next(self) -> Job:
        """The next round, ready to run."""
        first = self._first
        body = msgspec.structs.replace(
            self._body,
            input=self._items,
            max_output_tokens=self._left(),
            tool_choice=self._choice(),
            model=self._body.model if first.model.alias is None else first.model.ran,  # it chooses once
        )
        job, _ = await chat_job(self.exchange, body, *self._earlier)
        self.exchange.caller.ready()
        job.id, job.created = first.id, first.created
        return job

    def _left(self) -> int | None:
        """How many tokens the answer may still have. None if the request does not say."""
        most = self._body.max_output_tokens
        return None if most is None else max(most - self._first.completion_tokens, 0)

    def _choice(self) -> ToolChoice:
        """The choice after the first round: what had to be called was called."""
        choice = self._body.tool_choice
        if self._made >= self._most or choice == "none":
            return "none"
        return ChosenTools("auto", choice.tools) if isinstance(choice, ChosenTools) else "auto"


def _tell(sink: Sink, piece: CallPart | CallOutcome) -> None:
    part = Part(0)
    part.words.pieces.append(piece)
    sink(part)


def _items(words: OutputPieces, results: Mapping[str, McpCallItem]) -> list[Item]:
    """What the model said in a round, and what its calls answered, as items of the next round's input."""
    found: list[Item] = []
    for piece in words.pieces:
        match piece:
            case Span(reasoning=True):
                found.append(ReasoningItem(content=[ReasoningText(piece.text)]))
            case Span():
                found.append(MessageItem(role="assistant", content=piece.text))
            case CallPart():
                found.append(results[piece.id or ""])
    return found
