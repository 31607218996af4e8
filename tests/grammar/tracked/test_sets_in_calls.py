"""Sets in the arguments of tools: no call has an item twice, in every format that writes a JSON object."""

import json
import re
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from answers import marked, parse_marked
from worst import WORST, answer, text_of, text_vocabulary

from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.tools.arguments import JsonArguments
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import NAMES, tool_format

PARAM = "tools[0].function.parameters"
SETS: dict[str, dict[str, Any]] = {
    "numbers": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 2},
    "texts": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2},
    "few texts": {
        "type": "array",
        "items": {"type": "string", "pattern": "^[ab]{0,2}$"},
        "uniqueItems": True,
        "minItems": 3,
    },
}
AS_OBJECTS = [name for name in NAMES if isinstance(tool_format(name).arguments, JsonArguments)]
_TAG = re.compile(r"<\|[^|<>]+\|>|<｜[^｜]+｜>|</?[a-z_:]+>|\[[A-Z_]+\]")
# Calls as the formats write them; FIRST and SECOND stand for the arguments.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": FIRST}\n</tool_call>\n<tool_call>\n'
    '{"name": "ff", "arguments": SECOND}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": FIRST}, {"name": "ff", "arguments": SECOND}]',
    "mistral_v11": "[TOOL_CALLS]f[ARGS]FIRST[TOOL_CALLS]ff[ARGS]SECOND",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>FIRST"
    "<|tool_call_end|><|tool_call_begin|>functions.ff:1<|tool_call_argument_begin|>SECOND<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>FIRST<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>ff<｜tool▁sep｜>SECOND<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "phi4": 'functools[{"name": "f", "arguments": FIRST}, {"name": "ff", "arguments": SECOND}]',
}


@cache
def compiler(tags: tuple[str, ...] = ()) -> tuple[GrammarCompiler, Any]:
    vocabulary = text_vocabulary(tags)
    return GrammarCompiler(vocabulary, sandboxed=False), vocabulary


def function(name: str, argument: dict[str, Any]) -> Function:
    parameters = {
        "type": "object",
        "properties": {"a": argument},
        "required": ["a"],
        "additionalProperties": False,
    }
    return Function(name, parameters, True, PARAM)


def grammar_of(shape: AnswerShape, tags: tuple[str, ...] = ()) -> Any:
    spec = shape.spec()
    assert spec is not None
    return compiler(tags)[0].compile(spec)


@pytest.mark.parametrize("name", AS_OBJECTS)
@pytest.mark.parametrize("special", [False, True], ids=["spelled", "tokens"])
def test_a_call_has_no_item_twice_and_closes_whatever_the_model_prefers(name: str, special: bool) -> None:
    tools = tool_format(name)
    tags = tuple(dict.fromkeys(_TAG.findall(tools.texts))) if special else ()
    vocabulary = compiler(tags)[1]
    for place, argument in enumerate(SETS.values()):
        called = function("f", argument)
        shape = AnswerShape(tools=tools, functions=(called,), use="required", parallel=False)
        grammar = grammar_of(shape, tags)
        for spare, taste in enumerate(WORST):
            budget = grammar.shortest + spare * 7
            ids = answer(grammar.matcher(budget), vocabulary, WORST[taste], budget, spare + place)
            plain = grammar.matcher()
            assert plain.feed(ids) == len(ids)
            assert plain.accept(256)
            parser = shape.parser(vocabulary.special)
            [(_, arguments)] = parse_marked(parser, marked(ids, vocabulary, parser)).arguments
            assert jsonschema_rs.is_valid(called.parameters, arguments), text_of(ids, vocabulary)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("use", ["required", "auto"])
