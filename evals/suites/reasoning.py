"""Checks that a model's thoughts are separated from its answer, streamed and not.

free: nothing is bound. constrained: a schema or strict tools bind the text after the thoughts. Each
conversation is played with thinking on and off, if the chat template supports that.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from personae.evals.harness.subject import Subject
from personae.evals.harness.target import Body, closing
from personae.evals.suites.schemas import why_invalid
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Suite, SuiteSettings

TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>")
ON, OFF = "thinking", "not thinking"

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_JSON, _TOOL, _WORDS = "json", "tool", "words"
QUESTIONS: tuple[tuple[str, str], ...] = (
    (_WORDS, "Hello!"),
    (_WORDS, "What can you do?"),
    (_WORDS, "What is 17 plus 25?"),
    (_JSON, "Extract the record as JSON.\nText: Ada Moor is 36 years old.\nSchema: " + json.dumps(_PERSON)),
    (_JSON, "Make up a person.\nSchema: " + json.dumps(_PERSON)),
    (_JSON, "Ole, aged seven, wrote <think>this</think>.\nSchema: " + json.dumps(_PERSON)),
    (_TOOL, "Please get the weather, city: Cologne."),
    (_TOOL, "I want to know the weather in Oslo."),
    (_TOOL, "Tell me about the weather where you are."),
)


class ReasoningSettings(SuiteSettings, frozen=True):
    """limit: tokens of an answer."""

    limit: int = 192


class Reasoning(Suite):
    """One case per conversation and switch. It passes if nothing is mixed up, whatever the answer's quality
    is."""

    settings: ClassVar = ReasoningSettings
    about: ClassVar = "reasoning apart from content, streamed as whole, and bound after it"
    modes: ClassVar = (FREE, CONSTRAINED)

    def __init__(self, settings: ReasoningSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """Every conversation twice."""
        return [
            Case(f"{switch}/{kind}/{number}", switch, (kind, text))
            for switch in (ON, OFF)
            for number, (kind, text) in enumerate(QUESTIONS)
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """In `constrained` only the conversations with something to bind."""
        return mode == FREE or (mode == CONSTRAINED and case.data[0] != _WORDS)

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """No tags are left on either side, there are no thoughts when they are off, and the stream gives the
        same.

        This suite does not check whether a truncated answer is valid JSON.
        """
        kind, text = case.data
        messages = [{"role": "user", "content": text}]
        fields = self._fields(kind, case.task == ON, subject.mode == CONSTRAINED)
        choice = (await subject.chat(messages, **fields))["choices"][0]
        message, ended = choice["message"], choice["finish_reason"] != "length"
        streamed = await _gather(subject, messages, fields)
        thought, said = message.get("reasoning_content") or "", message.get("content") or ""
        reasons = []
        shown = text if "<think>" in text else ""
        if any(tag in side and tag not in shown for tag in TAGS for side in (thought, said)):
            reasons.append("a tag was left in the text")
        if case.task == OFF and thought:
            reasons.append("it thought although it should not")
        whole = (thought, said, _calls(message))
        if streamed != whole:
            reasons.append(f"streamed it is {streamed!r}")
        if subject.mode == CONSTRAINED and ended:
            reasons += _unbound(kind, message)
        written = "\n".join([*(f"<thought>{thought}</thought>" for _ in thought[:1]), said, *_lines(message)])
        scores = {"finished": float(ended)}
        if case.task == ON:
            scores["thought"] = float(bool(thought))
        return [
            Outcome(
                passed=not reasons,
                scores=scores,
                prompt=text,
                answer=written.strip(),
                note="; ".join(reasons),
            )
        ]

    def _fields(self, kind: str, thinks: bool, bound: bool) -> Body:
        fields: Body = {
            "max_tokens": self._settings.limit,
            "chat_template_kwargs": {"enable_thinking": thinks},
        }
        if kind == _TOOL:
            fields["tools"] = [{"type": "function", "function": {**_WEATHER, "strict": bound}}]
            if bound:
                fields["tool_choice"] = "required"
        elif kind == _JSON and bound:
            named = {"name": "person", "schema": _PERSON, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        return fields


def _unbound(kind: str, message: Body) -> list[str]:
    """Why the text after the thoughts does not satisfy its binding."""
    if kind == _JSON:
        texts, schema = [message.get("content") or ""], _PERSON
    else:
        texts = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        schema = _WEATHER["parameters"]  # type: ignore[assignment]  # a table of several types
        if not texts:
            return ["nothing was called"]
    return [reason for text in texts if (reason := why_invalid(schema, text))]


async def _gather(subject: Subject, messages: list[Body], fields: Body) -> tuple[str, str, tuple[Any, ...]]:
    """Reasoning, content and calls of the streamed answer."""
    thought = said = ""
    calls: dict[int, list[str]] = {}
    async with closing(subject.stream_chat(messages, **fields)) as chunks:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                delta = choice["delta"]
                thought += delta.get("reasoning_content") or ""
                said += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    parts = calls.setdefault(call["index"], ["", ""])
                    parts[0] += call["function"].get("name") or ""
                    parts[1] += call["function"].get("arguments") or ""
    return thought, said, tuple((name, arguments) for name, arguments in calls.values())


def _calls(message: Body) -> tuple[Any, ...]:
    return tuple(
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    )


def _lines(message: Body) -> list[str]:
    return [f"{name} {arguments}" for name, arguments in _calls(message)]
