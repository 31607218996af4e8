import json
import random
import string
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from personae.api.bundled import DEMO
from personae.engine.tokens import Detokenizer, Tokenizer
from personae.errors import ModelLoadError, RequestError

KINDS = list(tiny_tokenizers.KINDS)
SHARED = tiny_tokenizers.shared_tokenizers()


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.make(request.param))


@pytest.fixture(scope="module", params=sorted(SHARED) or [None])
def real(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param is None:
        pytest.skip("no folder shared/data/tokenizers above this repository")
    return Tokenizer.load(SHARED[request.param])


def folder_of(tmp_path: Path, kind: str = "byte_level", **files: Any) -> Path:
    tiny_tokenizers.make(kind).save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def stream(tokenizer: Tokenizer, ids: list[int], chunks: list[int], **options: Any) -> tuple[str, str | None]:
    """All text, and whether it was stopped, of ids pushed in chunks of the given sizes (repeated)."""
    detokenizer = Detokenizer(tokenizer, **options)
    text, at, turn = "", 0, 0
    while at < len(ids):
        size = chunks[turn % len(chunks)]
        text += detokenizer.push(ids[at : at + size])
        if detokenizer.stopped is not None:
            return text, detokenizer.stopped
        at, turn = at + size, turn + 1
    text += detokenizer.flush()
    return text, detokenizer.stopped


@settings(max_examples=300)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_what_decode_makes_of_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = LOADED[kind]
    everything = st.integers(0, tokenizer.vocab_size + 2)
    byte_like = st.sampled_from(
        [id for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) == 1]
    )
    ids = data.draw(st.lists(st.one_of(everything, byte_like), max_size=40))
    chunks = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip = data.draw(st.booleans())
    text, stopped = stream(tokenizer, ids, chunks, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert stopped is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_the_space_that_a_text_would_drop(kind: str) -> None:
    tokenizer = LOADED[kind]
    ids = tokenizer.encode("the quick fox", False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        assert tokenizer.decode(ids[:cut]) + stream(tokenizer, ids[cut:], [1], after=ids[:cut])[0] == whole


LOADED = {kind: Tokenizer(tiny_tokenizers.make(kind)) for kind in KINDS}


@settings(max_examples=100)
@given(text=st.text(st.sampled_from(" ab\né日🙂\u200d\U0001f469ف"), max_size=40), chunk=st.integers(1, 4))
@pytest.mark.parametrize("kind", ["byte_level", "llama_fallback", "gemma_fallback"])
def test_encoding_and_streaming_give_the_text_back(kind: str, text: str, chunk: int) -> None:
    tokenizer = LOADED[kind]
    assert stream(tokenizer, tokenizer.encode(text), [chunk])[0] == text


@settings(max_examples=150)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_ends_the_text_however_tokens_cut_it(kind: str, data: st.DataObject) -> None:
    tokenizer = LOADED[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    full = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(len(full) - 1, 0)))
    stop = full[start : start + data.draw(st.integers(1, 8))] or "never"
    include = data.draw(st.booleans())
    chunks = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    text, stopped = stream(tokenizer, ids, chunks, stop=[stop], include_stop=include)
    place = full.find(stop)
    assert stopped == (None if place < 0 else stop)
    assert text == (full if place < 0 else full[: place + len(stop) * include])


def test_no_piece_holds_half_a_character() -> None:
    for tokenizer in LOADED.values():
        ids = tokenizer.encode("naïve 日本語 🙂 and more")
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([id]) for id in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert sum(1 for piece in pieces if piece) > 3


def test_a_character_cut_off_at_the_end_is_flushed_as_a_replacement_character() -> None:
    tokenizer = LOADED["byte_level"]
    ids = tokenizer.encode("a🙂")[:-1]
    assert tokenizer.token_bytes(ids[-1]) != b"a"
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == "\ufffd" == tokenizer.decode(ids)[1:]


def test_leading_spaces_are_those_of_decode() -> None:
    for kind in ("llama_fallback", "gemma_fallback"):
        tokenizer = LOADED[kind]
        for text in ("  two spaces", "none", " one", "   "):
            assert stream(tokenizer, tokenizer.encode(text), [1])[0] == text


def test_after_a_stop_nothing_more_comes() -> None:
    tokenizer = LOADED["byte_level"]
    detokenizer = Detokenizer(tokenizer, stop=["dog"])
    assert detokenizer.push(tokenizer.encode("The dog sleeps")) == "The "
    assert detokenizer.stopped == "dog"
    assert detokenizer.push(tokenizer.encode("more")) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.stopped == "dog"


def test_a_token_costs_the_same_late_as_early() -> None:
    """No re-decoding: ids decoded in all grow in proportion to the tokens pushed."""

    class Counting(Tokenizer):
        decoded = 0

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            self.decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    for kind in KINDS:
        tokenizer = Counting(tiny_tokenizers.make(kind))
        ids = LOADED[kind].encode(" ".join(tiny_tokenizers.CORPUS))
        tokenizer.decoded = 0
        stream(tokenizer, ids, [1])
        assert tokenizer.decoded <= 4 * len(ids)


def test_token_text_is_what_a_token_adds_to_a_running_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox 日 does not", add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(id) for id in ids).decode()
    assert joined.strip() == tokenizer.decode(ids).strip()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 10) == b""
    for id in tokenizer.special_ids:
        assert tokenizer.token_text(id) == tokenizer.backend.id_to_token(id)


