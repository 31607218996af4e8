"""Tokenizers from GGUF's metadata, compared with those in the same models' folders."""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from personae.engine.checkpoints.gguf.header import Texts, _end_of_texts
from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.engine.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from personae.engine.checkpoints.gguf.tokenizer import read_tokenizer
from personae.errors import ModelLoadError

TEXTS = [
    "Hello, world! It's 1234567 o'clock; we'll see.",
    "  two  spaces\n\n\nand\t tabs \r\n ",
    "Grüße aus Köln, naïve café — 你好，世界。 Привет! 🙂🚀",
    "HTTPServer camelCase snake_case a/b//c\n/d x=1+2*3",
    "e\u0301 Ⅷ ٣٤٥ 1,000.50€ ﬁ",
    "",
]


def metadata(**values: Any) -> Metadata:
    return of({f"tokenizer.ggml.{name}": value for name, value in values.items()})


def of(values: dict[str, Any]) -> Metadata:
    """Metadata with lists of strings as a file has them."""
    return Metadata(
        {key: texts(value) if isinstance(value, list) else value for key, value in values.items()}, "a.gguf"
    )


def texts(strings: list[str]) -> Texts:
    data = b"".join(struct.pack("<Q", len(each.encode())) + each.encode() for each in strings)
    memory = mmap.mmap(-1, len(data) + 1)
    memory.write(data)
    return Texts(memory, 0, len(strings))


@pytest.mark.parametrize("string", ["plain", "é" * 100, "a" * 300, ""])
def test_strings_are_found_without_reading_them_all(string: str) -> None:
    strings = ["other", string, "x", string, "🂡"]
    there = texts(strings)
    assert there.read() == strings
    assert there.places({string, "absent"}) == [1, 3]
    assert _end_of_texts(there.memory, 0, len(strings)) == len(there.memory) - 1


@pytest.mark.parametrize("before", [[], ["é" * 100]])
def test_a_string_that_is_not_utf_8_is_noticed(before: list[str]) -> None:
    data = b"".join(struct.pack("<Q", len(each.encode())) + each.encode() for each in before)
    data += struct.pack("<Q", 2) + b"\xc3a"
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    with pytest.raises(UnicodeDecodeError):
        _end_of_texts(memory, 0, len(before) + 1)
    with pytest.raises(EOFError):
        _end_of_texts(memory, 0, len(before) + 2)


def byte_level(before: pre_tokenizers.PreTokenizer, normalizer: Any = None) -> Tokenizer:
    """A tokenizer as folders have it, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def read(tokenizer: Tokenizer, pre: str) -> Tokenizer:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = np.array([3 if token == "<|end|>" else 1 for token in tokens], np.int32)
    merges = [" ".join(merge) for merge in model["merges"]]
    fields = metadata(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges)
    return read_tokenizer(fields).backend


SPLIT = pre_tokenizers.Split
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("pre", "before", "normalizer"),
    [
        ("gpt-2", GPT2, None),
        ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
    ],
)
def test_text_is_cut_as_the_folders_pre_tokenizer_does(pre: str, before: Any, normalizer: Any) -> None:
    truth = byte_level(before, normalizer)
    found = read(truth, pre)
    for text in [*TEXTS, "Hello<|end|> world"]:
        assert found.encode(text).ids == truth.encode(text).ids
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_cut_loses_text(pre: str) -> None:
    found = read(byte_level(GPT2), pre)
    for text in TEXTS:
        expected = normalizers.NFC().normalize_str(text) if found.normalizer is not None else text
        assert found.decode(found.encode(text).ids) == expected


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("llama-bpe", "12345 It'S ok", ["123", "45", "ĠIt", "'S", "Ġok"]),
        ("qwen2", "123 we'LL", ["1", "2", "3", "Ġwe", "'LL"]),
        ("smollm", "12 It'S", ["1", "2", "ĠIt", "'", "S"]),
        ("tekken", "HTTPServer x/\n", ["HTTPServer", "Ġx", "/Ċ"]),
        ("gpt-4o", "camelCase don't 1234", ["camel", "Case", "Ġdon't", "Ġ", "123", "4"]),
        ("glm4", "12345 It'S ok", ["123", "45", "ĠIt", "'S", "Ġok"]),
        ("seed-coder", "12 a!\n b", ["1", "2", "Ġa", "!", "Ċ", "Ġb"]),
        ("deepseek-v3", "12345 don't\n!abc", ["123", "45", "Ġdon", "'t", "Ċ", "!abc"]),
        ("deepseek-llm", "12345 ab\n!", ["12345", "Ġab", "Ċ", "!"]),
        ("deepseek-coder", "12 ab\n!", ["1", "2", "Ġab", "Ċ", "!"]),
        ("kimi-k2", "HTTPServer 1234", ["HTTPServer", "Ġ", "123", "4"]),
        ("youtu", "Ab'S 12", ["Ab'S", "Ġ", "1", "2"]),
        ("tiny_aya", "1234567 a", ["1", "234", "567", "Ġa"]),
        ("exaone-moe", "a b 1\n\nc", ["aĠb", "Ġ", "1", "ĊĊ", "c"]),
        ("jais-2", "a   b", ["a", "ĠĠ", "Ġb"]),
    ],
)
def test_pre_tokenizers_are_told_apart(pre: str, text: str, cut: list[str]) -> None:
    found = read(byte_level(GPT2), pre).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == cut


def pieces(prefix: bool) -> tuple[Metadata, Tokenizer]:
    """SentencePiece's BPE in both forms: pieces with scores, and as folders have it."""
    truth = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    truth.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    truth.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    truth.train_from_iterator([text for text in TEXTS if text.isascii()] * 3, trainer)
    model = json.loads(truth.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    made = {"".join(merge): -float(place) for place, merge in enumerate(model["merges"])}
    scores = np.array([made.get(token, -1e6) for token in tokens], np.float32)
    types = np.array([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)], np.int32)
    fields = metadata(
        model="llama",
        tokens=tokens,
        token_type=types,
        scores=scores,
        add_space_prefix=prefix,
        bos_token_id=1,
        eos_token_id=2,
    )
    return fields, truth


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_with_scores_are_merged_as_the_folders_merges_say(prefix: bool) -> None:
    fields, truth = pieces(prefix)
    files = read_tokenizer(fields)
    for text in TEXTS:
        ids = files.backend.encode(text, add_special_tokens=False).ids
        assert ids == truth.encode(text).ids
        assert files.backend.encode(text).ids == [1, *ids]
        assert files.backend.decode(ids) == text
    assert (files.bos_id, files.eos_ids) == (1, (2,))


