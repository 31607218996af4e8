import itertools
from random import Random

import jsonschema
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from personae.evals.demo import data, words
from personae.evals.demo.grading import grade
from personae.evals.demo.measure import MODEL
from personae.evals.demo.pieces import drilled, pieces
from personae.evals.demo.sample import Sample, read_calls
from personae.evals.demo.tasks import chat
from personae.evals.demo.values import Values, belongs

EVERY = data.TASKS | data.ADAPTER_TASKS


def some(task: str, split: str, count: int = 60) -> list[Sample]:
    return list(itertools.islice(data.samples(EVERY[task], split, "t"), count))


@pytest.mark.parametrize("task", EVERY)
def test_a_seed_always_gives_the_same_conversations(task):
    assert some(task, "train", 5) == some(task, "train", 5)
    assert some(task, "train", 5) != list(itertools.islice(data.samples(EVERY[task], "train", "u"), 5))


@pytest.mark.parametrize("task", EVERY)
def test_no_test_conversation_occurs_in_training(task):
    train = {sample.prompt for sample in some(task, "train", 300)}
    assert not train & {sample.prompt for sample in some(task, "test", 100)}


@pytest.mark.parametrize("task", ["tool", "parallel", "no_call", "result"])
def test_test_tools_and_parameters_are_unseen_in_training(task):
    for split in ("train", "test"):
        for sample in some(task, split):
            for tool in sample.tools:
                name = tool["function"]["name"]
                noun = next(name.removeprefix(verb) for verb in words.VERBS if name.startswith(verb))
                assert belongs(noun.lstrip("_-").lower(), split)
                assert all(
                    belongs(parameter, split) for parameter in tool["function"]["parameters"]["properties"]
                )


@pytest.mark.parametrize(
    "kind", ["person", "place", "date", "time", "integer", "number", "code", "email", "text"]
)
def test_values_of_the_two_splits_are_disjoint(kind):
    drawn = {
        split: {str(Values(Random(seed), split).of_kind(kind)) for seed in range(200)}
        for split in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"]


@pytest.mark.parametrize("task", ["tool", "parallel", "calendar"])
def test_every_gold_call_satisfies_its_tools_schema(task):
    for sample in some(task, "train") + some(task, "test"):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        calls = read_calls(sample.answer)
        assert len(calls) == (2 if task == "parallel" else 1)
        for call in calls:
            jsonschema.validate(call["arguments"], schemas[call["name"]])


@pytest.mark.parametrize("task", ["tool", "parallel"])
def test_every_argument_can_be_read_in_the_users_words(task):
    for sample in some(task, "test"):
        user = sample.messages[-1]["content"]
        for call in read_calls(sample.answer):
            for value in call["arguments"].values():
                assert isinstance(value, bool) or str(value) in user


@pytest.mark.parametrize("task", EVERY)
def test_the_gold_answer_gets_full_marks_and_an_empty_one_does_not(task):
    for sample in some(task, "test", 20):
        assert set(grade(sample, sample.answer).values()) == {1.0}
        assert grade(sample, "")["exact"] == 0.0


def test_a_request_that_no_tool_serves_is_never_among_the_offered_ones():
    for sample in some("no_call", "test"):
        assert not read_calls(sample.answer)


def test_half_a_tool_call_is_told_from_none():
    assert read_calls("Hello") == []
    assert read_calls('<tool_call>\n{"name": "a", "arguments": {}}') is None
    assert read_calls('<tool_call>\n{"name": "a"\n</tool_call>') is None


def test_the_drill_shows_the_words_of_the_vocabulary_and_none_that_is_held_out():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    known = pieces(tokenizer)
    assert {"thing", "angry", "neutral"} <= set(known)
    assert all(len(tokenizer.encode(text, add_special_tokens=False).ids) == 1 for text in known)
    assert not [text for text in known if text.lower() in words.OPEN and belongs(text.lower(), "test")]
    stream = drilled(data.mixture("t", 0.0), tokenizer, Random(0))
    drills = [sample for sample in itertools.islice(stream, 900) if sample.task == "pieces"]
    assert len(drills) == 100
    shown = {text for sample in drills for text in sample.answer.split()}
    assert shown <= set(known)
    assert len(shown) > len(known) / 3


def test_it_says_how_large_it_is():
    weights = load_file(MODEL / "model.safetensors")
    assert 3.25e6 < sum(tensor.numel() for tensor in weights.values()) < 3.75e6
    assert "three and a half million" in chat.INTENTS["size"][0]


def test_only_thoughts_that_an_answer_opens_with_are_left_out() -> None:
    record = Sample("record", [], '{"name": "a </think> b"}', schema={"type": "object"})
    assert grade(record, record.answer) == {"exact": 1.0, "valid": 1.0}
    assert grade(record, f"<think>\nhm\n</think>\n\n{record.answer}") == {"exact": 1.0, "valid": 1.0}
    assert grade(record, f"hm </think> {record.answer}") == {"exact": 0.0, "valid": 0.0}
