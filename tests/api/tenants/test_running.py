"""What limits and revocations do to requests that run, over HTTP."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import serving
from patience import PATIENCE, eventually
from uploads import UploadFixture, open_fixture

from personae.api.app import create_app
from personae.api.tenants import revocations
from personae.api.tenants.data import DataDir
from personae.api.tenants.store import TenantStore

ASKED: dict[str, Any] = {"model": "base", "prompt": "hi", "max_tokens": 180}


class Server:
    """A server with keys, whose engine says `Hello` and then nothing."""

    def __init__(self, fixture: UploadFixture, address: str) -> None:
        self.fixture = fixture
        self.address = address

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=PATIENCE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with open_fixture(tmp_path) as fixture:
        fixture.engine = FakeEngine(hold_after=5)
        fixture.app = create_app(fixture.engine, tenants=fixture.tenants)
        running = fixture.app.state.services.revocations.running()
        with serving(fixture.app, None, running) as address:
            yield Server(fixture, address)


def events(answer: httpx.Response) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def by_route(server: Server, tenant: str, key: str) -> None:
    """An admin revokes it over HTTP."""
    with server.client(server.fixture.key("boss", "admin")) as admin:
        path = f"/v1/tenants/{tenant}" if key == "" else f"/v1/keys/{key}"
        assert admin.delete(path).status_code == 200


def by_command(server: Server, tenant: str, key: str) -> None:
    """Another process revokes it, as `personae keys revoke` does."""
    data = DataDir(server.fixture.data.path)
    try:
        store = TenantStore(data)
        store.revoke_tenant(tenant) if key == "" else store.revoke_key(key)
    finally:
        data.close()


@pytest.mark.parametrize("revoke", [by_route, by_command])
@pytest.mark.parametrize("whole_tenant", [False, True], ids=["key", "tenant"])
def test_a_revoked_keys_answers_end_within_a_second_with_an_error(
    server: Server, revoke: Callable[[Server, str, str], None], whole_tenant: bool
) -> None:
    key, other = server.fixture.key("ann"), server.fixture.key("bob")
    found: dict[str, Any] = {}

    def stream() -> None:
        with server.client(key) as client:
            with client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as answer:
                found["stream"] = events(answer)
            found["ended"] = time.monotonic()

    def whole() -> None:
        with server.client(key) as client:
            found["whole"] = client.post("/v1/completions", json=ASKED)

    with ExitStack() as stack:
        client = stack.enter_context(server.client(other))
        another = stack.enter_context(client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}))
        threads = [threading.Thread(target=work) for work in (stream, whole)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(server.fixture.engine.live) == 3, "all run")
        revoke(server, "ann", "" if whole_tenant else key.split("_")[1])
        revoked = time.monotonic()
        for thread in threads:
            thread.join(PATIENCE)
        assert found["ended"] - revoked < revocations.CHECK_SECONDS + 2  # of which 2 are for a busy machine
        error = found["stream"][-1]["error"]
        told = "The API key was revoked while the request ran."
        assert (error["code"], error["message"]) == ("invalid_api_key", told)
        assert found["stream"][0]["choices"][0]["text"] == "H"
        assert (found["whole"].status_code, found["whole"].json()["error"]["message"]) == (401, told)
        assert len(server.fixture.engine.live) == 1, "another tenant's runs on"
        assert next(another.iter_lines()).startswith("data: ")


def test_a_rotated_keys_answers_run_on_while_it_is_valid(server: Server) -> None:
    key = server.fixture.key("ann")
    with (
        server.client(key) as client,
        client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as answer,
        server.client(server.fixture.key("boss", "admin")) as admin,
    ):
        lines = answer.iter_lines()
        next(lines)
        path = f"/v1/keys/{key.split('_')[1]}/rotate"
        assert admin.post(path, json={"overlap": 60}).status_code == 201
        time.sleep(3 * revocations.CHECK_SECONDS)
        assert len(server.fixture.engine.live) == 1


def test_requests_that_come_at_once_exceed_the_tokens_of_a_minute_by_one_answer_at_most(
    server: Server,
) -> None:
    engine, limit = server.fixture.engine, 1000
    engine.hold_after = 1  # all are begun before any has ended
    key = server.fixture.key("ann", tokens_per_minute=limit)
    statuses: list[int] = []

    def ask() -> None:
        with server.client(key) as client:
            stream = client.stream("POST", "/v1/completions", json=ASKED | {"stream": True})
            with stream as answer:
                statuses.append(answer.status_code)
                if answer.status_code == 200:
                    over.wait(PATIENCE)

    over = threading.Event()
    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(statuses) == 40, "all have begun or were refused")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200, 429}
    most = sum(log.prompt_length + log.params.max_tokens for log in engine.submitted)
    assert limit / 2 < most <= limit + 180
