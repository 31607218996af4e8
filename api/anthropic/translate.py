"""Translates a request for a message into the equivalent chat completion."""

from typing import Any

import msgspec

from personae.api.anthropic import request as wire
from personae.api.anthropic.request import CountTokensRequest, MessagesRequest
from personae.api.family import Family
from personae.api.responses.sealed import unsealed
from personae.api.wire.conversation import (
    AssistantMessage,
    Content,
    ContentPart,
    FilePart,
    FunctionCall,
    FunctionName,
    FunctionTool,
    ImagePart,
    Message,
    NamedTool,
    PastToolCall,
    SystemMessage,
    TextPart,
    Tool,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from personae.api.wire.renamed import FieldNames
from personae.api.wire.schema import ChatRequest, JsonSchema, JsonSchemaFormat, Sampling
from personae.errors import RequestError

_BILLING = "x-anthropic-billing-header:"

Asked = MessagesRequest | CountTokensRequest

_FIELDS = (
    (r"^max_completion_tokens$", "max_tokens"),
    (r"^stop\b", "stop_sequences"),
    (r"^enable_thinking$", "thinking"),
    (r"^thinking_token_budget$", "thinking.budget_tokens"),
    (r"^reasoning_effort$", "output_config.effort"),
    (r"^response_format(?:\.json_schema)?\b", "output_config.format"),
    (r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function\b", r"\1"),
    (r"^tool_choice\.function\b", "tool_choice"),
    (r"^messages\[\]\.reasoning_content$", "messages[].content[].thinking"),
)


def chat_request(
    body: MessagesRequest, family: Family, most: int, ignored: list[str]
) -> tuple[ChatRequest, FieldNames]:
    """The equivalent chat completion, and the names of its fields here. Adds to `ignored` what this model
    cannot do. Raises RequestError for more than `most` messages, or an invalid thinking budget."""
    if body.max_tokens < 1:
        raise RequestError("`max_tokens` must be at least 1.", param="max_tokens", code="out_of_range")
    budget = body.thinking.budget_tokens if isinstance(body.thinking, wire.ThinkingEnabled) else None
    if budget is not None and not 0 < budget < body.max_tokens:
        raise RequestError(
            "`thinking.budget_tokens` must be at least 1 and less than `max_tokens`.",
            param="thinking.budget_tokens",
            code="out_of_range",
        )
    names = FieldNames(_FIELDS)
    shared = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    shared["stop"] = body.stop_sequences or None
    messages = _conversation(body, most, names, ignored)
    thinking, budget = _thinking(body, family, budget, ignored)
    chat = ChatRequest(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_tokens,
        continue_final_message=_continues(body) or None,
        enable_thinking=thinking,
        thinking_token_budget=budget,
        reasoning_effort=_effort(body, family, ignored),
        response_format=_format(body),
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", None),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return chat, names


def counted(
    body: CountTokensRequest, family: Family, most: int, ignored: list[str]
) -> tuple[ChatRequest, FieldNames]:
    """The part of a chat completion that determines the prompt, and the names of its fields here."""
    names = FieldNames(_FIELDS)
    messages = _conversation(body, most, names, ignored)
    thinking, _ = _thinking(body, family, None, ignored)
    chat = ChatRequest(
        messages=messages,
        continue_final_message=_continues(body) or None,
        enable_thinking=thinking,
        reasoning_effort=_effort(body, family, ignored),
        tools=_tools(body),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return chat, names


def _continues(body: Asked) -> bool:
    """Whether the answer continues the last message, as in Anthropic's API if that is the assistant's. Raises
    RequestError if that calls tools, because the results come next."""
    last = body.messages[-1] if body.messages else None
    if not isinstance(last, wire.AssistantTurn):
        return False
    if any(isinstance(block, wire.ToolUseBlock) for block in last.content):
        param = f"messages[{len(body.messages) - 1}]"
        raise RequestError(f"`{param}` calls tools; a message with their results must follow.", param=param)
    return True


def _thinking(
    body: Asked, family: Family, budget: int | None, ignored: list[str]
) -> tuple[bool | None, int | None]:
    """Whether to reason, and with how many tokens. Without `thinking` the model does not reason, if reasoning
    can be switched off."""
    source = "" if family.template is None else family.template.source
    switch = "enable_thinking" in source
    if body.thinking is None:
        return (False if switch else None), None
    if isinstance(body.thinking, wire.ThinkingDisabled):
        return False, None
    if family.reasoning is None:
        ignored.append("thinking")  # it allows the model to reason, and this model never does
        return None, None
    return (True if switch else None), budget


def _effort(body: Asked, family: Family, ignored: list[str]) -> Any:
    effort = None if body.output_config is None else body.output_config.effort
    if effort is None:
        return None
    if family.template is None or "reasoning_effort" not in family.template.source:
        ignored.append("output_config.effort")
        return None
    return effort


def _conversation(body: Asked, most: int, names: FieldNames, ignored: list[str]) -> list[Message]:
    if len(body.messages) > most:
        raise RequestError(f"`messages` may have at most {most}.", param="messages")
    messages: list[Message] = []
    if system := _instructions(body.system, ignored):
        names.put("messages[0]", "system")
        names.put("messages[0].content", "system")
        messages.append(SystemMessage(_text(system)))
    for index, turn in enumerate(body.messages):
        place = f"messages[{index}]"
        match turn:
            case wire.SystemTurn():
                names.put(f"messages[{len(messages)}]", place)
                messages.append(SystemMessage(_text(turn.content)))
            case wire.UserTurn():
                _add_user_turn(messages, turn, place, names)
            case wire.AssistantTurn():
                names.put(f"messages[{len(messages)}]", place)
                messages.append(_assistant_message(turn, f"messages[{len(messages)}]", place, names, ignored))
    return messages


def _instructions(
    system: str | list[wire.TextBlock] | None, ignored: list[str]
) -> str | list[wire.TextBlock] | None:
    """`system` without the line in which Claude Code counts its requests. Its number is new every time, so
    no prompt would begin like another one and none would be in the prefix cache."""
    if system is None:
        return None
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if not any(text.startswith(_BILLING) for text in texts):
        return system
    ignored.append("system[].x-anthropic-billing-header")
    # A proxy may have joined blocks: only the header's own line is left out.
    rest = [text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text for text in texts]
    return [wire.TextBlock(text) for text in rest if text]


def _text(content: str | list[wire.TextBlock]) -> Content:
    return content if isinstance(content, str) else [TextPart(block.text) for block in content]


def _add_user_turn(messages: list[Message], turn: wire.UserTurn, place: str, names: FieldNames) -> None:
    """Add a user's turn: the results of tools are messages of their own."""
    if isinstance(turn.content, str):
        names.put(f"messages[{len(messages)}]", place)
        messages.append(UserMessage(turn.content))
        return
    parts: list[ContentPart] | None = None  # of the user's message that is being built
    for index, block in enumerate(turn.content):
        at = f"{place}.content[{index}]"
        if isinstance(block, wire.ToolResultBlock):
            parts = None
            names.put(f"messages[{len(messages)}].tool_call_id", f"{at}.tool_use_id")
            names.put(f"messages[{len(messages)}]", at)
            messages.append(ToolMessage(_result(block), block.tool_use_id))
            continue
        if parts is None:
            names.put(f"messages[{len(messages)}]", place)
            messages.append(UserMessage(parts := []))
        names.put(f"messages[{len(messages) - 1}].content[{len(parts)}]", at)
        parts.append(_part(block))
    if not turn.content:
        messages.append(UserMessage(""))


def _part(
    block: wire.TextBlock | wire.ImageBlock | wire.DocumentBlock | wire.SearchResultBlock,
) -> ContentPart:
    match block:
        case wire.SearchResultBlock():
            return TextPart("\n".join([block.title, block.source, *(one.text for one in block.content)]))
        case wire.TextBlock():
            return TextPart(block.text)
        case wire.ImageBlock():
            return ImagePart()
        case wire.DocumentBlock():
            text = _document(block)
            return FilePart() if text is None else TextPart(text)


def _document(block: wire.DocumentBlock) -> str | None:
    """A document's title, context and text; None if it is not text."""
    head = [line for line in (block.title, block.context) if line]
    match block.source:
        case wire.TextSource(data):
            return "\n".join([*head, data])
        case wire.ContentSource(str(content)):
            return "\n".join([*head, content])
        case wire.ContentSource(content):
            texts = [one.text for one in content if isinstance(one, wire.TextBlock)]
            return "\n".join([*head, *texts]) if len(texts) == len(content) else None
        case _:
            return None


def _result(block: wire.ToolResultBlock) -> Content:
    """What a tool answered. Templates cannot express `is_error`, so the text says it."""
    content = block.content or ""
    if block.is_error:
        if isinstance(content, str):
            return f"Error: {content}"
        return [TextPart("Error: "), *map(_part, content)]
    return content if isinstance(content, str) else [_part(part) for part in content]


def _assistant_message(
    turn: wire.AssistantTurn, at: str, place: str, names: FieldNames, ignored: list[str]
) -> AssistantMessage:
    if isinstance(turn.content, str):
        return AssistantMessage(turn.content)
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[PastToolCall] = []
    for index, block in enumerate(turn.content):
        match block:
            case wire.TextBlock():
                said.append(block.text)
            case wire.ThinkingBlock():
                thoughts.append(block.thinking or unsealed(block.signature or "") or "")
            case wire.RedactedThinkingBlock():
                ignored.append("messages[].content[].redacted_thinking")
            case wire.ToolUseBlock():
                names.put(f"{at}.tool_calls[{len(calls)}]", f"{place}.content[{index}]")
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(PastToolCall(FunctionCall(block.name, arguments), id=block.id))
    text = "".join(said)
    return AssistantMessage(
        text if said or not calls else None,
        calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _tools(body: Asked) -> list[Any] | None:
    if body.tools is None:
        return None
    return [
        Tool(FunctionTool(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in body.tools
    ]


def _choice(body: MessagesRequest) -> ToolChoice | None:
    match body.tool_choice:
        case None:
            return None
        case wire.AutoChoice():
            return "auto"
        case wire.AnyChoice():
            return "required"
        case wire.NoChoice():
            return "none"
        case wire.OneChoice():
            return NamedTool(FunctionName(body.tool_choice.name))


def _format(body: MessagesRequest) -> JsonSchemaFormat | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    return JsonSchemaFormat(JsonSchema(config.format.schema, strict=True))
