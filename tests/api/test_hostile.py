"""What has been used against servers like this one."""

import hmac
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from patience import PATIENCE
from starlette.applications import Starlette
from uploads import open_house

from personae.api.app import create_app
from personae.api.chat_template import ChatTemplate
from personae.api.settings import ApiSettings
from personae.api.wire.conversation import UserMessage
from personae.api.wire.decode import decode
from personae.api.wire.schema import ChatRequest
from personae.errors import RequestError

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_cache_salt_only_ever_parts_what_the_tenants_own_salt_parts_already(
    app: Starlette, engine: FakeEngine, path: str
) -> None:
    """Whoever knows another tenant's salt, or the text of it, is no nearer to that tenant's pages."""
    asked = {"model": "base", "prompt": "hi"} if path == TEXT else {"model": "base", "messages": [USER]}
    theirs, mine = engine.salt("another"), engine.salt("default")
    async with asgi.client(app) as client:
        for salt in (None, "a", "a", "b", theirs.decode(), mine.decode()):
            response = await client.post(path, json=asked | {"cache_salt": salt})
            assert response.status_code == 200
        for wrong in ("", "x" * 257, 5):
            response = await client.post(path, json=asked | {"cache_salt": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")
    salts = [log.salt for log in engine.submitted]
    assert salts[0] == mine
    assert salts[1] == salts[2]
    assert len(set(salts)) == 5
    assert theirs not in salts
    assert all(salt == mine or len(salt) == 32 for salt in salts)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT, "prompt_embeds", "UEsDBA=="),  # tensors that a client pickled
        (CHAT, "prompt_embeds", "UEsDBA=="),
        (CHAT, "chat_template", "{{ ''.__class__.__mro__ }}"),
        (CHAT, "documents", [{"url": "http://169.254.169.254/"}]),
        (CHAT, "mm_processor_kwargs", {"trust_remote_code": True}),
        (CHAT, "media_io_kwargs", {"image": {}}),
        (TEXT, "lora_path", "/etc/passwd"),
        (TEXT, "logits_processors", ["os.system"]),
        (CHAT, "vllm_xargs", {"a": 1}),
        (CHAT, "kv_transfer_params", {"remote_host": "10.0.0.1"}),
        (TEXT, "priority", -(10**9)),
    ],
)
async def test_what_other_servers_let_clients_send_is_refused_by_name(
    app: Starlette, engine: FakeEngine, path: str, field: str, value: Any
) -> None:
    asked = {"model": "base", "prompt": "hi"} if path == TEXT else {"model": "base", "messages": [USER]}
    async with asgi.client(app) as client:
        response = await client.post(path, json=asked | {field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert engine.submitted == []


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "gopher://x",
    ],
)
@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "file"])
async def test_no_url_of_a_client_is_ever_fetched(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, kind: str, url: str
) -> None:
    async def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("the server connects to somewhere")

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    part = {"type": kind, kind: {"url": url, "data": url, "file_data": url}}
    async with asgi.client(app) as client:
        response = await client.post(
            CHAT, json={"model": "base", "messages": [{"role": "user", "content": [part]}]}
        )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content[0].type")


BIASES = json.dumps(dict.fromkeys(range(50_000), 1)).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"model":' * 50_000,
        b'{"model": "base", "prompt": "hi", "max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"model": "base", "prompt": "hi", "temperature": 1e' + b"9" * 100_000 + b"}",
        b'{"model": "base", "prompt": "hi", "logit_bias": '
        + json.dumps(dict.fromkeys(range(50_000), 1)).encode()
        + b"}",
        b'{"model": "base", "prompt": ' + json.dumps(["a"] * 100_000).encode() + b"}",
        b'{"model": "base", "prompt": "hi", "stop": ' + json.dumps(["x"] * 100_000).encode() + b"}",
        b'{"model": "base", "prompt": "hi", "stop_token_ids": ' + json.dumps([1] * 100_000).encode() + b"}",
        b'{"model": "base", "prompt": "hi", "response_format": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
    ids=["arrays", "objects", "digits", "exponent", "biases", "prompts", "stops", "stop-tokens", "depth"],
)
async def test_a_bomb_of_json_is_a_quick_400(app: Starlette, engine: FakeEngine, body: bytes) -> None:
    begun = time.process_time()
    async with asgi.client(app) as client:
        response = await client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert time.process_time() - begun < 5
    assert engine.submitted == []


