"""The library allows sets of tokens at once. Its masks have to be those of the tokens tried one by one."""

import json
import random

import numpy as np
import pytest

from personae.grammar.bitmask import allows, words_of
from personae.grammar.registry import make_backend
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

_CHARACTERS = 'aZ09_- .ß€\u2028\u2029\x7f\n\t"\\/{}:,'


def _vocabulary() -> Vocabulary:
    """Bytes, words and texts of up to 40 characters, whose lengths are around those of the sets."""
    draw = random.Random(3)
    texts = {
        "".join(draw.choices(characters, k=length))
        for characters in ("abXY01", "ab 0", _CHARACTERS[:10], _CHARACTERS)
        for length in (2, 3, 9, 10, 11, 14, 15, 16, 29, 30, 31, 40)
        for _ in range(12)
    }
    tokens = [*(bytes((byte,)) for byte in range(256)), *(text.encode() for text in sorted(texts))]
    # These end within a character.
    halves = [token[:-1] for token in tokens if len(token) > 8 and token[-1] >= 0x80]
    return Vocabulary((*dict.fromkeys([*tokens, *halves]), b""), (len({*tokens, *halves}),), {})


VOCABULARY = _vocabulary()
BACKEND = make_backend("llguidance", VOCABULARY)
STRINGS = [
    {},
    {"maxLength": 3},
    {"maxLength": 12},
    {"minLength": 2, "maxLength": 29},
    {"maxLength": 300},
    {"pattern": "^a.+$"},
    {"pattern": "^.*$"},
    {"pattern": "^[a-zA-Z0-9_-]+$"},
    {"pattern": "^[a-zA-Z0-9]{1,12}$"},
    {"pattern": "^[a-z]*$"},
    {"pattern": r"^\S+$"},
    {"pattern": "[0-9]{2}"},
    {"format": "uri"},
]


@pytest.mark.parametrize("string", STRINGS, ids=json.dumps)
@pytest.mark.parametrize("begun", ["", "a", "ab", "a0", "a00b", "https://a"])
def test_a_mask_has_exactly_the_tokens_that_are_accepted_alone(string, begun):
    schema = {"type": "string", **string}
    matcher = BACKEND.compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    matcher.feed([*b'"', *begun.encode()])  # as far as the string can begin so
    row = np.zeros((1, words_of(VOCABULARY.size)), np.int32)
    matcher.fill(row, 0)
    alone = [bool(text) and matcher.follows([token]) == 1 for token, text in enumerate(VOCABULARY.tokens)]
    assert [allows(row[0], token) for token in range(VOCABULARY.size)] == alone
    assert any(alone)
