"""The cache reckons with what grammars become while they are used."""

import json
from typing import Any

import pytest
from byte_bpe import byte_level_vocabulary

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.size_estimate import size_estimate
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Concat, Json, Lark, Regex, structure_spec

GROWING = "[a-z ]*a[a-z ]{120}"
ORDINARY = (
    "^[a-z]+$",
    r"^\d{4}-\d{2}-\d{2}$",
    "[a-z.]+@[a-z.]+",
    "[ab]{120}",
    "(?:a|b)-[0-9a-f]{40}",
    "([0-9a-f]{4}-){3}x",
)


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", GROWING),
        GrammarSpec("regex", "[a-z ]{0,120}a[a-z ]{120}"),
        GrammarSpec("regex", "[ab]*a" + "[ab]" * 20),
        GrammarSpec("regex", "(a|b)*c"),
        GrammarSpec("regex", "([a-z ]|[a-z ]{9}){300}a[a-z ]{600}"),
        GrammarSpec("lark", "start: A"),
        spec_of({"items": {"pattern": GROWING}}),
        spec_of({"patternProperties": {GROWING: True}}),
        structure_spec(Concat((Regex(GROWING, "tools[0]"),))),
        structure_spec(Concat((Json({"pattern": GROWING}, True, "tools[0]"),))),
        structure_spec(Concat((Lark("start: A", "tools[0]"),))),
    ],
)
def test_a_lexer_whose_states_multiply_counts_for_megabytes(spec: GrammarSpec) -> None:
    assert size_estimate(spec) > 10**7


@pytest.mark.parametrize("pattern", ORDINARY)
def test_ordinary_patterns_count_for_little(pattern: str) -> None:
    assert size_estimate(GrammarSpec("regex", pattern)) < 10**6
    assert size_estimate(spec_of({"type": "array", "items": {"pattern": pattern}})) < 10**6


def test_so_few_grammars_that_grow_are_kept_that_they_fit_when_they_have_grown() -> None:
    compiler = GrammarCompiler(byte_level_vocabulary(), cache_bytes=160 * 2**20, sandboxed=False)
    specs = [GrammarSpec("regex", f"[a-z ]*a[a-z ]{{{count}}}") for count in (100, 101, 102, 103)]
    for spec in specs:
        compiler.put(spec, compiler.compile(spec))
    assert [compiler.get(spec) is not None for spec in specs] == [False, False, True, True]
    assert compiler.cache.nbytes <= 160 * 2**20
