"""Families whose answers look unlike others', through the API: what is streamed is what is not streamed."""

import json
from typing import Any

import asgi
import pytest
from fake_engine import FakeEngine, byte_tokenizer
from tool_chat import TIME, tool

from personae.api.app import create_app

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
PLAIN = """{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}[{{ call.id }}]
{{- call.function | tojson }}{% endfor %}{% endfor %}"""
WEATHER = tool(
    "get_weather", strict=True, city={"type": "string"}, days={"type": "integer"}, dry={"type": "boolean"}
)
CALLED = [("get_weather", {"city": 'K"öln', "days": 3, "dry": True}), ("get_time", {})]
ANSWERS = {
    "qwen3_coder": (
        "<tool_call><function=<parameter=</think>",
        '<think>hm</think>Look:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nK"öln\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=dry>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n",
        ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|></think>",
        "<think>hm</think>Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "K\\"öln", "days": 3, "dry": true}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>functions.",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "K\\"öln", "days": 3, "dry": true}',
        ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"],
    ),
    "gemma4": (
        "<|tool_call>call:<tool_call|><|channel>thought",
        '<|channel>thought\nhm\n<channel|>Look:<|tool_call>call:get_weather{city:<|"|>K"öln<|"|>,days:3,dry:true}'
        "<tool_call|><|tool_call>call:get_time{}<tool_call|>",
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    ),
}


def engine_of(name: str, tokens: bool) -> FakeEngine:
    signs, answer, tags = ANSWERS[name]
    template = PLAIN + "{# " + signs + " #}"
    return FakeEngine(answer, tokenizer=byte_tokenizer(template, tags if tokens else ()), max_model_len=8192)


async def ask(engine: FakeEngine, **extra: Any) -> asgi.Visit:
    body = {"model": "base", "messages": [USER], "tools": [WEATHER, TIME], **extra}
    visit = await asgi.Visit("/v1/chat/completions", body).run(create_app(engine))
    assert visit.status == 200, visit.chunks
    return visit


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_reasoning_text_and_calls_come_apart(name: str, tokens: bool) -> None:
    engine = engine_of(name, tokens)
    choice = json.loads(b"".join((await ask(engine)).chunks))["choices"][0]
    message = choice["message"]
    called = CALLED[: 1 if name == "harmony" else 2]
    functions = [one["function"] for one in message["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == called
    assert (message["content"].strip(), message["reasoning_content"]) == ("Look:", "hm")
    assert choice["finish_reason"] == "tool_calls"
    for burst in (1, 4, 1000):
        engine.burst = burst
        content = reasoning = ""
        arguments: dict[int, str] = {}
        for event in (await ask(engine, stream=True)).events():
            for part in event["choices"] if event != "[DONE]" else ():
                content += part["delta"].get("content") or ""
                reasoning += part["delta"].get("reasoning_content") or ""
                for one in part["delta"].get("tool_calls", ()):
                    gained = one["function"].get("arguments", "")
                    arguments[one["index"]] = arguments.get(one["index"], "") + gained
        assert (content, reasoning) == (message["content"], message["reasoning_content"])
        assert list(arguments.values()) == [one["arguments"] for one in functions]


async def test_kimis_ids_are_those_that_its_template_takes_back() -> None:
    engine = engine_of("kimi_k2", tokens=True)
    choice = json.loads(b"".join((await ask(engine)).chunks))["choices"][0]
    ids = [one["id"] for one in choice["message"]["tool_calls"]]
    assert ids == ["functions.get_weather:0", "functions.get_time:1"]
    results = [{"role": "tool", "tool_call_id": id, "content": "fine"} for id in ids]
    await ask(engine, messages=[USER, choice["message"], *results])
    prompt = engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)
    assert "[functions.get_weather:0]" in prompt
    assert "[functions.get_time:1]" in prompt


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
async def test_a_custom_tools_text_is_written_as_it_is_where_strings_are(name: str) -> None:
    engine = engine_of(name, tokens=False)
    engine.answer = {
        "qwen3_coder": "<tool_call><function=sh><parameter=input>\n"
        'echo "a"\n</parameter></function></tool_call>',
        "gemma4": '<|tool_call>call:sh{input:<|"|>echo "a"<|"|>}<tool_call|>',
    }[name]
    grammar = {"syntax": "lark", "definition": 'start: "echo " /"[a-z]+"/'}
    shell = {"type": "custom", "custom": {"name": "sh", "format": {"type": "grammar", "grammar": grammar}}}
    choice = json.loads(b"".join((await ask(engine, tools=[shell])).chunks))["choices"][0]
    [one] = choice["message"]["tool_calls"]
    assert one["custom"] == {"name": "sh", "input": 'echo "a"'}
