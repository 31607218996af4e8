"""What is refused is named as a client of responses knows it."""

from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from openai import OpenAI
from responses_asked import WEATHER, ask
from starlette.applications import Starlette

from personae.errors import BudgetTooSmall, GrammarError, Overloaded

pytestmark = pytest.mark.anyio


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": False}}}, "text.format.schema"),
    (
        {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
            "guided_decoding_backend": "outlines",
        },
        "guided_decoding_backend",
    ),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}]},
        "tools[0].tools[0].name",
    ),
    (
        {
            "tools": [
                {"type": "web_search"},
                {"type": "function", "name": "f", "strict": True, "parameters": {"type": "array"}},
            ]
        },
        "tools[0].parameters",
    ),
    ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            },
        },
        "tool_choice.tools[0].name",
    ),
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "hi"}]}, "input[0].type"),
    ({"input": [{"role": "nobody", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input"),
    (
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"role": "user", "content": [{"type": "input_image"}]},
            ]
        },
        "input[1].content[0].type",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_what_is_wrong_is_named_as_the_client_knows_it(
    app: Starlette, fields: dict[str, Any], param: str
) -> None:
    visit = await ask(app, **fields)
    assert visit.status == 400, visit.chunks
    assert visit.error["param"] == param
    for chats in ("messages", "response_format", "max_completion_tokens", ".function"):
        assert chats not in visit.error["message"]


async def test_refusals_of_the_engine_name_the_field_too(app: Starlette, engine: FakeEngine) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "string"}}
    engine.refuse = BudgetTooSmall("The shortest answer has 9 tokens.")
    small = await ask(app, max_output_tokens=3, text={"format": schema})
    assert (small.status, small.error["param"]) == (400, "max_output_tokens")
    engine.refuse = GrammarError("No.")
    bound = await ask(app, text={"format": schema})
    assert (bound.status, bound.error["param"]) == (400, "text.format.schema")


def test_a_full_engine_is_a_503_and_one_that_breaks_off_a_failed_response(
    client: OpenAI, engine: FakeEngine
) -> None:
    engine.refuse = Overloaded("full")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="base", input="hi", stream=True)
    engine.refuse, engine.fail_after = None, 4
    *_, delta, last = client.responses.create(model="base", input="hi", stream=True)
    assert delta.type == "response.output_text.delta"
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "could not be finished" in last.response.error.message
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="base", input="hi")
