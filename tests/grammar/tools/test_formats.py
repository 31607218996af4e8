"""The families' formats: found from their templates, and read as their models write them."""

import re
from pathlib import Path

import pytest
from answers import FUNCTIONS, allows, parse, vocabulary

from personae.api.templates.template import ChatTemplate
from personae.api.wire.conversation import (
    AssistantMessage,
    FunctionCall,
    PastToolCall,
    ToolMessage,
    UserMessage,
)
from personae.errors import ModelLoadError
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import find_reasoning_format, reasoning_format
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.structure.parser import CallPiece
from personae.grammar.tools.registry import GENERIC, NAMES, find_tool_format, tool_format

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


@pytest.mark.parametrize("name", [*NAMES, GENERIC])
def test_calls_that_the_server_writes_are_allowed_and_read(name):
    shape = AnswerShape(tools=tool_format(name), functions=FUNCTIONS, use="auto")
    calls = [("get_weather", {"city": 'Kö"ln'}), ("get", {})][: 1 if shape.tools.single else 2]
    written = shape.tools.written(calls)
    assert allows(shape, written, vocabulary())
    assert parse(shape, written).arguments == calls


def test_text_stands_for_an_object_where_the_format_has_one():
    assert (
        tool_format("hermes").written([("f", "{1")])
        == '<tool_call>{"name": "f", "arguments": {1}</tool_call>'
    )
    assert "<parameter=arguments>\n{1\n</parameter>" in tool_format("qwen3_coder").written([("f", "{1")])


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
        with pytest.raises(ModelLoadError, match=r"The formats are \w+, \w+"):
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
    PastToolCall(FunctionCall("get_weather", '{"city": "Köln", "days": 3}'), id="functions.get_weather:0"),
    PastToolCall(FunctionCall("get", "{}"), id="functions.get:1"),
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