def test_token_bytes_of_a_part_of_a_character_are_its_bytes() -> None:
    for kind in ("byte_level", "llama_fallback", "gemma_fallback"):
        tokenizer = LOADED[kind]
        ids = tokenizer.encode("\U0001f980", add_special_tokens=False)
        parts = [tokenizer.token_bytes(id) for id in ids]
        assert b"".join(parts).lstrip() == "\U0001f980".encode()
        assert "\ufffd" in tokenizer.token_text(ids[-1])


def test_a_batch_is_encoded_as_its_texts_are(tokenizer: Tokenizer) -> None:
    texts = ["The quick", "", "brown fox jumps", "日本"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_a_lone_surrogate_is_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_ids_of_special_tokens_come_from_every_file(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>", "pad_token": None},
        special_tokens_map={"pad_token": "<|eos|>"},
        generation_config={"eos_token_id": [7, 1], "pad_token_id": 5},
        config={"eos_token_id": 3},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == (7, 1)
    assert tokenizer.pad_id == 1
    assert tokenizer.special_tokens == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|eos|>",
    }
    assert tokenizer.special_ids == {0, 1}


def test_a_folder_with_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path))
    assert tokenizer.bos_id is None
    assert tokenizer.eos_ids == ()
    assert tokenizer.chat_template is None
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size()
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"


def test_config_json_says_the_eos_ids_when_nothing_else_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, config={"eos_token_id": 3, "pad_token_id": 4}))
    assert tokenizer.eos_ids == (3,)
    assert tokenizer.pad_id == 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("around", ["$A", "<|bos|> $A", "<|bos|> $A <|eos|>", "$A <|eos|>"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_too_long_keeps_what_transformers_keeps(kind: str, around: str, side: str) -> None:
    backend = tiny_tokenizers.make(kind)
    ids = [(name, backend.token_to_id(name)) for name in tiny_tokenizers.SPECIAL]
    backend.post_processor = processors.TemplateProcessing(around, special_tokens=ids)
    ours = Tokenizer(Backend.from_str(backend.to_str()))  # transformers sets a truncation in its own
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, truncation_side=side)
    texts = ["The quick brown fox", "x", "The fox, the fox and the dog", ""]
    for special in (True, False):
        wanted = {"truncation": True, "add_special_tokens": special}
        for most in range(3, 20):
            expected = theirs(texts, max_length=most, **wanted)["input_ids"]
            assert ours.encode_batch(texts, special, most, side == "right") == expected


def test_where_there_is_no_room_for_special_tokens_the_text_counts() -> None:
    backend = tiny_tokenizers.make("byte_level")
    backend.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode_batch(["The fox"], True, 1) == [tokenizer.encode("The fox")[-1:]]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny_tokenizers.make("byte_level")
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_chat_templates_come_from_a_string_a_list_or_files(tmp_path: Path) -> None:
    def load(setting: Any) -> Tokenizer:
        return Tokenizer.load(folder_of(tmp_path, tokenizer_config={"chat_template": setting}))

    assert load("A").chat_template == "A"
    both = load([{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])
    assert both.chat_template == "A"
    assert both.chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
    assert load("A").chat_templates == {"default": "C", "rag": "D"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no config.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{,", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "x"}]}',
            "tokenizer_config.json.*chat_template",
        ),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json.*chat_template"),
        ("added_tokens.json", '{"<tool>": "five"}', 'added_tokens.json: "five" is not the id'),
        ("generation_config.json", b"\xff\xfe", "generation_config.json is not JSON"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    folder = folder_of(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(folder)


def test_a_model_without_a_tokenizer_is_told_from_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_threads_may_share_it() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.make("byte_level"))
    text = " ".join(tiny_tokenizers.CORPUS)
    ids = LOADED["byte_level"].encode(text)

    def work(_: int) -> bool:
        return tokenizer.encode(text) == ids and stream(tokenizer, ids, [3])[0] == text

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(40)))


@settings(max_examples=100)
@given(data=st.data())
def test_real_tokenizers_stream_what_they_decode(real: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    assert stream(real, ids, [1], skip_special_tokens=skip)[0] == real.decode(ids, skip)


def test_every_token_of_a_real_tokenizer_has_the_bytes_that_it_decodes_to(real: Tokenizer) -> None:
    for id in range(0, real.vocab_size, 37):
        assert real.token_text(id) == real.decode([id], skip_special_tokens=False)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_encoded_or_decoded(way: str) -> None:
    tokenizer = Tokenizer.load(DEMO / "model")
    text = "".join(random.Random(0).choices(string.ascii_lowercase, k=800_000))
    given = text if way == "encode" else tokenizer.encode(text) * 4
    work = partial(getattr(tokenizer, way), given)
    until = time.monotonic() + PATIENCE
    while not another_thread_ran_during(work):
        assert time.monotonic() < until, "it keeps the interpreter's lock to itself"


def another_thread_ran_during(work: Callable[[], object]) -> bool:
    """Whether a thread that wants the interpreter's lock got it. Nobody is made to give it up here, so it can
    only if `work` does; it need not, for the system decides when it wakes."""
    gate, ran = threading.Lock(), []

    def other() -> None:
        with gate:
            ran.append(True)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        gate.acquire()
        thread = threading.Thread(target=other)
        thread.start()
        gate.release()
        work()
        found = bool(ran)
    finally:
        sys.setswitchinterval(usual)
    thread.join(PATIENCE)
    return found
