"""Calls close, or are refused, in every tool format, with arguments of every kind, tags spelled or tokens."""

import json
import math
import re
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from answers import marked, parse_marked
from worst import WORST, answer, text_of, text_vocabulary

from personae.errors import GrammarError
from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.budget.numbers import MOST
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import NAMES, tool_format
from personae.grammar.vocabulary import Vocabulary

PARAM = "tools[0].function.parameters"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "boolean or null": {"type": ["boolean", "null"]},
    "listed": {"enum": ["red", 10, None]},
    "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2},
    "object": {
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "string"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "string or null": {"type": ["string", "null"]},
    "number or string": {"type": ["number", "string"]},
    "bounded": {"type": "number", "minimum": 0.5, "maximum": 2000},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 100},
    "pattern": {"type": "string", "pattern": r"^[a-z]+/[a-z0-9.+-]+(;\s*charset=[a-z0-9-]+)?$"},
    "length": {"type": "string", "minLength": 5, "maxLength": 9},
    "format": {"type": "string", "format": "email"},
    "anything": {},
}
_TAG = re.compile(r"<\|\"\|>|<\|[^|<>]+\|>|<｜[^｜]+｜>|</?[a-z_:]+>|\[[A-Z_]+\]|<escape>")


def function(argument: dict[str, Any]) -> Function:
    """One argument that is required and one that is not."""
    schema = {
        "type": "object",
        "properties": {"a": argument, "b": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return Function("f", schema, True, PARAM)


def tags(name: str) -> tuple[str, ...]:
    """The format's tags, which may be special tokens."""
    return tuple(dict.fromkeys(_TAG.findall(tool_format(name).texts)))


@cache
def compiler(special: tuple[str, ...]) -> tuple[GrammarCompiler, Vocabulary]:
    vocabulary = text_vocabulary(special)
    return GrammarCompiler(vocabulary, sandboxed=False), vocabulary


@pytest.mark.parametrize("special", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_a_required_call_is_whole_and_valid_within_its_budget(name: str, special: bool) -> None:
    compile, vocabulary = compiler(tags(name) if special else ())
    tastes = list(WORST)
    for place, (kind, argument) in enumerate(ARGUMENTS.items()):
        called = function(argument)
        shape = AnswerShape(tools=tool_format(name), functions=(called,), use="required", parallel=False)
        spec = shape.spec()
        assert spec is not None
        grammar = compile.compile(spec)
        assert isinstance(grammar, BudgetGrammar)
        assert grammar.shortest > 3, "a call is more than a token"
        for spare, taste in ((0, "long"), (25, tastes[place % len(tastes)]), (60, "digits")):
            budget = grammar.shortest + spare
            ids = answer(grammar.matcher(budget), vocabulary, WORST[taste], budget, spare)
            said = (kind, taste, spare, text_of(ids, vocabulary))
            plain = grammar.matcher()
            assert plain.feed(ids) == len(ids), said
            assert plain.accept(256), said
            parser = shape.parser(vocabulary.special)
            [(called_name, arguments)] = parse_marked(parser, marked(ids, vocabulary, parser)).arguments
            assert called_name == "f"
            assert jsonschema_rs.is_valid(called.parameters, arguments), said
            assert all(len(number) <= MOST for number in _numbers(arguments, kind)), said


def _numbers(arguments: dict[str, Any], kind: str) -> list[str]:
    """The numbers as they are written; one that has to be a multiple may have to go on."""
    values = [value for key, value in arguments.items() if (key, kind) != ("a", "multiple")]
    found = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    assert all(map(math.isfinite, found))
    return [json.dumps(value) for value in found if isinstance(value, int)]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "gemma4", "pythonic"])
def test_a_call_of_its_own_accord_is_whole_or_is_not_begun(name: str) -> None:
    tools = tool_format(name)
    compile, vocabulary = compiler(())
    for argument in (ARGUMENTS["number"], ARGUMENTS["string or null"], ARGUMENTS["multiple"]):
        shape = AnswerShape(tools=tools, functions=(function(argument),), use="auto", parallel=False)
        spec = shape.spec()
        assert spec is not None
        grammar = compile.compile(spec)
        start = [*tools.trigger.encode()]
        for taste in ("digits", "brackets"):
            matcher = grammar.matcher(300)
            assert matcher.feed(start) == len(start)
            ids = start + answer(matcher, vocabulary, WORST[taste], 300 - len(start), 3)
            plain = grammar.matcher()
            assert plain.feed(ids) == len(ids)
            assert plain.accept(256), text_of(ids, vocabulary)


def test_what_has_no_end_in_sight_is_refused_by_its_field() -> None:
    compile, _ = compiler(())
    # Its shortest text has more characters than answers are looked for with.
    argument = {"type": "string", "pattern": "^(a{180}b){190}$"}
    shape = AnswerShape(tools=tool_format("qwen3_coder"), functions=(function(argument),), use="required")
    spec = shape.spec()
    assert spec is not None
    with pytest.raises(GrammarError) as refused:
        compile.compile(spec)
    assert refused.value.param == PARAM
