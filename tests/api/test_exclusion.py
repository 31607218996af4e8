"""`allowed_token_ids` and `bad_words` at the door: what reaches the engine, and what is refused."""

from typing import Any

import asgi
import pytest
from fake_engine import END_ID, FakeEngine, byte_tokenizer
from starlette.applications import Starlette

from personae.api.app import create_app

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hi"}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
}


async def asked(app: Starlette, path: str, **fields: Any) -> Any:
    async with asgi.client(app) as client:
        return await client.post(path, json={"model": "base", **ROUTES[path], **fields})


def word(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text, False))


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_hands_them_to_each_choice(path: str, app: Starlette, engine: FakeEngine) -> None:
    more = {} if path == "/v1/responses" else {"n": 2}
    response = await asked(app, path, allowed_token_ids=[7, 3, 7], bad_words=["no", " never"], **more)
    assert response.status_code == 200, response.text
    for log in engine.submitted:
        assert log.params.allowed_tokens == (1 << 3 | 1 << 7).to_bytes(40, "little")
        assert log.params.bad_words_token_ids == (word("no"), word(" no"), word("never"), word(" never"))


@pytest.mark.parametrize("allowed", [None, list(range(300))])
async def test_null_all_tokens_and_an_empty_list_of_words_exclude_nothing(
    allowed: list[int] | None, app: Starlette, engine: FakeEngine
) -> None:
    response = await asked(app, "/v1/completions", allowed_token_ids=allowed, bad_words=[])
    assert response.status_code == 200
    [log] = engine.submitted
    assert (log.params.allowed_tokens, log.params.bad_words_token_ids) == (b"", ())


async def test_a_word_that_the_model_cannot_say_is_as_good_as_left_out() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(special=["<|extra|>"]), vocab_size=259)
    response = await asked(create_app(engine), "/v1/completions", bad_words=["<|extra|>"])
    assert response.status_code == 200
    assert engine.submitted[0].params.bad_words_token_ids == ()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, 300]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [1] * 301}, "allowed_token_ids"),
    ({"allowed_token_ids": "1"}, "allowed_token_ids"),
    ({"bad_words": "no"}, "bad_words"),
    ({"bad_words": ["no", ""]}, "bad_words[1]"),
    ({"bad_words": ["  "]}, "bad_words[0]"),
    ({"bad_words": ["x" * 129]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 1025}, "bad_words"),
    ({"bad_words": ["x" * 100] * 41}, "bad_words"),
    ({"bad_words": [[1, 2]]}, "bad_words[0]"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_a_list_that_is_wrong_is_refused_by_name(
    fields: dict[str, Any], param: str, app: Starlette, engine: FakeEngine
) -> None:
    response = await asked(app, "/v1/completions", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.submitted == []


NOTHING_LEFT: list[tuple[dict[str, Any], list[str]]] = [
    ({"allowed_token_ids": [END_ID], "min_tokens": 1}, ["allowed_token_ids", "min_tokens"]),
    (
        {"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 1},
        ["allowed_token_ids", "min_tokens"],
    ),
    (
        {"allowed_token_ids": list(word("ab")), "bad_words": ["aa", "bb", "ab"]},
        ["allowed_token_ids", "bad_words"],
    ),
    (
        {"allowed_token_ids": list(word("ab")), "bad_words": ["aa", "b"]},
        ["allowed_token_ids", "bad_words"],
    ),
]


@pytest.mark.parametrize(("fields", "names"), NOTHING_LEFT)
async def test_fields_that_may_leave_nothing_to_be_said_are_refused_together(
    fields: dict[str, Any], names: list[str], app: Starlette, engine: FakeEngine
) -> None:
    response = await asked(app, "/v1/completions", **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, names[0])
    assert all(f"`{name}`" in error["message"] for name in names)
    assert engine.submitted == []


async def test_an_answer_that_may_only_end_is_no_contradiction(app: Starlette) -> None:
    assert (await asked(app, "/v1/completions", allowed_token_ids=[END_ID])).status_code == 200
    fields = {"allowed_token_ids": [END_ID], "min_tokens": 1, "ignore_eos": True}
    assert (await asked(app, "/v1/completions", **fields)).status_code == 200


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
BINDING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"response_format": SCHEMA}, "response_format.json_schema.schema"),
    ("/v1/completions", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ("/v1/chat/completions", {"guided_regex": "a"}, "guided_regex"),
    ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
]


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
@pytest.mark.parametrize(("path", "binding", "param"), BINDING)
async def test_beside_what_binds_the_answer_both_are_named(
    path: str, binding: dict[str, Any], param: str, field: str, app: Starlette, engine: FakeEngine
) -> None:
    value = ["a"] if field == "bad_words" else [1]
    response = await asked(app, path, **binding, **{field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert f"`{field}` cannot be combined with `{param}`" in error["message"]
    assert engine.submitted == []


async def test_free_text_that_only_has_a_format_is_not_bound(app: Starlette) -> None:
    fields = {"bad_words": ["a"], "response_format": {"type": "text"}}
    assert (await asked(app, "/v1/chat/completions", **fields)).status_code == 200
