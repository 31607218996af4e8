"""A pattern whose classes leave out a quote or a backslash does not get it back by an escape."""

import json
from functools import cache

import jsonschema_rs
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

CHARACTERS = ['"', "\\", "a", "\n", "\t", "\b", "\f", "é", "<", " "]
TEXTS = ["", *CHARACTERS, *(f"a{one}" for one in CHARACTERS), *(f"{one}{one}" for one in CHARACTERS)]
PATTERNS = [
    '^[^"]*$', r"^[^\\]+$", r'^[^"\\]{1,2}$', r"^[^\s<>\"]*$", '^a[^"]$', r"^[^a]\\?$", r"^[\x00-!]+$",
    r"^[\u0000-~]$", r"^[^\]\\]$", '^(?!").*$', '^[a"]{2}$', r'^(?:[^"]|\\")*$',
]  # fmt: skip


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), sandboxed=False)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_the_strings_that_match_are_accepted(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert accepted(schema, TEXTS) == valid(schema, TEXTS)
    assert 0 < len(accepted(schema, TEXTS)) < len(TEXTS)


@pytest.mark.parametrize("any_order", [False, True])
def test_exactly_the_names_that_match_are_accepted(any_order: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "null"}, "c": {"type": "null"}},
        "patternProperties": {'^[^"b]+$': {"type": "boolean"}},
        "additionalProperties": {"type": "integer"},
    }
    values = [{name: value} for name in TEXTS for value in (True, 1)]
    assert accepted(schema, values, any_order) == valid(schema, values)


@pytest.mark.parametrize("value", ['a"b', "\\", '"'])
def test_a_value_that_is_excluded_is_not_accepted(value: str) -> None:
    schema = {"type": "string", "not": {"const": value}}
    assert accepted(schema, [*TEXTS, value]) == valid(schema, [*TEXTS, value])


def accepted(schema: dict, values: list, any_order: bool = False) -> list:
    spec = GrammarSpec("json_schema", json.dumps(schema), any_order=any_order)
    grammar = compiler().compile_here(spec)

    def accepts(value: object) -> bool:
        matcher, text = grammar.matcher(), json.dumps(value, ensure_ascii=False).encode()
        return matcher.feed(text) == len(text) and matcher.accept(256)

    return list(filter(accepts, values))


def valid(schema: dict, values: list) -> list:
    return list(filter(jsonschema_rs.validator_for(schema).is_valid, values))
