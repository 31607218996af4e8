"""Tool calls and reasoning, asked over ASGI of an engine that answers by script."""

import json
from typing import Any

import asgi
import jsonschema
import pytest
from fake_engine import CHATML, FakeEngine, byte_tokenizer
from starlette.applications import Starlette
from tool_chat import TAGS, TEMPLATE, TIME, WEATHER, call, tool

from personae.api.app import create_app
from personae.api.settings import ApiSettings
from personae.errors import GrammarError, ModelLoadError
from personae.grammar.spec import ReasoningLimit
from personae.grammar.structure.elements import Concat, Element, Json, OneOf, Repeat, decode_structure

pytestmark = pytest.mark.anyio

SPELLED, TOKENS = byte_tokenizer(TEMPLATE), byte_tokenizer(TEMPLATE, TAGS)
USER = {"role": "user", "content": "hi"}
KOELN = call("get_weather", city="Köln")


@pytest.fixture(params=["text", "tokens"])
def engine(request: pytest.FixtureRequest) -> FakeEngine:
    return FakeEngine(tokenizer=SPELLED if request.param == "text" else TOKENS, max_model_len=4096)


def body(**extra: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [USER], "tools": [WEATHER, TIME], **extra}


async def ask(app: Starlette, **extra: Any) -> dict[str, Any]:
    async with asgi.client(app) as client:
        response = await client.post("/v1/chat/completions", json=body(**extra))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def refused(app: Starlette, **extra: Any) -> dict[str, Any]:
    visit = await asgi.Visit("/v1/chat/completions", body(**extra)).run(app)
    assert visit.status == 400, visit.chunks
    return visit.error


