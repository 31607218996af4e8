"""Defaults of an adapter's versions: what a request gets that leaves fields out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import END_ID, FakeEngine
from uploads import UploadFixture, open_fixture, upload, whole

from personae.api.adapters.defaults import MAX_BYTES
from personae.engine.sequence import SequenceLog
from personae.errors import GrammarError

pytestmark = pytest.mark.anyio
PATCH = "/v1/adapters/poet"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
DEFAULTS: dict[str, Any] = {
    "system": "You rhyme.",
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "presence_penalty": 0.5,
    "max_tokens": 3,
    "stop": ["!"],
    "speculate": False,
}


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[UploadFixture]:
    with open_fixture(tmp_path / "data", FakeEngine('{"a": 1}')) as fixture:
        yield fixture


async def made(client: httpx.AsyncClient, defaults: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    assert (await upload(client, "poet", whole(seed), replace="true")).status_code == 201
    answer = await client.patch(PATCH, json={"defaults": defaults})
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = answer.json()
    return record


async def ask(fixture: UploadFixture, client: httpx.AsyncClient, **fields: Any) -> tuple[SequenceLog, str]:
    """What the engine gets, and the text of its prompt."""
    body = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    log = fixture.engine.submitted[-1]
    return log, fixture.engine.tokenizer.decode(log.tokens[: log.prompt_length], skip_special_tokens=False)


async def test_a_request_gets_the_defaults_for_what_it_leaves_out(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        assert (await made(client, DEFAULTS))["defaults"] == DEFAULTS
        log, prompt = await ask(fixture, client)
        params = log.params
        assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
        assert (params.presence_penalty, params.max_tokens, params.speculate) == (0.5, 3, False)
        assert prompt.startswith("<|im_start|>system\nYou rhyme.<|im_end|>\n<|im_start|>user\nhi")
        base, plain = await ask(fixture, client, model="base")
        assert (base.params.temperature, base.params.speculate, "rhyme" in plain) == (1.0, True, False)


async def test_a_requests_own_fields_win(fixture: UploadFixture) -> None:
    own = {"temperature": 0, "top_p": 1, "top_k": -1, "presence_penalty": 0, "speculate": True}
    async with fixture.client() as client:
        await made(client, DEFAULTS | {"response_format": FORMAT})
        messages = [{"role": "developer", "content": "Be plain."}, {"role": "user", "content": "hi"}]
        log, prompt = await ask(
            fixture,
            client,
            messages=messages,
            **own,
            max_completion_tokens=50,
            response_format={"type": "text"},
        )
        params = log.params
        assert (params.temperature, params.top_p, params.top_k) == (0, 1, 0)
        assert (params.presence_penalty, params.max_tokens, params.speculate) == (0, 50, True)
        assert log.grammar is None
        assert "rhyme" not in prompt
        bound, _ = await ask(fixture, client)
        assert bound.grammar is not None
        assert bound.grammar.kind == "json_schema"
        other, _ = await ask(fixture, client, structured_outputs={"choice": ["a", "b"]})
        assert other.grammar is not None
        assert other.grammar.kind == "choice"


async def test_completions_messages_and_responses_get_them_too(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await made(client, DEFAULTS)
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
            ("/v1/responses", {"input": "hi", "store": False}),
        ):
            answer = await client.post(path, json={"model": "poet", **body})
            assert answer.status_code == 200, answer.text
            log = fixture.engine.submitted[-1]
            assert log.params.temperature == 0.25, path
            assert log.params.max_tokens == body.get("max_tokens", 3), path
            prompt = fixture.engine.tokenizer.decode(log.tokens[: log.prompt_length])
            assert ("You rhyme." in prompt) == (path != "/v1/completions"), path


async def test_prompts_that_are_only_counted_have_the_system_message_too(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await made(client, DEFAULTS)
        messages = [{"role": "user", "content": "hi"}]
        log, _ = await ask(fixture, client)
        counted = await client.post("/tokenize", json={"model": "poet", "messages": messages})
        assert counted.json()["count"] == log.prompt_length
        count = await client.post("/v1/messages/count_tokens", json={"model": "poet", "messages": messages})
        assert count.json()["input_tokens"] == log.prompt_length


async def test_defaults_belong_to_a_version_and_the_next_one_begins_with_them(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        await made(client, {"system": "One.", "temperature": 0.1})
        second = (await upload(client, "poet", whole(2), replace="true")).json()
        assert second["defaults"] == {"system": "One.", "temperature": 0.1}
        changed = await client.patch(PATCH, json={"defaults": {"system": "Two.", "temperature": None}})
        assert changed.json()["defaults"] == {"system": "Two."}
        for model, system in (("poet", "Two."), ("poet@1", "One."), ("poet@2", "Two.")):
            assert system in (await ask(fixture, client, model=model))[1]
        first = await client.patch(f"{PATCH}@1", json={"defaults": {"system": "Uno."}})
        assert first.json()["defaults"] == {"system": "Uno.", "temperature": 0.1}
        await client.patch(PATCH, json={"pinned": 1})
        assert "Uno." in (await ask(fixture, client))[1]
        await client.patch(PATCH, json={"defaults": None})
        assert (await client.get(PATCH)).json()["defaults"] == {}
        assert (await client.get(f"{PATCH}@2")).json()["defaults"] == {"system": "Two."}


async def test_models_show_the_defaults(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await made(client, DEFAULTS)
        shown = (await client.get("/v1/models/poet")).json()
        assert shown["defaults"] == DEFAULTS
        assert (shown["sampling_defaults"]["temperature"], shown["sampling_defaults"]["top_k"]) == (0.25, 7)
        listed = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        assert listed["poet"]["sampling_defaults"]["temperature"] == 0.25
        assert "defaults" not in listed["poet"]
        assert "defaults" not in (await client.get("/v1/adapters")).json()["data"][0]
        assert "defaults" not in (await client.get("/v1/models/base")).json()


async def test_a_default_length_shrinks_to_what_is_left_and_a_requested_one_is_refused(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        await made(client, {"max_tokens": 10_000})
        log, _ = await ask(fixture, client)
        assert log.params.max_tokens == fixture.engine.max_model_len - log.prompt_length
        body = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10_000}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400


async def test_errors_count_the_messages_as_the_request_does(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await made(client, {"system": "One."})
        messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "x", "tool_call_id": "c"}]
        body = {"model": "poet", "messages": messages}
        plain = await client.post("/v1/chat/completions", json={**body, "model": "base"})
        mine = await client.post("/v1/chat/completions", json=body)
        assert mine.json()["error"] == plain.json()["error"]
        last = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        body = {"model": "poet", "messages": last, "continue_final_message": True}
        plain = await client.post("/v1/chat/completions", json={**body, "model": "base"})
        mine = await client.post("/v1/chat/completions", json=body)
        assert mine.json() == plain.json() or mine.status_code == plain.status_code == 200


BAD = {
    "temperature": 3,
    "top_p": 0,
    "top_k": -5,
    "min_p": 2,
    "presence_penalty": 9,
    "repetition_penalty": 0,
    "max_tokens": 0,
    "stop": [""],
    "enable_thinking": True,
    "response_format": {"type": "json_schema", "json_schema": {"schema": "object"}},
    "tool_format": "morse",
    "reasoning_format": "morse",
    "chat_template": "{% if %}",
    "system": 5,
    "speculate": "no",
    "temprature": 1,
}


async def test_a_default_that_no_request_could_have_is_a_400_and_changes_nothing(
    fixture: UploadFixture,
) -> None:
    async with fixture.client() as client:
        await made(client, {"system": "One."})
        for field, value in BAD.items():
            answer = await client.patch(PATCH, json={"defaults": {field: value}})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"].startswith(f"defaults.{field}"), answer.text
        assert (await client.get(PATCH)).json()["defaults"] == {"system": "One."}


async def test_what_the_engine_cannot_compile_is_no_default(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await made(client, {})
        fixture.engine.refuse_late = GrammarError("`type` at #/type is unknown.")
        answer = await client.patch(PATCH, json={"defaults": {"response_format": FORMAT}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "defaults.response_format.json_schema.schema"), (
            error
        )
        assert (await client.get(PATCH)).json()["defaults"] == {}


async def test_other_bad_changes_are_refused(fixture: UploadFixture) -> None:
    async with fixture.client() as client:
        await made(client, {})
        long = await client.patch(PATCH, json={"defaults": {"system": "x" * MAX_BYTES}})
        assert (long.status_code, long.json()["error"]["param"]) == (413, "defaults")
        both = await client.patch(PATCH, json={"pinned": 1, "defaults": {}})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "defaults")
        assert (await client.patch("/v1/adapters/none", json={"defaults": {}})).status_code == 404
        assert (await client.patch(f"{PATCH}@9", json={"defaults": {}})).status_code == 404


async def test_a_chat_template_is_a_program_that_only_an_admin_sets(fixture: UploadFixture) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    admin, ann = fixture.key("root", "admin"), fixture.key("ann")
    async with fixture.client(ann) as client:
        assert (await upload(client, "poet", whole())).status_code == 201
        refused = await client.patch(PATCH, json={"defaults": {"chat_template": template}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "defaults.chat_template")
    async with fixture.client(admin) as client:
        change = {"defaults": {"chat_template": template, "system": "s"}}
        done = await client.patch(PATCH, json=change, params={"tenant": "ann"})
        assert done.status_code == 200, done.text
    async with fixture.client(ann) as client:
        log, prompt = await ask(fixture, client)
        assert prompt == "[s][hi]"
        assert END_ID not in log.tokens
        kept = await client.patch(PATCH, json={"defaults": {"temperature": 0.5}})
        assert kept.status_code == 403, "the template would be set again"


async def test_a_tool_format_of_its_own_reads_its_calls(fixture: UploadFixture) -> None:
    fixture.engine.answer = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    async with fixture.client() as client:
        await made(client, {"tool_format": "mistral"})
        mine = await client.post("/v1/chat/completions", json={**body, "model": "poet"})
        assert mine.status_code == 200, mine.text
        calls = mine.json()["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["add"]
        base = await client.post("/v1/chat/completions", json={**body, "model": "base"})
        assert base.status_code == 200, base.text
        assert not base.json()["choices"][0]["message"].get("tool_calls")
