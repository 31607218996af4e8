"""LiteLLM: the message that it made of an answer is appended as it is."""

import json
from typing import Any

import litellm
from conversation import CHAT_TOOLS, MODEL, QUESTION, RESPONSES_TOOLS, THANKS, address, delivered, result_of


def chat(provider: str, *, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        answer = litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=address(),
            api_key="none",
            messages=messages,
            tools=CHAT_TOOLS,
            stream=stream,
            num_retries=0,
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0].message

    message = ask()
    messages.append(message)
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]
    for one in message.tool_calls:
        result = result_of(one.function.name, one.function.arguments)
        messages.append(
            {"role": "tool", "tool_call_id": one.id, "name": one.function.name, "content": result}
        )
    texts = []
    for more in (THANKS, ""):
        message = ask()
        texts.append(message.content)
        messages += [message, {"role": "user", "content": more}]
    delivered(f"{provider}/, streamed" if stream else f"{provider}/", calls, texts)


def responses(provider: str) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]

    def ask() -> Any:
        return litellm.responses(
            model=f"{provider}/{MODEL}",
            api_base=address(),
            api_key="none",
            input=items,
            tools=RESPONSES_TOOLS,
            store=False,
        )

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
        texts.append(
            "".join(part.text for item in answer.output if item.type == "message" for part in item.content)
        )
        items += [*answer.output, {"role": "user", "content": more}]
    delivered(f"{provider}/ responses", calls, texts)


for name in ("hosted_vllm", "openai"):
    for streamed in (False, True):
        chat(name, stream=streamed)
    responses(name)
