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
from patience import PATIENCE, soon
from starlette.applications import Starlette
from uploads import open_fixture

from personae.api import stream
from personae.api.app import create_app
from personae.api.prompt import _BRIEF_SECONDS
from personae.api.settings import ApiSettings
from personae.api.templates.template import ChatTemplate
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
    on_the_loop, overlap = threads
    assert on_the_loop == threading.get_ident()
    assert overlap != on_the_loop


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
    renders = noted_renders(monkeypatch, seconds=1.0)
    engine = FakeEngine(
        tokenizer=byte_tokenizer("{% for a in range(n) %}" + SILENT + "{% endfor %}{{ messages[0].content }}")
    )
    async with asgi.client(create_app(engine)) as client:
        asked = {"model": "base", "messages": [USER]}
        answers = [
            await client.post(CHAT, json=asked | {"chat_template_kwargs": {"n": n}}) for n in (0, 99999)
        ]
    assert answers[0].json()["usage"]["prompt_tokens"] == len(USER["content"])
    assert (answers[1].status_code, answers[1].json()["error"]["param"]) == (400, "messages")
    assert renders[-2:] == [(True, _BRIEF_SECONDS), (False, None)], "beside the loop, after a moment on it"


async def test_a_long_conversation_is_rendered_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    renders = noted_renders(monkeypatch, seconds=PATIENCE)
    engine = FakeEngine(tokenizer=byte_tokenizer("{{ messages[0].content }}"), max_model_len=30_000)
    async with asgi.client(create_app(engine)) as client:
        long = [{"role": "user", "content": "x" * 20_000}]
        response = await client.post(CHAT, json={"model": "base", "messages": long})
    assert response.json()["usage"]["prompt_tokens"] == 20_000
    assert renders == [(False, None)]


def noted_renders(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[bool, float | None]]:
    """For each call of a chat template whether it held up the loop, and for how long it might; a template has
    `seconds` at most."""
    renders: list[tuple[bool, float | None]] = []

    class Noted(ChatTemplate):
        def render(self, *arguments: Any, **options: Any) -> str:
            renders.append((threading.current_thread() is threading.main_thread(), options.get("seconds")))
            return super().render(*arguments, **options)

    monkeypatch.setattr("personae.api.family.ChatTemplate", partial(Noted, seconds=seconds))
    return renders


async def test_a_key_that_is_not_known_takes_the_path_of_one_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return compare(a, b)

    monkeypatch.setattr("personae.api.tenants.store.hmac.compare_digest", noting)
    with open_fixture(tmp_path) as fixture:
        key = fixture.key("ann")
        wrong = key[:-1] + ("0" if key[-1] != "0" else "1")
        for tried in (wrong, "psn_" + "0" * 12 + "_" + "0" * 64, "nonsense", key):
            async with fixture.client(tried) as client:
                await client.get("/v1/models")
    assert compared == [32, 32, 32, 32], "each is compared with 32 bytes, in constant time"


