"""JSON without blanks between its tokens: none is written, and answers close as others do."""

import json
import re
from functools import cache

import jsonschema
import pytest
from worst import WORST, answer, text_of, text_vocabulary

from personae.evals.suites.schema_files import SAMPLE, read_schemas
from personae.grammar.backend import BoundGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.gate import unenforced
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Concat, Json, Verbatim, compacted, structure_spec

VOCABULARY = text_vocabulary()
SCHEMAS = {case.name: case.schema for case in read_schemas(SAMPLE)}
STRING = re.compile(r'"(\\.|[^"\\])*"')


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, sandboxed=False)


def compiled(spec: GrammarSpec) -> BoundGrammar:
    return compiler().compile(compacted(spec))


def written(grammar: BoundGrammar, taste: str, spare: int, seed: int) -> str:
    budget = grammar.shortest + spare
    tokens = answer(grammar.matcher(budget), VOCABULARY, WORST[taste], budget, seed)
    return text_of(tokens, VOCABULARY).decode()


@pytest.mark.parametrize("taste", WORST)
@pytest.mark.parametrize("name", [name for name in SCHEMAS if not [*unenforced(SCHEMAS[name], "llguidance")]])
def test_answers_are_valid_complete_within_any_budget_and_without_blanks(name: str, taste: str) -> None:
    grammar = compiled(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    for seed, spare in enumerate((0, 3, 30)):
        text = written(grammar, taste, spare, seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        assert not re.search(r"\s", STRING.sub("", text)), text


def test_a_model_that_likes_blanks_writes_them_unless_it_is_told_not_to() -> None:
    spec = GrammarSpec("json_schema", json.dumps(SCHEMAS["order"]))
    assert not re.search(r"\s", STRING.sub("", written(compiled(spec), "blanks", 200, 1)))
    assert re.search(r"\s{8}", STRING.sub("", written(compiler().compile(spec), "blanks", 200, 1)))


def test_in_a_structure_what_is_json_is_compact_and_what_is_not_stays_as_it_is() -> None:
    schema = SCHEMAS["person"]
    spec = structure_spec(Concat((Verbatim("call: \n"), Json(schema, True, "tools"), Verbatim("\n end"))))
    text = written(compiled(spec), "blanks", 40, 3)
    assert text.startswith("call: \n{")
    assert text.endswith("}\n end")
    assert " " not in STRING.sub("", text[7:-5])


@pytest.mark.parametrize("spec", [GrammarSpec("regex", "a +b"), GrammarSpec("choice", '["a b"]')], ids=str)
def test_what_is_no_json_is_bound_as_it_was(spec: GrammarSpec) -> None:
    assert compacted(spec) == spec
