"""The openai package, as its pages say: what it gave is appended as it is."""

import json
from typing import Any

import openai
from conversation import (
    CHAT_TOOLS,
    MODEL,
    QUESTION,
    RESPONSES_TOOLS,
    THANKS,
    address,
    delivered,
    key,
    result_of,
)


def chat(client: openai.OpenAI, *, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        if not stream:
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS)  # type: ignore[arg-type]
            return answer.choices[0].message
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as events:  # type: ignore[arg-type]
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    message = ask()
    messages.append(message)
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]
    for one in message.tool_calls:
        result = result_of(one.function.name, one.function.arguments)
        messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    texts = []
    for more in (THANKS, ""):
        message = ask()
        texts.append(message.content)
        messages.append(message)
        messages.append({"role": "user", "content": more})
    delivered("chat, streamed" if stream else "chat", calls, texts)


def responses(client: openai.OpenAI, *, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        if not stream:
            return client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS, store=False)  # type: ignore[arg-type]
        with client.responses.stream(model=MODEL, input=items, tools=RESPONSES_TOOLS, store=False) as events:  # type: ignore[arg-type]
            return events.get_final_response()

    answer = ask()
    items += answer.output
    asked = [item for item in answer.output if item.type == "function_call"]
    calls = [(one.name, json.loads(one.arguments)) for one in asked]
    for one in asked:
        result = result_of(one.name, one.arguments)
        items.append({"type": "function_call_output", "call_id": one.call_id, "output": result})
    texts = []
    for more in (THANKS, ""):
        answer = ask()
        texts.append(answer.output_text)
        items += [*answer.output, {"role": "user", "content": more}]
    delivered("responses, streamed" if stream else "responses", calls, texts)


with openai.OpenAI(base_url=address(), api_key=key(), max_retries=0) as openai_client:
    for streamed in (False, True):
        chat(openai_client, stream=streamed)
        responses(openai_client, stream=streamed)
