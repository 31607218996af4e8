"""Marks in a conversation, which show whether a template writes all of its parts.

A mark is a word that is nowhere else. What a template does with a message depends on the shape of the
conversation: on roles, calls and what is empty, hardly ever on words. So a marked conversation of the same
shape shows what becomes of the client's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from personae.api.templates.rewrite import Chat, Tools
from personae.grammar.reasoning.format import ReasoningFormat

_MARK = re.compile(r"zqm\d+z")
_REASONING = "messages[].reasoning_content"
RESULT_NAME = "zqmname"
_OPTIONAL = frozenset({"reasoning_content", "name"})
"""Parts that a template may leave out. A header of the answer names them."""


@dataclass(slots=True)
class Marked:
    """A conversation of marks. `parts` maps each mark to the field of the request that it stands for.
    `optional` are those of reasoning and of names."""

    chat: Chat = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)

    def lost(self, prompt: str) -> list[str]:
        """The fields that are not in the prompt, in order."""
        shown = set(_MARK.findall(prompt))
        return [part for mark, part in self.parts.items() if mark not in shown]

    def left_out(self, prompt: str) -> list[str]:
        """The kinds of optional parts that are not all in the prompt."""
        shown = set(_MARK.findall(prompt))
        return sorted({part for mark, part in self.optional.items() if mark not in shown})

    def quoted(self, prompt: str) -> bool:
        """Whether an argument stands in the prompt as Python writes it, and not as JSON."""
        return re.search(r"'zqm\d+z'", prompt) is not None


def marked(chat: Sequence[Mapping[str, Any]], reasoning: ReasoningFormat | None = None) -> Marked:
    """A conversation of the same shape, with a mark in place of each text. Reasoning within the content of an
    answer has a mark of its own."""
    found = Marked()
    ids: dict[str, str] = {}

    def mark(part: str, *, optional: bool = False) -> str:
        word = f"zqm{len(found.parts) + len(found.optional)}z"
        (found.optional if optional else found.parts)[word] = part
        return word

    def id_of(given: str) -> str:
        return ids.setdefault(given, f"call_{len(ids)}")

    for index, message in enumerate(chat):
        where = f"messages[{index}]"
        own: dict[str, Any] = {"role": message["role"]}
        for key in message.keys() & _texts_of(message["role"]):
            part = f"messages[].{key}" if key in _OPTIONAL else f"{where}.{key}"
            own[key] = mark(part, optional=key in _OPTIONAL) if message[key] else message[key]
        if message["role"] == "tool" and "name" in message:
            own["name"] = RESULT_NAME
        if reasoning is not None and _reasons(message, reasoning):
            thought = mark(_REASONING, optional=True)
            own["content"] = f"{reasoning.open}\n{thought}\n{reasoning.close}\n\n{own['content']}"
        if "thinking" in message:
            own["thinking"] = own["reasoning_content"]
        if "tool_call_id" in message:
            own["tool_call_id"] = id_of(message["tool_call_id"])
        if "tool_calls" in message:
            own["tool_calls"] = [
                ({"id": id_of(call["id"])} if "id" in call else {})
                | {
                    "type": "function",
                    "function": {
                        "name": mark(f"{where}.tool_calls[{at}]"),
                        "arguments": {"argument": mark(f"{where}.tool_calls[{at}]")},
                    },
                }
                for at, call in enumerate(message["tool_calls"])
            ]
        found.chat.append(own)
    return found


MARKED_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "zqmtool",
            "description": "zqmdescription",
            "parameters": {
                "type": "object",
                "properties": {"zqmparameter": {"type": "string", "description": "zqmabout"}},
                "required": ["zqmparameter"],
            },
        },
    }
]


def _texts_of(role: str) -> frozenset[str]:
    """The keys of a message that are marked. A call has the name of its result, too."""
    return frozenset({"content", "reasoning_content"} if role == "tool" else {"content", *_OPTIONAL})


def _reasons(message: Mapping[str, Any], reasoning: ReasoningFormat) -> bool:
    """Whether the content of an answer has its reasoning in it."""
    return message["role"] == "assistant" and reasoning.close in (message.get("content") or "")


def shape(chat: Sequence[Mapping[str, Any]], reasoning: ReasoningFormat | None, *others: Any) -> bytes:
    """A digest of what distinguishes marked conversations, and of `others`."""
    ids: dict[str, int] = {}
    known: list[Any] = [*others]
    for message in chat:
        known.append(message["role"])
        keys = message.keys() & {"content", "reasoning_content", "name"}
        known += [(key, bool(message[key])) for key in sorted(keys)]
        if reasoning is not None and _reasons(message, reasoning):
            known.append("reasons")
        given = (message.get("tool_call_id"), *(call.get("id") for call in message.get("tool_calls", ())))
        known += [None if id is None else ids.setdefault(id, len(ids)) for id in given]
    return blake2b(repr(known).encode(), digest_size=16).digest()
