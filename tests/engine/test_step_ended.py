"""A grammar may have ended before its sequence does: with `ignore_eos`, or before `min_tokens`."""

import json
from typing import Any

import msgspec
import pytest
from engine_harness import EngineHarness
from sandbox_limits import PATIENT
from tiny_models import model_folder
from worst import text_of, text_vocabulary

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
SPECS = {
    "regex": GrammarSpec("regex", "the|quick"),
    "choice": GrammarSpec("choice", json.dumps(["the", "quick"])),
    "json_schema": GrammarSpec("json_schema", json.dumps({"enum": ["the", "quick"]})),
    "ebnf": GrammarSpec("ebnf", 'root ::= "the" | "quick"'),
}


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"min_tokens": 12}])
@pytest.mark.parametrize("kind", SPECS)
def test_a_sequence_whose_grammar_has_ended_goes_on_with_stop_tokens_also_when_it_is_taken_up_again(
    kind: str, changes: dict[str, Any]
) -> None:
    harness = EngineHarness(model_folder("llama", vocab_size=VOCABULARY.size))
    spec = SPECS[kind]
    harness.grammars[spec] = GrammarCompiler(VOCABULARY, limits=PATIENT).compile(spec)
    log = harness.log("a", [5, 6, 7], grammar=spec, eos=VOCABULARY.stop_ids, max_tokens=14, **changes)
    answer = harness.play([log])["a"]
    assert answer.error is None
    assert len(answer.tokens) == (14 if "ignore_eos" in changes else 12 + 1)
    said = [token for token in answer.tokens if token not in VOCABULARY.stop_ids]
    assert text_of(said, VOCABULARY).strip(b'"') in (b"the", b"quick")
    assert answer.tokens[: len(said)] == said, "stop tokens come after the answer"
    for count in range(1, 12):
        again = msgspec.structs.replace(log, id=f"{count}", tokens=log.tokens + tuple(answer.tokens[:count]))
        assert harness.play([again])[f"{count}"].tokens == answer.tokens[count:]
