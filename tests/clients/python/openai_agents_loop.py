"""OpenAI Agents: the runner runs the tools, and `to_input_list` is the next run's beginning."""

import asyncio
import json
from typing import Any

import agents
import openai
from conversation import MODEL, QUESTION, THANKS, address, delivered, get_time, get_weather


async def converse(model: Any, way: str, *, stream: bool) -> None:
    agent = agents.Agent(
        "Loop", model=model, tools=[agents.function_tool(get_weather), agents.function_tool(get_time)]
    )

    async def ask(items: Any) -> Any:
        if not stream:
            return await agents.Runner.run(agent, items)
        running = agents.Runner.run_streamed(agent, items)
        async for _ in running.stream_events():
            pass
        return running

    first = await ask(QUESTION)
    second = await ask([*first.to_input_list(), {"role": "user", "content": THANKS}])
    calls = [
        (item.raw_item.name, json.loads(item.raw_item.arguments))
        for item in first.new_items
        if item.type == "tool_call_item"
    ]
    delivered(f"{way}, streamed" if stream else way, calls, [first.final_output, second.final_output])


async def main() -> None:
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=address(), api_key="none", max_retries=0) as client:
        for stream in (False, True):
            chat = agents.OpenAIChatCompletionsModel(MODEL, openai_client=client)
            await converse(chat, "chat", stream=stream)
            await converse(
                agents.OpenAIResponsesModel(MODEL, openai_client=client), "responses", stream=stream
            )


asyncio.run(main())
