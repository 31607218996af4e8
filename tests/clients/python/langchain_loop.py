"""LangChain: the messages that it made of answers are kept in its list."""

from typing import Any

from conversation import MODEL, QUESTION, THANKS, address, delivered, get_time, get_weather
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

TOOLS = {one.name: one for one in (tool(get_weather), tool(get_time))}


def converse(*, responses: bool, stream: bool) -> None:
    model = ChatOpenAI(
        base_url=address(), api_key=SecretStr("none"), model=MODEL, max_retries=0, use_responses_api=responses
    ).bind_tools(list(TOOLS.values()))
    messages: list[Any] = [HumanMessage(QUESTION)]

    def ask() -> Any:
        if not stream:
            return model.invoke(messages)
        first, *pieces = model.stream(messages)
        whole: Any = first
        for piece in pieces:
            whole += piece
        return whole

    said = ask()
    messages.append(said)
    messages += [TOOLS[one["name"]].invoke(one) for one in said.tool_calls]
    calls = [(one["name"], one["args"]) for one in said.tool_calls]
    texts = []
    for more in (THANKS, ""):
        said = ask()
        texts.append(str(said.text))
        messages += [said, HumanMessage(more)]
    delivered(("responses" if responses else "chat") + (", streamed" if stream else ""), calls, texts)


for both in (False, True):
    for streamed in (False, True):
        converse(responses=both, stream=streamed)
