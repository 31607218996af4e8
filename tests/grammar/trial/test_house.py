"""Specs that would take the server's time or memory take their own; others are tried meanwhile."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from personae.errors import GrammarError
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.trial.house import Limits, TrialHouse
from personae.grammar.trial.small import is_small
from personae.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,), {})


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def laughs(depth: int) -> dict[str, Any]:
    """References whose inlined form doubles with each level."""
    definitions = {
        f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}, "contains": {"$ref": f"#/$defs/d{n + 1}"}}
        for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"type": "null"}}}


BOMB = spec_of(laughs(40))
GOOD = spec_of({"type": "object", "properties": {"a": {"type": "string", "pattern": "^(x|y)*$"}}})


@pytest.fixture(scope="module")
def house() -> Iterator[TrialHouse]:
    house = TrialHouse(VOCABULARY, Limits(processor=1.0, seconds=200.0, memory=2**29), patience=300.0)
    yield house
    house.close()


def test_what_compiles_is_admitted_and_what_does_not_is_refused_as_it_would_be_here(
    house: TrialHouse,
) -> None:
    compiler = GrammarCompiler(VOCABULARY)
    house.admit(GOOD)
    house.admit(GrammarSpec("ebnf", 'root ::= "a" | "b"'))
    for wrong in (spec_of({"type": "nothing"}), GrammarSpec("regex", "(a"), spec_of({"$ref": "#/nowhere"})):
        with pytest.raises(GrammarError) as there:
            house.admit(wrong)
        with pytest.raises(GrammarError) as here:
            compiler.compile(wrong)
        assert (there.value.message, there.value.param) == (here.value.message, here.value.param)
    compiler.close()


def test_a_bomb_ends_by_itself_and_others_are_tried_meanwhile(house: TrialHouse) -> None:
    house.admit(GOOD)
    refused: list[GrammarError] = []

    def light() -> None:
        try:
            house.admit(BOMB)
        except GrammarError as error:
            refused.append(error)

    bomb = threading.Thread(target=light)
    bomb.start()
    house.admit(GOOD)
    bomb.join(300)
    [error] = refused
    assert error.code == "grammar_too_complex"
    house.admit(GOOD)


def test_memory_is_a_limit_of_its_own() -> None:
    small = TrialHouse(VOCABULARY, Limits(processor=60.0, seconds=200.0, memory=2**26), patience=300.0)
    with pytest.raises(GrammarError, match="limits"):
        small.admit(BOMB)
    assert small._process is not None
    os.kill(small._process.pid, signal.SIGKILL)
    small._process.wait()
    small.admit(GOOD)  # in a new house
    small.close()
    small.close()


class Noting(TrialHouse):
    """Says yes to everything."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.asked: list[GrammarSpec] = []

    def admit(self, spec: GrammarSpec) -> None:
        self.asked.append(spec)


def test_only_what_is_not_small_is_tried_first() -> None:
    house = Noting()
    compiler = GrammarCompiler(VOCABULARY, house=house)
    compiler.compile(spec_of({"type": "object", "properties": {"n": {"type": "integer"}}}))
    assert house.asked == []
    compiler.compile(GOOD)
    assert house.asked == [GOOD]
    compiler.close()


@pytest.mark.parametrize(
    ("schema", "small"),
    [
        ({"type": "string", "maxLength": 200}, True),
        ({"type": "string", "maxLength": 100_000}, False),
        ({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}, True),
        ({"type": "string", "pattern": r"^[a-z]+$"}, True),
        ({"type": "string", "pattern": r"(a|aa)*b"}, False),
        ({"type": "string", "pattern": r"(a{10}){10}"}, False),
        ({"type": "string", "pattern": r".*a.*b"}, False),
        ({"type": "string", "pattern": "a{5000}"}, False),
        ({"patternProperties": {"(a|b)*c{900}": {}}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        (laughs(3), True),
        (laughs(40), False),
        ({"enum": [f"value {n}" for n in range(2000)]}, False),
        ({"properties": {f"p{n}": {"type": "string"} for n in range(100)}}, True),
    ],
)
def test_small_is_what_says_little_and_means_little(schema: Any, small: bool) -> None:
    assert is_small(spec_of(schema)) is small


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        (GrammarSpec("json_object"), True),
        (GrammarSpec("regex", "[ab]{8}"), True),
        (GrammarSpec("regex", "((a{100}){100}){100}"), False),
        (GrammarSpec("ebnf", 'root ::= "a"'), False),
        (GrammarSpec("lark", 'start: "a"'), False),
        (GrammarSpec("json_schema", "{"), True),
    ],
)
def test_grammars_are_never_small_and_patterns_by_what_they_repeat(spec: GrammarSpec, small: bool) -> None:
    assert is_small(spec) is small
