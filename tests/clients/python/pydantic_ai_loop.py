"""pydantic-ai: the agent runs the tools, and its messages are the next run's history."""

import asyncio
import json
from typing import Any

from conversation import MODEL, QUESTION, THANKS, address, delivered, get_time, get_weather
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


async def converse(model: Any, way: str, *, stream: bool) -> None:
    agent: Any = Agent(model, tools=[get_weather, get_time])

    async def ask(text: str, history: Any) -> tuple[str, Any]:
        if not stream:
            result = await agent.run(text, message_history=history)
            return result.output, result.all_messages()
        async with agent.run_stream(text, message_history=history) as running:
            return await running.get_output(), running.all_messages()

    first, history = await ask(QUESTION, None)
    second, history = await ask(THANKS, history)
    calls = [
        (part.tool_name, json.loads(part.args) if isinstance(part.args, str) else part.args)
        for message in history
        for part in message.parts
        if part.part_kind == "tool-call"
    ]
    delivered(f"{way}, streamed" if stream else way, calls, [first, second])


async def main() -> None:
    provider = OpenAIProvider(base_url=address(), api_key="none")
    for stream in (False, True):
        await converse(OpenAIChatModel(MODEL, provider=provider), "chat", stream=stream)
        await converse(OpenAIResponsesModel(MODEL, provider=provider), "responses", stream=stream)


asyncio.run(main())