def test_marks_belong_to_the_words_of_qwen35_and_chinese_stands_alone_in_kimi_k2() -> None:
    def cut(pre: str, text: str) -> list[str]:
        backend = read(byte_level(GPT2), pre)
        found = backend.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in found]

    assert cut("qwen35", "ae\u0301b") == ["ae\u0301b"]
    assert cut("qwen2", "ae\u0301b") != ["ae\u0301b"]
    assert cut("kimi-k2", "ab你好cd") == ["ab", "你好", "cd"]
    assert cut("gpt-4o", "ab你好cd") == ["ab你好cd"]
    assert cut("deepseek-v3", "ab你好cd") == ["ab", "你好", "cd"]


def test_gemma_4s_merges_are_the_files_and_spaces_are_characters() -> None:
    tokens = [
        "<unk>",
        "<bos>",
        "a",
        "b",
        "▁",
        "\n",
        "ab",
        "▁ab",
        "\n\n",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    types = np.array([2, 3, *[1] * 7, *[6] * 256], np.int32)
    merges = ["a b", "▁ ab", "\n \n"]
    fields = metadata(
        model="gemma4", tokens=tokens, token_type=types, merges=merges, bos_token_id=1, add_bos_token=True
    )
    files = read_tokenizer(fields)
    ids = files.backend.encode("ab ab\n\nab é").ids
    assert [tokens[id] for id in ids] == ["<bos>", "ab", "▁ab", "\n\n", "ab", "▁", "<0xC3>", "<0xA9>"]
    assert files.backend.decode(ids) == "ab ab\n\nab é"


def test_ends_of_answers_are_those_of_the_file_and_the_well_known_ones() -> None:
    tokens = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "a", "b"]
    types = np.array([3, 3, 1, 3, 1, 3], np.int32)
    fields = metadata(
        model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=[], eos_token_id=1, eot_token_id=5
    )
    files = read_tokenizer(fields)
    assert files.eos_ids == (1, 5, 0, 2, 3)
    assert files.backend.encode("a<|eot_id|>").ids == [4, 2]  # of whatever type it is


def test_all_chat_templates_are_read(tmp_path: Path) -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "one",
        "tokenizer.chat_template.tool_use": "two",
        "tokenizer.chat_templates": ["tool_use"],
    }
    assert read_tokenizer(of(values)).chat_templates == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("begins", "ends", "ids"), [(True, False, [2, 0]), (False, True, [0, 3]), (True, True, [2, 0, 3])]
)
def test_the_file_says_what_stands_around_a_text(begins: bool, ends: bool, ids: list[int]) -> None:
    fields = metadata(
        model="gpt2",
        pre="gpt-2",
        tokens=["a", "b", "<s>", "<|im_end|>"],
        token_type=np.array([1, 1, 3, 3], np.int32),
        merges=[],
        bos_token_id=2,
        eos_token_id=3,
        add_bos_token=begins,
        add_eos_token=ends,
    )
    backend = read_tokenizer(fields).backend
    assert backend.encode("a").ids == ids
    assert backend.encode("a", add_special_tokens=False).ids == [0]


@pytest.mark.parametrize(
    ("key", "value"), [("add_sep_token", True), ("suppress_tokens", np.array([1], np.int32)), ("mystery", 1)]
)
def test_a_field_of_the_tokenizer_that_would_be_ignored_stops_the_load(key: str, value: object) -> None:
    fields = metadata(model="gpt2", pre="gpt-2", tokens=["a"], merges=[], **{key: value})
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.ggml\.{key}"):
        read_tokenizer(fields)


def test_fields_that_change_nothing_are_passed_over() -> None:
    harmless = {"fim_pre_token_id": 0, "add_space_prefix": False, "add_sep_token": False, "scores": None}
    fields = metadata(model="gpt2", pre="gpt-2", tokens=["a"], merges=[], **harmless)
    assert read_tokenizer(fields).backend.encode("a").ids == [0]
