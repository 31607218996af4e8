"""The wire types of MCP servers as tools: the tool of a request, and the items of lists, calls and approvals.

The items are the same in input and output, so that a client can send them back unchanged.
"""

from typing import ClassVar, Literal

import msgspec

from personae.api.mcp.session import McpTool
from personae.api.wire.tolerant import Tolerant

CallStatus = Literal["in_progress", "calling", "completed", "incomplete", "failed"]
ListStatus = Literal["in_progress", "completed", "incomplete"]


class ToolFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Some tools of a server: those with these names, and those that are read-only or not. An absent field
    selects all."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def has(self, name: str, *, read_only: bool) -> bool:
        """Whether a tool is among them."""
        named = self.tool_names is None or name in self.tool_names
        return named and self.read_only in (None, read_only)


class ApprovalFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Which tools need approval. A tool in neither list, or in both, does."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpServerTool(Tolerant, tag="mcp", tag_field="type", kw_only=True):
    """An MCP server whose tools the model may call. `authorization` is a bearer token for it."""

    watched: ClassVar[bool] = True

    server_label: str
    server_url: str | None = None
    server_description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None
    connector_id: str | None = None

    def allows(self, name: str, *, read_only: bool) -> bool:
        """Whether the model may see a tool."""
        if isinstance(self.allowed_tools, ToolFilter):
            return self.allowed_tools.has(name, read_only=read_only)
        return self.allowed_tools is None or name in self.allowed_tools

    def needs_approval(self, name: str, *, read_only: bool) -> bool:
        """Whether the client must approve each call of a tool."""
        if not isinstance(self.require_approval, ApprovalFilter):
            return self.require_approval != "never"
        always, never = self.require_approval.always, self.require_approval.never
        if always is not None and always.has(name, read_only=read_only):
            return True
        return never is None or not never.has(name, read_only=read_only)


class McpListItem(Tolerant, tag="mcp_list_tools", tag_field="type", kw_only=True, omit_defaults=True):
    """The tools of a server that the model may call."""

    server_label: str
    tools: list[McpTool]
    id: str | None = None
    error: str | None = None
    status: ListStatus | None = None


class ProtocolError(Tolerant, tag="mcp_protocol_error", tag_field="type"):
    """The server did not answer, or refused. `code` is that of JSON-RPC."""

    code: int
    message: str


class ErrorText(Tolerant, tag="text", tag_field="type"):
    """What a tool said."""

    text: str


class ToolError(Tolerant, tag="mcp_tool_execution_error", tag_field="type"):
    """The tool failed."""

    content: list[ErrorText]


CallError = ProtocolError | ToolError


class McpCallItem(Tolerant, tag="mcp_call", tag_field="type", kw_only=True):
    """A call of a server's tool, with what it answered. `arguments` is JSON text."""

    server_label: str
    name: str
    arguments: str
    id: str | None = None
    output: str | None = None
    error: CallError | None = None
    approval_request_id: str | None = None
    status: CallStatus | None = None

    @property
    def result(self) -> str:
        """The answer as the model sees it."""
        match self.error:
            case ProtocolError():
                return f"Error: the tool cannot be called: {self.error.message}."
            case ToolError():
                return "Error: " + "\n".join(part.text for part in self.error.content)
        return self.output or ""


class ApprovalRequest(
    Tolerant, tag="mcp_approval_request", tag_field="type", kw_only=True, omit_defaults=True
):
    """A call that waits for the client's approval."""

    server_label: str
    name: str
    arguments: str
    id: str
    status: ListStatus | None = None


class ApprovalResponse(
    Tolerant, tag="mcp_approval_response", tag_field="type", kw_only=True, omit_defaults=True
):
    """The client's decision about a call."""

    approval_request_id: str
    approve: bool
    reason: str | None = None
    id: str | None = None
    status: ListStatus | None = None


class ChosenServer(msgspec.Struct, tag="mcp", tag_field="type", forbid_unknown_fields=True):
    """As `tool_choice`: a tool of this server must be called, or the one of that name."""

    server_label: str
    name: str | None = None
