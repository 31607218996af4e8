"""Grammars that no text matches are found without a library."""

import pytest

from personae.grammar.gbnf import read_gbnf
from personae.grammar.productive import matches_nothing


@pytest.mark.parametrize(
    "source",
    [
        "root ::= root",
        'root ::= a\na ::= b | "x" a\nb ::= a',
        'root ::= "a" root # and again\n',
        'root ::= ("a" | "b") (root | root "c")+',
        "root ::= root{2,}",
        "root ::= other\nother ::= other",
    ],
)
def test_a_rule_that_needs_itself_whatever_is_chosen_matches_nothing(source: str) -> None:
    assert matches_nothing(read_gbnf(source))


@pytest.mark.parametrize(
    "source",
    [
        'root ::= root root | "a" | ""',
        "root ::= root | ",
        'root ::= "a" root?',
        'root ::= "a" root*',
        'root ::= ("a" | root){1,3}',
        "root ::=\n  s\ns ::= s s | [a-z] | [a-z\\]] s",
        'root ::= "root ::= root" | root',
        "root ::= root{0,2}",
        "root ::= root | .",
    ],
)
def test_others_match_something(source: str) -> None:
    assert not matches_nothing(read_gbnf(source))
