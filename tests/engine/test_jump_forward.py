"""Forced text is appended in the tokenizer's own tokens, and answers are what they would have been."""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
import tiny_tokenizers
from bundled import CHOICE, LONG, OBJECT, PROMPT, SCHEMA, compiler, harness, tokenizer, vocabulary
from engine_harness import EngineHarness, Played
from hypothesis import assume, given
from hypothesis import strategies as st
from recorded_graphs import RecordedGraphs

from personae.engine.speculation.forced import Retokenizer
from personae.engine.tokens import Tokenizer
from personae.engine.worker.buckets import ROW_TOKENS
from personae.grammar.backend import BoundGrammar
from personae.grammar.matcher import Matcher
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary
from personae.kernels import registry


def answer(made: EngineHarness, grammar: GrammarSpec, **changes: Any) -> Played:
    settings = {"max_tokens": 600, "jump_forward": True, "eos": tokenizer().eos_ids, **changes}
    return made.play([made.log("a", PROMPT, grammar=grammar, **settings)])["a"]


def test_forced_text_is_computed_by_graphs_and_answers_are_those_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, capture = harness(), RecordedGraphs()
    monkeypatch.setattr(registry, "operators", capture.operators)
    graphs = harness(capture=capture)
    several, without = [0], list[int]()
    run = graphs.engine.worker.graphs.run

    def running(tokens, positions, batch, work):  # type: ignore[no-untyped-def]  # as in DecodeGraphs
        found = run(tokens, positions, batch, work)
        several[0] += found is not None and batch.max_query > 1
        if found is None:
            without.append(batch.max_query)
        return found

    graphs.engine.worker.graphs.run = running
    assert load(graphs) == load(plain)
    assert graphs.steps == plain.steps
    assert several[0] > 3
    assert min(without) > ROW_TOKENS
    assert graphs.engine.worker.graphs._capture is not None, "graphs were given up"


def text_of(played: Played) -> str:
    return tokenizer().decode(played.tokens)


def test_forced_text_takes_a_handful_of_steps_and_has_the_tokenizers_tokens() -> None:
    made = harness()
    bias = {tokenizer().encode("No", False)[0]: 100.0}
    played = answer(made, CHOICE, logit_bias=bias)
    assert text_of(played) == LONG
    expected = tokenizer().encode(LONG, False)
    assert len(expected) > 40
    assert played.tokens[: len(expected) - 1] == expected[:-1]
    assert made.steps < 10


def test_an_automaton_forces_what_all_its_answers_share() -> None:
    yes = tokenizer().encode("Yes", False)
    for grammar in (CHOICE, GrammarSpec("regex", "(Yes|No), (it is|it was) as you (say|said)")):
        matcher = compiler().compile(grammar).matcher(600)
        assert matcher.forced() == b""
        assert matcher.feed(yes) == len(yes)
        assert matcher.forced() == (b", there is a refund." if grammar is CHOICE else b", it ")


def test_without_it_each_token_takes_a_step() -> None:
    made = harness()
    played = answer(made, CHOICE, jump_forward=False)
    assert made.steps >= len(played.tokens)


REQUESTS: list[dict[str, Any]] = [
    {"grammar": grammar, "seed": seed, "temperature": 1.0, "max_tokens": budget}
    for seed, budget in enumerate((160, 110, 160, 100))
    for grammar in (OBJECT, CHOICE, None)
]


def load(made: EngineHarness) -> dict[str, Played]:
    logs = []
    for number, changes in enumerate(REQUESTS):
        jump = {"jump_forward": True} if changes["grammar"] else {"max_tokens": 30}
        logs.append(made.log(f"{number}", (*PROMPT, number), **changes | jump, eos=tokenizer().eos_ids))
    return made.play(logs)


@cache
def alone() -> dict[str, Played]:
    return load(harness(max_seqs=1, lookahead=1))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"lookahead": 1},
        {"lookahead": 3},
        {"runs_ahead": True},
        {"max_seqs": 4, "max_batch_tokens": 6},
        {"page_size": 4, "num_pages": 60, "max_model_len": 200},
        {"page_size": 4, "num_pages": 60, "max_model_len": 200, "runs_ahead": True, "lookahead": 3},
    ],
    ids=str,
)
def test_answers_are_the_same_in_any_batch_and_after_preemptions(sizes: dict[str, Any]) -> None:
    made = harness(**sizes)
    played = load(made)
    for id, one in alone().items():
        assert (played[id].tokens, played[id].finish) == (one.tokens, one.finish)
        if REQUESTS[int(id)]["grammar"] is OBJECT:
            jsonschema.validate(json.loads(text_of(one)), SCHEMA)
    if "num_pages" in sizes:
        assert made.scheduler.counters.preemptions


