"""What a chat template shows, and how a conversation is rewritten to it."""

from dataclasses import dataclass, fields
from typing import Literal

CLIENTS = ""
"""The form of ids in `TemplateTraits.ids` where the template takes the client's own."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Each field is one question to the template; its value says what happens to that part of a conversation.

    "shown" is always unchanged. The first value of a field is what a perfect template allows.
    """

    user: Literal["shown", "refused"] = "shown"
    """A single message of the user. A template that refuses it can render nothing."""
    content: Literal["text", "parts"] = "text"
    """The content of a message: a string, or a list with one text part."""
    empty: Literal["shown", "a blank"] = "shown"
    """A message of the user, the assistant or a tool with empty content."""
    system: Literal["shown", "in the user's message"] = "shown"
    """A system message at the front. Several are always joined."""
    developer: Literal["a system message", "shown"] = "a system message"
    """A developer message at the front."""
    later_system: Literal["shown", "joined in front"] = "shown"
    """A system message after the front, or at the end."""
    users: Literal["shown", "joined"] = "shown"
    """Consecutive messages of the user."""
    assistants: Literal["shown", "joined"] = "shown"
    """Consecutive messages of the assistant without calls."""
    assistant_first: Literal["shown", "after an empty one"] = "shown"
    """An assistant's message before any of the user."""
    no_tools: Literal["none", "an empty list"] = "none"
    """The template's variable `tools` where a request has none."""
    tools: Literal["shown", "described"] = "shown"
    """Tools. Otherwise the system message describes them."""
    description: Literal["shown", "filled in"] = "shown"
    """A tool without a description."""
    parameters: Literal["shown", "filled in"] = "shown"
    """A tool without parameters."""
    union: Literal["shown", "anyOf"] = "shown"
    """A parameter whose type is a list of types."""
    calls: Literal["shown", "as text"] = "shown"
    """A call and its result. Otherwise the call is the assistant's text, its result the user's."""
    arguments: Literal["an object", "JSON text"] = "an object"
    """The arguments of a call."""
    call_content: Literal["absent", "null", "empty"] = "absent"
    """The content of a message that only calls."""
    text_and_call: Literal["shown", "split", "the turn's text joined"] = "shown"
    """Text and a call in one message: two messages, or one message with all text of the turn."""
    several_calls: Literal["shown", "split"] = "shown"
    """Several calls in a message. Otherwise each call is a message before its result."""
    user_after_result: Literal["shown", "joined to the result"] = "shown"
    """A message of the user directly after a tool's result."""
    ids: str = CLIENTS
    """The form of ids of calls, as in `ToolFormat.id`; empty for the client's own ids."""
    missing_ids: Literal["absent", "filled in"] = "absent"
    """The id of a call or a result that has none."""
    result_order: Literal["shown", "by call"] = "shown"
    """The order of results. They follow the order of the calls where neither ids nor names are shown."""
    result_name: Literal["absent", "filled in"] = "absent"
    """The name of a result's function."""
    reasoning: Literal["shown", "in the current turn", "left out"] = "shown"
    """The reasoning of earlier answers. What is left out is named in `x-personae-ignored`."""
    name: Literal["shown", "left out"] = "shown"
    """The name of a message's author. If it is left out, `x-personae-ignored` names it."""

    def table(self) -> list[tuple[str, str]]:
        """Each part of a conversation, and what happens to it."""
        return [
            (
                _PARTS.get(field.name, field.name.replace("_", " ")),
                getattr(self, field.name) or "the client's",
            )
            for field in fields(self)
        ]


_PARTS = {
    "user": "a message of the user",
    "content": "the form of content",
    "empty": "empty content",
    "system": "a system message in front",
    "developer": "a developer message in front",
    "later_system": "a later system message",
    "users": "consecutive user messages",
    "assistants": "consecutive answers",
    "assistant_first": "an answer in front",
    "no_tools": "no tools",
    "description": "a tool without description",
    "parameters": "a tool without parameters",
    "union": "a list of types",
    "calls": "calls and results",
    "arguments": "arguments of calls",
    "call_content": "no content beside a call",
    "text_and_call": "text beside a call",
    "several_calls": "several calls at once",
    "user_after_result": "a user message after a result",
    "ids": "ids of calls",
    "missing_ids": "no ids of calls",
    "result_order": "the order of results",
    "result_name": "the name of a result",
    "reasoning": "earlier reasoning",
    "name": "names of authors",
}
"""What `TemplateTraits.table` calls each field."""
