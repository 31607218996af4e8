"""What is not strict is checked when it is finished, and the outcome is always said."""

import json
import threading
from typing import Any

import anyio
import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from patience import PATIENCE
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, TIME, call, tool

from personae.api import check
from personae.api.app import create_app
from personae.api.check import AnswerCheck
from personae.api.output_pieces import OutputPieces
from personae.evals.hostile import retried
from personae.grammar.schema.validate import SchemaValidation
from personae.grammar.spec import GrammarSpec

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "array", "contains": {"const": 3}}


def format(strict: bool | None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine("[1]", tokenizer=byte_tokenizer(TEMPLATE, TAGS), max_model_len=4096)


@pytest.fixture
def app(engine: FakeEngine) -> Starlette:
    return create_app(engine)


async def outcomes(app: Starlette, path: str = "/v1/chat/completions", **extra: Any) -> list[Any]:
    """`personae` of each choice; the same whether streamed or not."""
    fields = {"messages": [USER]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "base", "max_tokens": 300, **fields, **extra}
    whole = await asgi.Visit(path, body).run(app)
    assert whole.status == 200, whole.chunks
    found = [choice.get("personae") for choice in json.loads(b"".join(whole.chunks))["choices"]]
    streamed: dict[int, Any] = {}
    for event in (await asgi.Visit(path, {**body, "stream": True}).run(app)).events():
        for choice in event["choices"] if event != "[DONE]" else ():
            assert choice["index"] not in streamed, "it comes with the last event of a choice"
            if choice["finish_reason"] is not None:
                streamed[choice["index"]] = choice.get("personae")
    assert [streamed[index] for index in sorted(streamed)] == found
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_answer_that_is_not_strict_is_checked_against_its_schema(
    app: Starlette, engine: FakeEngine, path: str
) -> None:
    [bad] = await outcomes(app, path, response_format=format(False))
    assert bad["validation"]["valid"] is False
    [violation] = bad["validation"]["violations"]
    assert violation["pointer"] == "#"
    assert "3" not in violation["pointer"]
    assert violation["message"]
    engine.answer = "[1, 3]"
    valid = {"validation": {"valid": True, "violations": []}}
    assert await outcomes(app, path, response_format=format(False), n=2) == [valid] * 2


async def test_an_answer_that_breaks_off_is_not_valid(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = "[1, 3]"
    [cut] = await outcomes(app, response_format=format(False), max_tokens=4)
    assert cut["validation"]["valid"] is False
    assert "not JSON" in cut["validation"]["violations"][0]["message"]


async def test_what_the_grammar_holds_is_not_checked_again(app: Starlette, engine: FakeEngine) -> None:
    assert await outcomes(app, response_format=format(True)) == [None]
    assert await outcomes(app, response_format={"type": "json_object"}) == [None]
    assert await outcomes(app) == [None]


async def test_reasoning_is_no_part_of_what_is_checked(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = "<think>[1]</think>\n[3]"
    [found] = await outcomes(app, response_format=format(False))
    assert found["validation"]["valid"] is True


async def test_an_echo_is_no_part_of_what_is_checked(app: Starlette, engine: FakeEngine) -> None:
    engine.answer = "[3]"
    [found] = await outcomes(app, "/v1/completions", response_format=format(False), echo=True)
    assert found["validation"]["valid"] is True


async def test_calls_of_functions_that_are_not_strict_are_checked(app: Starlette, engine: FakeEngine) -> None:
    loose, strict = tool("f", a=SCHEMA), tool("g", strict=True, a={"type": "integer"})
    engine.answer = call("f", a=[3]) + call("g", a="x") + call("f", a=[])
    [found] = await outcomes(app, tools=[loose, strict])
    assert found["validation"]["valid"] is False
    [violation] = found["validation"]["violations"]
    assert (violation["tool_call"], violation["pointer"]) == (2, "#/a")
    engine.answer = call("f", a=[3])
    assert (await outcomes(app, tools=[loose]))[0] == {"validation": {"valid": True, "violations": []}}
    engine.answer = "No."
    assert await outcomes(app, tools=[loose, TIME]) == [None], "nothing was called"
    engine.answer = call("g", a=3)
    assert await outcomes(app, tools=[loose, strict]) == [None], "its grammar held it"
    engine.answer = call("f", a=[3])[:-20]
    assert (await outcomes(app, tools=[loose]))[0]["validation"]["valid"] is False


async def test_a_check_that_would_take_hours_ends_and_is_said_to_have_found_nothing(
    app: Starlette, engine: FakeEngine
) -> None:
    engine.answer = '"a"'
    named = {"name": "x", "schema": retried(40), "strict": False}
    [found] = await outcomes(app, response_format={"type": "json_schema", "json_schema": named})
    assert found == {"validation": {"valid": None, "violations": []}}


async def test_a_tenants_slow_checks_wait_for_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    class Slow:
        def check(self, parts: list[tuple[GrammarSpec, str]]) -> list[SchemaValidation]:
            if parts[0][1] == '"slow"':
                begun.release()
                assert go_on.wait(PATIENCE)
            return [SchemaValidation(True)]

    monkeypatch.setattr(check, "_CHECKER", Slow())
    found: list[str] = []

    async def answered(tenant: str, text: str) -> None:
        one = AnswerCheck(tenant, GrammarSpec("json_schema", json.dumps(retried(40)), strict=False), {})
        words = OutputPieces()
        words.say(json.dumps(text))
        one.take(words)
        outcome = await one.outcome()
        assert outcome is not None
        assert outcome.valid
        found.append(f"{tenant}: {text}")

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(answered, "one", "slow")
            for _ in range(4):
                assert await anyio.to_thread.run_sync(begun.acquire, True, PATIENCE)
            tasks.start_soon(answered, "one", "quick")
            await answered("other", "quick")
            assert found == ["other: quick"]
            go_on.set()
    assert sorted(found) == ["one: quick", *["one: slow"] * 4, "other: quick"]
