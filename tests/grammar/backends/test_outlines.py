"""What outlines takes, it reads as the standard library and llguidance do; what it might not, it refuses."""

import json
import random
import re

import pytest
from byte_bpe import byte_level_vocabulary
from grammar_walks import accepts, allowed_tokens, walk
from hypothesis import given, settings
from hypothesis import strategies as st

from personae.errors import GrammarError
from personae.grammar.backends.deterministic import places
from personae.grammar.registry import make_backend
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

VOCABULARY = byte_level_vocabulary()
OUTLINES = make_backend("outlines", VOCABULARY)
LLGUIDANCE = make_backend("llguidance", VOCABULARY)

ATOMS = [
    "a",
    "b",
    "ab",
    "ba",
    "é",
    "è",
    "日",
    " ",
    r"\.",
    r"\n",
    r"\-",
    "[ab]",
    "[b-d]",
    "[0-9é]",
    r"\d",
    r"[\d.]",
    "-",
]
REPETITIONS = ["", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "{0,2}", "??", "+?"]
EXPRESSIONS = st.recursive(
    st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPETITIONS)).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.tuples(st.lists(inner, min_size=1, max_size=3).map("|".join), st.sampled_from(REPETITIONS)).map(
            lambda parts: f"({parts[0]}){parts[1]}"
        ),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        inner.map(lambda one: f"^{one}$"),
    ),
    max_leaves=6,
)
TEXTS = st.text("abcdéè日 .\n-01٣", max_size=8)


def compiled(pattern, backend=OUTLINES):
    return backend.compile(GrammarSpec("regex", pattern))


def taken(pattern):
    try:
        return compiled(pattern)
    except GrammarError:
        return None


@settings(max_examples=400)
@given(EXPRESSIONS, st.lists(TEXTS, max_size=8), st.integers(0, 99))
def test_the_texts_of_an_expression_are_those_of_the_standard_library_and_of_llguidance(pattern, texts, seed):
    grammar = taken(pattern)
    if grammar is None:
        return
    other = compiled(pattern, LLGUIDANCE)
    own = walk(grammar.matcher(), VOCABULARY, random.Random(seed), 12).decode()
    others = walk(other.matcher(), VOCABULARY, random.Random(seed), 12).decode()
    for text in (own, others, own[:-1], others + own, *texts):
        # `$` is the end of the answer here, and \d an ASCII digit.
        expected = re.fullmatch(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
        for one in (grammar, other):
            assert accepts(one.matcher(), VOCABULARY, text.encode()) == expected, text


@settings(max_examples=100)
@given(EXPRESSIONS, st.integers(0, 99))
def test_the_masks_are_those_of_llguidance(pattern, seed):
    grammar = taken(pattern)
    if grammar is None:
        return
    rng = random.Random(seed)
    one, other = grammar.matcher(), compiled(pattern, LLGUIDANCE).matcher()
    for _ in range(12):
        tokens = allowed_tokens(one, VOCABULARY)
        assert tokens == allowed_tokens(other, VOCABULARY)
        token = rng.choice(tokens)
        assert one.accept(token)
        assert other.accept(token)
        if one.terminated:
            break


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6))
def test_exactly_the_choices_are_written(choices):
    grammar = OUTLINES.compile(GrammarSpec("choice", json.dumps(choices)))
    for choice in choices:
        for text in (choice, choice[:-1], choice + choice[0]):
            assert accepts(grammar.matcher(), VOCABULARY, text.encode()) == (text in choices)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a|ab", "ab"), ("x(a|ab)", "xab"), ("a+?", "aaa"), ("a??b??", "ab"), ("no|not", "not")],
)
def test_an_alternative_that_stands_later_is_written_too(pattern, text):
    grammar = taken(pattern)
    assert grammar is None or accepts(grammar.matcher(), VOCABULARY, text.encode())
    assert grammar is not None or pattern == "a??b??"  # no text at all would match


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            ".",
            "[^a]",
            r"\w+",
            r"\s",
            r"\D",
            "(?i)a",
            r"\bno\b",
            "a(?=b)",
            r"(a)\1",
            "(?P<n>a)",
            r"\p{L}",
            "[à-é]",
        ),
        *(
            "[[:alpha:]]",
            "[a-z&&[aeiou]]",
            "[a--b]",
            "a{,3}",
            "a{",
            "(",
            "a++",
            r"\x41",
            r"\u0041",
            "[]a]",
            "a$b",
        ),
        *("", "a*", "(a|b)?", "^$"),
        *("a*ab", "(a|ba?)a", "(a?b?)+", "([0-9]{1,2}){2}", "(a*)*", "[ab]*a[ab]{20}"),
        *("a{1025}", "((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9}){9}", "(" * 5000 + "a" + ")" * 5000),
    ],
    ids=lambda pattern: pattern[:20],
)
def test_what_is_not_surely_the_same_or_small_is_refused(pattern):
    with pytest.raises(GrammarError, match="outlines does not support"):
        compiled(pattern)


@pytest.mark.parametrize("spec", [GrammarSpec("json_object"), GrammarSpec("ebnf", 'root ::= "a"')], ids=str)
def test_other_kinds_are_refused(spec):
    with pytest.raises(GrammarError, match="outlines does not support"):
        OUTLINES.compile(spec)


def test_an_expression_has_as_many_places_as_the_bytes_it_tells_apart():
    assert places("[0-9]{4}-[0-9]{2}") == 7
    assert places("é(a|bc){2,3}") == 11
    assert places("yes|no|not") == 8


def test_where_no_tokens_write_an_answer_the_choice_is_refused():
    vocabulary = Vocabulary((b"a", b"b", b""), (2,), {})
    backend = type(OUTLINES)(vocabulary)
    with pytest.raises(GrammarError):
        backend.compile(GrammarSpec("choice", '["c"]'))
    assert accepts(backend.compile(GrammarSpec("choice", '["ab", "c"]')).matcher(), vocabulary, b"ab")


def test_all_tokens_of_equal_text_are_allowed():
    vocabulary = Vocabulary((b"a", b"b", b"", b"a"), (2,), {})
    matcher = type(OUTLINES)(vocabulary).compile(GrammarSpec("choice", '["ab"]')).matcher()
    assert allowed_tokens(matcher, vocabulary) == [0, 3]
    assert matcher.accept(3)
    assert allowed_tokens(matcher, vocabulary) == [1]
