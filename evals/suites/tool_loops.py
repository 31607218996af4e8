"""Whole conversations with tools, as a program with an SDK has them: question, call, result, answer.

The calls and what the answer must say are written down for each of twenty conversations. None of their tools,
and none of their questions, is in the data that the adapter `tools` was trained on.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from personae.errors import GrammarError
from personae.evals.harness.subject import Subject
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Suite, SuiteSettings

LOOPS = Path(__file__).with_name("sample") / "tool_loops.json"
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question. `calls` are the calls expected, each a name and arguments, in groups of one answer;
    `results` are what each call returns. `says` must stand in the answer, whatever the case of its letters:
    one of the ways of each."""

    user: str
    says: tuple[tuple[str, ...], ...]
    calls: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = ()
    results: tuple[tuple[str, ...], ...] = ()


class Loop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One conversation. A tool is a name, a description and its parameters; all are required but those in
    `optional`."""

    id: str
    tools: tuple[tuple[str, str, dict[str, Any]], ...]
    rounds: tuple[Round, ...]
    optional: tuple[str, ...] = ()

    def offered(self, *, strict: bool) -> list[dict[str, Any]]:
        """The tools as a request has them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": about,
                    **({"strict": True} if strict else {}),
                    "parameters": {
                        "type": "object",
                        "properties": properties,
                        "required": [key for key in properties if key not in self.optional],
                        "additionalProperties": False,
                    },
                },
            }
            for name, about, properties in self.tools
        ]


class ToolLoopsSettings(SuiteSettings, frozen=True):
    """limit: tokens of an answer."""

    limit: int = 200


class ToolLoops(Suite):
    """One case per conversation, for the base and for an adapter named `tools`."""

    settings: ClassVar = ToolLoopsSettings
    about: ClassVar = "20 conversations with tools: calls, results, errors, further questions"
    modes: ClassVar = (FREE, CONSTRAINED)

    def __init__(self, settings: ToolLoopsSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """The conversations."""
        loops = msgspec.json.decode(LOOPS.read_bytes(), type=list[Loop])
        return [Case(loop.id, loop.id.partition("/")[0], loop) for loop in loops]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """free: the tools as they are. constrained: strict tools."""
        return (base or model == "tools") and mode in (FREE, CONSTRAINED)

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """Passes if every call is the one expected and every answer says what it must."""
        loop: Loop = case.data
        messages: list[dict[str, Any]] = []
        tools = loop.offered(strict=subject.mode == CONSTRAINED)
        note = ""
        try:
            for one in loop.rounds:
                note = note or await self._round(one, messages, tools, subject)
        except GrammarError as refusal:
            note = f"The request was refused: {refusal.message}"
        shown = json.dumps(messages, indent=1, ensure_ascii=False)
        return [Outcome(passed=not note, prompt=loop.rounds[0].user, answer=shown, note=note)]

    async def _round(
        self, one: Round, messages: list[dict[str, Any]], tools: list[dict[str, Any]], subject: Subject
    ) -> str:
        """Asks a question and gives the results. Adds to `messages`; what went wrong, or nothing."""
        messages.append({"role": "user", "content": one.user})
        for expected, results in zip(one.calls, one.results, strict=True):
            message = await self._ask(messages, tools, subject)
            calls = message.get("tool_calls") or []
            made = [(call["function"]["name"], _arguments(call)) for call in calls]
            if made != [(name, arguments) for name, arguments in expected]:
                return f"Expected the calls {list(expected)}, and it made {made}."
            messages.extend(
                {"role": "tool", "tool_call_id": call["id"], "content": result}
                for call, result in zip(calls, results, strict=True)
            )
        message = await self._ask(messages, tools, subject)
        return wrong(one, message)

    async def _ask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], subject: Subject
    ) -> dict[str, Any]:
        answer = await subject.chat(messages, tools=tools, max_tokens=self._settings.limit)
        message: dict[str, Any] = answer["choices"][0]["message"]
        kept = {key: message[key] for key in ("content", "tool_calls") if message.get(key)}
        messages.append({"role": "assistant", "content": None, **kept})
        return message


def wrong(one: Round, message: dict[str, Any]) -> str:
    """What is wrong with the answer to a round, or nothing."""
    text = message.get("content") or ""
    if message.get("tool_calls"):
        return "It called a tool where an answer was expected."
    if any(mark in text for mark in _MARKS):
        return "The answer has the marks of a call or a result."
    missing = [ways for ways in one.says if not any(way.lower() in text.lower() for way in ways)]
    return f"The answer does not say {missing}." if missing else ""


def _arguments(call: dict[str, Any]) -> Any:
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return call["function"]["arguments"]
