"""From bytes to requests: which JSON numbers are integers, and how values out of bounds are refused."""

import json
from typing import Any

import pytest

from personae.api.batches.model import CreateBatch
from personae.api.eval_reports.runner import StartEval
from personae.api.responses.request import ResponsesRequest
from personae.api.sessions.routes import ChangeSession
from personae.api.tenants.routes import CreateTenant
from personae.api.wire.decode import decode
from personae.api.wire.schema import Body, ChatRequest, CompletionRequest, DetokenizeRequest
from personae.errors import RequestError

USER = {"role": "user", "content": "hi"}
NEEDED: dict[type[Body], dict[str, Any]] = {
    ChatRequest: {"model": "base", "messages": [USER]},
    CompletionRequest: {"model": "base", "prompt": "hi"},
    ResponsesRequest: {"model": "base", "input": [USER]},
    DetokenizeRequest: {"model": "base", "tokens": []},
    CreateBatch: {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"},
}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def read(type: type[Body], **fields: Any) -> Any:
    return decode(json.dumps({**NEEDED[type], **fields}).encode(), type, 64)


@pytest.mark.parametrize(
    ("type", "fields"),
    [
        (ChatRequest, {"max_tokens": 5.0, "n": 2.0, "seed": -7.0, "top_k": 1e2}),
        (ChatRequest, {"stop_token_ids": [1, 2.0], "temperature": 1.0, "logit_bias": {"5": 1.0}}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "index": 0.0}]}]}),
        (CompletionRequest, {"logprobs": 5.0, "prompt": [1.0, 2.0]}),
        (CompletionRequest, {"prompt": [[1.0], [2, 3.0]], "max_tokens": 1.0}),
        (ResponsesRequest, {"max_output_tokens": 16.0, "top_logprobs": 2.0}),
        (DetokenizeRequest, {"tokens": [3.0]}),
        (CreateBatch, {"output_expires_after": {"anchor": "created_at", "seconds": 3600.0}}),
    ],
    ids=str,
)
def test_a_float_without_a_fraction_is_the_integer_that_it_equals(
    type: type[Body], fields: dict[str, Any]
) -> None:
    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [whole(inner) for inner in value]
        return int(value) if isinstance(value, float) else value

    found = read(type, **fields)
    assert found == read(type, **whole(fields))
    assert repr(found) == repr(read(type, **whole(fields))), "integers, where floats would be equal, too"


@pytest.mark.parametrize(
    ("type", "fields", "param"),
    [
        (ChatRequest, {"max_tokens": 5.5}, "max_tokens"),
        (ChatRequest, {"max_tokens": 5.0, "top_k": 1.5}, "top_k"),
        (ChatRequest, {"max_tokens": 5.0, "seed": "5"}, "seed"),
        (ChatRequest, {"max_tokens": 5.0, "stream": 1.0}, "stream"),
        (ChatRequest, {"max_tokens": 5.0, "mood": 1}, "mood"),
        (CompletionRequest, {"prompt": [1.0, 2.5]}, "prompt"),
        (ResponsesRequest, {"max_output_tokens": 0.1}, "max_output_tokens"),
    ],
    ids=str,
)
def test_any_other_float_is_refused_where_an_integer_belongs(
    type: type[Body], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(type, **fields)
    assert (refused.value.param or "").startswith(param)


def test_what_the_caller_writes_freely_keeps_its_floats() -> None:
    fields = {"chat_template_kwargs": {"size": 5.0}, "guided_json": {"const": 2.0}}
    found = read(ChatRequest, max_tokens=5.0, **fields)
    assert repr(found.chat_template_kwargs) == "{'size': 5.0}"
    assert repr(found.guided_json) == "{'const': 2.0}"


def test_a_number_beyond_all_floats_is_refused() -> None:
    with pytest.raises(RequestError):
        decode(b'{"model": "base", "prompt": "hi", "max_tokens": 1e999}', CompletionRequest, 64)


@pytest.mark.parametrize(
    ("body", "type", "message", "code"),
    [
        ({"ttl": -1}, ChangeSession, "`ttl` must be at least 0.", "out_of_range"),
        ({"ttl": 10**30}, ChangeSession, "`ttl` must be at most 2592000.", "out_of_range"),
        (
            {"name": "a", "limits": {"weight": 101.5}},
            CreateTenant,
            "`limits.weight` must be at most 100.",
            "out_of_range",
        ),
        ({"name": "x" * 201}, StartEval, "`name`: Expected `str` of length <= 200.", "invalid_value"),
        ({"ttl": "1"}, ChangeSession, "`ttl`: Expected `int`, got `str`.", "invalid_type"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bound(
    body: dict[str, Any], type: type[Body], message: str, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        decode(json.dumps(body).encode(), type, 64)
    assert (caught.value.message, caught.value.code) == (message, code)
