"""What a generator makes: a system message or tools, and questions with the answers that are right."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from personae.api.templates.tool_text import call_text
from personae.grammar.tools.registry import GENERIC, tool_format


@dataclass(frozen=True, slots=True)
class Step:
    """What a conversation goes on with, the results of calls or a question, and the answer: text, or calls."""

    messages: list[dict[str, Any]]
    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answer(self) -> str:
        """What the model should write."""
        return call_text(self.calls, tool_format(GENERIC)) if self.calls else self.text


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer: text, or calls. `steps` are what follows."""

    user: str
    text: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    kind: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def first(self) -> Step:
        """The question as a step."""
        return Step([{"role": "user", "content": self.user}], self.text, self.calls)

    @property
    def answer(self) -> str:
        """What the model should write."""
        return self.first.answer


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
        return [*head, *turn.first.messages]

    def rounds(self, turn: Turn) -> Iterator[tuple[list[dict[str, Any]], str]]:
        """The conversation up to each of its answers, and the answer."""
        said = self.messages(turn)
        yield said, turn.answer
        last = turn.first
        for step in turn.steps:
            said = [*said, _assistant(last), *step.messages]
            yield said, step.answer
            last = step

    def line(self) -> str:
        """As one line of JSON."""
        turns = [{"user": t.user, "answer": t.answer, "calls": t.calls, "kind": t.kind} for t in self.turns]
        return json.dumps({"system": self.system, "tools": self.tools, "turns": turns}, ensure_ascii=False)


def _assistant(step: Step) -> dict[str, Any]:
    if not step.calls:
        return {"role": "assistant", "content": step.text}
    calls = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call["arguments"], ensure_ascii=False),
            },
        }
        for place, call in enumerate(step.calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}
