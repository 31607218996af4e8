"""Every wrong request gets a 4xx that names the field, and the engine hears nothing of it."""

import codecs
import gzip
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette

from personae.api.app import create_app

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
FLAT = {"type": "function", "name": "f", "parameters": {}}
NESTED = {"type": "function", "function": {"name": "f", "parameters": {}}}
DEEP: Any = {}
for _ in range(70):
    DEEP = {"a": DEEP}


def schema(value: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **extra}}


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "robot", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
        "messages[0].content[1].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLING, {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
    (
        {"messages": [USER, CALLING, {"role": "tool", "tool_call_id": "b", "content": "x"}]},
        "messages[2].tool_call_id",
    ),
    (
        {"messages": [USER, {"role": "tool", "tool_call_id": "a", "content": "x"}, CALLING]},
        "messages[1].tool_call_id",
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [USER] * 5000}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "12"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {str(id): 1 for id in range(2000)}}, "logit_bias"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [1, 300]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"model": "nobody"}, "model"),
    ({"model": 5}, "model"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema("no schema")}, "response_format.json_schema.schema"),
    ({"response_format": schema(False)}, "response_format.json_schema.schema"),
    ({"response_format": schema({}, name="")}, "response_format.json_schema.name"),
    ({"response_format": schema({}, strictly=True)}, "response_format.json_schema.strictly"),
    ({"response_format": schema(DEEP)}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"backend": "outlines", "regex": "a"}}, "structured_outputs.backend"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": DEEP}}, "structured_outputs"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_json": "no"}, "guided_json"),
    ({"guided_decoding_backend": "outlines", "guided_json": {}}, "guided_decoding_backend"),
    ({"guided_decoding_backend": "lm-format-enforcer", "guided_regex": "a"}, "guided_decoding_backend"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"property_order": "any"}, "property_order"),
    ({"property_order": "random", "guided_json": {}}, "property_order"),
    ({"guided_whitespace_pattern": " ", "guided_json": {}}, "guided_whitespace_pattern"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format"),
    ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strictly": True}}]},
        "tools[0].function.strictly",
    ),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.custom.name"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"store": 0}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"thinking_token_budget": 100}, "thinking_token_budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking"),
    ({"reasoning": {"max_tokens": 100}}, "reasoning"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"metadata": "a"}, "metadata"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprobs": True, "logprob_token_ids": [1, 300]}, "logprob_token_ids[1]"),
    ({"logprobs": True, "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"truncation_side": "middle", "truncate_prompt_tokens": 4}, "truncation_side"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
]

COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 300]}, "prompt[1]"),
    ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": "x" * 512}, "prompt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ({"prompt": "x" * 600, "truncate_prompt_tokens": 500, "max_tokens": 13}, "max_tokens"),
    ({"prompt": "x" * 600, "truncate_prompt_tokens": -1, "max_tokens": 512}, "max_tokens"),
    ({"prompt": [1, 300], "truncate_prompt_tokens": 1}, "prompt[1]"),
    ({"prompt": [1] * 600}, "prompt"),
    ({"prompt": ["a", "x" * 512]}, "prompt[1]"),
    ({"prompt": ["a"] * 100, "n": 10}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"n": 17}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"suffix": 1}, "suffix"),
    ({"messages": [USER]}, "messages"),
    ({"foo": 1}, "foo"),
]

BODIES = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"null", None),
    (b'{"model": "base", "messages": [}', None),
    (b'{"model": "base", "temperature": NaN}', None),
    (b'{"model": "base", "user": "\xff"}', None),
    (b'{"model": "base", "user": "\\ud800"}', None),
    (b'{"model": "base", "temperature": 1e999}', "temperature"),
    (b'{"model": "base", "seed": ' + b"9" * 5000 + b"}", "seed"),
    (b'{"model": "base", "functions": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    (b'{"model": "base"}', "messages"),
]


async def refused(app: Starlette, path: str, **kwargs: Any) -> dict[str, Any]:
    async with asgi.client(app) as client:
        response = await client.post(path, **kwargs)
    assert 400 <= response.status_code < 500, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("change", "param"), CHAT, ids=str)
async def test_chat_refuses(change: dict[str, Any], param: str, app: Starlette, engine: FakeEngine) -> None:
    body = {"model": "base", "messages": [USER], **change}
    assert (await refused(app, "/v1/chat/completions", json=body))["param"] == param
    assert engine.submitted == []


@pytest.mark.parametrize(("change", "param"), COMPLETIONS, ids=str)
async def test_completions_refuse(
    change: dict[str, Any], param: str, app: Starlette, engine: FakeEngine
) -> None:
    body = {"model": "base", "prompt": "hi", **change}
    assert (await refused(app, "/v1/completions", json=body))["param"] == param
    assert engine.submitted == []


