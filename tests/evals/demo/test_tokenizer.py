import itertools
from random import Random

import pytest
from tokenizers import Tokenizer

from personae.evals.demo import data
from personae.evals.demo.tokenizer import CONTROL, MARKERS, VOCABULARY, train_tokenizer
from personae.evals.demo.train import MODEL
from personae.evals.demo.values import Values

KINDS = ("person", "place", "date", "time", "integer", "number", "code", "email", "text")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def find(piece: list[int], ids: list[int]) -> bool:
    return any(ids[start : start + len(piece)] == piece for start in range(len(ids)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_has_the_same_tokens_in_the_users_words_and_in_json(tokenizer, kind):
    for seed in range(40):
        value = Values(Random(seed), "test").of_kind(kind)
        alone = tokenizer.encode(str(value)).ids
        for text in (
            f"with {value} and",
            f"is {value}.",
            f'say "{value}", or',
            f'{{"a": "{value}"}}',
            f'"b": {value}}}',
        ):
            assert find(alone, tokenizer.encode(text).ids)


def test_every_task_survives_the_round_trip(tokenizer):
    for task in (data.TASKS | data.DRILLS | data.ADAPTER_TASKS).values():
        for sample in itertools.islice(data.samples(task, "test", "t"), 10):
            text = sample.prompt + sample.completion
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_any_text_survives_the_round_trip(tokenizer):
    for text in (
        "Grüße, 你好 🌍\t\r\n  x",
        "ÀÉ İstanbul ﬁ",
        '\x00{"a":[1,-2.5e3]}',
        "  lead and trail  \n\n\n",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_markers_are_one_token_and_only_control_tokens_are_special(tokenizer):
    for marker in (*CONTROL, *MARKERS):
        assert len(tokenizer.encode(marker).ids) == 1
    text = "<|im_start|>" + "".join(MARKERS) + "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == "".join(MARKERS)


def test_the_vocabulary_has_the_models_size(tokenizer):
    assert tokenizer.get_vocab_size() == VOCABULARY


def test_training_the_tokenizer_twice_gives_the_same_one():
    assert train_tokenizer(300).to_str() == train_tokenizer(300).to_str()
