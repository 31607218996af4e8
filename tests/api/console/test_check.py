"""`POST /v1/chat/completions/check`: the verdict of the engine that would answer."""

from typing import Any

import httpx
import pytest
from patience import PATIENCE
from real_server import Running

# No grammar enforces it, and no answer is found.
TWICE = {"type": "string", "pattern": r"^(abcdefgh)\1$", "maxLength": 40}
SCHEMA = {
    "type": "object",
    "title": "Words",
    "properties": {"a": TWICE},
    "required": ["a"],
    "additionalProperties": False,
}


def check(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "verse", "messages": [{"role": "user", "content": "hi"}], **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions/check", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def formatted(schema: Any, strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}


def verdicts(schema: dict[str, Any]) -> dict[str, str]:
    return {each["pointer"]: each["verdict"] for each in schema["keywords"]}


def test_a_strict_schema_is_refused_with_the_keywords_that_have_to_go(server: Running) -> None:
    found = check(server, response_format=formatted(SCHEMA, strict=True))
    assert not found["accepted"]
    assert "pattern" in found["error"]["message"]
    [schema] = found["schemas"]
    said = verdicts(schema)
    assert said["#/properties/a/pattern"] == "refused"
    assert said["#/properties/a/maxLength"] == "enforced"
    assert said["#/title"] == "no effect"
    without = {**SCHEMA, "properties": {"a": {"type": "string", "maxLength": 40}}}
    found = check(server, response_format=formatted(without, strict=True))
    assert found["accepted"]
    assert set(verdicts(found["schemas"][0]).values()) == {"enforced", "no effect"}
    assert found["bound_by"] == "response_format.json_schema.schema"
    assert found["prompt_tokens"] > 1


def test_of_a_schema_that_is_not_strict_some_is_only_checked(server: Running) -> None:
    found = check(server, response_format=formatted(SCHEMA, strict=False))
    assert found["accepted"]
    said = verdicts(found["schemas"][0])
    assert said["#/properties/a/pattern"] == "checked"
    assert said["#/properties/a/maxLength"] == "best effort"


def test_what_no_grammar_enforces_is_enforced_by_checks(server: Running) -> None:
    items = {"type": "integer", "minimum": 3, "multipleOf": 7}
    schema = {"type": "array", "uniqueItems": True, "items": items}
    found = check(server, response_format=formatted(schema, strict=True))
    assert found["accepted"]
    assert set(verdicts(found["schemas"][0]).values()) == {"enforced"}
    found = check(server, response_format=formatted(schema, strict=False))
    assert verdicts(found["schemas"][0])["#/items/multipleOf"] == "checked"


def test_every_tool_has_a_verdict_of_its_own(server: Running) -> None:
    def tool(name: str, strict: bool, **properties: Any) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
        return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}

    tools = [tool("f", True, x={"type": "string"}), tool("g", True, y=TWICE)]
    found = check(server, tools=tools)
    assert not found["accepted"]
    assert [(each["param"], each["accepted"]) for each in found["schemas"]] == [
        ("tools[0].function.parameters", True),
        ("tools[1].function.parameters", False),
    ]
    assert verdicts(found["schemas"][1])["#/properties/y/pattern"] == "refused"


def test_a_tool_that_no_grammar_enforces_is_enforced_by_checks_under_strict_alone(server: Running) -> None:
    number = {"type": "number", "oneOf": [{"type": "integer"}, {"minimum": 2.5}]}
    parameters = {"type": "object", "properties": {"n": number}, "additionalProperties": False}
    for strict, verdict in ((True, "enforced"), (False, "checked")):
        function = {"name": "f", "strict": strict, "parameters": parameters}
        found = check(server, tools=[{"type": "function", "function": function}])
        assert found["accepted"]
        assert verdicts(found["schemas"][0])["#/properties/n/oneOf"] == verdict


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"model": "nobody"}, "model"),
        ({"response_format": formatted({"type": "nonsense"}, True)}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_refusal_says_which_field_it_is_about(fields: dict[str, Any], param: str, server: Running) -> None:
    found = check(server, **fields)
    assert not found["accepted"]
    assert found["error"]["param"] == param


def test_a_check_leaves_nothing_running_and_writes_no_token(server: Running) -> None:
    before = server.client.stats()
    assert check(server, structured_outputs={"regex": "[a-z]{3}"})["accepted"]
    text = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:request_success_total{finished_reason="stop"' not in text
    assert server.client.stats().counters.steps >= before.counters.steps
