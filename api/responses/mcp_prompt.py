"""What the model sees of MCP servers: their tools as functions, and the calls of these with their results."""

import re
from collections.abc import Iterator, Sequence

from personae.api.mcp.session import McpTool
from personae.api.responses.items import (
    CustomCallItem,
    CustomResult,
    FunctionCallItem,
    FunctionResult,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
)
from personae.api.responses.mcp_items import (
    ApprovalRequest,
    ApprovalResponse,
    McpCallItem,
    McpListItem,
    McpServerTool,
)
from personae.errors import RequestError

PromptItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | FunctionResult
    | CustomResult
    | ItemReference
)
"""An item that the prompt may have."""

_STRANGE = re.compile(r"[^A-Za-z0-9_.-]")


def shown_name(label: str, tool: str) -> str:
    """The name under which the model sees a tool of a server."""
    return f"{label}__{_STRANGE.sub('_', tool)}"


def server_tools(server: McpServerTool, input: str | Sequence[Item], place: str) -> list[McpTool]:
    """The tools of a server that the model may call, by its newest list in the input. Raises RequestError for
    a name in `allowed_tools` that the server does not have."""
    items = () if isinstance(input, str) else input
    lists = {item.server_label: item.tools for item in items if isinstance(item, McpListItem)}
    tools = lists.get(server.server_label, [])
    asked = server.allowed_tools
    names = asked if isinstance(asked, list) else (asked.tool_names or ()) if asked is not None else ()
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            where = f"{place}.allowed_tools"
            raise RequestError(
                f"`{where}`: the server `{server.server_label}` has no tool `{name[:80]}`.", param=where
            )
    return [tool for tool in tools if server.allows(tool.name, read_only=tool.read_only)]


def function_items(items: Sequence[Item], earlier: int, field: str) -> Iterator[tuple[str, PromptItem]]:
    """The items that the model sees, each with its place in the request: calls of MCP servers are calls of
    functions. The first `earlier` items are stored ones, which `field` named. A call that waits for an
    approval is not shown; one that was declined has the client's reason as its result.

    Raises RequestError for a decision about a call that is not in the input.
    """
    requests = {item.id: item for item in items if isinstance(item, ApprovalRequest)}
    for index, item in enumerate(items):
        place = f"input[{index - earlier}]" if index >= earlier else field
        match item:
            case McpListItem() | ApprovalRequest():
                pass
            case McpCallItem():
                yield from _call(place, item.id or f"mcp_{index}", item, item.result)
            case ApprovalResponse():
                request = requests.get(item.approval_request_id)
                if request is None:
                    where = f"{place}.approval_request_id"
                    raise RequestError(
                        f"`{where}`: the input has no `mcp_approval_request` of that id.",
                        param=where,
                        code="item_not_found",
                    )
                if not item.approve:
                    reason = f" {item.reason}" if item.reason else ""
                    yield from _call(place, request.id, request, f"The user declined this call.{reason}")
            case _:
                yield place, item


def _call(
    place: str, id: str, call: McpCallItem | ApprovalRequest, result: str
) -> Iterator[tuple[str, PromptItem]]:
    name = shown_name(call.server_label, call.name)
    yield place, FunctionCallItem(call_id=id, name=name, arguments=call.arguments)
    yield place, FunctionResult(call_id=id, output=result)
