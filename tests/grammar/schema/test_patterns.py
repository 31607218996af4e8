import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.grammar.regex.automaton import automaton
from personae.grammar.regex.parse import NotRegular
from personae.grammar.regex.plain import complement, plain
from personae.grammar.schema.patterns import any_of_length, anything_but

TEXT = st.text(alphabet='ab^]\\-"\n.é', max_size=5)


@given(st.lists(TEXT, max_size=5), TEXT)
def test_anything_but_matches_exactly_the_other_strings(words, text):
    pattern = anything_but(words)
    assert (re.search(pattern, text) is None) == (text in words) or text.endswith("\n")
    assert all(re.fullmatch(pattern, word) is None for word in words)


@given(st.integers(0, 3), st.one_of(st.none(), st.integers(3, 4)), TEXT)
def test_any_of_length_counts_characters(minimum, maximum, text):
    inside = minimum <= len(text) <= (len(text) if maximum is None else maximum)
    assert (re.fullmatch(any_of_length(minimum, maximum), text) is not None) == inside


@pytest.mark.parametrize(
    "pattern",
    [
        "[^a-b]",
        "[ab]",
        r"[\\^\]]",
        "^[ab]*$",
        "^[^ab]+$",
        "^a",
        "(a|b)",
        "[ab]c",
        "^[a]*[b]*$",
        "a",
        r"a.b|^b{2,3}$",
    ],
)
@given(text=TEXT.filter(lambda text: not text.endswith("\n")))
def test_a_complement_matches_what_the_pattern_does_not(pattern, text):
    other = complement(pattern)
    assert other is not None
    assert (re.search(other, text) is None) == (re.search(pattern, text) is not None)


def test_an_expression_that_cannot_be_found_is_not_searched_for_again(monkeypatch):
    tried = []

    def found(matched, unmatched):
        tried.append(matched)
        return automaton(matched, unmatched)

    monkeypatch.setattr("personae.grammar.regex.plain.automaton", found)
    for _ in range(3):
        with pytest.raises(NotRegular, match="too many states"):
            plain(("a[ab]{40}$", "b[ab]{40}a"))
    assert len(tried) == 1
