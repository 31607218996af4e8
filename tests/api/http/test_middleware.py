"""The gate: ids, limits, and what happens to an uncaught error."""

import errno
import json
import logging

import anyio
import asgi
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from virtual_clock import virtual_clock

from personae.api.app import create_app
from personae.api.settings import ApiSettings

pytestmark = [*virtual_clock, pytest.mark.usefixtures("no_threads")]

ASK = {"model": "base", "prompt": "hi"}


async def test_every_answer_has_a_request_id(app: Starlette) -> None:
    async with asgi.client(app) as client:
        answers = [await client.get(path) for path in ("/health", "/nope", "/v1/models/x")]
        answers.append(await client.post("/v1/completions", json={}))
        answers.append(await client.get("/v1/completions"))
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 404, 404, 400, 405]
    assert len(set(ids)) == 5


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3_4", True), ("", False), ("a b", False), ("<x>", False), ("a" * 200, False)],
)
async def test_the_clients_own_id_is_kept_if_it_is_sane(given: str, kept: bool, app: Starlette) -> None:
    async with asgi.client(app) as client:
        response = await client.get("/health", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is kept


async def test_unknown_routes_and_methods_have_the_shape_of_errors(app: Starlette) -> None:
    async with asgi.client(app) as client:
        nowhere = await client.post("/v1/nope", json={})
        wrong = await client.put("/v1/completions", json={})
        slash = await client.get("/health/")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"].endswith("does not serve PUT. It serves POST.")
    assert slash.status_code == 404


async def test_a_method_that_is_not_served_is_told_all_that_the_path_serves(app: Starlette) -> None:
    async with asgi.client(app) as client:
        wrong = await client.put("/v1/adapters/poet", json={})
    assert wrong.headers["allow"] == "DELETE, GET, HEAD, PATCH"
    assert wrong.json()["error"]["message"].endswith("It serves DELETE, GET, HEAD, PATCH.")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/classify", "Classification is not served"),
        ("/v1/pooling", "Pooling is not served"),
        ("/score", "There is /v1/score."),
        ("/v2/rerank", "Did you mean /v1/rerank?"),
        ("/api/tags", "Here it is /v1/models."),
        ("/apply-template", "Here it is /tokenize."),
        ("/infill", "Here it is /v1/completions, with `suffix`."),
        ("/v1/evals", "Here it is /v1/eval_reports."),
        ("/v1/messages/batches/x", "Batches of messages are not served; /v1/batches takes other requests."),
        ("/v1/containers", "No code is run here; the client runs the tools that the model calls."),
        ("/v1/threads/thread_1/runs", "/v1/conversations keeps what was said, for /v1/responses."),
        ("/v1/fine_tuning/jobs", "POST /v1/adapters takes a trained adapter."),
        ("/chat/completions", "There is /v1/chat/completions."),
        ("/v1/chat/completions/chatcmpl-1/messages", "a response of /v1/responses is."),
        ("/openai/deployments/m/chat/completions", "Here it is /v1/chat/completions."),
        ("/v1/v1/chat/completions", "There is /v1/chat/completions."),
        ("/v1/chat/completions/", "There is /v1/chat/completions."),
        ("//v1/completions", "There is /v1/completions."),
        ("/v1/health", "There is /health."),
        ("/generate", "Here it is /v1/completions."),
        ("/redoc", "Here it is /docs."),
        ("/api/chat", "Here it is /v1/chat/completions."),
        ("/api/embeddings", "Here it is /v1/embeddings."),
        ("/api/version", "Here it is /version."),
        ("/v1beta/models", "Here it is /v1/models."),
        ("/api/delete", "/v1/adapters uploads and removes adapters."),
        ("/v1/uploads", "A file comes in one request: POST /v1/files."),
        ("/wake_up", "`personae serve --model NAME=MODEL --keep-alive SECONDS`."),
        ("/v1/videos", "Making videos is not served"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/tokenise", "Did you mean /tokenize?"),
        ("/v1/audio/transcriptions", "Transcription is not served"),
    ],
)
async def test_a_route_that_is_not_there_names_the_one_that_was_meant(
    path: str, hint: str, app: Starlette
) -> None:
    visit = await asgi.Visit(path, {}).run(app)
    assert visit.status == 404
    assert visit.error["message"].endswith(hint) or f"{hint}: " in visit.error["message"]


@pytest.mark.parametrize(
    ("path", "method", "hint"),
    [
        ("/v1/responses/compact", "POST", "or another `previous_response_id`."),
        ("/v1/chat/completions", "GET", "Chat completions are not stored; a response of /v1/responses is."),
        ("/v1/models/m", "DELETE", "/v1/adapters uploads and removes adapters."),
    ],
)
async def test_a_method_that_a_route_of_ours_does_not_have_is_told_what_was_meant(
    path: str, method: str, hint: str, app: Starlette
) -> None:
    async with asgi.client(app) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 405
    assert answer.json()["error"]["message"].endswith(hint)


@pytest.mark.parametrize("path", ["/v1/nope", "/v1", "/nowhere/at/all"])
async def test_a_route_that_is_like_none_is_told_those_that_there_are(path: str, app: Starlette) -> None:
    message = (await asgi.Visit(path, {}).run(app)).error["message"]
    said, there = message.removesuffix(".").split(". There are ")
    assert said == f"There is no route {path}"
    assert {"/v1/chat/completions", "/health", "/metrics", "/v1/models"} <= set(there.split(", "))


