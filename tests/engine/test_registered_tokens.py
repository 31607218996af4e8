"""Tokens that tokenizer.json does not list are registered as transformers registers them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model_folder
from transformers import AutoTokenizer

from personae.engine.tokens import Tokenizer
from personae.errors import ModelLoadError

TEXTS = (
    "<|im_start|>user\nHi<|im_end|>\n",
    "a <think> b </think>c<tool>",
    " <tool> <extra> x<extra>  y",
    "[MARK]word[MARK] [MARK]",
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


MASK = {"__type": "AddedToken", **token("<extra>", lstrip=True)}


def folder(path: Path, settings: dict[str, Any], **files: Any) -> Path:
    """A model whose tokenizer.json lists no chat token, with these settings and files."""
    make_model_folder(path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["added_tokens"] = [
        entry for entry in content["added_tokens"] if entry["content"] not in ("<|im_start|>", "<|im_end|>")
    ]
    (path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | settings))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"added_tokens_decoder": {"1": token("<|im_start|>"), "2": token("<|im_end|>", special=True)}}, {}),
        ({"added_tokens_decoder": {"509": token("<think>"), "510": token("</think>", special=True)}}, {}),
        ({"added_tokens_decoder": {"509": token("<tool>", lstrip=True, rstrip=True)}}, {}),
        ({"added_tokens_decoder": {"509": token("[MARK]", single_word=True)}}, {}),
        ({"added_tokens_decoder": {"0": token("<|endoftext|>", lstrip=True, special=True)}}, {}),
        ({"extra_special_tokens": ["<extra>", "<tool>"]}, {}),
        ({"additional_special_tokens": ["<|im_start|>", "<extra>"]}, {}),
        ({}, {"added_tokens": {"<tool>": 509, "<extra>": 510}}),
        ({"extra_special_tokens": ["<tool>"]}, {"added_tokens": {"<tool>": 509}}),
        ({}, {"special_tokens_map": {"additional_special_tokens": ["<extra>"]}}),
        (
            {
                "eos_token": "<|im_end|>",
                "mask_token": {"__type": "AddedToken", **token("<extra>", lstrip=True)},
            },
            {},
        ),
    ],
)
def test_a_text_has_the_ids_and_the_visible_text_that_it_has_in_transformers(
    settings: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    path = folder(tmp_path, settings, **files)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_that_would_have_another_id_stops_the_load(tmp_path: Path) -> None:
    path = folder(tmp_path, {"added_tokens_decoder": {"511": token("<tool>")}})
    with pytest.raises(ModelLoadError, match='"<tool>" would have the id 509, not 511'):
        Tokenizer.load(path)


def test_a_token_without_a_row_of_the_embedding_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path, {"extra_special_tokens": [f"<extra {place}>" for place in range(9)]})
    ours = Tokenizer.load(path)
    assert ours.vocab_size == 512
    assert "'<extra 3>' is left out" in caplog.text
    assert max(ours.encode("<extra 2><extra 3>")) == 511


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        {"one": token("<tool>")},
        {"509": {"special": True}},
        {"509": {"content": ""}},
        {"509": {"content": "<tool>", "special": "yes"}},
    ],
)
def test_a_list_of_tokens_that_is_none_stops_the_load(tokens: object, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder(tmp_path, {"added_tokens_decoder": tokens}))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("flag", [None, False, True])
def test_tokenizer_json_alone_says_what_stands_around_a_text(
    begins: bool, flag: bool | None, tmp_path: Path
) -> None:
    bos = {"id": "<|endoftext|>", "type_id": 0}
    single: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
    path = folder(tmp_path, {} if flag is None else {"add_bos_token": flag})
    content = json.loads((path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": bos}, *single] if begins else single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos["id"]: {"id": bos["id"], "ids": [0], "tokens": [bos["id"]]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    ids = Tokenizer.load(path).encode("Hi")
    assert ids == AutoTokenizer.from_pretrained(path)("Hi")["input_ids"]
    assert (ids[0] == 0) == begins
