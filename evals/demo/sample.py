"""One conversation with its gold answer, and its text.

The template is the one that ships with the model; `prompt` renders it as transformers and Personae do.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).parent / "template.jinja"
END_OF_TURN = "<|im_end|>"
Json = Any  # what the json module reads and writes
Tool = dict[str, Json]


class Call(TypedDict):
    """One gold tool call."""

    name: str
    arguments: dict[str, Json]


@dataclass(frozen=True)
class Sample:
    """A conversation up to the assistant's turn, and that turn."""

    task: str
    messages: list[dict[str, Json]]
    answer: str
    reasoning: str = ""
    tools: list[Tool] | None = None
    thinking: bool = False
    schema: dict[str, Json] | None = None  # what the answer must satisfy when it is JSON

    @property
    def prompt(self) -> str:
        """The rendered conversation, up to where the model continues."""
        return render(self.messages, self.tools, self.thinking)

    @property
    def completion(self) -> str:
        """What the model should write, end of turn included."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.thinking else ""
        return thought + self.answer + END_OF_TURN


def dumps(value: Json) -> str:
    """JSON in the single form that the model learns."""
    return json.dumps(value, ensure_ascii=False)


def call_text(calls: list[Call]) -> str:
    """Tool calls as the model writes them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {dumps(call["arguments"])}}}\n</tool_call>'
        for call in calls
    )


def read_calls(text: str) -> list[Call] | None:
    """The tool calls of an answer: none for plain text, `None` if a call does not parse."""
    calls: list[Call] = []
    for piece in text.split("<tool_call>")[1:]:
        body, closed, _ = piece.partition("</tool_call>")
        try:
            call = json.loads(body)
            calls.append({"name": call["name"], "arguments": call["arguments"]})
        except (ValueError, KeyError, TypeError):
            return None
        if not closed:
            return None
    return calls


@functools.cache
def _template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = dumps
    return environment.from_string(TEMPLATE.read_text())


def render(messages: list[dict[str, Json]], tools: list[Tool] | None = None, thinking: bool = False) -> str:
    """The prompt text of a conversation."""
    return _template().render(
        messages=messages, tools=tools, enable_thinking=thinking, add_generation_prompt=True
    )
