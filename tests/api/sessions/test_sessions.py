"""Sessions over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from asgi import Visit, client
from fake_engine import FakeEngine
from httpx import AsyncClient

from personae.api.app import create_app
from personae.api.sessions.store import SessionStore, session_key
from personae.api.settings import ApiSettings
from personae.api.tenants.data import DataDir, serving
from personae.errors import NotFound, Overloaded, StorageFailed

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
OPTIONS = {"mode": "implicit", "ttl": "30m", "comparison_response_id": None, "prewarm": False}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_the_session_of_a_body_reaches_the_engine(path: str) -> None:
    engine = FakeEngine()
    body = CHAT if path.endswith("completions") else {"model": "base", "input": "hi"}
    async with client(create_app(engine, ApiSettings(session_ttl=60))) as asking:
        long = {"prompt_cache_options": {"ttl": "12h"}}
        for more in ({}, {"prompt_cache_options": OPTIONS}, long, {"prompt_cache_retention": "in_memory"}):
            answer = await asking.post(path, json={**body, "prompt_cache_key": "s", **more})
            assert answer.status_code == 200, answer.text
        await asking.post(path, json={**body, "prompt_cache_key": "s"}, headers={"x-session-id": "header"})
        await asking.post(path, json=body)
    logs = engine.submitted
    assert [log.session for log in logs] == [*[session_key("s")] * 4, session_key("header"), None]
    assert [log.session_seconds for log in logs] == [60, 1800, 43_200, 43_200, 60, 0]
    assert [log.in_memory for log in logs] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt_cache_key", "", "prompt_cache_key"),
        ("prompt_cache_key", "k" * 257, "prompt_cache_key"),
        ("prompt_cache_key", 5, "prompt_cache_key"),
        ("prompt_cache_retention", "48h", "prompt_cache_retention"),
        ("prompt_cache_options", {"mode": "explicit"}, "prompt_cache_options.mode"),
        ("prompt_cache_options", {"ttl": "1h"}, "prompt_cache_options.ttl"),
        ("prompt_cache_options", {"prewarm": True}, "prompt_cache_options.prewarm"),
        (
            "prompt_cache_options",
            {"comparison_response_id": "resp_1"},
            "prompt_cache_options.comparison_response_id",
        ),
        ("prompt_cache_options", {"size": 1}, "prompt_cache_options.size"),
    ],
)
async def test_bad_input_is_refused_with_the_name_of_the_field(field: str, value: Any, param: str) -> None:
    engine = FakeEngine()
    async with client(create_app(engine)) as asking:
        answer = await asking.post("/v1/chat/completions", json={**CHAT, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not engine.submitted


async def test_options_without_a_session_are_reported_as_ignored() -> None:
    async with client(create_app(FakeEngine())) as asking:
        answer = await asking.post("/v1/chat/completions", json={**CHAT, "prompt_cache_options": OPTIONS})
    assert answer.headers["x-personae-ignored"] == "prompt_cache_options"


async def test_a_session_is_shown_changed_and_deleted() -> None:
    engine = FakeEngine()
    async with client(create_app(engine, ApiSettings(session_ttl=60))) as asking:
        assert (await asking.get("/v1/sessions/a/b")).status_code == 404
        for _ in range(2):
            await asking.post("/v1/chat/completions", json={**CHAT, "prompt_cache_key": "a/b"})
        found = (await asking.get("/v1/sessions/a/b")).json()
        assert (found["id"], found["requests"], found["ttl"]) == ("a/b", 2, 60)
        assert found["expires_at"] == found["last_used_at"] + 60
        assert found["prompt_tokens"] > 0
        changed = await asking.post("/v1/sessions/a/b", json={"ttl": 7200})
        assert changed.json()["ttl"] == 7200
        await asking.post("/v1/chat/completions", json={**CHAT, "prompt_cache_key": "a/b"})
        assert engine.submitted[-1].session_seconds == 7200, "and after later requests"
        assert [each["id"] for each in (await asking.get("/v1/sessions")).json()["data"]] == ["a/b"]
        assert (await asking.delete("/v1/sessions/a/b")).json()["deleted"] is True
        assert (await asking.delete("/v1/sessions/a/b")).status_code == 404
        assert (await asking.get("/v1/sessions")).json()["data"] == []
    key = session_key("a/b")
    assert engine.kept_sessions == [("default", key, 7200), ("default", key, -1)]


@asynccontextmanager
async def one_that_runs(engine: FakeEngine) -> AsyncIterator[tuple[AsyncClient, Visit]]:
    """A server, and a first request of the session `s` that runs there until its client leaves."""
    app = create_app(engine, ApiSettings(session_ttl=60))
    visit = Visit("/v1/chat/completions", {**CHAT, "prompt_cache_key": "s"})
    async with client(app) as asking, anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run, app)
        await anyio.wait_all_tasks_blocked()
        yield asking, visit


async def test_a_session_is_known_from_its_first_request_on_and_deleted_while_that_runs() -> None:
    engine, key = FakeEngine(hold_after=1), session_key("s")
    async with one_that_runs(engine) as (asking, visit):
        assert (await asking.get("/v1/sessions/s")).json()["requests"] == 0
        assert (await asking.delete("/v1/sessions/s")).json()["deleted"] is True
        assert (await asking.delete("/v1/sessions/s")).status_code == 404
        assert engine.kept_sessions == [("default", key, -1)]
        visit.leave()
        await anyio.wait_all_tasks_blocked()
        assert engine.kept_sessions == [("default", key, -1)] * 2, "an engine may have got it after the first"
        assert (await asking.get("/v1/sessions/s")).status_code == 404, "its end does not bring it back"


async def test_a_ttl_that_is_set_while_a_request_runs_holds_after_it() -> None:
    engine, key = FakeEngine(hold_after=1), session_key("s")
    async with one_that_runs(engine) as (asking, visit):
        assert (await asking.post("/v1/sessions/s", json={"ttl": 7200})).json()["ttl"] == 7200
        visit.leave()
        await anyio.wait_all_tasks_blocked()
        assert (await asking.get("/v1/sessions/s")).json()["ttl"] == 7200
    assert engine.kept_sessions == [("default", key, 7200)] * 2


async def test_a_request_that_the_engine_refuses_begins_no_session() -> None:
    engine = FakeEngine(refuse=Overloaded("The queue is full."))
    async with client(create_app(engine, ApiSettings(session_ttl=60))) as asking:
        answer = await asking.post("/v1/chat/completions", json={**CHAT, "prompt_cache_key": "s"})
        assert answer.status_code == 503
        assert (await asking.get("/v1/sessions")).json()["data"] == []


def test_a_session_that_runs_is_not_over() -> None:
    now = [1000.0]
    store = SessionStore(60, clock=lambda: now[0])
    turn = store.begin("ann", "s", 60)
    now[0] += 600
    assert store.find("ann", "s").requests == 0
    store.end(turn, prompt=1, cached=0, completion=1)
    assert store.find("ann", "s").expires_at == 1660


@pytest.mark.parametrize("body", [{}, {"ttl": -1}, {"ttl": 10**9}, {"ttl": "1h"}, {"ttl": 1.5}])
async def test_a_ttl_out_of_range_is_refused(body: dict[str, Any]) -> None:
    async with client(create_app(FakeEngine())) as asking:
        await asking.post("/v1/chat/completions", json={**CHAT, "prompt_cache_key": "s"})
        answer = await asking.post("/v1/sessions/s", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttl")


async def test_a_server_without_sessions_keeps_none() -> None:
    engine = FakeEngine()
    async with client(create_app(engine, ApiSettings(session_ttl=0))) as asking:
        await asking.post("/v1/chat/completions", json={**CHAT, "prompt_cache_key": "s"})
        assert (await asking.get("/v1/sessions/s")).status_code == 404
    assert engine.submitted[0].session_seconds == 0


async def test_sessions_belong_to_their_tenant_end_with_their_time_and_are_bounded() -> None:
    now = [1000.0]
    store = SessionStore(60, most=3, clock=lambda: now[0])

    def end(tenant: str, name: str, ttl: int = 60) -> None:
        store.end(store.begin(tenant, name, ttl), prompt=1, cached=0, completion=1)

    end("ann", "s")
    with pytest.raises(NotFound):
        store.find("bob", "s")
    for number in range(5):
        end("bob", f"{number}")
    assert [session.id for session in store.list("bob")] == ["2", "3", "4"]
    assert store.find("ann", "s").requests == 1
    now[0] += 30
    store.keep("ann", "s", 600)
    now[0] += 60
    assert store.list("bob") == []
    assert store.find("ann", "s").ttl == 600
    now[0] += 600
    with pytest.raises(NotFound):
        store.find("ann", "s")


def test_sessions_and_their_counts_survive_a_restart(tmp_path: Path) -> None:
    now = [1000.0]

    def store(data: DataDir) -> SessionStore:
        return SessionStore(60, most=3, clock=lambda: now[0], data=data)

    def end(sessions: SessionStore, name: str, ttl: int = 60) -> None:
        now[0] += 1.0
        sessions.end(sessions.begin("ann", name, ttl), prompt=10, cached=8, completion=2)

    with serving(tmp_path) as data, store(data).running() as sessions:
        for name in ("deleted", "short", "long\0 name"):
            end(sessions, name)
        sessions.keep("ann", "long\0 name", 7200)
        sessions.flush()
        end(sessions, "long\0 name", 7200)
        sessions.remove("ann", "deleted")
        end(sessions, "again")
        sessions.remove("ann", "again")
        end(sessions, "again")
        before = [msgspec.to_builtins(each) for each in sessions.list("ann")]
    with serving(tmp_path) as data, store(data).running() as sessions:
        assert [msgspec.to_builtins(each) for each in sessions.list("ann")] == before
        assert [each["requests"] for each in before] == [1, 2, 1]
        end(sessions, "new")  # one too many
        now[0] += 3600
        end(sessions, "short")  # begins anew: its time is over
    with serving(tmp_path) as data:
        with store(data).running() as sessions:
            found = sessions.list("ann")
            assert [(each.id, each.requests) for each in found] == [("long\0 name", 2), ("short", 1)]
            assert found[0].ttl == 7200
            assert sessions.ttl_of("ann", "long\0 name", None) == 7200
        with data.read() as db:
            assert db.execute("select count(*) from sessions").fetchone()[0] == 2


def test_what_a_full_disk_refused_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as data:
        sessions = SessionStore(60, data=data)
        for name in ("kept", "removed"):
            sessions.end(sessions.begin("ann", name, 60), prompt=10, cached=8, completion=2)
        with monkeypatch.context() as full:

            def refuse(self: DataDir) -> None:
                meanwhile = sessions.begin("ann", "kept", 60)
                sessions.end(meanwhile, prompt=10, cached=8, completion=2)
                raise StorageFailed("the disk is full")

            full.setattr(DataDir, "write", refuse)
            with pytest.raises(StorageFailed):
                sessions.flush()
        sessions.remove("ann", "removed")
        sessions.flush()
        with SessionStore(60, data=data).running() as later:
            assert [(each.id, each.requests, each.prompt_tokens) for each in later.list("ann")] == [
                ("kept", 2, 20)
            ]
