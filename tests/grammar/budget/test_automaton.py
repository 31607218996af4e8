"""In an automaton it is known exactly which tokens leave an answer the time to end."""

import json
import re

import pytest
from grammar_walks import allowed_tokens
from worst import WORST, answer, text_of, text_vocabulary

from personae.grammar.backends.outlines import OutlinesBackend
from personae.grammar.budget.automaton import AutomatonGrammar
from personae.grammar.budget.table import TokenTable
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
TABLE = TokenTable(VOCABULARY)
BACKEND = OutlinesBackend(VOCABULARY)
CHOICES = ["the quick brown fox", "the name", "thinking", "aaaaaaaaab", "日本", "true", "no"]
PATTERNS = {
    "date": "[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "open": "x[0-9]+(,[0-9]+)*;",
    "word": "(the){2,5}(,quick)? brown fox",
    "wide": "日本(é|a{1,9})-",
}


def automaton(pattern: str) -> AutomatonGrammar:
    return BACKEND.compile(GrammarSpec("regex", pattern))


@pytest.mark.parametrize("taste", WORST)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_an_answer_is_whole_at_every_budget_whatever_the_model_prefers(pattern: str, taste: str) -> None:
    grammar = automaton(pattern)
    for budget in range(grammar.shortest, grammar.shortest + 12):
        for seed in range(3):
            tokens = answer(grammar.matcher(budget), VOCABULARY, WORST[taste], budget, seed)
            assert len(tokens) <= budget
            assert re.fullmatch(pattern, text_of(tokens, VOCABULARY).decode())


def test_the_shortest_answer_is_the_shortest() -> None:
    assert automaton("12[0-9]{4}x").shortest == 3
    assert automaton("[0-9]{3}").shortest == 1
    assert BACKEND.compile(GrammarSpec("choice", json.dumps(CHOICES))).shortest == 1
    assert BACKEND.compile(GrammarSpec("choice", '["thethe", "aaaaaaaaab"]')).shortest == 2


def test_a_mask_has_exactly_the_tokens_behind_which_some_choice_fits() -> None:
    grammar = BACKEND.compile(GrammarSpec("choice", json.dumps(CHOICES)))

    def check(written: bytes, tokens: tuple[int, ...], budget: int) -> None:
        matcher = grammar.matcher(budget)
        assert matcher.feed(tokens) == len(tokens)
        left = budget - len(tokens) - 1
        expected = []
        for token, text in enumerate(VOCABULARY.tokens):
            begun = written + text
            rests = [one.encode()[len(begun) :] for one in CHOICES if text and one.encode().startswith(begun)]
            if any(len(TABLE.spell_shortest(rest) or ()) <= left for rest in rests):
                expected.append(token)
        ended = [256] if written.decode(errors="replace") in CHOICES else []
        assert allowed_tokens(matcher, VOCABULARY) == sorted(expected + ended)
        for token in expected:
            check(written + VOCABULARY.tokens[token], (*tokens, token), budget)

    for budget in (1, 2, 3, 5):
        check(b"", (), budget)


def test_a_budget_that_cannot_be_kept_does_not_stand_in_the_way() -> None:
    matcher = automaton(PATTERNS["date"]).matcher(2)
    assert matcher.feed([*b"2026-11-22", 256]) == 11


def test_what_was_taken_back_is_there_to_be_spent() -> None:
    matcher = automaton("[0-9]{1,9}").matcher(3)
    assert matcher.feed(b"12") == 2
    matcher.restore(matcher.snapshot() - 2)
    assert matcher.fork().feed([*b"123", 256]) == 4
    assert matcher.feed(b"1234") == 3
    assert allowed_tokens(matcher, VOCABULARY) == [256]
    assert matcher.accept(256)
    matcher.restore(matcher.snapshot() - 2)
    assert not matcher.terminated
    assert matcher.feed(b"0") == 1