@pytest.mark.parametrize(("body", "param"), BODIES, ids=range(len(BODIES)))
async def test_a_body_that_is_no_request_is_refused(body: bytes, param: str | None, app: Starlette) -> None:
    headers = {"content-type": "application/json"}
    error = await refused(app, "/v1/chat/completions", content=body, headers=headers)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "param", "valid"),
    [
        (
            {"messages": [{"role": "bot"}]},
            "messages[0].role",
            "assistant, developer, function, system, tool, user",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", "auto, none, required"),
        ({"reasoning_effort": "most"}, "reasoning_effort", "high, low, max, medium, minimal, none, xhigh"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type",
            "json_object, json_schema, structural_tag, text",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "custom, function"),
        (
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "false",
        ),
    ],
    ids=["role", "choice", "effort", "format", "tool", "boolean"],
)
async def test_an_invalid_value_is_told_the_valid_ones(
    change: dict[str, Any], param: str, valid: str, app: Starlette
) -> None:
    error = await refused(app, "/v1/chat/completions", json={"model": "base", "messages": [USER], **change})
    assert error["param"] == param
    assert error["message"].endswith(f"; valid are {valid}.")


@pytest.mark.parametrize(
    ("path", "change", "shown"),
    [
        ("chat/completions", {"stream_options": {"include_obfuscation": True}}, "Invalid value true;"),
        ("chat/completions", {"tool_choice": 'it\'s "so"'}, 'Invalid value "it\'s \\"so\\"";'),
        ("chat/completions", {"reasoning_effort": "x" * 1000}, f'Invalid value "{"x" * 100}";'),
        ("responses", {"input": [{"type": None}]}, "Expected `str`, got `null`."),
    ],
    ids=["boolean", "quotes", "long", "null"],
)
async def test_a_value_is_shown_in_json_as_it_was_sent(
    path: str, change: dict[str, Any], shown: str, app: Starlette
) -> None:
    base = {"model": "base", "messages": [USER]} if path == "chat/completions" else {"model": "base"}
    assert shown in (await refused(app, f"/v1/{path}", json=base | change))["message"]


async def test_two_ways_to_bind_an_answer_are_told_as_two(app: Starlette) -> None:
    bound = {"regex": "a", "choice": ["a"]}
    body = {"model": "base", "prompt": "hi", "structured_outputs": bound}
    assert "not regex and choice at once" in (await refused(app, "/v1/completions", json=body))["message"]


OF_VLLM: list[tuple[str, Any, Any]] = [
    ("use_beam_search", False, True),
    ("length_penalty", 1.0, 2.0),
    ("length_penalty", 1, 0),
    ("spaces_between_special_tokens", True, False),
    ("request_id", None, "mine"),
    ("documents", [], [{"text": "x"}]),
    ("mm_processor_kwargs", {}, {"x": 1}),
    ("chat_template", None, "{{ messages }}"),
]


@pytest.mark.parametrize(("field", "harmless", "asking"), OF_VLLM)
async def test_vllms_own_fields_may_ask_for_nothing(
    field: str, harmless: Any, asking: Any, app: Starlette, engine: FakeEngine
) -> None:
    body = {"model": "base", "messages": [USER]}
    async with asgi.client(app) as client:
        for value in (None, harmless):
            response = await client.post("/v1/chat/completions", json={**body, field: value})
            assert response.status_code == 200, response.text
    engine.submitted.clear()
    error = await refused(app, "/v1/chat/completions", json={**body, field: asking})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


async def test_an_unknown_parameter_is_told_from_a_wrong_one(app: Starlette) -> None:
    body = {"model": "base", "prompt": "hi"}
    assert (await refused(app, "/v1/completions", json={**body, "foo": 1}))["code"] == "unknown_parameter"
    assert (await refused(app, "/v1/completions", json={**body, "suffix": "x"}))["code"] == (
        "unsupported_parameter"
    )
    assert (await refused(app, "/v1/completions", json={**body, "n": 99}))["code"] == "out_of_range"
    assert (await refused(app, "/v1/completions", json={**body, "prompt": "x" * 512}))["code"] == (
        "context_length_exceeded"
    )


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("functions", [FLAT], "Here it is `tools`."),
        ("function_call", {"name": "f"}, "Here it is `tool_choice`."),
        ("tools", [{"name": "f", "input_schema": {"type": "object"}}], '"function": {"name"'),
    ],
)
async def test_tools_in_another_shape_lead_to_the_one_here(
    field: str, value: object, hint: str, app: Starlette
) -> None:
    body = {"model": "base", "messages": [USER], field: value}
    assert hint in (await refused(app, "/v1/chat/completions", json=body))["message"]


