import itertools

import pytest
from transformers import AutoTokenizer

from personae.evals.demo import data
from personae.evals.demo.sample import call_text, render
from personae.evals.demo.train import MODEL

EVERY = data.TASKS | data.DRILLS | data.ADAPTER_TASKS


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("task", EVERY)
def test_transformers_renders_the_same_prompt(tokenizer, task):
    for sample in itertools.islice(data.samples(EVERY[task], "test", "t"), 10):
        rendered = tokenizer.apply_chat_template(
            sample.messages,
            tools=sample.tools,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=sample.thinking,
        )
        assert rendered == sample.prompt


def test_an_earlier_call_is_rendered_as_the_model_writes_it():
    call = {"name": "get_x", "arguments": {"a": 1, "b": "c"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
    user = {"role": "user", "content": "Get x"}
    assert call_text([call]) in render([user, turn, {"role": "tool", "content": "{}"}])
    wire = turn | {
        "tool_calls": [{"type": "function", "function": call | {"arguments": '{"a": 1, "b": "c"}'}}]
    }
    assert render([user, wire]) == render([user, turn])


def test_thoughts_of_the_running_turn_are_kept_and_older_ones_dropped():
    user = {"role": "user", "content": "Hello"}
    turn = {"role": "assistant", "content": "Hi", "reasoning_content": "Small talk."}
    assert "Small talk." in render([user, turn])
    assert "Small talk." not in render([user, turn, user])


def test_thinking_is_off_unless_asked_for():
    messages = [{"role": "user", "content": "Hello"}]
    assert render(messages).endswith("<think>\n\n</think>\n\n")
    assert render(messages, thinking=True).endswith("<|im_start|>assistant\n")


def test_content_may_come_in_parts():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "Hello"}])
