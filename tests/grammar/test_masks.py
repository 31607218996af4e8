import random

import pytest
import torch
from byte_bpe import byte_level_vocabulary
from grammar_walks import allowed_tokens

from personae.grammar.bitmask import allow_only
from personae.grammar.masks import BitmaskPool, allocate_bitmask, fill_masks
from personae.grammar.registry import make_backend
from personae.grammar.spec import GrammarSpec

VOCABULARY = byte_level_vocabulary()


def test_a_batch_mixes_bound_and_free_rows():
    rng = random.Random(3)
    compiled = make_backend("xgrammar", VOCABULARY).compile(GrammarSpec("json_object"))
    matchers = [compiled.matcher() if row % 3 else None for row in range(40)]
    expected = []
    for matcher in matchers:
        for _ in range(rng.randrange(6) if matcher else 0):
            matcher.accept(rng.choice(allowed_tokens(matcher, VOCABULARY)))
        expected.append(allowed_tokens(matcher, VOCABULARY) if matcher else list(range(352)))
    bitmask = torch.zeros((48, 11), dtype=torch.int32)
    fill_masks(bitmask, matchers)
    bits = ((bitmask.unsqueeze(2) >> torch.arange(32)) & 1).flatten(1)
    assert [row.nonzero().flatten().tolist() for row in bits[:40]] == expected
    assert not bitmask[40:].any()


@pytest.mark.parametrize(("vocab_size", "words"), [(1, 1), (32, 1), (33, 2), (100_352, 3136)])
def test_a_new_bitmask_covers_the_vocabulary_and_allows_everything(vocab_size, words):
    bitmask = allocate_bitmask(3, vocab_size)
    assert bitmask.shape == (3, words)
    assert bitmask.dtype == torch.int32
    assert (bitmask == -1).all()


def test_the_pool_gives_out_each_bitmask_once_and_reuses_what_is_given_back():
    pool = BitmaskPool(4, 350)
    first, second = pool.acquire(), pool.acquire()
    assert first is not second
    assert first.shape == (4, 11)
    pool.release(first)
    assert pool.acquire() is first


def test_allow_only_sets_exactly_the_given_bits():
    bitmask = allocate_bitmask(2, 64)
    allow_only(bitmask[1].numpy(), [0, 31, 63])
    assert bitmask[0].tolist() == [-1, -1]
    assert bitmask[1].tolist() == [1 - 2**31, -(2**31)]