async def test_a_body_over_the_limit_is_refused_by_its_announced_length(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_body_bytes=100))
    visit = await asgi.Visit("/v1/completions", headers=[(b"content-length", b"101")]).run(app)
    assert (visit.status, visit.error["code"]) == (413, "payload_too_large")
    assert visit.headers["connection"] == "close"


async def test_a_body_over_the_limit_is_refused_without_a_length(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_body_bytes=100))
    visit = asgi.Visit("/v1/completions")
    for _ in range(3):
        visit.say(b" " * 50, more=True)
    await visit.run(app)
    assert (visit.status, visit.error["param"]) == (413, "body")


async def test_a_body_at_the_limit_is_served(engine: FakeEngine) -> None:
    body = json.dumps(ASK).encode()
    app = create_app(engine, ApiSettings(max_body_bytes=len(body)))
    visit = asgi.Visit("/v1/completions")
    visit.say(body[:7], more=True)
    visit.say(body[7:], more=False)
    await visit.run(app)
    assert visit.status == 200


async def test_a_body_that_does_not_come_is_not_waited_for(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(body_seconds=20))
    visit = asgi.Visit("/v1/completions")
    started = anyio.current_time()

    async def drip() -> None:
        while anyio.current_time() - started < 60:
            visit.say(b" ", more=True)
            await anyio.sleep(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drip)
        await visit.run(app)
        assert anyio.current_time() - started == pytest.approx(20, abs=1)
        tasks.cancel_scope.cancel()
    assert (visit.status, visit.error["code"]) == (408, "request_timeout")
    assert visit.headers["connection"] == "close"


async def test_a_client_that_leaves_before_its_body_is_complete_disturbs_nobody(
    app: Starlette, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    visit = asgi.Visit("/v1/completions")
    visit.say(b"{", more=True)
    visit.leave()
    with caplog.at_level(logging.WARNING):
        await visit.run(app)
    assert engine.submitted == []
    assert caplog.records == []


async def test_too_many_headers_are_refused(app: Starlette) -> None:
    flood = [(b"x-%d" % number, b"y") for number in range(200)]
    visit = await asgi.Visit("/v1/completions", ASK, headers=flood).run(app)
    assert (visit.status, visit.error["param"]) == (431, "headers")
    visit = await asgi.Visit("/v1/completions", ASK, headers=[(b"x", b"y" * 40_000)]).run(app)
    assert visit.status == 431


async def test_an_unexpected_error_is_a_500_that_shows_nothing(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refuse = ZeroDivisionError("the secret")
    app = create_app(engine)
    with caplog.at_level(logging.ERROR):
        for extra in ({}, {"stream": True}):
            visit = await asgi.Visit("/v1/completions", ASK | extra).run(app)
            assert visit.status == 500
            assert visit.error == {
                "message": "The server could not finish this request.",
                "type": "server_error",
                "param": None,
                "code": "internal_error",
            }
            assert visit.headers["x-request-id"] in caplog.text
    assert "the secret" in caplog.text


async def test_too_many_open_files_are_a_503_without_a_path(engine: FakeEngine) -> None:
    engine.refuse = OSError(errno.EMFILE, "Too many open files", "/the/secret/file")
    visit = await asgi.Visit("/v1/completions", ASK).run(create_app(engine))
    assert (visit.status, visit.error["code"]) == (503, "too_many_files")
    assert "secret" not in visit.error["message"]
    assert visit.headers["retry-after"] == "1"


async def test_an_unexpected_error_within_a_stream_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(FakeEngine(answer="abc"))
    parts = iter([1, 2, 3])

    def break_off(*_: object) -> None:
        if next(parts) == 3:
            raise ZeroDivisionError("the secret")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr("personae.api.telemetry.metrics.SequenceClock.saw", break_off)
        visit = await asgi.Visit("/v1/completions", ASK | {"stream": True}).run(app)
    assert visit.events()[0]["choices"][0]["text"] == "a"
    assert visit.events()[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in b"".join(visit.chunks)
    assert "the secret" in caplog.text


async def test_a_client_that_leaves_cancels_its_sequences(engine: FakeEngine) -> None:
    engine.hold_after = 3
    app = create_app(engine)
    for stream in (False, True):
        visit = asgi.Visit("/v1/completions", ASK | {"n": 2, "stream": stream})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(visit.run, app)
            await anyio.wait_all_tasks_blocked()
            assert len(engine.live) == 2
            visit.leave()
        assert engine.live == set()
    assert len(engine.cancelled) == 4


async def test_nobody_waits_for_a_slow_reader_and_it_gets_larger_events(engine: FakeEngine) -> None:
    app = create_app(engine)
    slow = asgi.Visit("/v1/completions", ASK | {"stream": True})
    slow.may_send = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(slow.run, app)
        await anyio.wait_all_tasks_blocked()
        assert engine.live == set(), "the engine is done though nothing was read"
        quick = await asgi.Visit("/v1/completions", ASK | {"stream": True}).run(app)
        slow.may_send.set()
    texts = [chunk["choices"][0]["text"] for chunk in slow.events()[:-1]]
    assert "".join(texts) == "Hello, world!"
    assert len(texts) <= 2 < len(quick.events())


async def test_a_stop_string_is_found_though_the_reader_sleeps(engine: FakeEngine) -> None:
    app = create_app(engine)
    visit = asgi.Visit("/v1/completions", ASK | {"stream": True, "stop": "wor", "ignore_eos": True})
    visit.may_send = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run, app)
        await anyio.wait_all_tasks_blocked()
        assert engine.stopped == [engine.submitted[0].id]
        visit.may_send.set()
    assert "".join(chunk["choices"][0]["text"] for chunk in visit.events()[:-1]) == "Hello, "
