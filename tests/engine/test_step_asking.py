"""Tokens near the end of a budget are asked about before they are taken: as late as that may be."""

import json
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from engine_harness import EngineHarness, Played
from sandbox_limits import PATIENT
from tiny_models import model_folder
from worst import text_of, text_vocabulary

from personae.engine.deferral import Deferrals
from personae.engine.sampler import Sampler
from personae.engine.worker.runner import Runner
from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
STRING = {"type": "string", "maxLength": 30}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": STRING, "mood": {"enum": ["the", "quick"]}},
     "required": ["name", "mood"], "additionalProperties": False},
    {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "minItems": 4},
]  # fmt: skip


def played(
    *, runs_ahead: bool = False, lookahead: int = 2, answers: int = 9, scored: int = 0, **settings: Any
) -> dict[str, Played]:
    """More answers than slots, whose budgets end in different steps; each third is not bound. Beside them
    `scored` prompts, whose log-probabilities are asked for."""
    folder = model_folder("qwen3", vocab_size=VOCABULARY.size)
    harness = EngineHarness(folder, max_seqs=3 + bool(scored), lookahead=lookahead, **settings)
    harness.engine.runs_ahead = runs_ahead
    specs = [GrammarSpec("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    compiler = GrammarCompiler(VOCABULARY, limits=PATIENT)
    harness.grammars |= {spec: compiler.compile(spec) for spec in specs}
    logs = []
    for number in range(answers):
        spec = [*specs, None][number % 3]
        budget = 12 if spec is None else harness.grammars[spec].shortest + 2 * (number % 9)
        changes: dict[str, Any] = {"max_tokens": budget, "seed": number, "temperature": number % 2 * 1.5}
        # A taste of its own, so that it matters whose logits something is chosen from.
        changes["logit_bias"] = {token: token * (number + 3) % 11 for token in range(VOCABULARY.size)}
        if number % 9 >= 6:
            changes["presence_penalty"] = 1.5
        logs.append(
            harness.log(f"{number}", [5, 6, 7 + number], grammar=spec, eos=VOCABULARY.stop_ids, **changes)
        )
    prompt = [5 + place % 50 for place in range(120)]
    both = [*logs]
    for n in range(scored):
        both.insert(2 * n, harness.log(f"scored {n}", prompt, max_tokens=1, prompt_logprobs=0))
    return harness.play(both)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # bfloat16: the native decoder, where there is one
def test_a_prompt_that_is_scored_in_the_same_step_changes_nothing_of_what_is_chosen_again(dtype: str) -> None:
    expected = played(answers=27, dtype=dtype)
    found = played(answers=27, dtype=dtype, scored=27, max_batch_tokens=16)
    assert {id: found[id].tokens for id in expected} == {id: one.tokens for id, one in expected.items()}


@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_device_that_runs_by_itself_writes_what_one_does_that_does_not(lookahead: int) -> None:
    expected = played(runs_ahead=False, lookahead=2)
    found = played(runs_ahead=True, lookahead=lookahead)
    for id, one in expected.items():
        assert (found[id].tokens, found[id].error) == (one.tokens, None)
        if int(id) % 3 < 2:
            text = text_of([token for token in one.tokens if token not in VOCABULARY.stop_ids], VOCABULARY)
            jsonschema.validate(json.loads(text), SCHEMAS[int(id) % 3])


@pytest.mark.parametrize(("runs_ahead", "lookahead"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_answers_have_the_same_tokens_however_little_is_asked_in_a_step(
    monkeypatch: pytest.MonkeyPatch, runs_ahead: bool, lookahead: int
) -> None:
    expected = played()
    kept = Sampler.__init__
    late: list[int] = []

    def impatient(self: Sampler, *arguments: Any) -> None:
        kept(self, *arguments)
        self.ask_patience = 2e-5

    def defer(self: Deferrals, step: int, slot: int, end: int) -> None:
        late.append(slot)
        deferred(self, step, slot, end)

    deferred = Deferrals.defer
    monkeypatch.setattr(Sampler, "__init__", impatient)
    monkeypatch.setattr(Deferrals, "defer", defer)
    found = played(runs_ahead=runs_ahead, lookahead=lookahead)
    assert {id: (one.tokens, one.error) for id, one in found.items()} == {
        id: (one.tokens, one.error) for id, one in expected.items()
    }
    assert late


def test_a_device_that_runs_by_itself_begins_the_next_step_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = played()
    events: list[str] = []
    forward, veto, mark_replaced = Runner.forward, BudgetMatcher.veto, Deferrals.mark_replaced

    def note(event: str, then: Any) -> Any:
        def noted(self: Any, *arguments: Any) -> Any:
            found = then(self, *arguments)
            events.append("replaced" if event == "mark_replaced" and arguments[0] else event)
            return found

        return noted

    monkeypatch.setattr(Runner, "forward", note("forward", forward))
    monkeypatch.setattr(BudgetMatcher, "veto", note("veto", veto))
    monkeypatch.setattr(Deferrals, "mark_replaced", note("mark_replaced", mark_replaced))
    found = played(runs_ahead=True)
    assert {id: one.tokens for id, one in found.items()} == {id: one.tokens for id, one in expected.items()}
    beside = [one for before, one in pairwise(events) if before == "forward"]
    assert "veto" in beside, "while the next step is computed"
    assert "replaced" in events, "a row of it had another token, and sat it out"
