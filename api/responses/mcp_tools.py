"""The MCP servers of a request for a response: checked, and asked for their tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
import msgspec

from personae.api.dialect import MOST_OF_NAME
from personae.api.exchange import Exchange
from personae.api.mcp.allowed import check_allowed, without_query
from personae.api.mcp.session import McpFailed, McpServer, session
from personae.api.responses.items import Item
from personae.api.responses.mcp_items import (
    ApprovalRequest,
    ApprovalResponse,
    McpCallItem,
    McpListItem,
    McpServerTool,
)
from personae.api.responses.request import InputTokensRequest, ResponsesRequest
from personae.api.tools import check_name
from personae.errors import DeadlineExceeded, RequestError, ToolServerFailed, UnsupportedParameter

MOST_SERVERS = 16
_MOST_HEADERS, _MOST_HEADER_BYTES = 32, 8192
_OURS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "host",
        "mcp-protocol-version",
        "mcp-session-id",
        "transfer-encoding",
    }
)
"""Headers that belong to the protocol, or that would lead to another server."""


@dataclass(frozen=True, slots=True)
class RequestServers:
    """The servers of a request by label, the lists of tools that it had made, and the approved calls that
    have to be made first."""

    servers: Mapping[str, McpServer]
    lists: list[McpListItem]
    approved: list[ApprovalRequest]


def uses_servers(body: ResponsesRequest | InputTokensRequest) -> bool:
    """Whether the model may call MCP servers."""
    return any(isinstance(tool, McpServerTool) for tool in body.tools or ())


async def request_servers(exchange: Exchange, body: ResponsesRequest) -> RequestServers:
    """Check the servers of a request, and list their tools. The lists are added to its input; what only the
    servers may see is removed from its `tools`.

    A server whose list is in the input is not asked again. Raises RequestError, Forbidden, RateLimited,
    ToolServerFailed if a server does not list its tools, and DeadlineExceeded.
    """
    servers: dict[str, McpServer] = {}
    shown = []
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, McpServerTool):
            server = _server(exchange, body, tool, f"tools[{index}]")
            if server.label in servers:
                name = f"tools[{index}].server_label"
                raise RequestError(f"`{name}`: there are two servers of that label.", param=name)
            servers[server.label] = server
            tool = msgspec.structs.replace(
                tool, authorization=None, headers=None, server_url=without_query(server.url)
            )
        shown.append(tool)
    if len(servers) > MOST_SERVERS:
        raise RequestError(f"`tools` may have at most {MOST_SERVERS} MCP servers.", param="tools")
    items = [] if isinstance(body.input, str) else body.input
    approved = _approved(items, servers)
    exchange.caller.until_done.enter_context(exchange.services.mcp.request(exchange.caller.tenant))
    known = {item.server_label for item in items if isinstance(item, McpListItem)}
    exchange.caller.ready()  # others may be prepared while the servers are asked
    timeout = exchange.deadline(body.timeout)
    lists = [await _listed(server, timeout) for label, server in servers.items() if label not in known]
    size = len(msgspec.json.encode(lists))
    exchange.keep(size)
    exchange.caller.body_size = max(exchange.caller.body_size, size)  # long ones are prepared off the loop
    body.tools = shown
    return RequestServers(servers, lists, approved)


def _server(exchange: Exchange, body: ResponsesRequest, tool: McpServerTool, place: str) -> McpServer:
    if exchange.background:
        raise UnsupportedParameter("A batch's requests use no MCP servers.", param=f"{place}.type")
    check_name(tool.server_label, f"{place}.server_label", MOST_OF_NAME)
    if tool.connector_id is not None:
        raise UnsupportedParameter(
            f"`{place}.connector_id`: connectors are OpenAI's; give a `server_url`.",
            param=f"{place}.connector_id",
        )
    if tool.server_url is None:
        raise RequestError(f"`{place}.server_url` is missing.", param=f"{place}.server_url")
    check_allowed(tool.server_url, exchange.settings.mcp_server, f"{place}.server_url")
    headers = _headers(tool, place)
    if body.background and (headers or "?" in tool.server_url):
        field = "authorization" if tool.authorization is not None else "headers" if headers else "server_url"
        raise UnsupportedParameter(
            f"`{place}.{field}` with `background`: it is stored then, and secrets are not.",
            param=f"{place}.{field}",
        )
    return McpServer(tool.server_label, tool.server_url, headers, exchange.settings.mcp_timeout)


def _headers(tool: McpServerTool, place: str) -> dict[str, str]:
    """What is sent to the server with each request. No error repeats it."""
    where = f"{place}.headers"
    headers: dict[str, str] = {}
    for name, value in (tool.headers or {}).items():
        lower = name.lower()
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum() or lower in headers:
            raise RequestError(f"`{where}` has a name that is no header's, or has it twice.", param=where)
        if lower in _OURS:
            raise RequestError(f"`{where}` may not have `{lower}`.", param=where)
        headers[lower] = _value(value, where)
    if tool.authorization is not None:
        if "authorization" in headers:
            raise RequestError(f"Give either `{place}.authorization` or that header.", param=where)
        headers["authorization"] = f"Bearer {_value(tool.authorization, f'{place}.authorization')}"
    if len(headers) > _MOST_HEADERS or sum(map(len, headers.values())) > _MOST_HEADER_BYTES:
        raise RequestError(
            f"`{where}` may have {_MOST_HEADERS} headers and {_MOST_HEADER_BYTES} characters.", param=where
        )
    return headers


def _value(value: str, where: str) -> str:
    if not value.isascii() or not value.isprintable():
        raise RequestError(f"`{where}` may have printable ASCII characters only.", param=where)
    return value


async def _listed(server: McpServer, deadline: float) -> McpListItem:
    with anyio.CancelScope(deadline=deadline) as patience:
        try:
            async with session(server) as asked:
                tools = await asked.tools()
            return McpListItem(server_label=server.label, tools=tools)
        except McpFailed as failed:
            raise ToolServerFailed(
                f"The MCP server `{server.label}` did not list its tools: {failed.message}.", param="tools"
            ) from None
    assert patience.cancelled_caught, "else a list was returned"
    raise DeadlineExceeded("The request's time was over before the MCP servers had listed their tools.")


def _approved(items: Sequence[Item], servers: Mapping[str, McpServer]) -> list[ApprovalRequest]:
    """The approved calls that were not made yet."""
    requests = {item.id: item for item in items if isinstance(item, ApprovalRequest)}
    made = {item.approval_request_id for item in items if isinstance(item, McpCallItem)}
    found: dict[str, ApprovalRequest] = {}
    for item in items:
        if not isinstance(item, ApprovalResponse) or not item.approve or item.approval_request_id in made:
            continue
        request = requests.get(item.approval_request_id)
        if request is None:
            continue  # the translation refuses it, and knows its place
        if request.server_label not in servers:
            raise RequestError(
                f"The approved call is one of the MCP server `{request.server_label[:80]}`, which `tools` "
                "does not have.",
                param="tools",
            )
        found[request.id] = request
    return list(found.values())