async def test_a_long_body_is_read_beside_the_loop_and_a_short_one_on_it(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    read = ChatRequest.read

    def noted(body: bytes, ignored: list[str]) -> ChatRequest:
        threads.append(threading.get_ident())
        return read(body, ignored)

    monkeypatch.setattr(ChatRequest, "read", noted)
    async with asgi.client(app) as client:
        for length in (10, 100_000):
            asked = {"model": "base", "messages": [USER], "user": "x" * length}
            assert (await client.post(CHAT, json=asked)).status_code == 200
    on_the_loop, beside = threads
    assert on_the_loop == threading.get_ident()
    assert beside != on_the_loop


@pytest.mark.parametrize("leaf", [1, "x", None, [], {}])
async def test_a_schema_may_be_as_deep_as_the_limit_and_no_deeper(engine: FakeEngine, leaf: Any) -> None:
    app = create_app(engine, ApiSettings(max_json_depth=8))
    async with asgi.client(app) as client:
        for levels, status in ((6, 200), (7, 400)):  # in the format and its `json_schema`
            schema: Any = {"default": leaf}
            for _ in range(levels - 1):
                schema = {"default": schema}
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            asked = {"model": "base", "messages": [USER], "response_format": format}
            assert (await client.post(CHAT, json=asked)).status_code == status


async def test_a_grammar_over_its_limit_is_refused_by_the_field_it_came_in(engine: FakeEngine) -> None:
    app = create_app(engine, ApiSettings(max_grammar_bytes=1000))
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    asked = {"model": "base", "messages": [USER]}
    async with asgi.client(app) as client:
        for field, value in (
            ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": wide}}),
            ("structured_outputs", {"json": wide}),
            ("structured_outputs", {"regex": "a" * 2000}),
        ):
            response = await client.post(CHAT, json=asked | {field: value})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "grammar_too_large")
            assert error["param"].startswith(field)
        small = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        response = await client.post(CHAT, json=asked | {"response_format": small})
        assert response.status_code == 200
    assert len(engine.submitted) == 1


SILENT = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("limits", "why"), [({"seconds": 0.05}, "long"), ({"characters": 1000}, "characters")]
)
def test_a_template_has_its_time_and_its_size(limits: dict[str, Any], why: str) -> None:
    template = ChatTemplate(ENDLESS, {}, **limits)
    with pytest.raises(RequestError, match=why):
        template.render([UserMessage("hi")])


@pytest.mark.parametrize(
    "source",
    [
        SILENT,
        "{% macro m() %}{% for a in range(99999) if a %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        "{% endmacro %}{{ m() }}",
    ],
    ids=["loop", "macro"],
)
def test_a_template_that_loops_and_writes_nothing_has_its_time_too(source: str) -> None:
    with pytest.raises(RequestError, match="too long"):
        ChatTemplate(source, {}, seconds=0.05).render([UserMessage("hi")])


async def test_a_short_message_on_which_a_template_loops_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client chooses how often this one loops."""
    monkeypatch.setattr("personae.api.family.ChatTemplate", partial(ChatTemplate, seconds=1.0))
    engine = FakeEngine(tokenizer=byte_tokenizer("{% for a in range(n) %}" + SILENT + "{% endfor %}hello"))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    async with asgi.client(create_app(engine)) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        asked = {"model": "base", "messages": [USER]}
        answers = [
            await client.post(CHAT, json=asked | {"chat_template_kwargs": {"n": n}}) for n in (0, 99999)
        ]
        tasks.cancel_scope.cancel()
    assert answers[0].json()["usage"]["prompt_tokens"] == len("hello")
    assert (answers[1].status_code, answers[1].json()["error"]["param"]) == (400, "messages")
    assert turns > 3


async def test_a_long_conversation_is_rendered_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on while a template works; `slow` makes it work for a while."""
    monkeypatch.setattr("personae.api.family.ChatTemplate", partial(ChatTemplate, seconds=PATIENCE))
    slow = "{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}hello"
    engine = FakeEngine(tokenizer=byte_tokenizer(slow))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    async with asgi.client(create_app(engine)) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        long = [{"role": "user", "content": "x" * 20_000}]
        response = await client.post(CHAT, json={"model": "base", "messages": long})
        tasks.cancel_scope.cancel()
    assert response.json()["usage"]["prompt_tokens"] == len("hello")
    assert turns > 3


async def test_a_key_that_is_not_known_takes_the_path_of_one_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return compare(a, b)

    monkeypatch.setattr("personae.api.tenants.store.hmac.compare_digest", noting)
    with open_house(tmp_path) as house:
        key = house.key("ann")
        wrong = key[:-1] + ("0" if key[-1] != "0" else "1")
        for tried in (wrong, "psn_" + "0" * 12 + "_" + "0" * 64, "nonsense", key):
            async with house.client(tried) as client:
                await client.get("/v1/models")
    assert compared == [32, 32, 32, 32], "each is compared with 32 bytes, in constant time"


async def test_any_number_of_unknown_keys_is_named_briefly_and_few_are_compared_with_known_ones(
    app: Starlette,
) -> None:
    keys = {f"k{number}": 0 for number in range(20_000)}
    ignored: list[str] = []
    body = json.dumps({"messages": [{"role": "user", "content": "hi", **keys}]}).encode()
    decode(body, ChatRequest, 64, ignored=ignored)
    assert len(ignored) < 100
    tool = {"type": "function", "function": {"name": "f", **keys}}
    async with asgi.client(app) as client:
        response = await client.post(CHAT, json={"messages": [USER], "tools": [tool]})
    assert response.json()["error"]["param"].startswith("tools[0].function.k")
