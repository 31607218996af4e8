"""Grammars that no text matches are found without a library."""

import pytest

from personae.grammar.productive import matches_nothing


@pytest.mark.parametrize(
    "source",
    [
        "root ::= root",
        'root ::= a\na ::= b | "x" a\nb ::= a',
        'root ::= "a" root # and again\n',
        'root ::= ("a" | "b") (root | root "c")+',
        "root ::= root{2,}",
    ],
)
def test_a_rule_that_needs_itself_whatever_is_chosen_matches_nothing(source: str) -> None:
    assert matches_nothing(source)


@pytest.mark.parametrize(
    "source",
    [
        'root ::= root root | "a" | ""',
        'root ::= "a" root?',
        'root ::= "a" root*',
        'root ::= ("a" | root){1,3}',
        "root ::=\n  s\ns ::= s s | [a-z] | [a-z\\]] s",
        'root ::= "root ::= root" | root',
        "root ::= root{0,2}",
        "root ::= missing",  # the library says so
        "root ::= (",
        "other ::= other",
        "",
        "root ::= @",
    ],
)
def test_others_are_left_to_the_library(source: str) -> None:
    assert not matches_nothing(source)
