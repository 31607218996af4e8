"""The tasks of the real model's adapters through the API: gold answers pass, and the cards say what came."""

import json
from pathlib import Path
from typing import Any

import pytest
from virtual_clock import virtual_clock

from personae.errors import GrammarError
from personae.evals.demo.finetune import card
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.harness.records import RESULTS, Head, Log, OutcomeRecord
from personae.evals.harness.subject import Subject
from personae.evals.harness.target import TargetModel
from personae.evals.suites.finetuned import Finetuned, FinetunedSettings

SUITE = Finetuned(FinetunedSettings(count=12))
CASES = SUITE.cases()


class Gold:
    """Answers with the gold answer of the case that is being played, or refuses."""

    url = key = source = None
    about = "gold"

    def __init__(self, turn: Any, refuses: bool = False) -> None:
        self.turn = turn
        self.refuses = refuses
        self.body: dict[str, Any] = {}

    async def models(self) -> list[TargetModel]:
        return []

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.body = body
        if self.refuses:
            raise GrammarError("No.")
        calls = self.turn.calls if "tools" in body else []
        functions = [{"name": one["name"], "arguments": json.dumps(one["arguments"])} for one in calls]
        content = None if calls else self.turn.answer
        return {
            "choices": [{"message": {"content": content, "tool_calls": [{"function": f} for f in functions]}}]
        }


def outcome_of(mode: str, target: Gold, case: Any) -> Any:
    return SUITE.play(case, Subject(target, "base", True, mode, {"temperature": 0, "seed": 0}))


@pytest.mark.parametrize("mode", ["free", "constrained"])
@pytest.mark.parametrize("task", GENERATORS)
class TestEveryTask:
    pytestmark = virtual_clock

    async def test_the_gold_answer_passes_and_is_bound_only_where_it_should(
        self, task: str, mode: str
    ) -> None:
        cases = [case for case in CASES if case.task == task]
        assert len(cases) == 12
        for case in cases:
            target = Gold(case.data.turn)
            [outcome] = await outcome_of(mode, target, case)
            assert outcome.passed, case.id
            assert set(outcome.scores.values()) <= {1.0}
            binding = target.body.keys() & {"tools", "response_format", "structured_outputs"}
            assert bool(binding) == (mode == "constrained")

    async def test_a_refusal_is_a_failure_that_says_so(self, task: str, mode: str) -> None:
        case = next(case for case in CASES if case.task == task)
        [outcome] = await outcome_of(mode, Gold(None, refuses=True), case)
        assert not outcome.passed
        assert outcome.note == "The request was refused: No."


def test_an_adapter_plays_its_own_task_and_the_base_plays_all() -> None:
    assert {case.task for case in CASES if SUITE.plays(case, "sql", "free", base=False)} == {"sql"}
    assert all(SUITE.plays(case, "anything", "constrained", base=True) for case in CASES)
    assert not any(SUITE.plays(case, "sql", "required", base=True) for case in CASES)


def record(
    suite: str, task: str, case: str, model: str, mode: str, passed: bool, **scores: float
) -> OutcomeRecord:
    return OutcomeRecord(
        suite=suite, task=task, case=case, model=model, mode=mode, passed=passed, scores=scores
    )


def test_a_card_shows_base_and_adapter_free_and_bound_with_intervals(tmp_path: Path) -> None:
    adapters, runs = tmp_path / "adapters", tmp_path / "runs"
    (adapters / "tools").mkdir(parents=True)
    (adapters / "tools" / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32}')
    (runs / "tools").mkdir(parents=True)
    steps = [{"step": step, "loss": 0.5, "tokens": 100} for step in (1, 2, 2)]
    (runs / "tools" / "log.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    head = Head(name="a", target="t", suites={}, tasks={}, models=[], sampling={}, version="0", started="now")
    records = [
        record("finetuned", "tools", "tools/0000/one", "base", "constrained", False, tool=0.0),
        record("finetuned", "tools", "tools/0000/one", "tools", "constrained", True, tool=1.0),
        record("finetuned", "tools", "tools/0001/none", "tools", "constrained", False, tool=1.0),
        record("finetuned", "tools", "tools/0000/one", "tools", "transformers", True, tool=1.0),
        record("finetuned", "sql", "sql/0000", "sql", "constrained", True),
        record("tool_loops", "error", "error/json", "tools", "constrained", True),
        record("bfcl", "multiple", "multiple_1", "tools", "constrained", True),
    ]
    with Log(tmp_path / "run", head) as log:
        log.add(records)
    found = card.outcomes([tmp_path / "run" / RESULTS])
    rows = [row for row in found["finetuned"] if row.task == "tools"]
    log = card.read_log(runs / "tools" / "log.jsonl")
    config = {"r": 16, "lora_alpha": 32}
    text = card.card("tools", rows, found["tool_loops"], found["bfcl"], log, config, "From other weights. ")
    assert "| | base bound | adapter bound | PEFT free |" in text
    assert "| right | 0 % (0–79) | 50 % (9–91) | 100 % (21–100) |" in text
    assert "| right tools | 0 % (0–79) | 100 % (34–100) | 100 % (21–100) |" in text
    assert "| right: no tool fits | – | 0 % (0–79) | – |" in text
    assert "| questions | 1 | 2 | 1 |" in text
    assert "| `multiple` | 100 % (21–100) |" in text
    assert "| an error | 100 % (21–100) |" in text
    assert "From other weights. Rank 16" in text
    assert "2 steps of AdamW in bfloat16, 200 tokens" in text
