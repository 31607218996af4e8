"""Numbers beside bounds, as a reader of doubles gets them, against jsonschema."""

import json
from itertools import product

import jsonschema
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

_COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
_SCHEMAS = [
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "exclusiveMinimum": 1, "maximum": 2},
    {"type": "number", "exclusiveMinimum": 0.1, "maximum": 1},
    {"type": "number", "not": {"const": 1.5}, "minimum": 1.5, "maximum": 1.6},
    {"type": "number", "not": {"minimum": 1}},
    {"exclusiveMinimum": 0},
    {"type": ["number", "null"], "exclusiveMaximum": 0, "minimum": -3},
    {"type": "number", "exclusiveMinimum": 0.99, "minimum": 0.5, "exclusiveMaximum": 1.01},
    {"type": "number", "exclusiveMinimum": -1e-300, "exclusiveMaximum": 1e-300},
    {"type": "number", "exclusiveMaximum": 1e16},
    {"type": "number", "minimum": 0, "maximum": 0.9999999999999999},
    {"type": "number", "minimum": -1.9999999999999998, "maximum": 2.5},
    {"type": "number", "minimum": 0, "maximum": 0.99999, "anyOf": [{"minimum": 0.5}, {"maximum": 0.2}]},
    {"type": "number", "minimum": 0.95, "maximum": 0.99},
    {"type": "number", "exclusiveMinimum": -1, "multipleOf": 0.5},
]
_CLOSE = [f"{whole}.{'0' * zeros}1" for whole, zeros in product((0, 1), (0, 5, 14, 15, 16, 17, 40, 330))]
_CLOSE += [f"{whole}.{'9' * nines}" for whole, nines in product((0, 1), (1, 5, 15, 16, 17, 40))]
_CLOSE += ["0.1" + "0" * zeros + "1" for zeros in (3, 14, 15, 16, 40)]
_CLOSE += ["1.5" + "0" * zeros + "1" for zeros in (3, 13, 14, 15, 40)]
_CLOSE += ["9999999999999999.9", "9999999999999998", "0", "1", "2", "2.0", "0.1", "1.5", "1.0", "0.5"]
_TEXTS = [*_CLOSE, *(f"-{one}" for one in _CLOSE)]


def accepted(schema: object) -> list[str]:
    grammar = _COMPILER.compile_here(GrammarSpec("json_schema", json.dumps(schema), strict=True))

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        return matcher.feed(text.encode()) == len(text) and matcher.accept(256)

    return list(filter(accepts, _TEXTS))


@pytest.mark.parametrize("schema", _SCHEMAS, ids=str)
def test_a_number_that_is_read_as_beyond_its_bounds_is_not_written(schema):
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert [text for text in accepted(schema) if not valid(json.loads(text))] == []


@pytest.mark.parametrize("schema", _SCHEMAS, ids=str)
def test_every_number_of_up_to_fifteen_digits_within_the_bounds_is(schema):
    valid = jsonschema.Draft202012Validator(schema).is_valid
    short = [text for text in _TEXTS if len(text) <= 16 and repr(float(text)) == text and float(text) % 1]
    assert {text for text in short if valid(json.loads(text))} <= set(accepted(schema))
