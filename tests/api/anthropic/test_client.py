"""`POST /v1/messages` as the `anthropic` package uses it, plain and streamed."""

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from fake_engine import FakeEngine
from live_server import serving
from tool_chat import call
from uploads import open_fixture

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
THOUGHT = "<think>Where?</think>"


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1].tokens, skip_special_tokens=False)


def ask(client: Anthropic, messages: Any = "hi", **fields: Any) -> anthropic.types.Message:
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return client.messages.create(**{"model": "base", "max_tokens": 100, "messages": messages, **fields})


def test_a_question_is_answered_with_anthropics_usage_and_ids(client: Anthropic, engine: FakeEngine) -> None:
    message = ask(client, system="Be brief.")
    assert message.id.startswith("msg_")
    assert message._request_id
    [block] = message.content
    assert block.type == "text"
    assert block.text == "Hello, world!"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    log = engine.submitted[-1]
    cached = message.usage.cache_read_input_tokens
    assert cached == log.prompt_length // 2
    assert message.usage.input_tokens + cached == log.prompt_length
    assert message.usage.output_tokens == len("Hello, world!") + 1
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_loop_of_two_turns_with_a_tool(streamed: bool, client: Anthropic, engine: FakeEngine) -> None:
    def turn(messages: list[Any]) -> anthropic.types.Message:
        fields: dict[str, Any] = {"model": "base", "max_tokens": 200, "tools": [WEATHER]}
        if not streamed:
            return client.messages.create(messages=messages, **fields)
        with client.messages.stream(messages=messages, **fields) as stream:
            return stream.get_final_message()

    engine.answer = "Let me see." + call("get_weather", city="Köln")
    messages: list[Any] = [{"role": "user", "content": "Is it warm in Köln?"}]
    message = turn(messages)
    assert message.stop_reason == "tool_use"
    said, use = message.content
    assert said.type == "text"
    assert said.text.strip() == "Let me see."
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("get_weather", {"city": "Köln"})
    engine.answer = "Yes, 24 degrees."
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "24 °C"}]}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    message = turn(messages)
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "end_turn"
    prompt = prompt_of(engine)
    assert '"arguments": {"city": "K\\u00f6ln"}' in prompt or '"arguments": {"city": "Köln"}' in prompt
    assert "<|im_start|>tool\n24 °C<|im_end|>" in prompt


