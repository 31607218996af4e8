"""Translates a request for a response into the equivalent chat completion, and the fields in its errors back
into those of the client."""

from collections.abc import Sequence

from personae.api.dialect import MOST_OF_NAME
from personae.api.responses import items as wire
from personae.api.responses.mcp_items import ChosenServer, McpServerTool
from personae.api.responses.mcp_prompt import PromptItem, function_items, server_tools, shown_name
from personae.api.responses.mcp_writing import ServerTool
from personae.api.responses.request import LOGPROBS, ResponsesRequest, SchemaFormat
from personae.api.responses.sealed import unsealed
from personae.api.tools import check_name
from personae.api.wire.conversation import (
    AllowedTools,
    AssistantMessage,
    BoundInput,
    ContentPart,
    CustomCall,
    CustomSpec,
    CustomTool,
    DeveloperMessage,
    FilePart,
    FunctionCall,
    FunctionName,
    FunctionTool,
    GrammarSource,
    ImagePart,
    Message,
    NamedCustomTool,
    NamedTool,
    PastToolCall,
    RefusalPart,
    SystemMessage,
    TextPart,
    Tool,
    ToolChoice,
    ToolMessage,
    ToolSelection,
    UserMessage,
)
from personae.api.wire.renamed import FieldNames
from personae.api.wire.schema import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    Sampling,
    TextFormat,
)
from personae.errors import RequestError, UnsupportedParameter

_FIELDS = (
    (r"^messages\[\]\.reasoning_content$", "input[].content"),
    (r"^messages\b", "input"),
    (r"^max_(?:completion_)?tokens$", "max_output_tokens"),
    (r"^response_format(?:\.json_schema)?\b", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\])\.(?:function|custom)\b", r"\1"),
    (r"^(tools\[\d+\]\.format)\.grammar\b", r"\1"),
    (r"^tool_choice\.allowed_tools\b", "tool_choice"),
    (r"^(tool_choice(?:\.tools\[\d+\])?)\.(?:function|custom)\b", r"\1"),
)


class Names(FieldNames):
    """The names of the chat completion's fields in the original request."""

    def __init__(self) -> None:
        super().__init__(_FIELDS)
        self.namespaces: dict[str, tuple[str, str]] = {}
        """The namespace and the name of each tool in a namespace, by the name that the model sees."""
        self.server_tools: dict[str, ServerTool] = {}
        """The tools of MCP servers, by the name that the model sees."""


def chat_request(
    body: ResponsesRequest, most_items: int, earlier: int = 0, field: str = "previous_response_id"
) -> tuple[ChatRequest, Names]:
    """The equivalent chat completion. The first `earlier` items are stored ones, which `field` named. Raises
    UnsupportedParameter for unsupported items, RequestError for more than `most_items`."""
    if isinstance(body.input, list) and len(body.input) > most_items:
        raise RequestError(f"`input` may have at most {most_items} items.", param="input")
    names = Names()
    shared = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    reasoning, text = body.reasoning, body.text
    messages = _messages(body, names, earlier, field)
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    chat = ChatRequest(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs,
        response_format=None if text is None else _format(text.format),
        reasoning_effort=None if reasoning is None else reasoning.effort,
        tools=None if body.tools is None else _tools(body, names),
        tool_choice=_choice(body.tool_choice, names),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_options=body.prompt_cache_options,
        prompt_cache_retention=body.prompt_cache_retention,
    )
    return chat, names


def _messages(body: ResponsesRequest, names: Names, earlier: int, field: str) -> list[Message]:
    messages: list[Message] = []
    if body.instructions is not None:
        names.put("messages[0]", "instructions")
        names.put("messages[0].content", "instructions")
        messages.append(SystemMessage(body.instructions))
    if isinstance(body.input, str):
        names.put(f"messages[{len(messages)}]", "input")
        names.put(f"messages[{len(messages)}].content", "input")
        return [*messages, UserMessage(body.input)]
    for place, item in function_items(body.input, earlier, field):
        _add(messages, item, place, names)
    return messages


