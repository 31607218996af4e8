"""What a client was told is stored is on the disk, and nobody else's doing takes it away."""

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from full_disk import FullConnection
from live_server import serving
from patience import PATIENCE, eventually
from tool_chat import TAGS, TEMPLATE
from uploads import UploadFixture, open_fixture

from personae.api.app import create_app
from personae.api.responses import background
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.store import KeptResponse, ResponseStore
from personae.api.tenants.data import DATABASE

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "base", "input": "hi"}
FULL = "The server's disk is full; delete something, or try again later."


class Server:
    """A server, and what is on its disk."""

    def __init__(self, fixture: UploadFixture, address: str) -> None:
        self.fixture = fixture
        self.address = address

    def client(self, tenant: str = "ann") -> httpx.Client:
        headers = {"authorization": f"Bearer {self.fixture.key(tenant)}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=PATIENCE)

    def on_disk(self, query: str, *values: str) -> list[Any]:
        """What a process that starts now would find."""
        with closing(sqlite3.connect(self.fixture.data.path / DATABASE)) as db:
            return db.execute(query, values).fetchall()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)
    with open_fixture(tmp_path) as fixture:
        store = ResponseStore(fixture.data)
        fixture.engine = engine
        fixture.app = create_app(engine, tenants=fixture.tenants, stored=store)
        running = BackgroundResponses(store).runs(fixture.app)
        with serving(fixture.app, None, running) as address:
            yield Server(fixture, address)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when this is called on SQLite writes nothing."""
    connect = sqlite3.connect

    def begin() -> None:
        monkeypatch.setattr(FullConnection, "always", True)
        monkeypatch.setattr(sqlite3, "connect", lambda *a, **b: connect(*a, factory=FullConnection, **b))

    return begin


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = (line for line in answer.text.splitlines() if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_and_its_turn_are_on_the_disk_when_it_arrives(server: Server, stream: bool) -> None:
    with server.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        asked = ASKED | {"conversation": conversation, "stream": stream}
        for turn in range(1, 6):
            answer = client.post(PATH, json=asked)
            done = events(answer)[-1]["response"] if stream else answer.json()
            assert server.on_disk("select count(*) from responses where id = ?", done["id"]) == [(1,)]
            query = "select count(*) from conversation_items where conversation = ?"
            assert server.on_disk(query, conversation) == [(2 * turn,)]


def test_a_response_that_is_queued_is_on_the_disk(server: Server) -> None:
    server.fixture.engine.hold_after = 0
    with server.client() as client:
        for _ in range(5):
            id = client.post(PATH, json=ASKED | {"background": True}).json()["id"]
            assert server.on_disk(
                "select count(*) from responses where request is not null and id = ?", id
            ) == [(1,)]


def test_on_a_full_disk_what_is_to_be_stored_is_an_error(server: Server, full: Callable[[], None]) -> None:
    with server.client() as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        full()
        for fields in (
            {},
            {"background": True},
            {"conversation": conversation},
            {"conversation": conversation, "store": False},
        ):
            answer = client.post(PATH, json=ASKED | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["message"]) == (503, "storage_failed", FULL), (
                fields
            )
            assert answer.headers["retry-after"] == "30"
        last = events(client.post(PATH, json=ASKED | {"stream": True}))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": FULL}
        assert client.post(PATH, json=ASKED | {"store": False}).status_code == 200
        last = events(client.post(PATH, json=ASKED | {"store": False, "stream": True}))[-1]
        assert last["type"] == "response.completed"
    assert server.on_disk("select count(*) from responses") == [(0,)]
    assert server.on_disk("select count(*) from conversation_items") == [(0,)]


def test_a_background_answer_waits_for_room_on_the_disk_and_is_not_made_again(
    server: Server, full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_: Any) -> str:
        full()  # while the answer is being made
        return "Hello, world!"

    monkeypatch.setattr("personae.errors.StorageFailed.retry_after", 0.05)
    engine, failures = server.fixture.engine, server.fixture.data.failures
    engine.answer = answer
    with server.client() as client:
        id = client.post(PATH, json=ASKED | {"background": True}).json()["id"]
        eventually(lambda: failures.counts().get("responses", 0) > 2, "it was tried")
        assert client.get(f"{PATH}/{id}").json()["status"] == "in_progress"
        monkeypatch.undo()
        eventually(lambda: client.get(f"{PATH}/{id}").json()["status"] == "completed", "it is stored")
    assert len(engine.submitted) == 1


def test_an_error_of_ours_in_a_background_response_does_not_end_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, update = Counter[str](), ResponseStore.update

    async def broken(store: ResponseStore, kept: KeptResponse, *added: Any) -> None:
        """Neither what has begun nor, the first time, that it has failed can be stored."""
        tried[kept.id] += 1
        if tried[kept.id] <= 2:
            raise ValueError("planted")
        await update(store, kept, *added)

    monkeypatch.setattr(background, "_AFTER_AN_ERROR", 0.1)
    monkeypatch.setattr(ResponseStore, "update", broken)
    with server.client() as client:
        ids = [client.post(PATH, json=ASKED | {"background": True}).json()["id"] for _ in range(2)]
        for id in ids:
            eventually(lambda id=id: client.get(f"{PATH}/{id}").json()["status"] == "completed", "it is made")
    assert all(tried[id] > 2 for id in ids)


def test_a_background_response_that_an_error_of_ours_ended_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, update = Counter[str](), ResponseStore.update

    async def broken(store: ResponseStore, kept: KeptResponse, *added: Any) -> None:
        tried[kept.id] += 1
        if tried[kept.id] == 1:
            raise ValueError("planted")
        await update(store, kept, *added)

    monkeypatch.setattr(ResponseStore, "update", broken)
    with server.client() as client:
        id = client.post(PATH, json=ASKED | {"background": True}).json()["id"]
        eventually(lambda: client.get(f"{PATH}/{id}").json()["status"] == "failed", "it has failed")
        error = client.get(f"{PATH}/{id}").json()["error"]
    assert error["code"] == "server_error"
    assert "planted" not in error["message"]


def test_a_response_that_is_deleted_while_it_is_stored_does_not_come_back(server: Server) -> None:
    with server.client() as client:
        for _ in range(20):
            id = client.post(PATH, json=ASKED | {"background": True}).json()["id"]
            assert client.delete(f"{PATH}/{id}").status_code == 200
        eventually(lambda: not server.fixture.engine.live, "all have ended")
        assert client.get(f"{PATH}/{id}").status_code == 404
    assert server.on_disk("select count(*) from responses") == [(0,)]


def test_no_turn_is_lost_while_another_tenant_deletes_conversations(server: Server) -> None:
    """The turns of `bob`, and every answer to both tenants, while `ann` makes, uses and deletes."""
    over, answers, lost = threading.Event(), list[int](), list[str]()

    def churn() -> None:
        with server.client("ann") as client:
            while not over.is_set():
                made = client.post("/v1/conversations", json={})
                asked = ASKED | {"conversation": made.json()["id"]}
                answers.append(client.post(PATH, json=asked).status_code)
                answers.append(client.delete(f"/v1/conversations/{made.json()['id']}").status_code)

    server.fixture.key("ann")
    threads = [threading.Thread(target=churn) for _ in range(3)]
    with server.client("bob") as client:
        for thread in threads:
            thread.start()
        try:
            for number in range(60):
                conversation = client.post("/v1/conversations", json={}).json()["id"]
                asked = ASKED | {"conversation": conversation, "input": f"turn {number}"}
                answers.append(client.post(PATH, json=asked).status_code)
                items = client.get(f"/v1/conversations/{conversation}/items").json()["data"]
                if [item["role"] for item in items] != ["assistant", "user"]:
                    lost.append(conversation)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert lost == []
    assert set(answers) == {200}
