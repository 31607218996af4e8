"""Names that are not listed: the library excludes the listed ones from all strings."""

import json
from functools import cache
from itertools import product

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from personae.evals.suites.maskbench import byte_vocabulary
from personae.grammar.backend import CompiledGrammar
from personae.grammar.backends.llguidance import LLGuidanceBackend
from personae.grammar.backends.llguidance_text import tight
from personae.grammar.bitmask import words_of
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.spec import GrammarSpec
from personae.grammar.tracked.name_terminals import NamesBut

LISTED = ("a", "ab", 'a"b', "a\\", "a\nb", "é", "", "a/b", "日本", "😀")
PIECES = (
    b"a", b"b", b'"', b"\\", b"n", b"u", b"0", b"/", b" ", b"\x7f", b"\x01", b"\n",
    b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5", b"\xf0\x9f\x98", b"\x80", b"\xed\xa0",
)  # fmt: skip


@cache
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(byte_vocabulary())


@cache
def names_but(listed: tuple[str, ...]) -> CompiledGrammar:
    return backend().compile(GrammarSpec("lark", f"start: NAME\nNAME: {NamesBut(listed).terminal()}"))


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    matcher, written = grammar.matcher(), text.encode()
    return matcher.feed(written) == len(written) and matcher.accept(256)


def mask_after(grammar: CompiledGrammar, text: bytes) -> bytes | None:
    matcher = grammar.matcher()
    if matcher.feed(text) < len(text):
        return None
    mask = np.zeros((1, words_of(257)), np.int32)
    matcher.fill(mask, 0)
    return mask.tobytes()


@given(name=st.one_of(st.sampled_from(LISTED), st.text('ab"\\\n/é日😀 ', max_size=4)))
def test_exactly_the_names_that_are_not_listed_are_accepted(name: str) -> None:
    is_other = jsonschema_rs.validator_for({"not": {"enum": [*LISTED]}}).is_valid(name)
    assert accepts(names_but(LISTED), json.dumps(name, ensure_ascii=False)) is is_other


@pytest.mark.parametrize("before", [b"", b'"', b'"a', b'"\\', b'"\xe6'])
def test_a_name_is_spelled_as_the_library_spells_strings(before: bytes) -> None:
    strings = backend().compile(GrammarSpec("lark", f"start: {tight({'type': 'string'})}"))
    texts = [before + b"".join(text) for count in range(3) for text in product(PIECES, repeat=count)]
    found = [(mask_after(strings, text), mask_after(names_but(()), text)) for text in texts]
    assert [text for text, (one, other) in zip(texts, found, strict=True) if one != other] == []
    assert any(one is not None for one, _ in found)


@pytest.mark.parametrize("name", ['a"b', "a\\", "a\nb", "a", "é"])
def test_a_listed_name_is_never_written_as_another_one(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}, "other": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    }
    compiler = GrammarCompiler(byte_vocabulary(), sandboxed=False)
    grammar = compiler.compile_here(GrammarSpec("json_schema", json.dumps(schema), any_order=True))
    for value in ({name: 1}, {name: True}, {"other": None, name: 1}, {f"{name}x": True, "other": None}):
        matcher, text = grammar.matcher(), json.dumps(value, ensure_ascii=False).encode()
        taken = matcher.feed(text) == len(text) and matcher.accept(256)
        assert taken is jsonschema_rs.validator_for(schema).is_valid(value), value
