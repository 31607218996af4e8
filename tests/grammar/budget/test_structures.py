"""Reasoning and tool calls close in time, too, in every format, with tags of text and tags of tokens."""

from functools import cache

import pytest
from answers import FUNCTIONS
from grammar_walks import allowed_tokens
from sandbox_limits import PATIENT
from worst import WORST, answer, text_of, text_vocabulary, veto

from personae.grammar.budget.grammar import BudgetGrammar
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.reasoning.format import Thinks
from personae.grammar.reasoning.registry import reasoning_format
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.tools.registry import NAMES, tool_format
from personae.grammar.vocabulary import Vocabulary

THINK = reasoning_format("think")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON = Json(SCHEMA, True, "schema")


@cache
def vocabulary(special: tuple[str, ...]) -> Vocabulary:
    return text_vocabulary(special)


@cache
def compiler(special: tuple[str, ...]) -> GrammarCompiler:
    return GrammarCompiler(vocabulary(special), limits=PATIENT)


@cache
def compiled(special: tuple[str, ...], spec: GrammarSpec) -> BudgetGrammar:
    return compiler(special).compile_here(spec)


def written(
    shape: AnswerShape, special: tuple[str, ...], prefer: str, spare: int, begun: str = ""
) -> list[int]:
    """An answer within `spare` tokens more than the shortest, checked to be whole; it begins with `begun`."""
    spec = shape.spec()
    assert spec is not None
    grammar, tokens = compiled(special, spec), vocabulary(special)
    start = [tokens.special[begun]] if begun in tokens.special else list(begun.encode())
    budget = grammar.shortest + spare + len(start)
    matcher = grammar.matcher(budget)
    assert matcher.feed(start) == len(start)
    ids = start + answer(matcher, tokens, WORST[prefer], budget - len(start), spare)
    plain = grammar.matcher()
    assert plain.feed(ids) == len(ids)
    assert plain.accept(256), f"{budget} tokens: {text_of(ids, tokens)!r}"
    return ids


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("thinks", [Thinks.OPEN, Thinks.MAYBE])
@pytest.mark.parametrize("prefer", ["long", "members"])
def test_reasoning_ends_while_there_are_tokens_left_for_the_answer(
    special: tuple[str, ...], thinks: Thinks, prefer: str
) -> None:
    shape = AnswerShape(THINK, thinks, content=JSON)
    for spare in (0, 25):
        ids = written(shape, special, prefer, spare)
        text = text_of(ids, vocabulary(special)).decode(errors="replace")
        assert '"city"' in text
        assert thinks is Thinks.MAYBE or "</think>" in text


@pytest.mark.parametrize("name", NAMES)
def test_required_calls_are_complete_in_every_format(name: str) -> None:
    tools = tool_format(name)
    texts = f"{tools.trigger} {tools.close}".split()
    for special in ((), tuple(dict.fromkeys(text for text in texts if text.isprintable()))):
        shape = AnswerShape(tools=tools, functions=FUNCTIONS, use="required")
        for spare, prefer in ((0, "long"), (20, "members")):
            written(shape, special, prefer, spare)


@pytest.mark.parametrize("name", ["hermes", "mistral_v11", "deepseek_v31"])
def test_with_auto_a_call_that_has_begun_is_complete(name: str) -> None:
    tools = tool_format(name)
    shape = AnswerShape(tools=tools, functions=FUNCTIONS, use="auto")
    for special in ((), (tools.trigger,)):
        for spare in (200,):
            ids = written(shape, special, "brackets", spare, begun=tools.trigger)
            assert b"get" in text_of(ids, vocabulary(special))


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")])
def test_with_auto_a_call_may_begin_as_long_as_it_can_be_completed(special: tuple[str, ...]) -> None:
    shape = AnswerShape(tools=tool_format("hermes"), functions=FUNCTIONS, use="auto")
    spec = shape.spec()
    assert spec is not None
    grammar, tokens = compiled(special, spec), vocabulary(special)
    trigger = "<tool_call>"
    start = [tokens.special[trigger]] if special else [*trigger.encode()]

    def begins(budget: int) -> bool:
        matcher = grammar.matcher(budget)
        for token in start:
            if token not in allowed_tokens(matcher, tokens) or veto(matcher, token) is not None:
                return False
            assert matcher.accept(token)
        return True

    assert begins(120)  # far less than the longest call may need
    assert not begins(12)
