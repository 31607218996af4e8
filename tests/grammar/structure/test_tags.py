"""Structural tags, and the other ways to bind a part of an answer: what they allow."""

import pytest
from answers import allows, parse, vocabulary

from personae.errors import GrammarError, UnsupportedParameter
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Concat, Lark, OneOf, Regex, Verbatim
from personae.grammar.structure.escaped import escaped_lark
from personae.grammar.structure.syntax import grammar_element
from personae.grammar.structure.tags import structural_tag
from personae.grammar.tools.custom import InputReader, custom_function
from personae.grammar.tools.registry import tool_format

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 3}}
TEXT = {"type": "any_text"}


def const(value):
    return {"type": "const_string", "value": value}


def tag(name, content=INTEGER, end=None):
    return {"type": "tag", "begin": f"<{name}>", "content": content, "end": end or f"</{name}>"}


def triggered(**extra):
    return {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("a"), tag("b", TEXT)], **extra}


def separated(**extra):
    tags = [tag("a"), tag("b", {"type": "regex", "pattern": "x+"})]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **extra}


@pytest.mark.parametrize(
    ("format", "allowed", "refused"),
    [
        (const("a b"), ["a b"], ["ab", "a  b", ""]),
        (INTEGER, ["3", "40"], ["2", "x"]),
        (TEXT, ["", "anything"], []),
        ({**TEXT, "excludes": ["no"]}, ["n", "yes"], ["no", "anon"]),
        ({"type": "regex", "pattern": "a+"}, ["aa"], ["", "b"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x", ""]),
        ({"type": "sequence", "elements": [const("a"), INTEGER, const("z")]}, ["a5z"], ["a2z", "a5"]),
        ({"type": "sequence", "elements": [TEXT, const("."), const("z")]}, ["hm.z"], ["hm", "hm.", "a.b.z"]),
        ({"type": "or", "elements": [const("a"), INTEGER]}, ["a", "3"], ["a3", ""]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
        ({"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
        (tag("t"), ["<t>7</t>"], ["<t>7", "<t></t>", "7"]),
        (tag("t", TEXT, [".", "!"]), ["<t>hm!", "<t>."], ["<t>"]),
        (
            triggered(),
            ["", "free", "x <a>3</a> y <b>a > b</b>", "<b></b>"],
            ["<", "a < b", "<a>1</a>", "<b>", "<c>"],
        ),
        (triggered(at_least_one=True), ["<a>3</a>", "<a>3</a> more"], ["", "text <a>3</a>"]),
        (triggered(stop_after_first=True), ["no", "so <a>3</a>"], ["<a>3</a> more"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<a>3</a>"], ["", "<a>3</a><a>3</a>"]),
        (triggered(excludes=["!"]), ["a"], ["a!", "!<a>3</a>"]),
        (separated(), ["", "<a>3</a>", "<a>3</a>, <b>x</b>"], ["<a>3</a>,", "<a>3</a><b>x</b>"]),
        (separated(at_least_one=True), ["<b>x</b>"], [""]),
        (separated(stop_after_first=True), ["", "<a>3</a>"], ["<a>3</a>, <b>x</b>"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("special", [(), ("<a>", "</b>", "<t>")], ids=["text", "tokens"])
def test_a_structural_tag_allows_what_it_says(format, allowed, refused, special):
    words = vocabulary(special, (b"a</", b"< "))
    if special and format.get("triggers"):
        return  # a trigger within a token is never seen
    element = structural_tag({"type": "structural_tag", "format": format}, "x")
    shape = AnswerShape(content=element)
    assert [text for text in allowed if not allows(shape, text, words)] == []
    assert [text for text in refused if allows(shape, text, words)] == []


@pytest.mark.parametrize(
    ("format", "error"),
    [
        ({"type": "token", "token": 3}, UnsupportedParameter),
        ({**TEXT, "max_tokens": 3}, UnsupportedParameter),
        ({"type": "star", "content": TEXT}, GrammarError),
        ({"type": "sequence", "elements": [TEXT, INTEGER]}, GrammarError),
        ({"type": "or", "elements": []}, GrammarError),
        (triggered(triggers=["<x"]), GrammarError),
        ({"type": "repeat", "min": 3, "max": 2, "content": const("a")}, GrammarError),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused_by_its_field(format, error):
    with pytest.raises(error) as refused:
        structural_tag({"type": "structural_tag", "format": format}, "response_format")
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("way", ["ends", "at least one", "schemas"])
def test_tags_that_multiply_as_they_nest_are_refused_before_they_are_written(way):
    format = {"type": "json_schema", "json_schema": {"const": "x" * (300_000 if way == "schemas" else 1)}}
    for level in range(4 if way == "ends" else 16):
        tag = {"type": "tag", "begin": f"<{level}>", "content": format, "end": f"</{level}>"}
        if way == "ends":
            format = {**tag, "end": [f"</{number}>" for number in range(128)]}
        elif way == "at least one":
            format = triggered(triggers=["<"], tags=[tag], at_least_one=True)
        else:
            format = {"type": "sequence", "elements": [tag, tag]}
    with pytest.raises(GrammarError) as refused:
        structural_tag({"type": "structural_tag", "format": format}, "response_format")
    assert (refused.value.param, refused.value.code) == ("response_format", "grammar_too_complex")


@pytest.mark.parametrize(
    ("element", "allowed", "refused"),
    [
        (Regex(r"^[a-z]+ \d$", "x"), ["ab 1"], ["ab", " ab 1"]),
        (OneOf((Verbatim("a b"), Verbatim("c"))), ["a b", "c"], ["ab"]),
        (grammar_element('start: "x" inner\ninner: /[0-9]+/ | "(" inner ")"', "x"), ["x((1))"], ["x(1"]),
        (grammar_element('root ::= "yes" | "no"', "x"), ["yes", "no"], ["maybe"]),
    ],
    ids=str,
)
def test_anything_can_bind_what_follows_the_reasoning(element, allowed, refused):
    shape = AnswerShape(reasoning_format("think"), Thinks.OPEN, content=element)
    words = vocabulary()
    assert [text for text in allowed if not allows(shape, "hm</think>\n\n" + text, words)] == []
    assert [text for text in refused if allows(shape, "hm</think>\n\n" + text + "?", words)] == []
    alone = AnswerShape(content=element)
    assert [text for text in allowed if not allows(alone, text, words)] == []
    assert [text for text in refused if allows(alone, text, words)] == []


@pytest.mark.parametrize("element", [Regex("(", "guided_regex"), Lark("start: nobody", "guided_regex")])
def test_a_part_that_cannot_be_compiled_is_refused_by_its_field(element):
    with pytest.raises(GrammarError) as refused:
        allows(AnswerShape(content=Concat((Verbatim("a"), element))), "a", vocabulary())
    assert refused.value.param == "guided_regex"


CODE = r"""
start: line (NL line)*
line: WORD "=" (/[0-9]+/ | /"[^"]*"/ | "\"q\"")  // a comment "x"
NL: "\n"
WORD: "a".."f"
"""


def test_a_grammar_holds_within_a_json_string():
    function = custom_function("f", Lark(CODE, "x"), "x")
    shape = AnswerShape(tools=tool_format("hermes"), functions=(function,), use="required")
    for text, allowed in {
        "a=1": True,
        r"a=1\nb=22": True,
        r"c=\"q\"": True,
        "g=1": False,
        "a=": False,
    }.items():
        call = f'<tool_call>{{"name": "f", "arguments": {{"input": "{text}"}}}}</tool_call>'
        assert allows(shape, call, vocabulary()) is allowed, text
    with pytest.raises(GrammarError, match="'~'"):
        escaped_lark("start: ~/a/", "x")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=input>\n@\n</parameter></function></tool_call>"),
        ("glm45", "<tool_call>f<arg_key>input</arg_key><arg_value>@</arg_value></tool_call>"),
        ("gemma4", '<|tool_call>call:f{input:<|"|>@<|"|>}<tool_call|>'),
        ("pythonic", '[f(input="@")]'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"input": "@"}}</tool_call>'),
    ],
)
def test_a_custom_tools_input_is_bound_in_every_way_of_writing(name, call):
    words = vocabulary()
    for text in (Regex("[a-c]+", "x"), Lark("start: /[a-c]+/", "x"), None):
        function = custom_function("f", text, "x")
        shape = AnswerShape(tools=tool_format(name), functions=(function,), use="required")
        assert allows(shape, call.replace("@", "abc"), words)
        assert allows(shape, call.replace("@", "xyz"), words) is (text is None)
        assert parse(shape, call.replace("@", "abc")).arguments == [("f", {"input": "abc"})]


@pytest.mark.parametrize("text", ["", "plain", 'a "b" \\ \n\t \x01', "ü 😀 \u2028", "\\u0041 \\\\"])
@pytest.mark.parametrize("ascii", [False, True])
def test_the_input_is_read_from_arguments_in_any_pieces(text, ascii):
    import json

    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    for size in (1, 2, 3, 7, 500):
        reader = InputReader()
        pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        assert "".join(map(reader.push, pieces)) == text
