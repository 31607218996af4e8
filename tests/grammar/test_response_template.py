"""Formats out of Hugging Face's response templates, against transformers' own reader of them."""

import json

import pytest
from answers import FUNCTIONS, allows, parse, vocabulary
from fake_engine import byte_tokenizer
from transformers.utils.chat_parsing import parse_response

from personae.api.family import Family
from personae.engine.tokens import Tokenizer
from personae.grammar.reasoning.format import Thinks
from personae.grammar.response_template import imported_reasoning, imported_tools
from personae.grammar.structure.answer import AnswerShape

THINKING = {"open": "<thought>", "close": "</thought>"}
CALL = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "repeats": True,
    "transform": {"type": "function", "function": "{content}"},
}


def template(**fields):
    return {"start_anchor": "<|assistant|>", "fields": {**fields, "content": {}}}


ONE_BY_ONE = template(reasoning_content=THINKING, tool_calls=CALL)
RENAMED = template(
    thinking={"open": ["<thought>\n", "<thought>"], "close": "</thought>"},
    tool_calls=CALL
    | {
        "transform": {
            "type": "function",
            "function": {"name": "{content.tool}", "arguments": "{content.parameters}"},
        }
    },
)
LIST = template(
    reasoning=THINKING,
    tool_calls={
        "open": "<calls>",
        "close": "</calls>",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{args}"}},
        "transform_each": True,
    },
)
WRITTEN = [
    (
        ONE_BY_ONE,
        '<thought>hm</thought>\n<call>{"name": "get_weather", "arguments": {"city": "Köln"}}</call>'
        '<call>\n{"name": "get", "arguments": {}}\n</call>',
    ),
    (
        RENAMED,
        '<thought>\nhm</thought><call>{"tool": "get_weather", "parameters": {"city": "Köln"}}</call>\n'
        '<call>{"tool": "get", "parameters": {}}</call>',
    ),
    (
        LIST,
        '<thought>hm</thought><calls>[{"name": "get_weather", "args": {"city": "Köln"}}, '
        '{"name": "get", "args": {}}]</calls>',
    ),
]


@pytest.mark.parametrize(("described", "answer"), WRITTEN, ids=["one by one", "renamed", "list"])
def test_an_answer_is_bound_and_read_as_transformers_reads_it(described, answer):
    truth = parse_response(answer, described, prefix="<|assistant|>")
    reasoning, tools = imported_reasoning(described), imported_tools(described)
    shape = AnswerShape(reasoning, Thinks.MAYBE, tools, FUNCTIONS, "auto")
    assert allows(shape, answer, vocabulary())
    assert not allows(shape, answer.replace("Köln", '", "x": "'), vocabulary())
    for cuts in ((), range(len(answer))):
        parsed = parse(shape, answer, cuts=cuts)
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in truth["tool_calls"]]
        assert parsed.arguments == calls
        said = next(truth[name] for name in ("reasoning_content", "thinking", "reasoning") if name in truth)
        assert parsed.reasoning == said
        assert (parsed.content, parsed.completed) == ("", 2)


@pytest.mark.parametrize(
    "described",
    [
        None,
        "text",
        {},
        {"fields": []},
        template(tool_calls={}),
        template(tool_calls=CALL | {"content": "xml-inline"}),
        template(tool_calls=CALL | {"content_args": {"unquoted_keys": True}}),
        template(tool_calls={**CALL, "open": None, "open_pattern": "<f=(?P<name>.*)>"}),
        template(tool_calls=CALL | {"transform": "{content}"}),
        template(tool_calls=CALL | {"transform": {"function": {"name": "{name}", "arguments": "{content}"}}}),
        template(reasoning_content={"open_pattern": "<.*>", "close": "</x>"}),
    ],
    ids=str,
)
def test_what_cannot_be_bound_is_not_taken(described):
    assert imported_tools(described) is None
    assert imported_reasoning(described) is None


def test_it_is_read_from_the_tokenizers_config_and_the_chat_template_comes_first(tmp_path):
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    config = {"response_template": ONE_BY_ONE, "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    family = Family.of(Tokenizer.load(tmp_path))
    assert family.tools is not None
    assert family.tools.trigger == "<call>"
    assert family.reasoning is not None
    assert family.reasoning.open == "<thought>"
    config["chat_template"] = '<tool_call>{"name": <name>, "arguments": <args>}</tool_call></think>'
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    family = Family.of(Tokenizer.load(tmp_path))
    assert (family.tools and family.tools.name) == "hermes"
    assert (family.reasoning and family.reasoning.name) == "think"
    assert Family.of(Tokenizer.load(tmp_path), "none", "none").tools is None
