"""The formats that write a call argument by argument: what a schema says of each holds there, too."""

import re

import pytest
from answers import allows, parse, vocabulary

from personae.errors import GrammarError
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import NAMES, tool_format


def typed(**properties):
    """A function of these parameters, all but the first of them optional."""
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return Function("f", schema | {"additionalProperties": False}, True, "tools[0].function.parameters")


TYPED = typed(
    text={"type": "string"},
    count={"type": "integer", "minimum": 3},
    unit={"enum": ["C", "F"]},
    flag={"type": "boolean"},
    maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
    mixed={"type": ["string", "integer"]},
    many={"type": "array", "items": {"type": "boolean"}},
    short={"type": "string", "maxLength": 3},
)


ALL = {
    "text": 'say "x" = 1,\n</p>',
    "count": 3,
    "unit": "F",
    "flag": True,
    "maybe": None,
    "mixed": "3",
    "many": [True, False],
    "short": "abc",
}


def xml(before, between, after):
    values = ['say "x" = 1,\n</p>', "3", "F", "true", "null", '"3"', "[true, false]", '"abc"']
    return "".join(before + key + between + value + after for key, value in zip(ALL, values, strict=True))


PYTHON = (
    r'f(text="say \"x\" = 1,\n</p>", count=3, unit="F", flag=True, maybe=None, mixed="3", '
    'many=[true, false], short="abc")'
)


GEMMA = (
    'f{text:@say "x" = 1,\n</p>@,count:3,unit:@F@,flag:true,maybe:null,mixed:@3@,'
    'many:[true, false],short:"abc"}'
)


KEYED = {
    "qwen3_coder": "<tool_call>\n<function=f>"
    + xml("\n<parameter=", ">\n", "\n</parameter>")
    + "\n</function>\n</tool_call>",
    "glm45": "<tool_call>f"
    + xml("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
    + "\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">'
    + xml('\n<parameter name="', '">', "</parameter>")
    + "\n</invoke>\n</minimax:tool_call>",
    "pythonic": f"[{PYTHON}]",
    "olmo3": f"<function_calls>\n{PYTHON}\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "gemma4": f"<|tool_call>call:{GEMMA.replace('@', '<|' + chr(34) + '|>')}<tool_call|>",
    "function_gemma": f"<start_function_call>call:{GEMMA.replace('@', '<escape>')}<end_function_call>",
}


def keyed():
    return [name for name in NAMES if isinstance(tool_format(name).arguments, KeyedArguments)]


def test_there_is_an_example_of_every_format_that_writes_arguments_one_by_one():
    assert sorted(keyed()) == sorted(KEYED)


@pytest.mark.parametrize("name", KEYED)
def test_every_type_is_written_as_its_format_has_it_and_read_back(name):
    shape = AnswerShape(tools=tool_format(name), functions=(TYPED,), use="required")
    assert allows(shape, KEYED[name], vocabulary())
    for cuts in ((), range(len(KEYED[name]))):
        parsed = parse(shape, KEYED[name], cuts=cuts)
        assert (parsed.arguments, parsed.completed, parsed.content) == ([("f", ALL)], 1, "")
    special = vocabulary(("<tool_call>", "</tool_call>", '<|"|>', "<escape>", "</parameter>", "<arg_value>"))
    assert allows(shape, KEYED[name], special)
    assert parse(shape, KEYED[name], special.special).arguments == [("f", ALL)]


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize(
    ("good", "bad"),
    [("3", "2"), ("[true, false]", "[3]"), ("abc", "abcd"), ("F", "K")],
)
def test_what_a_schema_says_of_a_parameter_is_enforced(name, good, bad):
    shape = AnswerShape(tools=tool_format(name), functions=(TYPED,), use="required")
    text = KEYED[name]
    at = (
        text.rindex(good)
        if good == "F" or len(good) > 1
        else text.index("count") + text[text.index("count") :].index(good)
    )
    assert allows(shape, text, vocabulary())
    assert not allows(shape, text[:at] + bad + text[at + len(good) :], vocabulary())


@pytest.mark.parametrize("name", KEYED)
def test_parameters_that_are_not_required_may_be_left_out_and_others_not_be_put_in(name):
    style = tool_format(name).arguments

    def call(*keys):
        pairs = []
        for key in keys:
            value = style.quote + "x" + style.quote if style.raw or style.quote else '"x"'
            pairs.append(style.before_key + key + style.after_key + value + style.after_value)
        tools = tool_format(name)
        inside = tools.before_name + "f" + tools.after_name + style.between.join(pairs)
        return tools.open + inside + tools.after_arguments + tools.close

    texts = {key: {"type": "string"} for key in "abc"}
    for required in ((), ("b",), ("a", "c")):
        schema = {"type": "object", "properties": texts, "required": required, "additionalProperties": False}
        shape = AnswerShape(
            tools=tool_format(name), functions=(Function("f", schema, True, "x"),), use="required"
        )
        for keys in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
            assert allows(shape, call(*keys), vocabulary()) is (set(required) <= set(keys)), keys
            if set(required) <= set(keys):
                assert parse(shape, call(*keys)).arguments == [("f", dict.fromkeys(keys, "x"))]
        assert not allows(shape, call("a", "b", "c", "d"), vocabulary())


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "minProperties": 1},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string"}}},
        {"properties": {"a b": {"type": "string"}}},
        {"required": ["a"], "additionalProperties": False},
    ],
    ids=str,
)
def test_a_function_that_cannot_be_written_argument_by_argument_is_refused(name, schema):
    function = Function("f", {"type": "object", **schema}, True, "tools[0].function.parameters")
    shape = AnswerShape(tools=tool_format(name), functions=(function,), use="auto")
    with pytest.raises(GrammarError) as refused:
        shape.spec()
    assert refused.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("name", KEYED)
