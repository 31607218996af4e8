"""Random requests, and an engine that is too small for them, both drawn from a seed."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from personae.engine.params import SamplingParams
from personae.engine.plan import MemoryLayout
from personae.engine.sequence import SequenceLog
from personae.evals.bench.masks import SHORT, form
from personae.evals.isolation.fixture import LONGEST, EngineFixture, ObservedStream
from personae.evals.suites.schema_files import SAMPLE, read_schemas
from personae.grammar.bitmask import mask_of
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import compacted

PROMPT, ANSWER = (12, 40, 80), (16, 60, 100)  # the most tokens in a seed
ROOM = 100  # tokens of a bound answer whose budget is not tight
TEXT = "No refund is given for a parcel that was opened, used, worn or washed by whoever sends it back."
SPECS = (
    *(GrammarSpec("json_schema", json.dumps(case.schema), strict=False) for case in read_schemas(SAMPLE)),
    GrammarSpec("json_object"),
    GrammarSpec("choice", json.dumps([TEXT, "Yes, there is a refund."])),
    GrammarSpec("regex", r"(the order|a parcel) [0-9]{3,6} (was|will be) sent( on [a-z]+day)?\."),
    GrammarSpec("lark", 'start: item ("," item)*\nitem: /[a-z]+/ "=" /[0-9]+/'),
)
FORCING = (*SPECS[-3:-1], compacted(GrammarSpec("json_schema", json.dumps(form(3, SHORT)))))
Past = list[tuple[SequenceLog, ObservedStream]]


@dataclass(frozen=True, slots=True)
class IsolationScenario:
    """`clients` sequences at a time on an engine of these sizes, with up to `lookahead` plans in flight. At
    each event a client leaves or the engine is lost with these probabilities."""

    layout: MemoryLayout
    ranks: int
    lookahead: int
    clients: int
    leaves: float
    losses: float


def draw_scene(dice: Random, fixture: EngineFixture) -> IsolationScenario:
    """Memory for hardly more than the longest sequences, and for one adapter to all of them."""
    page_size, slots = dice.choice((1, 4, 16, 32)), dice.randint(3, 16)
    pages = int(-(-LONGEST // page_size) * dice.uniform(1, 1.5))
    batch = dice.randint(slots, slots + dice.choice((4, 40, 400)))
    return IsolationScenario(
        MemoryLayout(pages, page_size, slots, LONGEST, batch),
        ranks=dice.randint(fixture.ranks[-1] // 8, sum(fixture.ranks) // 8) * 8,
        lookahead=dice.randint(1, 3),
        clients=dice.randint(6, 16),
        leaves=dice.choice((0, 0, 0.02)),
        losses=dice.choice((0, 0, 0.002)),
    )


class RandomTraffic:
    """The requests of one seed. Each kind has its own share, so that seeds differ in more than their
    tokens."""

    def __init__(self, dice: Random, fixture: EngineFixture) -> None:
        self._dice, self._fixture = dice, fixture
        self._shares = {kind: dice.choice((0, 0.2, 0.6)) for kind in ("head", "next", "sibling", "bound")}
        self._prompt, self._answer = dice.choice(PROMPT), dice.choice(ANSWER)
        self._heads = [self._tokens(self._prompt) for _ in range(2)]
        self._adapters = [
            None,
            *dice.sample(sorted(fixture.adapters), dice.randint(1, len(fixture.adapters))),
        ]

    def draw(self, id: str, past: Past) -> SequenceLog:
        """A request that may begin like an earlier one, continue its answer, or share its prompt. In the last
        case the earlier answer is its prediction."""
        dice = self._dice
        if past and self._is("sibling"):
            leader, stream = dice.choice(past)
            seed, expected = dice.getrandbits(31), tuple(stream.tokens)
            params = replace(leader.params, seed=seed, prediction=expected)
            return replace(leader, id=id, after=leader.id, params=params)
        adapter, tenant = dice.choice(self._adapters), dice.choice(("one", "two"))
        prompt = self._tokens(dice.randint(1, self._prompt))
        if self._is("head"):
            prompt = (dice.choice(self._heads)[: dice.randint(1, self._prompt)] + prompt)[: self._prompt]
        if past and self._is("next"):
            log, stream = dice.choice(past)
            adapter, tenant = log.adapter, log.tenant
            prompt = (log.tokens + tuple(stream.tokens) + prompt)[: LONGEST - self._answer]
        grammar = dice.choice(dice.choice((SPECS, FORCING))) if self._is("bound") else None
        budget = dice.randint(1, self._answer)
        if grammar is not None:
            bound = self._fixture.bound(grammar)
            budget += (bound.shortest if bound else 0) + dice.choice((0, ROOM))
            prompt = prompt[: max(LONGEST - budget, 1)]
            grammar = grammar if bound and len(prompt) + bound.shortest < LONGEST else None
        return SequenceLog(
            id=id,
            tokens=prompt,
            prompt_length=len(prompt),
            params=self._params(budget, bound=grammar is not None),
            eos=self._fixture.eos,
            adapter=adapter,
            grammar=grammar,
            tenant=tenant,
            salt=tenant.encode(),
            adapter_start=dice.randrange(len(prompt)) if adapter and dice.random() < 0.1 else 0,
            priority=dice.choice((0, 0, -1, 1)),
            weight=dice.choice((1.0, 3.0)),
            background=dice.random() < 0.2,
        )

    def _is(self, kind: str) -> bool:
        return self._dice.random() < self._shares[kind]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.choices(range(4, self._fixture.vocab_size), k=count))

    def _params(self, budget: int, *, bound: bool) -> SamplingParams:
        dice, size = self._dice, self._fixture.vocab_size
        odd: dict[str, Any] = {
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.02,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
            "logit_bias": dict.fromkeys(dice.sample(range(size), 5), 4.0),
            "min_tokens": dice.randint(0, budget),
            "stop_token_ids": tuple(dice.sample(range(size), 60)),
            "prompt_logprobs": 1,
        }
        if not bound:
            odd["allowed_tokens"] = mask_of(np.array(dice.choices((True, False), k=size))).tobytes()
            odd["bad_words_token_ids"] = tuple(tuple(dice.choices(range(size), k=2)) for _ in range(200))
        return SamplingParams(
            max_tokens=budget,
            seed=dice.getrandbits(31),
            temperature=dice.choice((0.0, 0.7, 1.0, 1.5)),
            ignore_eos=dice.random() < 0.8,
            logprobs=dice.choice((None, None, None, 0, 3)),
            jump_forward=dice.choice((True, True, False)),
            **{name: value for name, value in odd.items() if dice.random() < (0.05 if bound else 0.15)},
        )
