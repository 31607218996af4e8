"""The families' formats: found from their templates, and read as their models write them."""

import re
from pathlib import Path

import pytest
from answers import FUNCTIONS, allows, parse, vocabulary

from personae.api.chat_template import ChatTemplate
from personae.api.conversation import AssistantMessage, FunctionCall, ToolCall, ToolMessage, UserMessage
from personae.errors import GrammarError, ModelLoadError
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import find_reasoning_format, reasoning_format
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.structure.parser import CallPiece
from personae.grammar.tools.arguments import KeyedArguments
from personae.grammar.tools.function import Function
from personae.grammar.tools.registry import NAMES, find_tool_format, tool_format

ARGUMENTS = '{"city": "Köln"}'
# As the models' own templates write an answer with two calls.
WRITTEN = {
    "hermes": f"""<tool_call>
{{"name": "get_weather", "arguments": {ARGUMENTS}}}
</tool_call>
<tool_call>
{{"name": "get", "arguments": {{}}}}
</tool_call>""",
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "get", "arguments": {}}]',
    "mistral_v11": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get[ARGS]{{}}",
    "deepseek_v3": f"""<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{ARGUMENTS}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>get
```json
{{}}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "get", "arguments": {}}]',
    "qwen3_coder": """<tool_call>
<function=get_weather>
<parameter=city>
Köln
</parameter>
</function>
</tool_call>
<tool_call>
<function=get>
</function>
</tool_call>""",
    "glm45": """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
</tool_call>
<tool_call>get
</tool_call>""",
    "minimax_m2": """<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Köln</parameter>
