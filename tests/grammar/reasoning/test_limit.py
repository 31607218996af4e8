"""A thinking budget: reasoning ends when it is spent, in every format, whatever the model would rather do."""

import json
import random
from dataclasses import replace
from functools import cache

import jsonschema
import pytest
from answers import FUNCTIONS, WEATHER, marked, parse_marked
from grammar_walks import allowed_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_limits import PATIENT
from worst import text_vocabulary, veto

from personae.grammar.budget.table import TokenTable
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.matcher import Matcher
from personae.grammar.reasoning.format import ReasoningFormat, Thinks
from personae.grammar.reasoning.registry import NAMES, reasoning_format
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.answer import AnswerShape
from personae.grammar.structure.elements import Json
from personae.grammar.tools.registry import tool_format
from personae.grammar.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
JSON = Json(SCHEMA, True, "schema")
IMPORTED = ReasoningFormat("imported", (), "<thought>\n", "\n</thought>")
FORMATS = {**{name: reasoning_format(name) for name in NAMES}, "imported": IMPORTED}
SPECIAL = {
    "think": ("<think>", "</think>"),
    "bracket_think": ("[THINK]", "[/THINK]"),
    "harmony": ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    "gemma4": ("<|channel>", "<channel|>"),
    "imported": (),
}

# Of gpt-oss without what it says between thoughts; it spells no tags.
QUIET = replace(reasoning_format("harmony"), aside="")
CASES = [
    (FORMATS[name] if name != "harmony" else QUIET, special)
    for name in FORMATS
    for special in dict.fromkeys((SPECIAL[name], () if name != "harmony" else SPECIAL[name]))
]

every_format = pytest.mark.parametrize(
    ("format", "special"), CASES, ids=lambda value: getattr(value, "name", "tokens" if value else "text")
)
either = pytest.mark.parametrize("thinks", [Thinks.OPEN, Thinks.MAYBE])


@cache
def vocabulary(special: tuple[str, ...]) -> Vocabulary:
    made = text_vocabulary(special)
    return Vocabulary(made.tokens, made.stop_ids, {**made.special, "<|end_of_turn|>": 256})


@cache
def compiler(special: tuple[str, ...]) -> GrammarCompiler:
    return GrammarCompiler(vocabulary(special), limits=PATIENT)


@cache
def matching(special: tuple[str, ...], spec: GrammarSpec, budget: int | None) -> Matcher:
    return compiler(special).compile(spec).matcher(budget)


def begin(shape: AnswerShape, special: tuple[str, ...], budget: int | None = None) -> Matcher:
    spec = shape.spec()
    assert spec is not None
    return matching(special, spec, budget).fork()


def thinker(matcher: Matcher, tokens: Vocabulary, seed: int, begun: list[int], most: int) -> list[int]:
    """What a model writes that thinks for as long as it can, in letters, and half characters too."""
    rng = random.Random(seed)
    ids: list[int] = []
    for token in begun:
        assert token in allowed_tokens(matcher, tokens)
        assert matcher.accept(token)
        ids.append(token)
    odd = [*b"abcdefghijklmnopqrstuvwxyz ", *"é日".encode()]
    while len(ids) < most:
        allowed = allowed_tokens(matcher, tokens)
        assert allowed, f"nothing is allowed after {ids}"
        while True:
            liked = (
                [token for token in odd if token in allowed] or [t for t in allowed if t != 256] or allowed
            )
            token = rng.choice(liked)
            words = veto(matcher, token)
            if words is None:
                break
            allowed = [one for one in allowed if not TokenTable.holds(words, one)]
        assert matcher.accept(token)
        if matcher.terminated:
            break
        ids.append(token)
    return ids


def thoughts(shape: AnswerShape, ids: list[int], tokens: Vocabulary) -> tuple[str, str, list[str]]:
    """The reasoning, the content and the names of the calls in an answer."""
    parser = shape.parser(tokens.special)
    parsed = parse_marked(parser, marked(ids, tokens, parser))
    return parsed.reasoning, parsed.content, [name for name, _ in parsed.calls]


def opened(format: ReasoningFormat, tokens: Vocabulary, thinks: Thinks) -> list[int]:
    """The tokens with which the model opens its reasoning, if it has to."""
    text, ids = format.open if thinks is Thinks.MAYBE else "", []
    while text:
        name = next((name for name in tokens.special if text.startswith(name)), None)
        ids += [tokens.special[name]] if name else text[0].encode()
        text = text.removeprefix(name) if name else text[1:]
    return ids


@every_format
@either
@pytest.mark.parametrize("most", [0, 1, 7])
def test_reasoning_ends_when_its_tokens_are_spent_and_the_schema_holds(format, special, thinks, most):
    tokens = vocabulary(special)
    shape = AnswerShape(format, thinks, content=JSON, limit=most)
    begun = [] if format is QUIET and not most else opened(format, tokens, thinks)  # that may not even begin
    for seed in range(2):
        ids = thinker(begin(shape, special, 300), tokens, seed, begun, 300)
        said, content, _ = thoughts(shape, ids, tokens)
        assert len(said.encode()) <= most + 3, "each token is a byte; a begun character is finished"
        jsonschema.validate(json.loads(content), SCHEMA)


