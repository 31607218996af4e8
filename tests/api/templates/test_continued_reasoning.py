"""Reasoning that the client has begun: what the model writes on is reasoning up to its end."""

from collections.abc import Callable
from typing import Any

import pytest
from template_server import Served

pytestmark = pytest.mark.anyio
Model = Callable[..., Served]

ASKED = {"role": "user", "content": "2+2?"}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
WRITTEN = " 2 and 2 is 4.\n</think>\n\nThe answer is 4."
NAMES = ["Qwen-QwQ-32B", "qwen3", "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "glm4moe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
async def test_a_thought_that_the_client_began_goes_on(
    model: Model, name: str, kwargs: dict[str, Any]
) -> None:
    server = model(name, WRITTEN)
    begun = {"role": "assistant", "content": "<think>\nLet me add."}
    message = await server.chat([ASKED, begun], **CONTINUED, chat_template_kwargs=kwargs)
    assert message["reasoning_content"].rstrip() == " 2 and 2 is 4."
    assert message["content"].strip() == "The answer is 4."
    assert server.last_prompt.endswith("<think>\nLet me add.")
    assert server.last_prompt.count("<think>") == 1, "no empty one before it"
    _, answer = await server.post(
        "/v1/chat/completions", messages=[ASKED, begun], **CONTINUED, chat_template_kwargs=kwargs
    )
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("name", NAMES)
async def test_a_prefill_that_ended_its_thought_is_content(model: Model, name: str) -> None:
    server = model(name, " 4.")
    begun = {"role": "assistant", "content": "<think>\nLet me add.\n</think>\n\nThe answer is"}
    message = await server.chat([ASKED, begun], **CONTINUED)
    assert message["content"] == " 4."
    assert not message.get("reasoning_content")


async def test_a_prefill_without_a_thought_is_content(model: Model) -> None:
    server = model("qwen3", " 4.")
    for text in ("The answer is", "A <think> tag is", ""):
        message = await server.chat([ASKED, {"role": "assistant", "content": text}], **CONTINUED)
        assert message["content"] == " 4."
        assert not message.get("reasoning_content")


async def test_a_message_of_reasoning_alone_is_continued_as_reasoning(model: Model) -> None:
    server = model("qwen3", WRITTEN)
    begun = {"role": "assistant", "content": None, "reasoning_content": "Let me add."}
    message = await server.chat([ASKED, begun], **CONTINUED)
    assert message["reasoning_content"].strip() == "2 and 2 is 4."
    assert server.last_prompt.endswith("<think>\nLet me add.")


async def test_an_echo_of_reasoning_is_reasoning(model: Model) -> None:
    server = model("qwen3", WRITTEN)
    begun = {"role": "assistant", "content": "<think>\nLet me add."}
    message = await server.chat([ASKED, begun], **CONTINUED, echo=True)
    assert message["reasoning_content"].strip() == "Let me add. 2 and 2 is 4."
    assert message["content"].strip() == "The answer is 4."


async def test_anthropics_prefill_goes_on_too(model: Model) -> None:
    server = model("qwen3", WRITTEN)
    status, answer = await server.post(
        "/v1/messages",
        messages=[ASKED, {"role": "assistant", "content": "<think>\nLet me add."}],
        thinking={"type": "adaptive"},
    )
    assert status == 200, answer
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


async def test_a_budget_of_reasoning_holds_for_one_that_goes_on(model: Model) -> None:
    server = model("qwen3", WRITTEN)
    begun = {"role": "assistant", "content": "<think>\nLet me add."}
    await server.chat([ASKED, begun], **CONTINUED, thinking_token_budget=5)
    grammar = server.engine.submitted[-1].grammar
    assert grammar is not None
    assert grammar.reasoning is not None
    assert (grammar.reasoning.tokens, grammar.reasoning.opened) == (5, True)
