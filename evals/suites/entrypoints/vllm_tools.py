"""vLLM's tests of tool calls."""

import json
from typing import Any

import jsonschema_rs

from personae.evals.harness.target import Body
from personae.evals.suites.entrypoints.kit import CHAT, Server, check, expect, finishes, only, user

FILE = "chat_completion/test_completion_with_function_calling.py"
WEATHER: Body = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24, "default": "Vienna"},
        "country": {"type": "string", "maxLength": 24},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "options": {"$ref": "#/$defs/Options", "description": "What else is wanted."},
    },
    "required": ["country", "unit"],
    "additionalProperties": False,
    "$defs": {
        "Options": {
            "type": "object",
            "properties": {"forecast": {"type": "boolean", "default": False}},
            "additionalProperties": False,
        }
    },
}
PERSON: Body = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TALK = [
    *user("Hi! How are you today?"),
    {"role": "assistant", "content": "I am well. How can I help?"},
    *user("What is the weather in Berlin, in fahrenheit?"),
]


def tool(name: str, parameters: Body) -> Body:
    """A function tool."""
    about = {"name": name, "description": f"Calls {name}.", "parameters": parameters}
    return {"type": "function", "function": about}


def named(name: str) -> Body:
    """A tool choice."""
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("get_current_weather", WEATHER), tool("get_forecast", PERSON)]


@check("vLLM", FILE, "test_function_tool_use")
async def calls(server: Server) -> None:
    """Calls by choice, by need and by name, streamed as whole, with and without thoughts before them."""
    for choice in ("auto", "required", named("get_current_weather")):
        for thinking in (True, False):
            asked: Body = {
                "messages": TALK,
                "tools": TOOLS,
                "tool_choice": choice,
                "max_tokens": 600,
                "chat_template_kwargs": {"enable_thinking": thinking},
            }
            found = only(await server.answer(CHAT, **asked))["message"].get("tool_calls") or []
            expect(choice == "auto" or found, f"a call with {choice}")
            events = await server.stream(CHAT, **asked)
            streamed = gathered(events)
            expect(
                [(one["function"]["name"], one["function"]["arguments"]) for one in found] == streamed,
                "the same calls in the stream",
            )


def gathered(events: list[Body]) -> list[tuple[str, str]]:
    """The calls of a stream."""
    found: dict[int, list[str]] = {}
    for delta in (one["delta"] for event in events for one in event["choices"]):
        for part in delta.get("tool_calls") or ():
            name, arguments = found.setdefault(part["index"], ["", ""])
            function = part.get("function") or {}
            found[part["index"]] = [
                name + (function.get("name") or ""),
                arguments + (function.get("arguments") or ""),
            ]
    return [(name, arguments) for name, arguments in found.values()]


@check("vLLM", FILE, "test_no_args_tool_call")
async def calls_without_arguments(server: Server) -> None:
    """A call that goes back with `{}` or with nothing for its arguments, and its result."""
    clock = [tool("get_current_time", {"type": "object", "properties": {}, "required": []})]
    asked: Body = {"messages": TALK, "tools": clock, "tool_choice": "required", "max_tokens": 100}
    message = only(await server.answer(CHAT, **asked))["message"]
    for arguments in ("{}", ""):
        call: dict[str, Any] = message["tool_calls"][0]
        said = {**call, "function": {**call["function"], "arguments": arguments}}
        talk = [
            *TALK,
            {**message, "tool_calls": [said]},
            {"role": "tool", "tool_call_id": call["id"], "content": "10:15"},
        ]
        expect((await server.chat(messages=talk, max_tokens=40))["message"]["content"], "an answer")


@check("vLLM", FILE, "test_named_tool_use")
async def a_named_call(server: Server) -> None:
    """Arguments of the schema, no content, streamed and not."""
    asked: Body = {
        "messages": user("Make up a person."),
        "tools": [tool("person", PERSON)],
        "tool_choice": named("person"),
        "max_completion_tokens": 400,
    }
    message = only(await server.answer(CHAT, **asked))["message"]
    expect(not message["content"], "no content")
    arguments = message["tool_calls"][0]["function"]["arguments"]
    expect(jsonschema_rs.is_valid(PERSON, json.loads(arguments)), "arguments of the schema")
    events = await server.stream(CHAT, **asked)
    deltas = [one["delta"] for event in events for one in event["choices"]]
    expect(not any(delta.get("content") for delta in deltas), "no content in the stream")
    expect(len(finishes(events)) == 1, "one end")
    expect(gathered(events) == [("person", arguments)], "the same call")


@check("vLLM", FILE, "test_inconsistent_tool_choice_and_tools")
async def choices_that_make_no_sense(server: Server) -> None:
    """A tool that is not offered, and a choice of nothing."""
    asked: Body = {"messages": TALK, "max_completion_tokens": 100}
    await server.refused(CHAT, **asked, tool_choice=named("person"))
    for choice in (named("nobody"), {}):
        await server.refused(CHAT, **asked, tools=[tool("person", PERSON)], tool_choice=choice)


@check(
    "vLLM",
    FILE,
    "test_max_tokens_with_tool_choice_required",
    differs="a call that does not fit in `max_tokens` is refused before it begins, not answered without it",
)
async def no_room_for_a_call(server: Server) -> None:
    """One token for a call that has to be."""
    for choice in ("required", named("get_current_weather")):
        refusal = await server.refused(
            CHAT, messages=TALK, tools=TOOLS, tool_choice=choice, max_completion_tokens=1
        )
        expect(refusal.error.get("code") == "max_tokens_too_small", "the code")


@check("vLLM", "basic/test_return_token_ids.py", "test_chat_completion_with_tool_use")
async def token_ids(server: Server) -> None:
    """The prompt's ids have the conversation, and there are none unless they are asked for."""
    asked: Body = {"messages": TALK, "tools": TOOLS, "max_tokens": 60, "logprobs": True}
    answer = await server.answer(CHAT, **asked, return_token_ids=True)
    prompt = (await server.answer("/detokenize", tokens=answer["prompt_token_ids"]))["prompt"]
    expect("Berlin" in prompt, "the conversation")
    expect(only(answer)["token_ids"], "ids of the answer")
    plain = await server.answer(CHAT, **asked, return_token_ids=False)
    expect(plain.get("prompt_token_ids") is None, "no ids of the prompt")
    expect(only(plain).get("token_ids") is None, "no ids of the answer")
