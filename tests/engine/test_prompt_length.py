"""How long a text may be for a number of tokens, and what of it is encoded to find out."""

from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from personae.engine.prompt_length import PART, TooManyTokens, bytes_of_token, parts, tails
from personae.engine.tokens import Tokenizer

KINDS = sorted(tiny_tokenizers.KINDS)


class Noting(Tokenizer):
    """Counts the characters that are encoded."""

    encoded = 0

    def _encode(self, texts: Any, add_special_tokens: bool) -> list[list[int]]:
        self.encoded += sum(map(len, texts))
        return super()._encode(texts, add_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_cannot_fit_is_refused_before_much_of_it_is_encoded(kind: str) -> None:
    tokenizer = Noting(tiny_tokenizers.make(kind))
    for text in ("a b " * 2**20, "a" * 2**22, "語" * 2**20):
        with pytest.raises(TooManyTokens) as refused:
            tokenizer.encode_batch(["x", text], limit=100)
        assert refused.value.index == 1
        assert tokenizer.encoded < 4 * PART


def test_a_text_longer_than_the_longest_token_allows_is_not_encoded_at_all() -> None:
    tokenizer = Noting(tiny_tokenizers.make("byte_level"))
    assert tokenizer.longest_token is not None
    with pytest.raises(TooManyTokens):
        tokenizer.encode_batch(["a" * (100 * tokenizer.longest_token + 1)], limit=100)
    assert tokenizer.encoded == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_fits_is_encoded_as_without_a_limit(kind: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.make(kind))
    for text in ("", "The quick brown fox. " * 3000, " " * 50_000, "x\n" * 20_000):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.encode_batch([text], limit=len(ids)) == [ids]
        many = [text[:1000], text, text[:10]]
        assert tokenizer.encode_batch(many, limit=len(ids) + 1) == [tokenizer.encode(one) for one in many]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=200))
def test_no_token_stands_for_more_bytes_than_the_longest(kind: str, text: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.make(kind))
    if tokenizer.longest_token is not None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(text.encode()) <= len(ids) * tokenizer.longest_token


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_or_first_tokens_of_a_long_text_are_found_without_encoding_all_of_it(kind: str) -> None:
    text = "".join(f"The {n} foxes jump over {n * 7} lazy dogs. " for n in range(20_000))
    tokenizer = Noting(tiny_tokenizers.make(kind))
    (whole,) = tokenizer.encode_batch([text], add_special_tokens=False)
    tokenizer.encoded = 0
    assert tokenizer.encode_batch([text], False, 50) == [whole[-50:]]
    assert tokenizer.encoded < 4 * PART < len(text)
    tokenizer.encoded = 0
    assert tokenizer.encode_batch([text], False, 50, True) == [whole[:50]]
    assert tokenizer.encoded < 4 * PART


def test_where_a_token_may_stand_for_any_text_no_length_is_known() -> None:
    vocabulary = {"<unk>": 0, "a": 1}
    assert bytes_of_token(tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>")), False) is None
    fused = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True)
    assert bytes_of_token(tokenizers.Tokenizer(fused), False) is None
    dropping = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    dropping.normalizer = normalizers.StripAccents()
    assert bytes_of_token(dropping, False) is None


def test_a_normalizer_that_shortens_text_is_reckoned_with() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "aa": 1}, [("a", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert bytes_of_token(backend, False) == 2
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁")])
    assert bytes_of_token(backend, False) == 8


def test_parts_are_the_text_and_tails_end_with_all_of_it() -> None:
    for text in ("", "a", "a b " * 10_000, "x" * 50_000):
        assert "".join(parts(text)) == text
        assert all(len(part) <= PART for part in parts(text))
        *_, last = tails(text, 1)
        assert last == text
        assert all(text.endswith(tail) for tail in tails(text, 1))