def test_the_tool_runner_of_the_package_calls_the_tool(client: Anthropic, engine: FakeEngine) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name
        """
        return f"{city}: rain"

    engine.answer = lambda log: (
        "It rains."
        if "rain<|im_end|>" in engine.tokenizer.decode(log.tokens, skip_special_tokens=False)
        else call("get_weather", city="Bonn")
    )
    runner = client.beta.messages.tool_runner(
        model="base",
        max_tokens=200,
        tools=[get_weather],
        messages=[{"role": "user", "content": "Does it rain in Bonn?"}],
    )
    last = runner.until_done()
    assert last.content[0].text == "It rains."


def test_a_streams_events_come_in_anthropics_order(client: Anthropic, engine: FakeEngine) -> None:
    engine.answer = f"{THOUGHT}Ah." + call("get_weather", city="Bonn")
    events = list(
        client.messages.create(
            model="base",
            max_tokens=200,
            messages=[{"role": "user", "content": "hi"}],
            tools=[WEATHER],
            thinking={"type": "adaptive"},
            stream=True,
        )
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [start.content_block.type for start in starts] == ["thinking", "text", "tool_use"]
    assert [start.index for start in starts] == [0, 1, 2]
    assert kinds.count("content_block_stop") == 3
    grown = "".join(
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    )
    assert json.loads(grown) == {"city": "Bonn"}
    end = events[-2]
    assert end.type == "message_delta"
    assert end.delta.stop_reason == "tool_use"
    assert end.usage.output_tokens == len(engine.submitted[-1].tokens) or end.usage.output_tokens > 0


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_is_a_block_of_its_own_and_is_taken_back(
    display: str, client: Anthropic, engine: FakeEngine
) -> None:
    engine.answer = f"{THOUGHT}Cologne."
    thinking = {"type": "enabled", "budget_tokens": 50, "display": display}
    message = ask(client, thinking=thinking)
    thought, said = message.content
    assert thought.type == "thinking"
    assert said.type == "text"
    assert said.text == "Cologne."
    assert (thought.thinking, bool(thought.signature)) == ("Where?" if display == "summarized" else "", True)
    details = message.usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens > 0
    talk: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Why?"},
    ]
    ask(client, talk, thinking=thinking)
    assert f"{THOUGHT}Cologne.<|im_end|>" in prompt_of(engine)


def test_without_thinking_the_template_is_told_not_to(client: Anthropic, engine: FakeEngine) -> None:
    ask(client)
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    ask(client, thinking={"type": "adaptive"})
    assert prompt_of(engine).endswith("<think>\n")


def test_stop_sequences_end_the_answer_and_are_named(client: Anthropic, engine: FakeEngine) -> None:
    message = ask(client, stop_sequences=[", w"])
    assert message.content[0].type == "text"
    assert message.content[0].text == "Hello"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", w")
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"


def test_a_last_assistant_message_is_continued(client: Anthropic, engine: FakeEngine) -> None:
    talk: list[Any] = [
        {"role": "user", "content": "The sun in Greek?"},
        {"role": "assistant", "content": "It is (B"},
    ]
    ask(client, talk)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nIt is (B")


@pytest.mark.parametrize(
    ("choice", "bound"),
    [
        ({"type": "auto"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
        ({"type": "tool", "name": "get_weather"}, True),
        ({"type": "none"}, False),
    ],
    ids=lambda value: str(value.get("type") if isinstance(value, dict) else value),
)
def test_tool_choice_binds_the_answer(
    choice: Any, bound: bool, client: Anthropic, engine: FakeEngine
) -> None:
    ask(client, tools=[WEATHER], tool_choice=choice)
    grammar = engine.submitted[-1].grammar
    assert ("get_weather" in (grammar.source if grammar else "")) == bound


def test_an_output_format_binds_the_answer_strictly(client: Anthropic, engine: FakeEngine) -> None:
    format: Any = {"type": "json_schema", "schema": {"type": "integer"}}
    engine.answer = "12"
    ask(client, output_config={"format": format})
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert "integer" in grammar.source


def test_tokens_are_counted_as_the_message_would_have_them(client: Anthropic, engine: FakeEngine) -> None:
    talk: Any = [{"role": "user", "content": "How long am I?"}]
    fields: Any = {"model": "base", "messages": talk, "system": "Count.", "tools": [WEATHER]}
    count = client.messages.count_tokens(**fields)
    assert engine.submitted == []
    client.messages.create(max_tokens=5, **fields)
    assert count.input_tokens == engine.submitted[-1].prompt_length


def test_errors_have_anthropics_shape(client: Anthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError) as lost:
        ask(client, model="nobody")
    assert lost.value.body["error"]["type"] == "not_found_error"
    assert lost.value.request_id
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(client, tools=[WEATHER | {"input_schema": {"type": "string"}}])
    assert wrong.value.body["type"] == "error"
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    assert wrong.value.body["error"]["param"] == "tools[0].input_schema"
    assert "`tools[0].input_schema`" in wrong.value.body["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_event(client: Anthropic, engine: FakeEngine) -> None:
    engine.fail_after = 3
    with pytest.raises(anthropic.APIStatusError, match="could not be finished"):
        list(
            client.messages.create(
                model="base", max_tokens=50, messages=[{"role": "user", "content": "hi"}], stream=True
            )
        )


def test_the_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    with open_fixture(tmp_path) as fixture, serving(fixture.app) as address:
        with Anthropic(base_url=address, api_key=fixture.key("acme"), max_retries=0) as client:
            assert ask(client).stop_reason == "end_turn"
        with (
            Anthropic(base_url=address, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            ask(client)
        assert refused.value.body["error"]["type"] == "authentication_error"


def test_models_are_listed_and_shown_as_anthropics_clients_read_them(client: Anthropic) -> None:
    [base, *_] = client.models.list()
    assert (base.id, base.display_name, base.type, base.lifecycle) == ("base", "base", "model", "active")
    assert client.models.retrieve("base") == base
