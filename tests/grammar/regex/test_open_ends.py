"""A pattern that is searched for is followed no further than its verdict needs. The truth is Python's re."""

import json
import random
import re
from itertools import product

import jsonschema
import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.regex.plain import conjuncts
from personae.grammar.spec import GrammarSpec

_TEXTS = ["".join(text) for length in range(6) for text in product("abc", repeat=length)]


@pytest.mark.parametrize(
    ("pattern", "shorter"),
    [
        ("[ab]{2,6}c?", "[ab]{2}"),
        ("^a[ab]+", "^a[ab]"),
        ("b*[ab]+c$", "[ab]c$"),
        ("(?:ab*){2,}", "ab*a"),
        ("a|b+$|^c*", "a|b$|^"),
        ("c(?:ab+|b{3})", "c(?:ab|b{3})"),
        ("(?:a|b*)*", ""),
        ("^a+b*$", "^a+b*$"),
    ],
)
def test_what_is_beyond_the_shortest_match_at_an_open_end_is_left_out(pattern, shorter):
    assert conjuncts(pattern) == (shorter,)
    assert [bool(re.search(pattern, text)) for text in _TEXTS] == [
        bool(re.search(shorter, text)) for text in _TEXTS
    ]


def _random_pattern(draw: random.Random, depth: int) -> str:
    one = draw.choice(["a", "b", "[ab]", "[^c]"])
    if depth and draw.random() < 0.4:
        one = f"(?:{_random_alternatives(draw, depth - 1)})"
    return one + draw.choice(["", "", "?", "*", "+", "{2}", "{1,3}", "{0,2}"])


def _random_alternatives(draw: random.Random, depth: int) -> str:
    ways = draw.choice([1, 1, 2, 3])
    return "|".join(
        "".join(_random_pattern(draw, depth) for _ in range(draw.randint(0, 3))) for _ in range(ways)
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_same_texts_match(seed):
    draw = random.Random(seed)
    for _ in range(10):
        pattern = (
            draw.choice(["", "", "^"])
            + "".join(_random_pattern(draw, 2) for _ in range(draw.randint(1, 4)))
            + draw.choice(["", "", "$", "|" + _random_alternatives(draw, 1)])
        )
        found = conjuncts(pattern)
        for text in _TEXTS[::3]:
            expected = bool(re.search(pattern, text))
            assert all(re.search(one, text) for one in found) is expected, (pattern, found, text)


@pytest.mark.parametrize("any_order", [False, True])
def test_names_of_a_long_repetition_can_be_written_beside_any_others(any_order):
    schema = {"type": "object", "patternProperties": {"[A-Za-z0-9-_.:]{1,255}": {"type": "string"}}}
    spec = GrammarSpec("json_schema", json.dumps(schema), strict=True, any_order=any_order)
    grammar = GrammarCompiler(byte_vocabulary(), sandboxed=False).compile_here(spec)

    def accepts(value):
        matcher, text = (
            grammar.matcher(),
            json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
        )
        return matcher.feed(text) == len(text) and matcher.accept(256)

    values = [{"child-1": "x", "child.2": "y"}, {"": 1}, {"ä": 1, "b": "x"}, {"b": 1}, {"ä:": 1}]
    assert list(map(accepts, values)) == [
        jsonschema.Draft202012Validator(schema).is_valid(value) for value in values
    ]
