"""The shape of an answer as a grammar: what it allows, and that its parser reads all of that."""

import json
import re

import jsonschema
import pytest
from answers import (
    FUNCTIONS,
    WEATHER,
    allows,
    marked,
    matcher_of,
    parse,
    parse_marked,
    random_answer,
    vocabulary,
    without_blanks,
    written,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from personae.errors import GrammarError
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import NAMES, tool_format

HERMES = tool_format("hermes")
THINK = reasoning_format("think")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPELLED = vocabulary((), (b"lo<tool", b"_call>{", b"ok</think", b'": "'))
TOKENS = vocabulary(TAGS, (b"<tool", b"_call>", b'": "'))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>{"name":"get","arguments":{"a": [1, {"x": "}]"}]}}</tool_call>'
JSON = Json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, True, "x")

both = pytest.mark.parametrize("vocabulary", [SPELLED, TOKENS], ids=["text", "tokens"])


@both
@pytest.mark.parametrize(
    ("use", "parallel", "answer", "allowed"),
    [
        ("auto", True, "hello", True),
        ("auto", True, "", True),
        ("auto", True, "a < b <tool", True),
        ("auto", True, CALL, True),
        ("auto", True, "Let me see.\n" + CALL + "\n" + OTHER, True),
        ("auto", True, CALL + "then text", False),
        ("auto", True, "hm <tool_call>oops</tool_call>", False),
        ("auto", True, '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', False),
        ("auto", True, '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>', False),
        ("auto", True, '<tool_call>{"name": "get_weather", "arguments": {"city": 3}}</tool_call>', False),
        ("auto", True, CALL.removesuffix("</tool_call>"), False),
        ("auto", False, CALL, True),
        ("auto", False, CALL + "\n" + OTHER, False),
        ("required", True, CALL, True),
        ("required", True, "\n" + CALL + OTHER, True),
        ("required", True, "hello", False),
        ("required", True, "", False),
        ("required", False, CALL + OTHER, False),
        ("none", True, "hello", True),
        ("none", True, CALL, False),
    ],
)
def test_tool_use_is_in_the_grammar(vocabulary, use, parallel, answer, allowed):
    shape = AnswerShape(tools=HERMES, functions=FUNCTIONS, use=use, parallel=parallel)
    assert allows(shape, answer, vocabulary) is allowed


@both
@pytest.mark.parametrize(
    ("thinks", "use", "answer", "allowed"),
    [
        (Thinks.OPEN, "required", "I should look.</think>\n\n" + CALL, True),
        (Thinks.OPEN, "required", CALL, False),
        (Thinks.OPEN, "required", "still thinking", False),
        (Thinks.OPEN, "required", "hm </think> hello", False),
        (Thinks.MAYBE, "required", "<think>\n" + CALL + "</think>", False),
        (Thinks.MAYBE, "required", "<think>hm</think>" + CALL, True),
        (Thinks.MAYBE, "required", CALL, True),
        (Thinks.MAYBE, "auto", "\n<think>hm</think>\n\nhello " + CALL, True),
        (Thinks.MAYBE, "auto", "hello", True),
        (Thinks.MAYBE, "auto", "<think>", False),
        (Thinks.NO, "required", CALL, True),
    ],
)
def test_the_grammar_of_the_answer_begins_where_reasoning_ends(vocabulary, thinks, use, answer, allowed):
    shape = AnswerShape(THINK, thinks, HERMES, FUNCTIONS, use)
    assert allows(shape, answer, vocabulary) is allowed


@both
def test_a_schema_binds_what_follows_the_reasoning_and_nothing_before(vocabulary):
    shape = AnswerShape(THINK, Thinks.OPEN, content=JSON)
    assert allows(shape, 'Not {"a": 1}, no.\n</think>\n{"a": 2}', vocabulary)
    assert not allows(shape, '{"a": 1}', vocabulary)
    assert not allows(shape, "hm</think>hello", vocabulary)
    assert parse(shape, 'Not {"a": 1}, no.\n</think>\n{"a": 2}', vocabulary.special).content == '{"a": 2}'


@both
def test_with_a_schema_beside_tools_the_answer_is_a_call_or_json(vocabulary):
    shape = AnswerShape(tools=HERMES, functions=FUNCTIONS, use="auto", content=JSON)
    assert allows(shape, CALL, vocabulary)
    assert allows(shape, '{"a": 2, "b": "x"}', vocabulary)
    assert not allows(shape, "hello", vocabulary)
    assert not allows(shape, '{"a": 2}' + CALL, vocabulary)
    quoted = '{"a": 2, "b": "' + CALL.replace('"', r"\"").replace("\n", " ") + '"}'
    assert parse(shape, quoted, {}).content == quoted, "a tag in a string of the answer is no call"


