"""While the reader sleeps, its function takes the deltas. Each delta is taken once, in order."""

import anyio
import pytest
from virtual_clock import virtual_clock

from personae.actors.frontend.inbox import Inbox
from personae.engine.sequence import Delta

pytestmark = virtual_clock


class Reader:
    """Takes at once what has a single token, and reads the rest. `got` has all tokens."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.inbox.at_once = self.take
        self.got: list[int] = []
        self.woke = 0

    def take(self, delta: Delta) -> bool:
        if len(delta.tokens) != 1:
            return False
        if delta.tokens == (0,):
            raise ValueError("a bad token")
        self.got += delta.tokens
        return True

    async def read(self) -> None:
        while True:
            deltas = await self.inbox.get()
            self.woke += 1
            await anyio.sleep(1)  # it does something with them
            for delta in deltas:
                self.got += delta.tokens

    def put(self, *tokens: int) -> None:
        self.inbox.put(Delta("a", tokens))


async def test_a_reader_that_sleeps_need_not_wake_for_what_its_function_takes() -> None:
    reader = Reader()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.read)
        await anyio.sleep(1)
        reader.put(1)
        reader.put(2)
        assert reader.got == [1, 2]
        await anyio.sleep(5)
        assert reader.woke == 0
        tasks.cancel_scope.cancel()


async def test_deltas_stay_in_order_when_the_reader_must_take_one_itself() -> None:
    reader = Reader()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.read)
        await anyio.sleep(1)
        reader.put(1)
        reader.put(2, 3)
        reader.put(4)  # the reader has been woken and has not run
        await anyio.sleep(0.5)
        reader.put(5)  # it is busy
        assert reader.got == [1]
        await anyio.sleep(5)
        reader.put(6)
        assert reader.got == [1, 2, 3, 4, 5, 6]
        tasks.cancel_scope.cancel()


async def test_what_the_function_raises_the_reader_raises() -> None:
    reader = Reader()
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            with pytest.raises(ValueError, match="a bad token"):
                await reader.read()
            tasks.cancel_scope.cancel()

        tasks.start_soon(read)
        await anyio.sleep(1)
        reader.put(1)
        reader.put(0)
        reader.put(2)
        await anyio.sleep(5)
    assert reader.got == [1]


async def test_nothing_is_taken_for_a_reader_that_was_cancelled() -> None:
    reader = Reader()
    with anyio.move_on_after(1):
        await reader.read()
    reader.put(1)
    assert reader.got == []