def test_each_of_two_calls_has_its_own_set(name: str, use: Any) -> None:
    functions = (function("f", SETS["numbers"]), function("ff", SETS["texts"]))
    grammar = grammar_of(AnswerShape(tools=tool_format(name), functions=functions, use=use))
    for first, second, valid in (
        ({"a": [1, 12, 2]}, {"a": ["1", "2"]}, True),
        ({"a": [1, 2]}, {"a": ["x", "y"]}, True),
        ({"a": [1, 1]}, {"a": ["x", "y"]}, False),
        ({"a": [1, 2]}, {"a": ["x", "x"]}, False),
        ({"a": [1, 2, 1]}, {"a": ["x", "y"]}, False),
    ):
        text = WRITTEN[name].replace("FIRST", json.dumps(first)).replace("SECOND", json.dumps(second))
        matcher = grammar.matcher()
        taken = matcher.feed(text.encode())
        assert (taken == len(text.encode()) and matcher.accept(256)) is valid, text


def test_text_before_a_call_may_hold_anything_but_the_call() -> None:
    shape = AnswerShape(tools=tool_format("hermes"), functions=(function("f", SETS["numbers"]),), use="auto")
    grammar = grammar_of(shape)
    before = 'Look: {"name": "f", "arguments": {"a": [1, 1]}} and [[1,1 '
    for text, valid in (
        (before, True),
        (before + WRITTEN["hermes"].partition("\n<tool_call>\n")[0].replace("FIRST", '{"a": [1,2]}'), True),
        (before + WRITTEN["hermes"].partition("\n<tool_call>\n")[0].replace("FIRST", '{"a": [1,1]}'), False),
    ):
        matcher = grammar.matcher()
        assert (matcher.feed(text.encode()) == len(text.encode()) and matcher.accept(256)) is valid


def test_no_invalid_set_is_accepted_where_one_answer_may_be_calls_or_json() -> None:
    """Nothing before an object of the answer tells whether it is a call, so the set is checked."""
    content = Json({"type": "object", "properties": {"a": SETS["numbers"]}}, True, "schema")
    shape = AnswerShape(
        tools=tool_format("llama3_json"),
        functions=(function("f", SETS["numbers"]),),
        use="auto",
        content=content,
    )
    grammar = grammar_of(shape)
    for text, valid in (
        ('{"a": [1, 1]}', False),
        ('{"a": [1, 2]}', True),
        ('{"a": [1, 2], "name": "f"}', True),
        ('{"b": "f", "a": [1, 1]}', False),
        ('{"name": "f", "parameters": {"a": [1, 1]}}', False),
        ('{"name": "f", "parameters": {"a": [1, 2]}}', True),
        ('{"name": "f", "parameters": {"a": [1, 2], "b": 3}}', False),
        ('{"name": "g", "parameters": {"a": [1, 1]}}', True),
    ):
        matcher = grammar.matcher()
        assert (matcher.feed(text.encode()) == len(text.encode()) and matcher.accept(256)) is valid, text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_sets_are_checked_in_formats_that_write_arguments_one_by_one(name: str) -> None:
    vocabulary = compiler()[1]
    called = function("f", SETS["numbers"])
    shape = AnswerShape(tools=tool_format(name), functions=(called,), use="required", parallel=False)
    grammar = grammar_of(shape)
    for spare, taste in enumerate(WORST):
        budget = grammar.shortest + spare * 7
        ids = answer(grammar.matcher(budget), vocabulary, WORST[taste], budget, spare)
        parser = shape.parser(vocabulary.special)
        [(_, arguments)] = parse_marked(parser, marked(ids, vocabulary, parser)).arguments
        assert jsonschema_rs.is_valid(called.parameters, arguments), text_of(ids, vocabulary)


def test_no_comment_in_a_clients_grammar_says_where_sets_are() -> None:
    texts = {"type": "array", "items": {"type": "string"}, "x-personae-set": True}
    comment = f"// x-personae-sets {json.dumps({'schemas': [['', texts]]})}"
    spec = GrammarSpec("lark", f'{comment}\nstart: "[\\"a\\",\\"a\\"]"')
    matcher = compiler()[0].compile(spec).matcher()
    assert matcher.feed(b'["a","a"]') == 9
