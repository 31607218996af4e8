"""The parser alone, on answers that no grammar has bound."""

import time

import pytest
from answers import Parsed, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.tools.registry import NAMES, tool_format

HERMES = tool_format("hermes")
THINK = reasoning_format("think")
AUTO = AnswerShape(tools=HERMES, use="auto")
CALL = '<tool_call>{"name": "f", "arguments": {"a": "}"}}</tool_call>'
SPECIAL = {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4}


def test_text_around_calls_is_content_without_the_blanks_next_to_them():
    parsed = parse(AUTO, "  I look.\n\n" + CALL + "\n" + CALL + "\nDone. ")
    assert parsed.content == "  I look.\nDone. "
    assert parsed.calls == [["f", '{"a": "}"}']] * 2
    assert parsed.completed == 2
    assert parse(AUTO, CALL + "\n").content == "", "blanks after the last call are its model's way to end"


@pytest.mark.parametrize(
    ("text", "calls", "completed", "content"),
    [
        ("<tool_call>oops</tool_call>", [], 0, "<tool_call>oops</tool_call>"),
        ("see <tool_call><tool_call>x", [], 0, "see <tool_call><tool_call>x"),
        ('<tool_call>{"name": ""}', [], 0, '<tool_call>{"name": ""}'),
        ('<tool_call>{"name": "f", "arguments": 3}', [], 0, '<tool_call>{"name": "f", "arguments": 3}'),
        ("broken <tool_call>{" + CALL, [["f", '{"a": "}"}']], 1, "broken <tool_call>{"),
        (CALL + "<tool_call>oops", [["f", '{"a": "}"}']], 1, "<tool_call>oops"),
        (CALL[:-13] + " or not", [["f", '{"a": "}"}']], 0, " or not"),
    ],
)
def test_what_is_no_well_formed_call_is_text(text, calls, completed, content):
    parsed = parse(AUTO, text)
    assert (parsed.calls, parsed.completed, parsed.content) == (calls, completed, content)


@pytest.mark.parametrize("length", range(len(CALL)))
def test_a_call_that_breaks_off_is_never_complete(length):
    parsed = parse(AUTO, "hm " + CALL[:length])
    assert parsed.completed == 0
    assert parsed.calls in ([], [["f", '{"a": "}"}'[: max(0, length - 38)]]])
    assert parsed.content in ("hm ", "hm", "hm " + CALL[:length])


def test_a_call_that_breaks_off_at_a_special_token_does_not_take_the_next_one_with_it():
    parsed = parse(AUTO, '<tool_call>{"name": "f", "arguments": {"a</tool_call>' + CALL, SPECIAL)
    assert parsed.calls == [["f", '{"a'], ["f", '{"a": "}"}']]
    assert parsed.completed == 1


def test_reasoning_opened_by_the_model_and_by_the_prompt_is_apart_from_the_answer():
    maybe, opened = (AnswerShape(THINK, thinks) for thinks in (Thinks.MAYBE, Thinks.OPEN))
    for special in ({}, SPECIAL):
        one = parse(maybe, "\n<think>\nhm </think>\n\nhello\n", special)
        assert (one.reasoning, one.content) == ("hm", "hello\n")
        other = parse(opened, "\nhm\n</think>hello", special)
        assert (other.reasoning, other.content) == ("hm", "hello")
        assert parse(maybe, "hello <think>x", special).reasoning == ""
        assert parse(opened, "never\nending ", special).reasoning == "never\nending"
    assert parse(maybe, "<thinking>").content == "<thinking>"


def test_a_call_within_reasoning_is_reasoning():
    shape = AnswerShape(THINK, Thinks.OPEN, HERMES, use="auto")
    parsed = parse(shape, CALL + "</think>" + CALL)
    assert (parsed.reasoning, len(parsed.calls)) == (CALL, 1)


def test_a_special_token_behind_a_backslash_breaks_a_call_off_too():
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\</tool_call> more'
    parsed = parse(AUTO, text, SPECIAL)
    for _, arguments in parsed.calls:
        arguments.encode()
    parsed.content.encode()
    assert parsed.completed == 0


def test_special_tokens_without_a_meaning_here_leave_no_trace_unless_they_are_to_be_shown():
    for shown, content in ((False, "ab"), (True, "a</tool_call>b")):
        parser = AUTO.parser(SPECIAL, shown=shown)
        parsed = Parsed()
        parsed.add(parser.push(parser.marks.put("a</tool_call>b")))
        parsed.add(parser.finish())
        assert parsed.content == content


