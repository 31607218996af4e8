"""A function's parameters, for formats that write arguments one by one."""

from typing import Any, Optional

import jsonschema
import pytest
from pydantic import BaseModel

from personae.errors import GrammarError
from personae.grammar.tools.function import Function
from personae.grammar.tools.parameters import Parameters, parameters_of


class Folder(BaseModel):
    name: str
    inside: Optional["Folder"] = None


RECURSIVE = Folder.model_json_schema()
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def of(schema: dict[str, Any]) -> Parameters:
    return parameters_of(Function("f", schema, True, "tools[0].function.parameters"))


def test_a_recursive_model_has_the_parameters_of_the_object_that_it_refers_to() -> None:
    assert RECURSIVE.keys() == {"$defs", "$ref"}
    name, inside = of(RECURSIVE).listed
    assert (name.name, name.required, inside.name, inside.required) == ("name", True, "inside", False)
    judge = jsonschema.Draft202012Validator(inside.schema)
    assert judge.is_valid({"name": "a", "inside": {"name": "b"}})
    assert not judge.is_valid({"name": "a", "inside": {}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "$ref": "#/definitions/n", "definitions": {"n": NAMED}},
        {"allOf": [{"$ref": "#/$defs/n"}, {"type": "object"}], "$defs": {"n": NAMED}},
        {"$ref": "#/$defs/m", "$defs": {"m": {"$ref": "#/$defs/n"}, "n": NAMED}},
    ],
)
def test_references_to_an_object_are_followed(schema: dict[str, Any]) -> None:
    [parameter] = of(schema).listed
    assert (parameter.name, parameter.schema["type"], parameter.required) == ("a", "integer", True)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "maxProperties": 3, "$defs": {"n": NAMED}},
        {"allOf": [{"$ref": "#/$defs/n"}, {"required": ["b"]}], "$defs": {"n": NAMED}},
        {"$ref": "#/$defs/m", "$defs": {"m": {"$ref": "#/$defs/m"}}},
        {"$ref": "#/$defs/nowhere", "$defs": {"n": NAMED}},
        {"$ref": "#/$defs/n", "$defs": {"n": {**NAMED, "minProperties": 2}}},
    ],
)
def test_what_says_more_than_one_object_does_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="cannot be enforced where a model writes arguments one by one"):
        of(schema)
