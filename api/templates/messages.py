"""Messages as chat templates expect them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from personae.api.wire.conversation import (
    AssistantMessage,
    Content,
    FunctionMessage,
    Message,
    PastToolCall,
    RefusalPart,
    TextPart,
)
from personae.errors import RequestError, UnsupportedParameter
from personae.grammar.tools.custom import CUSTOM_INPUT

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an earlier answer's reasoning. Templates read the first or the second."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as one string, tool-call arguments as objects, nothing null.

    Text parts are joined by line breaks. Raises RequestError naming the part that is not text.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.__struct_config__.tag}
    if message.content is not None:
        plain["content"] = _text(message.content, f"{where}.content")
    if isinstance(message, FunctionMessage):  # templates know its newer form
        return {"role": "tool", "content": plain.get("content", ""), "name": message.name}
    if message.name is not None:
        plain["name"] = message.name
    if not isinstance(message, AssistantMessage):
        tool_call_id = getattr(message, "tool_call_id", None)
        return plain if tool_call_id is None else plain | {"tool_call_id": tool_call_id}
    if message.audio is not None:
        raise UnsupportedParameter(f"`{where}.audio` is not served.", param=f"{where}.audio")
    if message.refusal is not None:
        plain["content"] = "\n".join(filter(None, (plain.get("content"), message.refusal)))
    reasoning = [text for name in _REASONING if (text := getattr(message, name)) is not None]
    if reasoning:
        plain["reasoning_content"] = reasoning[0]
        plain["thinking"] = message.thinking if message.thinking is not None else reasoning[0]
    calls = [
        _tool_call(call, f"{where}.tool_calls[{index}]")
        for index, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        calls.append(_tool_call(PastToolCall(message.function_call), where))
    if calls:
        plain["tool_calls"] = calls
    elif reasoning:
        plain.setdefault("content", "")
    elif "content" not in plain:
        raise RequestError(
            f"`{where}.content` is required where there are no `tool_calls`.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    return plain


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            raise UnsupportedParameter(
                f"`{where}[{index}]` is not text, and this model reads nothing else.",
                param=f"{where}[{index}].type",
            )
    return "\n".join(texts)


class MalformedArguments(str):
    """Malformed arguments that a model wrote, as a template sees them: text that is shown unchanged.

    A template that shows arguments one by one sees a single one, the text.
    """

    __slots__ = ()

    def items(self) -> list[tuple[str, str]]:
        """The text as the only argument."""
        return [("arguments", str(self))]


def _tool_call(call: PastToolCall, where: str) -> dict[str, Any]:
    """A call as templates know it: always of a function. A call of a custom tool becomes one with its
    input."""
    arguments: Any = None
    if call.type == "custom" and call.custom is not None:
        name, arguments = call.custom.name, {CUSTOM_INPUT: call.custom.input}
    elif call.type == "function" and call.function is not None:
        name = call.function.name
        with suppress(ValueError, RecursionError):
            parsed = json.loads(call.function.arguments or "{}")
            if "\\u" in call.function.arguments:  # an escape may be half of a pair, which is no character
                json.dumps(parsed, ensure_ascii=False).encode()
            arguments = parsed
        if not isinstance(arguments, dict):
            arguments = MalformedArguments(call.function.arguments)
    else:
        param = f"{where}.{call.type}"
        raise RequestError(f"`{param}` is required.", param=param, code="missing_required_parameter")
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id} | plain
