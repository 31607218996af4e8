"""Draining, seen from inside."""

from functools import partial

import anyio
import pytest
from patience import PATIENCE
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from personae.api.http.drain import DrainMiddleware
from personae.errors import Overloaded

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]


class App:
    """Answers when it may."""

    def __init__(self) -> None:
        self.may = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.may.wait()
        await PlainTextResponse("done")(scope, receive, send)


async def ask(drain: DrainMiddleware, path: str = "/v1/completions") -> int:
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b""}

    await drain({"type": "http", "path": path, "method": "GET", "headers": []}, receive, send)
    status = sent[0]["status"]
    assert isinstance(status, int)
    return status


async def test_it_is_idle_when_the_last_request_in_hand_has_its_answer() -> None:
    app = App()
    drain = DrainMiddleware(app)
    answers: list[int] = []

    async def one() -> None:
        answers.append(await ask(drain))

    with anyio.fail_after(PATIENCE):
        await drain.idle()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            drain.draining = True
            assert await ask(drain) == 503
            assert await ask(drain, "/ready") == 503
            with anyio.move_on_after(0.05) as waited:
                await drain.idle()
            assert waited.cancelled_caught
            app.may.set()
            await drain.idle()
        assert answers == [200, 200]
        assert await ask(drain, "/health") == 200


async def test_an_answer_that_begins_while_it_drains_is_its_connections_last() -> None:
    app = App()
    drain = DrainMiddleware(app)
    seen: list[list[tuple[bytes, bytes]]] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["headers"])  # type: ignore[arg-type]  # as ASGI has it

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b""}

    app.may.set()
    scope = {"type": "http", "path": "/v1/completions", "method": "GET", "headers": []}
    await drain(scope, receive, send)
    app.may = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, scope, receive, send)
        await anyio.wait_all_tasks_blocked()
        drain.draining = True
        app.may.set()
    assert [(b"connection", b"close") in headers for headers in seen] == [False, True]


class Reader:
    """Reads its request's body, then answers when it may."""

    def __init__(self) -> None:
        self.may = anyio.Event()
        self.refused: Overloaded | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except Overloaded as error:
            self.refused = error
            return
        with anyio.move_on_after(3600):
            await receive()  # as long answers do: it would be told that the client has left
            raise AssertionError("nobody left")


async def read(drain: DrainMiddleware, *pieces: bool) -> None:
    waiting = list(pieces)

    async def receive() -> dict[str, object]:
        if waiting:
            return {"type": "http.request", "body": b"x", "more_body": waiting.pop(0)}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        raise AssertionError("nothing is sent here")

    await drain({"type": "http", "path": "/v1/adapters"}, receive, send)


@pytest.mark.parametrize("pieces", [(), (True,), (True, True)])
async def test_a_request_that_stalls_is_refused_when_the_time_is_over(pieces: tuple[bool, ...]) -> None:
    reader = Reader()
    drain = DrainMiddleware(reader)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(read, drain, *pieces))
            await anyio.wait_all_tasks_blocked()
            assert reader.refused is None
            drain.end()
    assert reader.refused is not None
    assert reader.refused.code == "shutting_down"
    assert drain.active == 0


async def test_a_request_that_is_complete_is_not_ended_with_those_that_stall() -> None:
    reader = Reader()
    drain = DrainMiddleware(reader)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(read, drain, True, False))
        await anyio.wait_all_tasks_blocked()
        drain.end()
        await anyio.wait_all_tasks_blocked()
        assert (drain.active, reader.refused) == (1, None)
        tasks.cancel_scope.cancel()