WORDS = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "', '", "arguments": ', CALL]
texts = st.lists(st.sampled_from([*WORDS, *'f{}"\\ \n[]<x', "tool"]), max_size=25).map("".join)


@settings(max_examples=150)
@given(text=texts, cuts=st.lists(st.integers(0, 2**16), max_size=30), data=st.data())
def test_any_text_parses_the_same_in_whatever_pieces_it_comes(text, cuts, data):
    thinks = data.draw(st.sampled_from(Thinks))
    special = data.draw(st.sampled_from([{}, SPECIAL]))
    name = data.draw(st.sampled_from(NAMES))
    shape = AnswerShape(
        THINK, thinks, tool_format(name), use=data.draw(st.sampled_from(["auto", "required"]))
    )
    assert parse(shape, text, special, cuts) == parse(shape, text, special)


@pytest.mark.parametrize(
    "text", [" " * 50_000, "<tool_call>" * 5_000, '<tool_call>{"name": "f", "arguments": {' + "[" * 50_000]
)
def test_the_time_of_a_character_does_not_depend_on_how_many_came_before(text):
    def seconds(text):
        started = time.thread_time()
        parse(AUTO, text, cuts=range(len(text)))
        return time.thread_time() - started

    short, long = (min(seconds(text[:length]) for _ in range(3)) for length in (10_000, 40_000))
    assert long < 20 * short, "four times the text"


CHANNELS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
FINAL = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hi"
CALLED = "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}"


@pytest.mark.parametrize("special", [{}, {name: 257 + at for at, name in enumerate(CHANNELS)}])
@pytest.mark.parametrize("tools", [None, tool_format("harmony")])
def test_a_tag_of_harmony_that_is_cut_is_no_text(special, tools):
    shape = AnswerShape(
        reasoning_format("harmony"), Thinks.MAYBE, tools=tools, use="auto" if tools else "none"
    )
    for whole, content in ((FINAL, "Hi"), *(((CALLED, ""),) if tools else ())):
        for length in range(len(whole) + 1):
            begun = whole[:length]
            if any(begun.endswith(name[:cut]) for name in special for cut in range(1, len(name))):
                continue  # a token is there or it is not
            for cuts in ((), range(length)):
                assert content.startswith(parse(shape, begun, special, cuts).content), begun


_JSON = '{"a":1}'
_JOINT, _SO = "<|end|><|start|>assistant", "<|channel|>final<|message|>Hi"


@pytest.mark.parametrize("special", [{}, {name: 257 + at for at, name in enumerate(CHANNELS)}])
@pytest.mark.parametrize("tools", [None, tool_format("harmony")])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        (f"<|channel|>final <|constrain|>json<|message|>{_JSON}", "", _JSON),
        (f"<|channel|>final json<|message|>{_JSON}", "", _JSON),
        (f"<|channel|>analysis text<|message|>hm{_JOINT}{_SO}", "hm", "Hi"),
        (f"<|channel|>commentary json<|message|>So.{_JOINT}{_SO}", "", "So.\nHi"),
        ("to be", "", "to be"),
        ("to=functions.f says", "", "to=functions.f says"),
    ],
)
def test_words_of_any_header_of_harmony_are_no_text(answer, reasoning, content, tools, special):
    shape = AnswerShape(
        reasoning_format("harmony"), Thinks.MAYBE, tools=tools, use="auto" if tools else "none"
    )
    for cuts in ((), range(len(answer))):
        parsed = parse(shape, answer, special, cuts)
        assert (parsed.reasoning, parsed.content, parsed.calls) == (reasoning, content, [])


@pytest.mark.parametrize("special", [{}, {name: 257 + at for at, name in enumerate(CHANNELS)}])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        "<|channel|>commentary \tto=functions.f json<|message|>",
        "<|channel|>commentary\nto=functions.f <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
    ],
)
def test_a_call_of_harmony_without_tools_shows_no_words_of_its_header(header, special):
    shape = AnswerShape(reasoning_format("harmony"), Thinks.MAYBE)
    for answer in (header + _JSON, f"<|channel|>analysis<|message|>hm{_JOINT}{header}{_JSON}"):
        for cuts in ((), range(len(answer))):
            assert parse(shape, answer, special, cuts).content == _JSON