@pytest.mark.parametrize("grammar", [OBJECT, CHOICE])
def test_an_answer_goes_on_from_wherever_it_was_told(grammar: GrammarSpec) -> None:
    made = harness()
    settings: dict[str, Any] = {"seed": 3, "temperature": 1.0}
    whole = answer(made, grammar, **settings)
    assert len(whole.delivered) < len(whole.tokens)
    for count in whole.delivered[:-1]:
        log = made.log("a", PROMPT, grammar=grammar, max_tokens=600, jump_forward=True, **settings)
        log = type(log)(**{
            **{name: getattr(log, name) for name in log.__struct_fields__},
            "tokens": (*PROMPT, *whole.tokens[:count]), "eos": tokenizer().eos_ids,
        })  # fmt: skip
        assert made.play([log])["a"].tokens == whole.tokens[count:]


def test_an_answer_is_whole_with_any_budget() -> None:
    made = harness()
    shortest = made.grammars[OBJECT].shortest
    for budget in range(shortest, shortest + 40):
        played = answer(made, OBJECT, max_tokens=budget, seed=budget, temperature=1.0)
        assert len(played.tokens) <= budget
        jsonschema.validate(json.loads(text_of(played)), SCHEMA)


def test_who_asks_for_logprobs_or_has_penalties_gets_the_models_own_tokens() -> None:
    for changes in ({"logprobs": 0}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}):
        on, off = (answer(harness(), OBJECT, **changes, jump_forward=jump) for jump in (True, False))
        assert on == off
        assert on.delivered == [*range(1, len(on.tokens) + 1)]


def test_a_stop_token_within_forced_text_ends_the_answer_there() -> None:
    tokens = tokenizer().encode(LONG, False)
    bias = {tokens[0]: 100.0}
    played = answer(harness(), CHOICE, logit_bias=bias, stop_token_ids=(tokens[9],))
    assert (played.tokens, played.finish) == (tokens[: tokens.index(tokens[9]) + 1], "stop")


def test_a_special_token_that_is_forced_harms_nothing() -> None:
    special = vocabulary().special["<|im_start|>"]
    grammar = GrammarSpec(
        "lark", f'start: /(?i:{LONG.split()[0]})/ " refund is given" <[{special}]> " at all"'
    )
    made = harness()
    made.grammars[grammar] = compiler().compile(grammar)
    played = answer(made, grammar)
    assert (played.error, played.finish) == (None, "stop")
    text = tokenizer().decode(played.tokens, skip_special_tokens=False)
    assert text.lower().startswith("no refund is given<|im_start|> at all")


def test_nothing_is_forced_after_the_budget() -> None:
    class NeverEnding(BoundGrammar):
        """The grammar without a budget of its own, so that nothing but `max_tokens` ends the answer."""

        shortest, nbytes = 1, 0

        def matcher(self, budget: int | None = None) -> Matcher:
            return compiled.matcher()

    grammar = GrammarSpec("lark", f'start: "{LONG}"')
    compiled = compiler().compile_here(grammar)
    for budget in range(1, 12):
        made = harness()
        made.grammars[grammar] = NeverEnding()
        assert len(answer(made, grammar, max_tokens=budget).tokens) == budget


@cache
def spelled(kind: str) -> tuple[Retokenizer, Tokenizer, Vocabulary]:
    if kind == "demo":
        return Retokenizer(tokenizer(), vocabulary().tokens), tokenizer(), vocabulary()
    made = Tokenizer(tiny_tokenizers.make(kind))
    words = Vocabulary.from_tokenizer_json(made.backend.to_str(), made.vocab_size, (2,))
    return Retokenizer(made, words.tokens), made, words


PIECES = [
    '{"',
    '": "',
    '", "',
    '"',
    "name",
    "fox",
    " the",
    "Köln",
    "日本",
    " ",
    "  ",
    "\n",
    "1",
    "0",
    "}",
    "🙂",
]


@pytest.mark.parametrize("kind", ["demo", *tiny_tokenizers.KINDS])
@given(
    before=st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    after=st.lists(st.sampled_from(PIECES), max_size=4).map("".join),
    cut=st.integers(0, 3),
)
def test_spelled_text_has_the_tokens_of_the_whole(
    kind: str, before: str, text: str, after: str, cut: int
) -> None:
    retokenizer, tokenizer, vocabulary = spelled(kind)
    said = text.encode()
    found = retokenizer(tokenizer.encode(before, False)[-8:], said[: max(len(said) - cut, 0)])
    if found:
        whole = tokenizer.encode(before + text + after, False)
        rests = {b"".join(vocabulary.tokens[token] for token in whole[at:]): at for at in range(len(whole))}
        assume((text + after).encode() in rests)  # nothing in it is unknown to the tokenizer
        at = rests[(text + after).encode()]
        assert whole[at : at + len(found)] == found
