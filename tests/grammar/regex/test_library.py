"""The validator of answers reads patterns as ECMA-262 does, also where its library does not by itself."""

import json

import jsonschema_rs
import pytest

from personae.grammar.regex.library import library_pattern
from personae.grammar.schema.validate import validate_answer
from personae.grammar.spec import GrammarSpec


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"\bx\b", ["éx", "x", "a x é"], ["ax", "x_"]),
        (r"\Bx", ["ax"], ["éx", "x"]),
        ("^[^]$", ["a", "\n", "]"], ["", "ab"]),
        ("^a[]?$", ["a"], ["a]", "ab"]),
        (r"^(?<n>a|b)-\k<n>$", ["a-a", "b-b"], ["a-b"]),
        (r"^(x)(?:y)(?=z)(?<n>z)\k<n>1$", ["xyzz1"], ["xyzz"]),
        (r"^[\b\]]$", ["\b", "]"], ["b", "\\"]),
        (r"^\\b$", ["\\b"], ["b"]),
        ("^.$", ["a", "\x85", "é", "😀"], ["\u2028", "\u2029", "\r", "\n", "ab"]),
        (r"^\.[.]$", [".."], ["a.", ".a"]),
        (r"^[[^\]]+\(b$", ["[^(b"], ["a(b"]),
    ],
)
def test_patterns_find_what_ecma_262_finds(pattern: str, texts: list[str], others: list[str]) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"pattern": pattern}), strict=False)
    assert [text for text in texts if not validate_answer(spec, json.dumps(text)).valid] == []
    assert [text for text in others if validate_answer(spec, json.dumps(text)).valid] == []
    named = GrammarSpec("json_schema", json.dumps({"patternProperties": {pattern: False}}), strict=False)
    assert [text for text in texts if validate_answer(named, json.dumps({text: 1})).valid] == []
    assert [text for text in others if not validate_answer(named, json.dumps({text: 1})).valid] == []


@pytest.mark.parametrize("pattern", ["a", "^[a-z]+$", r"\d{2}", "(?:a|b)", r"^\p{L}$"])
def test_others_stay_as_they_are(pattern: str) -> None:
    assert library_pattern(pattern) == pattern


def test_what_is_malformed_stays_so() -> None:
    for pattern in ("[", "[^", r"\k<n>(", r"(?<n>\b"):
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.Draft202012Validator({"pattern": library_pattern(pattern)})
