import json

import pytest
from byte_bpe import byte_fallback_json, byte_level_tokenizer, byte_level_vocabulary

from personae.errors import ModelLoadError
from personae.grammar.vocabulary import Vocabulary


def test_byte_level_tokens_spell_the_text_that_they_encode():
    vocabulary = byte_level_vocabulary()
    for text in ["Ada, 36", "é 漢 \n\t\x00 🎭", '{"name": null}']:
        ids = byte_level_tokenizer().encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()


def test_special_stop_and_padding_tokens_have_no_text():
    vocabulary = byte_level_vocabulary(350)
    assert vocabulary.size == len(vocabulary.tokens) == 350
    assert vocabulary.special == {"<|end|>": 0, "<|turn|>": 1}
    assert vocabulary.stop_ids == (0,)
    real = byte_level_tokenizer().get_vocab_size()
    assert [i for i, text in enumerate(vocabulary.tokens) if not text] == [0, 1, *range(real, 350)]


def test_byte_fallback_pieces_become_bytes_and_marks_become_spaces():
    vocabulary = Vocabulary.from_tokenizer_json(byte_fallback_json(), 265, [2])
    assert vocabulary.tokens[3:259] == tuple(bytes([byte]) for byte in range(256))
    assert vocabulary.tokens[259:] == (b" ", b"a", b"b", b" a", "é".encode(), b"<tool>")


def test_ids_that_the_model_cannot_choose_are_dropped():
    vocabulary = Vocabulary.from_tokenizer_json(byte_fallback_json(), 260, [2, 999])
    assert vocabulary.size == 260
    assert vocabulary.stop_ids == (2,)


@pytest.mark.parametrize("stops", [[], [400], [-1]])
def test_a_vocabulary_without_a_stop_token_is_refused(stops):
    with pytest.raises(ModelLoadError, match="stop token"):
        Vocabulary.from_tokenizer_json(byte_fallback_json(), 265, stops)


@pytest.mark.parametrize(
    "decoder",
    [None, {"type": "WordPiece"}, {"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "}],
)
def test_a_tokenizer_that_does_not_spell_bytes_is_refused(decoder):
    document = json.loads(byte_fallback_json()) | {"decoder": decoder}
    with pytest.raises(ModelLoadError, match="decoder"):
        Vocabulary.from_tokenizer_json(json.dumps(document), 265, [2])
