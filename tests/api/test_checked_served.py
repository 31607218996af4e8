"""Strict schemas that no grammar enforces, over HTTP."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from patience import PATIENCE
from real_server import Running, running

from personae.api.bundled import NAMED
from personae.api.options import ServeOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "sizes": {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "uniqueItems": True},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["sizes", "count"],
    "additionalProperties": False,
    "not": {"properties": {"count": {"multipleOf": 5}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServeOptions(NAMED, max_seqs=8)) as server:
        yield server


def body(path: str, seed: int, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    format = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    return {**asked, "response_format": format, "max_tokens": 48, "temperature": 1.5, "seed": seed, **fields}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_are_valid_and_complete_and_streamed_as_they_are_unstreamed(
    path: str, server: Running
) -> None:
    for seed in range(4):
        answer = httpx.post(server.url + path, json=body(path, seed), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
        streamed = ""
        with httpx.stream(
            "POST", server.url + path, json=body(path, seed, stream=True), timeout=PATIENCE
        ) as events:
            for line in events.iter_lines():
                if line.startswith("data: {"):
                    for one in json.loads(line[6:])["choices"]:
                        streamed += one.get("text") or one.get("delta", {}).get("content") or ""
        assert streamed == text


def test_an_answer_beside_one_that_is_checked_does_not_change(server: Running) -> None:
    url = f"{server.url}/v1/completions"
    plain = {"prompt": "hi", "max_tokens": 40, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    alone = httpx.post(url, json=plain, timeout=PATIENCE).json()["choices"][0]["text"]
    checked = threading.Thread(
        target=lambda: httpx.post(url, json=body("", 9, max_tokens=200), timeout=PATIENCE)
    )
    checked.start()
    beside = httpx.post(url, json=plain, timeout=PATIENCE).json()["choices"][0]["text"]
    checked.join()
    assert beside == alone


def test_a_budget_without_room_for_a_valid_answer_is_refused(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=body("", 1, max_tokens=2), timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_calls_of_a_strict_function_that_no_grammar_enforces_are_valid(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}
    asked = body("/v1/chat/completions", 1, tools=[tool], tool_choice="required", max_tokens=120)
    del asked["response_format"]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))