</invoke>
<invoke name="get">
</invoke>
</minimax:tool_call>""",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.get:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "phi4": f'functools[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "get", "arguments": {}}]',
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
    "pythonic": '[get_weather(city="Köln"), get()]',
    "olmo3": '<function_calls>get_weather(city="Köln")\nget()</function_calls>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Köln"), get()]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>}<tool_call|>'
    "<|tool_call>call:get{}<tool_call|>",
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Köln<escape>}<end_function_call>"
    "<start_function_call>call:get{}<end_function_call>",
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
    '{"name": "get", "parameters": {}}',
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_is_allowed_and_read(name):
    shape = AnswerShape(tools=tool_format(name), functions=FUNCTIONS, use="auto")
    answer = WRITTEN[name]
    assert allows(shape, answer, vocabulary())
    parsed = parse(shape, answer)
    expected = [("get_weather", {"city": "Köln"}), ("get", {})][: 1 if shape.tools.single else 2]
    assert parsed.arguments == expected
    assert (parsed.completed, parsed.content) == (len(expected), "")
    lead = parse(shape, "So: " + answer)
    assert (lead.completed, lead.content) == ((2, "So:") if shape.tools.anywhere else (0, "So: " + answer))


@pytest.mark.parametrize("name", [name for name in NAMES if not tool_format(name).single])
def test_a_section_that_breaks_off_keeps_its_complete_calls(name):
    shape = AnswerShape(tools=tool_format(name), functions=FUNCTIONS, use="auto")
    parsed = parse(shape, WRITTEN[name][: WRITTEN[name].rindex("get")])
    assert parsed.completed == len(parsed.calls) == 1


def test_braces_are_no_calls_where_a_call_begins_with_a_brace():
    shape = AnswerShape(tools=tool_format("llama3_json"), functions=FUNCTIONS, use="auto")
    assert parse(shape, '{"a": {"b": 1}}').content == '{"a": {"b": 1}}'
    assert parse(shape, "for (;;) {}").content == "for (;;) {}"
    assert not allows(shape, '{"a": 1}', vocabulary())
    assert allows(shape, "for (;;) {}", vocabulary())


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('<tool_call>\\n{"name": <name>, "arguments": <args>}</tool_call>', "hermes", None),
        ("[TOOL_CALLS] [/INST]", "mistral", None),
        ("[TOOL_CALLS]{{ name }}[ARGS][THINK][/THINK]", "mistral_v11", "bracket_think"),
        ("<think><｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "think"),
        ("<｜tool▁calls▁begin｜></think>", "deepseek_v31", "think"),
        ("<tool_call>\n<function=f>\n<parameter=p></think>", "qwen3_coder", "think"),
        ("<tool_call>{f}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value></think>", "glm45", "think"),
        ("<minimax:tool_call>", "minimax_m2", None),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|channel|>analysis<|message|> to=functions.", "harmony", "harmony"),
        ("<|tool_call>call:f{}<tool_call|><|channel>thought", "gemma4", "gemma4"),
        ("<start_function_call>", "function_gemma", None),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4", None),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
        ("<function_calls>", "olmo3", None),
        ("<|tool_call_start|>[", "lfm2", None),
        ("{{ messages }}", None, None),
    ],
)
def test_the_formats_are_found_from_the_template(template, tools, reasoning):
    found, thinking = find_tool_format(template), find_reasoning_format(template)
    assert (found and found.name) == tools
    assert (thinking and thinking.name) == reasoning


def test_an_unknown_name_is_refused_with_those_that_there_are():
    for format_of in (tool_format, reasoning_format):
        with pytest.raises(ModelLoadError, match=r"there are \w+, \w+"):
            format_of("os")


def shared_templates():
    for parent in Path(__file__).resolve().parents:
        if (folder := parent / "shared" / "data" / "tokenizers" / "chat_templates").is_dir():
            return {path.stem: path.read_text() for path in folder.glob("*.jinja")}
    return {}


TEMPLATES = shared_templates()
EXPECTED = {
    "qwen2_5": ("hermes", None),
    "qwen3": ("hermes", "think"),
    "qwen3_instruct_2507": ("hermes", None),
    "llama3": (None, None),
    "llama3_1": ("llama3_json", None),
    "llama3_2": ("llama3_json", None),
    "deepseekv3": ("deepseek_v3", "think"),
    "gemma3": (None, None),
    "phi3": (None, None),
    "gptoss": ("harmony", "harmony"),
    "glm4moe": ("glm45", "think"),
    "qwen3_6": ("qwen3_coder", "think"),
    "qwen3_5_nothink": ("qwen3_coder", "think"),
    "nemotron_3_nano": ("qwen3_coder", "think"),
    "nemotron_3_ultra": ("qwen3_coder", "think"),
    "lfm2_2_5": ("lfm2", "think"),
    "diffusion_gemma": ("gemma4", "gemma4"),
}


CALLS = [
    ToolCall(FunctionCall("get_weather", '{"city": "Köln", "days": 3}'), id="functions.get_weather:0"),
    ToolCall(FunctionCall("get", "{}"), id="functions.get:1"),
]
# Reasoning that the template leaves empty, and what ends an answer.
AROUND = re.compile(
    r"^\s*(?:<think>)?\s*</think>|(?:<\|im_end\|>|<\|eot_id\|>|<\|call\|>|<\|observation\|>|</s>).*",
    re.DOTALL,
)
# One of the list's does not say what a message without content is; LFM2's writes strings in single quotes.
UNLIKE = ("deepseekv3", "lfm2_2_5")


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in UNLIKE])
def test_calls_as_real_templates_write_them_are_allowed_and_read(name):
    """The models were trained on what their templates write."""
    format = find_tool_format(TEMPLATES[name])
    if format is None:
        return
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "", "eos_token": "</s>"})
    single = format.single or "only supports single" in template.source
    calls = CALLS[:1] if single else CALLS
    user, result = UserMessage("hi"), ToolMessage("RESULT", calls[0].id)
    tools = [
        {"type": "function", "function": {"name": one.name, "description": "x", "parameters": one.parameters}}
        for one in FUNCTIONS
    ]
    whole = template.render(
        [user, AssistantMessage(tool_calls=calls), result], tools=tools, add_generation_prompt=False
    )
    prompt = template.render([user], tools=tools)
    same = next(at for at, pair in enumerate(zip(whole, prompt + "\0", strict=False)) if pair[0] != pair[1])
    answer = whole[same:].partition("RESULT")[0]
    answer = AROUND.sub("", answer).partition("<|tool_response>")[0]
    reasoning = find_reasoning_format(TEMPLATES[name])
    shape = AnswerShape(reasoning, Thinks.MAYBE if reasoning else Thinks.NO, format, FUNCTIONS, "auto")
    assert allows(shape, answer, vocabulary()), answer
    expected = [("get_weather", {"city": "Köln", "days": 3}), ("get", {})]
    parsed = parse(shape, answer)
    assert (parsed.arguments, parsed.content) == (expected[: len(calls)], "")


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
@pytest.mark.parametrize("name", EXPECTED)
def test_real_templates_are_recognised(name):
    found, thinking = find_tool_format(TEMPLATES[name]), find_reasoning_format(TEMPLATES[name])
    assert (found and found.name, thinking and thinking.name) == EXPECTED[name]


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


def test_kimis_numbers_become_the_ids_that_its_template_writes():
    shape = AnswerShape(tools=tool_format("kimi_k2"), functions=FUNCTIONS, use="auto")
    parser = shape.parser({})
    pieces = [piece for piece in parser.push(WRITTEN["kimi_k2"]).pieces if isinstance(piece, CallPiece)]
    assert [(piece.name, piece.number) for piece in pieces] == [("get_weather", "0"), ("get", "1")]


HARMONY = AnswerShape(reasoning_format("harmony"), Thinks.MAYBE, tool_format("harmony"), FUNCTIONS, "auto")
START, THOUGHT = "<|start|>assistant", "<|channel|>analysis<|message|>hm<|end|>"
ASIDE, FINAL = "<|channel|>commentary<|message|>I look.<|end|>", "<|channel|>final<|message|>Rain."
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")


@pytest.mark.parametrize("special", [(), HARMONY_TAGS], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "calls"),
    [
        (FINAL, "", "Rain.", 0),
        (THOUGHT + START + FINAL, "hm", "Rain.", 0),
        (THOUGHT + START + THOUGHT + START + FINAL, "hm\nhm", "Rain.", 0),
        (WRITTEN["harmony"], "", "", 1),
        (f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}", "", "", 1),
        (THOUGHT + START + WRITTEN["harmony"], "hm", "", 1),
        (THOUGHT + START + ASIDE + START + WRITTEN["harmony"], "hm", "I look.", 1),
        (ASIDE + START + FINAL, "", "I look.\nRain.", 0),
    ],
)
def test_harmonys_channels_are_reasoning_text_and_calls(special, answer, reasoning, content, calls):
    words = vocabulary(special)
    assert allows(HARMONY, answer, words)
    for cuts in ((), range(len(answer))):
        parsed = parse(HARMONY, answer, words.special, cuts)
        assert (parsed.reasoning, parsed.content, parsed.completed) == (reasoning, content, calls)


def test_harmonys_choice_of_tools_and_bound_text_are_in_the_grammar():
    def variant(use, content=None):
        return AnswerShape(HARMONY.reasoning, Thinks.MAYBE, HARMONY.tools, FUNCTIONS, use, True, content)

    words = vocabulary(HARMONY_TAGS)
    thought = THOUGHT + START
    assert not allows(variant("required"), thought + FINAL, words)
    assert allows(variant("required"), thought + WRITTEN["harmony"], words)
    assert not allows(variant("none"), thought + WRITTEN["harmony"], words)
    assert allows(variant("none"), thought + FINAL, words)
    bound = variant("auto", Json({"type": "integer"}, True, "x"))
    assert allows(bound, thought + "<|channel|>final<|message|>3", words)
    assert not allows(bound, thought + FINAL, words)
    assert allows(bound, thought + WRITTEN["harmony"], words)
