"""Mixed-up reasoning is found, whichever way it is mixed up."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from virtual_clock import virtual_clock

from personae.evals.harness.subject import Subject
from personae.evals.suites.reasoning import OFF, ON, Reasoning, ReasoningSettings

pytestmark = virtual_clock
SUITE = Reasoning(ReasoningSettings())
Message = dict[str, Any]


class Thinker:
    """Answers with `whole`, and streams `streamed`."""

    url = key = source = None
    about = "a thinker"

    def __init__(self, whole: Message, streamed: Message | None = None, finish: str = "stop") -> None:
        self.whole, self.streamed, self.finish = whole, streamed or whole, finish

    async def chat(self, body: Message) -> Message:
        return {"choices": [{"message": self.whole, "finish_reason": self.finish}]}

    async def stream_chat(self, body: Message) -> AsyncIterator[Message]:
        for field in ("reasoning_content", "content"):
            for envelope in self.streamed.get(field) or "":
                yield {"choices": [{"delta": {field: envelope}}]}
        for index, call in enumerate(self.streamed.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield {"choices": [{"delta": {"tool_calls": [{"index": index, "function": {"name": name}}]}}]}
            for envelope in arguments:
                function = {"arguments": envelope}
                yield {"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}}]}


async def play(thinker: Thinker, switch: str = ON, kind: str = "words", mode: str = "free") -> Any:
    case = next(case for case in SUITE.cases() if case.task == switch and case.data[0] == kind)
    assert SUITE.plays(case, "m", mode, base=True)
    [outcome] = await SUITE.play(case, Subject(thinker, "m", True, mode, {"temperature": 0}))  # type: ignore[arg-type]  # a part of one
    return outcome


PERSON = '{"name": "Ada", "age": 36}'
CALL = [{"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]


@pytest.mark.parametrize(
    ("thinker", "more"),
    [
        (Thinker({"reasoning_content": "Hm.", "content": "Hello."}), {}),
        (Thinker({"content": "Hello."}), {"switch": OFF}),
        (Thinker({"reasoning_content": "Hm.", "content": PERSON}), {"kind": "json", "mode": "constrained"}),
        (Thinker({"content": None, "tool_calls": CALL}), {"kind": "tool", "mode": "constrained"}),
        (
            Thinker({"reasoning_content": "Hm", "content": '{"na'}, finish="length"),
            {"kind": "json", "mode": "constrained"},
        ),
    ],
)
async def test_what_is_apart_passes(thinker: Thinker, more: dict[str, str]) -> None:
    outcome = await play(thinker, **more)
    assert outcome.passed, outcome.note


@pytest.mark.parametrize(
    ("thinker", "more", "reason"),
    [
        (Thinker({"content": "Hm.</think>Hello."}), {}, "a tag"),
        (Thinker({"reasoning_content": "<think>Hm.", "content": "Hello."}), {}, "a tag"),
        (Thinker({"reasoning_content": "Hm.", "content": "Hello."}), {"switch": OFF}, "it thought"),
        (Thinker({"content": "Hello."}, {"content": "Hello"}), {}, "streamed it is"),
        (
            Thinker({"content": "Hello."}, {"reasoning_content": "Hello."}),
            {},
            "streamed it is",
        ),
        (Thinker({"content": "Ada is 36"}), {"kind": "json", "mode": "constrained"}, "no JSON"),
        (Thinker({"content": "no"}), {"kind": "tool", "mode": "constrained"}, "nothing was called"),
        (
            Thinker({"content": None, "tool_calls": CALL}, {"content": None, "tool_calls": CALL * 2}),
            {"kind": "tool"},
            "streamed it is",
        ),
    ],
)
async def test_what_is_mixed_up_is_named(thinker: Thinker, more: dict[str, str], reason: str) -> None:
    outcome = await play(thinker, **more)
    assert not outcome.passed
    assert reason in outcome.note
