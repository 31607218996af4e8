"""Within a text the backend gets many tokens at once: answers do not change."""

import json
from typing import Any

import pytest
from grammar_walks import allowed_tokens
from sandbox_limits import PATIENT
from worst import possible_tokens, text_of, text_vocabulary

from personae.grammar.budget.matcher import BudgetMatcher
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.matcher import Matcher
from personae.grammar.spec import GrammarSpec

VOCABULARY = text_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY, limits=PATIENT)
SCHEMAS: dict[str, Any] = {
    "endless": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "parts": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "parts"],
        "additionalProperties": False,
    },
    "bounded": {"type": "array", "items": {"type": "string", "maxLength": 50}},
}
BEGUN = {"endless": b'{"name":"', "bounded": b'["'}


def begun(name: str, budget: int) -> BudgetMatcher:
    """A matcher within the first text of an answer, its mask filled."""
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    matcher = grammar.matcher(budget)
    assert isinstance(matcher, BudgetMatcher)
    assert matcher.feed([*BEGUN[name]]) == len(BEGUN[name])
    allowed_tokens(matcher, VOCABULARY)
    return matcher


def replayed(name: str, budget: int, tokens: list[int]) -> BudgetMatcher:
    """One that got `tokens` without a mask between them."""
    grammar = COMPILER.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[name])))
    matcher = grammar.matcher(budget)
    assert isinstance(matcher, BudgetMatcher)
    assert matcher.feed([*BEGUN[name], *tokens]) == len(BEGUN[name]) + len(tokens)
    return matcher


class Watched:
    """A matcher that records its tokens, and gives up after so many."""

    def __init__(self, inner: Matcher, most: int = 10**9) -> None:
        self._inner = inner
        self._most = most
        self.delivered: list[int] = []

    def accept(self, token: int) -> bool:
        return self.feed([token]) == 1

    def feed(self, tokens: list[int]) -> int:
        self.delivered.append(len(tokens))
        return self._inner.feed(tokens[: max(0, self._most - sum(self.delivered[:-1]))])

    @property
    def failed(self) -> bool:
        return sum(self.delivered) > self._most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_backend_hears_of_a_text_in_pieces_of_many_tokens() -> None:
    matcher = begun("endless", 5000)
    inner = Watched(matcher._inner)
    matcher._inner = inner
    for token in b"x" * 150:
        assert token in allowed_tokens(matcher, VOCABULARY)
        assert matcher.accept(token)
    assert inner.delivered == [64, 64]
    assert matcher.accept(ord('"'))
    assert inner.delivered == [64, 64, 22, 1]


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_who_asks_in_the_midst_of_a_text_is_answered_as_after_every_token(name: str, count: int) -> None:
    tokens = [*b"the 12 {[ quick brown fox " * 2][:count]
    matcher, other = begun(name, 3000), replayed(name, 3000, tokens)
    for token in tokens:
        before = matcher.snapshot()
        matcher.accept(token)
        allowed_tokens(matcher, VOCABULARY)
    for said in (b'"', b'",', b'"}', b'x"', b'x" '):
        assert matcher.follows([*said]) == other.follows([*said])
    assert matcher.forced() == other.forced()
    assert allowed_tokens(matcher.fork(), VOCABULARY) == allowed_tokens(other, VOCABULARY)
    matcher.restore(before)
    assert allowed_tokens(matcher, VOCABULARY) == allowed_tokens(
        replayed(name, 3000, tokens[:-1]), VOCABULARY
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_text_may_not_hold_is_not_accepted(name: str) -> None:
    matcher = begun(name, 3000)
    for token in b"some text":
        assert matcher.accept(token)
    assert not matcher.accept(ord("\n"))
    assert not matcher.accept(VOCABULARY.stop_ids[0])
    assert matcher.accept(ord('"'))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_text_that_runs_into_the_end_of_the_budget_is_narrowed_as_in_a_replay(name: str) -> None:
    budget, tokens = 90, []
    matcher = begun(name, budget)
    brackets = [
        VOCABULARY.tokens.index(text) for text in (b"{[", b"[[[[", b"{", b"the", b"1", b'"', b"]", b"}")
    ]
    for step in range(budget - len(BEGUN[name])):
        allowed = possible_tokens(matcher, VOCABULARY)
        assert possible_tokens(replayed(name, budget, tokens), VOCABULARY) == allowed
        turned = brackets[step % 4 :] if step % 3 else brackets[4:]
        token = next((token for token in turned if token in allowed), allowed[0])
        if token in VOCABULARY.stop_ids:
            break
        assert matcher.accept(token)
        tokens.append(token)
    json.loads(BEGUN[name] + text_of(tokens, VOCABULARY))


@pytest.mark.parametrize("most", [0, 30, 64, 100])
def test_a_backend_that_gives_up_on_a_text_it_hears_of_late_is_left_behind(most: int) -> None:
    matcher = begun("endless", 4000)
    matcher._inner = Watched(matcher._inner, most)
    text = b"the quick brown fox " * 8
    for token in text + b'"':
        assert token in allowed_tokens(matcher, VOCABULARY)
        assert matcher.accept(token)
    written = BEGUN["endless"] + text + b'"'
    while (token := allowed_tokens(matcher, VOCABULARY)[0]) not in VOCABULARY.stop_ids:
        assert matcher.accept(token)
        written += VOCABULARY.tokens[token]
    assert json.loads(written) == {"name": text.decode(), "parts": []}