async def streamed(app: Starlette, **extra: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together from its deltas, in the shape of one that is not streamed."""
    visit = await asgi.Visit("/v1/chat/completions", body(stream=True, **extra)).run(app)
    assert visit.status == 200, visit.chunks
    *chunks, done = visit.events()
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"message": {"content": ""}, "pieces": 0})
            message, delta = whole["message"], choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for one in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if one["index"] == len(calls):
                    assert one["type"] == "function"
                    assert one["function"]["name"]
                    calls.append(
                        {"id": one["id"], "function": {"name": one["function"]["name"], "arguments": ""}}
                    )
                else:
                    assert one.keys() == {"index", "function"}
                calls[one["index"]]["function"]["arguments"] += one["function"]["arguments"]
                whole["pieces"] += 1
            whole["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [one["function"] for one in choice["message"].get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def jsons(element: Element) -> list[Json]:
    """The JSON in a structure, from left to right."""
    match element:
        case Json():
            return [element]
        case Concat(parts=parts) | OneOf(parts=parts):
            return [json for part in parts for json in jsons(part)]
        case Repeat(part=part):
            return jsons(part)
    return []


async def test_calls_come_apart_from_content_with_ids_and_arguments_as_text(engine: FakeEngine) -> None:
    engine.answer = "Let me see.\n" + KOELN + "\n" + call("get_time")
    choice = await ask(create_app(engine))
    assert choice["message"]["content"] == "Let me see."
    assert calls_of(choice) == [("get_weather", {"city": "Köln"}), ("get_time", {})]
    assert choice["finish_reason"] == "tool_calls"
    ids = [one["id"] for one in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") for id in ids)


async def test_content_is_null_beside_calls_alone_and_a_text_has_no_calls(engine: FakeEngine) -> None:
    engine.answer = KOELN
    assert (await ask(create_app(engine)))["message"]["content"] is None
    engine.answer = "Hello."
    choice = await ask(create_app(engine))
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("burst", [1, 3, 500])
@pytest.mark.parametrize(
    "answer",
    [
        "Hello.",
        KOELN,
        "See: " + KOELN + call("get_time"),
        "<think>\nIs it " + KOELN + "?\n</think>\n\nYes. \n" + KOELN,
        "<think>hm</think>Hello <think>.",
        "<tool_call>{oops}</tool_call> " + KOELN,
        KOELN[:-20],
    ],
)
async def test_what_is_streamed_is_what_is_not_streamed(engine: FakeEngine, answer: str, burst: int) -> None:
    engine.answer, engine.burst = answer, burst
    app = create_app(engine)
    whole = await ask(app)
    for choice in await streamed(app, n=2):
        message = choice["message"]
        assert message["content"] == (whole["message"]["content"] or "")
        assert message.get("reasoning_content") == whole["message"].get("reasoning_content")
        assert [one["function"] for one in message.get("tool_calls", ())] == [
            one["function"] for one in whole["message"].get("tool_calls", ())
        ]
        assert choice["finish_reason"] == whole["finish_reason"]


async def test_arguments_are_streamed_as_they_come(engine: FakeEngine) -> None:
    engine.answer = call("get_weather", city="a long way from here")
    choice = (await streamed(create_app(engine)))[0]
    assert choice["pieces"] > 5
    assert calls_of(choice) == [("get_weather", {"city": "a long way from here"})]


async def test_a_call_that_max_tokens_cuts_is_a_matter_of_length(engine: FakeEngine) -> None:
    engine.answer = KOELN + call("get_time")
    app = create_app(engine)
    whole = len(engine.tokenizer.encode(engine.answer, False))
    for cut in range(1, whole + 1, 7):
        choice = await ask(app, max_tokens=cut)
        assert choice["finish_reason"] == "length"
    assert (await ask(app, max_tokens=whole + 1))["finish_reason"] == "tool_calls"
    choice = await ask(app, max_tokens=whole - 3)
    assert len(choice["message"]["tool_calls"]) == 2, "what there is of a call is delivered"


async def test_a_broken_call_is_no_reason_to_call(engine: FakeEngine) -> None:
    engine.answer = KOELN + '<tool_call>{"name": "get_time", "arguments": {'
    choice = await ask(create_app(engine))
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 2)


async def test_reasoning_is_apart_from_content_and_seen_by_no_schema(engine: FakeEngine) -> None:
    engine.answer = 'The answer {"a": 1} is near.\n</think>\n\n{"a": 2}'
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    kwargs = {"enable_thinking": True}
    choice = await ask(create_app(engine), tools=None, response_format=format, chat_template_kwargs=kwargs)
    assert choice["message"]["content"] == '{"a": 2}'
    assert choice["message"]["reasoning_content"] == 'The answer {"a": 1} is near.'
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert grammar.kind == "structure"
    [bound] = jsons(decode_structure(grammar.source))
    assert (bound.schema, bound.strict) == ({"type": "object"}, False)


async def test_a_prompt_that_closes_reasoning_leaves_no_trace_in_the_grammar(
    engine: FakeEngine,
) -> None:
    engine.answer = "{}"
    kwargs = {"enable_thinking": False}
    format = {"type": "json_object"}
    await ask(create_app(engine), tools=None, response_format=format, chat_template_kwargs=kwargs)
    assert engine.submitted[-1].grammar is not None
    assert engine.submitted[-1].grammar.kind == "json_object"
    await ask(create_app(engine), tools=None, chat_template_kwargs=kwargs)
    assert engine.submitted[-1].grammar is None


async def test_reasoning_alone_needs_no_grammar(engine: FakeEngine) -> None:
    engine.answer = "<think>hm</think>Hello."
    choice = await ask(create_app(engine), tools=None)
    assert engine.submitted[-1].grammar is None
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "Hello.")
    assert choice["message"]["reasoning"] == "hm", "the newer name of it"
    begun = len(engine.tokenizer.encode("<think>h", False))
    cut = await ask(create_app(engine), tools=None, max_tokens=begun)
    assert (cut["message"]["content"], cut["message"]["reasoning_content"]) == ("", "h")
    assert cut["finish_reason"] == "length"


async def test_reasoning_may_be_left_out(engine: FakeEngine) -> None:
    engine.answer = "<think>hm</think>Hello."
    app = create_app(engine)
    choice = await ask(app, tools=None, include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    visit = await asgi.Visit(
        "/v1/chat/completions", body(stream=True, tools=None, include_reasoning=False)
    ).run(app)
    assert "reasoning" not in json.dumps(visit.events()).replace("reasoning_tokens", "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_chunk_may_have_the_usage_so_far(engine: FakeEngine, path: str) -> None:
    engine.answer = "Hello."
    fields = body(stream=True, tools=None)
    if path == "/v1/completions":
        fields = {"model": "base", "prompt": "hi", "stream": True}
    fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    visit = await asgi.Visit(path, fields).run(create_app(engine))
    *chunks, done = visit.events()
    assert done == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(engine.answer) + 1


@pytest.mark.parametrize(("type", "shown"), [("objct", '"objct"'), (None, "null"), ([True], "[true]")])
async def test_parameters_that_are_no_objects_are_refused_with_their_place(
    type: Any, shown: str, engine: FakeEngine
) -> None:
    app = create_app(engine)
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": type}}}
    error = await refused(app, tools=[wrong])
    assert (error["param"], error["code"]) == ("tools[0].function.parameters", "invalid_schema")
    assert f"`type` (at #/type) is {shown}." in error["message"]


_NAMED = {"T": {"properties": {"hour": {"type": "integer"}}, "required": ["hour"]}}
_DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/T", "$defs": _NAMED},
        {"type": "object", "$ref": "#/$defs/T", "$defs": _NAMED},
        {**_DRAFT_7, "type": "object", "$ref": "#/definitions/T", "definitions": _NAMED},
        {**_DRAFT_7, "$ref": "#/definitions/T", "definitions": _NAMED, "maxProperties": 0},
        {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "string"}], "$defs": _NAMED},
        {**_NAMED["T"], "type": ["object", "null"]},
    ],
)
async def test_arguments_are_objects_also_where_a_draft_ignores_the_type_beside_a_reference(
    engine: FakeEngine, parameters: dict[str, Any]
) -> None:
    function = {"name": "get_time", "parameters": parameters, "strict": True}
    await ask(create_app(engine), tools=[{"type": "function", "function": function}])
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    first, *others = (bound.schema for bound in jsons(decode_structure(grammar.source)))
    assert all(other == first for other in others)
    judge = jsonschema.validators.validator_for(first)(first)
    assert judge.is_valid({"hour": 7})
    for wrong in ({}, {"hour": "7"}, [], "7", None):
        assert not judge.is_valid(wrong), wrong


async def test_reasoning_effort_becomes_what_the_template_knows(engine: FakeEngine) -> None:
    app = create_app(engine)
    for effort, end in (("none", "</think>"), ("high", "<think>"), ("max", "<think>")):
        await ask(app, reasoning_effort=effort)
        prompt = engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)
        assert prompt.rstrip().endswith(end)
    plain = create_app(FakeEngine(tokenizer=byte_tokenizer(CHATML)))
    assert (await refused(plain, tools=None, reasoning_effort="low"))["param"] == "reasoning_effort"


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "thinking_budget_tokens"])
async def test_a_thinking_budget_binds_reasoning_and_what_it_does_not_mean_is_refused(
    engine: FakeEngine, name: str
) -> None:
    engine.answer = "hm</think>Hello."
    app, on, off = create_app(engine), {"enable_thinking": True}, {"enable_thinking": False}
    choice = await ask(app, tools=None, chat_template_kwargs=on, **{name: 12})
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "Hello.")
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert grammar.reasoning == ReasoningLimit(12, "<think>", "</think>", opened=True)
    for none, kwargs in ((-1, on), (12, off)):
        await ask(app, tools=None, chat_template_kwargs=kwargs, **{name: none})
        assert engine.submitted[-1].grammar is None
    for wrong in (-2, 1.5, "many"):
        assert (await refused(app, tools=None, **{name: wrong}))["param"] == name
    other = next(one for one in ("thinking_token_budget", "thinking_budget") if one != name)
    await ask(app, tools=None, **{name: 3, other: 3})
    assert (await refused(app, tools=None, **{name: 3, other: 4}))["param"] in (name, other)
    plain = create_app(FakeEngine(tokenizer=byte_tokenizer(CHATML)))
    error = await refused(plain, tools=None, **{name: 3})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


async def test_tools_and_a_thinking_budget_are_named_beside_what_would_leave_tokens_out(
    engine: FakeEngine,
) -> None:
    app, on = create_app(engine), {"enable_thinking": True}
    for field, value in (("bad_words", ["no"]), ("allowed_token_ids", [1])):
        error = await refused(app, **{field: value})
        assert error["param"] == field
        assert f"`{field}` cannot be combined with `tools`" in error["message"]
        error = await refused(app, tools=None, chat_template_kwargs=on, thinking_budget=9, **{field: value})
        assert f"`{field}` cannot be combined with `thinking_budget`" in error["message"]
        await ask(app, tools=None, **{field: value})
    assert len(engine.submitted) == 2


async def test_the_template_sees_tools_calls_and_their_results(engine: FakeEngine) -> None:
    asked = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    await ask(create_app(engine), messages=history, tools=[tool("get_time", strict=True)])
    prompt = engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)
    shown = {"type": "function", "function": tool("get_time")["function"]}
    assert f"<|im_start|>system\n{json.dumps(shown)}\n" in prompt.replace("'", '"'), (
        "strict is not for the model"
    )
    assert '<tool_call>\n{"name": "get_time", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\nnoon<|im_end|>" in prompt


async def test_tool_choice_becomes_a_grammar(engine: FakeEngine) -> None:
    app = create_app(engine)

    async def names(**extra: Any) -> list[str]:
        await ask(app, **extra)
        grammar = engine.submitted[-1].grammar
        assert grammar is not None
        return sorted({json.param for json in jsons(decode_structure(grammar.source))})

    one, two = "tools[0].function.parameters", "tools[1].function.parameters"
    named = {"type": "function", "function": {"name": "get_time"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert await names() == [one, two]
    assert await names(tool_choice="required") == [one, two]
    assert await names(tool_choice="none") == []
    assert await names(tool_choice=named) == [two]
    assert await names(tool_choice=allowed) == [two]
    sources = {log.grammar.source for log in engine.submitted if log.grammar is not None}
    assert len(sources) == 4, "a named tool is the only one that is allowed and required"
    await ask(app, parallel_tool_calls=False)
    assert engine.submitted[-1].grammar is not None
    assert engine.submitted[-1].grammar.source not in sources


async def test_with_tool_choice_none_nothing_is_a_call(engine: FakeEngine) -> None:
    engine.answer = "Hello."
    choice = await ask(create_app(engine), tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello.", "stop")


async def test_strict_is_said_of_each_tool(engine: FakeEngine) -> None:
    await ask(create_app(engine), tools=[tool("a", strict=True), tool("b")], tool_choice="required")
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    strict = {json.param: json.strict for json in jsons(decode_structure(grammar.source))}
    assert strict == {"tools[0].function.parameters": True, "tools[1].function.parameters": False}


async def test_a_refusal_while_compiling_names_the_tool(engine: FakeEngine) -> None:
    engine.refuse_late = GrammarError("no", param="tools[0].function.parameters")
    for stream in (False, True):
        assert (await refused(create_app(engine), stream=stream))["param"] == "tools[0].function.parameters"


async def test_choices_that_make_no_sense_are_refused_by_field(engine: FakeEngine) -> None:
    app = create_app(engine)
    stranger = {"type": "function", "function": {"name": "nobody"}}
    wrong = await refused(app, tool_choice=stranger)
    assert wrong["param"] == "tool_choice.function.name"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [stranger]}}
    wrong = await refused(app, tool_choice=allowed)
    assert wrong["param"] == "tool_choice.allowed_tools.tools[0].function.name"
    unknown = create_app(FakeEngine(tokenizer=byte_tokenizer(CHATML + "{{ tools }}")))
    assert (await refused(unknown))["param"] == "tools"


async def test_stop_strings_stop_text_and_not_reasoning_or_calls(engine: FakeEngine) -> None:
    engine.answer = "<think>a stop b</think>Go. " + call("get_weather", city="stop")
    app = create_app(engine)
    choice = await ask(app, stop="stop")
    assert calls_of(choice) == [("get_weather", {"city": "stop"})]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("a stop b", "Go.")
    choice = await ask(app, stop="o.")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("G", "stop")
    assert "tool_calls" not in choice["message"]
    assert choice["stop_reason"] == "o."


async def test_logprobs_and_token_ids_cover_every_token_of_a_call(engine: FakeEngine) -> None:
    engine.answer = KOELN
    choice = await ask(create_app(engine), logprobs=True, return_token_ids=True)
    ids = [*engine.tokenizer.encode(KOELN, False), *engine.tokenizer.eos_ids]
    assert choice["token_ids"] == ids
    assert len(choice["logprobs"]["content"]) == len(ids)


async def test_formats_can_be_named_and_switched_off() -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer(CHATML), answer=KOELN)
    app = create_app(engine, ApiSettings(tool_format="hermes"))
    assert calls_of(await ask(app)) == [("get_weather", {"city": "Köln"})]
    engine = FakeEngine(tokenizer=SPELLED, answer="<think>hm</think>Hello.", max_model_len=4096)
    app = create_app(engine, ApiSettings(reasoning_format="none"))
    assert (await ask(app))["message"]["content"] == "<think>hm</think>Hello."
    for wrong in ({"tool_format": "morse"}, {"reasoning_format": "loud"}):
        with pytest.raises(ModelLoadError, match="The formats are"):
            create_app(engine, ApiSettings(**wrong))


@pytest.mark.parametrize("format", ["llama3_json", "pythonic"])
async def test_an_answer_is_a_call_or_json_where_calls_begin_as_json_does(format: str) -> None:
    """An object that begins with a function's name and parameters is a call, any other is the answer."""
    engine = FakeEngine(tokenizer=byte_tokenizer(CHATML), max_model_len=4096)
    app = create_app(engine, ApiSettings(tool_format=format))
    schema = {"type": "object" if format == "llama3_json" else "array"}
    asked: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }
    calls, texts = {
        "llama3_json": (
            ['{"name": "get_weather", "parameters": {"city": "Köln"}}'],
            [
                '{"name": "get", "parameters": {"city": "Köln"}}',
                '{"city": "Köln"}',
                '{"name": "get_weather"}',
            ],
        ),
        "pythonic": (['[get_weather(city="Köln")]'], ['["get_weather"]', "[1, [2]]"]),
    }[format]
    for answers, called in ((calls, [("get_weather", {"city": "Köln"})]), (texts, [])):
        for engine.answer in answers:
            choice = await ask(app, **asked)
            assert calls_of(choice) == called
            assert choice["message"]["content"] == (None if called else engine.answer)
            assert choice["finish_reason"] == ("tool_calls" if called else "stop")
            [same] = await streamed(app, **asked)
            assert calls_of(same) == called
            assert same["message"]["content"] == ("" if called else engine.answer)
    for extra in ({"guided_regex": "x+"}, {"guided_choice": ["a"]}, {"guided_grammar": 'root ::= "a"'}):
        wrong = await refused(app, **extra)
        assert wrong["param"] == next(iter(extra))
        assert "unless that is a schema" in wrong["message"]
        await ask(app, **extra, tool_choice="none")


async def test_tokenize_counts_the_tools(engine: FakeEngine) -> None:
    async with asgi.client(create_app(engine)) as client:
        counted = await client.post("/tokenize", json={"messages": [USER], "tools": [WEATHER]})
        answer = await client.post("/v1/chat/completions", json=body(tools=[WEATHER], max_tokens=1))
    assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]