def test_a_tag_within_a_string_of_the_arguments_ends_nothing():
    shape = AnswerShape(tools=HERMES, functions=FUNCTIONS, use="required")
    call = CALL.replace("Köln", "</tool_call>")
    assert allows(shape, call, SPELLED)
    assert parse(shape, call).arguments == [("get_weather", {"city": "</tool_call>"})]


def test_letters_of_a_tag_are_text_where_the_tag_is_a_token():
    shape = AnswerShape(tools=HERMES, functions=FUNCTIONS, use="auto")
    parser = shape.parser(TOKENS.special)
    assert parse_marked(parser, "write <tool_call> first").content == "write <tool_call> first"
    matcher = matcher_of(shape, TOKENS)
    assert all(matcher.accept(byte) for byte in b"write <tool_call> first")


def test_special_tokens_that_the_grammar_does_not_name_are_never_allowed():
    shape = AnswerShape(THINK, Thinks.OPEN, HERMES, FUNCTIONS, "auto")
    matcher = matcher_of(shape, TOKENS)
    assert not matcher.accept(TOKENS.special["<tool_call>"]), "a call within reasoning"
    assert not matcher.accept(TOKENS.special["<think>"])
    assert matcher.accept(TOKENS.special["</think>"])
    assert not matcher.accept(TOKENS.special["</think>"])
    assert matcher.accept(TOKENS.special["<tool_call>"])


def test_a_strict_function_that_cannot_be_enforced_is_refused_by_its_field():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object"}, "uniqueItems": True}},
    }
    function = Function("f", schema, True, "tools[3].function.parameters")
    shape = AnswerShape(tools=HERMES, functions=(WEATHER, function), use="auto")
    with pytest.raises(GrammarError, match=r"uniqueItems|items") as refused:
        matcher_of(shape, SPELLED)
    assert refused.value.param == "tools[3].function.parameters"
    assert "/properties/a" in refused.value.message
    loose = AnswerShape(tools=HERMES, functions=(Function("f", schema, False, "x"),), use="required")
    assert allows(loose, '<tool_call>{"name": "f", "arguments": {"a": [{}]}}</tool_call>', SPELLED)
    assert not allows(loose, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', SPELLED)


# Their answers can be told from what was read, but for blanks.
PLAIN = [
    name
    for name, format in ((name, tool_format(name)) for name in NAMES)
    if not isinstance(format.arguments, KeyedArguments) and name not in ("kimi_k2", "harmony")
]
REASONING = {"harmony": reasoning_format("harmony"), "gemma4": reasoning_format("gemma4")}
SHAPES = [
    AnswerShape(reasoning, thinks, tool_format(name), FUNCTIONS, use, parallel)
    for name in NAMES
    for reasoning, thinks, use, parallel in [
        (None, Thinks.NO, "auto", True),
        (REASONING.get(name, THINK), Thinks.OPEN, "auto", False),
        (REASONING.get(name, THINK), Thinks.OPEN, "required", True),
    ]
]


def special_of(shape):
    """Every tag of the formats."""
    tags = re.findall(
        r"<[^\s<>]+>|\[[A-Z_]+\]", f"{shape.tools.texts} {shape.reasoning and shape.reasoning.texts}"
    )
    return tuple(dict.fromkeys(tags))


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.tools.name}-{shape.use}-{shape.thinks.name}"
)
@settings(max_examples=4, phases=[Phase.generate])  # shrinking a walk takes minutes
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 2**16), max_size=40))
def test_whatever_the_grammar_generates_parses_back_under_every_chunking(shape, tokens, seed, cuts):
    words = vocabulary(special_of(shape) if tokens else (), (b"<tool", b"_call>", b'": "', b"</thi"))
    ids = random_answer(shape, words, seed)
    parser = shape.parser(words.special)
    text = marked(ids, words, parser)
    parsed = parse_marked(parser, text, cuts)

    assert parsed.completed == len(parsed.calls)
    again = written(shape, parsed, parser)
    if shape.tools.name in PLAIN:
        assert without_blanks(again) == without_blanks(text)
    reread = parse_marked(shape.parser(words.special), again)
    assert (reread.reasoning, reread.arguments) == (parsed.reasoning, parsed.arguments)
    assert reread.content.strip() == parsed.content.strip()
    for name, arguments in parsed.calls:
        function = next(function for function in FUNCTIONS if function.name == name)
        jsonschema.validate(json.loads(arguments), function.parameters)
    assert parsed.calls or shape.use != "required"
    assert len(parsed.calls) <= 1 or shape.parallel
    assert parse_marked(shape.parser(words.special), text, range(len(text))) == parsed, (
        "character by character"
    )
    assert parse_marked(shape.parser(words.special), text) == parsed, "at once"