@every_format
def test_thoughts_shorter_than_the_limit_are_as_without_it(format, special):
    tokens = vocabulary(special)
    limited, free = (
        begin(AnswerShape(format, Thinks.OPEN, content=JSON, limit=limit), special) for limit in (6, None)
    )
    for token in b"so far":
        assert allowed_tokens(limited, tokens) == allowed_tokens(free, tokens)
        assert limited.accept(token)
        assert free.accept(token)
    assert allowed_tokens(limited, tokens) != allowed_tokens(free, tokens)


@pytest.mark.parametrize(
    ("format", "tools", "marks"),
    [
        (FORMATS["think"], "hermes", (*SPECIAL["think"], "<tool_call>", "</tool_call>")),
        (FORMATS["think"], "hermes", ()),
        (QUIET, "harmony", (*SPECIAL["harmony"], "<|constrain|>")),
    ],
)
def test_a_call_follows_thoughts_that_were_cut_short(format, tools, marks):
    tokens = vocabulary(marks)
    shape = AnswerShape(
        format, Thinks.OPEN, tool_format(tools), FUNCTIONS, "required", parallel=False, limit=5
    )
    ids = thinker(begin(shape, marks, 500), tokens, 1, [], 500)
    said, content, calls = thoughts(shape, ids, tokens)
    assert len(said) <= 8
    assert content == ""
    assert calls == [calls[0]]


@every_format
def test_free_text_follows_thoughts_that_were_cut_short(format, special):
    tokens = vocabulary(special)
    shape = AnswerShape(format, Thinks.OPEN, limit=4)
    ids = thinker(begin(shape, special, 90), tokens, 2, [], 90)
    said, content, _ = thoughts(shape, ids, tokens)
    assert 0 < len(said) <= 7
    assert len(content) > 10
    assert AnswerShape(format, Thinks.OPEN).spec() is None, "without a limit nothing binds it"


def test_a_family_that_may_think_again_may_not_when_the_limit_is_spent():
    special = SPECIAL["harmony"]
    tokens = vocabulary(special)
    matcher = begin(AnswerShape(FORMATS["harmony"], Thinks.MAYBE, limit=3), special)
    names = {name: tokens.special[name] for name in special}

    def write(*parts):
        for part in parts:
            for token in [names[part]] if part in names else list(part.encode()):
                assert token in allowed_tokens(matcher, tokens), (part, token)
                assert matcher.accept(token)

    write("<|channel|>", "analysis", "<|message|>", "ab", "<|end|>", "<|start|>", "assistant")
    write("<|channel|>", "analysis", "<|message|>", "c")
    assert allowed_tokens(matcher, tokens) == [names["<|end|>"]], "three in all"
    write("<|end|>", "<|start|>", "assistant", "<|channel|>")
    assert ord("a") not in allowed_tokens(matcher, tokens)
    write("commentary", "<|message|>", "I look.", "<|end|>", "<|start|>", "assistant", "<|channel|>")
    assert ord("a") not in allowed_tokens(matcher, tokens)
    write("final", "<|message|>", "<|", "done")


def test_a_tag_in_the_text_of_an_answer_is_no_reasoning():
    shape = AnswerShape(FORMATS["think"], Thinks.MAYBE, limit=0)
    matcher = begin(shape, ())
    for token in b"Write <think> and go on":
        assert token in allowed_tokens(matcher, vocabulary(()))
        assert matcher.accept(token)


def test_a_budget_for_the_answer_below_the_limit_ends_the_reasoning_earlier():
    special = SPECIAL["think"]
    tokens = vocabulary(special)
    shape = AnswerShape(FORMATS["think"], Thinks.OPEN, content=JSON, limit=1000)
    spec = shape.spec()
    assert spec is not None
    shortest = compiler(special).compile(spec).shortest
    ids = thinker(begin(shape, special, shortest + 9), tokens, 3, [], shortest + 9)
    jsonschema.validate(json.loads(thoughts(shape, ids, tokens)[1]), SCHEMA)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(0, 20), st.booleans())
def test_a_fork_and_a_snapshot_are_in_the_state_that_they_say(seed, most, back, tagged):
    special = SPECIAL["think"] if tagged else ()
    tokens = vocabulary(special)
    shape = AnswerShape(FORMATS["think"], Thinks.OPEN, None, (WEATHER,), content=JSON, limit=most)
    ids = thinker(begin(shape, special), tokens, seed, [], 30)
    back = min(back, len(ids))
    matcher, replayed = begin(shape, special), begin(shape, special)
    assert matcher.feed(ids[: len(ids) - back]) == len(ids) - back
    here = matcher.snapshot()
    assert matcher.feed(ids[len(ids) - back :]) == back
    matcher.restore(here)
    assert replayed.feed(ids[: len(ids) - back]) == len(ids) - back
    forked = matcher.fork()
    for token in ids[len(ids) - back :]:
        expected = allowed_tokens(replayed, tokens)
        assert allowed_tokens(matcher, tokens) == expected == allowed_tokens(forked, tokens)
        assert all(one.accept(token) for one in (matcher, replayed, forked))


def test_limits_share_what_their_grammars_compile_to():
    made = GrammarCompiler(vocabulary(()))
    specs = [AnswerShape(FORMATS["think"], Thinks.OPEN, content=JSON, limit=limit).spec() for limit in (3, 9)]
    first, second = (made.compile(spec) for spec in specs if spec is not None)
    assert first._inner is second._inner
    assert made.cache.nbytes > 0
    made.close()
