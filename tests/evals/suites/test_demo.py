"""The demo's tasks through the API: the prompt is that of the data, and gold answers pass."""

import json
from typing import Any

import msgspec
import pytest
from virtual_clock import virtual_clock

from personae.api.templates.template import ChatTemplate
from personae.api.tools import shown_tools
from personae.api.wire.decode import decode
from personae.api.wire.schema import ChatRequest
from personae.evals.demo.sample import TEMPLATE, Sample, read_calls
from personae.evals.harness.subject import Subject
from personae.evals.harness.target import TargetModel
from personae.evals.suites.demo import DemoSettings, DemoTasks, as_text
from personae.evals.suites.suite import Case

SUITE = DemoTasks(DemoSettings(count=6))
CASES = SUITE.cases()

pytestmark = virtual_clock


class Gold:
    """Answers with the gold text of the case that is being played, in the API's form."""

    url = None
    about = "gold"
    source = None
    key = None

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.body: dict[str, Any] = {}

    async def models(self) -> list[TargetModel]:
        return []

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = body
        return {"choices": [{"text": self.sample.completion}]}

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = body
        calls = read_calls(self.sample.answer) or []
        message = {
            "content": None if calls else self.sample.answer,
            "tool_calls": [
                {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
                for call in calls
            ],
        }
        return {"choices": [{"message": message}]}


@pytest.mark.parametrize("mode", ["free", "constrained"])
async def test_the_gold_answer_passes(mode: str) -> None:
    played = [case for case in CASES if SUITE.plays(case, "base", mode, base=True)]
    assert len(played) >= 40
    for case in played:
        await passes(case, mode)


async def passes(case: Case, mode: str) -> None:
    sample = case.data[1]
    target = Gold(sample)
    [outcome] = await SUITE.play(case, Subject(target, "base", True, mode, {"temperature": 0, "seed": 0}))
    assert outcome.passed, case.id
    assert set(outcome.scores.values()) <= {1.0}
    if mode == "free":
        assert target.body["prompt"] == sample.prompt
        return
    body = decode(msgspec.json.encode(target.body), ChatRequest, 64)
    template = ChatTemplate(TEMPLATE.read_text(), {})
    shown = template.render(
        body.messages,
        add_generation_prompt=True,
        continue_final_message=False,
        kwargs=body.chat_template_kwargs,
        tools=shown_tools(body.tools),
    )
    assert shown == sample.prompt, case.id


async def test_an_adapter_plays_its_own_task_and_the_base_plays_all() -> None:
    assert {case.task for case in CASES if SUITE.plays(case, "triage", "free", base=False)} == {"triage"}
    assert all(SUITE.plays(case, "personae-demo", "free", base=True) for case in CASES)
    bound = {case.task for case in CASES if SUITE.plays(case, "b", "constrained", base=True)}
    assert bound == {case.task for case in CASES} - {"chat", "verse"}


async def test_a_call_that_broke_off_stays_one_that_does_not_parse() -> None:
    broken = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "b'}}]}
    assert read_calls(as_text(broken)) is None
