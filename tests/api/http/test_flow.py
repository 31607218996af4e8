"""A stream's parts are written at once while the connection takes them, and gathered while it does not."""

from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.requests import Request

from personae.api.choices import Part
from personae.api.http.flow import FLOW
from personae.api.output_pieces import OutputPieces
from personae.api.stream import AnswerBuilder, EventStream
from personae.api.wire.answers import CachedTokens

pytestmark = pytest.mark.anyio


class Builder(AnswerBuilder):
    """Writes how many tokens a part has."""

    def whole(self, parts: list[Part], pack: Any = None) -> CachedTokens:
        raise AssertionError("a stream is not written whole")

    def of(self, part: Part) -> list[CachedTokens]:
        return [CachedTokens(len(part.tokens))] if part.tokens else []

    def last(self) -> list[CachedTokens]:
        return []


class Connection:
    """Keeps what is sent. While `flow.write_paused` is set, `send` waits until `goes_on`. With `holds`, what
    is written waits for `flush`."""

    def __init__(self) -> None:
        self.flow = SimpleNamespace(write_paused=False, write=self.write, flush=self.flush)
        self.goes_on = anyio.Event()
        self.sent: list[bytes] = []
        self.holds = False
        self.held: list[bytes] = []

    async def send(self, message: Any) -> None:
        if self.flow.write_paused:
            await self.goes_on.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    def write(self, body: bytes) -> None:
        assert not self.flow.write_paused
        (self.held if self.holds else self.sent).append(body)

    def flush(self) -> None:
        self.sent += self.held
        self.held.clear()

    async def receive(self) -> Any:
        await anyio.sleep_forever()

    async def serve(self, work: Any) -> list[int]:
        """Answer with what `work` makes. Returns how many tokens each event had."""
        scope = {"type": "http", "state": {"request_id": "r"}, "extensions": {FLOW: self.flow}}
        await EventStream(Request(scope), work, Builder())(scope, self.receive, self.send)
        *events, done = self.sent
        assert done == b"data: [DONE]\n\n"
        return [int(event[len(b'data: {"cached_tokens":') : -len(b"}\n\n")]) for event in events]


def part(count: int) -> Part:
    return Part(0, OutputPieces(), [1] * count)


async def test_a_part_is_on_its_way_before_the_next_one_is_made() -> None:
    connection = Connection()

    async def work(sink: Any, admitted: Any) -> None:
        sink(part(1))  # the response begins with it, in the other task
        while not connection.sent:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        for count in (2, 3):
            before = len(connection.sent)
            sink(part(count))
            assert len(connection.sent) == before + 1
        sink(part(0))

    assert await connection.serve(work) == [1, 2, 3]


async def test_parts_are_gathered_while_the_connection_is_paused_and_stay_in_order() -> None:
    connection = Connection()

    async def work(sink: Any, admitted: Any) -> None:
        sink(part(1))
        while not connection.sent:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        connection.flow.write_paused = True
        sink(part(2))
        await anyio.lowlevel.checkpoint()  # it is being sent
        await anyio.lowlevel.checkpoint()
        connection.flow.write_paused = False  # but the one before it still waits
        sink(part(3))
        sink(part(4))
        assert len(connection.sent) == 1
        connection.goes_on.set()
        while len(connection.sent) < 3:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        sink(part(5))

    assert await connection.serve(work) == [1, 2, 7, 5]


async def test_what_was_written_is_sent_before_the_end_of_the_stream() -> None:
    connection = Connection()
    connection.holds = True

    async def work(sink: Any, admitted: Any) -> None:
        sink(part(1))
        while not connection.sent:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        sink(part(2))
        assert len(connection.held) == 1

    assert await connection.serve(work) == [1, 2]
