"""Patterns against a JavaScript engine: what it finds is what the plain expressions match."""

import json
import shutil
import subprocess
from itertools import product

import pytest

from personae.grammar.regex.automaton import automaton
from personae.grammar.regex.parse import NotRegular, parse
from personae.grammar.regex.plain import complement, conjuncts, plain

_NODE = shutil.which("node")
_PATTERNS = [
    *(
        r"^a.$",
        r"^\s*$",
        r"(a|b$)",
        r"(^a|b)c?$",
        r"a+?b{1,2}?$",
        r"(?<n>a)b",
        r"^$^",
        r"x*",
        r"^[^]$",
        r"(?!)",
    ),
    *(r"^(?=.*a)(?!b)[abc]{2,3}$", r"^(?:(?!ab).)*$", r"a(?=b)", r"^(?=(a|b))\w$", r"^(?!a$)(?!b$)[ab]*$"),
    *(
        r"^(?=.{2,3}$)(a|b.)*$",
        r"(a(?!b)|b(?!a))+c",
        r"^(ab|a)(?=b?$)",
        r"^(?:a|(?=b))+b$",
        r"^((?!aa)(a|b))*$",
    ),
    *(
        r"(?<!a)b$",
        r"(?<=a)b",
        r"(?<=^|b)a$",
        r"(?<![ab])c",
        r"(?<=ab)c(?=a|$)",
        r"^(?=a|b)(?=b|c)[^]*(?<!a)$",
    ),
    *(
        r"\bab\b",
        r"\Ba",
        r"\b",
        r"^\b$",
        r"a\b-",
        r"^(a?){3}$",
        r"^(?:a*)*$",
        r"^(\/?(a*)($|\/))*$",
        r"(?:^|-)a(?:$|-)",
    ),
    *(
        r"^\p{L}+$",
        r"^[\p{Lu}\d]$",
        r"^\u{e9}$",
        r"^\x61\u0062$",
        r"^[\w-]+$",
        r"^a{0}b$",
        r"^(|a)$",
        r"^\cA$",
        r"^[\b]$",
    ),
]
_LENIENT = [r"[[a]b]", r"^[[a]$", r"[a&&b]", r"^[a-\w]$", r"^]$", r"^a{,3}$", r"^}$"]
"""What the flag "u" does not allow."""
_TEXTS = ["".join(text) for length in range(5) for text in product("abc", repeat=length)]
_TEXTS += [
    "".join(text)
    for length in (1, 2)
    for text in product("a-/ \n\r_][&}{,3É\u2028é\ufeff\x85\x01\x08", repeat=length)
]


def _found(patterns: list[str], flags: str) -> list[list[bool]]:
    program = (
        "const [patterns, texts, flags] = JSON.parse(require('fs').readFileSync(0));"
        "const found = patterns.map(one => texts.map(text => new RegExp(one, flags).test(text)));"
        "console.log(JSON.stringify(found))"
    )
    run = subprocess.run(
        [str(_NODE), "-e", program],
        input=json.dumps([patterns, _TEXTS, flags]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.skipif(_NODE is None, reason="node is not installed: there is no JavaScript engine to ask")
@pytest.mark.parametrize(("patterns", "flags"), [(_PATTERNS, "u"), (_LENIENT, "")])
def test_plain_expressions_match_what_a_javascript_engine_finds(patterns, flags):
    everywhere = _found(patterns, flags)
    plain_ones = [part for pattern in patterns for part in conjuncts(pattern)]
    of_parts = dict(zip(plain_ones, _found(plain_ones, flags), strict=True))
    complements = [complement(pattern) for pattern in patterns]
    assert None not in complements
    for pattern, found, other in zip(patterns, everywhere, _found(complements, "u"), strict=True):
        together = [
            all(column) for column in zip(*(of_parts[one] for one in conjuncts(pattern)), strict=True)
        ]
        differing = [text for text, one, two in zip(_TEXTS, found, together, strict=True) if one != two]
        assert not differing, (pattern, conjuncts(pattern))
        assert [not one for one in found] == other, (pattern, complement(pattern))


def test_several_patterns_and_complements_are_one_expression():
    assert plain(("^a", "b$"), ("c",)) is not None
    assert plain(("^a",), ("^[ab]",)) is None
    assert automaton((parse("^a+$"),), (parse("^(?:a|aa+)$"),)).empty


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", r"\k<n>", "(?i)a", "(?<=(?=a))b", "a{2,1}", "(", "[b-a]", "a**"]
)
def test_what_is_not_known_to_be_regular_is_said_to_be_so(pattern):
    with pytest.raises(NotRegular):
        automaton((parse(pattern),))
    assert conjuncts(pattern) == (pattern,)


def test_an_expression_whose_automaton_grows_without_bounds_ends_soon():
    with pytest.raises(NotRegular):
        plain(("^(a|b)*a(a|b){40}$",), ())
