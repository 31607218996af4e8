import json
import random
import re

import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import walk
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_limits import PATIENT

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.schema.document import validator
from personae.grammar.schema.formats import FORMATS, PATTERNS, spell_formats
from personae.grammar.schema.gate import unenforced
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_level_vocabulary(), limits=PATIENT)
SERVED = sorted(FORMATS)


@pytest.mark.parametrize("name", SERVED)
def test_random_strings_of_a_format_are_valid(name):
    schema = {"type": "string", "format": name}
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))
    for seed in range(25):
        text = walk(grammar.matcher(), byte_level_vocabulary(), random.Random(seed), budget=1 + seed % 12)
        validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("name", "text", "matches"),
    [
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "1900-02-29", False),
        ("date", "2023-02-29", False),
        ("date", "2023-11-31", False),
        ("date", "0000-01-01", False),
        ("date-time", "1999-12-31T23:59:59.5+01:00", True),
        ("date-time", "1999-12-31T23:59:60Z", False),
        ("time", "24:00:00Z", False),
        ("json-pointer", "/a~1b/0", True),
        ("json-pointer", "a", False),
        ("relative-json-pointer", "1/a", True),
        ("relative-json-pointer", "01", False),
        ("uri-reference", "../a/b?x=1#y", True),
        ("uri-reference", "a b", False),
        ("iri", "https://example.com/a?b#c", True),
        ("iri", "example.com", False),
        ("hostname", "a-b.example.com", True),
        ("hostname", "one.two.three.four.five.example", True),
        ("hostname", "ab--c", False),
        ("hostname", ".".join(["a" * 63] * 4), False),
        ("email", "first.middle.last@mail.example.co.uk", True),
        ("email", "a" * 64 + "@b.co", True),
        ("email", "a" * 65 + "@b.co", False),
        ("email", "a..b@c.co", False),
        ("idn-email", "jürgen@müller.de", True),
        ("idn-hostname", "straße.example", True),
        ("idn-hostname", "ab--c", False),
        ("uri-template", "/users/{id}/files{/path*}{?page,size:3}", True),
        ("uri-template", "/users/{id", False),
        ("regex", r"^[a-z]+(?:-[0-9]{2,})*\.(png|jpe?g)$", True),
        ("regex", r"""^\s*(it|describe)\(\s*['"]([^'"()\]]+)['"\-.]""", True),
        ("regex", "(a", False),
        ("regex", "[a", False),
        ("regex", "*a", False),
        ("regex", "[z-a]", False),
        ("regex", "a**", False),
    ],
)
def test_patterns_know_the_edges_of_their_formats(name, text, matches):
    assert (re.fullmatch(PATTERNS[name], text) is not None) == matches
    assert validator({"format": name}).is_valid(text) or not matches


@pytest.mark.parametrize("name", sorted(PATTERNS))
@settings(max_examples=100)
@given(data=st.data())
def test_what_a_pattern_matches_is_of_its_format(name, data):
    text = data.draw(st.from_regex(PATTERNS[name], fullmatch=True, alphabet=st.characters(codec="ascii")))
    assert validator({"format": name}).is_valid(text)


def test_a_spelled_format_leaves_other_conditions_standing():
    schema = {"items": {"format": "date", "allOf": [{"maxLength": 3}], "pattern": "^2"}}
    spelled = spell_formats(schema)["items"]
    assert "format" not in spelled
    assert spelled["pattern"] == "^2"
    assert spelled["allOf"][0] == {"maxLength": 3}
    assert "format" in schema["items"]


def test_formats_that_are_neither_spelled_nor_enforced_are_found():
    assert [one.value for one in unenforced({"format": "regex"}, "llguidance")] == ["regex"]
    assert not list(unenforced(spell_formats({"format": "date"}), "llguidance"))