def _add(messages: list[Message], item: PromptItem, place: str, names: Names) -> None:
    """Add one item to the conversation."""
    match item:
        case wire.ItemReference():
            raise UnsupportedParameter(
                f"`{place}`: items are not found by their ids here; send the item itself.", param=place
            )
        case wire.ReasoningItem() if not _thought(item):
            return  # some clients send back reasoning items without the reasoning
        case wire.FunctionResult() | wire.CustomResult():
            messages.append(ToolMessage(_content(item.output), item.call_id))
            names.put(f"messages[{len(messages) - 1}].content", f"{place}.output")
            names.put(f"messages[{len(messages) - 1}].tool_call_id", f"{place}.call_id")
        case wire.MessageItem(role="user"):
            messages.append(UserMessage(_content(item.content)))
        case wire.MessageItem(role="system"):
            messages.append(SystemMessage(_content(item.content)))
        case wire.MessageItem(role="developer"):
            messages.append(DeveloperMessage(_content(item.content)))
        case _:
            _say(_own(messages, item), item, place, f"messages[{len(messages) - 1}]", names)
    names.put(f"messages[{len(messages) - 1}]", place)


_Said = wire.MessageItem | wire.ReasoningItem | wire.FunctionCallItem | wire.CustomCallItem


def _own(messages: list[Message], item: _Said) -> AssistantMessage:
    """The assistant's message that the item belongs to: in chat, reasoning, text and calls are in one
    message."""
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage):
        calls = isinstance(item, wire.FunctionCallItem | wire.CustomCallItem)
        if calls or (last.content is None and not last.tool_calls):  # before: reasoning alone
            return last
    messages.append(own := AssistantMessage())
    return own


def _say(own: AssistantMessage, item: _Said, place: str, at: str, names: Names) -> None:
    """Add an item of the assistant to its message, which is at `place`."""
    match item:
        case wire.MessageItem():
            own.content = _content(item.content)
            names.put(f"{at}.content", f"{place}.content")
        case wire.ReasoningItem():
            own.reasoning_content = (own.reasoning_content or "") + _thought(item)
        case wire.FunctionCallItem() | wire.CustomCallItem():
            calls = own.tool_calls = [*(own.tool_calls or ()), _call(item)]
            for part in ("", ".function", ".custom"):
                names.put(f"{at}.tool_calls[{len(calls) - 1}]{part}", place)


def _thought(item: wire.ReasoningItem) -> str:
    """The text of the reasoning, wherever it is."""
    text = "".join(part.text for part in item.content or item.summary)
    return text or unsealed(item.encrypted_content or "") or ""


def _call(item: wire.FunctionCallItem | wire.CustomCallItem) -> PastToolCall:
    name = item.name if item.namespace is None else _joined(item.namespace, item.name)
    if isinstance(item, wire.CustomCallItem):
        return PastToolCall(custom=CustomCall(name, item.input), id=item.call_id, type="custom")
    return PastToolCall(function=FunctionCall(name, item.arguments), id=item.call_id)


def _content(content: str | Sequence[wire.Piece]) -> str | list[ContentPart]:
    return content if isinstance(content, str) else [_part(piece) for piece in content]


def _part(piece: wire.Piece) -> ContentPart:
    match piece:
        case wire.InputText() | wire.PastText():
            return TextPart(piece.text)
        case wire.Refusal():
            return RefusalPart(piece.refusal)
        case wire.InputImage():
            return ImagePart()
        case wire.InputFile():
            return FilePart()


def _format(format: TextFormat | JsonObjectFormat | SchemaFormat | None) -> ResponseFormat | None:
    if isinstance(format, SchemaFormat):
        return JsonSchemaFormat(JsonSchema(format.schema, format.name, format.description, format.strict))
    return format


def _joined(namespace: str, name: str) -> str:
    """The name under which the model sees a tool of a namespace."""
    return f"{namespace}__{name}"


