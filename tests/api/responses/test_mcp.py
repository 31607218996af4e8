"""Tools of MCP servers in responses: what is called, what is told, what is refused, and what is bounded."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asgi
import openai
import pytest
from fake_engine import FakeEngine
from live_server import serving
from mcp_servers import WeatherServer, weather_server
from openai import OpenAI
from openai_client import openai_client
from patience import PATIENCE, eventually
from responses_asked import PATH, WEATHER, prompt_of
from starlette.applications import Starlette
from tool_chat import call
from uploads import open_fixture

from personae.api.app import create_app
from personae.api.mcp import use
from personae.api.mcp.allowed import check_servers
from personae.api.responses import rounds
from personae.api.responses.background import BackgroundResponses
from personae.api.responses.store import ResponseStore
from personae.api.settings import ApiSettings
from personae.engine.sequence import SequenceLog

pytestmark = pytest.mark.anyio

LOOK = call("weather__get_weather", city="Köln")
MAIL = call("weather__send_mail", to="ada")


ON_ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""As the server runs. On trio httpx2 leaves generators behind when an answer is not read to its end."""


@pytest.fixture(scope="module")
def live() -> Iterator[WeatherServer]:
    with weather_server() as found:
        yield found


@pytest.fixture
def weather(live: WeatherServer) -> WeatherServer:
    live.calls.clear()
    live.methods.clear()
    live.headers.clear()
    live.failing = live.fail_on = None
    return live


@pytest.fixture
def settings(live: WeatherServer) -> ApiSettings:
    return ApiSettings(mcp_server=(f"{live.address}/team",), mcp_timeout=PATIENCE)


@pytest.fixture
def app(engine: FakeEngine, settings: ApiSettings) -> Starlette:
    return create_app(engine, settings)


@pytest.fixture
def client(app: Starlette) -> Iterator[OpenAI]:
    with serving(app) as address, openai_client(address) as client:
        yield client


def answers(engine: FakeEngine, *said: str) -> Callable[[SequenceLog], str]:
    """Each round's answer in turn; the last one again and again."""
    left = list(said)
    return lambda log: left.pop(0) if len(left) > 1 else left[0]


def impatient(engine: FakeEngine, live: WeatherServer) -> Starlette:
    """For servers that never answer: how long that takes decides nothing."""
    return create_app(engine, ApiSettings(mcp_server=(live.address,), mcp_timeout=0.2))


async def visit(app: Starlette, *tools: dict[str, Any], **fields: Any) -> asgi.Visit:
    asked = {"model": "base", "input": "Weather?", "tools": list(tools), **fields}
    return await asgi.Visit(PATH, asked).run(app)


