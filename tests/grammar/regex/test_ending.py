"""A text that is written in part ends so that it matches its patterns."""

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.grammar.regex.ending import ending

PATTERNS = [
    ("^[a-z]+-[0-9]{2}$", ["", "a", "ab-", "ab-1", "ab-12"]),
    ("^(https?://.*)|urn:.*|<all>$", ["", "x", "<a", "<all", "http:", "ur"]),
    ("b$", ["", "a", "ab", "ba"]),
    ("^(?=.*[0-9])(?!.*--)[a-z0-9-]{4,}$", ["", "ab", "ab-", "abcd"]),
]


@pytest.mark.parametrize(("pattern", "begun"), [(one, text) for one, texts in PATTERNS for text in texts])
def test_a_begun_text_ends_so_that_it_matches(pattern: str, begun: str) -> None:
    rest = ending((pattern,), begun)
    assert rest is not None
    assert jsonschema_rs.is_valid({"pattern": pattern}, begun + rest)


def test_a_text_that_matches_already_ends_here() -> None:
    assert ending(("^a*$",), "aa") == ""


def test_the_end_is_the_shortest_one() -> None:
    assert len(ending(("^x(longer|no)$",), "x") or "") == len("no")


def test_several_patterns_match_together() -> None:
    rest = ending(("^[a-z]*$", "^[^]{5,}$", "z$"), "a")
    assert rest is not None
    assert (len(rest), rest[-1]) == (4, "z")


@pytest.mark.parametrize("begun", ["1", "ab-x", "ab-123"])
def test_no_end_is_given_for_what_can_no_longer_match(begun: str) -> None:
    assert ending(("^[a-z]+-[0-9]{2}$",), begun) is None


@pytest.mark.parametrize(
    ("pattern", "begun"), [(r"^(a|b)\1$", "a"), ("(", ""), ("a", "\ud800"), ("^(?:.{1,63}[.]){1,127}b+$", "")]
)
def test_no_end_is_given_where_none_is_known(pattern: str, begun: str) -> None:
    assert ending((pattern,), begun) is None


@given(st.from_regex(r"\A[ab]{0,6}\Z"))
def test_any_beginning_ends_or_has_no_end_at_all(begun: str) -> None:
    pattern = "^(?:ab|ba)*$"
    rest = ending((pattern,), begun)
    possible = any(jsonschema_rs.is_valid({"pattern": pattern}, begun + more) for more in ("", "a", "b"))
    assert (rest is not None) == possible
    assert rest is None or jsonschema_rs.is_valid({"pattern": pattern}, begun + rest)
