"""Look-around, complements and overlapping patterns in schemas: strict takes exactly what they say."""

import json
from typing import Any

import pytest

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec

COMPILER = GrammarCompiler(byte_vocabulary(), sandboxed=False)
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
PASSWORD = r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,}$"


def pet(kind: str, name: str, value: str) -> dict[str, Any]:
    """As pydantic writes a member of a union whose tag has a default."""
    properties = {"kind": {"const": kind, "default": kind, "type": "string"}, name: {"type": value}}
    return {"type": "object", "properties": properties, "required": [name]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"type": "string", "pattern": ZOD_EMAIL},
            ["a.b@x.org"],
            [".a@x.org", "a..b@x.org", "ab@x", "a.@x.org"],
        ),
        ({"type": "string", "pattern": PASSWORD}, ["Abcdefg1"], ["abcdefg1", "Abcdefgh", "Ab1", "Abcdefg1!"]),
        ({"type": "string", "pattern": r"\bfoo\b"}, ["a foo b", "foo"], ["afoo", "foob"]),
        ({"type": "string", "pattern": r"^.+(?<!-)$"}, ["a-b"], ["a-", ""]),
        ({"type": "string", "pattern": "^a.$"}, ["ab", "a\U0001f600"], ["a\r", "a\u2028", "a\n"]),
        ({"type": "string", "pattern": r"^\s$"}, [" ", "\ufeff"], ["\x85", "a"]),
        ({"type": "string", "pattern": "^[[a]$"}, ["[", "a"], ["]", "b"]),
        ({"type": "string", "not": {"pattern": "^foo"}}, ["fo", "x", ""], ["foo", "foobar"]),
        ({"type": "string", "not": {"format": "uuid"}}, ["x"], ["4" * 8 + "-4444-4444-4444-" + "4" * 12]),
        ({"type": "string", "pattern": "^[a-z]{3}$", "not": {"const": "abc"}}, ["abd"], ["abc", "ab"]),
        (
            {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}]},
            ["a", "b", "ac", "cb"],
            ["ab", "c", "acb"],
        ),
        (
            {"oneOf": [{"type": "string", "format": "uri"}, {"type": "string", "pattern": r"^\./.+$"}]},
            ["./a", "http://x"],
            ["x", "./"],
        ),
        (
            {"type": "object", "propertyNames": {"not": {"pattern": "^_"}}},
            [{"a": 1}, {}],
            [{"_a": 1}, {"a": 1, "_": 2}],
        ),
        (
            {"type": "object", "patternProperties": {"^(?!x)[a-z]+$": {"type": "integer"}}},
            [{"a": 1}, {"xa": "s"}, {"A": "s"}],
            [{"a": "s"}],
        ),
        ({"not": {"type": "integer"}}, [1.5, -0.25, "a", None, [1], {"a": 1}], [1, -3, 0]),
        (
            {"oneOf": [pet("cat", "lives", "integer"), pet("dog", "bark", "string")]},
            [{"kind": "cat", "lives": 1}, {"lives": 1}, {"bark": "x"}, {"lives": 1.5, "bark": "x"}],
            [{"kind": "cat"}, {"lives": 1, "bark": "x"}, {"kind": "cat", "bark": "x"}, {}],
        ),
    ],
)
def test_patterns_and_complements_are_enforced_exactly(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(schema)))

    def accepts(value: Any) -> bool:
        matcher = grammar.matcher()
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(256)

    assert list(map(accepts, valid)) == [True] * len(valid)
    assert list(map(accepts, invalid)) == [False] * len(invalid)