def _tools(body: ResponsesRequest, names: Names) -> list[Tool | CustomTool]:
    """The tools; each tool of a namespace or an MCP server is a separate one."""
    found: list[Tool | CustomTool] = []

    def add(tool: wire.FlatFunction | wire.FlatCustom, place: str, name: str, about: str | None) -> None:
        at = f"tools[{len(found)}]"
        for part in ("", ".function", ".custom"):
            names.put(at + part, place)
        names.put(f"{at}.custom.format.grammar", f"{place}.format")
        found.append(_tool(tool, name, about))

    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, McpServerTool):
            for one in server_tools(tool, body.input, f"tools[{index}]"):
                shown = shown_name(tool.server_label, one.name)
                if shown in names.server_tools:
                    raise RequestError(
                        f"The MCP server `{tool.server_label}` has two tools that the model would see as "
                        f"`{shown[:200]}`; choose one of them by `allowed_tools`.",
                        param=f"tools[{index}].allowed_tools",
                    )
                approval = tool.needs_approval(one.name, read_only=one.read_only)
                names.server_tools[shown] = ServerTool(tool.server_label, one.name, approval)
                add(
                    wire.FlatFunction(one.name, one.input_schema),
                    f"tools[{index}].{one.name[:80]}",
                    shown,
                    one.description or tool.server_description,
                )
            continue
        check_name(tool.name, f"tools[{index}].name", MOST_OF_NAME)
        if not isinstance(tool, wire.NamespaceTool):
            add(tool, f"tools[{index}]", tool.name, tool.description)
            continue
        for place, inner in enumerate(tool.tools):
            check_name(inner.name, f"tools[{index}].tools[{place}].name", MOST_OF_NAME)
            joined = _joined(tool.name, inner.name)
            names.namespaces[joined] = tool.name, inner.name
            add(inner, f"tools[{index}].tools[{place}]", joined, inner.description or tool.description)
    return found


def _tool(tool: wire.FlatFunction | wire.FlatCustom, name: str, about: str | None) -> Tool | CustomTool:
    if isinstance(tool, wire.FlatFunction):
        return Tool(FunctionTool(name, about, tool.parameters, tool.strict))
    format = tool.format
    if isinstance(format, wire.FlatGrammar):
        bound = BoundInput(GrammarSource(format.definition, format.syntax))
        return CustomTool(CustomSpec(name, about, bound))
    return CustomTool(CustomSpec(name, about, format))


def _named(tool: wire.ChosenFunction | wire.ChosenCustom) -> NamedTool | NamedCustomTool:
    name = FunctionName(tool.name)
    return NamedTool(name) if isinstance(tool, wire.ChosenFunction) else NamedCustomTool(name)


def _choice(choice: wire.ToolChoice | None, names: Names) -> ToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, wire.ChosenTools):
        chosen = [
            one
            for index, tool in enumerate(choice.tools)
            for one in _chosen(tool, names, f"tool_choice.tools[{index}]")
        ]
        return AllowedTools(ToolSelection(choice.mode, chosen))
    if isinstance(choice, ChosenServer):
        return AllowedTools(ToolSelection("required", _chosen(choice, names, "tool_choice")))
    return _named(choice)


def _chosen(
    tool: wire.ChosenFunction | wire.ChosenCustom | ChosenServer, names: Names, place: str
) -> list[NamedTool | NamedCustomTool]:
    """The tools of a choice: all of a server, if it names no tool of it."""
    if not isinstance(tool, ChosenServer):
        return [_named(tool)]
    known = names.server_tools.items()
    own = {shown: one for shown, one in known if one.label == tool.server_label}
    if not own:
        raise RequestError(
            f"`{place}.server_label` is not the label of one of the `tools`, or it has no tool.",
            param=f"{place}.server_label",
        )
    found = [shown for shown, one in own.items() if tool.name in (None, one.name)]
    if not found:
        raise RequestError(f"`{place}.name` is not a tool of that server.", param=f"{place}.name")
    return [NamedTool(FunctionName(shown)) for shown in found]
