"""Text that a grammar leaves hardly any choice about is guessed, with the blanks that the answer has."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from bundled import OBJECT, compiler, tokenizer, vocabulary
from engine_harness import log_of
from hypothesis import given
from hypothesis import strategies as st

from personae.engine.speculation.forced import Retokenizer
from personae.engine.speculation.grammar_proposer import GrammarProposer
from personae.engine.speculation.json_blanks import JsonBlanks
from personae.engine.speculation.ngram import NgramProposer
from personae.engine.speculation.proposer import Draft
from personae.grammar.bitmask import words_of
from personae.grammar.matcher import Matcher
from personae.grammar.spec import GrammarSpec, ReasoningLimit
from personae.grammar.structure.elements import Concat, Json, Until, structure_spec

KEYS = ("delivery_address", "reason_of_return", "refund_by_bank_transfer")
VALUES = {
    "delivery_address": "Oslo",
    "reason_of_return": "not wanted any more",
    "refund_by_bank_transfer": True,
}
STYLES: dict[str, dict[str, Any]] = {
    "usual": {},
    "compact": {"separators": (",", ":")},
    "indented": {"indent": 2},
}


@pytest.fixture(scope="module")
def retokenizer() -> Retokenizer:
    return Retokenizer(tokenizer(), vocabulary().tokens)


def begun(
    retokenizer: Retokenizer, text: str, spec: GrammarSpec = OBJECT, budget: int = 400
) -> tuple[Matcher, GrammarProposer]:
    """The matcher after `text`, and a proposer that has followed it."""
    matcher = compiler().compile(spec).matcher(budget)
    assert isinstance(matcher, Matcher)
    proposer = GrammarProposer(matcher, retokenizer, log_of("a", (5, 6, 7)), None)
    for token in tokenizer().encode(text, add_special_tokens=False):
        assert matcher.accept(token)
        proposer.extend((token,))
    return matcher, proposer


def text_of(retokenizer: Retokenizer, draft: Draft | None) -> str:
    return "" if draft is None else retokenizer.text(draft.tokens).decode()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", [1, 2])
def test_the_next_key_is_guessed_with_the_blanks_that_the_answer_has(
    retokenizer: Retokenizer, style: str, place: int
) -> None:
    text = json.dumps(VALUES, **STYLES[style])
    key = text.index(f'"{KEYS[place]}"')
    comma = text.rindex(",", 0, key) + 1
    value = text.index(":", key) + 1
    _, proposer = begun(retokenizer, text[:comma])
    guessed = text_of(retokenizer, proposer.propose(100))
    if place == 1 and style == "indented":
        assert guessed.lstrip().startswith(f'"{KEYS[place]}": ')  # it has seen no blanks after a comma
    else:
        assert guessed.startswith(text[comma:value])
        assert text[comma:].startswith(guessed)


def test_a_draft_has_as_many_tokens_as_asked_for(retokenizer: Retokenizer) -> None:
    _, proposer = begun(retokenizer, '{"delivery_address": "Oslo",')
    whole = proposer.propose(100)
    assert whole is not None
    for most in range(1, len(whole.tokens) + 1):
        draft = proposer.propose(most)
        assert draft is not None
        assert draft.tokens == whole.tokens[:most]


def test_nothing_is_guessed_within_a_free_text(retokenizer: Retokenizer) -> None:
    _, proposer = begun(retokenizer, '{"delivery_address": "Os')
    assert proposer.propose(7) is None


def test_nothing_is_guessed_where_several_parts_may_follow(retokenizer: Retokenizer) -> None:
    several = GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"type": "boolean"}}))
    _, proposer = begun(retokenizer, "[true", several)
    assert proposer.propose(7) is None


def test_before_a_value_only_the_blanks_are_guessed(retokenizer: Retokenizer) -> None:
    text = json.dumps(VALUES)
    key = text.index(f'"{KEYS[2]}"') + len(KEYS[2]) + 2
    _, proposer = begun(retokenizer, text[:key])
    assert text_of(retokenizer, proposer.propose(7)) == ": "


def test_the_key_is_guessed_too_where_a_plan_for_the_end_is_kept(retokenizer: Retokenizer) -> None:
    matcher, proposer = begun(retokenizer, '{"delivery_address": "Oslo",', budget=60)
    assert matcher.verifies
    assert text_of(retokenizer, proposer.propose(100)).startswith(' "reason_of_return": "')


def test_the_key_is_guessed_after_reasoning(retokenizer: Retokenizer) -> None:
    answer = Concat((Until("</t>"), Json(json.loads(OBJECT.source), strict=True, param="x")))
    limit = ReasoningLimit(50, "<t>", "</t>", opened=True)
    spec = msgspec.structs.replace(structure_spec(answer), reasoning=limit)
    _, proposer = begun(retokenizer, 'It is, I think,</t>{"delivery_address": "Oslo",', spec)
    assert text_of(retokenizer, proposer.propose(100)).startswith(' "reason_of_return": "')


@pytest.mark.parametrize(
    "text", ["", '{"delivery_address"', '{"delivery_address": "Oslo",', '{"delivery_address": "O']
)
def test_a_guess_leaves_the_answer_where_it_is(retokenizer: Retokenizer, text: str) -> None:
    matcher, proposer = begun(retokenizer, text)
    again, _ = begun(retokenizer, text)
    first = proposer.propose(7)
    assert proposer.propose(7) == first
    masks = np.zeros((2, words_of(len(vocabulary().tokens))), np.int32)
    matcher.fill(masks, 0)
    again.fill(masks, 1)
    assert (masks[0] == masks[1]).all()


def test_other_drafts_end_where_the_grammar_refuses_them(retokenizer: Retokenizer) -> None:
    class Fixed:
        def extend(self, tokens: object) -> None:
            """It knows all."""

        def propose(self, most: int) -> Draft:
            return Draft(tuple(tokenizer().encode('true, "more": 1}', add_special_tokens=False)), "ngram")

    text = json.dumps(VALUES)
    _, proposer = begun(retokenizer, text[: text.index("true")])
    assert text_of(retokenizer, proposer.within(Fixed()).propose(7)) == "true"
    _, proposer = begun(retokenizer, text[: text.index('"not')])
    assert proposer.within(Fixed()).propose(7) is None


@given(
    value=st.recursive(
        st.one_of(st.integers(0, 99), st.text(max_size=5), st.booleans()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    style=st.sampled_from([(", ", ": "), (",", ":"), (",\n", " : "), (", ", ":\t")]),
)
def test_the_blanks_of_a_text_are_guessed_right_when_it_is_read_again(
    value: Any, style: tuple[str, str]
) -> None:
    text = json.dumps([value, value], separators=style).encode()
    blanks = JsonBlanks()
    blanks.read(text)
    for at in range(len(text)):
        end = next((end for end in range(at, len(text)) if text[end] not in b" \n\r\t"), len(text))
        again = blanks.copy()
        again.last, again.run, again.within = 0, b"", False
        again.read(text[:at])
        if not again.within and end < len(text) and again.last in b"[{,:" and again.last:
            assert again.missing(text[end]) == text[at:end]


def test_a_value_is_found_in_the_prompt_without_the_space_before_it() -> None:
    prompt, quoted = [1, 7, 5], [9, 2]
    assert NgramProposer([*prompt, *quoted]).propose(1) is None
    same = [*range(2), 1, *range(3, 10)]  # token 2 is token 1 without a space
    draft = NgramProposer([*prompt, *quoted], same).propose(2)
    assert draft is not None
    assert draft.tokens == (7, 5)


def test_tokens_are_the_same_that_differ_in_a_space_before_them() -> None:
    made = Retokenizer(tokenizer(), (b"a", b" a", b" b", b"", b" ", b"  a"))
    assert made.spaceless == [0, 0, 2, 3, 4, 1]
