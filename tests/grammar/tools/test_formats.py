"""The families' formats: found from their templates, and read as their models write them."""

from pathlib import Path

import pytest
from answers import FUNCTIONS, allows, parse, vocabulary

from personae.errors import ModelLoadError
from personae.grammar.reasoning.registry import find_reasoning_format, reasoning_format
from personae.grammar.structure.answer import AnswerShape
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
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
    '{"name": "get", "parameters": {}}',
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_is_allowed_and_read(name):
    shape = AnswerShape(tools=tool_format(name), functions=FUNCTIONS, use="auto")
    answer = WRITTEN[name]
    assert allows(shape, answer, vocabulary())
    parsed = parse(shape, answer)
    assert parsed.arguments == [("get_weather", {"city": "Köln"}), ("get", {})]
    assert (parsed.completed, parsed.content) == (2, "")
    lead = parse(shape, "So: " + answer)
    assert (lead.completed, lead.content) == ((2, "So:") if shape.tools.anywhere else (0, "So: " + answer))


@pytest.mark.parametrize("name", NAMES)
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
    "gptoss": (None, None),
    "glm4moe": (None, "think"),
    "qwen3_6": (None, "think"),
    "nemotron_3_nano": (None, "think"),
}


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
@pytest.mark.parametrize("name", EXPECTED)
def test_real_templates_are_recognised(name):
    found, thinking = find_tool_format(TEMPLATES[name]), find_reasoning_format(TEMPLATES[name])
    assert (found and found.name, thinking and thinking.name) == EXPECTED[name]
