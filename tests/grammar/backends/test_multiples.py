"""Multiples of fractions, against jsonschema."""

import json

import jsonschema
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

_COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
_NUMBERS = [f"{whole}{decimals}" for whole in range(12) for decimals in ("", *(f".{n}" for n in range(10)))]
_NUMBERS += [f"-{whole}.{n:02}" for whole in range(3) for n in range(100)]
_NUMBERS += [f"{whole}.{n:03}" for whole in range(2) for n in range(0, 1000, 25)]


def accepted(schema: object, texts: list[str], *, any_order: bool = False) -> list[str]:
    spec = GrammarSpec("json_schema", json.dumps(schema), strict=True, any_order=any_order)
    grammar = _COMPILER.compile_here(spec)

    def accepts(text: str) -> bool:
        matcher = grammar.matcher()
        return matcher.feed(text.encode()) == len(text) and matcher.accept(256)

    return list(filter(accepts, texts))


@pytest.mark.parametrize(
    "bounds", [{}, {"minimum": 0.25}, {"maximum": 7, "allOf": [{"minimum": 0}]}], ids=str
)
@pytest.mark.parametrize("step", [0.25, 0.5, 0.75, 0.125, 2.5, 0.0625])
def test_a_multiple_is_accepted_with_as_many_decimals_as_it_has(step, bounds):
    schema = {"type": "number", "multipleOf": step, **bounds}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    written = [text for text in _NUMBERS if len(repr(float(text))) == len(text) or "." not in text]
    multiples = [text for text in written if valid(json.loads(text))]
    assert set(multiples) <= set(accepted(schema, _NUMBERS))
    assert all(valid(json.loads(text)) for text in accepted(schema, _NUMBERS))


@pytest.mark.parametrize("any_order", [False, True])
def test_a_multiple_among_properties_and_other_types_is_too(any_order):
    schema = {
        "type": "object",
        "properties": {
            "hours": {"type": ["number", "null"], "multipleOf": 0.25},
            "multipleOf": {"const": 0.25},
        },
        "required": ["hours"],
        "additionalProperties": False,
    }
    texts = ['{"hours":2.5}', '{"hours":2.75,"multipleOf":0.25}', '{"hours":null}', '{"hours":2.6}']
    assert accepted(schema, texts, any_order=any_order) == texts[:3]


def test_a_step_of_many_digits_is_taken_as_it_is():
    assert accepted({"multipleOf": 0.1234567}, ["0.1234567", "0.12", "1.2345670"]) == [
        "0.1234567",
        "1.2345670",
    ]
