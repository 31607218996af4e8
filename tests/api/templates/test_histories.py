"""Histories that a model's chat template cannot show as they are: nothing of them is lost."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from template_server import Served

pytestmark = pytest.mark.anyio
Model = Callable[..., Served]

ASKED = {"role": "user", "content": "Weather in Rome?"}
HI, AGAIN = {"role": "user", "content": "hi"}, {"role": "user", "content": "And now?"}
HELLO = {"role": "assistant", "content": "Hello."}
FRENCH = {"role": "system", "content": "Answer in French."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": CITY},
}


def called(*ids: str | None, text: str | None = None, **more: Any) -> dict[str, Any]:
    calls = [
        {
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": f"Rome{number}"})},
        }
        | ({"id": id} if id else {})
        for number, id in enumerate(ids)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def result(id: str, text: Any = "12 C, rain", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text, **more}


CALL = [ASKED, called("call_1"), result("call_1")]
R1 = [
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseekv3",
    "llama-cpp-deepseek-r1",
]


@pytest.mark.parametrize("text", [None, "", "Let me see."])
@pytest.mark.parametrize("name", R1)
async def test_a_call_is_shown_by_templates_that_want_text_or_no_content(
    model: Model, name: str, text: str | None
) -> None:
    prompt = await model(name).prompt([ASKED, called("call_1", text=text), CALL[2]], tools=[WEATHER])
    assert "get_weather" in prompt
    assert '{"city": "Rome0"}' in prompt
    assert prompt.index("Rome0") < prompt.index("12 C, rain")
    assert (text or "") in prompt
    assert "None" not in prompt
    if name in R1:
        assert 'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome0"}\n```' in prompt


@pytest.mark.parametrize("name", [*R1[:3], "deepseek-ai-DeepSeek-V3.1", "HuggingFaceTB-SmolLM3-3B", "gemma3"])
@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_tools_are_described_where_the_template_cannot_show_them(
    model: Model, name: str, choice: str
) -> None:
    prompt = await model(name).prompt([ASKED], tools=[WEATHER], tool_choice=choice)
    assert "get_weather: The weather in a city." in prompt
    assert '"city": string' in prompt


async def test_the_description_asks_for_calls_of_the_format_that_is_read(model: Model) -> None:
    calls = (
        "Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    server = model("deepseekv3", calls)
    message = await server.chat([ASKED], tools=[WEATHER])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>...\n```json\n{...}"
        in server.last_prompt
    )


MISTRAL = [
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "unsloth-mistral-Devstral-Small-2507",  # shows no ids
]


@pytest.mark.parametrize("name", MISTRAL[:2])
@pytest.mark.parametrize("id", ["toolu_01AbCd", "call_abc123def456", "a1", "chatcmpl-tool-5", "a-b_c.d!e"])
async def test_ids_of_another_server_get_the_templates_form(model: Model, name: str, id: str) -> None:
    server = model(name)
    prompt = await server.prompt([ASKED, called(id), result(id)], tools=[WEATHER])
    assert id not in prompt
    shown = set(re.findall(r"\b[0-9a-f]{9}\b", prompt))
    again = await server.prompt([ASKED, called(id), result(id), HELLO, AGAIN], tools=[WEATHER])
    assert len(shown) == 1, "the call and its result share one"
    assert [again.count(id) for id in shown] == [2], "and keep it in the next request"


async def test_an_id_that_fits_is_kept(model: Model) -> None:
    for name in MISTRAL[:2]:
        prompt = await model(name).prompt([ASKED, called("AbCd12345"), result("AbCd12345")], tools=[WEATHER])
        assert prompt.count("AbCd12345") == 2


async def test_the_other_routes_map_ids_too(model: Model) -> None:
    server = model(MISTRAL[0])
    blocks = [
        {"type": "tool_use", "id": "toolu_01AbCd", "name": "get_weather", "input": {"city": "Rome0"}},
        {"type": "tool_result", "tool_use_id": "toolu_01AbCd", "content": "rain"},
    ]
    tools = [{"name": "get_weather", "description": "d", "input_schema": CITY}]
    talk = [ASKED, {"role": "assistant", "content": blocks[:1]}, {"role": "user", "content": blocks[1:]}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, answer = await server.post(path, messages=talk, tools=tools)
        assert status == 200, answer
        usage = answer.get("usage", answer)
        counted = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        assert counted == len(server.engine.submitted[-1].tokens)
    assert "Rome0" in server.last_prompt
    items = [
        ASKED,
        {
            "type": "function_call",
            "call_id": "fc_77",
            "name": "get_weather",
            "arguments": '{"city": "Rome0"}',
        },
        {"type": "function_call_output", "call_id": "fc_77", "output": "rain"},
    ]
    status, answer = await server.post("/v1/responses", input=items, store=False)
    assert status == 200, answer
    assert "fc_77" not in server.last_prompt


async def test_tokenize_shows_the_same_prompt(model: Model) -> None:
    server = model(MISTRAL[0])
    messages = [FRENCH, ASKED, called("a1", text="Let me see."), result("a1"), AGAIN]
    await server.prompt(messages, tools=[WEATHER])
    status, answer = await server.post("/tokenize", messages=messages, tools=[WEATHER])
    assert status == 200, answer
    assert tuple(answer["tokens"]) == server.engine.submitted[-1].tokens


@pytest.mark.parametrize("name", ["meta-llama-Llama-3.1-8B-Instruct", "llama3_2", "gptoss"])
async def test_several_calls_become_turns_where_the_template_takes_one(model: Model, name: str) -> None:
    talk = [ASKED, called("c1", "c2"), result("c2", "snow"), result("c1", "rain")]
    prompt = await model(name).prompt(talk, tools=[WEATHER])
    places = [prompt.rindex(text) for text in ("Rome0", "rain", "Rome1", "snow")]
    assert places == sorted(places), "each call is followed by its own result"


async def test_an_answer_with_two_calls_can_be_sent_back(model: Model) -> None:
    answer = "; ".join(f'{{"name": "get_weather", "parameters": {{"city": "{city}"}}}}' for city in "AB")
    server = model("meta-llama-Llama-3.1-8B-Instruct", answer)
    message = await server.chat([ASKED], tools=[WEATHER])
    results = [result(call["id"], f"sun {call['id']}") for call in message["tool_calls"]]
    assert len(results) == 2
    prompt = await server.prompt([ASKED, message, *results], tools=[WEATHER])
    assert all(one["content"] in prompt for one in results)


async def test_an_answer_with_two_calls_goes_on_as_items(model: Model) -> None:
    answer = "; ".join(f'{{"name": "get_weather", "parameters": {{"city": "{city}"}}}}' for city in "AB")
    server = model("meta-llama-Llama-3.1-8B-Instruct", answer)
    tools = [{"type": "function", **WEATHER["function"]}]
    _, first = await server.post("/v1/responses", input="hi", tools=tools, store=False)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": f"sun{number}"}
        for number, call in enumerate(calls)
    ]
    items = [{"role": "user", "content": "hi"}, *first["output"], *outputs]
    status, second = await server.post("/v1/responses", input=items, tools=tools, store=False)
    assert status == 200, second
    assert "sun0" in server.last_prompt
    assert "sun1" in server.last_prompt


SYSTEMS = [
    "HuggingFaceTB-SmolLM3-3B",
    R1[0],
    "gemma3",
    "gemma",
    MISTRAL[0],
    MISTRAL[1],
    "qwen3_5_think",
    "MiniMax-M2",
    "qwen3_vl",
    "gptoss",
    "cohere2",
    "Reka-Edge",
    "Bielik-11B-v3.0-Instruct",
    "idefics3",
    "qwen3",
]


@pytest.mark.parametrize("name", SYSTEMS)
async def test_no_system_message_is_lost(model: Model, name: str) -> None:
    server = model(name)
    brief = {"role": "system", "content": "Be brief."}
    for talk in (
        [brief, {"role": "developer", "content": "Answer in French."}, HI],
        [brief, HI, HELLO, FRENCH, AGAIN],
        [HI, HELLO, FRENCH, AGAIN],
        [brief, HI, HELLO, FRENCH],
        [HI, {"role": "developer", "content": "Answer in French."}],
    ):
        prompt = await server.prompt(talk)
        assert all(message["content"] in prompt for message in talk)
    status, answer = await server.post(
        "/v1/responses",
        instructions="Be brief.",
        store=False,
        input=[
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Answer in French."}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
    )
    assert status == 200, answer
    assert "Be brief." in server.last_prompt
    assert "Answer in French." in server.last_prompt
    status, answer = await server.post(
        "/v1/messages",
        max_tokens=5,
        system=[{"type": "text", "text": "Be brief."}],
        messages=[HI, {"role": "system", "content": "Skills: none."}],
    )
    assert status == 200, answer
    assert "Be brief." in server.last_prompt
    assert "Skills: none." in server.last_prompt


async def test_leading_system_messages_become_one(model: Model) -> None:
    prompt = await model("qwen3").prompt([{"role": "system", "content": "Be brief."}, FRENCH, HI])
    assert "<|im_start|>system\nBe brief.\n\nAnswer in French.<|im_end|>" in prompt


async def test_a_system_message_is_not_lost_where_the_last_message_is_a_result(model: Model) -> None:
    prompt = await model(MISTRAL[0]).prompt(
        [{"role": "system", "content": "Be brief."}, *CALL], tools=[WEATHER]
    )
    assert "[INST]Be brief.\n\nWeather in Rome?[/INST]" in prompt


TOOL_KINDS: dict[str, dict[str, Any]] = {
    "no description": {"name": "f", "parameters": CITY},
    "no parameters": {"name": "now", "description": "The time."},
    "nothing": {"name": "now"},
    "empty parameters": {"name": "now", "description": "The time.", "parameters": {}},
    "a union": {
        "name": "now",
        "description": "The time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": ["string", "null"], "description": "Z."}},
        },
    },
    "a nested union": {
        "name": "now",
        "description": "The time.",
        "parameters": {
            "type": "object",
            "properties": {
                "zones": {"type": "array", "items": {"type": ["string", "integer"]}},
                "at": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
            },
        },
    },
    "no types": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}},
    "a reference": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/zone"}},
            "$defs": {"zone": {"type": "string"}},
        },
    },
}


@pytest.mark.parametrize("kind", TOOL_KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "gptoss",
        "Qwen3-Coder",
        "google-gemma-4-31B-it",
        "MiniMax-M2",
        "glm4moe",
    ],
)
async def test_tools_may_leave_out_what_a_template_reads(model: Model, name: str, kind: str) -> None:
    function = TOOL_KINDS[kind]
    prompt = await model(name).prompt(
        [HI], tools=[{"type": "function", "function": function}], tool_choice="none"
    )
    assert function["name"] in prompt
    assert function.get("description", "") in prompt
    for parameter in (function.get("parameters") or {}).get("properties", ()):
        assert parameter in prompt
    assert "Z." in prompt or kind != "a union"


async def test_text_beside_calls_is_kept_over_many_rounds(model: Model) -> None:
    talk: list[Any] = [ASKED]
    for number in range(3):
        talk += [called(f"c{number}", text=f"Step {number}."), result(f"c{number}", f"rain{number}")]
    for name in (*MISTRAL, R1[0], "meta-llama-Llama-3.1-8B-Instruct", "gemma3", "gptoss"):
        prompt = await model(name).prompt(
            [*talk, {"role": "assistant", "content": "Done."}, AGAIN], tools=[WEATHER]
        )
        for number in range(3):
            assert f"Step {number}." in prompt
            assert f"rain{number}" in prompt
        assert "Done." in prompt


@pytest.mark.parametrize("name", ["gemma3", MISTRAL[0], MISTRAL[1], "cohere2", "qwen3", "llava_next"])
async def test_unusual_turns_are_shown(model: Model, name: str) -> None:
    server = model(name)
    for talk in (
        [HI, AGAIN],
        [HI, HELLO, {"role": "assistant", "content": "How are you?"}, AGAIN],
        [HELLO, AGAIN],
        [called("c1"), result("c1"), AGAIN],
        [*CALL, AGAIN],
        [HI, called("c1"), AGAIN],
    ):
        prompt = await server.prompt(talk)
        for message in talk:
            assert (message["content"] or "Rome0") in prompt


async def test_results_follow_the_calls_where_ids_are_not_shown(model: Model) -> None:
    talk = [ASKED, called("c1", "c2"), result("c2", "snow"), result("c1", "rain")]
    prompt = await model("qwen3").prompt(talk, tools=[WEATHER])
    assert prompt.index("rain") < prompt.index("snow")
    prompt = await model("moonshotai-Kimi-K2").prompt(talk, tools=[WEATHER])
    assert prompt.index("snow") < prompt.index("rain"), "its template shows the ids"
    assert "## Return of functions.get_weather:1\\nsnow" in prompt


async def test_a_result_may_be_a_list_of_parts(model: Model) -> None:
    parts = [{"type": "text", "text": "12 C"}, {"type": "text", "text": "rain"}]
    for name in ("qwen3", MISTRAL[0], "gptoss", "gemma3"):
        prompt = await model(name).prompt([ASKED, called("c1"), result("c1", parts)], tools=[WEATHER])
        assert "12 C" in prompt
        assert "rain" in prompt


async def test_what_a_template_leaves_out_is_named(model: Model) -> None:
    thought = [HI, {**HELLO, "reasoning_content": "Greet."}, {**AGAIN, "name": "ada"}]
    server = model("qwen3")
    prompt = await server.prompt(thought)
    assert "Greet." not in prompt
    assert server.headers["x-personae-ignored"] == "messages[].name, messages[].reasoning_content"
    inline = [HI, {"role": "assistant", "content": "<think>\nGreet.\n</think>\n\nHello."}, AGAIN]
    prompt = await server.prompt(inline)
    assert "Greet." not in prompt
    assert "Hello." in prompt
    assert server.headers["x-personae-ignored"] == "messages[].reasoning_content"
    named = [ASKED, called("call_1"), result("call_1", name="get_weather")]
    for talk in ([HI, HELLO, AGAIN], named):
        await server.prompt(talk, tools=[WEATHER])
        assert "x-personae-ignored" not in server.headers
    blocks = [{"type": "thinking", "thinking": "Greet.", "signature": ""}, {"type": "text", "text": "Hello."}]
    await server.post("/v1/messages", messages=[HI, {"role": "assistant", "content": blocks}, AGAIN])
    assert server.headers["x-personae-ignored"] == "messages[].content[].thinking"


async def test_what_cannot_be_shown_is_refused_by_its_own_name() -> None:
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    server = Served(only_users)
    status, answer = await server.post("/v1/chat/completions", messages=[HI, HELLO, AGAIN])
    assert (status, answer["error"]["param"]) == (400, "messages[1].content")
    body = {"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}, AGAIN]}
    status, answer = await server.post("/v1/messages", **body)
    assert (status, answer["error"]["message"].count("messages[1]")) == (400, 1)
    items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    status, answer = await server.post("/v1/responses", max_tokens=None, input=[*items, items[0]])
    assert status == 400, answer
    await server.prompt([HI])


async def test_a_template_that_fails_on_a_message_names_it() -> None:
    fails = (
        "{% for m in messages %}{% if 'x' in m.content %}{{ 1 // 0 }}{% endif %}{{ m.content }}{% endfor %}"
    )
    server = Served(fails)
    status, answer = await server.post(
        "/v1/chat/completions", messages=[HI, HELLO, {"role": "user", "content": "x"}, HELLO, HI]
    )
    assert (status, answer["error"]["param"]) == (400, "messages[2]")
    assert "division" not in answer["error"]["message"]


async def test_an_image_is_refused_by_its_name(model: Model) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    server = model("llava_next")
    talk = [HI, HELLO, {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    status, answer = await server.post("/v1/chat/completions", messages=talk)
    assert (status, answer["error"]["param"]) == (400, "messages[2].content[1].type")
