"""The suite of conversations with tools."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from personae.evals.demo.finetune.tools import written_tools
from personae.evals.harness.subject import Subject
from personae.evals.suites.suite import CONSTRAINED, FREE, Case
from personae.evals.suites.tool_loops import Round, ToolLoops, ToolLoopsSettings, wrong

pytestmark = pytest.mark.anyio


class Scripted:
    """A target that gives these messages in turn, and keeps what it was asked."""

    def __init__(self, messages: Iterator[dict[str, Any]]) -> None:
        self.messages = messages
        self.asked: list[dict[str, Any]] = []

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append({**body, "messages": list(body["messages"])})
        return {"choices": [{"message": next(self.messages)}]}


def case(id: str) -> Case:
    return next(one for one in ToolLoops(ToolLoopsSettings()).cases() if one.id == id)


def called(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


async def play(id: str, mode: str, *messages: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    target = Scripted(iter(messages))
    subject = Subject(target, "tools", False, mode, {})  # type: ignore[arg-type]  # only what the suite uses
    (outcome,) = await ToolLoops(ToolLoopsSettings()).play(case(id), subject)
    return outcome, target.asked


async def test_right_calls_and_a_right_answer_pass_and_results_answer_their_calls() -> None:
    good = (called("a", "get_weather", location="Paris"), {"content": "19 degrees."},
            called("b", "get_weather", location="Rome"), {"content": "It is 27."})  # fmt: skip
    outcome, asked = await play("further/another_city", CONSTRAINED, *good)
    assert (outcome.passed, outcome.note) == (True, "")
    assert asked[0]["tools"][0]["function"]["strict"] is True
    last = asked[-1]["messages"]
    turn = ["user", "assistant", "tool"]
    assert [message["role"] for message in last] == [*turn, "assistant", *turn]
    assert (last[2]["tool_call_id"], last[-1]["tool_call_id"]) == ("a", "b")


async def test_another_call_fails_the_conversation_and_ends_it() -> None:
    outcome, asked = await play("result/weather", FREE, called("a", "get_weather", location="Lagos"))
    assert not outcome.passed
    assert "Lagos" in outcome.note
    assert len(asked) == 1
    assert "strict" not in asked[0]["tools"][0]["function"]


def test_an_answer_that_calls_invents_or_leaves_out_is_wrong() -> None:
    asked = Round("x", (("22",), ("sunny", "clear")))
    assert wrong(asked, {"content": "It is 22 and Clear."}) == ""
    assert wrong(asked, {"content": "It is 22."})
    assert wrong(asked, {"content": "<tool_response>22, sunny</tool_response>"})
    assert wrong(asked, {"content": "22, sunny", **called("a", "f")})


def test_no_tool_of_the_conversations_is_in_the_training() -> None:
    cases = ToolLoops(ToolLoopsSettings()).cases()
    assert len(cases) == 20
    names = {name for one in cases for name, *_ in one.data.tools}
    assert not names & {spec.name for spec in written_tools()}
