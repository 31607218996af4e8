"""Answers that close, through the whole product, by a model whose weights are noise."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from patience import PATIENCE
from real_server import Running, running
from tiny_models import make_model_folder

from personae.api.options import ServeOptions

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2},
        "next": {"$ref": "#"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(ServeOptions(make_model_folder(tmp_path_factory.mktemp("model")), max_seqs=8)) as server:
        yield server


def ask(server: Running, format: dict[str, Any] | None, **extra: Any) -> httpx.Response:
    model = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "temperature": 1.5, **extra}
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body | ({} if format is None else {"response_format": format}),
        timeout=PATIENCE,
    )


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_budget_below_the_shortest_answer_is_refused_by_its_name(
    server: Running, field: str, stream: bool
) -> None:
    response = ask(server, format_of(SCHEMA), **{field: 5, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["code"] == "max_tokens_too_small"
    assert f"`{field}`" in error["message"]
    shortest = int(error["message"].split(" has ")[1].rstrip("."))
    assert ask(server, format_of(SCHEMA), max_tokens=shortest).status_code == 200
    assert ask(server, format_of(SCHEMA), max_tokens=shortest - 1).status_code == 400


def test_answers_are_whole_within_their_budgets_with_siblings_and_logprobs(server: Running) -> None:
    check = jsonschema_rs.validator_for(SCHEMA)
    for budget in (60, 75, 100):
        extra = {"max_tokens": budget, "n": 3, "seed": budget, "logprobs": True, "top_logprobs": 2}
        response = ask(server, format_of(SCHEMA), **extra)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert check.is_valid(json.loads(choice["message"]["content"])), choice
            assert len(choice["logprobs"]["content"]) <= budget


def test_what_is_left_of_the_context_is_a_budget_as_well(server: Running) -> None:
    response = ask(server, {"type": "json_object"}, seed=4)
    assert response.status_code == 200, response.text
    assert isinstance(json.loads(response.json()["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize("backend", ["auto", "outlines", "guidance"])
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"choice": ["certainly not", "not at all", "not in May"]}, "certainly not|not at all|not in May"),
        ({"regex": r"^\d{4}-\d{2}-\d{2}(T\d{2})?$"}, r"\d{4}-\d{2}-\d{2}(T\d{2})?"),
    ],
    ids=["choice", "regex"],
)
def test_choices_and_expressions_are_whole_at_their_shortest_by_every_backend(
    server: Running, backend: str, asked: dict[str, Any], pattern: str
) -> None:
    extra = {"structured_outputs": asked, "guided_decoding_backend": backend}
    refused = ask(server, None, **extra, max_tokens=1).json()
    shortest = int(refused["error"]["message"].split(" has ")[1].rstrip("."))
    for budget in range(shortest, shortest + 4):
        response = ask(server, None, **extra, max_tokens=budget)
        assert response.status_code == 200, response.text
        assert re.fullmatch(pattern, response.json()["choices"][0]["message"]["content"])


def test_a_backend_that_does_not_take_what_is_asked_refuses_it_by_name(server: Running) -> None:
    response = ask(
        server, None, structured_outputs={"regex": ".*"}, guided_decoding_backend="outlines", max_tokens=4
    )
    assert response.status_code == 400
    assert "outlines does not support this regex" in response.json()["error"]["message"]
