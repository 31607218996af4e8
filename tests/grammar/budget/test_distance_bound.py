"""How far from its end an answer can be, as a schema tells it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from worst import text_vocabulary

from personae.grammar.budget.schema_bound import schema_bound
from personae.grammar.budget.table import TokenTable

TABLE = TokenTable(text_vocabulary())
FAR = 10**6


def test_a_schema_that_may_hold_itself_is_no_further_from_its_end_than_its_shortest() -> None:
    node = {"$ref": "#/$defs/node"}
    optional: Any = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "not": node,
                    "id": {"type": "string"},
                    "all": {"type": "array", "items": node},
                },
                "additionalProperties": node,
            }
        },
    }
    assert schema_bound(optional, TABLE.measure).container < 100


def test_a_circle_is_left_by_the_alternative_that_leads_out_of_it_wherever_it_is_entered() -> None:
    def pair(other: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"to": {"$ref": f"#/$defs/{other}"}}, "required": ["to"]}

    entered = {
        "anyOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}],
        "$defs": {"one": pair("other"), "other": {"anyOf": [pair("one"), {"type": "null"}]}},
    }
    assert schema_bound(entered, TABLE.measure).container < 100
    endless = {"$ref": "#/$defs/one", "$defs": {"one": pair("other"), "other": pair("one")}}
    assert schema_bound(endless, TABLE.measure).container > FAR


@given(st.binary(max_size=40) | st.text(max_size=30).map(str.encode))
def test_a_measure_is_what_the_hardest_rest_of_a_text_takes(text: bytes) -> None:
    rests = [TABLE.spell_shortest(text[at:]) for at in range(len(text))]
    expected = [len(text) if rest is None else len(rest) for rest in rests]
    assert TABLE.measure(text) == max(expected, default=0)


def test_a_value_is_measured_only_if_it_may_be_the_longest() -> None:
    values = [f"value {n}" for n in range(500)] + ["zq" * 40]
    measured: list[bytes] = []

    def measure(text: bytes) -> int:
        measured.append(text)
        return TABLE.measure(text)

    short = schema_bound({"enum": values[:2]}, TABLE.measure)
    long = schema_bound({"enum": values}, measure)
    most = max(TABLE.measure(b'"%s"' % value.encode()) for value in values)
    assert long.lexeme - short.lexeme == most - TABLE.measure(b'"value 0"')
    assert {*measured} == {b'"' + b"zq" * 40 + b'"'}