def test_what_a_function_comes_to_grows_with_its_schema_and_not_faster(name):
    doubling = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(24)}
    doubling["a24"] = {"type": "string"}
    union = {"properties": {"x": {"$ref": "#/$defs/a0"}}, "required": ["x"], "$defs": doubling}
    apart = {"properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(80)}, "required": ["p0"]}
    apart["$defs"] = {f"d{i}": {"enum": ["x" * 1000 + str(i)]} for i in range(80)}
    for schema in (union, apart):
        function = Function("f", {"type": "object", "additionalProperties": False, **schema}, True, "x")
        shape = AnswerShape(tools=tool_format(name), functions=(function,), use="required")
        assert len(shape.spec().source) < 400_000


def test_parameters_any_of_which_may_come_first_may_not_be_too_many_where_they_are_listed():
    listed = {f"p{i}": {} for i in range(400)}
    for required in ([], ["p0"]):
        schema = {"type": "object", "properties": listed, "required": required, "additionalProperties": False}
        function = Function("f", schema, True, "x")
        shape = AnswerShape(tools=tool_format("pythonic"), functions=(function,), use="required")
        if required:
            assert len(shape.spec().source) < 400_000
            continue
        with pytest.raises(GrammarError, match="Make one of the first required") as refused:
            shape.spec()
        assert refused.value.code == "grammar_too_complex"


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "pythonic", "hermes"])
def test_references_into_definitions_are_followed(name):
    schema = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "spot": {"$ref": "#/$defs/Spot"}},
        "required": ["unit", "spot"],
        "additionalProperties": False,
        "$defs": {
            "Unit": {"enum": ["C", "F"], "type": "string"},
            "Spot": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    call = {
        "qwen3_coder": "<tool_call><function=f><parameter=unit>\n@\n</parameter><parameter=spot>\n"
        '{"x": 1}\n</parameter></function></tool_call>',
        "gemma4": '<|tool_call>call:f{unit:<|"|>@<|"|>,spot:{"x": 1}}<tool_call|>',
        "pythonic": '[f(unit="@", spot={"x": 1})]',
        "hermes": '<tool_call>{"name": "f", "arguments": {"unit": "@", "spot": {"x": 1}}}</tool_call>',
    }[name]
    shape = AnswerShape(
        tools=tool_format(name), functions=(Function("f", schema, True, "x"),), use="required"
    )
    assert allows(shape, call.replace("@", "C"), vocabulary())
    assert not allows(shape, call.replace("@", "K"), vocabulary())
    assert parse(shape, call.replace("@", "C")).arguments == [("f", {"unit": "C", "spot": {"x": 1}})]


NAMED = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=@>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>@</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="@">3</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "pythonic": "[f(@=3)]",
    "olmo3": "<function_calls>\nf(@=3)\n</function_calls>",
    "lfm2": "<|tool_call_start|>[f(@=3)]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:f{@:3}<tool_call|>",
    "function_gemma": "<start_function_call>call:f{@:3}<end_function_call>",
}


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize(
    "key", ["meta:count", "a=b", "a b", "a>b", 'a"b', "}a", "a{", "a,b", "a-b", "$a", "a"]
)
def test_a_parameter_is_read_back_under_its_name_or_refused(name, key):
    """A colon is what Gemma writes between a name and its value."""
    function = typed(**{key: {"type": "integer"}, "z": {"type": "integer"}})
    shape = AnswerShape(tools=tool_format(name), functions=(function,), use="required")
    text = NAMED[name].replace("@", key)
    if not re.fullmatch(tool_format(name).arguments.key, key):
        assert key != "a"
        with pytest.raises(GrammarError, match=re.escape(repr(key))):
            allows(shape, text, vocabulary())
        return
    assert allows(shape, text, vocabulary())
    assert parse(shape, text).arguments == [("f", {key: 3})]