@pytest.mark.parametrize(
    ("path", "change", "hint"),
    [
        ("/v1/completions", {"max_token": 5}, "Did you mean `max_tokens`?"),
        ("/v1/completions", {"maxTokens": 5}, "Did you mean `max_tokens`?"),
        ("/v1/chat/completions", {"chat_templates": "x"}, "Did you mean `chat_template`?"),
        ("/v1/chat/completions", {"weather": 5}, "is not a parameter of this request."),
        ("/v1/chat/completions", {"extra_body": {"top_k": 5}}, "fields go into the body itself."),
        ("/v1/completions", {"n_predict": 5}, "Here it is `max_tokens`."),
        ("/v1/completions", {"max_completion_tokens": 5}, "Here it is `max_tokens`."),
        ("/v1/completions", {"messages": [USER]}, "It is one of /v1/chat/completions."),
        ("/v1/completions", {"tools": [NESTED]}, "It is one of /v1/chat/completions."),
        ("/v1/responses", {"input": "hi", "n": 2}, "It is one of /v1/chat/completions."),
        ("/v1/chat/completions", {"thinking": {"type": "enabled"}}, "Here it is `reasoning_effort`."),
        ("/v1/chat/completions", {"adapter_id": "a"}, "Here it is `model`."),
        ("/v1/chat/completions", {"adapters": [{"name": "a", "scale": 1}]}, "`adapters[0].weight`."),
        ("/v1/chat/completions", {"regex": "a"}, "Here it is `structured_outputs.regex`."),
        ("/v1/chat/completions", {"prompt": "a"}, "Here it is `messages`."),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"properties": {}}}},
            "Here it is `response_format.json_schema.schema.properties`.",
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "properties": {}}}},
            "Here it is `text.format.schema.properties`.",
        ),
        ("/tokenize", {"text": "hi"}, "Here it is `prompt`."),
        ("/detokenize", {"ids": [5]}, "Here it is `tokens`."),
        ("/v1/chat/completions", {"tools": [FLAT]}, "Here it is `tools[0].function.name`."),
        (
            "/v1/chat/completions",
            {"tool_choice": {"type": "function", "name": "f"}},
            "`tool_choice.function.name`.",
        ),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "schema": {}}},
            "Here it is `response_format.json_schema.schema`.",
        ),
        ("/v1/chat/completions", {"think": False}, "Here it is `reasoning_effort`."),
        ("/v1/responses", {"input": "hi", "tools": [FLAT, NESTED]}, "Here it is `tools[1]`."),
        ("/v1/responses", {"input": "hi", "max_tokens": 5}, "Here it is `max_output_tokens`."),
        ("/v1/responses", {"input": "hi", "response_format": {}}, "Here it is `text.format`."),
        ("/v1/responses", {"input": "hi", "messages": []}, "Here it is `input`."),
        ("/v1/messages", {"output_format": {"type": "json_schema"}}, "Here it is `output_config.format`."),
    ],
)
async def test_an_error_about_a_misspelled_field_names_the_field_that_was_meant(
    path: str, change: dict[str, Any], hint: str, app: Starlette
) -> None:
    needed = {"/v1/chat/completions": {"messages": [USER]}, "/v1/completions": {"prompt": "hi"}}
    error = await refused(app, path, json={"model": "base", **needed.get(path, {}), **change})
    assert error["code"] == "unknown_parameter"
    assert error["message"].endswith(hint)


@pytest.mark.parametrize(
    ("bias", "said"),
    [({"x": 1}, "token ids"), ({"300": 1}, "names token 300"), ({"7": 101}, "that of token 7 is 101.0")],
)
async def test_a_wrong_entry_of_logit_bias_is_told_from_the_others(
    bias: dict[str, float], said: str, app: Starlette
) -> None:
    body = {"model": "base", "prompt": "hi", "logit_bias": {"5": 1, **bias}}
    assert said in (await refused(app, "/v1/completions", json=body))["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"guided_decoding_backend": "lm-format-enforcer", "guided_regex": "a"},
            "there are auto, guidance, ",
        ),
        ({"guided_decoding_backend": "outlines"}, "nothing binds the answer; leave it out."),
        (
            {"guided_decoding_backend": "outlines", "guided_json": {}},
            "outlines does not support schemas; guidance does.",
        ),
        (
            {"guided_decoding_backend": "xgrammar", "guided_regex": "a"},
            "xgrammar does not support regular expressions; guidance or outlines does.",
        ),
    ],
)
async def test_a_backend_that_cannot_be_had_says_why(
    change: dict[str, Any], said: str, app: Starlette
) -> None:
    body = {"model": "base", "prompt": "hi", **change}
    assert said in (await refused(app, "/v1/completions", json=body))["message"]


async def test_a_body_that_is_not_there_is_told_from_one_that_is_cut(app: Starlette) -> None:
    headers = {"content-type": "application/json"}
    error = await refused(app, "/v1/completions", content=b"", headers=headers)
    assert error["code"] == "invalid_json"
    assert error["message"] == "The body is empty; it must be a JSON object."


