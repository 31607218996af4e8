"""Replacing servers one after the other under load: no client notices."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing

import anyio
import httpx
from fake_engine import FakeEngine, FakeStream
from patience import PATIENCE, eventually

from personae.api.app import create_app
from personae.api.http.address import bind, url
from personae.api.http.server import HttpServer
from personae.api.settings import ApiSettings
from personae.engine.sequence import Delta, SequenceLog

ANSWER = "It was a dark and stormy night."
ASK = {"model": "base", "prompt": "Once", "max_tokens": 100}


class Unhurried:
    """A stream whose tokens take a while, so that answers run while servers stop."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self.stop, self.take_at_once = stream.stop, stream.take_at_once

    def __aiter__(self) -> "Unhurried":
        return self

    async def __anext__(self) -> Delta:
        await anyio.sleep(0.003)
        return await anext(self._stream)


class UnhurriedEngine(FakeEngine):
    @asynccontextmanager
    async def stream(self, logs: Sequence[SequenceLog]) -> AsyncIterator[Unhurried]:
        async with super().stream(logs) as stream:
            yield Unhurried(stream)


class Replica:
    """A server in a thread of its own that can be stopped as by SIGTERM."""

    def __init__(self) -> None:
        self.engine = UnhurriedEngine(ANSWER)
        listener = bind("127.0.0.1", 0)
        self.url = url(listener)
        listening = threading.Event()
        app, settings = create_app(self.engine), ApiSettings()
        self._loop: asyncio.AbstractEventLoop | None = None

        def run() -> None:
            async def serve() -> None:
                self._loop = asyncio.get_running_loop()
                self.server = HttpServer(app, settings, drain_seconds=PATIENCE, on_ready=listening.set)
                await self.server.serve(sockets=[listener])

            asyncio.run(serve())

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert listening.wait(PATIENCE), "the server did not start"

    def terminate(self) -> None:
        """Drain, and wait for the end."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self.engine.live == set()


class Balancer:
    """As load balancers do it: one replica after the other; who refuses, or hangs up, is passed over."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self._turn = itertools.count()
        self.passed_on = 0

    def complete(self, client: httpx.Client, stream: bool) -> str:
        """The text of an answer, of whichever replica takes the request."""
        first = next(self._turn)
        for turn in range(first, first + 20):
            replica = self.replicas[turn % len(self.replicas)]
            try:
                with client.stream(
                    "POST", f"{replica.url}/v1/completions", json=ASK | {"stream": stream}
                ) as response:
                    if response.status_code != 503:
                        assert response.status_code == 200
                        return self._text(response, stream)
                    assert response.headers["retry-after"] == "1"
            except httpx.TransportError:
                pass  # nobody had taken it, see below
            self.passed_on += 1
        raise AssertionError("no replica takes it")

    def _text(self, response: httpx.Response, stream: bool) -> str:
        if not stream:
            response.read()
            return str(response.json()["choices"][0]["text"])
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_two_replicas_are_replaced_one_after_the_other_and_no_request_fails() -> None:
    balancer = Balancer([Replica(), Replica()])
    engines = [replica.engine for replica in balancer.replicas]
    stop = threading.Event()
    texts: list[str] = []
    failures: list[BaseException] = []

    def load(stream: bool) -> None:
        with closing(httpx.Client(timeout=PATIENCE)) as client:
            while not stop.is_set():
                try:
                    texts.append(balancer.complete(client, stream))
                except BaseException as error:
                    failures.append(error)
                    return

    clients = [threading.Thread(target=load, args=(number % 2 == 0,), daemon=True) for number in range(6)]
    for client in clients:
        client.start()
    try:
        for place in range(2):
            leaving = balancer.replicas[place]
            served = len(texts)
            eventually(lambda: len(texts) > served + 6, "the load runs")  # noqa: B023  asked at once
            eventually(lambda: bool(leaving.engine.live), "it has something to finish")  # noqa: B023  likewise
            passed_on = balancer.passed_on
            leaving.terminate()
            eventually(lambda: balancer.passed_on > passed_on, "it refuses, or is gone")  # noqa: B023  likewise
            balancer.replicas[place] = Replica()
            engines.append(balancer.replicas[place].engine)
    finally:
        stop.set()
        for client in clients:
            client.join(PATIENCE)
        for replica in balancer.replicas:
            replica.terminate()
    assert failures == []
    assert set(texts) == {ANSWER}
    assert len(texts) == sum(len(engine.submitted) for engine in engines), "whoever was taken was answered"
    assert len(texts) > 12
