"""What a generator makes: a system message or tools, and questions with the answers that are right."""

import json
from dataclasses import dataclass, field
from typing import Any

from personae.api.templates.tool_text import call_text
from personae.grammar.tools.registry import GENERIC, tool_format


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer: text, or calls."""

    user: str
    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    kind: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """What the model should write."""
        return call_text(self.calls, tool_format(GENERIC)) if self.calls else self.text


@dataclass(frozen=True, slots=True)
class Scene:
    """Questions, each of which is a conversation of its own, with what they share."""

    task: str
    tools: list[dict[str, Any]]
    system: str | None
    turns: list[Turn]
    schema: dict[str, Any] | None = None

    def messages(self, turn: Turn) -> list[dict[str, Any]]:
        """The conversation up to the answer."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, {"role": "user", "content": turn.user}]

    def line(self) -> str:
        """As one line of JSON."""
        turns = [{"user": t.user, "answer": t.answer, "calls": t.calls, "kind": t.kind} for t in self.turns]
        return json.dumps({"system": self.system, "tools": self.tools, "turns": turns}, ensure_ascii=False)