async def test_a_body_that_is_packed_is_told_from_one_that_is_broken(app: Starlette) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = await refused(app, "/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert (error["param"], error["code"]) == ("content-encoding", "unsupported_media_type")


async def test_a_body_in_utf8_may_begin_with_a_byte_order_mark(app: Starlette) -> None:
    body = codecs.BOM_UTF8 + b'{"model": "base", "prompt": "hi"}'
    async with asgi.client(app) as client:
        response = await client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
    assert response.status_code == 200


@pytest.mark.parametrize(("encoding", "byte"), [("utf-16", 0), ("latin-1", 30)])
async def test_a_body_in_another_encoding_is_told_from_one_that_is_no_json(
    encoding: str, byte: int, app: Starlette
) -> None:
    content = '{"model": "base", "prompt": "h\xe9"}'.encode(encoding)
    headers = {"content-type": "application/json"}
    error = await refused(app, "/v1/completions", content=content, headers=headers)
    assert error["code"] == "invalid_json"
    assert error["message"].endswith(f"it must be in UTF-8, and byte {byte} is not.")


@pytest.mark.parametrize(
    ("escaped", "half", "byte"),
    [
        (r"\ud83d\ude00 \ud83d", r"\ud83d", 43),
        (r"\ud83d", r"\ud83d", 30),
        (r"\ude00 \u0041", r"\ude00", 30),
        (r"\\\ud83d", r"\ud83d", 32),
    ],
)
async def test_half_of_a_surrogate_pair_is_told_from_a_body_that_is_cut(
    escaped: str, half: str, byte: int, app: Starlette
) -> None:
    content = '{"model": "base", "prompt": "h' + escaped + '"}'
    headers = {"content-type": "application/json"}
    error = await refused(app, "/v1/completions", content=content.encode(), headers=headers)
    assert error["code"] == "invalid_json"
    assert f": {half} (byte {byte}) is half of a surrogate pair" in error["message"]


async def test_an_escaped_backslash_is_no_surrogate(app: Starlette) -> None:
    content = rb'{"model": "base", "prompt": "\\ud83d'
    headers = {"content-type": "application/json"}
    error = await refused(app, "/v1/completions", content=content, headers=headers)
    assert error["message"].endswith("Input data was truncated.")


@pytest.mark.parametrize("name", ["llama:base", "models/base", "Base", " base"])
async def test_a_model_that_is_written_as_elsewhere_is_told_its_name_here(name: str, app: Starlette) -> None:
    for asked, hint in ((name, "Did you mean `base`?"), ("somebody", "/v1/models lists those that do.")):
        async with asgi.client(app) as client:
            response = await client.post("/v1/completions", json={"model": asked, "prompt": "hi"})
        assert response.status_code == 404
        assert response.json()["error"]["message"].endswith(hint)


async def test_a_prompt_and_answer_that_do_not_fit_are_told_what_is_left(app: Starlette) -> None:
    body = {"model": "base", "prompt": "x" * 500, "max_tokens": 10**30}
    message = (await refused(app, "/v1/completions", json=body))["message"]
    assert message.endswith("asks for a number of 31 characters more, where 12 are left.")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 600}),
        ("/v1/completions", {"prompt": "x" * 500, "max_tokens": 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}),
        ("/v1/responses", {"input": "x" * 600}),
    ],
)
async def test_what_is_too_long_is_told_in_the_words_that_clients_look_for(
    path: str, body: dict[str, Any], app: Starlette
) -> None:
    """LiteLLM falls back to a model with more context, and inspect-ai ends the sample, by them alone."""
    message = (await refused(app, path, json={"model": "base", **body}))["message"]
    assert message.startswith("This model's maximum context length is 512 tokens; the prompt has ")


async def test_an_unknown_model_is_a_404_that_says_where_the_known_ones_are(app: Starlette) -> None:
    async with asgi.client(app) as client:
        response = await client.post("/v1/completions", json={"model": "x", "prompt": "hi"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "/v1/models" in response.json()["error"]["message"]


async def test_a_body_that_is_not_sent_as_json_is_refused(app: Starlette) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        error = await refused(
            app, "/v1/completions", content=b'{"model":"base","prompt":"x"}', headers=headers
        )
        assert error["param"] == "content-type"


async def test_the_caps_can_be_set(engine: FakeEngine) -> None:
    from personae.api.settings import ApiSettings

    app = create_app(engine, ApiSettings(max_n=2, max_logprobs=1))
    body = {"model": "base", "prompt": "hi"}
    assert (await refused(app, "/v1/completions", json={**body, "n": 3}))["param"] == "n"
    assert (await refused(app, "/v1/completions", json={**body, "logprobs": 2}))["param"] == "logprobs"