LONG_TEXT = "a b " * 2**19
TOO_LONG = [
    (CHAT, {"model": "base", "messages": [{"role": "user", "content": LONG_TEXT}]}),
    (
        CHAT,
        {
            "model": "base",
            "messages": [USER],
            "tools": [
                {"type": "function", "function": {"name": f"f{n}", "description": "a b " * 4000}}
                for n in range(128)
            ],
        },
    ),
    (TEXT, {"model": "base", "prompt": LONG_TEXT}),
    (TEXT, {"model": "base", "prompt": ["x", LONG_TEXT]}),
    (TEXT, {"model": "base", "prompt": [5] * 500_000}),
    (TEXT, {"model": "base", "prompt": [[5], [5] * 500_000]}),
    ("/v1/responses", {"model": "base", "input": LONG_TEXT}),
    ("/tokenize", {"prompt": LONG_TEXT}),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
    ("/detokenize", {"tokens": [5] * 500_000}),
]
TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("path", "asked"), TOO_LONG, ids=[f"{path}-{'-'.join(asked)}"[:60] for path, asked in TOO_LONG]
)
async def test_what_cannot_fit_the_context_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(TOOLS_TEMPLATE))
    encoded = 0
    encode = engine.tokenizer._encode

    def counting(texts: Any, add_special_tokens: bool) -> list[list[int]]:
        nonlocal encoded
        encoded += sum(map(len, texts))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "_encode", counting)
    async with asgi.client(create_app(engine)) as client:
        response = await client.post(path, json=asked)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"].partition("[")[0] in asked
    assert encoded < 100_000
    assert engine.submitted == []


async def test_the_last_tokens_of_a_very_long_prompt_are_still_served(engine: FakeEngine) -> None:
    asked = {"model": "base", "prompt": LONG_TEXT + "the end", "truncate_prompt_tokens": 7}
    async with asgi.client(create_app(engine)) as client:
        assert (await client.post(TEXT, json=asked)).status_code == 200
    assert engine.submitted[0].tokens[:7] == tuple(engine.tokenizer.encode("the end", False))


async def test_large_requests_of_a_tenant_are_prepared_one_at_a_time_and_small_ones_go_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = most = 0
    lock, may = threading.Lock(), threading.Event()
    render = ChatTemplate.render

    def slow(self: ChatTemplate, messages: Any, **options: Any) -> str:
        nonlocal running, most
        if threading.current_thread() is threading.main_thread():
            return render(self, messages, **options)
        with lock:
            running += 1
            most = max(most, running)
        assert may.wait(PATIENCE)
        with lock:
            running -= 1
        return render(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", slow)
    monkeypatch.setattr("personae.api.prompt._BRIEF_SECONDS", PATIENCE)  # small ones stay on the loop
    engine = FakeEngine(max_model_len=100_000)
    large = {"model": "base", "messages": [{"role": "user", "content": "x" * 40_000}], "max_tokens": 1}
    with open_fixture(tmp_path, engine) as fixture:
        async with fixture.client(fixture.key("loud")) as loud, fixture.client(fixture.key("quiet")) as quiet:
            statuses: list[int] = []

            async def ask() -> None:
                statuses.append((await loud.post(CHAT, json=large)).status_code)

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(ask)
                await soon(lambda: running == 1, "one is rendered")
                for client in (quiet, loud):
                    small = await client.post(CHAT, json={"model": "base", "messages": [USER]})
                    assert small.status_code == 200
                assert statuses == []
                may.set()
    assert most == 1
    assert statuses == [200] * 4


async def test_a_client_that_leaves_while_its_request_waits_is_not_worked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(max_model_len=100_000)
    app = create_app(engine)
    services = app.state.services
    turn = await services.workers.turn("default")
    decoded = 0
    read = ChatRequest.read

    def counting(body: bytes, ignored: list[str]) -> ChatRequest:
        nonlocal decoded
        decoded += 1
        return read(body, ignored)

    monkeypatch.setattr(ChatRequest, "read", counting)
    asked = {"model": "base", "messages": [{"role": "user", "content": "x" * 40_000}]}
    visits = [asgi.Visit(CHAT, asked, headers=[(b"host", b"localhost")]) for _ in range(5)]
    async with anyio.create_task_group() as tasks:
        for visit in visits:
            tasks.start_soon(visit.run, app)
        await soon(lambda: services.bodies.held() > 200_000, "all bodies are there")
        for visit in visits[1:]:
            visit.leave()
        await soon(lambda: services.bodies.held() < 50_000, "four have gone")
        assert decoded == 0
        turn.end()
    assert decoded == 1
    assert visits[0].status == 200
    assert services.bodies.held() == 0


async def test_bodies_over_a_tenants_budget_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with open_fixture(tmp_path) as fixture:
        key = fixture.key("loud", body_bytes=100_000)
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        held = asgi.Visit(TEXT, headers=[*headers, (b"content-length", b"90000")])
        services = fixture.app.state.services
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(held.run, fixture.app)
            await soon(lambda: services.bodies.held("loud") == 90_000, "it is being taken in")
            async with fixture.client(key) as loud, fixture.client(fixture.key("quiet")) as quiet:
                body = {"model": "base", "prompt": "x" * 20_000}
                refused = await loud.post(TEXT, json=body)
                assert (refused.status_code, refused.json()["error"]["param"]) == (429, "body")
                assert int(refused.headers["retry-after"]) >= 1
                assert (await quiet.post(TEXT, json=body)).status_code == 400, "too long, but read"
                small = {"model": "base", "prompt": "hi"}
                assert (await loud.post(TEXT, json=small)).status_code == 200
            held.leave()
        assert services.bodies.held() == 0


async def test_an_answer_that_is_being_made_holds_nothing_of_the_budget_for_bodies() -> None:
    engine = FakeEngine(max_model_len=100_000, hold_after=3)
    app = create_app(engine)
    visit = asgi.Visit(TEXT, {"model": "base", "prompt": "x" * 50_000}, headers=[(b"host", b"localhost")])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(visit.run, app)
        await soon(lambda: bool(engine.live), "it runs")
        await soon(lambda: app.state.services.bodies.held() == 0, "its body is given back")
        visit.leave()


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (TEXT, {"prompt": [[5] * 300] * 50, "prompt_logprobs": 20}, "prompt_logprobs"),
        (TEXT, {"prompt": [[5] * 300] * 50, "logprobs": 20, "echo": True}, "logprobs"),
        (TEXT, {"prompt": [[5] * 300] * 4, "n": 16, "prompt_logprobs": 20}, "prompt_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 400}], "n": 16, "prompt_logprobs": 20}, "x"),
    ],
    ids=["prompts", "echo", "choices", "chat"],
)
async def test_prompts_times_prompt_logprobs_are_bounded(
    engine: FakeEngine, path: str, fields: dict[str, Any], name: str
) -> None:
    app = create_app(engine, ApiSettings(max_prompt_logprobs=100_000))
    async with asgi.client(app) as client:
        response = await client.post(path, json={"model": "base", "max_tokens": 1, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "out_of_range")
        assert error["param"] == ("prompt_logprobs" if path == CHAT else name)
        fewer = {**fields, ("logprobs" if name == "logprobs" else "prompt_logprobs"): 2}
        answer = await client.post(path, json={"model": "base", "max_tokens": 1, **fewer})
        assert answer.status_code == 200
    assert app.state.services.bodies.held() == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": "word " * 90, "prompt_logprobs": 3, "logprobs": 2, "echo": True, "n": 2}),
        (TEXT, {"prompt": ["word " * 90, "x"], "logprobs": 5, "max_tokens": 50, "ignore_eos": True}),
        (CHAT, {"messages": [{"role": "user", "content": "w " * 150}], "prompt_logprobs": 3}),
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 4, "max_tokens": 200}),
    ],
)
async def test_log_probabilities_encoded_off_the_loop_are_the_same(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    answers = []
    threads: list[bool] = []
    as_json = stream.as_json

    def noting(items: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return as_json(items)

    monkeypatch.setattr(stream, "as_json", noting)
    async with asgi.client(create_app(engine)) as client:
        for few in (0, 10**6):
            monkeypatch.setattr(stream, "_FEW_PLACES", few)
            answer = (await client.post(path, json={"model": "base", "seed": 1, **fields})).json()
            answers.append({name: answer[name] for name in answer if name not in ("id", "created")})
    assert answers[0] == answers[1]
    assert threads
    assert not any(threads)


@pytest.mark.parametrize("padding", ["", " " * 50_000])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (TEXT, '{"model": "base", "prompt": "hi", "max_tokens": 1, "max_tokens": 9}', "max_tokens"),
        (
            CHAT,
            '{"model": "base", "messages": [{"role": "user", "content": "a", "content": "b"}]}',
            "content",
        ),
        ("/v1/responses", '{"model": "base", "input": "a", "inp\\u0075t": "b"}', "input"),
        ("/tokenize", '{"prompt": "a", "prompt": "b"}', "prompt"),
    ],
)
async def test_a_key_that_is_given_twice_is_a_400_that_names_it(
    app: Starlette, engine: FakeEngine, path: str, body: str, name: str, padding: str
) -> None:
    async with asgi.client(app) as client:
        response = await client.post(
            path, content=padding + body, headers={"content-type": "application/json"}
        )
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "duplicate_parameter", name)
    assert engine.submitted == []


@pytest.mark.parametrize("value", [1e-300, 5e-324, 1e-40, 0.009, 10.01, 1e300])
async def test_a_penalty_that_would_overflow_is_refused(app: Starlette, value: float) -> None:
    async with asgi.client(app) as client:
        response = await client.post(
            TEXT, json={"model": "base", "prompt": "hi", "repetition_penalty": value}
        )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "repetition_penalty")


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
