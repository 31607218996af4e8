"""`POST /v1/responses/input_tokens` by the `openai` package: the count is that of the prompt."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from responses_asked import WEATHER
from uploads import UploadFixture

RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Bonn"}'}
ASKED: list[dict[str, Any]] = [
    {"input": "hi"},
    {"input": "hi", "instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "required"},
    {"input": [{"role": "user", "content": "Rain?"}, CALL, RESULT], "tools": [WEATHER]},
    {"input": "hi", "reasoning": {"effort": "none"}},
]


@pytest.mark.parametrize("fields", ASKED)
def test_as_many_tokens_are_counted_as_the_response_has_in_its_prompt(
    fields: dict[str, Any], ann: OpenAI, fixture: UploadFixture
) -> None:
    count = ann.responses.input_tokens.count(model="base", **fields).input_tokens
    assert not fixture.engine.submitted
    usage = ann.responses.create(model="base", **fields).usage
    assert usage is not None
    assert count == usage.input_tokens == len(fixture.engine.submitted[-1].tokens)


def test_the_count_includes_what_the_response_would_follow(ann: OpenAI) -> None:
    first = ann.responses.create(model="base", input="I am Ada.")
    kept = ann.conversations.create(items=[{"role": "user", "content": "I am Ada."}])
    alone = ann.responses.input_tokens.count(model="base", input="Who?").input_tokens
    for earlier in ({"previous_response_id": first.id}, {"conversation": kept.id}):
        count = ann.responses.input_tokens.count(model="base", input="Who?", **earlier).input_tokens
        usage = ann.responses.create(model="base", input="Who?", store=False, **earlier).usage
        assert usage is not None
        assert alone < count == usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "hi", "truncation": "auto"}, "truncation"),
        ({"input": "hi", "extra_body": {"personality": "friendly"}}, "personality"),
        ({"input": "hi", "extra_body": {"max_output_tokens": 5}}, "max_output_tokens"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": "hi", "model": "nobody"}, "model"),
        ({"input": "hi", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_name(
    fields: dict[str, Any], param: str, ann: OpenAI
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        ann.responses.input_tokens.count(**{"model": "base", **fields})
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["param"] == param
