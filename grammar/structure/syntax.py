"""Reads grammars that callers write: llama.cpp's GBNF, or Lark in llguidance's dialect."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from personae.errors import GrammarError
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import Element, Lark

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def is_gbnf(source: str) -> bool:
    """Whether the grammar is GBNF: GBNF writes rules with `::=`, Lark with a colon."""
    return _GBNF.search(source) is not None


def grammar_spec(source: str) -> GrammarSpec:
    """The spec that binds a whole answer to a grammar."""
    return GrammarSpec("ebnf" if is_gbnf(source) else "lark", source)


def grammar_element(source: str, param: str) -> Element:
    """The grammar as a part of an answer. Raises GrammarError, with `param`, if it cannot be read."""
    if not is_gbnf(source):
        return Lark(source, param)
    try:
        return Lark(gbnf_to_lark(source), param)
    except Exception as error:  # the library's reader may raise anything
        raise GrammarError(f"`{param}`: the grammar cannot be read: {error}", param=param) from error
