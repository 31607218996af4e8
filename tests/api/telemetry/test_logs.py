"""What is written down, and what never is."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import asgi
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.telemetry import logs

pytestmark = pytest.mark.anyio
SECRET = "the crown jewels"
PATH = "/v1/completions"


class Lines(logging.Handler):
    """Keeps what a formatter makes of each record."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def written() -> Iterator[Lines]:
    handler, root = Lines(logs.JsonFormatter()), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def access(written: Lines) -> list[dict[str, Any]]:
    return [line for line in written.objects() if line["logger"] == "personae.access"]


async def test_each_answer_is_a_line_with_all_that_is_known_of_its_request(
    app: Starlette, written: Lines
) -> None:
    async with asgi.client(app) as client:
        asked = {"model": "team/pirate", "prompt": SECRET}
        answer = await client.post(PATH, json=asked, headers={"x-request-id": "mine-1"})
        await client.post(PATH, json={}, headers={"x-request-id": "mine-2"})
        await client.get("/nowhere", headers={"x-request-id": "mine-3"})
        await client.get("/health")
    served, wrong, unknown = access(written)
    assert served["answer"] == answer.json()["id"]
    assert {name: served[name] for name in ("request_id", "tenant", "model", "route", "status", "level")} == {
        "request_id": "mine-1",
        "tenant": "default",
        "model": "team/pirate",
        "route": PATH,
        "status": 200,
        "level": "INFO",
    }
    used = answer.json()["usage"]
    assert served["prompt_tokens"] == used["prompt_tokens"] > 0
    assert served["completion_tokens"] == used["completion_tokens"] > 0
    assert served["cached_tokens"] == used["prompt_tokens_details"]["cached_tokens"]
    assert "prompt_tokens" not in wrong
    assert 0 <= served["seconds"] < 10
    assert served["time"].endswith("+00:00")
    assert (wrong["request_id"], wrong["status"], "model" in wrong) == ("mine-2", 400, False)
    assert (unknown["request_id"], unknown["status"], unknown["route"]) == ("mine-3", 404, "unknown")
    assert (unknown["path"], unknown["code"]) == ("/nowhere", "unknown_url")


@pytest.mark.parametrize(("stream", "status"), [(False, 499), (True, 200)])
async def test_the_line_of_an_answer_that_its_client_left_says_so(
    stream: bool, status: int, written: Lines
) -> None:
    app = create_app(FakeEngine(hold_after=2))
    visit = asgi.Visit(PATH, {"model": "base", "prompt": "a", "stream": stream})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run, app)
        await anyio.wait_all_tasks_blocked()
        visit.leave()
    [line] = access(written)
    assert (line["status"], line["code"]) == (status, "cancelled")


async def test_an_error_is_written_with_its_request_and_its_traceback(
    engine: FakeEngine, app: Starlette, written: Lines
) -> None:
    engine.refuse = ZeroDivisionError("oh")
    async with asgi.client(app) as client:
        await client.post(PATH, json={"model": "base", "prompt": SECRET}, headers={"x-request-id": "broken"})
    error = next(line for line in written.objects() if line["level"] == "ERROR")
    assert error["request_id"] == "broken"
    assert "ZeroDivisionError: oh" in error["error"]


async def test_requests_at_the_same_time_keep_apart(written: Lines) -> None:
    engine = FakeEngine(answer="x" * 50)
    async with asgi.client(create_app(engine)) as client, anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            model = ("base", "team/pirate")[number % 2]
            headers = {"x-request-id": f"r{number}"}
            await client.post(PATH, json={"model": model, "prompt": "a", "stream": True}, headers=headers)

        for number in range(20):
            tasks.start_soon(ask, number)
    lines = access(written)
    assert len(lines) == 20
    for line in lines:
        assert line["model"] == ("base", "team/pirate")[int(line["request_id"][1:]) % 2]


async def test_no_prompt_and_no_answer_is_ever_written(written: Lines) -> None:
    root = logging.getLogger()
    root.setLevel(logging.DEBUG)
    for engine in (
        FakeEngine(answer=SECRET),
        FakeEngine(answer=SECRET, refuse=ValueError("oh")),
        FakeEngine(answer=SECRET, fail_after=2),
        FakeEngine(answer=SECRET, refuse_late=KeyError("oh")),
    ):
        async with asgi.client(create_app(engine)) as client:
            for extra in ({}, {"stream": True}):
                await client.post(PATH, json={"model": "base", "prompt": SECRET, **extra})
                chat = {"model": "base", "messages": [{"role": "user", "content": SECRET}], **extra}
                await client.post("/v1/chat/completions", json=chat)
    assert len(written.lines) > 16
    assert not [line for line in written.lines if SECRET in line or "crown" in line]


async def test_a_refused_request_keeps_its_route_and_a_strange_path_is_cleaned(
    tmp_path: Path, written: Lines
) -> None:
    with open_fixture(tmp_path) as fixture:
        fixture.key("ann")
        async with fixture.client() as client:
            await client.get("/v1/models/poet")
            await client.get("/a%0Ab%1B[31m" + "x" * 300)
        metrics = fixture.app.state.services.metrics.text().decode()
    refused, strange = access(written)
    assert (refused["status"], refused["route"]) == (401, "/v1/models/{id:path}")
    assert (refused["path"], refused["code"]) == ("/v1/models/poet", "invalid_api_key")
    assert strange["path"] == "/a?b?[31m" + "x" * 191
    assert 'path="/v1/models/{id:path}"' in metrics or 'route="/v1/models/{id:path}"' in metrics


async def test_a_stream_that_breaks_off_says_why_in_its_line(written: Lines) -> None:
    written.setFormatter(logs.TextFormatter())
    async with asgi.client(create_app(FakeEngine(fail_after=2))) as client:
        await client.post(PATH, json={"model": "base", "prompt": "hi", "stream": True})
    (line,) = [line for line in written.lines if "personae.access" in line]
    assert re.search(
        r"POST /v1/completions 200 [\d.]+s \[\w+ tenant=default model=base (?:\w+_tokens=\d+ )+code=\w+\]$",
        line,
    )


def test_lines_for_people_end_with_the_requests_id() -> None:
    record = logging.LogRecord("personae.x", logging.INFO, "", 0, "done %d", (3,), None)
    formatter = logs.TextFormatter()
    assert formatter.format(record).endswith("INFO personae.x done 3")
    with logs.request("abc"):
        assert formatter.format(record).endswith("INFO personae.x done 3 [abc]")


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    record = logging.LogRecord("personae.x", logging.INFO, "", 0, "a\nb \ud800 \x1b[31m", (), None)
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "a\nb \\ud800 \x1b[31m"
