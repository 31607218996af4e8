"""Tokens near the end of a budget are asked about before they are taken: as late as that may be."""

import json
from typing import Any

import jsonschema
import pytest
from tiny_models import model_folder
from troupe import Played, Troupe
from worst import text_of, text_vocabulary

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
STRING = {"type": "string", "maxLength": 30}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": STRING, "mood": {"enum": ["the", "quick"]}},
     "required": ["name", "mood"], "additionalProperties": False},
    {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "minItems": 4},
]  # fmt: skip


def played(*, runs_ahead: bool, lookahead: int) -> dict[str, Played]:
    """More answers than slots, whose budgets end in different steps; each third is not bound."""
    troupe = Troupe(model_folder("llama", vocab_size=VOCABULARY.size), max_seqs=3, lookahead=lookahead)
    troupe.engine.runs_ahead = runs_ahead
    specs = [GrammarSpec("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    compiler = GrammarCompiler(VOCABULARY)
    troupe.grammars |= {spec: compiler.compile(spec) for spec in specs}
    logs = []
    for number in range(9):
        spec = [*specs, None][number % 3]
        budget = 12 if spec is None else troupe.grammars[spec].shortest + 2 * number
        changes: dict[str, Any] = {"max_tokens": budget, "seed": number, "temperature": number % 2 * 1.5}
        if number >= 6:
            changes["presence_penalty"] = 1.5
        logs.append(
            troupe.log(f"{number}", [5, 6, 7 + number], grammar=spec, eos=VOCABULARY.stop_ids, **changes)
        )
    return troupe.play(logs)


@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_device_that_runs_by_itself_writes_what_one_does_that_does_not(lookahead: int) -> None:
    expected = played(runs_ahead=False, lookahead=2)
    found = played(runs_ahead=True, lookahead=lookahead)
    for id, one in expected.items():
        assert (found[id].tokens, found[id].error) == (one.tokens, None)
        if int(id) % 3 < 2:
            text = text_of([token for token in one.tokens if token not in VOCABULARY.stop_ids], VOCABULARY)
            jsonschema.validate(json.loads(text), SCHEMAS[int(id) % 3])