async def whole(app: Starlette, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    seen = await visit(app, *tools, **fields)
    assert seen.status == 200, seen.chunks
    found: dict[str, Any] = json.loads(b"".join(seen.chunks))
    return found


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_the_model_calls_a_tool_and_goes_on_with_its_answer(
    client: OpenAI, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = answers(engine, "I look." + LOOK, "12 degrees.")
    tool: Any = weather.tool()
    response = client.responses.create(model="base", input="Weather?", tools=[tool])
    assert weather.calls == [("get_weather", "Köln")]
    assert [item.type for item in response.output] == ["mcp_list_tools", "message", "mcp_call", "message"]
    made: Any = response.output[2]
    assert (made.name, made.server_label, made.status) == ("get_weather", "weather", "completed")
    assert (json.loads(made.arguments), made.output, made.error) == (
        {"city": "Köln"},
        "12 degrees in Köln",
        None,
    )
    listed: Any = response.output[0]
    assert [one.name for one in listed.tools] == ["get_weather", "send_mail", "break/down", "say_much"]
    assert response.output_text == "I look.12 degrees."
    assert "12 degrees in Köln" in prompt_of(engine)
    assert response.usage is not None
    assert response.usage.input_tokens == sum(log.prompt_length for log in engine.submitted)


@pytest.mark.parametrize("burst", [1, 400])
def test_a_stream_tells_of_lists_and_calls_in_openais_events(
    client: OpenAI, engine: FakeEngine, weather: WeatherServer, burst: int
) -> None:
    engine.burst = burst
    engine.answer = answers(engine, LOOK + MAIL, "Done.")
    tool: Any = weather.tool()
    events = list(client.responses.create(model="base", input="Weather?", tools=[tool], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    told = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    assert told == [
        "created",
        "in_progress",
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    last: Any = events[-1]
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [done[place] for place in range(4)] == last.response.output
    assert weather.calls == [("get_weather", "Köln"), ("send_mail", "ada")]


async def test_calls_of_one_response_share_a_session(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = answers(engine, LOOK, MAIL, "Done.")
    await whole(app, weather.tool())
    sessions = weather.methods.count("initialize") + weather.methods.count("server/discover")
    listing, calling = 1, 1
    assert sessions <= 2 * (listing + calling)
    assert weather.methods.count("tools/call") == 2


async def test_a_tool_that_needs_approval_waits_for_it(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = MAIL
    tool = weather.tool(require_approval=None)
    first = await whole(app, tool)
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    asked = first["output"][1]
    assert (asked["name"], json.loads(asked["arguments"])) == ("send_mail", {"to": "ada"})
    assert weather.calls == []
    weather.methods.clear()
    engine.answer = "It is sent."
    said = [{"role": "user", "content": "Mail!"}, *first["output"]]
    decision = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    second = await whole(app, tool, input=[*said, decision])
    assert weather.calls == [("send_mail", "ada")]
    assert "tools/list" not in weather.methods, "the list is in the input"
    assert kinds(second) == ["mcp_call", "message"]
    made = second["output"][0]
    assert (made["approval_request_id"], made["output"]) == (asked["id"], "sent")
    assert second["usage"]["input_tokens"] == engine.submitted[-1].prompt_length
    third = await whole(
        app, tool, input=[*said, decision, *second["output"], {"role": "user", "content": "?"}]
    )
    assert len(weather.calls) == 1, "what was made is not made again"
    assert kinds(third) == ["message"]


async def test_a_declined_call_is_not_made_and_the_model_knows_why(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = MAIL
    tool = weather.tool(require_approval="always")
    first = await whole(app, tool)
    engine.answer = "Then not."
    decision = {
        "type": "mcp_approval_response",
        "approval_request_id": first["output"][1]["id"],
        "approve": False,
        "reason": "Ask me tomorrow.",
    }
    second = await whole(app, tool, input=[{"role": "user", "content": "Mail!"}, *first["output"], decision])
    assert weather.calls == []
    assert kinds(second) == ["message"]
    assert "The user declined this call. Ask me tomorrow." in prompt_of(engine)


@pytest.mark.parametrize(
    ("approval", "free"),
    [
        ("never", True),
        ("always", False),
        (None, False),
        ({"never": {"tool_names": ["get_weather"]}}, True),
        ({"never": {"read_only": True}}, True),
        ({"never": {"tool_names": ["send_mail"]}}, False),
        ({"always": {"tool_names": ["send_mail"]}}, False),
        ({"always": {"read_only": True}, "never": {"read_only": True}}, False),
    ],
)
async def test_who_needs_approval_is_what_the_filters_say(
    app: Starlette, engine: FakeEngine, weather: WeatherServer, approval: Any, free: bool
) -> None:
    engine.answer = answers(engine, LOOK, "Done.")
    response = await whole(app, weather.tool(require_approval=approval))
    assert kinds(response)[1] == ("mcp_call" if free else "mcp_approval_request")
    assert bool(weather.calls) == free


@pytest.mark.parametrize(
    "allowed", [["get_weather"], {"read_only": True}, {"tool_names": ["get_weather"]}], ids=str
)
async def test_the_model_sees_the_allowed_tools_only(
    app: Starlette, engine: FakeEngine, weather: WeatherServer, allowed: Any
) -> None:
    engine.answer = "Hello."
    await whole(app, weather.tool(allowed_tools=allowed))
    assert "weather__get_weather" in prompt_of(engine)
    assert "weather__send_mail" not in prompt_of(engine)


async def test_a_response_ends_where_a_function_of_the_client_is_called(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = LOOK + call("get_weather", city="Bonn")
    response = await whole(app, weather.tool(), WEATHER)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response["output"][1]["output"] == "12 degrees in Köln"
    assert len(engine.submitted) == 1


async def test_a_tool_that_fails_is_told_to_the_model(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = answers(engine, call("weather__break_down"), "It failed.")
    response = await whole(app, weather.tool())
    made = response["output"][1]
    assert (made["name"], made["status"], made["output"]) == ("break/down", "failed", None)
    assert made["error"]["type"] == "mcp_tool_execution_error"
    assert "the pump is broken" in made["error"]["content"][0]["text"]
    assert "the pump is broken" in prompt_of(engine)
    assert response["status"] == "completed"


@ON_ASYNCIO
@pytest.mark.parametrize("failing", ["hangs", "unauthorized", "large", "bomb", "garbage", "redirect", "dies"])
async def test_a_call_that_a_server_does_not_answer_fails_and_the_response_goes_on(
    app: Starlette, engine: FakeEngine, weather: WeatherServer, failing: str
) -> None:
    engine.answer = "Hello."
    known = await whole(app, weather.tool())
    weather.failing, weather.fail_on = failing, "tools/call"
    engine.answer = answers(engine, LOOK, LOOK, "No weather.")
    asked = impatient(engine, weather) if failing == "hangs" else app
    said = [{"role": "user", "content": "Weather?"}, known["output"][0]]
    response = await whole(asked, weather.tool(), input=said)
    assert kinds(response) == ["mcp_call", "mcp_call", "message"]
    for made in response["output"][:2]:
        assert (made["status"], made["error"]["type"]) == ("failed", "mcp_protocol_error")
    assert weather.calls == []
    assert "Error: the tool cannot be called" in prompt_of(engine)


@ON_ASYNCIO
@pytest.mark.parametrize("failing", ["hangs", "unauthorized", "large", "bomb", "garbage", "redirect", "dies"])
async def test_a_server_that_does_not_list_its_tools_fails_the_request_in_one_sentence(
    app: Starlette, engine: FakeEngine, weather: WeatherServer, failing: str
) -> None:
    weather.failing = failing
    asked = impatient(engine, weather) if failing == "hangs" else app
    seen = await visit(asked, weather.tool(), stream=True)
    assert (seen.status, seen.error["code"], seen.error["param"]) == (424, "mcp_server_failed", "tools")
    assert seen.error["message"].startswith("The MCP server `weather` did not list its tools: ")
    assert engine.submitted == []


@ON_ASYNCIO
async def test_an_answer_that_is_too_large_fails_its_call(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = answers(engine, call("weather__say_much", size=2**21), LOOK, "Done.")
    response = await whole(app, weather.tool())
    large, after = response["output"][1:3]
    assert "has more than 1MiB" in large["error"]["message"]
    assert after["output"] == "12 degrees in Köln", "the next call has another session"


async def test_a_response_makes_no_more_calls_than_asked(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = lambda log: "Done." if log.grammar is None else LOOK
    response = await whole(app, weather.tool(), max_tool_calls=2)
    assert len(weather.calls) == 2
    assert kinds(response).count("mcp_call") == 2


async def test_a_model_that_calls_for_ever_is_ended(
    app: Starlette, engine: FakeEngine, weather: WeatherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_CALLS", 3)
    engine.answer = LOOK
    response = await whole(app, weather.tool())
    assert len(weather.calls) == 3
    assert response["status"] == "completed"


async def test_the_budget_of_tokens_is_that_of_all_rounds(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = LOOK
    response = await whole(app, weather.tool(), max_output_tokens=250)
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens"] <= 250
    assert 0 < len(weather.calls) < 5


async def test_what_has_to_be_called_is_called_once(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    engine.answer = answers(engine, LOOK, "Done.")
    chosen = {"type": "mcp", "server_label": "weather", "name": "get_weather"}
    response = await whole(app, weather.tool(), tool_choice=chosen)
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    assert response["tool_choice"] == chosen
    first, second = (log.grammar.source for log in engine.submitted if log.grammar is not None)
    assert "send_mail" not in first
    assert "send_mail" in second


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"server_url": "https://evil.example/mcp"}, 403, "tools[0].server_url"),
    ({"server_url": "file:///etc/passwd"}, 400, "tools[0].server_url"),
    ({"server_url": "http://u:p@localhost/"}, 400, "tools[0].server_url"),
    ({"server_url": None}, 400, "tools[0].server_url"),
    ({"server_label": "a b"}, 400, "tools[0].server_label"),
    ({"connector_id": "connector_gmail"}, 400, "tools[0].connector_id"),
    ({"headers": {"Host": "other"}}, 400, "tools[0].headers"),
    ({"headers": {"x-key": "a\r\nb"}}, 400, "tools[0].headers"),
    ({"headers": {"x key": "a"}}, 400, "tools[0].headers"),
    ({"headers": {"x-key": "a" * 9000}}, 400, "tools[0].headers"),
    ({"headers": {"Authorization": "x"}, "authorization": "y"}, 400, "tools[0].headers"),
    ({"authorization": "ü"}, 400, "tools[0].authorization"),
    ({"allowed_tools": ["fly"]}, 400, "tools[0].allowed_tools"),
    ({"require_aproval": "never"}, 400, "tools[0].require_aproval"),
    ({"require_approval": "sometimes"}, 400, "tools[0].require_approval"),
]


@pytest.mark.parametrize(("fields", "status", "param"), WRONG, ids=lambda value: str(value)[:60])
async def test_a_wrong_tool_is_named(
    app: Starlette,
    engine: FakeEngine,
    weather: WeatherServer,
    fields: dict[str, Any],
    status: int,
    param: str,
) -> None:
    seen = await visit(app, weather.tool(**fields))
    assert (seen.status, seen.error["param"]) == (status, param), seen.error
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.server_label"),
        ({"tool_choice": {"type": "mcp", "server_label": "weather", "name": "x"}}, "tool_choice.name"),
        (
            {"input": [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}]},
            "input[0].approval_request_id",
        ),
        ({"background": True}, "background"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_wrong_request_is_named(
    app: Starlette, weather: WeatherServer, fields: dict[str, Any], param: str
) -> None:
    seen = await visit(app, weather.tool(), **fields)
    assert (seen.status, seen.error["param"]) == (400, param), seen.error


async def test_two_servers_of_one_label_are_refused(app: Starlette, weather: WeatherServer) -> None:
    seen = await visit(app, weather.tool(), weather.tool())
    assert (seen.status, seen.error["param"]) == (400, "tools[1].server_label")


async def test_without_a_list_of_servers_none_may_be_used(engine: FakeEngine, weather: WeatherServer) -> None:
    seen = await visit(create_app(engine), weather.tool())
    assert (seen.status, seen.error["code"]) == (403, "mcp_server_not_allowed")
    assert "--mcp-server" in seen.error["message"]
    assert weather.methods == []


async def test_a_schema_that_is_refused_names_the_tool(
    app: Starlette, engine: FakeEngine, weather: WeatherServer
) -> None:
    listed = {
        "type": "mcp_list_tools",
        "server_label": "weather",
        "tools": [{"name": "fly", "input_schema": {"type": "array"}}],
    }
    seen = await visit(app, weather.tool(), input=[{"role": "user", "content": "?"}, listed])
    assert (seen.status, seen.error["param"]) == (400, "tools[0].fly.parameters")


async def test_a_tenant_uses_servers_in_a_bounded_number_of_requests(
    app: Starlette, engine: FakeEngine, weather: WeatherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answer = answers(engine, "Hello.")
    await whole(app, weather.tool())
    monkeypatch.setattr(use, "MOST_REQUESTS", 0)
    seen = await visit(app, weather.tool())
    assert (seen.status, seen.error["param"]) == (429, "tools")


def test_secrets_go_to_their_server_and_nowhere_else(
    engine: FakeEngine,
    weather: WeatherServer,
    settings: ApiSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    engine.answer = answers(engine, LOOK, "Done.")
    with open_fixture(tmp_path) as fixture:
        store = ResponseStore(fixture.data)
        served = create_app(engine, settings, tenants=fixture.tenants, stored=store)
        with serving(served, None, BackgroundResponses(store).runs(served)) as address:
            client = openai_client(address, fixture.key("ann"))
            with client:
                tool: Any = weather.tool(
                    authorization="geheim-1",
                    headers={"X-Key": "geheim-2"},
                    server_url=weather.url + "?token=geheim-3",
                )
                first = client.responses.create(model="base", input="Weather?", tools=[tool])
                asked = [found for found in weather.headers if "authorization" in found]
                assert len(asked) == len(weather.headers) > 0
                assert {(one["authorization"], one["x-key"]) for one in asked} == {
                    ("Bearer geheim-1", "geheim-2")
                }
                shown = client.responses.retrieve(first.id)
                assert shown.output == first.output
                with pytest.raises(openai.BadRequestError) as refused:
                    client.responses.create(model="base", input="?", tools=[tool], background=True)
                assert refused.value.param == "tools[0].authorization"
                weather.failing = "unauthorized"
                with pytest.raises(openai.APIStatusError) as failed:
                    client.responses.create(model="base", input="?", tools=[tool])
        told = [first.model_dump_json(), shown.model_dump_json(), str(refused.value), str(failed.value)]
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert first.id.encode() in stored
    assert b"geheim" not in stored
    ours = [
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith(("openai", "httpcore", "mcp.server"))
    ]
    assert "geheim" not in "\n".join([*told, *ours])


def test_a_stored_response_goes_on_without_asking_the_server_for_its_list(
    engine: FakeEngine, weather: WeatherServer, settings: ApiSettings, tmp_path: Path
) -> None:
    with open_fixture(tmp_path) as fixture:
        served = create_app(engine, settings, tenants=fixture.tenants, stored=ResponseStore(fixture.data))
        with serving(served) as address, openai_client(address, fixture.key("ann")) as client:
            tool: Any = weather.tool(require_approval="always")
            engine.answer = MAIL
            first = client.responses.create(model="base", input="Mail!", tools=[tool])
            weather.methods.clear()
            decision: Any = {
                "type": "mcp_approval_response",
                "approval_request_id": first.output[1].id,
                "approve": True,
            }
            engine.answer = "Sent."
            second = client.responses.create(
                model="base", previous_response_id=first.id, input=[decision], tools=[tool]
            )
            assert [item.type for item in second.output] == ["mcp_call", "message"]
            assert weather.calls == [("send_mail", "ada")]
            assert "tools/list" not in weather.methods
            third = client.responses.create(
                model="base", previous_response_id=second.id, input="And?", tools=[tool]
            )
            assert third.output_text == "Sent."
            assert len(weather.calls) == 1


def test_a_server_in_the_background_is_called_too(
    engine: FakeEngine, weather: WeatherServer, settings: ApiSettings, tmp_path: Path
) -> None:
    engine.answer = answers(engine, LOOK, "Done.")
    with open_fixture(tmp_path) as fixture:
        store = ResponseStore(fixture.data)
        served = create_app(engine, settings, tenants=fixture.tenants, stored=store)
        with (
            serving(served, None, BackgroundResponses(store).runs(served)) as address,
            openai_client(address, fixture.key("ann")) as client,
        ):
            tool: Any = weather.tool()
            begun = client.responses.create(model="base", input="?", tools=[tool], background=True)
            eventually(lambda: client.responses.retrieve(begun.id).status == "completed", "it is complete")
            assert client.responses.retrieve(begun.id).output_text == "Done."


@pytest.mark.parametrize(
    "url",
    [
        "mcp.example",
        "ftp://mcp.example",
        "https://",
        "https://user@mcp.example",
        "https://mcp.example/a/../b",
        "https://mcp.example/%2e%2e",
        "https://mcp.example//a",
        "https://mcp.example/a#b",
        "https://mcp.example/a?b",
        "https://mcp.example:99999",
        "https://mcp.example/a\\b",
        "https://münchen.example",
    ],
)
def test_a_wrong_entry_of_the_list_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no MCP server|has a query"):
        check_servers((url,))


async def test_an_entry_allows_what_is_below_it_only(engine: FakeEngine, weather: WeatherServer) -> None:
    engine.answer = "Hello."
    for entry, status in ((weather.url, 200), (weather.address, 200), (f"{weather.address}/tea", 403)):
        app = create_app(engine, ApiSettings(mcp_server=(entry,), mcp_timeout=PATIENCE))
        assert (await visit(app, weather.tool())).status == status, entry
