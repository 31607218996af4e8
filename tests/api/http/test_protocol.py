"""What streams write in one turn of the event loop is sent together after it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from personae.api.http.protocol import CycleFlow, TurnWrites


class Connection:
    """Notes what is written to it in `log`, which others share."""

    def __init__(self, name: str, writes: TurnWrites, log: list[tuple[str, bytes]]) -> None:
        self.name, self.log = name, log
        self.closing = False
        cycle = SimpleNamespace(disconnected=False, transport=self, flow=SimpleNamespace(write_paused=False))
        self.flow = CycleFlow(cast(Any, cycle), writes)

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.log.append((self.name, data))


def test_streams_are_sent_together_after_the_turn_in_which_they_were_written() -> None:
    async def run() -> None:
        writes, log = TurnWrites(), list[tuple[str, bytes]]()
        one, two = Connection("one", writes, log), Connection("two", writes, log)
        one.flow.write(b"a")
        two.flow.write(b"bc")
        one.flow.write(b"d")
        assert log == []
        await asyncio.sleep(0)
        assert log == [("one", b"1\r\na\r\n1\r\nd\r\n"), ("two", b"2\r\nbc\r\n")]
        one.flow.write(b"e")
        await asyncio.sleep(0)
        assert log[2:] == [("one", b"1\r\ne\r\n")]

    asyncio.run(run())


def test_what_is_flushed_is_sent_at_once_and_only_once() -> None:
    async def run() -> None:
        writes, log = TurnWrites(), list[tuple[str, bytes]]()
        one = Connection("one", writes, log)
        one.flow.write(b"a")
        one.flow.flush()
        assert log == [("one", b"1\r\na\r\n")]
        await asyncio.sleep(0)
        assert len(log) == 1

    asyncio.run(run())


def test_a_connection_that_closes_keeps_no_other_from_its_part() -> None:
    async def run() -> None:
        writes, log = TurnWrites(), list[tuple[str, bytes]]()
        one, two = Connection("one", writes, log), Connection("two", writes, log)
        one.flow.write(b"a")
        two.flow.write(b"b")
        one.closing = True
        await asyncio.sleep(0)
        assert log == [("two", b"1\r\nb\r\n")]

    asyncio.run(run())
